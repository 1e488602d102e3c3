"""The contract of the Pallas backend: all that it accepts, against the oracle.

Asked twice. Anywhere of the Triton-lowered kernels in interpret mode, on some of the table (a case
takes seconds to compile, so a case is one test); and on a GPU of all of it, with the blocks, the
lift and the lowering that users get: `pytest -m gpu -n 8 -p no:benchmark`. What runs inside
interpret mode, and what a GPU would be given, are in this file; hopper.py is in test_hopper.py.
"""

import contextlib
import functools
import re
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import cases
import oracle
import regard
from absent_gpu import absent_gpus
from cases import MASKS, Case, ScoreRow, Sizes, interpreted_kernels, tiered
from contract import (
    breaking_one_value_shows,
    empty_rows_are_exactly_zero,
    equals_the_oracle,
    padding_reaches_nothing,
    padding_reaches_nothing_alone,
)
from problem import as_arguments, assert_close, draw, error
from regard import placement
from regard.attend import _pool
from regard.placement import Device
from regard.pool.kernels import padding
from regard.pool.kernels.decode_pass import MOST_ROWS
from regard.pool.pallas import HOPPER, MOSAIC_SINCE, interpreted
from regard.score.contract import Lift, inner_products

pytestmark = [pytest.mark.sampled(2), pytest.mark.usefixtures("quick_compilation")]

WORST = "causal window and lengths per query"
TRITON, MOSAIC = "__gpu$xla.gpu.triton", "mosaic_gpu"
MOSAIC_HERE = jax.__version_info__ >= MOSAIC_SINCE


def _dot(width):
    return ScoreRow(regard.Dot, oracle.Dot, (width, width), lambda normal, N: {})


def _additive(hidden):
    """Queries and keys projected already, and scores of order one."""
    return ScoreRow(
        cases.projected_additive,
        oracle.Additive,
        (hidden, hidden),
        lambda normal, N: {"vector": normal(hidden) / np.sqrt(hidden) * 2},
        True,
    )


# Rows of this file only: widths that matter to kernels alone.
SCORES = {
    "dot of width 1": _dot(1),
    "dot of width 13": _dot(13),
    "dot of width 64": _dot(64),
    "dot of width 128": _dot(128),
    "dot of width 200": _dot(200),
    "additive of 16 units": _additive(16),  # the fewest that make_features has a kernel for
    "additive of 64 units": _additive(64),
}
EXACT_LIFTS = ("scaled dot", "gaussian", "gaussian per head", "bilinear", "bilinear per head")
SERIES = ("additive", "additive per head", "additive, projected")
DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(autouse=True)
def _rows_of_this_file(monkeypatch):
    for name, row in SCORES.items():
        monkeypatch.setitem(cases.SCORES, name, row)


def the_contract_holds(problem):
    assert_no_error_is_over(problem)
    equals_the_oracle(problem)
    empty_rows_are_exactly_zero(problem)
    padding_reaches_nothing(problem)
    if "dot" in problem.case.score:  # a call that is not differentiated zeroes only values there
        padding_reaches_nothing_alone(problem)
    breaking_one_value_shows(problem)
    if cases.SCORES[problem.case.score].approximate:
        far_data_take_the_definition(problem)


def assert_no_error_is_over(problem):
    """What equals_the_oracle says of the first, said of all at once: on a GPU far away, which
    gradients are wrong is half of why.
    """
    (out, gradients), expected = problem.answer, problem.gradients
    found = {"out": error(out, problem.pooled.out)}
    found |= {name: error(gradients[name], slope) for name, slope in expected.items()}
    over = {name: f"{e:.1e}" for name, e in found.items() if not e <= problem.tolerance(name)}
    assert not over, f"errors over their tolerance, of {list(found)}: {over}"


def far_data_take_the_definition(problem):
    """Out of the lift's range, in the program that lifts where it can: exact tanh."""
    far = {"query": problem.inputs["query"] * 16}  # a power of two: still of its dtype
    tensors = [{**problem.inputs, **far}[name] for name in ("query", "key", "value")]
    out, gradients = problem.run(far)
    expected = oracle.attend(*tensors, **problem._oracle_arguments)
    assert_close(out, expected.out, problem.tolerance("out"), "far out")
    slopes = oracle.gradients(problem.cotangent, *tensors, **problem._oracle_arguments)
    assert_close(gradients["value"], slopes["value"], problem.tolerance("value"), "far value")


