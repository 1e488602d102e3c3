"""A few queries against many keys on a CPU: the products that read keys in the caller's layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regard

S = 600  # with these heads, past the size that the dense path takes


def draw(T: int, N: int, K: int, B: int = 4 * 33):
    rng = np.random.default_rng(T + N + K)
    shapes = (B, T, N, 16), (B, S, K, 16), (B, S, K, 8)
    return tuple(jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes)


@pytest.mark.parametrize(("T", "N", "K"), [(1, 4, 4), (1, 4, 2), (3, 4, 4), (2, 4, 1), (5, 2, 2)])
@pytest.mark.parametrize("score", [regard.Dot(), regard.Gaussian(3.0)])
def test_equals_the_definition_with_nan_in_padding(T, N, K, score):
    query, key, value = draw(T, N, K)
    lens = jnp.arange(len(query), dtype=jnp.int32) * 5  # the first has no key, some have all
    options = dict(score=score, valid_lens=lens)
    assert "few queries" in regard.explain(query, key, value, **options)
    want = regard.attend(query, key, value, implementation="reference", **options)
    padding = jnp.arange(S, dtype=jnp.int32)[None, :, None, None] >= lens[:, None, None, None]
    poisoned = [jnp.where(padding, jnp.nan, x) for x in (key, value)]
    got = regard.attend(query, *poisoned, **options)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(got[0], 0.0)

    def total(implementation):
        def of(query, key, value):
            out = regard.attend(query, key, value, implementation=implementation, **options)
            return jnp.sin(out).sum()

        return jax.jit(jax.grad(of, (0, 1, 2)))

    if T == 3:  # the derivatives are those of one other program, whatever the products
        right = total("reference")(query, key, value)
        for gradient, expected in zip(total(None)(query, *poisoned), right, strict=True):
            np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-5)


def test_an_infinite_key_of_one_head_leaves_the_other_heads_alone():
    query, key, value = draw(1, 4, 4)
    key = key.at[0, 0, 0, 0].set(jnp.inf)
    got = regard.attend(query, key, value)
    want = regard.attend(query, key, value, implementation="reference")
    assert np.isfinite(want[:, :, 1:]).all()  # a product by a block diagonal would make them NaN
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def positive(a):
    return (a > 0).astype(a.dtype)  # of NaN: 0


@pytest.mark.parametrize("regime", [regard.Hard(), regard.Kernel(positive)], ids=["hard", "kernel"])
def test_a_regime_that_makes_a_number_of_nan_is_not_fooled_by_another_heads_padding(regime):
    query, key, value = draw(1, 2, 2, B=2)
    lens = jnp.array([[[5], [S]], [[S], [3]]], jnp.int32)  # [B, N, T]
    padding = jnp.arange(S, dtype=jnp.int32)[None, :, None, None] >= lens.swapaxes(1, 2)[..., None]
    poisoned = jnp.where(padding, jnp.nan, key)
    options = dict(valid_lens=lens, normalize=regime)
    got = regard.attend(query, poisoned, value, implementation="blockwise", **options)
    want = regard.attend(query, key, value, implementation="reference", **options)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_forward_mode_and_dropout_equal_the_reference():
    query, key, value = draw(2, 4, 2)
    rng = jax.random.key(3)

    def pooled(implementation):
        return lambda query: regard.attend(
            query, key, value, dropout_rate=0.3, dropout_rng=rng, implementation=implementation
        )

    for got, want in zip(
        *(jax.jvp(pooled(name), (query,), (query,)) for name in (None, "reference")), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
