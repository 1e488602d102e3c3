"""Incremental decoding: a cache fed in chunks is the full causal pass, and its end is watched."""

import re

import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regard
import regard.linen
import regard.nnx
from modules.front_ends import Module, assert_close, build

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.sampled(1)]

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


def text(seed=0, length=LENGTH, batch=2):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal((batch, length, 6)), jnp.float32)


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
    assert cache.length.tolist() == [LENGTH] * 2
    assert not cache.overflowed().any()


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
    assert cache.length.tolist() == [LENGTH] * 2


@pytest.mark.slow
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
# Ragged: each example has a length of its own, and grows by its own number of tokens.

CHUNKS = np.array([[4, 3, 1, 2], [2, 0, 5, 1], [1, 1, 1, 1]])  # tokens of each example, by call


def ragged_chunks(x, chunks=CHUNKS, padding=np.nan):
    """The chunks of `x`, padded to the longest: tokens, lens, and where each example's begin."""
    begins = np.zeros(len(chunks), int)
    for lens in chunks.T:
        tokens = np.full((len(chunks), lens.max(), x.shape[-1]), padding, np.float32)
        for example, (begin, count) in enumerate(zip(begins, lens, strict=True)):
            tokens[example, :count] = x[example, begin : begin + count]
        yield jnp.asarray(tokens), jnp.asarray(lens, jnp.int32), begins.copy()
        begins += lens


def compare_ragged(got, expected, lens, begins, axis, tolerance=2e-6):
    for example, (count, begin) in enumerate(zip(np.asarray(lens), begins, strict=True)):
        rows = np.take(got[example], range(count), axis - 1)
        wanted = np.take(expected[example], range(begin, begin + count), axis - 1)
        if count:
            assert_close(rows, wanted, tolerance, f"example {example}")


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("name", SCORES)
def test_ragged_chunks_equal_the_full_causal_pass(name, jit):
    """Outputs and weights, with NaN in the padding, and with an example that pauses."""
    built, x = build("nnx", module_of(name)), text(batch=3)
    out, weights = built.call(built.params, x, mask=regard.Mask.causal(), return_weights=True)

    def step(tokens, cache, lens):
        return built.call(built.params, tokens, cache=cache, valid_lens=lens, return_weights=True)

    step = jax.jit(step) if jit else step
    cache = built.module.init_cache(3, LENGTH)
    for tokens, lens, begins in ragged_chunks(x):
        got, alpha, cache = step(tokens, cache, lens)
        compare_ragged(got, out, lens, begins, axis=1)
        compare_ragged(alpha, weights, lens, begins, axis=2)
        assert np.isfinite(got).all()
    assert cache.length.tolist() == CHUNKS.sum(1).tolist()
    assert np.isfinite(cache.key).all()


def test_the_step_after_a_ragged_prefill_is_right_for_every_row():
    """A prompt of 9, 6 and 4 tokens, then one token at a time in a scan, in one program."""
    built, x = build("linen", module_of("dot")), text(batch=3, length=14)
    out, lens = built.call(built.params, x, mask=regard.Mask.causal()), np.array([9, 6, 4])

    @jax.jit
    def decode(prompt, rest):
        cache = built.module.init_cache(3, 14)
        _, cache = built.call(
            built.params, prompt, cache=cache, valid_lens=jnp.asarray(lens, jnp.int32)
        )

        def step(cache, token):
            out, cache = built.call(built.params, token[:, None], cache=cache)
            return cache, out[:, 0]

        return jax.lax.scan(step, cache, rest)

    rest = np.stack([x[np.arange(3), lens + i] for i in range(5)])
    cache, got = decode(x[:, :9], jnp.asarray(rest))
    for example, begin in enumerate(lens):
        assert_close(got[:, example], out[example, begin : begin + 5], 2e-6, f"example {example}")
    assert cache.length.tolist() == [14, 11, 9]


@pytest.mark.parametrize(
    "mask",
    [regard.Mask.window(2, 0), regard.Mask.window(None, -1) & regard.Mask.window(4, None)],
    ids=["window", "past only and window"],
)
def test_ragged_masks_are_in_positions_of_each_text(mask):
    built, x = build("nnx", module_of("additive")), text(batch=3)
    out = built.call(built.params, x, mask=regard.Mask.causal() & mask)
    cache = built.module.init_cache(3, LENGTH)
    for tokens, lens, begins in ragged_chunks(x):
        got, cache = built.call(built.params, tokens, cache=cache, valid_lens=lens, mask=mask)
        compare_ragged(got, out, lens, begins, axis=1)


