"""Beam search against brute force and against a plain beam in Python; greedy; forced decoding."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from regard.seq2seq.decode import search
from regard.seq2seq.decode.search import beam_search, force, greedy
from regard.seq2seq.decode.top_k import best_of
from regard.seq2seq.text.vocabulary import BOS, EOS, PAD, UNK
from seq2seq.tiny import CONFIGS, VOCAB, random_model, some_batch

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.sampled(1)]

SearchOptions = functools.partial(search.SearchOptions, dtype="float32")

MODEL = random_model(seed=1, scale=0.8)
BATCH = some_batch(rows=5, width=5, seed=2)
SOURCE, LENS = BATCH.source, BATCH.source_lens

# A beam takes seconds to compile, so that the tests share a few.
SHORT = dict(max_ratio=1.0, max_extra=4)
ONE = SearchOptions(beam=1, forbid_unknown=True, **SHORT)
TWO = SearchOptions(beam=2, length_penalty=0.0, early_stop=False, **SHORT)
FOUR = SearchOptions(beam=4, length_penalty=1.5, early_stop=False, **SHORT)
STOPS = SearchOptions(beam=3, length_penalty=1.0, early_stop=True, **SHORT)


@functools.cache
def next_log_probs(row, prefix):
    """log p(token | prefix, source) for every token, [V], from the whole model."""
    return log_probs(MODEL, row, prefix)[len(prefix)]


def log_probs(model, row, prefix):
    """The same after each token of the prefix, [12, V]."""
    graph, params = nnx.split(model)
    padded = np.full((1, 12), PAD, np.int32)
    padded[0, : len(prefix) + 1] = (BOS, *prefix)
    log_p = _log_probs(graph, params, SOURCE[row : row + 1], LENS[row : row + 1], padded)
    return np.asarray(log_p[0], np.float64)


@functools.partial(jax.jit, static_argnums=0)
def _log_probs(graph, params, source, lens, target_in):
    model = nnx.merge(graph, params)
    readout, _ = model.decode(model.encode(source, lens), target_in)
    return jax.nn.log_softmax(model.logits(readout), axis=-1)


def biased(token, bias):
    """The model with another bias for one token."""
    graph, params = nnx.split(random_model(seed=1, scale=0.8))
    params["output_bias"][...] = params["output_bias"][...].at[token].set(bias)
    return nnx.merge(graph, params)


def penalized(log_prob, length, alpha):
    return log_prob / ((5 + length) / 6) ** alpha


def brute_force(row, longest, alpha):
    """Every target of at most `longest` tokens, best first: (score, log p, tokens)."""
    words = [token for token in range(VOCAB) if token not in (PAD, BOS, EOS)]
    found = []
    for length in range(1, longest):  # a translation is not empty
        for prefix in itertools.product(words, repeat=length):
            tokens = (*prefix, EOS)
            log_prob = sum(next_log_probs(row, tokens[:i])[t] for i, t in enumerate(tokens))
            found.append((penalized(log_prob, len(tokens), alpha), log_prob, tokens))
    return sorted(found, reverse=True)


def plain_beam(row, options, n_best):
    """The algorithm in a few lines of Python: (score, tokens), best first."""
    alpha = options.length_penalty
    longest = int(options.max_ratio * LENS[row]) + options.max_extra
    live, finished, greedy_end = [(0.0, ())], [], []
    greedy = (0.0, ())  # None once it has ended
    for step in range(longest):
        never = (PAD, BOS, EOS) if step == 0 else (PAD, BOS)
        allowed = [t for t in range(VOCAB) if t not in never]
        if step + 1 == longest:
            allowed = [EOS]
        extensions = sorted(
            (
                (log_prob + next_log_probs(row, prefix)[token], (*prefix, token))
                for log_prob, prefix in live
                for token in allowed
            ),
            reverse=True,
        )
        if greedy is not None:
            greedy = next(e for e in extensions if e[1][:-1] == greedy[1])
        ended = [e for e in extensions[: options.beam] if e[1][-1] == EOS and e != greedy]
        finished += ended[: options.beam - len(finished)]
        live = [e for e in extensions if e[1][-1] != EOS][: options.beam]
        if greedy is not None and greedy[1][-1] == EOS:
            greedy, greedy_end = None, [greedy]
        elif greedy is not None and greedy not in live:
            live[-1] = greedy
        every = finished + greedy_end
        ranked = sorted(((penalized(p, len(t), alpha), t) for p, t in every), reverse=True)

        def bound(log_prob, shortest=step + 2):
            return max(penalized(log_prob, n, alpha) for n in (shortest, longest))

        open_greedy = greedy is not None and (not ranked or bound(greedy[0]) > ranked[0][0])
        if not live or (len(every) >= options.beam and not open_greedy):
            break
        to_beat = ranked[n_best - 1][0] if len(ranked) >= n_best else -np.inf
        if options.early_stop and bound(live[0][0]) <= to_beat:
            break
    return ranked[:n_best]


def found_tokens(found, row, place):
    length = int(found.lens[row, place])
    assert (np.asarray(found.tokens[row, place, length:]) == PAD).all()
    return tuple(np.asarray(found.tokens[row, place, :length]).tolist())


def test_a_wide_beam_is_brute_force():
    """6 tokens and 3 places: 6 + 36 targets. A beam of 256 holds every extension of them."""
    options = SearchOptions(
        beam=256, early_stop=False, length_penalty=1.0, max_ratio=0.0, max_extra=3
    )
    found = beam_search(MODEL, SOURCE, LENS, options, n_best=42)
    for row in range(3):
        expected = brute_force(row, 3, 1.0)
        assert len(expected) == 42
        np.testing.assert_allclose(found.scores[row], [e[0] for e in expected], atol=1e-5)
        np.testing.assert_allclose(found.log_probs[row], [e[1] for e in expected], atol=1e-5)
        for place in range(10):
            assert found_tokens(found, row, place) == expected[place][2]


@pytest.mark.parametrize(
    ("options", "n_best"), [(TWO, 2), (FOUR, 4), (STOPS, 1)], ids=["two", "four", "stops"]
)
def test_a_narrow_beam_is_the_plain_one(options, n_best):
    found = beam_search(MODEL, SOURCE, LENS, options, n_best=n_best)
    for row in range(4):
        expected = plain_beam(row, options, n_best)
        count = len(expected)
        np.testing.assert_allclose(found.scores[row, :count], [e[0] for e in expected], atol=1e-5)
        np.testing.assert_array_equal(found.scores[row, count:], -np.inf)
        for place, (_, tokens) in enumerate(expected):
            assert found_tokens(found, row, place) == tokens


def test_greedy_is_a_beam_of_one():
    for model in (MODEL, random_model(seed=2, scale=0.8), biased(UNK, 30.0)):
        ours = greedy(model, SOURCE, LENS, ONE)
        theirs = beam_search(model, SOURCE, LENS, ONE)
        for name in ("tokens", "lens"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        for name in ("scores", "log_probs", "attention"):
            np.testing.assert_allclose(
                getattr(ours, name), getattr(theirs, name), rtol=1e-5, atol=1e-7
            )


MANY = some_batch(rows=60, width=5, seed=7)


@pytest.mark.parametrize(("seed", "scale", "beam"), [(3, 0.8, 4), (1, 1.2, 2), (3, 1.2, 4)])
def test_a_beam_finds_nothing_worse_than_greedy_search(seed, scale, beam):
    """With these weights a plain beam drops greedy hypotheses that would have had better scores."""
    model, options = random_model(seed=seed, scale=scale), SearchOptions(beam=beam, **SHORT)
    wanted = MANY.source_lens > 0
    found = beam_search(model, MANY.source, MANY.source_lens, options, n_best=1)
    least = greedy(model, MANY.source, MANY.source_lens, options)
    ours, theirs = (np.asarray(one.scores[:, 0])[wanted] for one in (found, least))
    assert (ours >= theirs - 1e-5).all()
    assert (ours > theirs + 1e-3).any()


@pytest.mark.parametrize("seed", [0, 2, 3])
@pytest.mark.slow
def test_the_best_of_several_is_the_best(seed):
    """The length penalty raises scores that were too low when enough hypotheses had finished."""
    model = random_model(seed=seed, scale=1.2)
    options = SearchOptions(beam=4 if seed == 3 else 2, length_penalty=2.0, **SHORT)
    wanted = MANY.source_lens > 0
    alone, several = (
        beam_search(model, MANY.source, MANY.source_lens, options, n_best=n)
        for n in (1, options.beam)
    )
    ours, theirs = (np.asarray(one.scores[:, 0])[wanted] for one in (alone, several))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    np.testing.assert_array_equal(alone.tokens[:, 0], several.tokens[:, 0])


@pytest.mark.slow
def test_no_hypothesis_is_empty():
    model = random_model(seed=1, scale=0.8)
    model.output_bias[...] = model.output_bias[...].at[EOS].add(20.0)
    for options in (ONE, TWO, FOUR, STOPS):
        for find in (beam_search, greedy):
            lens = np.asarray(find(model, MANY.source, MANY.source_lens, options).lens)
            assert (lens[MANY.source_lens > 0, 0] >= 2).all()


def test_the_attention_of_every_hypothesis_is_that_of_forced_decoding():
    found = beam_search(MODEL, SOURCE, LENS, FOUR, n_best=4)
    _, K, T = found.tokens.shape
    shifted = np.pad(found.tokens, ((0, 0), (0, 0), (1, 0)), constant_values=BOS)[:, :, :-1]
    for place in range(K):
        forced = force(MODEL, SOURCE, LENS, shifted[:, place])
        written = np.arange(T)[None, :, None] < np.asarray(found.lens)[:, place, None, None]
        expected = np.where(written, forced, 0.0)
        np.testing.assert_allclose(found.attention[:, place], expected, atol=1e-5)
    total = np.asarray(found.attention).sum(-1)  # one for each token of a sentence, else 0
    lens = np.asarray(found.lens)[..., None]
    np.testing.assert_allclose(total, (np.arange(T)[None, None] < lens).astype(float), atol=1e-5)


def test_a_row_of_padding_has_no_hypotheses_and_disturbs_none():
    found = beam_search(MODEL, SOURCE, LENS, FOUR, n_best=4)
    assert LENS[-1] == 0
    np.testing.assert_array_equal(found.lens[-1], 0)
    np.testing.assert_array_equal(found.scores[-1], -np.inf)
    np.testing.assert_array_equal(found.tokens[-1], PAD)
    np.testing.assert_array_equal(found.attention[-1], 0)
    source, lens = SOURCE.copy(), LENS.copy()
    source[-1], lens[-1] = [7, 8, 4, 5, EOS], 5
    filled = beam_search(MODEL, source, lens, FOUR, n_best=4)
    assert int(filled.lens[-1, 0]) > 0
    np.testing.assert_array_equal(found.tokens[:-1], filled.tokens[:-1])


def test_a_batch_that_shrinks_loses_nothing():
    """More than eight sentences go on as a smaller batch when half are done: the same results."""
    batch = some_batch(rows=10, width=5, seed=4)
    found = beam_search(MODEL, batch.source, batch.source_lens, STOPS, n_best=1)
    lens = np.asarray(found.lens[:, 0])
    assert np.median(lens) < lens.max()  # it does shrink
    for start in (0, 5):
        part = slice(start, start + 5)
        alone = beam_search(MODEL, batch.source[part], batch.source_lens[part], STOPS, n_best=1)
        np.testing.assert_array_equal(found.tokens[part], alone.tokens)
        np.testing.assert_allclose(found.scores[part], alone.scores, rtol=1e-5)
        np.testing.assert_allclose(found.attention[part], alone.attention, atol=1e-6)


def test_lengths_keep_to_their_limit_and_end():
    """A model that never wants to end is made to, at its own sentence's limit."""
    model = biased(EOS, -30.0)
    for found in (
        beam_search(model, SOURCE, LENS, TWO, n_best=2),
        greedy(model, SOURCE, LENS, ONE),
    ):
        for row in range(4):
            limit = LENS[row] + 4
            assert (np.asarray(found.lens[row]) == limit).all()
            assert (np.asarray(found.tokens[row, :, limit - 1]) == EOS).all()


