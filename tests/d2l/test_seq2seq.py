"""The book's encoder and decoder: its shapes, NumPy's numbers, and the state between calls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import oracle
from intermediates import intermediates
from regard import d2l

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.sampled(2)]

VOCAB, EMBED, HIDDEN, LAYERS = 10, 8, 16, 2
LENS = np.array([9, 5, 1, 0])
RNG = jax.random.PRNGKey(5)


def model(dropout=0.0, layers=LAYERS):
    return d2l.EncoderDecoder(
        d2l.Seq2SeqEncoder(VOCAB, EMBED, HIDDEN, layers, dropout),
        d2l.Seq2SeqAttentionDecoder(VOCAB, EMBED, HIDDEN, layers, dropout),
    )


def tokens(*shape, seed=0):
    return jax.random.randint(jax.random.PRNGKey(seed), shape, 0, VOCAB, jnp.int32)


SOURCE, TARGET = tokens(4, 9), tokens(4, 7, seed=1)


@functools.cache
def some_params(layers=LAYERS):
    """Random, the biases too."""
    shapes = jax.eval_shape(model(layers=layers).init, RNG, SOURCE, TARGET, jnp.array(LENS))
    draw = np.random.default_rng(layers)
    return jax.tree.map(
        lambda x: jnp.asarray(0.4 * draw.normal(size=x.shape), x.dtype), shapes["params"]
    )


# ---------------------------------------------------------------------------------------------
# The same in NumPy, float64, one example and one step at a time.


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gru_step(p, h, x):
    def part(name, x):
        return x @ p[name]["kernel"] + p[name].get("bias", 0)

    r = sigmoid(part("ir", x) + part("hr", h))
    z = sigmoid(part("iz", x) + part("hz", h))
    n = np.tanh(part("in", x) + r * part("hn", h))
    return (1 - z) * n + z * h


def gru_stack_step(p, hidden, x):
    hidden = list(hidden)
    for layer in range(len(hidden)):
        hidden[layer] = x = gru_step(p[f"ScanGRUCell_{layer}"], hidden[layer], x)
    return hidden


def run_numpy(params, source, target, lens, layers=LAYERS):
    """logits [B, T, vocab], weights [B, T, S]."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    encoder, decoder = p["encoder"], p["decoder"]
    attention = oracle.Additive(
        {
            "query_kernel": decoder["attention"]["W_q"]["kernel"],
            "key_kernel": decoder["attention"]["W_k"]["kernel"],
            "vector": decoder["attention"]["w_v"]["kernel"][:, 0],
        }
    )
    logits, weights = [], []
    for row, words, length in zip(source, target, lens, strict=True):
        hidden, states = [np.zeros(HIDDEN)] * layers, []
        for token in row:
            hidden = gru_stack_step(
                encoder["rnn"], hidden, encoder["embedding"]["embedding"][token]
            )
            states.append(hidden[-1])
        states = np.stack(states)
        may = np.arange(len(row))[None] < length
        for token in words:
            seen = oracle.attend(hidden[-1][None], states, states, score=attention, may=may)
            x = np.concatenate([seen.out[0], decoder["embedding"]["embedding"][token]])
            hidden = gru_stack_step(decoder["rnn"], hidden, x)
            logits.append(hidden[-1] @ decoder["dense"]["kernel"] + decoder["dense"]["bias"])
            weights.append(seen.weights[0])
    B, T = target.shape
    return np.reshape(logits, (B, T, -1)), np.reshape(weights, (B, T, -1))


def weights_of(sown):
    steps = sown["intermediates"]["decoder"]["dec_attention_weights"][0]
    return np.concatenate(steps, axis=1)  # [B, T, S]


