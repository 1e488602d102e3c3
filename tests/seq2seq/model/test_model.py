"""The model against NumPy in float64, one sentence and one step at a time; its padding, dtypes,
dropout, and the parts that make it quick."""

import dataclasses
import functools
import importlib

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import oracle
from regard.seq2seq.decode import explaining
from regard.seq2seq.decode.explaining import explain_words
from regard.seq2seq.model.config import Config
from regard.seq2seq.model.dropout import drop
from regard.seq2seq.model.recurrence import unroll
from regard.seq2seq.train.cross_entropy import cross_entropy
from seq2seq.tiny import CONFIG, CONFIGS, random_model, some_batch

BATCH = some_batch()

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.sampled(2)]

# ---------------------------------------------------------------------------------------------
# The same in NumPy.

FIXED = "deep lstm, fixed"


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def linear(p, x):
    return x @ p["kernel"] + p.get("bias", 0)


def advance(cell, x, recurrent, state):
    if cell == "gru":
        (xr, xz, xn), (hr, hz, hn) = np.split(x, 3), np.split(recurrent, 3)
        r, z = sigmoid(xr + hr), sigmoid(xz + hz)
        n = np.tanh(xn + r * hn)
        return ((1 - z) * n + z * state[0],)
    i, f, o, g = np.split(x + recurrent, 4)
    c = sigmoid(f + 1) * state[1] + sigmoid(i) * np.tanh(g)
    return (sigmoid(o) * np.tanh(c), c)


def run(cell, x, kernel):
    """States after each input, [S, H]."""
    state = (np.zeros(kernel.shape[0]),) * 2
    states = []
    for row in x:
        state = advance(cell, row, state[0] @ kernel, state)
        states.append(state[0])
    return np.stack(states)


def encode_numpy(config, p, source):
    x = p["target_embedding" if config.tie == "all" else "source_embedding"][source]
    for layer in range(config.encoder_layers):
        q = p["encoder"]["layers"][layer]
        ahead = run(config.cell, linear(q["forward"], x), q["forward_kernel"])
        back = run(config.cell, linear(q["backward"], x)[::-1], q["backward_kernel"])[::-1]
        x = np.concatenate([ahead, back], axis=-1)
    return x, np.concatenate([ahead[-1], back[0]])


def weights_numpy(config, p, query, annotations):
    score = {
        "additive": oracle.Additive,
        "gaussian": oracle.Gaussian,
        "bilinear": oracle.Bilinear,
        "dot": oracle.Dot,
    }[config.attention](p)
    scores = score.scores(p, query, annotations)
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def run_numpy(model, source, target_in, target_out=None):
    """logits [T, V] and weights [T, S] of one sentence without padding; and, if it is told what was
    written, how much of it each source token explains, [T, S].
    """
    config = model.config
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(nnx.state(model)))
    annotations, last = encode_numpy(config, p, source)
    d = p["decoder"]
    first = np.tanh(linear(d["initial"], annotations.mean(0)))
    state = [(first, np.zeros_like(first)) for _ in range(config.decoder_layers)]
    logits, looks, explained = [], [], []
    two_cells = config.query == "conditional" and config.attention != "none"

    def write(y, context, state):
        """The state after a step with this context, and the logits."""
        x, state = linear(d["context"], context), list(state)
        if not two_cells:
            x = x + linear(d["input"], y)
        for layer in range(config.decoder_layers):
            kernel = d["recurrent_kernels"][layer]
            if layer:
                x = linear(d["upper"][layer - 1], state[layer - 1][0])
            elif two_cells:
                kernel = d["context_recurrent_kernel"]
            state[layer] = advance(config.cell, x, state[layer][0] @ kernel, state[layer])
        readout = np.tanh(
            linear(d["from_state"], state[-1][0])
            + linear(d["from_embedding"], y)
            + linear(d["from_context"], context)
        )
        table = p["output_embedding" if config.tie == "none" else "target_embedding"]
        return state, table @ readout + p["output_bias"]

    for step, token in enumerate(target_in):
        y = p["target_embedding"][token]
        weights, context = np.zeros(len(source)), last
        if two_cells:  # the token is read before anything is asked
            recurrent = state[0][0] @ d["recurrent_kernels"][0]
            state[0] = advance(config.cell, linear(d["input"], y), recurrent, state[0])
        if config.attention != "none":
            learned = d.get("attention", {}).get("score", {})
            query = state[0 if two_cells else -1][0]
            if config.query == "token":
                query = query + linear(d["query_token"], y)
            weights = weights_numpy(config, learned, query, annotations)
            context = weights @ annotations
        if target_out is not None:
            alone = np.array([write(y, annotation, state)[1] for annotation in annotations])
            alone = np.exp(alone) / np.exp(alone).sum(-1, keepdims=True)  # [S, V]
            joint = weights * alone[:, target_out[step]]
            explained.append(joint / joint.sum())
        state, written = write(y, context, state)
        logits.append(written)
        looks.append(weights)
    if target_out is None:
        return np.array(logits), np.array(looks)
    return np.array(logits), np.array(looks), np.array(explained)


