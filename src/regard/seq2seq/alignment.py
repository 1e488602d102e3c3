"""Word alignments: from attention weights, combined from two directions, and as files.

A link is a pair (i, j): word i of the source is translated by word j of the target, both counted
from 0. Scoring links against gold ones is in `metrics.py`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

Link = tuple[int, int]


@dataclass(frozen=True)
class Links:
    """Gold links of one sentence pair.

    Sure links are what everyone would draw; possible ones may be drawn (Och and Ney 2003, 4.1).
    A sure link is also possible.

    Example:
        >>> from regard.seq2seq.alignment import Links
        >>> gold = Links(sure={(0, 0)}, possible={(1, 0)})
        >>> sorted(gold.possible)
        [(0, 0), (1, 0)]
        >>> str(gold)
        '0-0 1p0'
    """

    sure: frozenset[Link]
    possible: frozenset[Link]

    def __init__(self, sure: Iterable[Link], possible: Iterable[Link] = ()) -> None:
        sure = frozenset(sure)
        object.__setattr__(self, "sure", sure)
        object.__setattr__(self, "possible", sure | frozenset(possible))

    def __str__(self) -> str:
        return format_links(self)

    def check_words(self, source_words: int, target_words: int, where: str, fix: str) -> None:
        """Raises ValueError where a link is of a word that the pair does not have.

        Such links belong to other sentences, or count words that were split in another way.

        Args:
            source_words, target_words: how many words the pair has.
            where: file and line of the links.
            fix: what the message advises.
        """
        for i, j in sorted(self.possible):
            if i >= source_words or j >= target_words:
                raise ValueError(
                    f"{where}: each link must be of words of its pair. Got {i}-{j}, source with "
                    f"{source_words} words, target with {target_words}. Fix: {fix}."
                )


def word_weights(
    weights: np.ndarray,
    source_words: Sequence[int],
    target_words: Sequence[int],
    *,
    shift: Literal[0, 1] = 0,
    over_target: Literal["mean", "max"] = "mean",
) -> np.ndarray:
    """Attention between words, from attention between the tokens that the model reads and writes.

    A target word attends to a source word with the *sum* of the weights on its pieces: what falls
    on a word is what falls on any part of it, and a row keeps its total. Where the target word
    itself has several pieces, each is a step of the decoder and has a row of its own; the word's
    row is their mean, or with `over_target="max"` the largest entry of each column.

    What stands behind the words of a sentence, its <eos> and the padding, has no entry in
    `source_words` and `target_words` and is left out; rows are not brought back to a total of 1.

    Example:
        >>> import numpy as np
        >>> weights = np.array([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.0, 0.2, 0.8]])
        >>> word_weights(weights, [0, 0, 1], [0, 1, 1])  # two words of two pieces and one
        array([[0.8, 0.2],
               [0.2, 0.8]])

    Args:
        weights: (T, S), a row for each step of the decoder. The step that writes <eos> may be
            among them.
        source_words: for each source token, which word it is of: `Encoded.word_of_token`.
        target_words: the same for the target.
        shift: which row is that of a target token. 0: the row of the step that *writes* it, as
            in Bahdanau et al., whose query is the state before the word. 1: the row of the step
            that *reads* it, one later (Chen et al. 2020, SHIFT-ATT), for models whose query is a
            state that has just read the word; it needs one row more than there are target tokens.
        over_target: how the pieces of a target word become one row.

    Returns:
        (target words, source words), float64.

    Raises:
        ValueError: the weights have too few rows or columns.
    """
    rows, columns = len(target_words) + shift, len(source_words)
    if weights.ndim != 2 or weights.shape[0] < rows or weights.shape[1] < columns:
        raise ValueError(
            f"weights must have a row per target token, {shift} more for shift={shift}, and a "
            f"column per source token. Got weights {list(weights.shape)}, {len(target_words)} "
            f"target tokens, {columns} source tokens."
        )
    used = np.asarray(weights, np.float64)[shift:rows, :columns]  # [T, S]
    summed = _one_hot(source_words) @ used.T  # [source words, T]
    pieces = _one_hot(target_words)  # [target words, T]
    if over_target == "max":
        chosen = np.where(pieces[:, None, :] > 0, summed[None], 0.0)
        return chosen.max(axis=-1, initial=0.0)
    return pieces @ summed.T / np.maximum(pieces.sum(axis=1, keepdims=True), 1)


def argmax_links(weights: np.ndarray, threshold: float = 0.0) -> frozenset[Link]:
    """For each target word, a link to the source word that it attends to most.

    Example:
        >>> import numpy as np
        >>> sorted(argmax_links(np.array([[0.1, 0.9], [0.7, 0.3], [0.0, 0.0]])))
        [(0, 1), (1, 0)]

    Args:
        weights: (target words, source words), from `word_weights`.
        threshold: no link where the largest weight is not above this.
    """
    if 0 in weights.shape:
        return frozenset()
    best = weights.argmax(axis=1)
    return frozenset((int(i), j) for j, i in enumerate(best) if weights[j, i] > threshold)


Symmetrization = Literal["intersection", "union", "grow-diag", "grow-diag-final-and"]


def symmetrize(
    forward: Iterable[Link], backward: Iterable[Link], how: Symmetrization = "grow-diag-final-and"
) -> frozenset[Link]:
    """Combines the links of two models, one for each direction (Koehn et al. 2003; Moses).

    `intersection` is sure to be precise, `union` finds most. `grow-diag` starts from the
    intersection and takes from the union what touches a link, diagonals too, and gives a link to
    a word without one; `grow-diag-final-and` adds the remaining links between two words that
    both have none.

    Example:
        >>> there, back = {(0, 0), (1, 1), (2, 1)}, {(0, 0), (2, 1), (2, 2)}
        >>> sorted(symmetrize(there, back, "intersection"))
        [(0, 0), (2, 1)]
        >>> sorted(symmetrize(there, back))
        [(0, 0), (1, 1), (2, 1), (2, 2)]

    Args:
        forward: links of the source-to-target model.
        backward: links of the target-to-source model, swapped: (source, target) too.
        how: the way.
    """
    forward, backward = frozenset(forward), frozenset(backward)
    both, either = forward & backward, forward | backward
    if how == "intersection":
        return both
    if how == "union":
        return either
    links, grown = set(both), True
    while grown:
        grown = False
        for i, j in sorted(either - links):
            touches = any(abs(i - a) <= 1 and abs(j - b) <= 1 for a, b in links)
            lonely = all(i != a for a, _ in links) or all(j != b for _, b in links)
            if touches and lonely:
                links.add((i, j))
                grown = True
    if how == "grow-diag-final-and":
        for side in (forward, backward):
            for i, j in sorted(side - links):
                if all(i != a and j != b for a, b in links):
                    links.add((i, j))
    return frozenset(links)


def format_links(links: Links | Iterable[Link]) -> str:
    """Links as one line: `i-j` (the Pharaoh format), and `ipj` for what is only possible (talp).

    Example:
        >>> format_links({(1, 2), (0, 0)})
        '0-0 1-2'
    """
    gold = links if isinstance(links, Links) else Links(links)
    return " ".join(
        f"{i}{'-' if (i, j) in gold.sure else 'p'}{j}" for i, j in sorted(gold.possible)
    )


def parse_links(line: str, where: str = "") -> Links:
    """Reads one line of links, `i-j` sure and `ipj` possible. An empty line is no links.

    Example:
        >>> links = parse_links("0-0 2p1")
        >>> sorted(links.sure), sorted(links.possible)
        ([(0, 0)], [(0, 0), (2, 1)])

    Args:
        line: the links, with spaces between them.
        where: file and line, for the error.

    Raises:
        ValueError: something in the line is not a link.
    """
    sure: set[Link] = set()
    possible: set[Link] = set()
    for part in line.split():
        mark = "-" if "-" in part else "p"
        i, _, j = part.partition(mark)
        if not (i.isdecimal() and j.isdecimal()):
            place = f"{where}: " if where else ""
            raise ValueError(
                f"{place}a link is written i-j, or ipj where it is only possible, with words "
                f"counted from 0. Got {part!r}."
            )
        (sure if mark == "-" else possible).add((int(i), int(j)))
    return Links(sure, possible)


def read_links(path: str | Path) -> list[Links]:
    """Reads a file of links, one sentence pair per line: Pharaoh's `.align` and talp alike.

    Raises:
        ValueError: a line is not links; the message has file and line.
    """
    text = Path(path).read_text(encoding="utf-8-sig")
    lines = text.removesuffix("\n").split("\n") if text else []
    return [parse_links(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]


def write_links(path: str | Path, alignments: Iterable[Links | Iterable[Link]]) -> None:
    """Writes a file of links, one sentence pair per line, in the form that `read_links` reads.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> write_links(f"{folder.name}/test.align", [{(0, 0), (1, 2)}, set()])
        >>> [sorted(links.sure) for links in read_links(f"{folder.name}/test.align")]
        [[(0, 0), (1, 2)], []]
        >>> folder.cleanup()
    """
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for links in alignments:
            file.write(format_links(links) + "\n")


def _one_hot(words: Sequence[int]) -> np.ndarray:
    """(words, tokens): 1 where the token is of the word."""
    index = np.asarray(words, np.int64)
    count = int(index.max(initial=-1)) + 1
    return (np.arange(count)[:, None] == index[None, :]).astype(np.float64)
