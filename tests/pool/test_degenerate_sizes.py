"""Sizes of zero and values near the largest float: each has a sensible answer, on every backend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regard
from cases import BACKENDS
from regard import Mask

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.sampled(4)]


def ones(*shape):
    return jnp.ones(shape, jnp.float32)


def additive(width, hidden):
    return regard.Additive(ones(width, hidden), ones(width, hidden), ones(hidden))


# (T, S, D, V), the score, what masks.
SIZES = {
    "no queries, lengths": ((0, 5, 4, 3), regard.Dot(), dict(valid_lens=jnp.array([3, 5]))),
    "no queries, lengths per query": (
        (0, 5, 4, 3),
        regard.Dot(),
        dict(valid_lens=jnp.zeros((2, 0), int)),
    ),
    "no queries, causal": ((0, 5, 4, 3), regard.Dot(), dict(mask=Mask.causal(align="start"))),
    "no queries, a length and a mask": (
        (0, 5, 4, 3),
        regard.Dot(),
        dict(valid_lens=jnp.array(3), mask=Mask.causal() & Mask.boolean(jnp.ones((0, 5), bool))),
    ),
    "no columns of values": ((3, 5, 4, 0), regard.Dot(), {}),
    "no width": ((3, 5, 0, 2), regard.Dot(), dict(valid_lens=jnp.array([0, 4]))),
    "no width, Gaussian": ((3, 5, 0, 2), regard.Gaussian(), {}),
    "no hidden units": ((3, 5, 4, 2), additive(4, 0), {}),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_zero(name, backend):
    """Scores over no width are 0, so the weights are uniform; nothing to return is an empty array;
    and gradients have their inputs' shapes and no NaN.
    """
    (T, S, D, V), score, masks = SIZES[name]
    query, key, value = ones(2, T, D), ones(2, S, D), ones(2, S, V)
    chosen = BACKENDS[backend]

    def pooled(query, key, value):
        return regard.attend(
            query, key, value, score=score, **masks, implementation=chosen.implementation
        )

    with chosen.tiling():
        out, pull = jax.vjp(pooled, query, key, value)
        gradients = pull(jnp.ones_like(out))
    assert out.shape == (2, T, V)
    lens = masks.get("valid_lens", jnp.full(2, S))
    if out.size:
        expected = np.broadcast_to(np.asarray(lens > 0)[:, None, None], out.shape)
        np.testing.assert_allclose(out, expected, rtol=1e-6)
    for gradient, of in zip(gradients, (query, key, value), strict=True):
        assert gradient.shape == of.shape
        assert np.isfinite(gradient).all()


def test_summaries_of_no_width():
    summary = regard.summarize(ones(2, 3, 0), ones(2, 5, 0))
    np.testing.assert_allclose(summary.max_weight, np.full((2, 3), 0.2), rtol=1e-6)
    image = regard.attention_map(ones(2, 3, 0), ones(2, 5, 0), resolution=(3, 5))
    np.testing.assert_allclose(image, np.full((2, 3, 5), 0.2), rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("regime", [regard.Softmax(), regard.Uniform(), regard.Sparsemax()])
def test_averages_of_large_values_do_not_overflow(regime, backend):
    """700 values of 1e36 average to 1e36, while their sum is past float32."""
    query, key = jnp.zeros((1, 3, 4), jnp.float32), jnp.zeros((1, 700, 4), jnp.float32)
    value = jnp.full((1, 700, 2), 1e36, jnp.float32)
    chosen = BACKENDS[backend]
    with chosen.tiling():
        out = regard.attend(
            query, key, value, normalize=regime, implementation=chosen.implementation
        )
    np.testing.assert_allclose(out, np.full((1, 3, 2), 1e36), rtol=2e-5)