# ---------------------------------------------------------------------------------------------
# Anywhere: in interpret mode.

# Soft caps, sinks and biases of every kind of shape, with narrow features, wide ones and tanh.
TERMS = [
    Case(softcap=1.5),
    Case(softcap=0.7, dtype="bfloat16", score="gaussian", mask="causal and lengths"),
    Case(softcap=0.7, score="gaussian per head"),  # a constant per query that the cap can see
    Case(bias=(19, 37), mask="causal and lengths"),
    Case(bias=(2, 4, 19, 37), dtype="bfloat16", mask="everything"),
    Case(bias=(4, 1, 37), softcap=1.0, dtype="bfloat16", mask="segments"),
    Case(bias=(2, 1, 19, 1), sink=True, softcap=2.0),
    Case(bias=(4, 19, 37), softcap=0.7, score="additive, exact"),
    Case(bias=(1, 1, 19, 37), score="additive", dtype="bfloat16"),
    Case(sink=True, dtype="bfloat16", mask="no keys at all"),
    # Values wider than a kernel pools at a time.
    Case(sizes=Sizes(B=1, N=2, K=1, V=300), mask="causal"),
    Case(sizes=Sizes(B=1, N=2, K=1, V=530), dtype="bfloat16", mask="one length", sink=True),
    Case(sizes=Sizes(B=1, N=1, K=1, V=257), mask="causal", score="additive, exact"),
]

# Numbers per distance, in every kernel and beside every other term.
TABLE, TWO_SIDED = "dot + c relative bias per head", "gaussian + two-sided alibi per head"
BY_DISTANCE = [
    Case(score=TABLE, mask=WORST),
    Case(score=TABLE, mask="everything", dtype="bfloat16", softcap=0.7),
    Case(score=TWO_SIDED, mask="causal and lengths", sizes=Sizes(T=23, S=11), softcap=1.5),
    Case(score=TWO_SIDED, dtype="bfloat16", mask="none", sizes=Sizes(1, 150, 2, 1, 170, 16)),
    Case(score=TABLE, dtype="float16", bias=(2, 4, 19, 37), sink=True, mask="segments"),
    Case(score=TWO_SIDED, sizes=Sizes(B=1, N=2, K=1, V=300), mask="one length"),
    Case(score=TABLE, sizes=Sizes(T=1), mask="lengths per head", bias=(4, 1, 37)),
]

INTERPRETED = (
    [Case(mask=mask) for mask in MASKS]
    + [Case(score=score) for score in (*EXACT_LIFTS, *SERIES[:2], "additive, exact")]
    + [Case(dtype=dtype) for dtype in ("bfloat16", "float16", "float32, bfloat16, float16")]
    + [Case(score="gaussian", dtype="bfloat16", mask=WORST)]
    # 16-bit features that are narrow have a backward pass of their own.
    + [
        Case(mask=mask, dtype="bfloat16")
        for mask in (
            "none",
            "window",
            "segments",
            "boolean with an empty row",
            "everything",
        )
    ]
    # Tiles without a mask before, between and after those with one.
    + [
        Case(mask=mask, dtype="bfloat16", sizes=Sizes(B=1, T=150, N=2, K=K, S=170, V=16))
        for mask, K in (("causal", 1), ("window to the left", 2), ("lengths per example", 1))
    ]
    + [Case(score="additive of 16 units", dtype="bfloat16")]
    + TERMS
    + BY_DISTANCE
    # More queries than keys: aligned at the end, the first queries see nothing.
    + [Case(mask="causal", sizes=Sizes(T=23, S=11))]
    + [
        Case(mask="causal and lengths", sizes=sizes)
        for sizes in (
            Sizes(B=1, T=1, N=1, K=1, S=1, V=1),
            Sizes(T=1, V=1),
            Sizes(S=1),
            Sizes(B=3, T=31, N=2, K=1, S=13, V=7),
            Sizes(B=1, T=16, N=1, K=1, S=32, V=16),
        )
    ]
    + [Case(score="dot of width 1"), Case(score="dot of width 13", mask=WORST)]
    + [Case(score="additive, exact", dtype="float16", sizes=Sizes(T=1, V=1), mask="causal")]
    # One key head for all, as many as queries, ranks 3 and 2.
    + [Case(mask=WORST, sizes=Sizes(N=4, K=1)), Case(mask=WORST, sizes=Sizes(N=3, K=3))]
    + [Case(mask=WORST, sizes=Sizes(N=None, K=None))]
    + [Case(mask="segments", sizes=Sizes(B=None, N=None, K=None))]
)


