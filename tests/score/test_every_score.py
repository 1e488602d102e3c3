"""The contract of a score: every score under every regime and dtype, on every backend, against
the oracle.

A score joins by one line in cases.SCORES. pool/test_every_backend.py asks the same of the masks,
ranks and sizes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
import regard
from cases import BACKENDS, DTYPES, REGIMES, SCORES, Case, Sizes, on_every_backend, tiered
from contract import (
    EveryCase,
    explain_says_what_ran,
)
from problem import as_arguments, assert_close, draw, error, rounded

pytestmark = pytest.mark.sampled(2)

WORST = "causal window and lengths per query"
RANK_3, RANK_2 = {"N": None, "K": None}, {"B": None, "N": None, "K": None}


def of(score, biased=False, rank=None, **others):
    """A case of this score. The additive lift is only taken where it pays, so it gets longer
    sequences.
    """
    sizes = Sizes(T=67, N=2, K=1, S=71) if SCORES[score].approximate else Sizes()
    sizes = sizes._replace(**(rank or {}))
    bias = (sizes.N, sizes.T, sizes.S) if biased else None
    return Case(score=score, sizes=sizes, bias=bias, **others)


def _comparable(case):
    """Hard puts everything on the largest score: an approximation in half precision may pick
    its neighbor.
    """
    return not (
        SCORES[case.score].approximate and "float16" in case.dtype and "hard" in case.regime
    )


# The dot product's regimes, dtypes and ranks are in pool/test_every_backend.py.
LIFTED = ("gaussian", "bilinear", "additive")
PER_HEAD = ("gaussian per head", "bilinear per head", "additive per head")

# Uniform weights do not use the score; plain hard is straight-through without its gradient.
USING_SCORES = [regime for regime in REGIMES if regime not in ("uniform", "hard")]

CASES = [
    case
    for case in on_every_backend(
        [of(score) for score in SCORES]
        + [of(score, biased=True, mask=WORST) for score in (*PER_HEAD, "dot", "a user's own")]
        + [of(score, regime=regime) for score in LIFTED for regime in USING_SCORES]
        + [
            of(score, dtype=dtype)
            for score in (*LIFTED, *PER_HEAD, "a user's own")
            for dtype in DTYPES
        ]
        + [of(score, rank=RANK_3) for score in ("gaussian", "additive")]
        + [of(score, rank=RANK_2, mask="lengths per query") for score in ("gaussian", "additive")]
    )
    if _comparable(case)
] + [
    # The additive score as this device runs it: on a CPU without the lift.
    of(score, backend="blockwise as run", **others)
    for score, others in (
        ("additive", {"mask": WORST, "biased": True, "regime": "sparsemax"}),
        ("additive", {"regime": "kernel"}),
        ("additive", {"dtype": "bfloat16"}),
        ("additive", {"dtype": "float64"}),
        ("additive per head", {"mask": "everything"}),
        ("additive, projected", {"rank": RANK_2, "mask": "lengths per query"}),
    )
]


@pytest.fixture(scope="module", params=tiered(CASES))
def problem(request):
    return draw(request.param)


class TestEveryCase(EveryCase):
    def test_explain_says_what_ran(self, problem):
        explain_says_what_ran(problem)

    def test_breaking_one_parameter_shows(self, problem):
        """Negative control: with one number of each parameter changed, or of the key that counts
        most, the output moves.
        """
        if problem.case.regime != "softmax":
            return  # Hard and uniform weights need not move.
        names = [n for n in problem.inputs if n not in ("query", "value", "bias")]
        for name in names:
            broken = problem.inputs[name].copy()
            gradient = np.abs(problem.gradients[name])
            where = np.unravel_index(np.argmax(gradient), gradient.shape)
            broken[where] += 1.0
            out, _ = problem.run({name: rounded(broken, problem.dtypes[name])})
            assert error(out, problem.pooled.out) > 2 * problem.tolerance("out"), name


@pytest.mark.parametrize("name", [name for name, row in SCORES.items() if row.approximate])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_approximate_lift_is_what_is_tested(name, dtype):
    """The cases above are long enough and in range: on blockwise the lift runs, except in
    float64.
    """
    problem = draw(of(name, backend="blockwise", dtype=dtype))
    with BACKENDS["blockwise"].tiling():
        _, lifted = regard.attend(
            **problem.as_arguments(problem.inputs),
            **as_arguments(problem.facts),
            implementation="blockwise",
            return_lifted=True,
        )
    assert bool(lifted) is (dtype != "float64")


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_scores_is_the_definition(name, dtype):
    """regard.scores: a(q, k) for each pair, in float32 or wider, whatever the lift does."""
    problem = draw(Case(score=name, dtype=dtype, mask="none"))
    arguments = problem.as_arguments(problem.inputs)
    got = jax.jit(regard.scores)(arguments["query"], arguments["key"], score=arguments["score"])
    wide = "float64" if dtype == "float64" else "float32"
    assert str(got.dtype) == wide
    expected = oracle.scores(
        problem.inputs["query"], problem.inputs["key"], score=problem._oracle_arguments["score"]
    )
    assert_close(got, expected, DTYPES[wide].forward, "scores")


@pytest.mark.parametrize("name", SCORES)
def test_is_a_pytree(name):
    """Its parameters are its leaves; a trip through flatten and unflatten changes nothing."""
    problem = draw(Case(score=name))
    score = problem.as_arguments(problem.inputs)["score"]
    leaves, tree = jax.tree.flatten(score)
    assert len(leaves) == len(problem._oracle_arguments["score"].parameters)
    again = jax.tree.unflatten(tree, leaves)
    assert type(again) is type(score)
    for parameter in problem._oracle_arguments["score"].parameters:
        read = SCORES[name].read
        assert read(again, parameter) is read(score, parameter)
    assert tree == jax.tree.structure(score)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", LIFTED)
def test_vmap_over_the_score(name, backend):
    """A batch of scores, one per example, equals each score on its example: parameters are data."""
    problems = [draw(of(name, backend=backend, seed=seed)) for seed in range(2)]
    arguments = jax.tree.map(
        lambda *leaves: jnp.stack(leaves), *[p.as_arguments(p.inputs) for p in problems]
    )
    lens = jnp.stack([jnp.asarray(p.facts["valid_lens"]) for p in problems])
    chosen = BACKENDS[backend]
    with chosen.tiling():
        outs = jax.jit(
            jax.vmap(
                lambda arguments, lens: regard.attend(
                    **arguments, valid_lens=lens, implementation=chosen.implementation
                )
            )
        )(arguments, lens)
    for problem, out in zip(problems, outs, strict=True):
        assert_close(out, problem.pooled.out, problem.tolerance("out"), "out")


@pytest.mark.parametrize("name", PER_HEAD)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.slow
def test_a_parameter_per_head_is_that_parameter_on_that_head(name, backend):
    """Heads with their own parameters equal one-head calls, each with its own: no head is mixed
    up.
    """
    problem = draw(of(name, backend=backend, rank={"N": 3, "K": 3}))
    out, _ = problem.answer
    shared = name.removesuffix(" per head")
    parameters = problem._oracle_arguments["score"].parameters
    for n in range(3):
        head = draw(of(shared, backend=backend, rank={"N": 1, "K": 1}))
        head_inputs = {
            name: problem.inputs[name][:, :, n : n + 1] for name in ("query", "key", "value")
        }
        head_inputs |= {parameter: p[n] for parameter, p in parameters.items()}
        alone, _ = head.run(head_inputs, problem.facts)
        assert_close(alone, out[:, :, n : n + 1], head.tolerance("out"), f"head {n}")