# ---------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def _forward(graph, params, batch):
    """All at once, and step by step for two hypotheses, of which the first is the target."""
    model = nnx.merge(graph, params)
    memory = model.encode(batch.source, batch.source_lens)
    readout, weights = model.decode(memory, batch.target_in, return_weights=True)
    state = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=1), model.start(memory, 8))
    tokens = jnp.stack([batch.target_in, batch.target_in[:, ::-1]], axis=-1)  # [B, T, 2]

    def step(state, tokens):
        state, readout, weights = model.step(memory, state, tokens)
        return state, (model.logits(readout)[:, 0], weights[:, 0])

    _, stepped = jax.lax.scan(step, state, tokens.swapaxes(0, 1))
    return (model.logits(readout), weights), tuple(x.swapaxes(0, 1) for x in stepped)


def forward(model, batch):
    """logits [B, T, V] and weights [B, T, S], twice: all at once, and step by step."""
    return _forward(*nnx.split(model), batch)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_is_its_definition(name):
    """With teacher forcing, and in steps as search takes them."""
    model = random_model(CONFIGS[name])
    for logits, weights in forward(model, BATCH):
        for row in range(BATCH.source.shape[0] - 1):  # the last is padding
            S, T = BATCH.source_lens[row], BATCH.target_lens[row]
            expected = run_numpy(model, BATCH.source[row, :S], BATCH.target_in[row, :T])
            np.testing.assert_allclose(logits[row, :T], expected[0], atol=2e-5)
            np.testing.assert_allclose(weights[row, :T, :S], expected[1], atol=5e-6)
            np.testing.assert_array_equal(weights[row, :, S:], 0)
        assert np.isfinite(logits).all()


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("none", FIXED)])
def test_what_explains_a_word_is_bayes_rule(name):
    model = random_model(CONFIGS[name])
    found = explain_words(model, BATCH.source, BATCH.source_lens, BATCH.target_in, BATCH.target_out)
    for row in range(BATCH.source.shape[0] - 1):
        S, T = BATCH.source_lens[row], BATCH.target_lens[row]
        given = (BATCH.source[row, :S], BATCH.target_in[row, :T], BATCH.target_out[row, :T])
        *_, expected = run_numpy(model, *given)
        np.testing.assert_allclose(found[row, :T, :S], expected, atol=2e-5)
        np.testing.assert_array_equal(found[row, :, S:], 0)
    np.testing.assert_array_equal(found[-1], 0)  # a row of padding


def test_of_many_source_tokens_only_the_heaviest_are_tried(monkeypatch):
    model, row = random_model(CONFIGS["additive"]), int(np.argmax(BATCH.source_lens))
    S, T = BATCH.source_lens[row], BATCH.target_lens[row]
    assert S > 2
    given = (BATCH.source[row, :S], BATCH.target_in[row, :T], BATCH.target_out[row, :T])
    _, looks, expected = run_numpy(model, *given)
    expected = np.where(looks >= np.sort(looks, axis=1)[:, -2:-1], expected, 0)
    monkeypatch.setattr(explaining, "TRIED", 2)
    explaining._explain.clear_cache()  # what was traced before has the other number
    found = explain_words(model, BATCH.source, BATCH.source_lens, BATCH.target_in, BATCH.target_out)
    explaining._explain.clear_cache()
    expected /= expected.sum(1, keepdims=True)
    np.testing.assert_allclose(found[row, :T, :S], expected, atol=2e-5)