# Exact additive scores held all at once.
SHORT = [
    Case(score="additive, exact", **more)
    for more in (
        dict(mask=WORST),
        dict(mask="everything", dtype="bfloat16"),
        dict(mask="none", dtype="float16", bias=(4, 19, 37), softcap=0.7),
        dict(mask="segments", bias=(2, 1, 1, 37), sink=True),
        dict(mask="no keys at all", dtype="bfloat16"),
        dict(mask="causal and lengths", sizes=Sizes(B=3, T=31, N=2, K=1, S=13, V=270)),
        dict(mask="causal", sizes=Sizes(T=1, V=1)),
        dict(mask="one length", sizes=Sizes(B=None, N=None, K=None)),
    )
] + [Case(score="additive of 64 units", mask="lengths per example", dtype="bfloat16")]


@pytest.mark.parametrize(
    "case",
    tiered(replace(case, backend="pallas, interpreted") for case in INTERPRETED)
    + tiered(replace(case, backend="pallas, short, interpreted") for case in SHORT),
)
def test_in_interpret_mode(case):
    the_contract_holds(draw(case))


@pytest.mark.parametrize("sizes", [Sizes(S=0), Sizes(T=0), Sizes(B=0)], ids=str)
def test_nothing_to_do(sizes):
    problem = draw(Case("pallas, interpreted", mask="causal and lengths", sizes=sizes))
    equals_the_oracle(problem)
    empty_rows_are_exactly_zero(problem)


# ---------------------------------------------------------------------------------------------
# On a GPU: the whole table, and the kernels have to be in the compiled program.


def _lifted(**others):
    """A case that is long enough for the additive lift to be taken, and for a GPU to take it."""
    return Case(sizes=Sizes(T=203, N=2, K=1, S=211), **others)


LONG = (
    [
        Case(score="dot of width 64", mask=mask, dtype=dtype, sizes=Sizes(1, 777, 2, 1, 777, 64))
        for mask, dtype in (("none", "bfloat16"), ("causal", "float16"), ("segments", "bfloat16"))
    ]
    + [
        Case(
            score="dot of width 128",
            mask="lengths per query",
            dtype=dtype,
            sizes=Sizes(2, 300, 2, 1, 1000, 128),
        )
        for dtype in ("bfloat16", "float32")
    ]
    + [
        Case(
            score="additive of 64 units",
            mask=mask,
            dtype="bfloat16",
            sizes=Sizes(2, 257, None, None, 700, 64),
        )
        for mask in ("lengths per example", "none", "causal")
    ]
    # Whole blocks, and no mask at all.
    + [
        Case(score=score, mask="none", dtype=dtype, sizes=Sizes(1, 256, 2, 1, 512, V))
        for dtype in ("bfloat16", "float16")
        for score, V in (
            ("dot of width 64", 64),
            ("dot of width 128", 128),
            ("dot of width 200", 64),
            ("dot of width 64", 256),
            ("gaussian", 256),
            ("additive of 16 units", 128),
            ("additive of 64 units", 256),
        )
    ]
)

