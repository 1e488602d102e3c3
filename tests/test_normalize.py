"""The weight regimes on given scores: every row of weights against the oracle, ties and -inf
included.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
import regard
from cases import BACKENDS, DTYPES, REGIMES
from problem import assert_close

pytestmark = pytest.mark.sampled(2)

T, S = 6, 9


def weights_of(scores, normalize, may=None, backend="reference"):
    """The weights of these scores: a query and keys of zeros, and the scores as the bias."""
    T, S = scores.shape
    dtype = jnp.asarray(scores).dtype
    chosen = BACKENDS[backend]
    with chosen.tiling():
        return np.asarray(
            regard.weights(
                jnp.zeros((T, 1), dtype),
                jnp.zeros((S, 1), dtype),
                bias=jnp.asarray(scores),
                mask=None if may is None else jnp.asarray(may),
                normalize=normalize,
                implementation=chosen.implementation,
            )
        )


def oracle_weights(scores, regime, may=None):
    T, S = scores.shape
    return oracle.attend(
        np.zeros((T, 1)),
        np.zeros((S, 1)),
        np.zeros((S, 1)),
        score=oracle.Dot(),
        bias=scores,
        may=may,
        regime=regime,
    ).weights


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", REGIMES)
def test_given_scores(name, backend, dtype):
    rng = np.random.default_rng(0)
    scores = (2 * rng.standard_normal((T, S))).astype(dtype)
    may = rng.random((T, S)) < 0.7
    may[2] = False
    got = weights_of(scores, REGIMES[name].normalize, may, backend)
    assert got.dtype == dtype
    assert_close(
        got, oracle_weights(scores, REGIMES[name].oracle, may), DTYPES[dtype].forward, name
    )
    np.testing.assert_array_equal(got[~may], 0)
    np.testing.assert_array_equal(got[2], 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name", ["softmax", "sparsemax", "kernel", "hard", "hard, straight through", "uniform"]
)
def test_convex_rows_sum_to_one(name, backend):
    scores = np.random.default_rng(1).standard_normal((T, S)).astype(np.float32)
    got = weights_of(scores, REGIMES[name].normalize, backend=backend)
    assert (got >= 0).all()
    np.testing.assert_allclose(got.sum(axis=-1), 1.0, rtol=1e-6)


SPARSEMAX_ROWS = {
    "all equal": ([0.5, 0.5, 0.5, 0.5], [0.25, 0.25, 0.25, 0.25]),
    "two tied on top": ([2.0, 2.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]),
    # A key exactly at the threshold: 1.0 over 0.0 leaves (1, 0), the tie of support sizes.
    "exactly at the threshold": ([1.0, 0.0, -1.0, -1.0], [1.0, 0.0, 0.0, 0.0]),
    "one far above": ([100.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]),
    # Support 3: (0.9 + 0.6 + 0.6 - 1) / 3 = 0.3666...
    "a tie inside the support": (
        [0.9, 0.6, 0.6, -3.0],
        [0.9 - 1.1 / 3, 0.6 - 1.1 / 3, 0.6 - 1.1 / 3, 0.0],
    ),
    "one key": ([3.0], [1.0]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SPARSEMAX_ROWS)
def test_sparsemax_ties(name, backend):
    scores, expected = (np.array([row], np.float32) for row in SPARSEMAX_ROWS[name])
    np.testing.assert_allclose(
        weights_of(scores, regard.Sparsemax(), backend=backend), expected, atol=2e-7
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
def test_sparsemax_and_softmax_do_not_see_a_constant(shift, backend):
    # Steps of 1/8 are exact in float32 next to 1e4, so the shift changes nothing.
    scores = np.round(8 * np.random.default_rng(2).standard_normal((T, S))).astype(np.float32) / 8
    for normalize in (regard.Sparsemax(), regard.Softmax()):
        np.testing.assert_allclose(
            weights_of(scores + np.float32(shift), normalize, backend=backend),
            weights_of(scores, normalize, backend=backend),
            atol=2e-3 if shift else 0,  # the threshold of sparsemax is a sum of numbers of 1e4
        )


@pytest.mark.parametrize("straight_through", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_hard_ties_go_to_the_first_key(backend, straight_through):
    scores = np.zeros((2, 37), np.float32)
    scores[0, [20, 5, 36]] = 3.0
    got = weights_of(scores, regard.Hard(straight_through=straight_through), backend=backend)
    expected = np.zeros_like(scores)
    expected[0, 5] = expected[1, 0] = 1.0
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["softmax", "sparsemax", "hard", "hard, straight through"])
def test_minus_infinity_in_the_bias_is_not_taking_part(name, backend):
    """-inf on some keys: weight 0 there. On all of them: an empty row. Never NaN, forward or
    backward.
    """
    rng = np.random.default_rng(4)
    scores = rng.standard_normal((T, S)).astype(np.float32)
    scores[rng.random((T, S)) < 0.3] = -np.inf
    scores[3] = -np.inf
    got = weights_of(scores, REGIMES[name].normalize, backend=backend)
    expected = oracle_weights(scores, REGIMES[name].oracle)
    assert_close(got, expected, 2e-6, name)
    np.testing.assert_array_equal(got[3], 0)
    np.testing.assert_array_equal(got[np.isinf(scores)], 0)

    value = rng.standard_normal((S, 2)).astype(np.float32)
    chosen = BACKENDS[backend]
    zeros = (jnp.zeros((T, 1), jnp.float32), jnp.zeros((S, 1), jnp.float32))

    def loss(bias, value):
        out = regard.attend(
            *zeros,
            value,
            bias=bias,
            normalize=REGIMES[name].normalize,
            implementation=chosen.implementation,
        )
        return jnp.sum(out * out)

    with chosen.tiling():
        slopes = jax.grad(loss, argnums=(0, 1))(jnp.asarray(scores), jnp.asarray(value))
    out = expected @ value
    arrays = (np.zeros((T, 1)), np.zeros((S, 1)), value)
    wanted = oracle.gradients(
        2 * out, *arrays, score=oracle.Dot(), bias=scores, regime=REGIMES[name].oracle
    )
    assert_close(slopes[0], wanted["bias"], 1e-5, "bias")
    assert_close(slopes[1], wanted["value"], 1e-5, "value")
    np.testing.assert_array_equal(np.asarray(slopes[0])[3], 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_kernel_without_neighbors_is_an_empty_row(backend):
    """f of compact support and a query far from every key: 0/0 is 0 here, in value and in
    gradient.
    """
    scores = np.full((2, S), 5.0, np.float32)
    scores[1] = np.linspace(-2, 2, S)
    row = REGIMES["compact kernel"]
    got = weights_of(scores, row.normalize, backend=backend)
    np.testing.assert_array_equal(got[0], 0)
    assert_close(got, oracle_weights(scores, row.oracle), 2e-6)


# ---------------------------------------------------------------------------------------------
# masked_softmax: the same rule on scores that the caller has already.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "lens_shape"),
    [
        ((T, S), ()),
        ((T, S), (T,)),
        ((2, T, S), (2,)),
        ((2, T, S), (2, T)),
        ((2, 3, T, S), (2, 3, T)),
        ((2, 3, T, S), None),
    ],
)
def test_masked_softmax(shape, lens_shape, dtype):
    rng = np.random.default_rng(0)
    scores = jnp.asarray(rng.standard_normal(shape), dtype)
    lens = None if lens_shape is None else rng.integers(0, S, lens_shape)
    got = regard.masked_softmax(scores, None if lens is None else jnp.asarray(lens))
    assert got.dtype == scores.dtype
    assert got.shape == shape
    may = oracle.allowed(shape, valid_lens=lens)
    exact = np.asarray(scores).astype(np.float64)
    expected = np.zeros(shape)
    for row in np.ndindex(shape[:-1]):
        if may[row].any():
            expected[row][may[row]] = oracle.Softmax().weights(exact[row][may[row]])
    assert_close(got, expected, DTYPES[dtype].forward)
    np.testing.assert_array_equal(np.asarray(got)[~may], 0)


def test_masked_softmax_takes_a_mask_and_poison():
    """NaN in what is masked out is not seen; an empty row is zeros; gradients are finite."""
    scores = np.random.default_rng(1).standard_normal((2, T, S)).astype(np.float32)
    may = oracle.allowed((2, T, S), causal="start", valid_lens=[0, 4])
    poisoned = np.where(may, scores, np.nan).astype(np.float32)
    mask, lens = regard.Mask.causal(align="start"), jnp.asarray([0, 4], jnp.int32)
    clean = regard.masked_softmax(jnp.asarray(scores), lens, mask)
    got = regard.masked_softmax(jnp.asarray(poisoned), lens, mask)
    np.testing.assert_array_equal(got, clean)
    np.testing.assert_array_equal(np.asarray(got)[0], 0)

    def loss(scores):
        return jnp.sum(jnp.square(regard.masked_softmax(scores, lens, mask)))

    slopes = np.asarray(jax.grad(loss)(jnp.asarray(poisoned)))
    np.testing.assert_array_equal(slopes[~may], 0)
    np.testing.assert_array_equal(slopes, jax.grad(loss)(jnp.asarray(scores)))


def test_masked_softmax_without_a_mask_is_softmax():
    scores = jnp.asarray(np.random.default_rng(1).standard_normal((T, S)), jnp.float32)
    np.testing.assert_allclose(regard.masked_softmax(scores), jax.nn.softmax(scores), rtol=1e-6)
