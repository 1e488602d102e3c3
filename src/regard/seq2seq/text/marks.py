"""Words as a vocabulary writes them: with marks for a missing space and for a capital letter.

The marks make decoding exact, and keep the vocabulary small: a noun is one entry, whatever its
neighbors and its position in the sentence.
"""

from collections.abc import Sequence
from typing import Literal

from regard.seq2seq.text.words import Words, normalize

# In a text, these characters are replaced by similar ones.
START = "\u2581"  # ▁ begins a word, so that pieces can be put together again
JOINER = "\uffed"  # ￭ at an end of a word: no space on that side
CAPITAL = "\u21e7"  # ⇧ the next word has a capital letter
_IN_TEXT = str.maketrans({START: "_", JOINER: "\u25a0", CAPITAL: "\u2191"})

Case = Literal["keep", "mark", "lower"]


def mark(split: Words, case: Case = "keep", strip_accents: bool = False) -> list[list[str]]:
    """Each word as what the vocabulary looks up: one entry, or ⇧ and one entry.

    The joiner is attached to punctuation and to clitics, which need a neighbor anyway.

    Example:
        >>> from regard.seq2seq.text.marks import mark
        >>> from regard.seq2seq.text.words import split_words
        >>> mark(split_words("(L'eau, dit-elle.)"))
        [['(￭'], ["L'￭"], ['eau'], ['￭,'], ['dit'], ['￭-elle'], ['￭.'], ['￭)']]
        >>> mark(split_words("L'Italie"), "mark")
        [['⇧', "l'￭"], ['⇧', 'italie']]

    Args:
        split: the words.
        case: "keep", `Le` and `le` are two entries; "mark", `Le` is `⇧ le`, while words with other
            capitals (`USA`) stay as they are; "lower", all is lower case.
        strip_accents: accents are removed.
    """
    marked: list[list[str]] = []
    for i, text in enumerate(split.words):
        word = text.translate(_IN_TEXT)
        if case == "lower" or strip_accents:
            word = normalize(word, lowercase=case == "lower", strip_accents=strip_accents)
        capital = case == "mark" and is_capitalized(word)
        if capital:
            word = word[0].lower() + word[1:]
        if i > 0 and split.glued[i]:
            if not text[:1].isalnum() or text.lower() == "n't":
                word = JOINER + word
            else:
                marked[-1][-1] += JOINER
        marked.append([CAPITAL, word] if capital else [word])
    return marked


def unmark(marked: Sequence[str]) -> Words:
    """The inverse of `mark`; ⇧ and the entry behind it are one string.

    A model may leave a mark without a word: that is an empty word.

    Example:
        >>> from regard.seq2seq.text.marks import unmark
        >>> unmark(["(￭", "⇧l'￭", "eau", "￭)"]).text
        "(L'eau)"
    """
    words: list[str] = []
    glued: list[bool] = []
    join = True
    for word in marked:
        capital = word.startswith(CAPITAL)
        word = word.lstrip(CAPITAL)
        glued.append(join or word.startswith(JOINER))
        join = word.endswith(JOINER)
        word = word.strip(JOINER)
        words.append(word[:1].upper() + word[1:] if capital else word)
    return Words(tuple(words), tuple(glued))


def is_capitalized(word: str) -> bool:
    """Whether a word has its only capital letter first, and `unmark` can restore it exactly.

    Example:
        >>> [is_capitalized(word) for word in ("Le", "I", "le", "USA", "McGill", "ǅ", "42")]
        [True, True, False, False, False, False, False]
    """
    small = word[:1].lower() + word[1:]
    reversible = small[:1].upper() + small[1:] == word
    return small != word and reversible and len(small) == len(word) and small == small.lower()
