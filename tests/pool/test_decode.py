"""The kernels for few queries: the contract, in keys split over several thread blocks; what a
program for a GPU does to a cache besides reading it; and which calls they take.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
import regard
from absent_gpu import lowered, on_hopper
from cases import Case, Sizes, interpreted_kernels
from contract import (
    breaking_one_value_shows,
    empty_rows_are_exactly_zero,
    equals_the_oracle,
    padding_reaches_nothing,
    padding_reaches_nothing_alone,
)
from intermediates import insides
from problem import as_arguments, assert_close, draw
from regard import placement
from regard.attend import _pool
from regard.placement import Device
from regard.pool.kernels.decode_pass import LEAST_STEPS, MOST_ROWS

pytestmark = [pytest.mark.sampled(2), pytest.mark.usefixtures("quick_compilation")]

# In interpret mode blocks have 32 keys: nine blocks and a part of one, shared by two programs.
FEW = Sizes(B=2, T=2, N=4, K=2, S=300, V=5)
CASES = [
    Case(sizes=FEW),
    Case(sizes=FEW, mask="causal and lengths", score="gaussian", dtype="bfloat16"),
    Case(sizes=FEW, mask="everything", score="dot + gaussian", dtype="float16"),
    Case(
        sizes=FEW,
        mask="boolean with an empty row",
        dtype="float32, bfloat16, float16",
    ),
    Case(sizes=FEW, mask="window", score="gaussian", softcap=0.7, bias=(2, 1, 1, 300)),
    Case(sizes=FEW, mask="causal", score="dot + alibi per head", bias=(4, 2, 1), sink=True),
    Case(sizes=FEW, mask="lengths per query", score="additive, exact"),
    Case(sizes=Sizes(2, 1, None, None, 300, 40), score="additive, exact", mask="causal"),
    Case(sizes=Sizes(1, 8, 4, 1, 513, 1), mask="lengths per query", dtype="bfloat16"),
]
MORE = [
    Case(sizes=FEW, mask="lengths per query", score="gaussian per head"),
    Case(sizes=FEW, mask="segments", score="bilinear per head", dtype="bfloat16"),
    Case(sizes=FEW, mask="no keys at all", sink=True),
    Case(sizes=FEW, mask="none", score="scaled dot", softcap=1.5, bias=(4, 2, 300)),
    Case(sizes=FEW, mask="causal", score="rotary gaussian, half rotated"),
    Case(sizes=FEW, score="additive, exact", dtype="bfloat16", softcap=0.7, bias=(2, 300)),
    Case(sizes=Sizes(None, 3, None, None, 130, 7), score="bilinear", mask="one length"),
    Case(sizes=Sizes(1, 1, 3, 3, 1, 3)),
]


def the_contract_holds(problem):
    assert "few queries" in problem.explained()
    equals_the_oracle(problem)
    empty_rows_are_exactly_zero(problem)
    padding_reaches_nothing(problem)
    padding_reaches_nothing_alone(problem)
    breaking_one_value_shows(problem)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_interpret_mode(case):
    the_contract_holds(draw(replace(case, backend="pallas, interpreted")))


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=str)
def test_more_in_interpret_mode(case):
    the_contract_holds(draw(replace(case, backend="pallas, interpreted")))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES + MORE, ids=str)
def test_on_a_gpu(case):
    problem = draw(replace(case, backend="pallas"))
    the_contract_holds(problem)
    assert "__gpu$xla.gpu.triton" in problem.compiled_text()
    out, gradients = problem.run()
    np.testing.assert_array_equal(out, problem.answer[0], err_msg="the same bits every time")
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient, problem.answer[1][name], err_msg=name)


def test_these_cases_share_keys_among_programs():
    assert FEW.S >= 2 * LEAST_STEPS * 32
    assert FEW.N // FEW.K * FEW.T <= MOST_ROWS < Sizes().N // Sizes().K * Sizes().T, (
        "the other kernels' contract is that of the default sizes"
    )


RATE = 0.25


@pytest.mark.parametrize("score", ["gaussian", "additive, exact"])
def test_dropout_drops_what_the_reference_drops(score):
    """Output and gradients, against the oracle, given which weights the reference kept."""
    problem, rng = draw(Case("pallas, interpreted", score=score, sizes=FEW)), jax.random.key(5)
    arguments, masks = problem.as_arguments(problem.inputs), as_arguments(problem.facts)
    cotangent = jnp.asarray(problem.cotangent, problem.dtypes["out"])
    drop = functools.partial(regard.attend, dropout_rate=RATE, dropout_rng=rng)
    B, N, T, S = problem.shape
    flat = jnp.zeros((B, T, N, 1)), jnp.zeros((B, S, 1, 1))
    eye = jnp.broadcast_to(jnp.eye(S)[None, :, None], (B, S, 1, S))
    keep = np.asarray(drop(*flat, eye, implementation="reference").swapaxes(1, 2)) > 0

    @jax.jit
    def run(arguments):
        pool = functools.partial(drop, **masks, implementation="pallas")
        out, pull = jax.vjp(lambda given: pool(**given), arguments)
        return out, pull(cotangent)[0]

    with interpreted_kernels():
        out, found = run(arguments)
    tensors = [problem.inputs[name] for name in ("query", "key", "value")]
    told = {**problem._oracle_arguments, "keep": keep, "rate": RATE}
    assert_close(out, oracle.attend(*tensors, **told).out, problem.tolerance("out"), "out")
    for name, slope in oracle.gradients(problem.cotangent, *tensors, **told).items():
        if name in found:
            assert_close(found[name], slope, problem.tolerance(name), f"gradient of {name}")


@pytest.mark.parametrize("score", [regard.Gaussian(1.3), "additive"], ids=["gaussian", "additive"])
def test_second_derivatives_are_those_of_the_reference(score):
    """A product with the Hessian, with NaN in the padding."""
    with interpreted_kernels():
        found, expected = _hessian_products(score)
    assert_close(found, expected, 1e-5, "Hessian times ones")


def _hessian_products(score):
    """By the kernels, and by the reference."""
    normal = functools.partial(jax.random.normal, dtype=jnp.float32)
    keys = jax.random.split(jax.random.key(0), 4)
    query, key, value = (normal(k, (2, n, 4)) for k, n in zip(keys, (2, 40, 40), strict=False))
    key, value = (x.at[:, 30:].set(jnp.nan) for x in (key, value))
    if score == "additive":
        score = regard.Additive(None, None, normal(keys[3], (4,)), tolerance="exact")
    lens = jnp.array([30, 7])

    def product(implementation):
        def loss(query):
            pool = functools.partial(regard.attend, score=score, valid_lens=lens)
            out = pool(query, key, value, implementation=implementation)
            return jnp.sin(out).sum()

        return jax.jvp(jax.grad(loss), (query,), (jnp.ones_like(query),))[1]

    return jax.jit(lambda: (product("pallas"), product("reference")))()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_keys_of_16_bits_are_not_rounded_again(dtype, softcap):
    """Far from the origin, where k - c has more digits than they have: the log-sum-exp is that of
    the reference in float32. Rounding k - c would move it by 1e-5 in float16.
    """
    rng, lens = np.random.default_rng(0), jnp.asarray([300, 123], jnp.int32)
    query, key = (
        jnp.asarray(50.0 + rng.standard_normal((2, count, heads, 16)), dtype)
        for count, heads in ((2, 4), (300, 2))
    )

    def lse(query, key, implementation):
        score = regard.Gaussian(3.0)
        pool = functools.partial(regard.attend, score=score, valid_lens=lens, softcap=softcap)
        return pool(query, key, key, implementation=implementation, return_lse=True)[1]

    expected = lse(query.astype(jnp.float32), key.astype(jnp.float32), "reference")
    with interpreted_kernels():
        assert_close(lse(query, key, "pallas"), expected, 2e-6, "log-sum-exp")


# ---------------------------------------------------------------------------------------------
# Programs for a GPU that is not here.

B, S, N, K, D = 2, 4096, 8, 2, 64
CACHE = B * S * K * D


def shapes(T=1, dtype="bfloat16", S=S):
    return [
        jax.ShapeDtypeStruct(shape, dtype) for shape in ((B, T, N, D), (B, S, K, D), (B, S, K, D))
    ]


def outside_of_kernels(jaxpr):
    """(primitive, numbers) of every array that a program makes but for its kernels."""
    for equation in jaxpr.eqns:
        inner = () if equation.primitive.name == "pallas_call" else tuple(insides(equation))
        if not inner:
            for out in equation.outvars:
                yield equation.primitive.name, int(np.prod(out.aval.shape))
        for one in inner:
            yield from outside_of_kernels(one)


SCORES = {
    "dot": regard.Dot(),
    "scaled": regard.Dot(jnp.float32(0.3)),
    "gaussian": regard.Gaussian(),
    "sum": regard.Dot() + 0.5 * regard.Gaussian(2.0),
    "bilinear": regard.Bilinear(jnp.ones((D, D), jnp.bfloat16)),
    "additive": regard.Additive(None, None, jnp.ones(D, jnp.bfloat16)),
}


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("backward", [False, True])
def test_a_cache_is_not_copied(score, backward):
    """Only transposes, in pairs that XLA cancels; and keys sliced for the mean of a sample."""

    def pool(query, key, value):
        lens = jnp.array([3000, 17])
        return regard.attend(query, key, value, score=SCORES[score], valid_lens=lens)

    def gradient(*arrays):
        return jax.grad(lambda *a: pool(*a).astype(jnp.float32).sum(), argnums=(0, 1, 2))(*arrays)

    with on_hopper(), jax.numpy_dtype_promotion("standard"):
        _pool.clear_cache()
        jaxpr = jax.make_jaxpr(gradient if backward else pool)(*shapes()).jaxpr
    _pool.clear_cache()
    made = {name for name, count in outside_of_kernels(jaxpr) if count >= CACHE}
    allowed = {"transpose", "pallas_call"}
    allowed |= {"convert_element_type"} if score == "additive" else set()
    assert "transpose" in made
    assert made <= allowed, made - allowed


LENS = jnp.array([5, 7])


@pytest.mark.parametrize(
    ("arrays", "options", "runs"),
    [
        (shapes(), dict(valid_lens=LENS), "pallas"),
        (shapes(T=8), dict(valid_lens=LENS), "pallas"),
        (shapes(), {}, "cudnn"),  # nothing to zero: both read the arrays once
        (shapes(S=4097), {}, "pallas"),  # which cuDNN would pad
        (shapes(T=9), dict(valid_lens=LENS), "cudnn"),  # 36 rows
        (shapes(), dict(mask=regard.Mask.causal()), "cudnn"),
    ],
)
def test_cudnn_is_passed_over_where_it_needs_a_copy(arrays, options, runs):
    with on_hopper():
        said = regard.explain(*arrays, **options)
    assert said.startswith(f"{runs} runs: ")
    assert ("few queries" in said.splitlines()[0]) == (runs == "pallas")


@pytest.mark.parametrize("score", ["dot", "gaussian", "additive"])
@pytest.mark.parametrize("backward", [False, True])
def test_programs_are_lowered_for_a_gpu_that_is_not_here(score, backward, monkeypatch):
    monkeypatch.setattr(placement, "_described", lambda _: Device("gpu", (8, 0)))

    def pool(query, key, value):
        pooled = functools.partial(regard.attend, score=SCORES[score], implementation="pallas")
        return pooled(query, key, value, valid_lens=LENS).astype(jnp.float32).sum()

    function = jax.grad(pool, argnums=(0, 1, 2)) if backward else pool
    with jax.numpy_dtype_promotion("standard"):
        _pool.clear_cache()
        text = lowered(function, *shapes())
    _pool.clear_cache()
    assert text.count("@__gpu$xla.gpu.triton") == 1 + backward