ON_A_GPU = (
    [Case(mask=mask, dtype=dtype) for mask in MASKS for dtype in ("float32", "bfloat16")]
    + [_lifted(score="additive", mask=mask, dtype="bfloat16") for mask in MASKS]
    + [Case(score=score, dtype=dtype) for score in EXACT_LIFTS for dtype in DTYPES]
    + [Case(score=score, mask=WORST, dtype="bfloat16") for score in EXACT_LIFTS]
    + [
        _lifted(score=score, dtype=dtype)
        for score in (*SERIES, "additive, exact", "additive of 16 units")
        for dtype in DTYPES
    ]
    + [
        _lifted(score="additive, exact", mask=mask, dtype=dtype)
        for mask, dtype in ((WORST, "float32"), ("everything", "bfloat16"), ("none", "float32"))
    ]
    + [Case(dtype=dtype) for dtype in ("float16", "float32, bfloat16, float16")]
    + [
        Case(mask=mask, dtype=dtype, sizes=Sizes(T=23, S=11))
        for mask in ("causal", "causal from the start", "window")
        for dtype in ("float32", "bfloat16")
    ]
    + [
        Case(mask="causal and lengths", score=score, dtype=dtype, sizes=sizes)
        for score, dtype in (("dot", "float32"), ("dot", "bfloat16"))
        for sizes in (
            Sizes(B=1, T=1, N=1, K=1, S=1, V=1),
            Sizes(T=1),
            Sizes(S=1),
            Sizes(V=1),
            Sizes(B=3, T=31, N=2, K=1, S=13, V=7),
            Sizes(B=1, T=128, S=256, V=64),
        )
    ]
    + [
        Case(score="additive, exact", mask=mask, sizes=sizes)
        for mask, sizes in (
            ("one length", Sizes(B=3, T=1, N=2, K=1, S=30011, V=3)),
            ("causal and lengths", Sizes(B=1, T=30011, N=4, K=2, S=2, V=1)),
            ("lengths per query", Sizes(B=1, T=256, N=2, K=2, S=512, V=64)),
        )
    ]
    + [
        Case(score=score, dtype=dtype, mask=WORST)
        for score in ("dot of width 1", "dot of width 13", "dot of width 200")
        for dtype in ("float32", "bfloat16")
    ]
    + [
        Case(mask=WORST, dtype="bfloat16", sizes=sizes)
        for sizes in (Sizes(N=4, K=1), Sizes(N=3, K=3), Sizes(N=None, K=None))
    ]
    + [
        Case(mask=mask, dtype="bfloat16", sizes=Sizes(B=None, N=None, K=None))
        for mask in ("one length", "segments", "boolean", "lengths per query")
    ]
    + LONG
    + TERMS
    + BY_DISTANCE
)


def custom_calls(text):
    """The targets of a compiled or lowered program's custom calls."""
    return re.findall(r'custom_call_target="([^"]+)"|custom_call @([\w$.]+)', text)


def kernels(text):
    """Which lowerings' kernels are in a program."""
    targets = ["".join(pair) for pair in custom_calls(text)]
    return {kind for kind in (TRITON, MOSAIC) if any(t.startswith(kind) for t in targets)}


def expected_kernels(case, hopper):
    """Triton's, which alone has a backward pass; and Mosaic's, for a 16-bit forward pass over
    features with no mask beyond ranges and no other term, of more than a few queries.
    """
    sizes = case.sizes
    if (sizes.N or 1) // (sizes.K or 1) * sizes.T <= MOST_ROWS:
        return {TRITON}
    ranges = not {"segments", "boolean"} & draw(case).facts.keys()
    features = case.score not in ("additive, exact", TABLE, TWO_SIDED)
    features = features and case.softcap is None and case.bias is None
    half = case.dtype in ("bfloat16", "float16")
    return {TRITON} | (
        {MOSAIC} if hopper and MOSAIC_HERE and ranges and features and half else set()
    )


def assert_the_kernels_ran(problem):
    arguments = {**problem.as_arguments(problem.inputs), **as_arguments(problem.facts)}
    said = regard.explain(**arguments, implementation="pallas")
    assert said.startswith("pallas runs: asked for; ")
    assert "interpreted" not in said
    hopper = jax.devices()[0].compute_capability == "9.0"
    assert kernels(problem.compiled_text()) == expected_kernels(problem.case, hopper)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    dict.fromkeys(replace(case, backend="pallas") for case in ON_A_GPU + SHORT)
    | dict.fromkeys(
        replace(case, backend="pallas in tiles")
        for case in ON_A_GPU
        if case.score == "additive, exact"
    ),
    ids=str,
)
def test_on_a_gpu(case):
    problem = draw(case)
    the_contract_holds(problem)
    assert_the_kernels_ran(problem)
    out, gradients = problem.run()
    np.testing.assert_array_equal(out, problem.answer[0], err_msg="the same bits every time")
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient, problem.answer[1][name], err_msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("T", "S", "mask", "dtype"),
    [(700, 700, regard.Mask.causal(), "float32"), (512, 600, None, "bfloat16")],
)
def test_none_picks_pallas(T, S, mask, dtype):
    """Without a name: float32, and lengths per query, which cuDNN does not take."""
    normal = functools.partial(jax.random.normal, jax.random.key(0), dtype=dtype)
    arrays = [normal((2, n, 2, 64)) for n in (T, S, S)]
    lens = None if mask is not None else jnp.arange(2 * T).reshape(2, T) % S
    assert regard.explain(*arrays, valid_lens=lens, mask=mask).startswith("pallas runs: ")
    attend = jax.jit(functools.partial(regard.attend, mask=mask))
    assert kernels(attend.lower(*arrays, valid_lens=lens).compile().as_text())