def test_without_attention_nothing_explains():
    model = random_model(CONFIGS["none"])
    found = explain_words(model, BATCH.source, BATCH.source_lens, BATCH.target_in, BATCH.target_out)
    np.testing.assert_array_equal(found, 0)


@pytest.mark.parametrize("name", ["additive", "gaussian", FIXED, "asks with the token"])
def test_every_parameter_matters(name):
    """Negative control of the test above: a parameter that is never read would pass it."""
    _, grads = gradient(random_model(CONFIGS[name]), BATCH)
    for path, grad in jax.tree.leaves_with_path(grads):
        assert float(jnp.abs(grad).max()) > 0, path


@functools.partial(jax.jit, static_argnums=0)
def _loss(graph, params, batch, rng):
    return nnx.merge(graph, params).loss(batch, rng=rng)


def loss_of(model, batch, rng=None):
    """loss, -log p and count."""
    return _loss(*nnx.split(model), batch, rng)


@functools.partial(jax.jit, static_argnums=0)
def _gradient(graph, params, batch):
    def loss(params):
        loss, *rest = nnx.merge(graph, params).loss(batch, smoothing=0.1)
        return loss, (loss, *rest)

    grads, sums = jax.grad(loss, has_aux=True)(params)
    return sums, grads


def gradient(model, batch):
    """(loss, -log p, count), and the loss's gradient; the loss is smoothed."""
    return _gradient(*nnx.split(model), batch)


@pytest.mark.parametrize("name", ["additive", "deep lstm, fixed"])
def test_padding_changes_nothing(name):
    """Wider, with more rows of padding, and with ids where there should be none."""
    model = random_model(CONFIGS[name])

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
    (ours, grads), (theirs, wider_grads) = (gradient(model, batch) for batch in (BATCH, more))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    grads = grads, wider_grads
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-3), *grads)


@pytest.mark.parametrize("name", ["additive", FIXED])
def test_the_encoder_may_end_with_the_longest_sentence(name):
    model = random_model(CONFIGS[name])
    source = jnp.pad(jnp.asarray(BATCH.source), ((0, 0), (0, 5)))
    lens = jnp.asarray(BATCH.source_lens)
    whole, ended = model.encode(source, lens), model.encode(source, lens, longest=lens.max())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), whole, ended)


def test_a_loss_takes_a_known_number_of_steps():
    """Else devices that share a model would each take their own, and wait for each other."""
    model, lens = random_model(CONFIG), jnp.asarray(BATCH.source_lens)
    loss = str(jax.make_jaxpr(lambda: model.loss(BATCH))())
    search = str(jax.make_jaxpr(lambda n: model.encode(BATCH.source, n, longest=n.max()))(lens))
    assert " scan[" in loss
    assert " while[" not in loss
    assert " while[" in search


def _unroll_all(step, kernels, shared, carry, xs, count=None):
    return unroll.fun(step, kernels, shared, carry, xs)


def test_the_gradient_is_autodiffs(monkeypatch):
    """Every hand-written backward pass against JAX's own of the same function."""
    config = dataclasses.replace(CONFIG, encoder_layers=2, decoder_layers=2)
    graph, params = nnx.split(random_model(config))
    _, ours = _gradient(graph, params, BATCH)
    for module, name in (
        ("seq2seq.model.encoder", "unroll"),
        ("seq2seq.model.decoder", "unroll"),
        ("seq2seq.model.recurrence", "_gru"),
        ("score.logistic_form", "_stored_scores"),
        ("seq2seq.model.translation_model", "cross_entropy"),
    ):
        module = importlib.import_module(f"regard.{module}")
        plain = getattr(module, name).fun
        if name == "unroll":  # without a count: autodiff has to know the number of steps
            plain = _unroll_all
        monkeypatch.setattr(module, name, plain)
    # A function of its own: of `_gradient` jit would take what it traced before.
    program = jax.jit(lambda *given: _gradient.__wrapped__(graph, *given))
    _, theirs = program(params, BATCH)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-4), ours, theirs)


