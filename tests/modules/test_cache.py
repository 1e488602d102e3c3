"""Incremental decoding: a cache fed in chunks is the full causal pass, and its end is watched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regard
import regard.linen
import regard.nnx
from modules.front_ends import Module, assert_close, build
from regard.modules.cache import KVCache

pytestmark = pytest.mark.usefixtures("quick_compilation")

LENGTH = 10
SCORES = {
    "dot": dict(score="dot"),
    "gaussian": dict(score="gaussian"),
    "bilinear": dict(score="bilinear", key_head_features=2),
    "additive": dict(score="additive"),
    "additive, kernels": dict(score="additive", hidden_features=5, key_head_features=2),
    "mixed, grouped": dict(score=("dot", "gaussian", "additive", "additive"), key_heads=2),
}


def module_of(name):
    sizes = dict(num_heads=4, query_features=6, query_head_features=3, value_head_features=2)
    return Module("MultiHeadAttention", sizes | SCORES[name], (6, 6, 6))


def text(seed=0, length=LENGTH):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal((2, length, 6)), jnp.float32)


def in_chunks(built, x, size, max_len=LENGTH, **keywords):
    cache = built.module.init_cache(x.shape[0], max_len)
    outs, weights = [], []
    for start in range(0, x.shape[1], size):
        out, alpha, cache = built.call(
            built.params, x[:, start : start + size], cache=cache, return_weights=True, **keywords
        )
        outs.append(out)
        weights.append(alpha)
    return jnp.concatenate(outs, 1), jnp.concatenate(weights, 2), cache


@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("name", SCORES)
def test_chunks_equal_the_full_causal_pass(name, size):
    built, x = build("nnx", module_of(name)), text()
    out, weights = built.call(built.params, x, mask=regard.Mask.causal(), return_weights=True)
    got, alpha, cache = in_chunks(built, x, size)
    assert_close(got, out, 2e-6, "out")
    assert_close(alpha, weights, 2e-6, "weights")
    assert int(cache.length) == LENGTH
    assert not cache.overflowed()


def test_the_front_ends_agree_to_the_bit():
    module, x = module_of("mixed, grouped"), text()
    nnx, linen = (in_chunks(build(front_end, module), x, 3) for front_end in ("nnx", "linen"))
    jax.tree.map(np.testing.assert_array_equal, nnx, linen)


def test_room_to_spare_changes_nothing():
    built, x = build("nnx", module_of("mixed, grouped")), text()
    out = built.call(built.params, x, mask=regard.Mask.causal())
    got, alpha, _ = in_chunks(built, x, 4, max_len=LENGTH + 6)
    assert_close(got, out, 2e-6)
    np.testing.assert_array_equal(alpha[..., LENGTH:], 0.0)


@pytest.mark.parametrize(
    "mask",
    [
        regard.Mask.causal(),
        regard.Mask.window(2, 0),
        regard.Mask.window(3, None, align="start"),
        regard.Mask.window(None, -1),
        regard.Mask.window(2, 0) & regard.Mask.lengths(jnp.asarray([10, 4], jnp.int32)),
    ],
    ids=["causal", "window", "open window", "past only", "window and lengths"],
)
def test_masks_are_in_positions_of_the_whole_text(mask):
    built, x = build("nnx", module_of("additive")), text()
    out = built.call(built.params, x, mask=regard.Mask.causal() & mask)
    got, _, _ = in_chunks(built, x, 3, mask=mask)
    assert_close(got, out, 2e-6)


def test_arrays_and_segments_span_the_cache():
    built, x = build("nnx", module_of("dot")), text()
    ids = jnp.asarray([[0] * 4 + [1] * 6, [0] * 7 + [1] * 3], jnp.int32)
    table = jnp.asarray(np.random.default_rng(1).random((2, 4, 1, LENGTH)) < 0.8)
    full = regard.Mask.causal() & regard.Mask.segments(ids, ids) & regard.Mask.boolean(table)
    out = built.call(built.params, x, mask=full)
    cache = built.module.init_cache(2, LENGTH)
    for start in (0, 5):
        chunk = slice(start, start + 5)
        mask = regard.Mask.segments(ids[:, chunk], ids) & regard.Mask.boolean(table)
        got, cache = built.call(built.params, x[:, chunk], mask=mask, cache=cache)
        assert_close(got, out[:, chunk], 2e-6)


@pytest.mark.parametrize("front_end", ["nnx", "linen"])
def test_scan_under_jit(front_end):
    """Token by token in a scan after a prompt of three, all in one program."""
    built, x = build(front_end, module_of("mixed, grouped")), text()
    out = built.call(built.params, x, mask=regard.Mask.causal())

    @jax.jit
    def decode(params, x):
        cache = built.module.init_cache(2, LENGTH)
        prompt, cache = built.call(params, x[:, :3], cache=cache)

        def step(cache, token):
            out, cache = built.call(params, token[:, None], cache=cache)
            return cache, out[:, 0]

        cache, rest = jax.lax.scan(step, cache, x[:, 3:].swapaxes(0, 1))
        return jnp.concatenate([prompt, rest.swapaxes(0, 1)], 1), cache

    got, cache = decode(built.params, x)
    assert_close(got, out, 2e-6)
    assert int(cache.length) == LENGTH


def test_gradients_flow_through_the_cache():
    built, x = build("nnx", module_of("additive")), text(length=6)

    def in_two(x):
        cache = built.module.init_cache(2, 6)
        first, cache = built.call(built.params, x[:, :2], cache=cache)
        second, _ = built.call(built.params, x[:, 2:], cache=cache)
        return jnp.sum(jnp.sin(jnp.concatenate([first, second], 1)))

    def at_once(x):
        return jnp.sum(jnp.sin(built.call(built.params, x, mask=regard.Mask.causal())))

    assert_close(jax.grad(in_two)(x), jax.grad(at_once)(x), 1e-5)


def test_one_text_without_a_batch():
    built, x = build("nnx", module_of("dot")), text()
    out = built.call(built.params, x, mask=regard.Mask.causal())
    cache = built.module.init_cache(1, LENGTH)
    for start in (0, 5):
        got, cache = built.call(built.params, x[0, start : start + 5], cache=cache)
        assert_close(got, out[0, start : start + 5], 2e-6)


def test_cache_dtype():
    made = build("nnx", module_of("dot"), dtype=jnp.bfloat16).module
    assert made.init_cache(2, 3).key.dtype == jnp.bfloat16
    assert made.init_cache(2, 3, jnp.float32).value.dtype == jnp.float32
    built = build("nnx", module_of("dot"))
    out, _ = built.call(built.params, text(), cache=built.module.init_cache(2, 10, jnp.bfloat16))
    assert out.dtype == jnp.float32
    assert_close(out, built.call(built.params, text(), mask=regard.Mask.causal()), 2e-2)


# ---------------------------------------------------------------------------------------------
# The end of the cache.


def test_overflow_is_an_error_where_the_length_is_known():
    built, x = build("nnx", module_of("dot")), text()
    _, cache = built.call(built.params, x[:, :4], cache=built.module.init_cache(2, 6))
    with pytest.raises(ValueError, match=r"the cache would overflow: it has room for 6 tokens, 4 "):
        built.call(built.params, x[:, 4:7], cache=cache)
    assert int(cache.length) == 4
    built.call(built.params, x[:, 4:6], cache=cache)  # exactly full is fine


def test_a_chunk_longer_than_the_cache_is_an_error_under_jit_too():
    built, x = build("nnx", module_of("dot")), text()
    run = jax.jit(lambda cache, x: built.call(built.params, x, cache=cache))
    with pytest.raises(ValueError, match="it has room for 6 tokens, 7 more were given"):
        run(built.module.init_cache(2, 6), x[:, :7])


def test_overflow_under_jit_cannot_be_missed_and_loses_nothing():
    built, x = build("nnx", module_of("additive")), text()
    run = jax.jit(lambda cache, x: built.call(built.params, x, cache=cache, return_weights=True))
    out = built.call(built.params, x, mask=regard.Mask.causal())
    cache = built.module.init_cache(2, 6)
    _, _, cache = run(cache, x[:, :4])
    assert not cache.overflowed()
    held = cache
    got, weights, cache = run(cache, x[:, 4:7])  # two fit, one does not
    assert_close(got[:, :2], out[:, 4:6], 2e-6)
    assert np.isnan(got[:, 2]).all()
    assert np.isnan(weights[:, :, 2]).all()
    assert cache.overflowed()
    assert int(cache.length) == 7
    np.testing.assert_array_equal(cache.key[:, :4], held.key[:, :4])
    full = cache
    got, _, cache = run(cache, x[:, 7:10])  # and from then on nothing fits
    assert np.isnan(got).all()
    np.testing.assert_array_equal(cache.key, full.key)
    with pytest.raises(ValueError, match="would overflow"):
        built.call(built.params, x[:, :1], cache=cache)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ((3, 2, 1, 4), (3, 2, 1, 3), r"Got key \[3, 2, 1, 4\], cache.key \[2, 5, 1, 4\]"),
        ((2, 2, 1, 4), (2, 2, 1, 4), r"Got value \[2, 2, 1, 4\], cache.value \[2, 5, 1, 3\]"),
        ((2, 2, 1, 4), (2, 3, 1, 3), r"the same length. Got key \[2, 2, 1, 4\], value \[2, 3"),
    ],
)
def test_a_chunk_of_other_sizes(key, value, message):
    cache = KVCache.empty(2, 5, key_heads=1, key_width=4, value_width=3)
    with pytest.raises(ValueError, match=message):
        cache.append(jnp.zeros(key, jnp.float32), jnp.zeros(value, jnp.float32))


def test_linen_needs_the_widths_for_a_cache():
    with pytest.raises(ValueError, match="the width of a head is not known before the first call"):
        regard.linen.MultiHeadAttention(4).init_cache(2, 5)
    made = regard.linen.MultiHeadAttention(4, query_head_features=3, value_head_features=2)
    assert made.init_cache(2, 5).value.shape == (2, 5, 4, 2)
