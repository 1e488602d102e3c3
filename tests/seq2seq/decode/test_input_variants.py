"""Ordinary text: capitals, no full stop, markup, emoji, other scripts, long numbers."""

import numpy as np
import pytest

from regard.seq2seq.decode.hypotheses import SearchOptions
from regard.seq2seq.decode.input_variants import read_sources
from regard.seq2seq.decode.spans import find_spans
from regard.seq2seq.text.tokenizer import Tokenizer
from regard.seq2seq.text.words import split_words
from regard.seq2seq.translator import Translator
from seq2seq.small_translator import small_translator

GREEDY = SearchOptions(beam=1)

# Most of these gave an empty line or an invented sentence when the model read them as they are.
INPUTS = {
    "I LIKE CATS.": "J'AIME LES CHATS.",
    "WHERE IS THE TRAIN STATION?": "OÙ EST LA GARE ?",
    "TOM LIVES IN BOSTON": "TOM VIT À BOSTON",
    "i like cats": "J'aime les chats",
    "i like cats.": "J'aime les chats.",
    "where are you going": "Où vas-tu",
    "<p>I like <i>cats</i>.</p>": "<p>J'aime <i>les chats</i>.</p>",
    'The <a href="x.html">red car</a> is new.': (
        'La <a href="x.html">voiture rouge</a> est nouvelle.'
    ),
    "I love you 😀": "Je t'aime 😀",
    "“I don’t know,” she said.": "« Je ne sais pas, » a dit.",
    "My phone number is 555-1234.": "Mon numéro de téléphone est 555-1234.",
    "Call me at +33 6 12 34 56 78.": "Appelle-moi à +33 6 12 34 56 78.",
    "Peña is a great player.": "Peña est un grand joueur.",
    "John Kowalczyk met Anja Schröder in Łódź.": (
        "John Kowalczyk a rencontré Anja Schröder à Łódź."
    ),
    "STOP! do not go there.": "ARRÊTEZ ! N'y va pas !",
    "I met Anja Schröder at the Guggenheim museum.": (
        "J'ai rencontré Anja Schröder au musée Guggenheim."
    ),
    "Hello, my name is Xavier.": "Salut, mon nom est Xavier.",
    # Nothing to translate: copied.
    "😀": "😀",
    "مرحبا بالعالم": "مرحبا بالعالم",
    "שלום עולם": "שלום עולם",
    "Привет, мир!": "Привет, мир!",
    "你好世界": "你好世界",
    "1 + 1 = 2": "1 + 1 = 2",
    "...": "...",
    "https://example.com/a?b=1": "https://example.com/a?b=1",
    " \t": "",
}
# Ordinary sentences, which are read as they are.
PLAIN = [
    "I like cats.",
    "Tom's car is red.",
    "I'm from the USA.",
    "Where is my bed?",
    "I am tired. I want to sleep.",
    "It is 10:30.",
    'He said, "Hello!"',
]
STRANGE = [
    "Hi",
    "a\ttab\tbetween",
    "zero\u200bwidth",
    "cafe\u0301 au lait",
    "tHiS iS wEiRd CaSe.",
    "See https://example.com/path?x=1 for details.",
    "Contact me at john.doe@example.com please.",
    "日本語 means Japanese.",
    "#hashtag and @user like cats",
    "&lt;tag&gt; &amp; more",
    "<br/>",
    "</b>Hello<b>",
    "He paid $1,234.56 on 2024-03-15.",
    "  leading and trailing  ",
    "WHO IS IN the UN AND NATO?",
    "A",
    "ß",
    "ǅ ﬁ Ⅷ",
    "Is that 😀 funny 😀😀?",
    "x" * 300,
]


@pytest.fixture(scope="module")
def bundled() -> Translator:
    return Translator.load()


@pytest.fixture(scope="module")
def found(bundled):
    texts = [*INPUTS, *PLAIN, *STRANGE]
    # In bfloat16, which "auto" may take, some of them are within one rounding of another one.
    exact = SearchOptions(dtype="float32")
    return dict(zip(texts, bundled.translate(texts, search=exact), strict=True))


@pytest.mark.parametrize("text", INPUTS)
def test_ordinary_text_is_translated_or_copied(found, text):
    assert found[text][0].text == INPUTS[text]


def test_no_text_with_words_has_an_empty_translation_and_weights_fit(found):
    for text, (best, *_) in found.items():
        assert bool(best.text) == bool(text.strip()), text
        assert best.source_words == split_words(text).words
        assert best.weights.shape == (len(best.target_words), len(best.source_words))
        assert (best.weights.sum(1) < 1 + 1e-6).all()
        assert np.isfinite(best.score)


def test_an_ordinary_sentence_has_one_reading_and_is_not_changed(bundled, found):
    sources = read_sources(PLAIN, bundled.tokenizers.source, lambda: ("Tom",), adapt=True)
    assert [len(source.variants) for source in sources] == [1] * len(PLAIN)
    for text, (best, *_) in zip(PLAIN, bundled.translate(PLAIN, adapt=False), strict=True):
        assert found[text][0].text == best.text
        np.testing.assert_allclose(found[text][0].score, best.score, atol=0.02)