def test_training_stores_no_pair_of_a_step():
    """Of additive attention: the backward pass computes tanh of T·S·h pairs again."""
    config = dataclasses.replace(CONFIG, attention_width=64)
    graph, params = nnx.split(random_model(config))
    batch = some_batch(rows=4, width=64)
    program = jax.jit(_gradient.__wrapped__, static_argnums=0).lower(graph, params, batch).compile()
    pairs = 64 * 4 * 64 * 64  # steps · rows · source tokens · hidden units
    assert program.memory_analysis().temp_size_in_bytes < 4 * pairs


@pytest.mark.parametrize("name", CONFIGS)
def test_values_projected_once_give_the_same_steps(name):
    model = random_model(CONFIGS[name])
    encoded = model.encode(jnp.asarray(BATCH.source), jnp.asarray(BATCH.source_lens))
    state = model.start(encoded, 3)
    state = jax.tree.map(lambda part: jnp.repeat(part, 2, axis=1), state)
    tokens = jnp.asarray(BATCH.target_in[:, :2])  # two hypotheses of each sentence
    plain = model.step(encoded, state, tokens)
    projected = model.step(model.for_hypotheses(encoded), state, tokens)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), plain, projected)


def test_unroll_differentiates_as_scan_does():
    draw = np.random.default_rng(0)
    kernels = {name: jnp.asarray(draw.normal(size=(4, 4)) / 2) for name in "ab"}
    shared = jnp.asarray(draw.normal(size=4))
    carry, xs = jnp.asarray(draw.normal(size=(3, 4))), jnp.asarray(draw.normal(size=(5, 3, 4)))

    def step(times, shared, carry, x):
        carry = jnp.tanh(times("a", carry) * shared[None] + x)
        return carry, times("b", carry * x)

    def by_scan(kernels, shared, carry, xs):
        def body(carry, x):
            return step(lambda name, left: left @ kernels[name], shared, carry, x)

        return jax.lax.scan(body, carry, xs)

    def total(run, *arguments):
        carry, ys = run(*arguments)
        return (ys**2).sum() + carry.sum()

    arguments = (kernels, shared, carry, xs)
    ours, theirs = (
        jax.jit(jax.value_and_grad(functools.partial(total, run), argnums=(0, 1, 2, 3)))(*arguments)
        for run in (functools.partial(unroll, step), by_scan)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, theirs)


@pytest.mark.parametrize("count", [0, 2, 5])
def test_unroll_leaves_out_steps_past_the_count(count):
    def step(times, shared, carry, x):
        return carry + times("a", x), carry

    kernels, zero = {"a": jnp.ones((1, 1), jnp.float32)}, jnp.zeros((1, 1), jnp.float32)
    run = jax.jit(lambda xs: unroll(step, kernels, None, zero, xs, jnp.asarray(count, jnp.int32)))
    ones = jnp.ones((5, 1, 1), jnp.float32)
    carry, ys = run(ones)
    assert carry.item() == count
    np.testing.assert_array_equal(ys[:, 0, 0], [i if i < count else 0 for i in range(5)])
    # Where derivatives are taken all steps are made; those past the count leave the carry as it is.
    xs = ones.at[count:].set(0.0)
    value, grad = jax.value_and_grad(lambda xs: run(xs)[0][0, 0])(xs)
    assert value == count
    np.testing.assert_array_equal(grad, ones)


def test_unroll_refuses_a_kernel_used_twice():
    def step(times, shared, carry, x):
        return times("a", times("a", carry)), None

    kernels = {"a": jnp.eye(2, dtype=jnp.float32)}
    zeros = jnp.zeros((1, 2), jnp.float32)
    with pytest.raises(ValueError, match="each kernel once; 'a' is used twice"):
        jax.grad(lambda k: unroll(step, k, None, zeros, jnp.zeros(3))[0].sum())(kernels)


