"""What a word is: splitting loses nothing, and the marks of the vocabulary are undone exactly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.seq2seq.text.marks import CAPITAL, JOINER, START, mark, unmark
from regard.seq2seq.text.words import normalize, split_words

# Letters of several scripts, marks, emoji, and everything that splits or joins words.
CHARACTERS = (
    "aBéœßΣшعहि語 \t\u00a0\u202f\u200d\u200c\ufe0f🇫🇷👨👍🏽''’-.,!?«»()3\0\u00ad\ud800\u0301"
)
TEXT = st.one_of(st.text(), st.text(alphabet=CHARACTERS))


@given(TEXT)
def test_splitting_loses_nothing(text):
    split = split_words(text)
    assert split.text == normalize(text)
    assert len(split.words) == len(split.glued)
    assert all(word and not any(c.isspace() for c in word) for word in split.words)


@given(TEXT)
def test_normalizing_twice_changes_nothing(text):
    once = normalize(text)
    assert normalize(once) == once
    once.encode("utf-8")  # no half surrogates


@given(TEXT, st.sampled_from(["keep", "mark", "lower"]))
def test_marks_are_undone(text, case):
    split = split_words("".join(c for c in text if c not in START + JOINER + CAPITAL))
    marked = mark(split, case)
    back = unmark(["".join(entries) for entries in marked])
    expected = split if case != "lower" else [normalize(w, lowercase=True) for w in split.words]
    assert back == split if case != "lower" else list(back.words) == expected


def test_marks_in_the_text_do_not_confuse():
    split = split_words(f"a{JOINER}b {START}c {CAPITAL}d")
    back = unmark(["".join(entries) for entries in mark(split)])
    assert back.glued == split.glued
    assert back.text == "a■b _c ↑d"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        (" \t\n", []),
        ("\0", []),
        ("I don't, can't and won't.", "I do n't , ca n't and wo n't ."),
        ("It's John's, we'll see.", "It 's John 's , we 'll see ."),
        ("L'homme qu'elle aime", "L' homme qu' elle aime"),
        ("Jusqu’à aujourd’hui", "Jusqu' à aujourd'hui"),
        ("Y a-t-il quelqu'un ?", "Y a -t-il quelqu'un ?"),
        ("Donnez-le-moi !", "Donnez -le -moi !"),
        ("Est-ce qu'il a un rendez-vous ?", "Est -ce qu' il a un rendez-vous ?"),
        ("vingt-et-un, là-bas, peut-être", "vingt-et-un , là-bas , peut-être"),
        ("1,000.50 à 12:30, 3-4", "1,000.50 à 12:30 , 3-4"),
        ("wait... what?!", "wait ... what ? !"),
        ("l' école", "l ' école"),
        ("👨‍👩‍👧👍🏽 🇫🇷🇧🇪 ❤️", "👨‍👩‍👧 👍🏽 🇫🇷 🇧🇪 ❤️"),
        ("שָׁלוֹם, עולם!", "שָׁלוֹם , עולם !"),
        ("हिन्दी में", "हिन्दी में"),
        ("Mr. Smith et M. Roy, le Dr. L.", "Mr. Smith et M. Roy , le Dr. L ."),
        ("aujourd' hui", "aujourd' hui"),
        ("a_b c@d.e", "a_b c @ d . e"),
    ],
)
def test_words(text, words):
    assert list(split_words(text).words) == (words.split() if words else [])


def test_replaced_words_keep_the_spaces():
    split = split_words("Où est l'hôtel, Paul ?")
    assert split.with_words({3: "auberge", 5: "Anne"}).text == "Où est l'auberge, Anne ?"
