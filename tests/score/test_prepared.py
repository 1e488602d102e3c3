"""Keys prepared once, Score.prepared: the same scores, far out of range and in every gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regard
from cases import SCORES
from regard.score.logistic_form import exponent, exponential

B, T, S, N, K = 2, 3, 5, 4, 2


def drawn(name, seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    row = SCORES[name]
    Hq, Hk = row.widths
    parameters = {k: jnp.asarray(v, jnp.float32) for k, v in row.draw(normal, N).items()}
    query, key = normal(B, N, T, Hq), normal(B, K, S, Hk)
    return row.make(**parameters), jnp.asarray(query), jnp.asarray(key)


def positions(key):
    return jnp.arange(key.shape[-2], dtype=jnp.int32)[None, None]


def by_definition(score, query, key):
    return score.scores(query, jnp.repeat(key, N // key.shape[1], axis=1))


@pytest.mark.parametrize("name", SCORES)
def test_prepared_keys_have_the_same_scores_and_gradients(name):
    score, query, key = drawn(name)

    def prepared(score, query, key):
        return by_definition(*_prepare(score, query, key))

    def _prepare(score, query, key):
        # The score must not depend on the keys: a memory asks for it without any.
        without_keys, _ = score.prepared(key[:1, :, :0], positions(key)[..., :0])
        return without_keys, query, score.prepared(key, positions(key))[1]

    def loss(function, *inputs):
        return jnp.sum(jnp.sin(function(*inputs)))

    expected = by_definition(score, query, key)
    np.testing.assert_allclose(prepared(score, query, key), expected, atol=3e-6)
    wanted = jax.grad(loss, argnums=(1, 2, 3))(by_definition, score, query, key)
    got = jax.grad(loss, argnums=(1, 2, 3))(prepared, score, query, key)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), got, wanted)


FAR = jnp.asarray(
    [
        [0.5, -1.0, 2.0],  # in range
        [100.0, 1.0, -1.0],
        [-100.0, 1e-9, 3.0],
        [0.0, 50.0, -1e9],
        [-1e20, 1e20, 0.0],
        [1e-9, -41.0, 39.0],
        [40.0, -40.0, 0.0],
    ],
    jnp.float32,
)


def test_exponent_inverts_exponential():
    np.testing.assert_allclose(exponent(exponential(FAR)), FAR, rtol=1e-6, atol=1e-7)
    slopes = jax.grad(lambda y: jnp.sum(exponent(exponential(y))))(FAR[:4])
    np.testing.assert_allclose(slopes, 1.0, rtol=1e-5)
    np.testing.assert_array_equal(exponent(jnp.zeros((2, 3), jnp.float32)), 0.0)


@pytest.mark.parametrize("offset", [0.0, 60.0, -300.0], ids=["near", "far", "farther"])
def test_additive_keys_far_out_of_range_are_exact(offset):
    """Large x and y that nearly cancel: products of exponentials are of no use, tanh is."""
    score = regard.Additive(None, None, jnp.asarray([1.0, -2.0, 0.5], jnp.float32))
    x = FAR[None, None, :1] - offset
    y = FAR[None, None, jnp.asarray([0, 5])] + offset
    stored_score, stored = score.prepared(y, positions(y))
    inputs = stored_score, x, stored
    expected = np.tanh(np.float64(x)[..., :, None, :] + np.float64(y)[..., None, :, :])
    expected = expected @ np.float64(score.vector)
    np.testing.assert_allclose(inputs[0].scores(x, stored), expected, atol=2e-5)
    out = regard.attend(x[0], y[0], y[0], score=score, implementation="blockwise")
    memory = regard.Memory.of(y[0], y[0], score=score)
    for implementation in ("reference", "blockwise"):
        got = regard.attend(x[0], memory, implementation=implementation)
        np.testing.assert_allclose(got, out, rtol=2e-6, atol=2e-6)


def test_a_subclass_with_scores_of_its_own_stores_raw_keys():
    class Twice(regard.Additive):
        def scores(self, query, key):
            return 2 * super().scores(query, key)

    score, _, key = drawn("additive")
    twice = Twice(score.query_kernel, score.key_kernel, score.vector)
    assert twice.prepared(key, positions(key))[1] is key
