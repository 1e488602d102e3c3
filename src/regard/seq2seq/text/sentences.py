"""Where a text that is too long may be cut: at sentence ends, if it has any.

Nothing is ever left out. `token_ranges` finds the places where a text is too long for the model;
`text_pieces` cuts a text that is too long for the memory. Translating the pieces and joining the
translations is up to the callers.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from regard.seq2seq.text.words import Words, normalize, split_words

PIECE_WORDS = 256  # of a piece, at most; a longer sentence is cut again by its tokens
_UNIT = 32  # characters of a word that count as one word
_BLOCK = 1 << 16  # characters of a text that are examined together

_ENDS = frozenset(".!?…؟۔।。！？｡")
_WIDE_ENDS = frozenset("。！？｡")  # of scripts that have no spaces
_CLAUSE_ENDS = frozenset(",;:،؛、，；：") | {"-", "--", "–", "—"}
_CLOSING = frozenset("\"'”’)]»›」』）")
_ALWAYS_CLOSING = frozenset("”)]»›」』）")

Range = tuple[int, int]


def text_pieces(text: str) -> Iterator[str]:
    """Cuts a text of any length into pieces of bounded length, in bounded memory.

    It is cut at every sentence end; a sentence of more than 256 words at clause marks, failing that
    at spaces, between words, and at last within a word of thousands of letters.

    Example:
        >>> list(text_pieces('He said: "Go." She went.'))
        ['He said: "Go."', 'She went.']
        >>> [len(piece) for piece in text_pieces("x" * 10_000)]
        [5024, 4976]

    Args:
        text: any string.

    Yields:
        The pieces that have words, as `split_words` normalizes them.
    """
    text, start = normalize(text), 0
    while start < len(text):
        stop = start + _BLOCK
        if stop < len(text):
            ends = [text.rfind(end, start, stop) + len(end) for end in (". ", "! ", "? ", "。")]
            spaces = (max(ends), text.rfind(" ", start, stop) + 1, stop)
            stop = next(place for place in spaces if place > start)
        split = split_words(text[start:stop])
        start = stop
        units: list[str] = []
        glued: list[bool] = []
        word_of_unit: list[int] = []
        for number, word in enumerate(split.words):
            parts = [word[at : at + _UNIT] for at in range(0, len(word), _UNIT)]
            units += parts
            glued += [split.glued[number], *[True] * (len(parts) - 1)]
            word_of_unit += [number] * len(parts)
        for first, last in token_ranges(split, word_of_unit, PIECE_WORDS, sentences=True):
            yield Words(tuple(units[first:last]), tuple(glued[first:last])).text


def token_ranges(
    split: Words, word_of_token: Sequence[int], limit: int, *, sentences: bool = False
) -> list[Range]:
    """Cuts a text into parts of at most `limit` tokens; one that fits is one part.

    A text that does not fit is cut at every sentence end, since a model translates sentences. A
    sentence that does not fit is cut at clause marks, failing that at spaces, between any two
    words, and at last between any two tokens, into parts of about one length.

    Example:
        >>> from regard.seq2seq.text.words import split_words
        >>> split = split_words('He said: "Go." She went, and he, who is slow, stayed.')
        >>> ranges = token_ranges(split, range(len(split)), limit=8)
        >>> [" ".join(split.words[start:stop]) for start, stop in ranges]
        ['He said : " Go . "', 'She went , and he ,', 'who is slow , stayed .']

    Args:
        split: the words.
        word_of_token: for each token, its word, as `Encoded.word_of_token`.
        limit: at least 1.
        sentences: cut at every sentence end, even where the text fits.

    Returns:
        [start, stop) of each part, in tokens; together they are the whole text.
    """
    if not word_of_token:
        return []
    parts = [(0, len(word_of_token))]
    for may_cut in (_after_sentence, _after_clause, _at_space, _at_word, _anywhere):
        pack = may_cut is not _after_sentence
        room = 1 if sentences and not pack else limit
        parts = [
            smaller
            for part in parts
            for smaller in _cut(part, split, word_of_token, room, may_cut, pack)
        ]
    return parts


def _cut(
    part: Range,
    split: Words,
    word_of_token: Sequence[int],
    limit: int,
    may_cut: Callable[[Words, Sequence[int], int], bool],
    pack: bool,
) -> list[Range]:
    start, stop = part
    if stop - start <= limit:
        return [part]
    places = [at for at in range(start + 1, stop) if may_cut(split, word_of_token, at)]
    if not pack:
        return list(pairwise([start, *places, stop]))
    # Parts of about one length: 100 tokens where 90 fit are 50 and 50, not 90 and 10.
    count = -(-(stop - start) // limit)
    room = -(-(stop - start) // count)
    chosen = [start]
    for at, following in pairwise([*places, stop]):
        if following - chosen[-1] > room:
            chosen.append(at)
    return list(pairwise([*chosen, stop]))


def _after_sentence(split: Words, word_of_token: Sequence[int], at: int) -> bool:
    if not _starts_word(word_of_token, at):
        return False
    word = word_of_token[at]
    if _closes(split, word):
        return False  # it belongs to the sentence that it closes
    before = word - 1
    while before > 0 and _closes(split, before):
        before -= 1
    end = split.words[before]
    spaced = not split.glued[word] or set(end) <= _WIDE_ENDS
    return bool(end) and set(end) <= _ENDS and spaced


def _after_clause(split: Words, word_of_token: Sequence[int], at: int) -> bool:
    if not _starts_word(word_of_token, at):
        return False
    word = word_of_token[at]
    mark = split.words[word - 1]
    wide = mark in _CLAUSE_ENDS and not mark.isascii()
    return mark in _CLAUSE_ENDS and (wide or not split.glued[word])


def _at_space(split: Words, word_of_token: Sequence[int], at: int) -> bool:
    return _starts_word(word_of_token, at) and not split.glued[word_of_token[at]]


def _at_word(split: Words, word_of_token: Sequence[int], at: int) -> bool:
    return _starts_word(word_of_token, at)


def _anywhere(split: Words, word_of_token: Sequence[int], at: int) -> bool:
    return True


def _starts_word(word_of_token: Sequence[int], at: int) -> bool:
    return word_of_token[at] != word_of_token[at - 1]


def _closes(split: Words, word: int) -> bool:
    """Whether a word is a closing quotation mark or bracket; `"` is, where it has no space."""
    mark = split.words[word]
    return mark in _ALWAYS_CLOSING or (mark in _CLOSING and split.glued[word])