# ---------------------------------------------------------------------------------------------
# In interpret mode anywhere, and on a GPU as it is.

both = pytest.mark.parametrize(
    "engine", ["pallas, interpreted", pytest.param("pallas", marks=pytest.mark.gpu)]
)


def compiled_for(engine, function, *args):
    """function(*args), jitted; on a GPU only if a kernel is in the program."""
    with cases.CHOOSY[engine].tiling():
        program = jax.jit(function)
        result = program(*args)
        if engine == "pallas":
            assert kernels(program.lower(*args).compile().as_text())
    return result


def with_gradients(arguments, masks, cotangent, **keywords):
    """Out and the gradients of the arguments."""

    def pool(arguments):
        return regard.attend(**arguments, **masks, implementation="pallas", **keywords)

    out, pull = jax.vjp(pool, arguments)
    return out, pull(cotangent)[0]


def arrays_of(problem):
    cotangent = jnp.asarray(problem.cotangent, problem.dtypes["out"])
    return problem.as_arguments(problem.inputs), as_arguments(problem.facts), cotangent


RATE = 0.25


def dropped_weights(engine, rng, shape):
    """Weights of 1/S after dropout: with the identity as value, the output is the weights."""
    B, N, T, S = shape
    query, key = jnp.zeros((B, T, N, 1), jnp.float32), jnp.zeros((B, S, 1, 1), jnp.float32)
    value = jnp.broadcast_to(jnp.eye(S, dtype=jnp.float32)[None, :, None, :], (B, S, 1, S))
    drop = functools.partial(regard.attend, dropout_rate=RATE, dropout_rng=rng)
    if engine == "reference":
        out = drop(query, key, value, implementation="reference")
    else:
        pool = functools.partial(drop, implementation="pallas")
        out = compiled_for(engine, pool, query, key, value)
    return np.asarray(out).swapaxes(1, 2)  # [B, N, T, S]


@both
def test_dropout_keeps_what_the_reference_keeps(engine):
    rng, shape = jax.random.key(3), (2, 2, 19, 37)
    found, expected = (dropped_weights(who, rng, shape) for who in (engine, "reference"))
    assert 0.2 < np.mean(expected == 0) < 0.3
    np.testing.assert_array_equal(found > 0, expected > 0)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@contextlib.contextmanager
def stripes_of_one_block():
    """The backward pass takes one block of queries at a time."""
    _pool.clear_cache()  # what is in it was traced with another number
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(padding, "STRIPE_BYTES", 1)
        try:
            yield
        finally:
            _pool.clear_cache()


# Blocks have 16 queries in interpret mode, and 64 or 128 on a GPU.
STRIPED = Sizes(B=1, T=300, N=2, K=1, S=230)


@both
def test_stripes_equal_one_stripe(engine):
    problem = draw(Case(engine, mask="everything", sizes=STRIPED))
    arrays = arrays_of(problem)
    out, at_once = compiled_for(engine, with_gradients, *arrays)
    with stripes_of_one_block():
        again, found = compiled_for(engine, with_gradients, *arrays)
    np.testing.assert_array_equal(again, out)
    for name in ("query", "key", "value"):
        assert_close(found[name], problem.gradients[name], problem.tolerance(name), name)
        assert_close(found[name], at_once[name], 1e-6, name)


