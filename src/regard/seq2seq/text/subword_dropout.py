"""Subword dropout: every epoch cuts words into different pieces.

BPE-dropout (Provilkov et al. 2020, https://arxiv.org/abs/1910.13267, section 3.2): while a word is
put together from its characters, each possible merge is skipped with a probability, which gives
another segmentation of the same word. For training only; elsewhere, text has the tokenizer's own
pieces. The dropout of the package `tokenizers` cannot be seeded, but a resumed run must read the
batches that it would have read without interruption. (Nor are its probabilities the paper's:
outdated entries of its queue give a skipped merge another chance.)
"""

import random
from collections.abc import Callable, Iterable
from itertools import chain, pairwise

import numpy as np

from regard.seq2seq.corpus.pair import Pair
from regard.seq2seq.text.marks import CAPITAL, START, mark
from regard.seq2seq.text.tokenizer import Tokenizer
from regard.seq2seq.text.tokenizer_pair import TokenizerPair
from regard.seq2seq.text.vocabulary import UNK
from regard.seq2seq.text.words import split_words

Pieces = tuple[int, ...]
Draw = Callable[[], float]  # a random number in [0, 1)


class SubwordDropout:
    """The pairs of a corpus as token ids: the same words in every epoch, in different pieces.

    An epoch's pieces depend only on seed and epoch, so that any epoch can be repeated.

    Example:
        >>> from regard.seq2seq.corpus import Pair
        >>> from regard.seq2seq.text.subword_dropout import SubwordDropout
        >>> from regard.seq2seq.text.tokenizer_pair import TokenizerPair
        >>> pairs = [Pair("lower and slower", "plus bas et plus lent")] * 9
        >>> tokenizers = TokenizerPair.train(pairs, size=100)
        >>> epochs = SubwordDropout(tokenizers, pairs, 0.1, seed=3)
        >>> for epoch in (0, 1, 0):
        ...     ids, _ = epochs(epoch)[0]
        ...     print(*(tokenizers.source.pieces[token] for token in ids))
        ▁ lower ▁and ▁slower
        ▁lower ▁and ▁ s l o wer
        ▁ lower ▁and ▁slower

    Args:
        tokenizers: of byte-pair encoding.
        pairs: the training pairs.
        probability: of skipping a merge, in [0, 1]; at 0 the pieces are the tokenizers' own, at 1
            single characters. The paper has 0.1.
        seed: of the random numbers.

    Raises:
        ValueError: the tokenizers have whole words, or the probability is not in [0, 1].
    """

    def __init__(
        self, tokenizers: TokenizerPair, pairs: Iterable[Pair], probability: float, *, seed: int
    ) -> None:
        if not 0.0 <= probability <= 1.0:
            raise ValueError(f"the probability must be in [0, 1]. Got {probability}.")
        pairs = list(pairs)
        self.probability, self.seed = probability, seed
        self._source = _Side(tokenizers.source, (pair.source for pair in pairs))
        self._target = _Side(tokenizers.target, (pair.target for pair in pairs))

    def __call__(self, epoch: int) -> list[tuple[list[int], list[int]]]:
        """(source ids, target ids) of every pair, as `Batches` takes them."""
        lines = [
            side.lines(self.probability, f"subword dropout {self.seed} {epoch} {name}")
            for name, side in (("source", self._source), ("target", self._target))
        ]
        return list(zip(*lines, strict=True))


