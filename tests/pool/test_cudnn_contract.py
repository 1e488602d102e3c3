"""The contract of the cuDNN backend: all that it accepts, against the oracle, in 16 bit.

Run twice: with cuDNN itself, on a GPU; and anywhere with a stand-in: jax.nn's plain XLA attention,
called with the very arguments that cuDNN would get.
"""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import oracle
import regard
from absent_gpu import Cosine, stand_in
from cases import Backend, Case, ScoreRow, Sizes
from contract import (
    EveryCase,
    breaking_one_value_shows,
    padding_reaches_nothing_alone,
)
from problem import assert_close, draw
from regard import Mask
from regard.pool import cudnn

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.sampled(2)]

SQUARE, RAGGED, WHOLE = Sizes(T=24, S=24, V=8), Sizes(V=8), Sizes(T=128, S=256, V=8)

# Rows of this file only: cuDNN needs widths in steps of 8, and no other backend does.
SCORES = {
    "bilinear, 16 to 8": ScoreRow(
        regard.Bilinear, oracle.Bilinear, (16, 8), lambda normal, N: {"kernel": normal(16, 8) / 8}
    ),
    "bilinear, 8 to 16": ScoreRow(
        regard.Bilinear, oracle.Bilinear, (8, 16), lambda normal, N: {"kernel": normal(8, 16) / 8}
    ),
    "bilinear per head, 8 to 16": ScoreRow(
        regard.Bilinear,
        oracle.Bilinear,
        (8, 16),
        lambda normal, N: {"kernel": normal(N, 8, 16) / 8},
    ),
}
MASKS = {
    "causal window": lambda rng, B, N, T, S: {"causal": "start", "window": (9, None, "start")},
}
STAND_IN = Backend("cudnn", stand_in)

CASES = (
    [
        Case(mask=mask, dtype=dtype, sizes=RAGGED)
        for dtype in ("bfloat16", "float16")
        for mask in ("none", "lengths per example", "causal from the start")
    ]
    + [
        Case(mask=mask, dtype="bfloat16", sizes=RAGGED)
        for mask in ("one length", "no keys at all", "lengths out of range", "causal window")
    ]
    + [
        Case(mask=mask, dtype="bfloat16", sizes=SQUARE)
        for mask in ("causal", "causal and lengths", "causal window")
    ]
    # Whole tiles, where no lengths are given; more queries than keys.
    + [
        Case(mask=mask, dtype="bfloat16", sizes=WHOLE)
        for mask in ("none", "causal from the start", "causal window")
    ]
    + [Case(mask="causal from the start", dtype="bfloat16", sizes=Sizes(T=37, S=19, V=8))]
    + [
        Case(mask=mask, dtype="bfloat16", sizes=Sizes(T=128, S=128, V=8))
        for mask in ("causal", "lengths per example")
    ]
    # Scores: by their lift; a scale that is an argument is one of them.
    + [
        Case(score=score, mask=mask, dtype="bfloat16", sizes=SQUARE)
        for score in ("scaled dot", *SCORES)
        for mask in ("none", "causal and lengths")
    ]
    + [Case(score="scaled dot", dtype="float16", sizes=RAGGED)]
    # Heads and ranks.
    + [
        Case(dtype="bfloat16", sizes=RAGGED._replace(N=N, K=K))
        for N, K in ((4, 1), (3, 3), (None, None))
    ]
    + [Case(mask="one length", dtype="bfloat16", sizes=Sizes(B=None, N=None, K=None, V=8))]
    # A bias, one for all examples, with its gradient.
    + [
        Case(mask=mask, dtype=dtype, bias=(1, 4, T, T), sizes=Sizes(T=T, S=T, N=4, K=4, V=8))
        for mask, T, dtype in (
            ("none", 128, "bfloat16"),
            ("causal", 128, "float16"),
            ("causal", 24, "bfloat16"),
            ("none", 38, "bfloat16"),
        )
    ]
    # One of a kind.
    + [
        Case(mask=mask, dtype="bfloat16", sizes=RAGGED._replace(T=1))
        for mask in ("none", "lengths per example", "causal", "causal from the start")
    ]
    + [Case(mask=mask, dtype="bfloat16", sizes=RAGGED._replace(S=1)) for mask in ("none",)]
)


def with_(backend):
    return [Case(**{**vars(case), "backend": backend}) for case in dict.fromkeys(CASES)]


@pytest.fixture(
    scope="module",
    params=cases.tiered(with_("cudnn, stand-in"))
    + [pytest.param(case, marks=pytest.mark.gpu, id=str(case)) for case in with_("cudnn")],
)
def problem(request):
    with pytest.MonkeyPatch.context() as patch:
        for table, rows in (
            (cases.SCORES, SCORES),
            (cases.MASKS, MASKS),
            (cases.CHOOSY, {"cudnn, stand-in": STAND_IN}),
        ):
            for name, row in rows.items():
                patch.setitem(table, name, row)
        yield draw(request.param)


