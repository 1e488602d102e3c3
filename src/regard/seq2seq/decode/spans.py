"""The parts of a text that a model cannot translate: markup, addresses, unknown letters.

They are found here. How a text is put to the model without them, and how they come back into the
translation, is in input_variants.py.
"""

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from regard.seq2seq.text.marks import CAPITAL
from regard.seq2seq.text.tokenizer import Encoded, Tokenizer
from regard.seq2seq.text.vocabulary import SPECIAL, UNK
from regard.seq2seq.text.words import Words

Kind = Literal["symbol", "name", "number"]

SENTENCE_ENDS = frozenset(".!?…。！？")
_NO_END = r"[^\s.,;:!?)\]}'\"»]"  # an address does not end with the sentence's punctuation
_MARKUP = re.compile(r"</?[A-Za-z][^<>]*>|<!--.*?-->|&(?:#\d+|#x[\da-fA-F]+|[A-Za-z]+\d*);")
_ADDRESS = re.compile(
    rf"(?:\w+://|www\.)\S*{_NO_END}"  # a URL
    r"|[\w.+-]+@\w[\w-]*(?:\.\w[\w-]*)+"  # an e-mail address
    r"|(?<!\S)[@#]\w*[^\W\d]\w*"  # a user or a topic
)
_LONG_NUMBER = re.compile(r"\+?\d(?:[ ().-]{0,2}\d){6,}")  # of a telephone, say
# Quotation marks and dashes that a vocabulary may lack, and what is read in their place.
_ALIKE = str.maketrans(
    {**dict.fromkeys("“”„‟«»", '"'), **dict.fromkeys("‘‚‛", "'"), **dict.fromkeys("‐‑‒–—―", "-")}
)


@dataclass(frozen=True)
class Span:
    """The words [start, stop) of a text, which are copied into the translation.

    Attributes:
        kind: "symbol" has no place in a sentence's grammar (a tag, an emoji); "name" stands where
            a name could (an address, a word of another script); "number" is a long number, which
            a model reads digit by digit and may get wrong.
    """

    start: int
    stop: int
    kind: Kind


def readable_words(split: Words, tokenizer: Tokenizer) -> list[str]:
    """Each word, or a compatible form of it where the vocabulary has only that one.

    Example:
        >>> from regard.seq2seq.decode.spans import readable_words
        >>> from regard.seq2seq.text.tokenizer import Tokenizer
        >>> from regard.seq2seq.text.words import split_words
        >>> tokenizer = Tokenizer.train(['a "find" in here'] * 9, size=40)
        >>> readable_words(split_words("“Ａ” ﬁnd ž"), tokenizer)
        ['"', 'a', '"', 'find', 'ž']
    """
    words = []
    for word in split.words:
        plain = unicodedata.normalize("NFKC", word).translate(_ALIKE)
        forms = (word, plain, word.lower(), plain.lower())
        words.append(next((form for form in forms if _known(form, tokenizer)), word))
    return words


def find_spans(split: Words, encoded: Encoded, tokenizer: Tokenizer) -> list[Span]:
    """The spans of a text, in order; they do not overlap.

    Args:
        split: the text.
        encoded: its words, in the form of `readable_words`, as the tokenizer reads them.
        tokenizer: of the source.
    """
    pieces = Counter(encoded.word_of_token)
    pairs = zip(encoded.ids, encoded.word_of_token, strict=True)
    unknown = {word for token, word in pairs if token == UNK}
    kinds = {
        i: kind
        for i, word in enumerate(split.words)
        if (kind := _kind(word, pieces[i], i in unknown, tokenizer)) is not None
    }
    text, stands_alone = split.text, set()
    patterns: tuple[tuple[re.Pattern[str], Kind], ...] = (
        (_LONG_NUMBER, "number"),
        (_ADDRESS, "name"),
        (_MARKUP, "symbol"),
    )
    for pattern, kind in patterns:
        for match in pattern.finditer(text):
            inside = _words_within(split, *match.span())
            kinds.update(dict.fromkeys(inside, kind))
            stands_alone.update(inside[:1])
    spans: list[Span] = []
    for i, kind in sorted(kinds.items()):
        last = spans[-1] if spans else None
        # Unknown words in a row are one name.
        if last and last.stop == i and last.kind == kind and i not in stands_alone:
            spans[-1] = Span(last.start, i + 1, kind)
        else:
            spans.append(Span(i, i + 1, kind))
    return spans


def rare_names(split: Words, spans: Sequence[Span], tokenizer: Tokenizer) -> list[Span]:
    """Words with a capital inside a sentence, in a row, one of which the vocabulary has in three
    pieces or more.
    """
    taken = {i for span in spans for i in range(span.start, span.stop)}
    if split.text.isupper():
        return []
    found: list[Span] = []
    inside, start, rare = False, 0, False  # the names in a row begin at `start`
    for i, word in enumerate((*split.words, ".")):
        is_name = inside and i not in taken and word[:1].isupper() and word[1:].islower()
        if is_name:
            pieces = (tokenizer.pieces[token] for token in tokenizer.encode(word).ids)
            rare = rare or sum(piece != CAPITAL for piece in pieces) > 2
        else:
            found += [Span(start, i, "name")] if rare else []
            start, rare = i + 1, False
        inside = (inside or word[0].isalnum()) and word[-1] not in SENTENCE_ENDS
    return found


def foreign_script(text: str, tokenizer: Tokenizer) -> str:
    """The script of most letters ("Cyrillic"), or "" where the vocabulary has it."""
    counts = Counter(_script(letter) for letter in text if letter.isalpha())
    if not counts:
        return ""
    (script, _), *_ = counts.most_common(1)
    return "" if script in _scripts(tokenizer) else script.capitalize().replace("Cjk", "Chinese")


def _kind(word: str, pieces: int, unknown: bool, tokenizer: Tokenizer) -> Kind | None:
    if sum(map(str.isdecimal, word)) >= 4 and pieces > 2:
        return "number"
    if not unknown:
        return None
    if not any(map(str.isalnum, word)):
        return "symbol"
    if tokenizer.kind == "bpe":
        return "name"
    # A model of whole words has learned from rare words what to do with <unk>.
    known = any(_script(letter) in _scripts(tokenizer) or letter.isdigit() for letter in word)
    return None if known else "name"


def _words_within(split: Words, start: int, stop: int) -> list[int]:
    """The words that share a character with text[start:stop]."""
    found, begin = [], 0
    for i, (word, glued) in enumerate(zip(split.words, split.glued, strict=True)):
        begin += not glued
        if begin < stop and begin + len(word) > start:
            found.append(i)
        begin += len(word)
    return found


def _known(word: str, tokenizer: Tokenizer) -> bool:
    return UNK not in tokenizer.encode(word).ids


def _script(letter: str) -> str:
    return unicodedata.name(letter, "?").split()[0].split("-")[0]


@functools.lru_cache(maxsize=8)
def _scripts(tokenizer: Tokenizer) -> frozenset[str]:
    """The scripts that at least one in 200 entries of a vocabulary is written in."""
    counts = Counter(
        script
        for piece in tokenizer.pieces[len(SPECIAL) :]
        for script in {_script(letter) for letter in piece if letter.isalpha()}
    )
    return frozenset(s for s, count in counts.items() if count * 200 >= sum(counts.values()))