@pytest.mark.parametrize(
    ("chunk", "smoothing", "consistency"),
    [(64, 0.1, 0.0), (128, 0.0, 0.0), (128, 0.1, 2.5), (512, 0.1, 0.0), (2048, 0.0, 0.5)],
)
def test_cross_entropy_is_its_definition(chunk, smoothing, consistency, monkeypatch):
    """In chunks and whole, of one pass and of two; NaN in what does not count reaches nothing."""
    N, P, E, V = 300, 2 if consistency else 1, 5, 11
    monkeypatch.setattr("regard.seq2seq.train.cross_entropy._AT_ONCE", {"cpu": chunk * V})
    draw = np.random.default_rng(0)
    readout, kernel = draw.normal(size=(N, P, E)), draw.normal(size=(V, E))
    bias, labels, counts = draw.normal(size=V), draw.integers(0, V, N), draw.random(N) < 0.7

    def expected(readout, kernel, bias):
        log_p = jax.nn.log_softmax(readout @ kernel.T + bias[None, None], axis=-1)  # [N, P, V]
        nll = -log_p[jnp.arange(N), :, labels].mean(1)
        loss = (1 - smoothing) * nll - smoothing * log_p.mean((1, 2))
        for first, second in ((0, P - 1), (P - 1, 0)):
            away = log_p[:, first] - log_p[:, second]
            loss += 0.5 * consistency * (jnp.exp(log_p[:, first]) * away).sum(-1)
        return jnp.where(counts, loss, 0).sum(), jnp.where(counts, nll, 0).sum()

    spoiled = np.where(counts[:, None, None], readout, np.nan)
    arrays = (jnp.asarray(spoiled), jnp.asarray(kernel), jnp.asarray(bias))

    def ours(*arrays):
        given = jnp.asarray(labels), jnp.asarray(counts)
        return cross_entropy(*arrays, *given, smoothing, consistency)

    @functools.partial(jax.jit, static_argnums=0)
    def run(sums_of, *arrays):
        def tripled(*arrays):
            sums = sums_of(*arrays)
            return 3.0 * sums[0], sums

        return jax.grad(tripled, argnums=(0, 1, 2), has_aux=True)(*arrays)

    grads, sums = run(ours, *arrays)
    wanted, expected_sums = run(expected, readout, kernel, bias)
    np.testing.assert_allclose(sums, expected_sums, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(ours)(*arrays), expected_sums, rtol=1e-5)  # no gradient
    for mine, theirs in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)


def test_a_batch_read_twice_is_drawn_together():
    """Without dropout both passes agree, and the loss is that of one; with it, it is larger."""
    rng = jax.random.key(0)

    def losses(config, rng):
        graph, params = nnx.split(random_model(config))

        @jax.jit
        def both(params):
            model = nnx.merge(graph, params)
            return [model.loss(BATCH, consistency=c, rng=rng) for c in (0.0, 1e-9, 2.0)]

        return jax.tree.map(float, both(params))

    once, twice, drawn = losses(CONFIG, rng)
    np.testing.assert_allclose(twice, once, rtol=1e-5)
    np.testing.assert_allclose(drawn, once, rtol=1e-5)
    once, twice, drawn = losses(dataclasses.replace(CONFIG, embedding_dropout=0.5), rng)
    assert drawn[0] > twice[0] + 1e-3
    assert drawn[1:] == pytest.approx(twice[1:])
    assert twice[1] != once[1]  # of the mean of two draws of dropout
    assert losses(CONFIG, None)[2] == losses(CONFIG, None)[0]  # nothing is read twice


def test_dropout_drops_its_share_and_keeps_the_mean():
    x = drop(jnp.ones((300, 301), jnp.float32), 0.3, jax.random.key(0))
    kept = np.asarray(x) > 0
    np.testing.assert_allclose(1 - kept.mean(), 0.3, atol=0.01)
    np.testing.assert_allclose(x.mean(), 1.0, atol=0.01)
    assert len(np.unique(x)) == 2
    assert not (np.asarray(x)[1:] == np.asarray(x)[:-1]).all()


def test_dropout_near_one_keeps_something():
    """A rate that rounds to 256/256 would divide by zero."""
    x = drop(jnp.ones((300, 301), jnp.float32), 0.9999, jax.random.key(0))
    assert np.isfinite(x).all()
    assert (np.asarray(x) > 0).any()


