"""Finite inputs give finite, right weights and outputs, up to the last number of each dtype.

Every regime on every backend against the float64 oracle: scores of ±3e38, of 1e12 by large
queries, subnormal scores and signed zeros, values of 1e36, rows with one key.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
import regard
from cases import BACKENDS, REGIMES

pytestmark = pytest.mark.sampled(2)

LARGEST = float(np.finfo(np.float32).max)


class Extreme(NamedTuple):
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    bias: np.ndarray | None = None
    may: np.ndarray | None = None
    score: tuple = (regard.Dot, oracle.Dot, {})
    dtype: str = "float32"


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def by_bias(rows, **others):
    """These scores, as the bias of a query and keys of zeros."""
    rows = np.asarray(rows, np.float32)
    T, S = rows.shape
    zeros = np.zeros((T, 1), np.float32), np.zeros((S, 1), np.float32)
    return Extreme(*zeros, normal(S, 3), bias=rows, **others)


def large_queries(T, size, **others):
    return Extreme(normal(T, 8) * np.float32(size), normal(11, 8), normal(11, 3), **others)


def large_values(S, size, dtype="float32"):
    """Values of one size, all with the same weight in every regime but Hard."""
    value = np.full((S, 2), size, np.float32) * np.array([1.0, -1.0], np.float32)
    return Extreme(np.zeros((3, 4), np.float32), normal(S, 4), value, dtype=dtype)


ONE = np.array([[False, True, False, False]])
HALF = np.array([[True, False, True, False]])
EXTREMES = {
    "one query of 1e10": large_queries(1, 1e10),
    "one query of 1e12": large_queries(1, 1e12),
    "queries of 1e12": large_queries(5, 1e12),
    "queries of 1e30": large_queries(5, 1e30),
    "scores of 1e37": large_queries(5, 1e37),
    "one query of 1e12, masked": large_queries(1, 1e12, may=np.arange(11)[None] % 3 > 0),
    "one query of 1e12, a learned scale": large_queries(
        1, 1e12, score=(regard.Dot, oracle.Dot, {"scale": np.float32(0.3)})
    ),
    "points of 1e12, gaussian": Extreme(
        *(normal(n, 8)[:, ::-1] * np.float32(1e12) for n in (1, 11)),
        normal(11, 3),
        score=(regard.Gaussian, oracle.Gaussian, {"width": np.float32(0.7)}),
    ),
    "queries of 1e12, bilinear": large_queries(
        1, 1e12, score=(regard.Bilinear, oracle.Bilinear, {"kernel": normal(8, 8)})
    ),
    "queries of 1e12, additive": large_queries(
        3,
        1e12,
        score=(
            regard.Additive,
            oracle.Additive,
            {"query_kernel": normal(8, 4), "key_kernel": normal(8, 4), "vector": normal(4)},
        ),
    ),
    "additive, a vector of 1e30": large_queries(
        3,
        1.0,
        score=(
            regard.Additive,
            oracle.Additive,
            {
                "query_kernel": normal(8, 4),
                "key_kernel": normal(8, 4)[::-1].copy(),
                "vector": normal(4) * np.float32(1e30),
            },
        ),
    ),
    "both ends": by_bias([[3e38, -3e38, 0.0, 1.0], [-3e38, -3e38, -3e38, -2e38]]),
    "all the largest": by_bias([[LARGEST] * 4, [-LARGEST] * 4]),
    "all the smallest, some masked": by_bias([[-LARGEST] * 4], may=HALF),
    "one key of -3e38": by_bias([[-3e38, 5.0, 6.0, 7.0]], may=np.array([[True] + [False] * 3])),
    "one key of 3e38": by_bias([[5.0, 3e38, 6.0, 7.0]], may=ONE),
    "subnormal": by_bias([[1e-40, -1e-40, 1e-45, 0.0]]),
    "signed zeros": by_bias([[0.0, -0.0, -0.0, 0.0], [-0.0] * 4]),
    "700 values of 1e36": large_values(700, 1e36),
    "700 values of 3e38": large_values(700, 3e38),
    "one value of the largest number": large_values(1, LARGEST),
    "700 values of 1e-30": large_values(700, 1e-30),
    "700 values of 65504 in float16": large_values(700, 65504, "float16"),
    "700 values of 1e36 in bfloat16": large_values(700, 1e36, "bfloat16"),
    "float16, everything 65504": Extreme(
        *(np.full((n, 64), 65504, np.float32) for n in (2, 5, 5)), dtype="float16"
    ),
}


def expected(case, regime):
    row = case.score[1](case.score[2])
    arrays = [np.asarray(jnp.asarray(x, case.dtype)).astype(np.float64) for x in case[:3]]
    return oracle.attend(*arrays, score=row, may=case.may, bias=case.bias, regime=regime)


def arguments(case):
    arrays = [jnp.asarray(x, case.dtype) for x in case[:3]]
    score = case.score[0](**{name: jnp.asarray(x) for name, x in case.score[2].items()})
    may = None if case.may is None else jnp.asarray(case.may)
    bias = None if case.bias is None else jnp.asarray(case.bias)
    return arrays, dict(score=score, mask=may, bias=bias)


SUMS = [name for name in EXTREMES if name.startswith("700 values")]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("regime", REGIMES)
def test_finite_inputs_give_the_oracles_output(regime, backend):
    check([name for name in EXTREMES if name not in SUMS], regime, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("regime", REGIMES)
def test_a_sum_of_weighted_values_stays_in_range_where_their_mean_does(regime, backend):
    check(SUMS, regime, backend)


def check(names, regime, backend):
    normalize, exact = REGIMES[regime]
    wrong = []
    for name in names:
        case = EXTREMES[name]
        if "gaussian" in name and backend == "blockwise" and not normalize.shift_invariant:
            continue  # the lift's rounding is that of squared distances: its docstring says so
        with np.errstate(all="ignore"):
            pooled = expected(case, exact)
        limit = float(jnp.finfo(case.dtype).max)
        if not np.all(np.abs(pooled.weights) < 0.9 * LARGEST) or np.abs(pooled.out).max() > limit:
            continue  # no number of this dtype: Cone, of weights or values without a bound
        (query, key, value), keywords = arguments(case)
        keywords |= dict(normalize=normalize, implementation=BACKENDS[backend].implementation)
        with BACKENDS[backend].tiling():
            out, weights = regard.attend(query, key, value, return_weights=True, **keywords)
        for what, got, right in (("weights", weights, pooled.weights), ("out", out, pooled.out)):
            got = np.asarray(got).astype(np.float64)
            size = np.abs(right).max()
            off = np.abs(got - right).max()
            eps = float(jnp.finfo(case.dtype).eps)
            if not off <= max(4 * eps, 2e-5) * size:
                wrong.append(f"{name}: {what} {got.ravel()[:3]}, expected {right.ravel()[:3]}")
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [name for name in EXTREMES if "1e1" in name or "1e30" in name])
def test_gradients_of_large_scores_are_the_oracles(name, backend):
    """Softmax is one-hot there: all of d out goes to one value, and none to the scores."""
    case = EXTREMES[name]
    (query, key, value), keywords = arguments(case)
    cotangent = normal(query.shape[0], value.shape[1])

    def pool(value):
        implementation = BACKENDS[backend].implementation
        return regard.attend(query, key, value, implementation=implementation, **keywords)

    with BACKENDS[backend].tiling():
        (got,) = jax.vjp(pool, value)[1](jnp.asarray(cotangent))
    expected = oracle.gradients(
        cotangent,
        *(x.astype(np.float64) for x in case[:3]),
        score=case.score[1](case.score[2]),
        may=case.may,
        bias=case.bias,
    )
    np.testing.assert_allclose(got, expected["value"], rtol=1e-5, atol=1e-6)
