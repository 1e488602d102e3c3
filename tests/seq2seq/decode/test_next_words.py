"""Next words: the probabilities are the model's own, and sit at the right words."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from regard.seq2seq.decode.next_words import END
from regard.seq2seq.decode.search import SearchOptions
from regard.seq2seq.text.vocabulary import BOS
from regard.seq2seq.translator import Translator

SENTENCE = "my sister wants to buy a red car."


@pytest.fixture(scope="module")
def translator():
    return Translator.load()


@pytest.fixture(scope="module")
def best(translator):
    return translator.translate([SENTENCE], search=SearchOptions(beam=3), n_best=3, hurry=True)[0]


def stepped(translator, text, written):
    """The softmax at every step, by the decoder's step function, one token after another."""
    model, tokenizers = translator.model, translator.tokenizers
    ids = [*tokenizers.source.encode(text).ids, 3]
    memory = model.encode(jnp.array([ids]), jnp.array([len(ids)]))
    state, rows = model.start(memory, 32), []
    for token in (BOS, *tokenizers.target.encode(written).ids):
        state, readout, _ = model.step(memory, state, jnp.array([[token]]))
        logits = np.asarray(model.logits(readout)[0, 0], np.float64)
        exp = np.exp(logits - logits.max())
        rows.append(exp / exp.sum())
    return np.array(rows)


def test_the_probabilities_are_those_of_the_decoder_step_by_step(translator, best):
    found = translator.next_words(SENTENCE, best, 10)
    total = 0.0
    for one, words in zip(best, found, strict=True):
        encoded = translator.tokenizers.target.encode(one.text)
        rows = stepped(translator, SENTENCE, one.text)
        assert len(words) == len(one.target_words) + 1
        for step, (token, word) in enumerate(zip(encoded.ids, encoded.word_of_token, strict=True)):
            if list(encoded.word_of_token).count(word) == 1:  # one piece: the word itself
                share = dict(words[word])[one.target_words[word]]
                assert share == pytest.approx(rows[step, token], abs=2e-3)
                total += share
        assert dict(words[-1])[END] == pytest.approx(rows[-1, 3], abs=2e-3)
        for alternatives in words:
            shares = [share for _, share in alternatives]
            assert shares == sorted(shares, reverse=True)
            assert sum(shares) <= 1.001
    assert total > 1, "some words have a single piece"


def test_a_capital_letter_is_not_a_word(translator, best):
    (words,) = translator.next_words(SENTENCE, best[:1], 5)
    assert best[0].target_words[0] == words[0][0][0] == "Ma"
    assert all(word[:1].isupper() for word, _ in words[0])


def test_what_cannot_be_judged_has_no_next_words(translator, best):
    assert translator.next_words("", best, 5) == [[]] * 3
    assert translator.next_words("a. " * 100, best, 5) == [[]] * 3
    assert translator.next_words(SENTENCE, [], 5) == []
    replaced = dataclasses.replace(best[0], target_words=("another", "split"))
    assert translator.next_words(SENTENCE, [replaced], 5) == [[]]
    assert len(translator.next_words(SENTENCE, best[:1], 2)[0][0]) == 2