def test_without_attention_the_context_has_the_annotations_dropout():
    """Else the model that attention is compared with would be regularized less."""
    model = random_model(dataclasses.replace(CONFIG, attention="none", annotation_dropout=0.5))
    lens = np.full(4, 5, np.int32)

    @jax.jit
    def summaries(params, rng):
        twin = nnx.merge(nnx.split(model)[0], params)
        source = np.full((4, 5), 7, np.int32)
        return twin.encode(source, lens, rng).summary, twin.encode(source, lens).summary

    noisy, still = summaries(nnx.state(model), jax.random.key(0))
    dropped = np.asarray(noisy) == 0
    assert 0.1 < dropped.mean() < 0.9
    np.testing.assert_allclose(np.asarray(noisy)[~dropped], 2 * np.asarray(still)[~dropped])


@pytest.mark.parametrize("place", ["embedding", "annotation", "output", "target", "layer"])
def test_dropout_is_on_where_there_is_an_rng_and_only_there(place):
    config = CONFIGS["deep"] if place == "layer" else CONFIG
    model = random_model(dataclasses.replace(config, **{f"{place}_dropout": 0.5}))
    params = nnx.state(model)
    noisy = [float(loss_of(model, BATCH, jax.random.key(seed))[0]) for seed in range(2)]
    assert noisy[0] != noisy[1]
    without, never = (
        str(jax.make_jaxpr(functools.partial(_loss, nnx.split(each)[0]))(params, BATCH, None))
        for each in (model, random_model(config))
    )
    assert without == never  # the same program


def test_bfloat16_is_near_float32():
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    exact, _, count = loss_of(random_model(), BATCH)
    near, _, _ = loss_of(random_model(config), BATCH)
    np.testing.assert_allclose(near / count, exact / count, rtol=0.03)
    assert float(near) != float(exact)
    graph, params = nnx.split(random_model(config))
    _, grads = jax.eval_shape(functools.partial(_gradient, graph), params, BATCH)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


def test_weights_are_wanted_or_not_the_readouts_are_the_same():
    graph, params = nnx.split(random_model())

    @jax.jit
    def both(params):
        model = nnx.merge(graph, params)
        memory = model.encode(BATCH.source, BATCH.source_lens)
        return model.decode(memory, BATCH.target_in), model.decode(
            memory, BATCH.target_in, return_weights=True
        )

    (plain, nothing), (looked, _) = both(params)
    assert nothing is None
    np.testing.assert_allclose(plain, looked, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(decoder=0), "decoder must be between 1 and 16,777,216. Got 0"),
        (dict(source_vocab=4), "source_vocab must count at least pad, unk, bos, eos and one"),
        (dict(attention="dots"), "attention must be one of 'additive', 'dot'"),
        (dict(output_dropout=1.0), r"output_dropout must be a number in \[0, 1\). Got 1.0"),
        (dict(attention="dot", decoder=10), "Got decoder 10, encoder 4. Fix: decoder=8"),
        (
            dict(tie="all", source_vocab=10),
            "one vocabulary for both languages. Got source_vocab 10",
        ),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_a_configuration_survives_its_json():
    config = CONFIGS["deep lstm, fixed"]
    assert Config.from_json(config.to_json()) == config
    with pytest.raises(ValueError, match=r"unknown fields \['color'\], missing fields \['target_v"):
        Config.from_json('{"color": 1, "source_vocab": 9}')
    with pytest.raises(ValueError, match="here is not JSON"):
        Config.from_json("{", "here")


def test_keys_are_projected_once_and_not_per_step():
    """The program of a longer target has no more products with the key kernel."""
    config = dataclasses.replace(CONFIG, attention_width=7)  # 8 -> 7: no other kernel is so
    graph, params = nnx.split(random_model(config))

    def inside(jaxpr):
        """Products with a [8, 7] kernel, by whether they are in a loop."""
        loose, looped = 0, 0
        for eqn in jaxpr.eqns:
            shapes = [getattr(v.aval, "shape", None) for v in eqn.invars]
            if eqn.primitive.name == "dot_general" and (8, 7) in shapes:
                loose += 1
            for sub in jax.extend.core.jaxprs_in_params(eqn.params):
                here = inside(sub)
                if eqn.primitive.name in ("scan", "while"):
                    looped += sum(here)
                else:
                    loose, looped = loose + here[0], looped + here[1]
        return loose, looped

    traced = jax.make_jaxpr(lambda params: nnx.merge(graph, params).loss(BATCH)[0])(params)
    # The query kernel is [8, 7] too, and has to be in the loop: once each.
    assert inside(traced.jaxpr) == (1, 1)
