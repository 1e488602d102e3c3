"""The kernel of the narrow features and its backward pass, against the expansion's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from problem import assert_close, rounded
from regard.pool.kernels.features import make_features
from regard.score.narrow_features import NarrowExpansion

pytestmark = [pytest.mark.sampled(2), pytest.mark.usefixtures("quick_compilation")]


def expansion_and_rows(h, rank=3, terms=6, examples=1, heads=4):
    """Four query heads over two key heads; the tables are shared by two examples, or one each."""
    rng = np.random.default_rng(h)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    squashes = [
        (0.5 + 0.1 * normal(examples, 2, 1, h), 0.3 * normal(examples, 2, 1, h)) for _ in "xy"
    ]
    tables = [normal(examples, 2, rank, terms, h) for _ in "xy"]
    expansion = NarrowExpansion(*squashes, *tables, normal(examples, heads, 1, h))
    return expansion, normal(2, heads, 32, h), normal(2, 2, 64, h)


def by_kernel(dtype):
    return functools.partial(make_features, dtype=jnp.dtype(dtype), interpret=True)


def by_expansion(expansion, query, key):
    return expansion.query(query), expansion.key(key)


def has_kernel(function, *args):
    return "regard_narrow_features" in str(jax.make_jaxpr(function)(*args))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("h", "examples"), [(16, 1), (48, 2), (128, 1)])
def test_features_and_gradients_are_the_expansions(h, examples, dtype):
    arrays = expansion_and_rows(h, examples=examples)
    assert has_kernel(by_kernel(dtype), *arrays)

    @functools.partial(jax.jit, static_argnums=0)
    def run(function, arrays, cotangents):
        features, pull = jax.vjp(function, *arrays)
        return features, pull(tuple(cotangents))

    expected = jax.eval_shape(by_expansion, *arrays)
    rng = np.random.default_rng(1)
    cotangents = [rounded(rng.standard_normal(side.shape), dtype) for side in expected]
    features, found = run(by_kernel(dtype), arrays, [jnp.asarray(c, dtype) for c in cotangents])
    expected, slopes = run(by_expansion, arrays, [jnp.asarray(c, jnp.float32) for c in cotangents])
    for one, other in zip(features, expected, strict=True):
        assert str(one.dtype) == dtype
        # The same float32 number to some 1e-6; now and then it rounds to the other side.
        assert_close(one, rounded(other, dtype), 0.1 * float(jnp.finfo(dtype).eps), "features")
    for name, one, other in zip(("query", "key"), found[1:], slopes[1:], strict=True):
        assert_close(one, other, 1e-5, f"gradient of {name}")
    assert_close(found[0].amplitude, slopes[0].amplitude, 1e-5, "gradient of amplitude")


@pytest.mark.parametrize(
    ("h", "tokens", "dtype"),
    [(24, 32, "bfloat16"), (16, 31, "bfloat16"), (16, 32, "float32")],
    ids=["units in odd numbers", "rows in odd numbers", "float32"],
)
def test_features_without_a_kernel(h, tokens, dtype):
    expansion, x, y = expansion_and_rows(h)
    arrays = expansion, x[:, :, :tokens], y
    assert not has_kernel(by_kernel(dtype), *arrays)
    for one, other in zip(by_kernel(dtype)(*arrays), by_expansion(*arrays), strict=True):
        np.testing.assert_array_equal(one, other.astype(dtype))
