"""Text to token ids and back: whole words, or pieces of words by byte-pair encoding.

A tokenizer keeps the words beside the ids, so that attention and alignments can be reported in
words. What a word is, and the normalization, is decided in `words.py`; learning a vocabulary is
`vocabulary.py`; a model's two tokenizers and their file are `tokenizer_pair.py`.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from regard.seq2seq.text import vocabulary
from regard.seq2seq.text.marks import CAPITAL, JOINER, START, Case, mark, unmark
from regard.seq2seq.text.vocabulary import BOS, EOS, PAD, SPECIAL, UNK
from regard.seq2seq.text.words import Words, split_words

Kind = Literal["bpe", "word"]

__all__ = ["BOS", "EOS", "PAD", "SPECIAL", "UNK", "Decoded", "Encoded", "Kind", "Tokenizer"]


@dataclass(frozen=True)
class Encoded:
    """A text as the model reads it, and the words that it consists of.

    Attributes:
        ids: the token ids; no <bos>, no <eos>.
        words: the words of the text, unchanged.
        word_of_token: for each token, the position of its word in `words`.
    """

    ids: tuple[int, ...]
    words: tuple[str, ...]
    word_of_token: tuple[int, ...]


@dataclass(frozen=True)
class Decoded:
    """What the model wrote, as words.

    Attributes:
        split: the words, and where there are no spaces.
        word_of_token: for each token in front of <eos>, the position of its word; -1 for one that
            writes nothing (<pad>, <bos>).
        unknown: the positions of the words that have <unk> in them.
    """

    split: Words
    word_of_token: tuple[int, ...]
    unknown: tuple[int, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """The words."""
        return self.split.words

    @property
    def text(self) -> str:
        """The words as one line of text."""
        return self.split.text


@dataclass(frozen=True)
class Tokenizer:
    """One vocabulary: encodes text as token ids, and decodes token ids.

    `decode(encode(text).ids).text` is `normalize(text)` where the vocabulary has all its words or
    pieces; others are <unk>. Spaces are restored exactly, before a French question mark as well as
    after an apostrophe, because the vocabulary marks where there is none.

    Example:
        >>> tokenizer = Tokenizer.train(["L'ami dort.", "Dort-il ?"], kind="word")
        >>> encoded = tokenizer.encode("L'ami dort-il ?")
        >>> encoded.words
        ("L'", 'ami', 'dort', '-il', '?')
        >>> tokenizer.decode(encoded.ids).text
        "L'ami dort-il ?"
        >>> tokenizer.decode([*encoded.ids[:2], 1, 3, 0, 0]).text  # <unk>, <eos>, <pad>
        "L'ami <unk>"

    Attributes:
        kind: "bpe" or "word".
        pieces: the vocabulary; a token's id is its index. The first four are <pad>, <unk>,
            <bos> and <eos>.
        merges: for "bpe", which two pieces become one, in order.
        case: "keep", as it is; "mark", a capital letter is a token of its own, so that `Le` and
            `le` are one entry; "lower", all is lower case.
        strip_accents: accents are removed.
    """

    kind: Kind
    pieces: tuple[str, ...]
    merges: tuple[tuple[str, str], ...] = ()
    case: Case = "keep"
    strip_accents: bool = False

    def __post_init__(self) -> None:
        vocabulary.check(self.kind, self.case, self.pieces, self.merges)

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        *,
        kind: Kind = "bpe",
        size: int = 8000,
        min_count: int = 1,
        case: Case = "keep",
        strip_accents: bool = False,
    ) -> "Tokenizer":
        """Learns a vocabulary.

        Args:
            texts: the training text; for a joint vocabulary, both sides of it.
            kind: "bpe", pieces of words, which needs the package tokenizers; "word", whole words.
            size: the most entries there may be, the four special ones among them.
            min_count: a word (for "bpe", a merge) that is rarer is left out.
            case, strip_accents: as for the class.

        Raises:
            ValueError: there is no text, or no room.
            ImportError: tokenizers is not installed; the message has the pip command.
        """
        marked = (mark(split_words(text), case, strip_accents) for text in texts)
        lines = ([word for words in line for word in words if word != CAPITAL] for line in marked)
        learn = vocabulary.learn_merges if kind == "bpe" else vocabulary.learn_words
        extra = (CAPITAL,) if case == "mark" else ()
        pieces, merges = learn(lines, size=size, min_count=min_count, extra=extra)
        return cls(kind, pieces, merges, case, strip_accents)

    @property
    def size(self) -> int:
        """How many entries the vocabulary has."""
        return len(self.pieces)

    def encode(self, text: str | Sequence[str]) -> Encoded:
        """A text as token ids, with the word that each comes from.

        Example:
            >>> tokenizer = Tokenizer.train(["it isn't low, it's lower"] * 9, size=40)
            >>> encoded = tokenizer.encode("isn't lowest")
            >>> encoded.words, encoded.word_of_token
            (('is', "n't", 'lowest'), (0, 1, 2, 2, 2, 2))
            >>> [tokenizer.pieces[token] for token in encoded.ids]
            ['▁is', "▁￭n't", '▁low', 'e', 's', 't']

        Args:
            text: a text, or words that are split already (of a file with gold alignments, say):
                then these are the words, with spaces between them.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Iterable[str | Words | Sequence[str]]) -> list[Encoded]:
        """`encode` for many texts, or what `split_words` made of them, faster."""
        splits = [_split(text) for text in texts]
        marked = [mark(split, self.case, self.strip_accents) for split, _, _ in splits]
        entries = [[entry for word in line for entry in word] for line in marked]
        word_of_entry = [[i for i, word in enumerate(line) for _ in word] for line in marked]
        if self.kind == "word":
            found = [[(self._id(entry), i) for i, entry in enumerate(line)] for line in entries]
        else:
            found = self._pieces_of(entries)
        return [
            Encoded(
                tuple(token for token, _ in line),
                words,
                tuple(given[owner[i]] for _, i in line),
            )
            for line, owner, (_, words, given) in zip(found, word_of_entry, splits, strict=True)
        ]

    def decode(self, ids: Iterable[int]) -> Decoded:
        """Token ids as text, up to the first <eos>.

        Raises:
            ValueError: an id that the vocabulary does not have.
        """
        words: list[str] = []
        word_of_token: list[int] = []
        unknown: set[int] = set()
        for token in ids:
            token = int(token)
            if token == EOS:
                break
            if not 0 <= token < self.size:
                raise ValueError(
                    f"the vocabulary has {self.size} entries, 0 to {self.size - 1}. Got {token}."
                )
            if token in (PAD, BOS):
                word_of_token.append(-1)
                continue
            piece = self.pieces[token]
            starts = self.kind == "word" or piece.startswith(START) or piece == CAPITAL
            if not words or (starts and words[-1] != CAPITAL):
                words.append("")
            if token == UNK:
                unknown.add(len(words) - 1)
            words[-1] += piece.removeprefix(START)
            word_of_token.append(len(words) - 1)
        return Decoded(unmark(words), tuple(word_of_token), tuple(sorted(unknown)))

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {piece: i for i, piece in enumerate(self.pieces)}

    def _id(self, word: str) -> int:
        """A word's id; one that the vocabulary has only with other joiners is found too."""
        bare = word.strip(JOINER)
        for form in (word, bare, JOINER + bare, bare + JOINER):
            if form in self._ids:
                return self._ids[form]
        return UNK

    @functools.cached_property
    def _bpe(self) -> Any:
        tokenizers = vocabulary.tokenizers_package()
        model = tokenizers.models.BPE(
            vocab=self._ids, merges=list(self.merges), unk_token=SPECIAL[UNK], fuse_unk=True
        )
        return tokenizers.Tokenizer(model)

    def _pieces_of(self, entries: list[list[str]]) -> list[list[tuple[int, int]]]:
        """For each line, its tokens, each with the position of the entry that it is a piece of."""
        lines = [[e if e == CAPITAL else START + e for e in line] for line in entries]
        found = self._bpe.encode_batch(lines, is_pretokenized=True, add_special_tokens=False)
        return [list(zip(line.ids, line.word_ids, strict=True)) for line in found]


def _split(text: str | Words | Sequence[str]) -> tuple[Words, tuple[str, ...], tuple[int, ...]]:
    """The words to look up, the words to report, and for each of the former its index there."""
    if isinstance(text, str | Words):
        split = split_words(text) if isinstance(text, str) else text
        return split, split.words, tuple(range(len(split)))
    words: list[str] = []
    glued: list[bool] = []
    given: list[int] = []
    for i, word in enumerate(text):
        inner = split_words(word)
        words += inner.words or ("",)
        glued += [False, *inner.glued[1:]] if len(inner) else [False]
        given += [i] * max(len(inner), 1)
    return Words(tuple(words), tuple(glued)), tuple(text), tuple(given)