def test_the_model_is_numpys():
    """With three layers, where the book's middle layer reads the input, not the layer below."""
    layers = 3
    params = some_params(layers)
    run = jax.jit(functools.partial(model(layers=layers).apply, mutable="intermediates"))
    logits, sown = run({"params": params}, SOURCE, TARGET, jnp.array(LENS))
    expected, expected_weights = run_numpy(params, SOURCE, TARGET, LENS, layers)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(weights_of(sown), expected_weights, rtol=1e-4, atol=1e-6)
    assert logits.shape == (4, 7, VOCAB)
    np.testing.assert_array_equal(weights_of(sown)[3], 0)  # length 0


# ---------------------------------------------------------------------------------------------
# The pieces, as the chapter calls them.


def test_rnn():
    inputs = jax.random.normal(RNG, (9, 4, 8), jnp.float32)
    (outputs, H), variables = d2l.RNN(16).init_with_output(RNG, inputs)
    (_, H_more), _ = d2l.RNN(16).apply(variables, inputs, H), None
    assert outputs.shape == (9, 4, 16)
    np.testing.assert_array_equal(outputs[-1], H)
    assert not np.allclose(H, H_more)
    (p,) = jax.tree.map(lambda x: np.asarray(x, np.float64), variables["params"]).values()
    h = np.zeros((4, 16))
    for x in np.asarray(inputs, np.float64):
        h = np.tanh(x @ p["i"]["kernel"] + p["i"]["bias"] + h @ p["h"]["kernel"])
    np.testing.assert_allclose(H, h, rtol=1e-5, atol=1e-6)


def test_encoder():
    """Float token numbers too: the chapter calls it with zeros of the default dtype."""
    encoder = d2l.Seq2SeqEncoder(VOCAB, EMBED, HIDDEN, LAYERS)
    (outputs, state), _ = encoder.init_with_output(RNG, jnp.zeros((4, 9), jnp.float32))
    assert outputs.shape == (9, 4, HIDDEN)
    assert state.shape == (LAYERS, 4, HIDDEN)
    np.testing.assert_array_equal(outputs[-1], state[-1])


def test_decoder():
    encoder = d2l.Seq2SeqEncoder(VOCAB, EMBED, HIDDEN, LAYERS)
    decoder = d2l.Seq2SeqAttentionDecoder(VOCAB, EMBED, HIDDEN, LAYERS)
    X = jnp.zeros((4, 7), jnp.int32)
    state = decoder.init_state(encoder.init_with_output(RNG, X, training=False)[0], None)
    (output, state), _ = decoder.init_with_output(RNG, X, state, training=False)
    d2l.check_shape(output, (4, 7, VOCAB))
    d2l.check_shape(state[0], (4, 7, HIDDEN))
    d2l.check_shape(state[1], (LAYERS, 4, HIDDEN))
    d2l.check_shape(state[1][0], (4, HIDDEN))


def test_a_decoder_of_other_sizes_than_its_encoder_is_refused():
    encoded = d2l.Seq2SeqEncoder(VOCAB, EMBED, HIDDEN, 2).init_with_output(RNG, SOURCE)[0]
    decoder = d2l.Seq2SeqAttentionDecoder(VOCAB, EMBED, HIDDEN, 1)
    with pytest.raises(ValueError, match=rf"Got state \[2, 4, {HIDDEN}\].*num_layers 1"):
        decoder.init(RNG, SOURCE, decoder.init_state(encoded))


