"""Weight regimes inside the kernels: the contract, for every regime that lowers to one."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regard
from absent_gpu import HOPPER, lowered
from cases import Case, Sizes, interpreted_kernels
from contract import (
    breaking_one_value_shows,
    empty_rows_are_exactly_zero,
    equals_the_oracle,
    padding_reaches_nothing,
)
from problem import assert_close, draw
from regard import placement
from regard.attend import _pool

pytestmark = [pytest.mark.sampled(2), pytest.mark.usefixtures("quick_compilation")]

CASES = [
    Case(regime="hard", mask="causal and lengths"),
    Case(regime="hard, straight through", mask="lengths per query", score="gaussian"),
    Case(regime="sparsemax", mask="everything"),
    Case(regime="sparsemax", dtype="bfloat16", mask="causal", score="scaled dot"),
    Case(regime="kernel", score="gaussian", mask="lengths per query"),
    Case(regime="cone", score="gaussian", softcap=0.7, bias=(2, 4, 19, 37)),
    Case(regime="kernel", score="additive, exact", mask="causal"),
]
MORE = [
    Case(regime="sparsemax", score="additive, exact", dtype="float16", bias=(4, 1, 37)),
    Case(
        regime="hard, straight through",
        dtype="bfloat16",
        mask="boolean with an empty row",
    ),
    Case(regime="compact kernel", score="scaled dot", mask="segments"),
    Case(regime="cone", mask="window", dtype="bfloat16"),
    Case(regime="kernel", sizes=Sizes(B=1, N=2, K=1, V=300), mask="causal"),
    Case(regime="sparsemax", sizes=Sizes(B=1, N=1, K=1, V=260), mask="lengths per example"),
    Case(regime="hard", mask="no keys at all", dtype="float16"),
    Case(regime="sparsemax", sizes=Sizes(T=1), mask="one length"),
]


def the_contract_holds(problem):
    assert problem.explained().startswith("pallas runs: ")
    equals_the_oracle(problem)
    empty_rows_are_exactly_zero(problem)
    padding_reaches_nothing(problem)
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


@pytest.mark.parametrize(
    "normalize",
    [regard.Sparsemax(), regard.Kernel(jax.nn.softplus)],
    ids=lambda normalize: type(normalize).__name__,
)
def test_second_derivatives_are_those_of_the_reference(normalize):
    """A product with the Hessian, under a mask."""
    with interpreted_kernels():
        query, key, value = (
            jax.random.normal(jax.random.key(i), (1, n, 2, 4), jnp.float32)
            for i, n in enumerate((40, 50, 50))
        )

        def product(implementation):
            def loss(query):
                options = dict(normalize=normalize, mask=regard.Mask.causal())
                out = regard.attend(query, key, value, implementation=implementation, **options)
                return jnp.sin(out).sum()

            return jax.jvp(jax.grad(loss), (query,), (jnp.ones_like(query),))[1]

        found, expected = jax.jit(lambda: (product("pallas"), product("reference")))()
    assert_close(found, expected, 1e-4, "Hessian times ones")


def pool(query, key, value, normalize):
    return regard.attend(query, key, value, normalize=normalize, implementation="pallas")


X = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)


@pytest.mark.parametrize(
    "normalize",
    [
        regard.Hard(),
        regard.Hard(straight_through=True),
        regard.Sparsemax(),
        regard.Kernel(jax.nn.softplus),
        regard.Cone(lambda a: jnp.exp(-jnp.square(a))),
        regard.Kernel(lambda a: jnp.where(a > -1, 1.0, 0.0).astype(a.dtype)),
        regard.Kernel(jax.nn.sigmoid),
    ],
    ids=["hard", "straight through", "sparsemax", "softplus", "cone", "boxcar", "sigmoid"],
)
def test_programs_are_lowered_for_a_gpu_that_is_not_here(normalize, monkeypatch):
    monkeypatch.setattr(placement, "_described", lambda _: HOPPER)

    def back(*arrays):
        loss = lambda *a: pool(*a, normalize).astype(jnp.float32).sum()  # noqa: E731
        return jax.grad(loss, argnums=(0, 1, 2))(*arrays)

    _pool.clear_cache()
    text = lowered(back, X, X, X)
    _pool.clear_cache()
    sweep = normalize.delta == "sweep"
    assert text.count("@__gpu$xla.gpu.triton") == 3 + sweep, "forward, d keys, d queries"


@pytest.mark.parametrize(
    ("normalize", "dtype", "why"),
    [
        (regard.Uniform(), "bfloat16", "not this Uniform"),
        (regard.Kernel(jax.scipy.special.erfc), "bfloat16", "not this Kernel"),
        (regard.Kernel(lambda a: jnp.sort(a) ** 2), "bfloat16", "not this Kernel"),
        (regard.Cone(jnp.exp), "float16", "no bound"),
    ],
)
def test_what_a_kernel_does_not_know_is_refused_by_name(normalize, dtype, why, monkeypatch):
    monkeypatch.setattr(placement, "_described", lambda _: HOPPER)
    x = jax.ShapeDtypeStruct(X.shape, dtype)
    with pytest.raises(NotImplementedError, match=why):
        regard.explain(x, x, x, normalize=normalize, implementation="pallas")
    said = regard.explain(x, x, x, normalize=normalize)
    assert said.startswith(("blockwise runs: ", "reference runs: "))
