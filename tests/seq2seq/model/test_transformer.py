"""The Transformer against NumPy in float64, one sentence at a time; one token at a time against the
whole target; its padding, dropout, positions and configuration."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import oracle
from regard.seq2seq.decode.explaining import explain_words
from regard.seq2seq.model.architectures import load_config
from regard.seq2seq.model.config import Config, TransformerConfig
from regard.seq2seq.model.dropout import ShardOfRows
from regard.seq2seq.model.export import load_model, save_model
from regard.seq2seq.model.translation_model import Model
from seq2seq.tiny import TRANSFORMER, TRANSFORMERS, random_model, some_batch

BATCH = some_batch(seed=7)

pytestmark = [pytest.mark.usefixtures("quick_compilation")]

SCORES = {
    "dot": oracle.Dot,
    "additive": oracle.Additive,
    "gaussian": oracle.Gaussian,
    "bilinear": oracle.Bilinear,
}


def linear(p, x):
    return x @ p["kernel"] + p["bias"]


def norm(p, x):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]


SCORE_POSITIONS = ("rotary", "alibi", "relative")


def turned(config, rows):
    """Rotary: the pairs (i, i + D/2), turned by position · 10,000^(-2i/D)."""
    half = rows.shape[-1] // 2
    angles = np.arange(len(rows))[:, None] * 10_000.0 ** (-np.arange(half) / half)
    first, second = rows[:, :half], rows[:, half:]
    sin, cos = np.sin(angles), np.cos(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def bias(config, p, head, T, S):
    """What ALiBi and relative positions add; distances here are below T5's first wide bucket."""
    distance = np.arange(T)[:, None] - np.arange(S)[None]
    if config.positions == "alibi":
        return -(2.0 ** (-8 * (head + 1) / config.heads)) * np.abs(distance)
    if config.positions == "relative":
        return p["relative"]["table"][head][np.abs(distance) + 16 * (distance < 0)]
    return 0.0


def attention(config, p, x, y, causal=False):
    """[T, E], and the weights [N, T, S]."""
    itself = x is y
    names = config.attention.split(",") * (config.heads if "," not in config.attention else 1)
    out, weights = p["out"]["bias"], []
    for head, name in enumerate(names):
        q, k, v = (
            side @ p[part]["kernel"][:, head] + p[part]["bias"][head]
            for part, side in (("query", x), ("key", y), ("value", y))
        )
        if itself and config.positions == "rotary":
            q, k = turned(config, q), turned(config, k)
        place = names[:head].count(name)
        own = {leaf: array[place] for leaf, array in p.get(name, {}).items()}
        scores = np.stack([SCORES[name](own).scores(own, row, k) for row in q])
        scores = scores + bias(config, p, head, *scores.shape) if itself else scores
        if causal:
            scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        alpha = np.exp(scores - scores.max(-1, keepdims=True))
        weights.append(alpha / alpha.sum(-1, keepdims=True))
        out = out + weights[-1] @ v @ p["out"]["kernel"][head]
    return out, np.stack(weights)


def placed(config, p, x):
    places, width = np.arange(len(x))[:, None], config.embedding
    x = x * np.sqrt(width)
    if config.positions in SCORE_POSITIONS:
        return x
    if config.positions == "learned":
        return x + p["places"]["table"][: len(x)]
    angles = places * 10_000.0 ** (-np.arange(width // 2) / (width // 2))
    return x + np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)


def feed_forward(p, x):
    return x + linear(p["outer"], np.maximum(linear(p["inner"], norm(p["norm"], x)), 0))


def parameters(model):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(nnx.state(model)))


def encode(config, p, source):
    """The encoder's states [S, E]."""
    table = p["target_embedding" if config.tie == "all" else "source_embedding"]
    x = placed(config, p["encoder"], table[source])
    for layer in p["encoder"]["layers"].values():
        normed = norm(layer["attention_norm"], x)
        x = x + attention(config, layer["attention"], normed, normed)[0]
        x = feed_forward(layer["feed_forward"], x)
    return norm(p["encoder"]["norm"], x)


def run_numpy(model, source, target_in):
    """logits [T, V] and weights [T, S] of one sentence without padding."""
    config, p = model.config, parameters(model)
    states = encode(config, p, source)
    x, looks = placed(config, p["decoder"], p["target_embedding"][target_in]), []
    for layer in p["decoder"]["layers"].values():
        normed = norm(layer["itself_norm"], x)
        x = x + attention(config, layer["itself"], normed, normed, causal=True)[0]
        read, weights = attention(config, layer["source"], norm(layer["source_norm"], x), states)
        x, looks = feed_forward(layer["feed_forward"], x + read), [*looks, weights.mean(0)]
    table = p["output_embedding" if config.tie == "none" else "target_embedding"]
    logits = norm(p["decoder"]["norm"], x) @ table.T + p["output_bias"]
    layers = config.decoder_layers
    return logits, looks[layers - 2 if layers > 2 else layers - 1]