@pytest.mark.slow
def test_gradients_of_ragged_chunks_are_those_of_the_full_pass():
    built, x = build("nnx", module_of("mixed, grouped")), text(batch=3)
    total = CHUNKS.sum(1)

    def in_chunks(params, padding):
        cache, loss = built.module.init_cache(3, LENGTH), 0.0
        for tokens, lens, _ in ragged_chunks(x, padding=padding):
            out, cache = built.call(params, tokens, cache=cache, valid_lens=lens)
            real = np.arange(tokens.shape[1])[None] < np.asarray(lens)[:, None]
            loss += jnp.sum(jnp.where(real[..., None], jnp.sin(out), 0))
        return loss

    def at_once(params):
        out = built.call(params, x, mask=regard.Mask.causal())
        return jnp.sum(jnp.where((np.arange(LENGTH) < total[:, None])[..., None], jnp.sin(out), 0))

    wanted = jax.grad(at_once)(built.params)
    for padding in (0.0, np.nan):
        got = jax.grad(in_chunks)(built.params, padding)
        jax.tree.map(lambda a, b: assert_close(a, b, 1e-5), got, wanted)


@pytest.mark.parametrize("window", [None, 3])
def test_padding_of_a_chunk_pools_to_the_output_bias(window):
    """Where a window has overwritten the first tokens, too."""
    built, x = build("nnx", module_of("dot")), text()
    cache = built.module.init_cache(2, LENGTH + 2, window=window)
    for _ in range(0 if window is None else 2):
        _, cache = built.call(built.params, x, cache=cache)
    out, weights, _ = built.call(
        built.params,
        x,
        cache=cache,
        valid_lens=jnp.asarray([10, 0], jnp.int32),
        return_weights=True,
    )
    np.testing.assert_array_equal(weights[1], 0.0)
    np.testing.assert_array_equal(out[1], np.broadcast_to(built.params["out"]["bias"], (10, 6)))


def test_lens_of_an_append():
    cache = regard.Memory.empty(3, 5, key_heads=1, key_width=4, value_width=3)
    key, value = jnp.ones((3, 2, 1, 4), jnp.float32), jnp.ones((3, 2, 1, 3), jnp.float32)
    for lens, grown in (
        (None, [2, 2, 2]),
        (1, [1, 1, 1]),
        (np.array([0, 1, 9], np.uint8), [0, 1, 2]),
        (jnp.asarray([-(2**31) + 1, 2**31 - 1, 1]), [0, 2, 1]),
    ):
        got = cache.append(key, value, lens)
        assert got.length.tolist() == grown
        np.testing.assert_array_equal(got.key[..., 0, 0].sum(1), grown)
    with pytest.raises(TypeError, match=r"must be integers.*Got dtype float32, shape \[3\]"):
        cache.append(key, value, jnp.ones(3, jnp.float32))
    with pytest.raises(ValueError, match=r"each example: \(\) or \(B,\). Got valid_lens \[2\]"):
        cache.append(key, value, jnp.ones(2, jnp.int32))
    assert cache.append(key[:, :0], value[:, :0]).length.tolist() == [0, 0, 0]