@both
@pytest.mark.parametrize(
    ("score", "mask", "dtype"),
    [
        ("dot", "causal", "float32"),
        ("dot", "causal", "bfloat16"),
        ("additive, exact", "lengths per query", "float32"),
        (TABLE, "lengths per query", "float32"),
    ],
)
def test_gradients_with_dropout_in_stripes(score, mask, dtype, engine):
    """A stripe knows which rows it has: against the oracle, given which weights were kept. 16 bits
    need no stripes.
    """
    case = Case(engine, score=score, mask=mask, dtype=dtype, sizes=STRIPED)
    problem, rng = draw(case), jax.random.key(5)
    drop = functools.partial(with_gradients, dropout_rate=RATE, dropout_rng=rng)
    with stripes_of_one_block():
        out, found = compiled_for(engine, drop, *arrays_of(problem))
    tensors = [problem.inputs[name] for name in ("query", "key", "value")]
    keep = dropped_weights("reference", rng, problem.shape) > 0
    told = {**problem._oracle_arguments, "keep": keep, "rate": RATE}
    assert_close(out, oracle.attend(*tensors, **told).out, problem.tolerance("out"), "out")
    for name, slope in oracle.gradients(problem.cotangent, *tensors, **told).items():
        got = found[name] if name in found else cases.SCORES[score].read(found["score"], name)
        assert_close(got, slope, problem.tolerance(name), f"gradient of {name}")


@both
def test_returned_weights_change_nothing(engine):
    problem = draw(Case(engine, mask=WORST, dtype="bfloat16"))
    arguments, masks, _ = arrays_of(problem)

    def look(arguments, masks, flag):
        return regard.attend(**arguments, **masks, implementation="pallas", return_weights=flag)

    plain, (out, weights) = (
        compiled_for(engine, functools.partial(look, flag=flag), arguments, masks)
        for flag in (False, True)
    )
    np.testing.assert_array_equal(out, plain)
    assert weights.dtype == jnp.float32
    assert_close(weights, problem.pooled.weights, 2**-20, "weights")
    np.testing.assert_array_equal(np.asarray(weights)[~problem.may], 0)


@both
def test_vmap_is_a_loop(engine):
    """Two problems with lengths of their own, mapped, against the oracle; on a GPU in 16 bits,
    for hopper.py's sake.
    """
    dtype = "float32" if engine != "pallas" else "bfloat16"
    problems = [draw(Case(engine, dtype=dtype, seed=seed)) for seed in range(2)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(arrays_of, problems))
    outs, found = compiled_for(engine, jax.vmap(with_gradients), *stacked)
    for i, problem in enumerate(problems):
        assert_close(outs[i], problem.pooled.out, problem.tolerance("out"), f"out of {i}")
        for name in ("query", "key", "value"):
            assert_close(
                found[name][i], problem.gradients[name], problem.tolerance(name), f"{name} of {i}"
            )


@both
def test_vmap_over_the_value_only(engine):
    problem = draw(Case(engine, mask="causal and lengths"))
    arguments, masks, _ = arrays_of(problem)
    value = arguments.pop("value")

    def pool(value, arguments, masks):
        return regard.attend(**arguments, **masks, value=value, implementation="pallas")

    mapped = jax.vmap(pool, in_axes=(0, None, None))
    values = jnp.stack([value, jnp.flip(value, axis=1)])
    outs = compiled_for(engine, mapped, values, arguments, masks)
    for out, value in zip(
        outs, (problem.inputs["value"], problem.inputs["value"][:, ::-1]), strict=True
    ):
        expected = np.einsum("bnts,bsnv->btnv", problem.pooled.weights, np.repeat(value, 2, axis=2))
        assert_close(out, expected, problem.tolerance("out"), "out")


@both
def test_the_flag_tells_whether_the_lift_ran(engine):
    problem = draw(_lifted(backend=engine, score="additive", dtype="bfloat16"))
    arguments, masks, _ = arrays_of(problem)

    def flag(factor, arguments, masks):
        query = arguments["query"] * factor
        given = {**arguments, "query": query, **masks}
        return regard.attend(**given, implementation="pallas", return_lifted=True)[1]

    with cases.CHOOSY[engine].tiling():
        program = jax.jit(flag)
        assert program(jnp.bfloat16(1), arguments, masks)
        assert not program(jnp.bfloat16(16), arguments, masks)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shifted(regard.Score):
    """q.k plus the same number for every key: weights that are the dot product's."""

    shift: jax.Array

    def scores(self, query, key):
        return inner_products(query, key) + self.shift

    def lift(self, query, key, *, visible=None):
        return Lift(query, key, jnp.broadcast_to(self.shift, key.shape[:-1]))


