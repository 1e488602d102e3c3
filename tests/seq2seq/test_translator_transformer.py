"""A Transformer's folder in the place of a recurrent model's: translate, align, evaluate."""

import numpy as np
import pytest

from regard.seq2seq.decode.hypotheses import SearchOptions
from regard.seq2seq.model.config import TransformerConfig
from regard.seq2seq.model.export import save_model
from regard.seq2seq.translator import Translator
from regard.show import AttentionMap
from seq2seq.small_translator import small_translator, tokenizers
from seq2seq.tiny import random_model

pytestmark = pytest.mark.usefixtures("quick_compilation")

SEARCH = SearchOptions(beam=2, dtype="float32")
TEXTS = ["one two, three", "six five four three two one.", "four"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    both = tokenizers()
    config = TransformerConfig(
        both.source.size,
        both.target.size,
        embedding=8,
        heads=2,
        feed_forward=8,
        encoder_layers=1,
        decoder_layers=3,
        attention="dot,gaussian",
        dtype="float32",
    )
    folder = tmp_path_factory.mktemp("transformer")
    save_model(folder, random_model(config, seed=5))
    both.save(folder)
    return folder


def test_a_folder_says_what_it_is_and_translates(folder):
    translator = Translator.load(folder)
    assert translator.model.config.architecture == "transformer"
    found = translator.translate(TEXTS, search=SEARCH, n_best=2)
    for text, (best, second) in zip(TEXTS, found, strict=True):
        assert best.score >= second.score
        assert best.weights.shape == (len(best.target_words), len(best.source_words))
        (alone, *_), *_ = translator.translate([text], search=SEARCH)
        assert alone.text == best.text
        np.testing.assert_allclose(alone.score, best.score, atol=1e-4)


def test_it_aligns_by_the_looks_that_it_has(folder):
    translator = Translator.load(folder)
    assert translator.looks == ("writing", "reading", "explaining")
    pairs = [("one two three .", "un deux trois ."), ("six", "un deux")]
    found = translator.align_by(translator.looks, pairs)
    for look in translator.looks:
        for one, (source, target) in zip(found[look], pairs, strict=True):
            assert one.weights.shape == (len(target.split()), len(source.split()))
            assert len(one.links()) == len(target.split())
    assert (found["writing"][0].weights != found["reading"][0].weights).any()


def test_every_layer_and_head_can_be_looked_at(folder):
    translator = Translator.load(folder)
    found = translator.layers("one two three .", "un deux")
    assert {name: one.weights.shape for name, one in found.items()} == {
        "encoder": (1, 2, 5, 5),
        "decoder": (3, 2, 3, 3),
        "cross": (3, 2, 3, 5),
    }
    for one in found.values():
        np.testing.assert_allclose(one.weights.sum(-1), 1.0, atol=1e-5)
        assert AttentionMap(*one).weights.shape == one.weights.shape
    assert found["cross"].query_labels == ("un", "deux", "(end)")
    assert found["cross"].key_labels == ("one", "two", "three", ".", "(end)")
    assert found["decoder"].query_labels == ("(start)", "un", "deux")
    np.testing.assert_array_equal(found["decoder"].weights, np.tril(found["decoder"].weights))
    # Of three layers, links and pictures are of the second.
    [aligned] = translator.align([("one two three .", "un deux")])
    expected = found["cross"].weights[1].mean(0)[:2, :4]
    np.testing.assert_allclose(aligned.weights, expected, atol=1e-5)


def test_a_recurrent_model_has_one_layer_and_head():
    translator = small_translator()
    found = translator.layers("one two", "un deux trois")
    assert list(found) == ["cross"]
    [aligned] = translator.align([("one two", "un deux trois")])
    weights = found["cross"].weights
    assert weights.shape == (1, 1, 4, 3)
    np.testing.assert_allclose(weights[0, 0, :3, :2], aligned.weights, atol=1e-5)