def test_appending_to_a_donated_cache_copies_no_cache():
    cache = regard.Memory.empty(4, 256, key_heads=2, key_width=8, value_width=8)
    chunk = jnp.ones((4, 3, 2, 8), jnp.float32)
    compiled = (
        jax.jit(regard.Memory.append, donate_argnums=0)
        .lower(cache, chunk, chunk, jnp.asarray([3, 1, 0, 2], jnp.int32))
        .compile()
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache.key.nbytes + cache.value.nbytes
    assert memory.temp_size_in_bytes < cache.key.nbytes / 4


def test_a_cached_call_takes_as_many_keys_as_queries():
    built, x = build("nnx", module_of("dot")), text()
    message = r"one key for each query. Got query \[2, 1, 6\], key \[2, 3, 6\]"
    with pytest.raises(ValueError, match=message):
        built.call(built.params, x[:, :1], x[:, :3], cache=built.module.init_cache(2, LENGTH))
    with pytest.raises(ValueError, match=r"Fix: mask=regard.Mask.lengths\(lens\)"):
        built.call(
            built.params,
            x[:, :3],
            cache=built.module.init_cache(2, LENGTH),
            valid_lens=jnp.ones((2, 3), jnp.int32),
        )


# ---------------------------------------------------------------------------------------------
# The end of the cache.


def test_one_example_overflows_and_the_others_do_not():
    built, x = build("nnx", module_of("additive")), text(batch=3)
    out = built.call(built.params, x, mask=regard.Mask.causal())
    run = jax.jit(lambda cache, x, lens: built.call(built.params, x, cache=cache, valid_lens=lens))
    _, cache = run(built.module.init_cache(3, 6), x[:, :5], jnp.asarray([5, 2, 4], jnp.int32))
    tokens = jnp.stack([x[i, n : n + 3] for i, n in enumerate((5, 2, 4))])
    got, full = run(cache, tokens, jnp.asarray([3, 3, 2], jnp.int32))
    assert full.overflowed().tolist() == [True, False, False]
    assert full.length.tolist() == [8, 5, 6]
    assert_close(got[0, :1], out[0, 5:6], 2e-6)
    assert np.isnan(got[0, 1:]).all()
    assert_close(got[1], out[1, 2:5], 2e-6)
    assert_close(got[2, :2], out[2, 4:6], 2e-6)
    for example, begin in enumerate((5, 2, 4)):
        np.testing.assert_array_equal(full.key[example, :begin], cache.key[example, :begin])
    with pytest.raises(
        ValueError, match=r"5 tokens are in it, and 3 more were given \(example 0\)"
    ):
        built.call(built.params, tokens, cache=cache, valid_lens=jnp.asarray([3, 3, 2], jnp.int32))


def test_a_padded_chunk_may_be_longer_than_the_cache():
    built, x = build("nnx", module_of("dot")), text()
    out = built.call(built.params, x, mask=regard.Mask.causal())
    run = jax.jit(lambda cache, x, lens: built.call(built.params, x, cache=cache, valid_lens=lens))
    got, cache = run(built.module.init_cache(2, 6), x, jnp.asarray([6, 7], jnp.int32))
    assert_close(got[0, :6], out[0, :6], 2e-6)
    assert_close(got[1, :6], out[1, :6], 2e-6)
    assert np.isnan(got[1, 6]).all()
    assert cache.overflowed().tolist() == [False, True]


def test_overflow_is_an_error_where_the_length_is_known():
    built, x = build("nnx", module_of("dot")), text()
    _, cache = built.call(built.params, x[:, :4], cache=built.module.init_cache(2, 6))
    with pytest.raises(
        ValueError, match=r"the memory would overflow: it has room for 6 tokens, 4 "
    ):
        built.call(built.params, x[:, 4:7], cache=cache)
    assert cache.length.tolist() == [4, 4]
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
    assert not cache.overflowed().any()
    held = cache
    got, weights, cache = run(cache, x[:, 4:7])  # two fit, one does not
    assert_close(got[:, :2], out[:, 4:6], 2e-6)
    assert np.isnan(got[:, 2]).all()
    assert np.isnan(weights[:, :, 2]).all()
    assert cache.overflowed().all()
    assert cache.length.tolist() == [7, 7]
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
        ((3, 2, 1, 4), (3, 2, 1, 3), "key [3, 2, 1, 4], value [3, 2, 1, 3]"),
        ((2, 2, 1, 4), (2, 2, 1, 4), "key [2, 2, 1, 4], value [2, 2, 1, 4]"),
        ((2, 2, 1, 4), (2, 3, 1, 3), "key [2, 2, 1, 4], value [2, 3, 1, 3]"),
    ],
)
def test_a_chunk_of_other_sizes(key, value, message):
    cache = regard.Memory.empty(2, 5, key_heads=1, key_width=4, value_width=3)
    wanted = "wanted key [2, T, 1, 4], value [2, T, 1, 3]"
    with pytest.raises(ValueError, match=re.escape(f"Got {message}, {wanted}")):
        cache.append(jnp.zeros(key, jnp.float32), jnp.zeros(value, jnp.float32))


def test_linen_needs_the_widths_for_a_cache():
    with pytest.raises(ValueError, match="the width of a head is not known before the first call"):
        regard.linen.MultiHeadAttention(4).init_cache(2, 5)
    made = regard.linen.MultiHeadAttention(4, query_head_features=3, value_head_features=2)
    assert made.init_cache(2, 5).value.shape == (2, 5, 4, 2)


