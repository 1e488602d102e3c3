"""The contract of a backend: every mask, regime, dtype, rank and odd size against the oracle.

A backend joins by one line in cases.BACKENDS. Each case is compiled once, forward and gradient
together, and every property below is asked of that one program. test_every_score.py asks the
same of the scores.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
import regard
from cases import BACKENDS, DTYPES, MASKS, REGIMES, Case, Sizes, on_every_backend, tiered
from contract import (
    EveryCase,
    breaking_one_value_shows,
    empty_rows_are_exactly_zero,
    equals_the_oracle,
    explain_says_what_ran,
)
from problem import as_arguments, assert_close, draw

pytestmark = pytest.mark.sampled(2)

WORST = "causal window and lengths per query"

DISTINCT = [regime for regime in REGIMES if regime not in ("compact kernel", "hard")]

CASES = on_every_backend(
    [Case(mask=mask) for mask in MASKS]
    + [Case(regime=regime) for regime in REGIMES]
    + [Case(regime=regime, mask="everything") for regime in REGIMES]
    + [Case(regime=regime, mask=WORST) for regime in ("sparsemax", "kernel", "hard", "uniform")]
    # More queries than keys: aligned at the end, the first queries see nothing.
    + [
        Case(mask=mask, sizes=Sizes(T=23, S=11))
        for mask in ("causal", "causal from the start", "window")
    ]
    + [Case(dtype=dtype, regime=regime) for regime in DISTINCT for dtype in DTYPES]
    + [Case(dtype=dtype) for dtype in ("float32, bfloat16, float16", "bfloat16, float32, float32")]
    + [Case(dtype="float64, float32, float32", regime="sparsemax")]
    # Ranks 3 and 2, one key head for all, as many as queries.
    + [
        Case(mask=mask, sizes=Sizes(N=None, K=None))
        for mask in ("lengths per example", "lengths per query", "boolean")
    ]
    + [
        Case(mask=mask, sizes=Sizes(B=None, N=None, K=None))
        for mask in ("one length", "lengths per query", "boolean", "segments")
    ]
    + [Case(mask=WORST, sizes=Sizes(N=4, K=1)), Case(mask=WORST, sizes=Sizes(N=3, K=3))]
    # The bias: as wide as the weights, or any part of it.
    + [
        Case(bias=shape, mask="causal and lengths")
        for shape in ((2, 4, 19, 37), (19, 37), (4, 1, 37), (37,))
    ]
    # One number per query: softmax cannot see it, so here is a regime that can.
    + [Case(bias=(2, 1, 19, 1), mask="causal and lengths", regime="kernel")]
    + [
        Case(bias=(2, 1, 19, 37), regime=regime)
        for regime in ("sparsemax", "kernel", "hard, straight through")
    ]
    # A soft cap, with every regime that has scores; a sink; both with a bias.
    + [Case(softcap=1.5, regime=regime, mask=WORST) for regime in DISTINCT if regime != "uniform"]
    + [Case(softcap=0.7, score=score) for score in ("gaussian", "additive", "bilinear per head")]
    + [Case(sink=True, mask=mask) for mask in ("none", "everything", "no keys at all")]
    + [Case(sink=True, dtype="bfloat16"), Case(sink=True, sizes=Sizes(B=None, N=None, K=None))]
    + [Case(sink=True, softcap=2.0, bias=(4, 1, 37), dtype="float64", mask=WORST)]
    + [
        Case(bias=(19, 37), sizes=Sizes(N=None, K=None)),
        Case(bias=(1, 37), mask="none", sizes=Sizes(B=None, N=None, K=None)),
    ]
)


@pytest.fixture(scope="module", params=tiered(CASES))
def problem(request):
    return draw(request.param)


class TestEveryCase(EveryCase):
    def test_explain_says_what_ran(self, problem):
        explain_says_what_ran(problem)

    def test_breaking_one_value_shows(self, problem):
        breaking_one_value_shows(problem)


ODD_SIZES = {
    "one of each": Sizes(B=1, T=1, N=1, K=1, S=1, V=1),
    "one query": Sizes(T=1),
    "one key": Sizes(S=1),
    "one value column": Sizes(V=1),
    "primes": Sizes(B=3, T=31, N=2, K=1, S=13, V=7),
    "exactly the tiles": Sizes(B=1, T=16, S=32, V=8),
    "no keys": Sizes(S=0),
    "no batch": Sizes(B=0),
    "no queries": Sizes(T=0),
    "no keys, rank 2": Sizes(B=None, N=None, K=None, S=0),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ODD_SIZES)
def test_odd_sizes(name, backend):
    mask = "one length" if ODD_SIZES[name].B is None else "causal and lengths"
    problem = draw(Case(backend=backend, sizes=ODD_SIZES[name], mask=mask))
    equals_the_oracle(problem)
    empty_rows_are_exactly_zero(problem)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("regime", REGIMES)
def test_no_keys_is_an_empty_row_in_every_regime(regime, backend):
    problem = draw(
        Case(
            backend=backend, regime=regime, mask="none", sizes=Sizes(B=1, T=3, N=None, K=None, S=0)
        )
    )
    out, _ = problem.answer
    np.testing.assert_array_equal(out, np.zeros((1, 3, 5), np.float32))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("regime", REGIMES)
def test_the_weights_are_the_oracles(regime, backend):
    problem = draw(Case(backend=backend, regime=regime, mask=WORST, bias=(2, 1, 19, 37)))
    arguments = problem.as_arguments(problem.inputs)
    del arguments["value"]
    chosen = BACKENDS[backend]
    with chosen.tiling():
        got = jax.jit(
            lambda arguments, masks: regard.weights(
                **arguments,
                **masks,
                normalize=REGIMES[regime].normalize,
                implementation=chosen.implementation,
            )
        )(arguments, as_arguments(problem.facts))
    assert got.dtype == jnp.float32
    assert_close(got, problem.pooled.weights, problem.tolerance("out"), "weights")
    np.testing.assert_array_equal(np.asarray(got)[~problem.may], 0)


@pytest.mark.parametrize("mask", ["none", WORST])
def test_default_tiles(mask):
    """The tiles that users get, at a size where the blockwise loops run more than once or not:
    both are right.
    """
    problem = draw(
        Case(backend="blockwise", mask=mask, sizes=Sizes(B=1, T=300, N=2, K=1, S=1100, V=3))
    )
    arguments, masks = problem.as_arguments(problem.inputs), as_arguments(problem.facts)
    cotangent = jnp.asarray(problem.cotangent, jnp.float32)
    out, pull = jax.jit(
        lambda arguments, masks: jax.vjp(
            lambda arguments: regard.attend(**arguments, **masks, implementation="blockwise"),
            arguments,
        )
    )(arguments, masks)
    assert_close(out, problem.pooled.out, problem.tolerance("out"), "out")
    found = pull(cotangent)[0]
    for name in ("query", "key", "value"):
        assert_close(found[name], problem.gradients[name], problem.tolerance(name), name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("regime", ["softmax", "sparsemax"])
def test_vmap_is_a_loop(regime, backend):
    """Three problems with lengths of their own, mapped, against the same three one by one."""
    problems = [draw(Case(backend=backend, regime=regime, seed=seed)) for seed in range(3)]
    chosen = BACKENDS[backend]

    def run(inputs, masks, cotangent):
        def pool(inputs):
            return regard.attend(
                **inputs,
                **masks,
                normalize=REGIMES[regime].normalize,
                implementation=chosen.implementation,
            )

        out, pull = jax.vjp(pool, inputs)
        return out, pull(cotangent)[0]

    stacked = jax.tree.map(
        lambda *leaves: jnp.stack(leaves),
        *[
            (p.as_arguments(p.inputs), as_arguments(p.facts), jnp.asarray(p.cotangent, jnp.float32))
            for p in problems
        ],
    )
    with chosen.tiling():
        outs, found = jax.jit(jax.vmap(run))(*stacked)
    for i, problem in enumerate(problems):
        assert_close(outs[i], problem.pooled.out, problem.tolerance("out"), f"out of {i}")
        for name in ("query", "key", "value"):
            assert_close(
                found[name][i], problem.gradients[name], problem.tolerance(name), f"{name} of {i}"
            )


@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap_over_the_value_only(backend):
    problem = draw(Case(backend=backend, mask="causal and lengths"))
    arguments, masks = problem.as_arguments(problem.inputs), as_arguments(problem.facts)
    value = arguments.pop("value")
    values = jnp.stack([value, jnp.flip(value, axis=1)])
    chosen = BACKENDS[backend]
    with chosen.tiling():
        outs = jax.jit(
            jax.vmap(
                lambda value: regard.attend(
                    **arguments, **masks, value=value, implementation=chosen.implementation
                )
            )
        )(values)
    for out, value in zip(
        outs, (problem.inputs["value"], problem.inputs["value"][:, ::-1]), strict=True
    ):
        expected = np.einsum("bnts,bsnv->btnv", problem.pooled.weights, np.repeat(value, 2, axis=2))
        assert_close(out, expected, problem.tolerance("out"), "out")


@pytest.mark.parametrize("backend", BACKENDS)
def test_eager_equals_jitted(backend):
    problem = draw(Case(backend=backend, mask=WORST))
    chosen = BACKENDS[backend]
    with chosen.tiling():
        out = regard.attend(
            **problem.as_arguments(problem.inputs),
            **as_arguments(problem.facts),
            implementation=chosen.implementation,
        )
    assert_close(out, problem.pooled.out, problem.tolerance("out"), "out")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64])
def test_lengths_of_any_integer_dtype(dtype, backend):
    problem = draw(Case(backend=backend, sizes=Sizes(N=None, K=None)))
    chosen = BACKENDS[backend]
    lens = jnp.asarray(problem.facts["valid_lens"].astype(dtype))
    with chosen.tiling():
        out = regard.attend(
            **problem.as_arguments(problem.inputs),
            valid_lens=lens,
            implementation=chosen.implementation,
        )
    assert_close(out, problem.pooled.out, problem.tolerance("out"), "out")


@pytest.mark.parametrize("backend", BACKENDS)
def test_far_scores_do_not_overflow(backend):
    """Scores of +-1e4: exp would overflow float32 without the running maximum."""
    problem = draw(Case(backend=backend, mask="causal and lengths"))
    far = {
        "query": np.round(problem.inputs["query"] * 256) / 16,
        "key": np.round(problem.inputs["key"] * 256) / 4,
    }
    out, gradients = problem.run(far)
    assert np.isfinite(out).all()
    assert all(np.isfinite(g).all() for g in gradients.values() if g.dtype != object)
    # Nearly one key takes all, so the output is nearly a value: the oracle says which.
    expected = oracle.attend(
        far["query"], far["key"], problem.inputs["value"], score=oracle.Dot(), may=problem.may
    )
    # float32 knows scores of 1e4 to 1e-3 only.
    assert_close(out, expected.out, 5e-3, "out")