class TestEveryCase(EveryCase):
    def test_padding_reaches_nothing_alone(self, problem, monkeypatch):
        if problem.case.backend != "cudnn":  # XLA replaces scores; what cuDNN does, cudnn.py says
            monkeypatch.setattr(cudnn, "_version", lambda: cudnn.IGNORES_PADDING_SINCE)
        padding_reaches_nothing_alone(problem)

    def test_breaking_one_value_shows(self, problem):
        breaking_one_value_shows(problem)


# A test for cuDNN on a GPU, and for the stand-in anywhere.
both = pytest.mark.parametrize("engine", ["stand-in", pytest.param("cuDNN", marks=pytest.mark.gpu)])


def run(engine, function, *args):
    with stand_in() if engine == "stand-in" else contextlib.nullcontext():
        return jax.jit(function)(*args)


attend = functools.partial(regard.attend, implementation="cudnn")


def tensors(T, S, D=64, scale=1.0, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((2, T, 4, D), (2, S, 2, D), (2, S, 2, D), (2, T, 4, D))
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]
    return [arrays[0] * jnp.bfloat16(scale), *arrays[1:]]


def with_gradients(function):
    def run(query, key, value, cotangent):
        out, pull = jax.vjp(function, query, key, value)
        return out, *pull(cotangent)

    return run


NAMES = ("out", "query", "key", "value")


def assert_equals_reference(engine, function, arrays, *, compared=NAMES, **keywords):
    """Output and gradients, against the dense float32 path on the same 16-bit numbers."""
    got = run(engine, with_gradients(functools.partial(function, **keywords)), *arrays)
    reference = functools.partial(regard.attend, implementation="reference", **keywords)
    expected = jax.jit(with_gradients(reference))(*(x.astype(jnp.float32) for x in arrays))
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    for name, one, other in zip(NAMES, got, expected, strict=True):
        assert np.isfinite(np.asarray(one, np.float32)).all(), name
        if name in compared:
            assert_close(one, other, eps if name != "out" else eps / 2, name)


@both
@pytest.mark.parametrize("scale", [0.03, 0.125, 1.7])
def test_a_scale_that_is_a_number(engine, scale):
    """Handed to the kernel, not multiplied in."""
    score = regard.Dot(scale)
    assert_equals_reference(engine, attend, tensors(40, 72), score=score)


@both
@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_a_scale_that_is_not_positive(engine, scale):
    assert_equals_reference(engine, attend, tensors(40, 72), score=regard.Dot(scale))


ORDERS = {
    "jvp": lambda loss, x, d: jax.jvp(loss, (x,), (d,))[1],
    "forward over reverse": lambda loss, x, d: jax.jvp(jax.grad(loss), (x,), (d,))[1],
    "reverse over reverse": lambda loss, x, d: jax.grad(
        lambda x: sum(map(jnp.vdot, jax.tree.leaves(jax.grad(loss)(x)), jax.tree.leaves(d)))
    )(x),
    "linearize": lambda loss, x, d: jax.linearize(jax.grad(loss), x)[1](d),
}


def derivative(order, attend, arrays, directions, options):
    """Of a nonlinear function of the output, with respect to 16-bit arrays read in float32."""

    def loss(arrays):
        out = attend(*arrays["tensors"], bias=arrays.get("bias"), **options)
        return jnp.sin(out.astype(jnp.float32)).sum()

    return ORDERS[order](loss, arrays, directions)


@both
@pytest.mark.parametrize(
    ("order", "name"),
    [
        ("jvp", "lengths"),
        ("forward over reverse", "lengths"),
        ("forward over reverse", "bias"),
        ("reverse over reverse", "causal"),
        ("linearize", "learned scale"),
    ],
)
def test_derivatives_of_every_order(engine, order, name):
    """cuDNN's call has a first derivative in reverse mode only; the others are those of tiles."""
    query, key, value, direction = tensors(40, 72)
    arrays, options = dict(tensors=[query, key, value]), {}
    if name == "lengths":
        options = dict(valid_lens=jnp.array([0, 60]))
    elif name == "causal":
        options = dict(mask=regard.Mask.causal("start"))
    elif name == "learned scale":
        options = dict(score=regard.Dot(jnp.float32(0.2)))
    else:
        arrays["tensors"] = [query, query * query, query + 1]
        arrays["bias"] = jnp.sin(jnp.arange(4 * 40 * 40.0)).reshape(1, 4, 40, 40).astype("bfloat16")
    directions = jax.tree.map(jnp.cos, arrays)
    directions["tensors"][0] = direction
    got = run(engine, lambda x, d: derivative(order, attend, x, d, options), arrays, directions)
    reference = functools.partial(regard.attend, implementation="reference")
    expected = jax.jit(lambda x, d: derivative(order, reference, x, d, options))(
        *jax.tree.map(lambda x: x.astype(jnp.float32), (arrays, directions))
    )
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_close(one, other, 4 * float(jnp.finfo(jnp.bfloat16).eps), order)


