"""Texts of a megabyte, whatever is in them, take a time that is linear in their length."""

import random
import re
import time
import unicodedata

import pytest

from regard.seq2seq.text import words
from regard.seq2seq.text.sentences import text_pieces
from regard.seq2seq.text.words import normalize, split_words

# The splitter's rule, written as it was before it was made linear: the shortest head, and a clitic.
CLITIC = re.compile(
    r"(.+?)((?:-t)?-(?:je|tu|ils?|elles?|on|nous|vous|ce|moi|toi|lui|leur|les?|la)|n't"
    r"|'(?:s|re|ve|ll|d|m))",
    re.IGNORECASE,
)


def without_clitics(word):
    tail = []
    while len(word) > 2 and word.lower() != "rendez-vous" and (found := CLITIC.fullmatch(word)):
        word = found[1]
        tail.insert(0, found[2])
    return [word, *tail]


def test_clitics_are_those_of_the_rule():
    draw = random.Random(0)
    fragments = ["-le", "-t-il", "n't", "'s", "'re", "-ce", "donne", "rendez-vous", "Rendez-Vous"]
    fragments += ["-", "'", "a", "é", "-elles", "-t", "-T-ELLES", "İ", "ſ", "-leſ", "d'"]
    for _ in range(20_000):
        word = "".join(draw.choices(fragments, k=draw.randrange(1, 7)))
        assert words._without_clitics(word) == without_clitics(word), word


@pytest.mark.parametrize(
    "part", ["-le", "'s", "n't", "1", "a", "1.", "a-", "l'", "(", "\ufe0f", "\U0001f600\u200d"]
)
def test_a_megabyte_is_split_in_seconds(part):
    text = "x" + part * (1_000_000 // len(part))
    begun = time.process_time()
    split = split_words(text)
    assert time.process_time() - begun < 8  # -le took four hours
    assert split.text == text


def test_a_long_run_of_marks_is_normalized_in_seconds():
    text = "e" + "\u0316\u0301" * 200_000
    begun = time.process_time()
    found = normalize(text)
    assert time.process_time() - begun < 8  # unicodedata.normalize takes two minutes
    assert len(found) in (len(text), len(text) - 1)
    assert normalize(text, strip_accents=True) == "e"


def test_marks_of_ordinary_long_texts_are_composed_as_unicode_says():
    draw = random.Random(0)
    letters = "eaoDu \u0316\u0301\u0327\u0323\u0308"
    for _ in range(200):
        text = "x" + "".join(draw.choices(letters, k=1500)) + "x"
        expected = " ".join(unicodedata.normalize("NFC", text).split())
        assert normalize(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "One. Two, three. " * 9_000,
        "no end of it, " * 9_000,
        "x" * 150_000,
        "word " * 20_000,
        "这是。" * 20_000,
        "a\u0301" * 70_001,
        "." * 70_000 + " ?! " * 9_000,
    ],
    ids=lambda text: text[:12],
)
def test_pieces_are_short_and_nothing_is_left_out(text):
    pieces = list(text_pieces(text))
    assert max(map(len, pieces)) <= 32 * 256 + 256
    assert max(len(split_words(piece)) for piece in pieces) <= 257
    assert "".join("".join(pieces).split()) == "".join(normalize(text).split())


def test_pieces_of_ordinary_text_are_its_sentences():
    text = 'He said: "Go." She went.\u00a0 Why ? Mr. Smith (1.5 m) knows… '
    assert list(text_pieces(text)) == [
        'He said: "Go."',
        "She went.",
        "Why ?",
        "Mr. Smith (1.5 m) knows…",
    ]
    assert list(text_pieces("")) == list(text_pieces("\u200b \n")) == []