def test_what_is_copied_is_aligned_with_itself(found):
    (best, *_) = found["Call me at +33 6 12 34 56 78."]
    words = best.source_words
    for j, word in enumerate(best.target_words):
        if any(map(str.isdigit, word)) or word == "+":
            assert words[int(best.weights[j].argmax())] == word
            assert best.weights[j].max() == 1.0


def test_a_copy_in_a_foreign_script_says_so(found):
    assert found["Привет, мир!"][0].note == "copied: the model knows no Cyrillic letters"
    assert found["你好世界"][0].note == "copied: the model knows no Chinese letters"
    assert not any(best.note for text, (best, *_) in found.items() if text.isascii())


@pytest.mark.slow
def test_the_best_of_several_is_the_best_and_none_is_empty(bundled):
    texts = [*INPUTS, *PLAIN]
    alone = bundled.translate(texts, n_best=1)
    several = bundled.translate(texts, n_best=3)
    greedy = bundled.translate(texts, search=GREEDY)
    for text, (best,), found, (least,) in zip(texts, alone, several, greedy, strict=True):
        assert found[0].text == best.text
        assert len({one.text for one in found}) == len(found)
        assert all(one.text for one in found) or not text.strip()
        if len(read_sources([text], bundled.tokenizers.source, tuple, True)[0].variants) == 1:
            assert best.score >= least.score - 0.02  # rounding of bfloat16, where that is used


def test_text_without_adaptation_is_read_as_it_is(bundled):
    (best,), *_ = bundled.translate(["I LIKE CATS."], adapt=False)
    assert best.text != INPUTS["I LIKE CATS."]


def test_a_model_of_small_letters_is_given_small_letters():
    """Whatever case a vocabulary has: no variant has more unknown tokens than another."""
    tokenizer = Tokenizer.train(["one two three four."] * 9, kind="word")
    for text in ("One two three.", "ONE TWO THREE.", "one two three."):
        (source,) = read_sources([text], tokenizer, tuple, adapt=True)
        assert [variant.words for variant in source.variants] == [("one", "two", "three", ".")]


def test_a_model_of_whole_words_keeps_its_unknown_word():
    translator = small_translator()
    (source,) = read_sources(["one Grosvenor two."], translator.tokenizers.source, tuple, True)
    assert [variant.words for variant in source.variants] == [("one", "Grosvenor", "two", ".")]
    (best,), *_ = translator.translate(["שלום עולם"])
    assert best.text == "שלום עולם"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see www.a.org/b, please.", [("www.a.org/b", "name")]),
        ("a.b@c.org writes", [("a.b@c.org", "name")]),
        ("one <b>two</b>", [("<b>", "symbol"), ("</b>", "symbol")]),
        ("three < two and two > one", []),
        ("one 😀 two 🦊", [("😀", "symbol"), ("🦊", "symbol")]),
        ("one Привет мир two", [("Привет мир", "name")]),
        ("call +33 6 12 34 56", [("+33 6 12 34 56", "number")]),
        ("in 12 days", []),
    ],
)
def test_spans_are_what_a_model_cannot_translate(text, expected):
    known = "one two three four call in days please see writes < > , . 1 2 3 4 5 6 + : / @ (and),"
    tokenizer = Tokenizer.train([known] * 9, size=120)
    split = split_words(text)
    spans = find_spans(split, tokenizer.encode(text), tokenizer)
    found = [
        ("".join(split_words(text).words[span.start : span.stop]), span.kind) for span in spans
    ]
    assert found == [(words.replace(" ", ""), kind) for words, kind in expected]


FRAGMENTS = """
    I like CATS cats Tom . ? ! ... ' - — ( ) « » “ ” é ß ǅ ﬁ 😀 👩‍👩‍👧 Łódź Kowalczykowski
    Привет 日本語 。 <b> </b> <i class='x'> </i> <br/> </ &amp; < > https://a.b/c me@x.org
    @user #tag <unk> ▁ ￭ ⇧ \ue000
    12 1234567 1,234.56 ²³²³² +33 6 12 34 56 78 １２３４ ١٢٣٤٥
"""


def test_any_mixture_of_fragments_keeps_words_and_weights_in_step(bundled):
    fragments = FRAGMENTS.split()
    draw = np.random.default_rng(0)
    texts = [
        ("" if draw.random() < 0.4 else " ").join(draw.choice(fragments, draw.integers(1, 8)))
        for _ in range(200)
    ]
    for text, found in zip(texts, bundled.translate(texts, search=GREEDY), strict=True):
        (best,) = found
        assert best.text, text
        assert best.source_words == split_words(text).words
        assert best.weights.shape == (len(best.target_words), len(best.source_words))
        assert (best.weights.sum(1) < 1 + 1e-5).all()
