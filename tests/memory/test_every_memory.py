"""The contract of a memory: every score and kind, fed token by token, in chunks and ragged, equals
the full pass; gradients, transforms, and the end of its room.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regard
from cases import SCORES

pytestmark = pytest.mark.usefixtures("quick_compilation")

B, LENGTH, N, K, V = 3, 8, 4, 2, 3
WINDOW = 3
CAUSAL = regard.Mask.causal()
TABLE = jnp.asarray([[3, 7, 1, 2], [0, 4, 5, 6], [8, 9, 10, 11]])
# Tokens of each example, by call.
FEEDS = {
    "tokens": np.ones((LENGTH, B), int),
    "chunks": np.repeat([[3], [4], [1]], B, 1),
    "ragged": np.array([[4, 2, 1], [3, 0, 1], [1, 5, 1]]),
}
KINDS = ("fixed", "window", "paged")


@functools.cache
def drawn(name, rank=4, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    row = SCORES[name]
    (Hq, Hk), lead = row.widths, {2: (LENGTH,), 3: (B, LENGTH), 4: (B, LENGTH)}[rank]
    heads, key_heads = ((N,), (K,)) if rank == 4 else ((), ())
    parameters = {k: jnp.asarray(v, jnp.float32) for k, v in row.draw(normal, N).items()}
    shapes = (*lead, *heads, Hq), (*lead, *key_heads, Hk), (*lead, *key_heads, V)
    return row.make(**parameters), *(jnp.asarray(normal(*s), dtype) for s in shapes)


def empty(kind, score, key, value, chunk=LENGTH):
    rank = key.ndim
    options = dict(score=score, dtype=key.dtype, key_width=key.shape[-1], value_width=V, rank=rank)
    options |= dict(key_heads=key.shape[2]) if rank == 4 else {}
    batch = 1 if rank == 2 else B
    if kind == "paged":
        pool = regard.Memory.empty(12, 2, **options)
        return regard.Memory.paged(pool, TABLE[:batch], jnp.zeros(batch, jnp.int32))
    window = WINDOW if kind == "window" else None
    slots = LENGTH + 1 if window is None else WINDOW + chunk - 1
    return regard.Memory.empty(batch, slots, window=window, **options)


def full_pass(kind, score, query, key, value, **options):
    mask = CAUSAL & regard.Mask.window(WINDOW - 1, 0) if kind == "window" else CAUSAL
    return regard.attend(query, key, value, score=score, mask=mask, **options)


@jax.jit
def step(memory, query, key, value, lens):
    positions = memory.positions(query.shape[1] if query.ndim > 2 else query.shape[0])
    memory = memory.append(key, value, lens)
    return memory, regard.attend(query, memory, mask=CAUSAL, query_positions=positions)


def fed(feed, memory, query, key, value, compare, padding=np.nan):
    """Feeds a memory, padding with NaN, and compares each real row of each call."""
    begins = np.zeros(B, int)
    for lens in feed:
        count = max(lens.max(), 1)

        def chunk(array, count=count, lens=lens, begins=begins):
            found = np.full((B, count, *array.shape[2:]), padding, array.dtype)
            for b in range(B):
                found[b, : lens[b]] = array[b, begins[b] : begins[b] + lens[b]]
            return jnp.asarray(found)

        arrays = (chunk(array) for array in (query, key, value))
        memory, out = step(memory, *arrays, jnp.asarray(lens, jnp.int32))
        for b in range(B):
            compare(out[b, : lens[b]], (b, slice(begins[b], begins[b] + lens[b])))
        begins = begins + lens
    return memory


@pytest.mark.sampled(4)
@pytest.mark.parametrize("feed", FEEDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCORES)
def test_every_feed_equals_the_full_pass(name, kind, feed):
    score, query, key, value = drawn(name)
    chunk = FEEDS[feed].max()
    memory = empty(kind, score, key, value, chunk)
    expected = full_pass(kind, score, query, key, value)

    def compare(rows, at):
        np.testing.assert_allclose(rows, expected[at], atol=2e-6)

    memory = fed(FEEDS[feed], memory, query, key, value, compare)
    assert memory.length.tolist() == FEEDS[feed].sum(0).tolist()
    assert not memory.overflowed().any()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_without_heads_and_without_a_batch(kind, rank):
    score, query, key, value = drawn("additive", rank)
    expected = full_pass(kind, score, query, key, value)
    memory, axis = empty(kind, score, key, value), rank - 2
    for at in (slice(0, 4), slice(4, 8)):
        rows = (slice(None),) * axis + (at,)
        memory, got = step(memory, query[rows], key[rows], value[rows], None)
        np.testing.assert_allclose(got, expected[rows], atol=2e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_of_a_memory(kind):
    score, query, key, value = drawn("additive", 3)
    memory = empty(kind, score, key, value).append(key, value)

    @jax.jit
    def look(query, memory):
        alpha = regard.weights(query, memory, mask=CAUSAL)
        summary = regard.summarize(query, memory, mask=CAUSAL)
        return alpha, summary, regard.attention_map(query, memory, mask=CAUSAL)

    alpha, summary, image = look(query, memory)
    out, same = regard.attend(query, memory, mask=CAUSAL, return_weights=True)
    np.testing.assert_allclose(out, full_pass(kind, score, query, key, value), atol=2e-6)
    np.testing.assert_allclose(alpha, same, atol=1e-6)
    np.testing.assert_allclose(summary.max_weight, alpha.max(-1), atol=1e-6)
    np.testing.assert_allclose(image, alpha, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCORES)
def test_every_dtype(name, kind, dtype):
    score, query, key, value = drawn(name, dtype=dtype)
    expected = np.float32(full_pass(kind, score, query, key, value))

    def compare(rows, at):
        assert rows.dtype == dtype
        np.testing.assert_allclose(np.float32(rows), expected[at], atol=3e-2)

    fed(FEEDS["chunks"], empty(kind, score, key, value, 4), query, key, value, compare)


MASKS = {
    "window": regard.Mask.window(2, None),
    "not the first": ~regard.Mask.lengths(jnp.asarray([1, 0, 2])),
    "lengths": regard.Mask.lengths(jnp.asarray([3, 8, 5])),
    "window or start": regard.Mask.window(1, 0) | regard.Mask.lengths(jnp.asarray(1)),
    "array": regard.Mask.boolean(jnp.arange(16)[None, None, None] % 3 > 0),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MASKS)
def test_masks_speak_of_positions(name, kind):
    score, query, key, value = drawn("dot")
    mask = MASKS[name]

    def cut(mask, size):
        return regard.Mask.boolean(mask.arrays[0][..., :size]) if mask.arrays else mask

    window = regard.Mask.window(WINDOW - 1, 0) if kind == "window" else CAUSAL
    expected = regard.attend(query, key, value, mask=CAUSAL & window & cut(mask, LENGTH))
    memory = empty(kind, score, key, value, 4)
    of_slots = mask if kind == "window" else cut(mask, memory.max_len)
    for at in (slice(0, 4), slice(4, 5), slice(5, 8)):
        memory = memory.append(key[:, at], value[:, at])
        got = regard.attend(query[:, at], memory, mask=CAUSAL & of_slots)
        np.testing.assert_allclose(got, expected[:, at], atol=2e-6)


@pytest.mark.parametrize("lens", [None, [8, 3, 5]])
def test_a_band_aligned_at_the_start_puts_the_first_query_there(lens):
    _, query, key, value = drawn("dot")
    lens = None if lens is None else jnp.asarray(lens)
    memory = regard.Memory.of(key, value, valid_lens=lens)
    window = regard.Mask.window(1, 1, align="start")
    for mask in (regard.Mask.causal(align="start"), ~window, window | regard.Mask.lengths(1)):
        expected = regard.attend(query[:, :3], key, value, mask=mask, valid_lens=lens)
        np.testing.assert_allclose(regard.attend(query[:, :3], memory, mask=mask), expected, 2e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_segments_speak_of_positions(kind):
    score, query, key, value = drawn("dot")
    ids = jnp.asarray([[0] * 3 + [1] * 5, [0] * 8, [0, 1] * 4])
    window = regard.Mask.window(WINDOW - 1, 0) if kind == "window" else CAUSAL
    mask = CAUSAL & window & regard.Mask.segments(ids)
    expected = regard.attend(query, key, value, mask=mask)
    memory = empty(kind, score, key, value, 4)
    for at in (slice(0, 4), slice(4, 8)):
        memory = memory.append(key[:, at], value[:, at])
        of_keys = ids if kind == "window" else jnp.pad(ids, ((0, 0), (0, memory.max_len - 8)))
        mask = CAUSAL & regard.Mask.segments(ids[:, at], of_keys)
        got = regard.attend(query[:, at], memory, mask=mask)
        np.testing.assert_allclose(got, expected[:, at], atol=2e-6)


# ---------------------------------------------------------------------------------------------
# Cross-attention: keys that are all there.


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SCORES)
def test_gradients_are_those_of_the_plain_call(name):
    score, query, key, value = drawn(name)
    lens = jnp.asarray([5, 8, 0])
    real = np.arange(LENGTH) < np.asarray(lens)[:, None]
    poison = jnp.where(real[..., None, None], 0, np.nan)

    def plain(score, query, key, value):
        return jnp.sum(jnp.sin(regard.attend(query, key, value, score=score, valid_lens=lens)))

    def remembered(score, query, key, value):
        memory = regard.Memory.of(key + poison, value + poison, score=score, valid_lens=lens)
        return jnp.sum(jnp.sin(regard.attend(query, memory)))

    arguments = (0, 1, 2, 3)
    wanted, expected = jax.value_and_grad(plain, argnums=arguments)(score, query, key, value)
    got, found = jax.value_and_grad(remembered, argnums=arguments)(score, query, key, value)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)


def test_hypotheses_share_the_memory_of_their_sentence():
    score, _, key, value = drawn("additive", 3)
    beam = jax.random.normal(jax.random.key(0), (B, 5, 5), jnp.float32)  # [B, hypotheses, Hq]
    memory = regard.Memory.of(key, value, score=score, valid_lens=jnp.asarray([8, 3, 5]))
    got = regard.attend(beam, memory)
    rows = jnp.asarray([2, 0])
    alone = regard.attend(beam[rows], memory.rows([2, 0]))
    np.testing.assert_allclose(alone, got[rows], atol=1e-6)  # a batch of another size rounds anew
    for hypothesis in range(5):
        alone = regard.attend(beam[:, hypothesis, None], memory)
        np.testing.assert_allclose(got[:, hypothesis, None], alone, atol=1e-6)


def test_the_step_projects_no_key_and_takes_no_exponential_of_one():
    score, query, key, value = drawn("additive", 3)
    memory = regard.Memory.of(key, value, score=score)
    jaxpr = jax.make_jaxpr(lambda query, memory: regard.attend(query, memory))(query[:, :1], memory)
    inside = str(jaxpr)
    plain = str(jax.make_jaxpr(lambda q: regard.attend(q, key, value, score=score))(query[:, :1]))
    h = score.vector.shape[0]
    projection = f"f32[{B},{LENGTH},1,{h}] = dot_general"
    assert projection in plain
    assert projection not in inside
    blockwise = jax.make_jaxpr(lambda q: regard.attend(q, memory, implementation="blockwise"))
    for text in (inside, str(blockwise(query[:, :1]))):
        assert f"f32[{B},1,{LENGTH},{h}] = exp " not in text


def test_another_score_is_refused():
    score, query, key, value = drawn("additive")
    memory = regard.Memory.of(key, value, score=score)
    with pytest.raises(ValueError, match=r"prepared for one score.*Fix: leave score= out"):
        regard.attend(query, memory, score=regard.Gaussian())
    with pytest.raises(ValueError, match="has its own values"):
        regard.attend(query, memory, value)
    with pytest.raises(ValueError, match=r"or a query and a regard\.Memory"):
        regard.attend(query, key)
    with pytest.raises(ValueError, match=r"positions are of a regard\.Memory and of"):
        regard.attend(query, query, query, query_positions=jnp.arange(LENGTH))
    with pytest.raises(ValueError, match="stores its keys' positions"):
        regard.attend(query, memory, key_positions=jnp.arange(LENGTH))
    with pytest.raises(ValueError, match=r"made for queries \(B, T, N, D\). Got query \[3, 8, 5\]"):
        regard.attend(query[:, :, 0], memory)
    narrow = jnp.zeros((B, 1, N, 4), jnp.float32)
    with pytest.raises(ValueError, match=r"kernel \[5, 6\].* query \[3, 1, 4, 4\], and a memory"):
        regard.attend(narrow, memory)
    with pytest.raises(ValueError, match=r"keys of this width: .* key width 4, score.query_kernel"):
        regard.Memory.of(narrow, narrow, score=score)
    raw = regard.Memory.of(key, value, score=None)
    expected = regard.attend(query, key, value, score=score)
    np.testing.assert_allclose(regard.attend(query, raw, score=score), expected, atol=2e-6)
    dots = regard.Memory.of(value, value)
    regard.attend(value, dots, score=regard.Dot())  # the score it was made for


def test_explain_and_scores():
    score, query, key, value = drawn("additive")
    memory = regard.Memory.of(key, value, score=score)
    assert "reference runs" in regard.explain(query, memory)
    np.testing.assert_allclose(
        regard.scores(query, memory), regard.scores(query, key, score=score), atol=2e-6
    )


# ---------------------------------------------------------------------------------------------
# Transforms.


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_scan_and_vmap(kind):
    score, query, key, value = drawn("additive")
    expected = full_pass(kind, score, query, key, value)

    def decode(query, key, value):
        def one(memory, token):
            q, k, v = (array[:, None] for array in token)
            memory = memory.append(k, v)
            return memory, regard.attend(q, memory, mask=CAUSAL)[:, 0]

        tokens = jax.tree.map(lambda a: a.swapaxes(0, 1), (query, key, value))
        return jax.lax.scan(one, empty(kind, score, key, value, 1), tokens)[1].swapaxes(0, 1)

    both = jax.tree.map(lambda a: jnp.stack([a, a[::-1]]), (query, key, value))
    got = jax.jit(jax.vmap(decode))(*both)
    np.testing.assert_allclose(got[0], expected, atol=2e-6)
    np.testing.assert_allclose(got[1], expected[::-1], atol=2e-6)


def test_export_with_a_symbolic_batch_and_length():
    score, query, key, value = drawn("additive", 3)
    b, s = jax.export.symbolic_shape("b, s")

    def run(query, key, value):
        memory = regard.Memory.of(key, value, score=score)
        grown = regard.Memory.of(key[:, :2], value[:, :2], score=score, max_len=4)
        grown = grown.append(key[:, :1], value[:, :1])
        return regard.attend(query, memory), regard.attend(query, grown)

    shapes = [(b, 1, query.shape[-1]), (b, s + 1, key.shape[-1]), (b, s + 1, V)]
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    inputs = query[:, :1], key, value
    exported = jax.export.export(jax.jit(run))(*given)
    for got, expected in zip(exported.call(*inputs), run(*inputs), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_append_to_a_donated_memory_copies_nothing(kind):
    score = regard.Additive(*(jnp.ones(s, jnp.float32) for s in ((8, 16), (8, 16), (16,))))
    options = dict(key_heads=2, key_width=8, value_width=16, score=score)
    if kind == "paged":
        table = jnp.arange(64, dtype=jnp.int32).reshape(4, 16)
        pool = regard.Memory.empty(64, 16, **options)
        memory = regard.Memory.paged(pool, table, jnp.zeros(4, jnp.int32))
    else:
        memory = regard.Memory.empty(4, 256, window=64 if kind == "window" else None, **options)
    token = jnp.ones((4, 1, 2, 8), jnp.float32), jnp.ones((4, 1, 2, 16), jnp.float32)
    append = jax.jit(regard.Memory.append, donate_argnums=0)
    program = append.lower(memory, *token).compile()
    memory_use = program.memory_analysis()
    assert memory_use.alias_size_in_bytes >= memory.key.nbytes + memory.value.nbytes
    assert memory_use.temp_size_in_bytes < memory.key.nbytes / 4
    copies = re.findall(r"= f32\[([\d,]+)\]\S* copy\(", program.as_text())
    assert all(math.prod(map(int, dims.split(","))) < memory.key.size / 4 for dims in copies)
    grown = append(memory, *token)
    assert memory.key.is_deleted()
    assert not score.vector.is_deleted()  # the memory has parameters of its own
    assert grown.length.tolist() == [1] * 4


# ---------------------------------------------------------------------------------------------
# The end of the room.


def test_overflow_is_an_error_where_lengths_are_known():
    score, _, key, value = drawn("dot")
    for kind, room in (("fixed", 9), ("paged", 8)):
        memory = empty(kind, score, key, value).append(key, value)
        with pytest.raises(ValueError, match=f"room for {room} tokens, 8 tokens are in it, and 2 "):
            memory.append(key[:, :2], value[:, :2])


@pytest.mark.parametrize("kind", ["fixed", "paged"])
def test_overflow_under_jit_is_nan_and_loses_nothing(kind):
    score, query, key, value = drawn("additive")
    memory = empty(kind, score, key, value).append(key, value)
    expected = full_pass(kind, score, query, key, value)
    lens = jnp.asarray([0, 2, 0])
    before = memory
    memory, out = step(memory, *(a[:, :2] for a in (query, key, value)), lens)
    assert memory.overflowed().tolist() == [False, True, False]
    assert np.isnan(out[1, 1]).all()
    again = regard.attend(query, memory, mask=CAUSAL, query_positions=jnp.arange(LENGTH))
    np.testing.assert_allclose(again, expected, atol=2e-6)
    assert np.isnan(regard.attend(query, memory)[1]).all()  # not causal: keys are missing
    assert np.isfinite(regard.attend(query, memory)[0]).all()
    np.testing.assert_array_equal(memory.key[:, :1], before.key[:, :1])


def test_pages_of_a_prefix_are_shared_and_missing_pages_are_no_room():
    score, query, key, value = drawn("bilinear")
    same = jnp.broadcast_to(key[:1], key.shape), jnp.broadcast_to(value[:1], value.shape)
    pool = empty("paged", score, key, value).pool
    one = regard.Memory.paged(pool, TABLE[:1], jnp.zeros(1, jnp.int32))
    one = one.append(same[0][:1, :4], same[1][:1, :4])
    table = jnp.asarray([[3, 7, 1, 2], [3, 7, 5, 6], [3, 7, 9, -1]])
    three = regard.Memory.paged(one.pool, table, jnp.asarray([4, 4, 4]))
    keys = jnp.concatenate([same[0][:, :4], key[:, 4:6]], 1)
    values = jnp.concatenate([same[1][:, :4], value[:, 4:6]], 1)
    three = three.append(keys[:, 4:], values[:, 4:])
    got = regard.attend(query[:, 4:6], three, mask=CAUSAL)
    expected = regard.attend(query[:, :6], keys, values, score=score, mask=CAUSAL)[:, 4:]
    np.testing.assert_allclose(got, expected, atol=2e-6)
    with pytest.raises(ValueError, match=r"room for 6 tokens, 6 .*more pages in its row"):
        three.append(key[:, :1], value[:, :1])


def test_a_window_keeps_the_last_tokens_of_a_long_chunk():
    score, query, key, value = drawn("dot")
    memory = empty("window", score, key, value, 2).append(key, value)
    expected = full_pass("window", score, query, key, value)
    for mask in (CAUSAL, None):  # a window ends at the query's own position, whatever the mask
        got = regard.attend(query[:, -2:], memory, mask=mask)
        np.testing.assert_allclose(got, expected[:, -2:], atol=2e-6)
    with pytest.raises(ValueError, match="3 queries at once with a window of 3 need 5 slots"):
        regard.attend(query[:, -3:], memory, mask=CAUSAL)
    early = regard.attend(query[:, :1], memory, query_positions=jnp.asarray([2]))
    assert np.isnan(early).all()  # its keys were overwritten
    with pytest.raises(ValueError, match="window must be positive and at most max_len"):
        regard.Memory.empty(1, 4, key_width=1, value_width=1, window=5)
    with pytest.raises(ValueError, match="Got batch 1, max_len -4"):
        regard.Memory.empty(1, -4, key_width=1, value_width=1)
