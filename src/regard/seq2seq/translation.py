"""Results of a translator: text, score, and the alignment of words."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from regard.seq2seq.alignment import Link, argmax_links


@dataclass(frozen=True)
class Alignment:
    """A sentence pair, and the attention weights between its words.

    Example:
        >>> import numpy as np
        >>> from regard.seq2seq.translation import Alignment
        >>> weights = np.array([[0.9, 0.0], [0.1, 0.8]])
        >>> found = Alignment(("red", "car"), ("voiture", "rouge"), weights[::-1])
        >>> sorted(found.links())
        [(0, 1), (1, 0)]
        >>> sorted(found.links(threshold=0.85))
        [(0, 1)]

    Attributes:
        source_words: the words that were read.
        target_words: the words that were written.
        weights: float64 (target words, source words). The weights on the pieces of a source word
            are added; a row sums to 1 minus the weight on the end of the sentence, so that a row
            with a small sum is a word without a source. Zeros for a model without attention.
    """

    source_words: tuple[str, ...]
    target_words: tuple[str, ...]
    weights: np.ndarray = field(compare=False, repr=False)

    def links(self, threshold: float = 0.0) -> frozenset[Link]:
        """For each target word, a link (i, j) from the source word i that it attends to most.

        Args:
            threshold: no link where the largest weight is not above this.
        """
        return argmax_links(self.weights, threshold)


@dataclass(frozen=True)
class Translation(Alignment):
    """A translation of a text, with its word alignment.

    Attributes:
        text: the translation.
        score: what translations are ranked by, the higher the better: the log-probability with
            its length penalty.
        log_prob: log p(text | source), of the text as it was put to the model.
        note: why the model was not run, where the text is a copy of the source; else "".
    """

    text: str
    score: float
    log_prob: float
    note: str = ""

    @classmethod
    def empty(cls) -> "Translation":
        """The one translation of a text without words."""
        return cls((), (), np.zeros((0, 0)), "", 0.0, 0.0)


def to_json(one: Translation) -> dict[str, Any]:
    """A translation as the command line and the playground give it, weights to four digits.

    Example:
        >>> from regard.seq2seq.translation import Translation, to_json
        >>> to_json(Translation.empty())["weights"]
        []
    """
    score = float(one.score)
    fields: dict[str, Any] = {
        "text": one.text,
        "score": round(score, 4) if abs(score) < 1e30 else None,  # JSON has no infinity
        "source_words": list(one.source_words),
        "target_words": list(one.target_words),
        "weights": np.round(np.asarray(one.weights, np.float64), 4).tolist(),
    }
    return fields | ({"note": one.note} if one.note else {})
