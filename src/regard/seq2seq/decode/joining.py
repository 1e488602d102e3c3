"""Joins the hypotheses for the parts of a text into translations of the whole."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from regard.seq2seq.alignment import word_weights
from regard.seq2seq.decode.hypotheses import Hypotheses, by_length
from regard.seq2seq.text.tokenizer import Encoded, Tokenizer
from regard.seq2seq.text.words import Words


@dataclass(frozen=True)
class Part:
    """The tokens [start, stop) of the variant with some number."""

    variant: int
    start: int
    stop: int


@dataclass(frozen=True)
class Written:
    """One hypothesis of a part.

    Attributes:
        tokens: [T], <eos> included.
        attention: [T, S], the weights that each token was written with.
        score: what it is ranked by.
        log_prob: log p(tokens | part).
    """

    tokens: np.ndarray
    attention: np.ndarray
    score: float
    log_prob: float


@dataclass(frozen=True)
class Draft:
    """A translation of one variant of a text.

    Attributes:
        split: its words.
        weights: [target words, source words of the variant].
        score, log_prob: of all its parts together.
    """

    split: Words
    weights: np.ndarray
    score: float
    log_prob: float


def read_out(found: Hypotheses) -> Iterator[list[Written]]:
    """The hypotheses of each row of a batch, the best first; waits for the device."""
    best = jax.tree.map(np.asarray, found)
    for row, lens in enumerate(best.lens):
        yield [
            Written(
                best.tokens[row, k, :length],
                best.attention[row, k, :length],
                float(best.scores[row, k]),
                float(best.log_probs[row, k]),
            )
            for k, length in enumerate(lens)
            if length  # otherwise fewer than n_best were found
        ]


def join_parts(
    sources: Sequence[Encoded],
    parts: Sequence[Part],
    found: Iterable[tuple[int, list[Written]]],
    target: Tokenizer,
    length_penalty: float,
    replace_unknown: bool,
) -> list[list[Draft]]:
    """The translations of every variant; each is joined as soon as its last part is found.

    Args:
        sources: the variants.
        parts: of all of them, those of one in order.
        found: the number of each part and its hypotheses, in any order; the device may still be
            searching for the later ones.
        target, length_penalty, replace_unknown: as for `joined`.
    """
    of_variant: list[list[int]] = [[] for _ in sources]
    for number, part in enumerate(parts):
        of_variant[part.variant].append(number)
    missing = [len(numbers) for numbers in of_variant]
    written: dict[int, list[Written]] = {}
    drafts: list[list[Draft]] = [[] for _ in sources]
    for number, hypotheses in found:
        written[number], variant = hypotheses, parts[number].variant
        missing[variant] -= 1
        if not missing[variant]:
            whole = [(parts[i], written.pop(i)) for i in of_variant[variant]]
            drafts[variant] = joined(
                sources[variant], whole, target, length_penalty, replace_unknown
            )
    return drafts


def joined(
    source: Encoded,
    found: Sequence[tuple[Part, Sequence[Written]]],
    target: Tokenizer,
    length_penalty: float,
    replace_unknown: bool,
) -> list[Draft]:
    """The translations of one variant, the best first.

    The k-th joins the k-th hypothesis of each part. Its log-probability is the sum of theirs, and
    its score follows from that sum and the total length.

    Args:
        source: the variant.
        found: its parts in order, each with its hypotheses, the best first.
        target: decodes the tokens.
        length_penalty: as in `SearchOptions`.
        replace_unknown: as in `Translator.translate`.
    """
    drafts = []
    for k in range(max((len(written) for _, written in found), default=0)):
        chosen = [(part, written[min(k, len(written) - 1)]) for part, written in found]
        read = [_read(source, *one, target, replace_unknown) for one in chosen]
        words = tuple(word for one in read for word in one.split.words)
        # A space between two parts; the first word of a text has none before it.
        glued = [glued for one in read for glued in (False, *one.split.glued[1:])][: len(words)]
        # With many parts this is mostly zeros, which take no memory until they are written to.
        weights = np.zeros((len(words), len(source.words)))
        row = 0
        for one in read:
            T, S = one.weights.shape
            weights[row : row + T, one.column : one.column + S] = one.weights
            row += T
        log_prob = sum(written.log_prob for _, written in chosen)
        score = chosen[0][1].score
        if len(chosen) > 1:
            tokens = sum(len(written.tokens) for _, written in chosen)
            score = by_length(log_prob, tokens, length_penalty)
        drafts.append(Draft(Words(words, (True, *glued[1:])), weights, score, log_prob))
    return sorted(drafts, key=lambda one: -one.score)


def padded(weights: np.ndarray, T: int, S: int) -> np.ndarray:
    """Pads with zeros for the last words where these have no tokens.

    Example:
        >>> import numpy as np
        >>> padded(np.ones((1, 1)), 1, 2)
        array([[1., 0.]])
    """
    if weights.shape == (T, S):  # nearly always; np.pad would be slow
        return weights
    return np.pad(weights, [(0, T - weights.shape[0]), (0, S - weights.shape[1])])


@dataclass(frozen=True)
class _Read:
    """A part's translation; its weights are those of the source words from `column` on."""

    split: Words
    weights: np.ndarray
    column: int


def _read(
    source: Encoded, part: Part, written: Written, target: Tokenizer, replace_unknown: bool
) -> _Read:
    decoded = target.decode(written.tokens)
    of_token = source.word_of_token[part.start : part.stop]
    column = of_token[0]
    own = [word - column for word in of_token]
    weights = word_weights(written.attention, own, decoded.word_of_token)
    weights = padded(weights, len(decoded.words), weights.shape[1])
    split = decoded.split
    if replace_unknown:
        looked = {j: int(weights[j].argmax()) for j in decoded.unknown if weights[j].any()}
        split = split.with_words({j: source.words[column + i] for j, i in looked.items()})
    there = [j for j, word in enumerate(split.words) if word]  # a mark may stand alone
    kept = Words(tuple(split.words[j] for j in there), tuple(split.glued[j] for j in there))
    return _Read(kept, weights[there], column)