@both
@pytest.mark.parametrize(("T", "S"), [(1, 128), (64, 192), (100, 1000), (128, 256)])
def test_far_below_zero(engine, T, S):
    """Every score about -100, so that log-sum-exp is below -88: cuDNN's own backward pass is NaN
    there in ragged tiles, unless it gets the lengths.
    """
    query, key, value, cotangent = tensors(T, S)
    query, key = query * jnp.bfloat16(0.1), key * jnp.bfloat16(0.1)
    query, key = query + jnp.bfloat16(3.5), key - jnp.bfloat16(3.5)
    # What all keys have in common cancels in two of the gradients, and with it most digits.
    assert_equals_reference(
        engine, attend, [query, key, value, cotangent], compared=("out", "value")
    )


@both
def test_nan_in_an_empty_example_stays_there(engine):
    """Query, key, value and cotangent all NaN, in an example of length 0."""
    arrays = [x.at[0].set(jnp.nan) for x in tensors(40, 72)]
    lens = jnp.array([0, 50])
    found = run(engine, with_gradients(functools.partial(attend, valid_lens=lens)), *arrays)
    for array in found:
        np.testing.assert_array_equal(np.asarray(array, np.float32)[0], 0)
        assert np.isfinite(np.asarray(array, np.float32)).all()


@both
def test_a_users_score_that_is_nan_in_padding(engine):
    """A lift of zeros need not be zero: Cosine's is NaN, and padding is made of zeros."""
    lens = jnp.array([0, 50])
    found = run(
        engine,
        with_gradients(functools.partial(attend, score=Cosine(), valid_lens=lens)),
        *tensors(40, 72),
    )
    for array in found:
        assert np.isfinite(np.asarray(array, np.float32)).all()
        np.testing.assert_array_equal(np.asarray(array, np.float32)[0], 0)


@both
@pytest.mark.parametrize("mapped", [(0, 0, 0), (None, None, 0), (0, None, None)])
def test_vmap_is_a_loop(engine, mapped):
    rows = [tensors(40, 72, seed=seed) for seed in range(3)]
    arrays = [
        jnp.stack([row[i] for row in rows]) if axis == 0 else rows[0][i]
        for i, axis in enumerate(mapped)
    ]
    cotangents = jnp.stack([row[3] for row in rows])
    looped = with_gradients(attend)
    got = run(engine, jax.vmap(looped, in_axes=(*mapped, 0)), *arrays, cotangents)
    for i in range(3):
        one = [array[i] if axis == 0 else array for array, axis in zip(arrays, mapped, strict=True)]
        expected = run(engine, looped, *one, cotangents[i])
        for name, a, b in zip(NAMES, got, expected, strict=True):
            assert_close(a[i], np.asarray(b, np.float64), 2**-7, name)


@both
def test_the_weights_are_those_of_the_lift(engine):
    query, key, value, _ = tensors(40, 72)
    lens = jnp.array([0, 50])
    out, weights, lifted = run(
        engine,
        lambda *args: attend(*args, valid_lens=lens, return_weights=True, return_lifted=True),
        query,
        key,
        value,
    )
    assert lifted
    assert weights.dtype == jnp.float32
    wide = np.repeat(np.asarray(value, np.float64), 2, axis=2)
    expected = np.einsum("bnts,bsnv->btnv", np.asarray(weights, np.float64), wide)
    assert_close(out, expected, 2**-8, "out")


# ---------------------------------------------------------------------------------------------
# On a GPU: the compiled program.


def compiled(function, *args):
    return jax.jit(function).lower(*args).compile().as_text()


@pytest.mark.gpu
def test_lengths_are_in_the_compiled_program():
    query, key, value, cotangent = tensors(256, 512)
    lens = jnp.array([300, 512], jnp.int32)
    text = compiled(
        lambda *args: with_gradients(functools.partial(attend, valid_lens=args[4]))(*args[:4]),
        query,
        key,
        value,
        cotangent,
        lens,
    )
    calls = [line for line in text.splitlines() if "custom-call(" in line and "__cudnn$" in line]
    assert len(calls) == 2, "one forward, one backward"
    assert all("PADDING" in call for call in calls)
    assert "256,512" not in text, "a T×S array"


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [None, Mask.causal("start")])
def test_the_compiled_program_is_the_call_alone(mask):
    """No transpose, no copy, no pass over any array beside what cuDNN does.

    As many keys as queries: keys after the last query's are visible to no query, and are zeroed.
    """
    query, key, value, _ = tensors(512, 512)
    text = compiled(functools.partial(attend, mask=mask), query, key, value)
    passes = re.findall(r" (transpose|copy|fusion|select|multiply|convert)\(", text)
    assert passes == []
    assert text.count("__cudnn$fmhaSoftmax") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("width", [8, 64, 128, 256])
def test_every_width_has_a_gradient(width):
    if width > 128 and not jax.devices()[0].compute_capability.startswith("9."):
        return  # refused there: test_cudnn.py
    assert_equals_reference("cuDNN", attend, tensors(100, 200, D=width))


@pytest.mark.gpu
def test_none_picks_cudnn():
    arrays = tensors(512, 512)[:3]
    assert regard.explain(*arrays).startswith("cudnn runs: ")
    assert "__cudnn$fmha" in compiled(regard.attend, *arrays)