@both
@pytest.mark.parametrize("shift", [200.0, -200.0])
def test_queries_that_are_padding_weigh_nothing(engine, shift):
    """T = 19 is padded to whole blocks. Their scores are the key bias alone, 200 here: as weights
    that would be inf, and times their cotangent, 0, NaN.
    """
    problem = draw(Case(engine, mask="causal"))
    arguments, masks, cotangent = arrays_of(problem)
    arguments["score"] = Shifted(jnp.float32(shift))
    arguments["query"] = arguments["query"] * jnp.float32(8**-0.5)  # as Dot scales, width 8
    out, found = compiled_for(engine, with_gradients, arguments, masks, cotangent)
    # A score of 200 is known to 2^-17.
    assert_close(out, problem.pooled.out, 1e-4, "out")
    for name, factor in (("query", 8**0.5), ("key", 1.0), ("value", 1.0)):
        assert_close(found[name], problem.gradients[name] * factor, 1e-4, name)


@both
def test_far_scores_do_not_overflow(engine):
    """Scores of +-1e4: exp would overflow float32 without the running maximum."""
    problem = draw(Case(engine, mask="causal and lengths"))
    far = {
        "query": np.round(problem.inputs["query"] * 256) / 16,
        "key": np.round(problem.inputs["key"] * 256) / 4,
    }
    out, gradients = problem.run(far)
    assert all(np.isfinite(gradients[name]).all() for name in ("query", "key", "value"))
    expected = oracle.attend(
        far["query"], far["key"], problem.inputs["value"], score=oracle.Dot(), may=problem.may
    )
    assert_close(out, expected.out, 5e-3, "out")  # float32 knows scores of 1e4 to 1e-3 only


def test_eager_equals_jitted():
    problem = draw(Case("pallas, interpreted", mask=WORST))
    with interpreted_kernels():
        arguments, masks, _ = arrays_of(problem)
        out = regard.attend(**arguments, **masks, implementation="pallas")
    assert_close(out, problem.pooled.out, problem.tolerance("out"), "out")


# ---------------------------------------------------------------------------------------------
# What a GPU that is not here would be given: lowered, with 64 bits on, not compiled.

AMPERE = Device("gpu", (8, 0))


def lowered(function, arguments, device, mesh):
    """The kernels' lowerings in a program for absent GPUs."""
    jax.clear_caches()  # what was traced for another device
    with pytest.MonkeyPatch.context() as patch, jax.sharding.use_abstract_mesh(mesh):
        patch.setattr(placement, "_described", lambda _: device)
        with cases.lift_anywhere():
            traced = jax.jit(function).trace(*arguments)
            return kernels(traced.lower(lowering_platforms=("cuda",)).as_text())


LOWERED = [
    Case(mask="everything"),
    Case(mask="none", dtype="bfloat16"),
    Case(score="gaussian per head", mask=WORST, dtype="float16"),
    _lifted(score="additive of 16 units", dtype="bfloat16"),
    _lifted(score="additive, exact", mask="causal", dtype="bfloat16"),
    Case(score=TABLE, mask=WORST, dtype="bfloat16"),
    Case(score=TABLE, mask="segments"),
    # No range to mask by; features of float16 as wide as the values of bfloat16.
    Case(
        score="dot of width 64", mask="none", dtype="bfloat16", sizes=Sizes(1, 256, 2, 1, 512, 64)
    ),
    Case(score="gaussian", mask="none", dtype="bfloat16", sizes=Sizes(1, 256, 2, 1, 512, 256)),
    Case(score="additive", mask="none", dtype="bfloat16", sizes=Sizes(1, 256, 2, 1, 512, 128)),
]


@pytest.mark.parametrize(
    ("case", "device"),
    [(replace(case, backend="pallas"), Device("gpu", HOPPER)) for case in LOWERED]
    + [(replace(case, backend="pallas"), AMPERE) for case in LOWERED[1:4]],
    ids=str,
)
def test_lowers_for_a_gpu(case, device):
    """Forward and backward."""
    expected = expected_kernels(case, hopper=device.capability == HOPPER)
    arrays = arrays_of(draw(case))
    assert lowered(with_gradients, arrays, device, absent_gpus(1)) == expected


