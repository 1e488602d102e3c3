"""What additive scores run as on a CPU: 1 - 2 / (1 + e^2x e^2y), or tanh where that overflows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
import regard
from problem import assert_close
from regard.pool.layout import tiling
from regard.score.logistic_form import REACH, LogisticForm

pytestmark = pytest.mark.sampled(2)

B, T, S, N, WIDTH, H, V = 2, 19, 37, 2, 6, 5, 3
LENS = np.array([S, 11], np.int32)
GRADIENTS = ("query", "key", "value", "query_kernel", "key_kernel", "vector")


@functools.cache
def drawn(scale=1.0, offset=0.0, heads=False):
    """Float32 numbers, as float64; `offset` is added to every x and taken from every y."""
    rng = np.random.default_rng(11)
    lead = (N,) if heads else ()
    arrays = {
        "query": rng.standard_normal((B, T, N, WIDTH)),
        "key": rng.standard_normal((B, S, N, WIDTH)),
        "value": rng.standard_normal((B, S, N, V)),
        "query_kernel": scale * rng.standard_normal((*lead, WIDTH, H)) / np.sqrt(WIDTH),
        "key_kernel": scale * rng.standard_normal((*lead, WIDTH, H)) / np.sqrt(WIDTH),
        "vector": rng.standard_normal((*lead, H)),
        "cotangent": rng.standard_normal((B, T, N, V)),
    }
    arrays["query"][..., 0] = arrays["key"][..., 0] = 1.0  # a column for the offset
    arrays["query_kernel"][..., 0, :] += offset
    arrays["key_kernel"][..., 0, :] -= offset
    return {name: np.float64(np.float32(x)) for name, x in arrays.items()}


def run(arrays, dtype="float32", regime=None, lens=LENS):
    def pool(arrays):
        kernels = (arrays[name] for name in ("query_kernel", "key_kernel", "vector"))
        return regard.attend(
            arrays["query"],
            arrays["key"],
            arrays["value"],
            score=regard.Additive(*kernels),
            valid_lens=jnp.asarray(lens),
            normalize=regard.Softmax() if regime is None else regime,
            implementation="blockwise",
            return_lifted=True,
        )

    arrays = {name: jnp.asarray(x, dtype) for name, x in arrays.items()}
    with tiling(block_q=8, block_k=16, block_b=1):
        out, pull, lifted = jax.vjp(pool, arrays, has_aux=True)
    assert not bool(lifted)
    return out, pull(arrays["cotangent"])[0]


def expected(arrays, regime=None):
    names = ("query_kernel", "key_kernel", "vector")
    keywords = {
        "score": oracle.Additive({name: arrays[name] for name in names}),
        "may": oracle.allowed((B, N, T, S), valid_lens=LENS),
    } | ({} if regime is None else {"regime": regime})
    tensors = arrays["query"], arrays["key"], arrays["value"]
    out = oracle.attend(*tensors, **keywords).out
    return out, oracle.gradients(arrays["cotangent"], *tensors, **keywords)


@pytest.mark.parametrize(
    "draw",
    [
        pytest.param({}, id="unit variance"),
        pytest.param({"heads": True}, id="one score per head"),
        pytest.param({"scale": 4.0}, id="saturated, in reach"),
        pytest.param({"scale": 30.0}, id="out of reach"),
        pytest.param({"offset": 15.0}, id="x and y far apart, in reach after centering"),
    ],
)
def test_against_the_oracle(draw):
    arrays = drawn(**draw)
    out, gradients = run(arrays)
    pooled, slopes = expected(arrays)
    # x + y of two numbers around `offset` is rounded at their size, not at the sum's.
    slack = 1 + draw.get("offset", 0.0)
    assert_close(out, pooled, 2e-6 * slack, "out")
    for name in GRADIENTS:
        assert_close(gradients[name], slopes[name], 1e-5 * slack, f"gradient of {name}")


def test_out_of_reach_is_out_of_reach():
    """The case above with scale 30 is one that the exponentials cannot do, in reach and at 4 it is
    one they can: else the test of the guard would test nothing.
    """
    for scale, inside in ((4.0, True), (30.0, False)):
        arrays = drawn(scale)
        x = arrays["query"] @ arrays["query_kernel"]
        assert bool(np.abs(x).max() <= REACH) is inside


def test_an_unnormalized_regime_sees_the_constant():
    """Cone(exp) sees sum_h w_h, which softmax cannot."""
    arrays = drawn()
    out, gradients = run(arrays, regime=regard.Cone(jnp.exp))
    pooled, slopes = expected(arrays, oracle.Cone(np.exp, np.exp))
    assert_close(out, pooled, 4e-6, "out")
    for name in GRADIENTS:
        assert_close(gradients[name], slopes[name], 1e-5, f"gradient of {name}")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_dtypes(dtype):
    eps = float(jnp.finfo(dtype).eps)
    rounded = {name: np.asarray(jnp.asarray(x, dtype), np.float64) for name, x in drawn().items()}
    out, gradients = run(rounded, dtype)
    pooled, slopes = expected(rounded)
    assert_close(out, pooled, max(4 * eps, 1e-14), "out")
    for name in GRADIENTS:
        assert_close(gradients[name], slopes[name], max(16 * eps, 1e-13), f"gradient of {name}")


def test_poisoned_padding_reaches_nothing():
    clean = drawn()
    poisoned = {name: x.copy() for name, x in clean.items()}
    for name, poison in (("key", np.nan), ("value", np.inf)):
        poisoned[name][1, LENS[1] :] = poison
    for got, want in zip(run(poisoned), run(clean), strict=True):
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_visible_nan_is_not_masked():
    arrays = {name: x.copy() for name, x in drawn().items()}
    arrays["key"][0, 3] = np.nan
    assert np.isnan(run(arrays)[0][0]).all()


def test_the_backward_pass_is_autodiffs():
    rng = np.random.default_rng(3)
    query, key = (jnp.asarray(np.exp(rng.standard_normal((2, n, H)))) for n in (4, 7))
    d_scores = jnp.asarray(rng.standard_normal((2, 4, 7)))
    score = LogisticForm(jnp.asarray(rng.standard_normal(H)))
    by_hand = score.scores_back(query, key, d_scores)
    by_jax = regard.Score.scores_back(score, query, key, d_scores)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12), by_hand, by_jax
    )
