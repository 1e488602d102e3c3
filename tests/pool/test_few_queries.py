"""A few queries against many keys on a CPU: the products that read keys in the caller's layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regard
from regard.pool import parts

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


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(parts, "PART", 2_000)  # one or two heads, or a few examples
    jax.clear_caches()
    yield
    jax.clear_caches()


LENS = jnp.array([37, 0, 20, 5, 37, 1, 30], jnp.int32)


def normal(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), jnp.float32)


# Key heads of 4 heads, and the call. In parts of 2,000 numbers 4 key heads are two parts, 2 are one
# example, and 1 is two examples, of which the last part repeats one.
PARTS = {
    "lengths": (1, dict(valid_lens=LENS)),
    "band, dropout": (
        4,
        dict(mask=regard.Mask.causal(), dropout_rate=0.3, dropout_rng=jax.random.key(3)),
    ),
    "mask, bias of all": (2, dict(mask=normal(7, 4, 3, 37) > 0, bias=normal(1, 4, 3, 37))),
    "repeated, bias of all": (1, dict(mask=normal(1, 4, 1, 37) > 0, bias=normal(1, 1, 3, 37))),
    "bias of each, segments": (
        4,
        dict(
            bias=normal(7, 4, 1, 37),
            mask=regard.Mask.segments(jnp.arange(3) // 2, jnp.arange(37) // 20),
        ),
    ),
    "width of each head": (4, dict(score=regard.Gaussian(jnp.array([1.0, 2.0, 3.0, 4.0])))),
    "log-sum-exp": (2, dict(score=regard.Gaussian(2.0), valid_lens=LENS, return_lse=True)),
    "soft cap": (1, dict(score=regard.Bilinear(normal(6, 6)), softcap=3.0)),
    "numbers by distance": (4, dict(score=regard.Dot() + regard.RelativeBias(normal(4, 39)))),
    "sink": (4, dict(sink=normal(4), return_lse=True)),
    "sparsemax": (2, dict(normalize=regard.Sparsemax())),
    "uniform": (1, dict(normalize=regard.Uniform(), valid_lens=LENS)),
    "bfloat16": (4, dict(score=regard.Gaussian(2.0), valid_lens=LENS)),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_call_in_parts_equals_the_reference(monkeypatch, name):
    monkeypatch.setattr(parts, "PART", 2_000)
    monkeypatch.setattr(parts, "WHOLE", 1)
    K, options = PARTS[name]
    dtype = jnp.bfloat16 if name == "bfloat16" else jnp.float32
    rng = np.random.default_rng(K)
    shapes = (7, 3, 4, 6), (7, 37, K, 6), (7, 37, K, 5), (7, 3, 4, 5)
    query, key, value, cotangent = (jnp.asarray(rng.standard_normal(s), dtype) for s in shapes)
    arrays = {name: x for name, x in options.items() if name in ("score", "bias", "sink")}
    others = {name: x for name, x in options.items() if name not in arrays}

    def results(implementation):
        def pooled(query, key, value, arrays):
            options = dict(implementation=implementation, **arrays, **others)
            return jax.tree.leaves(regard.attend(query, key, value, **options))

        found, pull = jax.vjp(pooled, query, key, value, arrays)
        lse = [jnp.where(jnp.isfinite(x), jnp.sin(x), 0.0) for x in found[1:]]
        return jax.tree.leaves((found, pull([cotangent, *lse])))

    assert "few queries" in regard.explain(query, key, value, implementation="blockwise", **options)
    tolerance = 2e-2 if dtype == jnp.bfloat16 else 1e-5
    for got, want in zip(results("blockwise"), results("reference"), strict=True):
        scale = max(1.0, float(jnp.abs(jnp.where(jnp.isfinite(want), want, 0.0)).max()))
        got, want = (np.asarray(x, np.float32) for x in (got, want))
        np.testing.assert_allclose(got, want, rtol=0, atol=scale * tolerance)


@pytest.mark.parametrize(
    ("sizes", "dtype", "score", "backward"),
    [
        ((15, 4, 313, 16, 16, 64), jnp.float32, regard.Dot(), True),
        ((8, 5, 700, 4, 4, 256), jnp.float32, regard.Dot(), False),  # read in place
        ((12, 4, 852, 16, 16, 32), jnp.bfloat16, regard.Gaussian(3.0), False),
    ],
    ids=["gradients", "in place", "bfloat16"],
)
def test_no_copy_of_all_keys_is_made(sizes, dtype, score, backward):
    """Temporaries of more than some 20 MiB are mapped anew at each call, which takes several times
    as long as the call; a copy of keys and values takes 36 MiB or more here.
    """
    B, T, S, N, K, D = sizes
    query = jax.ShapeDtypeStruct((B, T, N, D), dtype)
    key = jax.ShapeDtypeStruct((B, S, K, D), dtype)

    def call(query, key, value, cotangent):
        options = dict(score=score, valid_lens=jnp.arange(B, dtype=jnp.int32) * 10)
        out, pull = jax.vjp(lambda *inputs: regard.attend(*inputs, **options), query, key, value)
        return (out, pull(cotangent)) if backward else out

    memory = jax.jit(call).lower(query, key, key, query).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 8 * 2**20