KERNEL = np.full((64, 8), 0.1, np.float32)
SHARED = {  # the score, and whether there are lengths per query
    "dot": (regard.Dot(), True),
    "gaussian": (regard.Gaussian(np.float32(2.0)), False),
    "by distance": (regard.Dot() + regard.RelativeBias(np.ones((2, 9), np.float32)), True),
    "additive": (regard.Additive(KERNEL, KERNEL, KERNEL[0]), False),
    "additive, exact": (regard.Additive(KERNEL, KERNEL, KERNEL[0], tolerance="exact"), True),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", SHARED)
def test_lowers_inside_shard_map(name, dtype):
    """Each of two GPUs pools its half of the batch; gradients of what they share are summed."""
    score, has_lengths = SHARED[name]
    mesh = absent_gpus(2, AxisType.Auto)
    x = jax.ShapeDtypeStruct((4, 512, 2, 64), dtype)
    lens = jax.ShapeDtypeStruct((4, 512), jnp.int32)
    told = []

    def loss(score, query, lens):
        score = jax.tree.map(lambda leaf: leaf.astype(dtype), score)
        how = dict(score=score, valid_lens=lens if has_lengths else None, implementation="pallas")
        out = regard.attend(query, query, query, **how)
        told.append(regard.explain(query, query, query, **how))
        return jax.lax.psum(out.astype(jnp.float32).sum(), "x")

    one, split = PartitionSpec(), PartitionSpec("x")
    shared = jax.shard_map(loss, mesh=mesh, in_specs=(one, split, split), out_specs=one)
    found = lowered(jax.grad(shared, (0, 1)), (score, x, lens), Device("gpu", HOPPER), mesh)
    assert found == {TRITON}  # Mosaic's takes no bounds that vary
    assert "Mosaic" not in told[0]


# ---------------------------------------------------------------------------------------------
# Refusals.


def tensors(V=8, dtype=jnp.float32, value_dtype=None):
    with jax.default_device(jax.devices("cpu")[0]):
        x = jnp.ones((2, 16, 8), dtype)
        return x, x, jnp.ones((2, 16, V), value_dtype or dtype)


@pytest.mark.parametrize(
    ("arrays", "keywords", "reason"),
    [
        ({"dtype": jnp.float64}, {}, "the kernels take bfloat16, float16, float32, not float64"),
        ({"value_dtype": jnp.float64}, {}, "not float64"),
        ({}, {"score": cases.Manhattan(np.ones(8, np.float32))}, "Manhattan has no lift"),
        ({}, {"normalize": regard.Uniform()}, "not this Uniform"),
    ],
)
def test_refuses(arrays, keywords, reason):
    with interpreted(), pytest.raises(NotImplementedError, match=reason):
        regard.attend(*tensors(**arrays), **keywords, implementation="pallas")


def test_refuses_without_a_gpu():
    with pytest.raises(NotImplementedError, match=r"8\.0 or later \(running on cpu\)"):
        regard.attend(*tensors(), implementation="pallas")


def test_refuses_a_gpu_that_is_too_old(monkeypatch):
    monkeypatch.setattr(placement, "_described", lambda _: Device("gpu", (7, 5)))
    with pytest.raises(NotImplementedError, match=r"capability 8\.0 or later"):
        regard.explain(*tensors(), implementation="pallas")


def test_another_backend_takes_what_is_refused():
    with interpreted():
        names = ["pallas", "blockwise"]
        wide = tensors(dtype=jnp.float64)
        said = regard.explain(*wide, implementation=names, verbose=True)
    assert said.startswith("blockwise runs: ")
    assert "not pallas: the kernels take" in said


@pytest.mark.parametrize(
    ("device", "kernel"), [(AMPERE, "Triton"), (Device("gpu", HOPPER), "Mosaic GPU")]
)
def test_explains_its_kernel(device, kernel, monkeypatch):
    monkeypatch.setattr(placement, "_described", lambda _: device)
    said = regard.explain(*tensors(), implementation="pallas")
    kernel = kernel if MOSAIC_HERE else "Triton"
    assert f"pallas runs: asked for; {kernel} kernel, memory linear in T and S" in said
    assert "; scores by an inner product of width 8, exact" in said


def test_explains_the_exact_kernel(monkeypatch):
    """Of any size."""
    monkeypatch.setattr(placement, "_described", lambda _: Device("gpu", HOPPER))
    exact = cases.exact_additive(None, None, np.ones(8, np.float32))
    explain = functools.partial(regard.explain, score=exact, implementation="pallas")
    for length in (7, 300):
        tokens = [jax.ShapeDtypeStruct((2, length, 8), jnp.float32)] * 3
        assert "exact tanh in registers" in explain(*tokens)