@pytest.mark.parametrize(
    "layer", [d2l.DotProductAttention(0.0), d2l.MultiHeadAttention(HIDDEN, 2, 0.0)]
)
def test_a_decoder_with_another_attention(layer):
    """The book's exercise; the weights of the first step are the layer's own."""

    class Decoder(d2l.Seq2SeqAttentionDecoder):
        def setup(self):
            self.attention = layer.clone()
            self.embedding = nn.Embed(self.vocab_size, self.embed_size)
            self.rnn = d2l.GRU(self.num_hiddens, self.num_layers)
            self.dense = nn.Dense(self.vocab_size)

    encoded = d2l.Seq2SeqEncoder(VOCAB, EMBED, HIDDEN, 1).init_with_output(RNG, SOURCE)[0]
    decoder = Decoder(VOCAB, EMBED, HIDDEN, 1)
    lens = jnp.array(LENS)
    state = decoder.init_state(encoded, lens)
    variables = {"params": decoder.init(RNG, TARGET, state)["params"]}
    _, seen = decoder.apply(variables, TARGET, state, mutable="intermediates")
    own = {"params": variables["params"].get("attention", {})}
    query, keys = encoded[1][-1][:, None], encoded[0].swapaxes(0, 1)
    expected = layer.apply(own, query, keys, keys, lens)[1]
    weights = seen["intermediates"]["dec_attention_weights"][0]
    np.testing.assert_allclose(weights[0], expected, rtol=1e-5)


def decoder_alone():
    params, both = some_params(), model()
    lens = jnp.array(LENS)
    encoded = both.encoder.apply({"params": params["encoder"]}, SOURCE)
    return both.decoder, {"params": params["decoder"]}, both.decoder.init_state(encoded, lens)


@pytest.mark.parametrize("chunks", [[1] * 7, [3, 4]])
def test_decoding_in_pieces_is_decoding_at_once(chunks):
    decoder, variables, state = decoder_alone()
    step = jax.jit(functools.partial(decoder.apply, mutable="intermediates"))
    (whole, last), sown = step(variables, TARGET, state)
    outputs, weights, at = [], [], 0
    for chunk in chunks:
        (output, state), seen = step(variables, TARGET[:, at : at + chunk], state)
        outputs.append(output)
        weights += seen["intermediates"]["dec_attention_weights"][0]
        at += chunk
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state[1], last[1], rtol=1e-5, atol=1e-6)
    at_once = sown["intermediates"]["dec_attention_weights"][0]
    assert [w.shape for w in at_once] == [(4, 1, 9)] * 7
    np.testing.assert_allclose(np.stack(weights), np.stack(at_once), rtol=1e-5, atol=1e-6)


def test_a_bound_decoder_says_where_it_looked():
    decoder, variables, state = decoder_alone()
    bound = decoder.bind(variables, mutable=["intermediates"])
    with pytest.raises(ValueError, match="recorded no attention weights: there was no call"):
        _ = bound.attention_weights
    bound(TARGET[:, :3], state)
    assert isinstance(decoder, d2l.AttentionDecoder)
    seen = np.concatenate(bound.attention_weights, axis=1)
    _, expected = run_numpy(some_params(), SOURCE, TARGET[:, :3], LENS)
    np.testing.assert_allclose(seen, expected, rtol=1e-4, atol=1e-6)


def test_the_program_does_not_grow_with_the_sentence():
    """A scan over the steps, and the keys are projected once, outside of it."""
    decoder, variables, state = decoder_alone()

    def program(steps):
        program = jax.make_jaxpr(lambda X: decoder.apply(variables, X, state)[0])(tokens(4, steps))
        return program.jaxpr

    assert len(list(intermediates(program(3)))) == len(list(intermediates(program(9))))
    projection = ("dot_general", (4, 9, HIDDEN))
    assert list(intermediates(program(5))).count(projection) == 1
    (scan,) = [e for e in program(5).eqns if e.primitive.name == "scan"]
    assert list(intermediates(scan.params["jaxpr"].jaxpr)).count(projection) == 0


# ---------------------------------------------------------------------------------------------
# Training and translating.