def explained(model, source, target_in, target_out):
    """[T, S]: with the last token before it, each word is predicted from a single source state."""
    config, p = model.config, parameters(model)
    (_, looks), table = run_numpy(model, source, target_in), p["target_embedding"]
    states = encode(config, p, source)
    embedded = placed(config, p["decoder"], table[target_in])
    found = np.zeros_like(looks)
    for t, s in np.ndindex(*looks.shape):
        x = embedded[: t + 1]
        for layer in p["decoder"]["layers"].values():
            normed = norm(layer["itself_norm"], x)
            x = x + attention(config, layer["itself"], normed, normed, causal=True)[0]
            asked = norm(layer["source_norm"], x)
            past = attention(config, layer["source"], asked, states)[0][:t]
            now = attention(config, layer["source"], asked[t:], states[s : s + 1])[0]
            x = feed_forward(layer["feed_forward"], x + np.concatenate([past, now]))
        logits = norm(p["decoder"]["norm"], x[t]) @ table.T + p["output_bias"]
        found[t, s] = looks[t, s] * np.exp(logits[target_out[t]]) / np.exp(logits).sum()
    return found / found.sum(-1, keepdims=True)


@functools.partial(jax.jit, static_argnums=0)
def _forward(graph, params, batch):
    """All at once, and step by step for two hypotheses, of which the first is the target."""
    model = nnx.merge(graph, params)
    memory = model.encode(batch.source, batch.source_lens)
    readout, weights = model.decode(memory, batch.target_in, return_weights=True)
    unseen, nothing = model.decode(memory, batch.target_in)
    assert nothing is None
    state = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=1), model.start(memory, 8))
    tokens = jnp.stack([batch.target_in, batch.target_in[:, ::-1]], axis=-1)  # [B, T, 2]

    def step(state, tokens):
        state, readout, weights = model.step(memory, state, tokens)
        return state, (model.logits(readout)[:, 0], weights[:, 0])

    _, stepped = jax.lax.scan(step, state, tokens.swapaxes(0, 1))
    logits = model.logits(readout)
    return (logits, weights), tuple(x.swapaxes(0, 1) for x in stepped), model.logits(unseen)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_the_model_is_its_definition(name):
    """With teacher forcing, and token by token from memories, as search decodes."""
    model = random_model(TRANSFORMERS[name])
    *forms, unseen = _forward(*nnx.split(model), BATCH)
    np.testing.assert_allclose(unseen, forms[0][0], atol=2e-5)  # looking changes nothing
    for logits, weights in forms:
        for row in range(BATCH.source.shape[0] - 1):  # the last is padding
            S, T = BATCH.source_lens[row], BATCH.target_lens[row]
            expected = run_numpy(model, BATCH.source[row, :S], BATCH.target_in[row, :T])
            np.testing.assert_allclose(logits[row, :T], expected[0], atol=1e-4)
            np.testing.assert_allclose(weights[row, :T, :S], expected[1], atol=1e-5)
            np.testing.assert_array_equal(weights[row, :, S:], 0)
        assert np.isfinite(logits).all()


def test_a_single_source_state_explains_a_word():
    model = random_model(TRANSFORMER)
    found = explain_words(model, BATCH.source, BATCH.source_lens, BATCH.target_in, BATCH.target_out)
    for row in range(BATCH.source.shape[0] - 1):  # the last is padding
        S, T = BATCH.source_lens[row], BATCH.target_lens[row]
        sides = BATCH.source[row, :S], BATCH.target_in[row, :T], BATCH.target_out[row, :T]
        np.testing.assert_allclose(found[row, :T, :S], explained(model, *sides), atol=1e-5)
        np.testing.assert_array_equal(found[row, :, S:], 0)


@functools.partial(jax.jit, static_argnums=0)
def _gradient(graph, params, batch):
    def loss(params):
        loss, *rest = nnx.merge(graph, params).loss(batch, smoothing=0.1)
        return loss, (loss, *rest)

    grads, sums = jax.grad(loss, has_aux=True)(params)
    return sums, grads