# ---------------------------------------------------------------------------------------------
# Unions and complements: bands in them are positions of the text too.

UNIONS = {
    "window or start": regard.Mask.window(1, 0) | regard.Mask.lengths(jnp.array(1)),
    "not a window": ~regard.Mask.window(2, 1) | regard.Mask.window(0, 0),
}


@pytest.mark.parametrize("name", UNIONS)
def test_unions_with_a_cache_equal_the_full_pass(name):
    mask = UNIONS[name]
    module = regard.nnx.MultiHeadAttention(2, 8, rngs=flax.nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 7, 8), jnp.float32)
    expected = module(x, mask=regard.Mask.causal() & mask)
    cache, rows = module.init_cache(2, 9), []
    for chunk in (x[:, :4], x[:, 4:5], x[:, 5:]):
        out, cache = module(chunk, mask=mask, cache=cache)
        rows.append(out)
    np.testing.assert_allclose(jnp.concatenate(rows, 1), expected, atol=2e-6)


# ---------------------------------------------------------------------------------------------
# Cross-attention: a memory made once.


@pytest.mark.parametrize("front_end", ["nnx", "linen"])
@pytest.mark.parametrize("score", ["additive", "bilinear", ("dot", "additive", "gaussian", "dot")])
def test_multi_head_attention_remembers(front_end, score):
    x, encoded, lens = text(batch=3), text(1, 7, 3), jnp.asarray([7, 3, 0])
    poison = jnp.where(jnp.arange(7)[None] < lens[:, None], 0, jnp.nan)[..., None]
    if front_end == "nnx":
        layer = regard.nnx.MultiHeadAttention(4, 8, 8, score=score, rngs=flax.nnx.Rngs(0))
        call, remember = layer, layer.remember
    else:
        layer = regard.linen.MultiHeadAttention(4, qkv_features=8, score=score)
        variables = layer.init(jax.random.key(0), wide(x), wide(encoded))

        def call(*inputs, **options):
            return layer.apply(variables, *inputs, **options)

        def remember(*inputs, **options):
            return layer.apply(variables, *inputs, **options, method="remember")

    expected = call(wide(x), wide(encoded), valid_lens=lens)
    memory = remember(wide(encoded) + poison, valid_lens=lens)
    assert (memory.score is None) == isinstance(score, tuple)  # several scores: raw keys
    assert_close(call(wide(x), memory=memory), expected, 2e-6)
    assert_close(call(wide(x)[:, :1], memory=memory), expected[:, :1], 2e-6)
    with pytest.raises(ValueError, match="memory= has the keys and values"):
        call(wide(x), wide(encoded), memory=memory)


def wide(x):
    return jnp.concatenate([x, x[..., :2]], -1)  # (B, T, 8)


@pytest.mark.parametrize("name", ["AdditiveAttention", "BilinearAttention", "GaussianAttention"])
def test_single_head_classes_remember(name):
    arguments = {"AdditiveAttention": (5, 6, 8), "BilinearAttention": (6, 8)}.get(name, ())
    query, lens = text(), jnp.asarray([7, 2])
    keys = wide(text(1, 7)) if arguments else text(1, 7)
    layer = getattr(regard.nnx, name)(*arguments, rngs=flax.nnx.Rngs(0))
    memory = layer.remember(keys, keys, lens)
    expected = layer(query, keys, keys, valid_lens=lens)
    assert_close(layer(query, memory), expected, 2e-6)
    of_linen = getattr(regard.linen, name)(*{"AdditiveAttention": (5,)}.get(name, ()))
    variables = of_linen.init(jax.random.key(0), query, keys, keys)
    memory = of_linen.apply(variables, keys, keys, lens, method="remember")
    expected = of_linen.apply(variables, query, keys, keys, valid_lens=lens)
    assert_close(of_linen.apply(variables, query, memory), expected, 2e-6)


def test_a_window_of_the_last_tokens():
    built, x = build("nnx", module_of("additive")), text()
    out = built.call(built.params, x, mask=regard.Mask.causal() & regard.Mask.window(2, 0))
    cache = built.module.init_cache(2, 5, window=3)
    for at in (slice(0, 3), slice(3, 4), slice(4, 7), slice(7, 10)):
        got, cache = built.call(built.params, x[:, at], cache=cache)
        assert_close(got, out[:, at], 2e-6)
    assert cache.key.shape[1] == 5