def test_a_training_step_reduces_the_loss():
    """Gradient descent with dropout on, from log 10 = 2.3 down; measured without dropout."""
    both, lens = model(dropout=0.1, layers=1), jnp.array(LENS)
    params = jax.jit(both.init)(RNG, SOURCE, TARGET, lens)["params"]
    before = TARGET.at[:, 1:].set(TARGET[:, :-1]).at[:, 0].set(0)

    def loss(params, rng, training):
        rngs = {"dropout": rng}
        logits = both.apply({"params": params}, SOURCE, before, lens, training=training, rngs=rngs)
        likely = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(likely, TARGET[..., None], axis=-1).mean()

    @jax.jit
    def step(params, rng):
        slope = jax.grad(loss)(params, rng, True)
        params = jax.tree.map(lambda p, s: p - jnp.float32(0.5) * s, params, slope)
        return params, loss(params, rng, False)

    losses = [float(jax.jit(loss, static_argnums=2)(params, RNG, False))]
    for rng in jax.random.split(RNG, 30):
        params, now = step(params, rng)
        losses.append(float(now))
    assert losses[1] < losses[0]
    assert losses[-1] < 0.9 * losses[0]


def greedily(params, num_steps):
    """predict_step in NumPy: the whole prefix again for every token."""
    written = np.asarray(TARGET[:, :1])
    for _ in range(num_steps):
        logits, weights = run_numpy(params, np.asarray(SOURCE), written, LENS)
        written = np.concatenate([written, logits[:, -1:].argmax(-1)], axis=1)
    return written[:, 1:], weights


@pytest.mark.parametrize("num_steps", [1, 6])
def test_predict_step(num_steps):
    params = some_params()
    batch = SOURCE, TARGET, jnp.array(LENS), None
    written, (weights, of_encoder) = model().predict_step(params, batch, num_steps, True)
    expected, expected_weights = greedily(params, num_steps)
    np.testing.assert_array_equal(written, expected)
    # As in the book: a list of steps, each a list of the weights of its one token.
    seen = np.concatenate([step[0] for step in weights], axis=1)
    np.testing.assert_allclose(seen, expected_weights, rtol=1e-4, atol=1e-6)
    assert of_encoder == []
    again, nothing = model().predict_step(params, batch, num_steps)
    np.testing.assert_array_equal(again, written)
    assert nothing == ([], [])
    with pytest.raises(ValueError, match=r"num_steps must be at least 1\. Got 0"):
        model().predict_step(params, batch, 0)


class Recorder(d2l.Decoder):
    """A decoder whose state grows, as a Transformer's does: it counts what it has read."""

    @nn.compact
    def __call__(self, X, state, training=False):
        state = jnp.concatenate([state, X], axis=1)
        return nn.one_hot((state.sum(1, keepdims=True) + 1) % VOCAB, VOCAB), state

    def init_state(self, enc_all_outputs, *args):
        return jnp.zeros((4, 0), jnp.int32)


class Looker(d2l.Encoder):
    """An encoder that says where it looked."""

    @nn.compact
    def __call__(self, X, valid_lens, training=False):
        self.sow("intermediates", "enc_attention_weights", [jnp.ones((4, 9, 9), jnp.float32)])
        return X


def test_predict_step_with_a_state_that_grows_and_an_encoder_that_looks():
    both = d2l.EncoderDecoder(Looker(), Recorder())
    first = jnp.ones((4, 1), jnp.int32)
    written, (of_decoder, of_encoder) = both.predict_step(
        {"encoder": {}, "decoder": {}}, (SOURCE, first, jnp.array(LENS), None), 4, True
    )
    # 1; then 1 + 1, 1 + 2 + 1, 1 + 2 + 4 + 1, 1 + 2 + 4 + 8 + 1, modulo 10
    np.testing.assert_array_equal(written, [[2, 4, 8, 6]] * 4)
    assert [w.shape for w in of_encoder] == [(4, 9, 9)]
    assert of_decoder == [[], [], [], []]


@pytest.mark.parametrize(
    "call",
    [
        lambda: d2l.Encoder().apply({}, SOURCE),
        lambda: d2l.Decoder().init_state(None),
        lambda: d2l.Decoder().apply({}, SOURCE, None),
        lambda: d2l.AttentionDecoder().attention_weights,
    ],
)
def test_the_bases_leave_the_rest_to_you(call):
    with pytest.raises(NotImplementedError):
        call()