class Merges:
    """A tokenizer's merges, in their order or with some of them skipped.

    Example:
        >>> import random
        >>> from regard.seq2seq.text.subword_dropout import Merges
        >>> from regard.seq2seq.text.tokenizer import Tokenizer
        >>> tokenizer = Tokenizer.train(["low lower lowest"] * 9, size=40)
        >>> merges = Merges(tokenizer)
        >>> steps = merges.steps("lower")
        >>> for pieces in steps:
        ...     print(*(tokenizer.pieces[token] for token in pieces))
        ▁ l o w e r
        ▁ lo w e r
        ▁lo w e r
        ▁low e r
        ▁lowe r
        ▁lower
        >>> found = merges.drawn(steps, 0.5, random.Random(0).random)
        >>> print(*(tokenizer.pieces[token] for token in found))
        ▁lo w e r

    Raises:
        ValueError: the tokenizer has whole words.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.kind != "bpe":
            raise ValueError(
                "subword dropout skips merges of byte-pair encoding. Got a tokenizer of kind "
                f'{tokenizer.kind!r}, which has none. Fix: kind "bpe", or no subword dropout.'
            )
        self._ids = {piece: token for token, piece in enumerate(tokenizer.pieces)}
        # (left, right): (its place in the order, what they become)
        self._merges = {
            (self._ids[left], self._ids[right]): (order, self._ids[left + right])
            for order, (left, right) in enumerate(tokenizer.merges)
        }

    def steps(self, entry: str) -> list[Pieces]:
        """An entry after each merge: from single characters to the tokenizer's own pieces.

        Args:
            entry: a word as `mark` writes it, or ⇧.
        """
        steps = [self._characters(entry if entry == CAPITAL else START + entry)]
        while possible := self._possible(steps[-1]):
            steps.append(_merged(steps[-1], *possible[0]))
        return steps

    def drawn(self, steps: list[Pieces], probability: float, draw: Draw) -> Pieces:
        """The pieces of an entry, each merge skipped with a probability.

        In every step, each possible merge is skipped or not, and the first that is not skipped is
        made; where all are skipped, the word is done.

        Args:
            steps: of the entry.
            probability: of skipping a merge.
            draw: gives a random number.
        """
        # Until a merge is skipped, the known steps are followed: for half of the words, to the end.
        step, last = 0, len(steps) - 1
        while step < last and draw() >= probability:
            step += 1
        pieces = steps[step]
        if step == last:
            return pieces
        left = self._possible(pieces)[1:]  # the first one is what was skipped
        while (made := next((m for m in left if draw() >= probability), None)) is not None:
            pieces = _merged(pieces, *made)
            left = self._possible(pieces)
        return pieces

    def _characters(self, text: str) -> Pieces:
        pieces: list[int] = []
        for character in text:
            token = self._ids.get(character, UNK)
            if token != UNK or pieces[-1:] != [UNK]:  # unknown ones in a row are one <unk>
                pieces.append(token)
        return tuple(pieces)

    def _possible(self, pieces: Pieces) -> list[tuple[int, int, int]]:
        """(order, place, merged) of every merge of two neighbors, the first in order first."""
        merges = self._merges
        return sorted(
            (merges[pair][0], place, merges[pair][1])
            for place, pair in enumerate(pairwise(pieces))
            if pair in merges
        )


def _merged(pieces: Pieces, _: int, place: int, token: int) -> Pieces:
    return (*pieces[:place], token, *pieces[place + 2 :])


class _Side:
    """The words of one side of a corpus, each kept once, with its merge steps."""

    def __init__(self, tokenizer: Tokenizer, texts: Iterable[str]) -> None:
        self._merges = Merges(tokenizer)
        numbers: dict[str, int] = {}
        words: list[int] = []
        ends: list[int] = []
        for text in texts:
            marked = mark(split_words(text), tokenizer.case, tokenizer.strip_accents)
            words += [numbers.setdefault(e, len(numbers)) for e in chain.from_iterable(marked)]
            ends.append(len(words))
        self._words = np.array(words, np.int64)  # the index of each word of the text
        self._ends = ends  # of the lines, in that array
        self._steps = [self._merges.steps(entry) for entry in numbers]
        # The number of segmentations made in an epoch, of which each occurrence draws one: as many
        # as occurrences for a rare word, far fewer for a common one, since merging is slow.
        counts = np.bincount(self._words, minlength=len(numbers))
        self._variety = np.minimum(counts, np.ceil(2.0 * np.sqrt(counts)).astype(np.int64))

    def lines(self, probability: float, seed: str) -> list[list[int]]:
        """The token ids of every line, segmented by this seed."""
        # Python's own generator is the faster one for a number at a time.
        one = random.Random(seed)
        many = np.random.default_rng(one.getrandbits(64))
        drawn = [
            self._merges.drawn(steps, probability, one.random)
            for steps, variety in zip(self._steps, self._variety.tolist(), strict=True)
            for _ in range(variety)
        ]
        first = np.cumsum(self._variety) - self._variety
        offset = many.random(len(self._words)) * self._variety[self._words]
        chosen = (first[self._words] + offset.astype(np.int64)).tolist()
        pieces = [drawn[i] for i in chosen]
        starts = [0, *self._ends[:-1]]
        return [
            list(chain.from_iterable(pieces[start:end]))
            for start, end in zip(starts, self._ends, strict=True)
        ]
