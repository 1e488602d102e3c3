"""The book's Transformer: its parameter names, NumPy's numbers, and what attends to what."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from regard import d2l

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.sampled(2)]

VOCAB, WIDTH, FFN, HEADS, BLOCKS = 10, 8, 12, 2, 2
LENS = jnp.array([7, 3, 1])
RNG = jax.random.PRNGKey(5)


def draw(*shape, seed=0):
    return jax.random.normal(jax.random.PRNGKey(seed), shape, jnp.float32)


def tokens(*shape, seed=0):
    return jax.random.randint(jax.random.PRNGKey(seed), shape, 0, VOCAB, jnp.int32)


def some_variables(module, *args, seed=0):
    """Random parameters, the biases and scales too."""
    shapes = jax.eval_shape(module.init, RNG, *args)
    numbers = np.random.default_rng(seed)
    return {
        "params": jax.tree.map(
            lambda x: jnp.asarray(0.4 * numbers.normal(size=x.shape), x.dtype), shapes["params"]
        )
    }


# ---------------------------------------------------------------------------------------------
# The same in NumPy, float64.


def as_float64(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def dense(p, x):
    return x @ p["kernel"] + p.get("bias", 0)


def ffn(p, x):
    return dense(p["dense2"], np.maximum(dense(p["dense1"], x), 0))


def add_norm(p, x, y):
    z, p = x + y, p["LayerNorm_0"]
    centered = z - z.mean(-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]


def multi_head(p, queries, keys, may):
    q, k, v = dense(p["W_q"], queries), dense(p["W_k"], keys), dense(p["W_v"], keys)
    each = WIDTH // HEADS
    heads = [
        oracle.attend(
            *(x[..., n * each : (n + 1) * each] for x in (q, k, v)), score=oracle.Dot(), may=may
        )
        for n in range(HEADS)
    ]
    weights = np.stack([head.weights for head in heads], axis=1)  # [B, N, T, S]
    out = dense(p["W_o"], np.concatenate([head.out for head in heads], axis=-1))
    return out, weights.reshape(-1, *weights.shape[2:])


def encoder_block(p, x, may):
    out, weights = multi_head(p["attention"], x, x, may)
    y = add_norm(p["addnorm1"], x, out)
    return add_norm(p["addnorm2"], y, ffn(p["ffn"], y)), weights


def decoder_block(p, x, encoded, may_encoded):
    steps = x.shape[1]
    causal = np.broadcast_to(np.tri(steps, dtype=bool), (len(x), steps, steps))
    out, weights1 = multi_head(p["attention1"], x, x, causal)
    y = add_norm(p["addnorm1"], x, out)
    out, weights2 = multi_head(p["attention2"], y, encoded, may_encoded)
    z = add_norm(p["addnorm2"], y, out)
    return add_norm(p["addnorm3"], z, ffn(p["ffn"], z)), weights1, weights2


def lengths(steps, queries=1):
    return np.broadcast_to(
        np.arange(steps)[None, None] < np.asarray(LENS)[:, None, None], (len(LENS), queries, steps)
    )


# ---------------------------------------------------------------------------------------------
# The layers.


def test_ffn_is_the_same_at_every_position():
    layer, X = d2l.PositionWiseFFN(FFN, 5), draw(3, 7, WIDTH)
    variables = some_variables(layer, X)
    np.testing.assert_allclose(
        layer.apply(variables, X),
        ffn(as_float64(variables["params"]), as_float64(X)),
        rtol=1e-4,
        atol=1e-5,
    )


def test_add_norm():
    layer, X, Y = d2l.AddNorm(0.5), draw(3, 7, WIDTH), draw(3, 7, WIDTH, seed=1)
    variables = some_variables(layer, X, Y)
    expected = add_norm(*as_float64((variables["params"], X, Y)))
    np.testing.assert_allclose(layer.apply(variables, X, Y), expected, rtol=1e-4, atol=1e-5)


def test_add_norm_does_not_broadcast():
    with pytest.raises(ValueError, match=r"X \[3, 7, 8\], Y \[3, 1, 8\]"):
        d2l.AddNorm(0).init(RNG, draw(3, 7, 8), draw(3, 1, 8))


@pytest.mark.parametrize("bias", [False, True])
def test_encoder_block(bias):
    block, X = d2l.TransformerEncoderBlock(WIDTH, FFN, HEADS, 0.5, bias), draw(3, 7, WIDTH)
    variables = some_variables(block, X, LENS)
    out, weights = jax.jit(block.apply)(variables, X, LENS)
    params = as_float64(variables["params"])
    assert ("bias" in params["attention"]["W_q"]) == bias
    expected, expected_weights = encoder_block(params, np.asarray(X, np.float64), lengths(7, 7))
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-4, atol=1e-6)
    assert weights.shape == (3 * HEADS, 7, 7)


def test_a_block_of_another_width_says_so():
    block = d2l.TransformerEncoderBlock(WIDTH, FFN, HEADS, 0.5)
    with pytest.raises(ValueError, match=r"X \[3, 7, 6\], Y \[3, 7, 8\].*num_hiddens"):
        block.init(RNG, draw(3, 7, 6), LENS)


@functools.cache
def encoder_and_decoder(dropout=0.0):
    sizes = VOCAB, WIDTH, FFN, HEADS, BLOCKS, dropout
    return d2l.TransformerEncoder(*sizes), d2l.TransformerDecoder(*sizes)


@functools.cache
def encoded():
    encoder, _ = encoder_and_decoder()
    X = tokens(3, 7)
    variables = some_variables(encoder, X, LENS)
    out, seen = encoder.apply(variables, X, LENS, mutable="intermediates")
    return variables, X, out, seen["intermediates"]["enc_attention_weights"][0]


def embedded(p, X):
    column = np.arange(WIDTH)
    angle = np.arange(X.shape[1])[:, None] / 10000 ** (column // 2 * 2 / WIDTH)
    positions = np.where(column % 2 == 0, np.sin(angle), np.cos(angle))
    return p["embedding"]["embedding"][np.asarray(X)] * np.sqrt(WIDTH) + positions


def test_encoder_and_its_weights():
    variables, X, out, weights = encoded()
    params = as_float64(variables["params"])
    assert set(params) == {"embedding", "blks_0", "blks_1"}
    x = embedded(params, X)
    for i in range(BLOCKS):
        x, expected = encoder_block(params[f"blks_{i}"], x, lengths(7, 7))
        np.testing.assert_allclose(weights[i], expected, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(out, x, rtol=1e-3, atol=1e-4)


def test_a_bound_encoder_says_where_it_looked():
    variables, X, _, weights = encoded()
    bound = encoder_and_decoder()[0].bind(variables, mutable=["intermediates"])
    bound(X, LENS)
    np.testing.assert_allclose(bound.attention_weights, weights, rtol=1e-5, atol=1e-6)


def test_padding_changes_nothing_that_is_not_padding():
    """Other tokens after the length: the same states before it, and the same gradient."""
    encoder, _ = encoder_and_decoder()
    variables, X, out, _ = encoded()
    behind = jnp.arange(7)[None] >= LENS[:, None]
    other = jnp.where(behind, (X + 1) % VOCAB, X)
    again = encoder.apply(variables, other, LENS)
    np.testing.assert_array_equal(np.asarray(again)[~behind], np.asarray(out)[~behind])
    assert not np.allclose(np.asarray(again)[behind], np.asarray(out)[behind])


# ---------------------------------------------------------------------------------------------
# The decoder, which the book's package leaves to the page.


def decoder_alone():
    _, decoder = encoder_and_decoder()
    out, Y = encoded()[2], tokens(3, 5, seed=1)
    state = decoder.init_state(out, LENS)
    return decoder, some_variables(decoder, Y, state, seed=1), Y, state


@pytest.mark.parametrize("training", [False, True])
def test_decoder_and_its_weights(training):
    decoder, variables, Y, state = decoder_alone()
    (logits, _), seen = decoder.apply(
        variables, Y, state, training=training, mutable="intermediates"
    )
    own, other = seen["intermediates"]["dec_attention_weights"][0]
    params = as_float64(variables["params"])
    x = embedded(params, Y)
    for i in range(BLOCKS):
        x, weights1, weights2 = decoder_block(
            params[f"blks_{i}"], x, np.asarray(state[0], np.float64), lengths(7, 5)
        )
        np.testing.assert_allclose(own[i], weights1, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(other[i], weights2, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(logits, dense(params["dense"], x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("chunks", [[1] * 5, [3, 2]])
def test_decoding_in_pieces_is_decoding_at_once(chunks):
    """Positions go on, and the state that was handed in stays what it was."""
    decoder, variables, Y, first = decoder_alone()
    whole, last = decoder.apply(variables, Y, first)
    state, outputs, at = first, [], 0
    for chunk in chunks:
        output, state = decoder.apply(variables, Y[:, at : at + chunk], state)
        outputs.append(output)
        at += chunk
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), whole, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state[2], last[2], rtol=1e-4, atol=1e-5)
    assert first[2] == [None] * BLOCKS


def test_no_token_sees_a_later_one():
    decoder, variables, Y, state = decoder_alone()
    logits, _ = decoder.apply(variables, Y, state)
    changed, _ = decoder.apply(variables, Y.at[:, 3:].set(0), state)
    np.testing.assert_array_equal(logits[:, :3], changed[:, :3])
    assert not np.allclose(logits[:, 3:], changed[:, 3:])


def test_predict_step_is_the_decoder_run_greedily():
    (encoder, decoder), (_, decoder_variables, _, _) = encoder_and_decoder(), decoder_alone()
    variables, X, out, _ = encoded()
    params = {"encoder": variables["params"], "decoder": decoder_variables["params"]}
    model = d2l.EncoderDecoder(encoder, decoder)
    begin = jnp.ones((3, 1), jnp.int32)
    written, (of_decoder, of_encoder) = model.predict_step(params, (X, begin, LENS), 4, True)
    read = begin
    for step in range(4):
        logits, _ = decoder.apply(decoder_variables, read, decoder.init_state(out, LENS))
        read = jnp.concatenate([read, logits[:, -1:].argmax(-1).astype(jnp.int32)], axis=1)
        shapes = jax.tree.map(jnp.shape, of_decoder[step], is_leaf=lambda x: hasattr(x, "shape"))
        assert shapes == [[(6, 1, step + 1)] * BLOCKS, [(6, 1, 7)] * BLOCKS]
    np.testing.assert_array_equal(written, read[:, 1:])
    assert [w.shape for w in of_encoder] == [(6, 7, 7)] * BLOCKS


# ---------------------------------------------------------------------------------------------
# Dropout, and sentences that are too long.


def test_dropout_is_on_in_training_only_and_needs_a_key():
    encoder, _ = encoder_and_decoder(0.5)
    variables, X, calm, _ = encoded()
    np.testing.assert_array_equal(encoder.apply(variables, X, LENS), calm)
    key = {"dropout": RNG}
    noisy = encoder.apply(variables, X, LENS, training=True, rngs=key)
    np.testing.assert_array_equal(noisy, encoder.apply(variables, X, LENS, training=True, rngs=key))
    assert not np.allclose(noisy, calm)
    with pytest.raises(ValueError, match=r'dropout=0\.5 .*rngs=\{"dropout": key\}'):
        encoder.apply(variables, X, LENS, training=True)


def test_lengths_of_another_batch():
    encoder, X = encoder_and_decoder()[0], tokens(3, 7)
    with pytest.raises(ValueError, match=r"valid_lens must have shape .* Got valid_lens \[2\]"):
        encoder.init(RNG, X, LENS[:2])


def test_a_sentence_longer_than_max_len():
    encoder = d2l.TransformerEncoder(VOCAB, WIDTH, FFN, HEADS, 1, 0, max_len=6)
    with pytest.raises(ValueError, match=r"X \[3, 7, 8\], max_len 6\. Fix: max_len=7"):
        encoder.init(RNG, tokens(3, 7), LENS)
    layer = d2l.PositionalEncoding(2, 0, max_len=8)
    layer.apply({}, draw(1, 3, 2), start=5)
    with pytest.raises(ValueError, match=r"X \[1, 3, 2\] after 6 steps, max_len 8"):
        layer.apply({}, draw(1, 3, 2), start=6)


def test_positional_encoding_of_another_width():
    with pytest.raises(ValueError, match=r"X \[1, 3, 4\], num_hiddens 2"):
        d2l.PositionalEncoding(2, 0).apply({}, draw(1, 3, 4))
