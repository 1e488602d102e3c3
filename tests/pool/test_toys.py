"""Adding a backend or a score is one file and one line: two toys join the contract suites."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import cases
import regard
from contract import (
    breaking_one_value_shows,
    empty_rows_are_exactly_zero,
    equals_the_oracle,
    padding_reaches_nothing,
)
from pool.toy_backend import KeyByKey
from problem import draw
from regard.pool.choose import REGISTRY, Rule
from score.toy_score import OracleScaled, Scaled

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.sampled(5)]

# What a file of one's own adds to the tables: a line for a score and a line for a backend.
SCORE = cases.ScoreRow(Scaled, OracleScaled, (6, 6), lambda normal, N: {"gain": normal(6)})
BACKEND = cases.Backend("key by key")
RULE = Rule(KeyByKey(), lambda request: False, "never: it is here to be asked for", "not: a test")


@pytest.fixture(autouse=True, scope="module")
def toys():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("regard.pool.choose.REGISTRY", [RULE, *REGISTRY])
        patch.setitem(cases.BACKENDS, "toy", BACKEND)
        patch.setitem(cases.SCORES, "toy", SCORE)
        yield


PLAIN = [
    cases.Case(),
    cases.Case(mask="everything", regime="sparsemax"),
    cases.Case(mask="causal and lengths", dtype="bfloat16"),
    cases.Case(bias=(2, 1, 19, 37), regime="kernel"),
    cases.Case(sink=True, softcap=0.7),
    cases.Case(sizes=cases.Sizes(B=None, N=None, K=None), mask="segments"),
]
ALL = [
    dataclasses.replace(case, backend=backend, score=score)
    for backend in ("toy", "reference", "blockwise")
    for score in ("toy", "dot", "additive")
    for case in PLAIN
    if "toy" in (backend, score)
]


@pytest.mark.parametrize("case", ALL, ids=str)
def test_the_contract(case):
    problem = draw(case)
    equals_the_oracle(problem)
    empty_rows_are_exactly_zero(problem)
    padding_reaches_nothing(problem)
    breaking_one_value_shows(problem)


def test_a_registered_backend_is_explained_and_may_refuse():
    x = jnp.ones((2, 8, 4), jnp.float32)
    text = regard.explain(x, x, x, implementation="key by key")
    assert text.startswith("key by key runs: asked for; adds one key after the other")
    assert "not key by key: could, but is preferred only for this: never" in regard.explain(
        x, x, x, verbose=True
    )
    with pytest.raises(NotImplementedError, match="key by key: draws no random numbers"):
        regard.attend(
            x,
            x,
            x,
            dropout_rate=0.5,
            dropout_rng=jax.random.key(0),
            implementation="key by key",
        )


def test_a_subclass_that_redefines_scores_inherits_no_lift():
    class Squared(regard.Dot):
        def scores(self, query, key):
            return super().scores(query, key) ** 2

    x = jnp.arange(24.0, dtype=jnp.float32).reshape(1, 6, 4) / 24
    assert Squared().lift(x, x) is None
    assert Squared().static_scale(4) is None