def test_unknown_can_be_forbidden():
    model = biased(UNK, 30.0)
    assert (np.asarray(beam_search(model, SOURCE, LENS, TWO, n_best=2).tokens) == UNK).any()
    for find in (beam_search, greedy):
        found = find(model, SOURCE, LENS, ONE)
        assert not (np.asarray(found.tokens) == UNK).any()
        assert not (np.asarray(found.tokens) == BOS).any()


@pytest.mark.parametrize("name", ["deep lstm, fixed", "dot"])
def test_other_models_can_be_searched(name):
    """What a hypothesis is said to be worth is what teacher forcing gives it, so that every
    layer's state followed it."""
    model = random_model(CONFIGS[name], scale=0.8)
    found = beam_search(model, SOURCE, LENS, TWO, n_best=2)
    for row in range(4):
        for place in range(2):
            tokens = found_tokens(found, row, place)
            log_p = log_probs(model, row, tokens[:-1])
            expected = sum(log_p[i, token] for i, token in enumerate(tokens))
            np.testing.assert_allclose(found.log_probs[row, place], expected, atol=1e-5)
    looks = np.asarray(found.attention).sum(-1).max()
    np.testing.assert_allclose(looks, 1.0 if name == "dot" else 0.0, atol=1e-6)


@pytest.mark.parametrize("k", [1, 7])
@pytest.mark.parametrize("V", [12, 5000])
def test_best_of_is_top_k(k, V):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, V)), jnp.float32)
    values, tokens, log_total = jax.jit(best_of, static_argnums=1)(logits, k)
    for ours, theirs in zip((values, tokens), jax.lax.top_k(logits, k), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_allclose(log_total, jax.nn.logsumexp(logits, axis=-1), rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SearchOptions(beam=0), "beam must be at least 1. Got 0"),
        (lambda: SearchOptions(max_extra=0), "room for <eos>. Got max_ratio 1.5, max_extra 0"),
        (
            lambda: beam_search(MODEL, SOURCE, LENS, SearchOptions(beam=2), n_best=3),
            "n_best must be from 1 to beam. Got 3, beam 2",
        ),
    ],
)
def test_what_cannot_be_searched_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