def test_every_parameter_matters_and_padding_does_not():
    """Wider, with more rows of padding, and with ids where there should be none."""
    graph, params = nnx.split(random_model(TRANSFORMERS["a score per head"]))

    def wider(array, to=9):
        out = np.full((array.shape[0] + 2, to), 7, array.dtype)
        out[: array.shape[0], : array.shape[1]] = array
        return out

    more = dataclasses.replace(
        BATCH,
        **{name: wider(getattr(BATCH, name)) for name in ("source", "target_in", "target_out")},
        source_lens=np.append(BATCH.source_lens, [0, 0]),
        target_lens=np.append(BATCH.target_lens, [0, 0]),
    )
    (ours, grads), (theirs, wider_grads) = (_gradient(graph, params, one) for one in (BATCH, more))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    pair = grads, wider_grads
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-3), *pair)
    for path, grad in jax.tree.leaves_with_path(grads):
        assert float(jnp.abs(grad).max()) > 0, path


def test_dropout_is_on_where_there_is_an_rng_and_each_device_draws_its_own_rows():
    rates = {f"{name}_dropout": 0.3 for name in TransformerConfig.RATES}
    graph, params = nnx.split(random_model(dataclasses.replace(TRANSFORMER, **rates)))

    @jax.jit
    def loss(batch, rng):
        return nnx.merge(graph, params).loss(batch, rng=rng)[0]

    rng = jax.random.key(0)
    whole = loss(BATCH, rng)
    assert whole != loss(BATCH, None)
    assert whole != loss(BATCH, jax.random.key(1))
    halves = [jax.tree.map(lambda x, part=part: x[part], BATCH) for part in (slice(2), slice(2, 4))]
    shards = [ShardOfRows(rng, jnp.int32(index), 2) for index in range(2)]
    parts = [loss(*one) for one in zip(halves, shards, strict=True)]
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-5)


# One layer of the encoder and two of the decoder: two and three places that add to the input.
EXPECTED_DRAWS = dict(embedding=1, target=1, output=1, layer=2 + 2 * 3, feed_forward=3)


@pytest.mark.parametrize("place", TransformerConfig.RATES)
def test_every_dropout_rate_drops(place):
    def draws(config):
        graph, params = nnx.split(random_model(config))
        rng = jax.random.key(0)
        traced = jax.make_jaxpr(lambda p: nnx.merge(graph, p).loss(BATCH, rng=rng)[0])(params)
        return str(traced).count("random_bits")

    drops = dataclasses.replace(TRANSFORMER, **{f"{place}_dropout": 0.5})
    assert (draws(TRANSFORMER), draws(drops)) == (0, EXPECTED_DRAWS[place])


def test_a_learned_table_of_positions_has_an_end():
    model = random_model(TRANSFORMERS["learned positions"])
    source, lens = jnp.full((1, 13), 5, jnp.int32), jnp.array([13], jnp.int32)
    with pytest.raises(ValueError, match=r"up to 13 tokens, max_positions 12\. Fix: shorter texts"):
        model.encode(source, lens)
    encoded = model.encode(source[:, :4], lens - 9)
    with pytest.raises(ValueError, match="up to 13 tokens, max_positions 12"):
        model.step(encoded, model.start(encoded, 13), jnp.array([[2]], jnp.int32))


def test_a_folder_says_which_architecture_it_has(tmp_path):
    model = Model(TRANSFORMERS["a score per head"], rngs=nnx.Rngs(0))
    loaded = load_model(save_model(tmp_path, model))
    assert loaded.config == model.config
    assert load_config(tmp_path / "config.json") == model.config
    for ours, theirs in zip(*map(jax.tree.leaves, map(nnx.state, (model, loaded))), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    old = tmp_path / "old.json"  # from before there were two
    fields = dataclasses.asdict(Config(9, 9))
    del fields["architecture"]

    old.write_text(json.dumps(fields))
    assert load_config(old) == Config(9, 9)
    old.write_text('{"architecture": "convolutional"}')
    with pytest.raises(ValueError, match=r"'recurrent', 'transformer'\. Got 'convolutional'"):
        load_config(old)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(heads=3), "heads must divide embedding.* Got heads 3, embedding 8"),
        (dict(attention="dots"), "one of 'dot', 'additive', 'gaussian', 'bilinear', or one for"),
        (dict(attention="dot,dot,dot"), "each of the 2 heads, with commas.* Got 'dot,dot,dot'"),
        (dict(attention=None), "Got None"),
        (dict(positions="polar"), "positions must be one of 'sinusoidal', 'learned'"),
        (dict(positions="rotary", heads=8), "must be even. Got embedding 8, heads 8"),
        (dict(feed_forward=0), "feed_forward must be between 1 and"),
        (dict(layer_dropout=1.0), r"layer_dropout must be a number in \[0, 1\)"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TRANSFORMER, **changes)
