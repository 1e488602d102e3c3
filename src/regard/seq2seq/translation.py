"""What a translator gives back: text, how sure it is, and which word came from which."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from regard.seq2seq.alignment import Link, argmax_links


@dataclass(frozen=True)
class Alignment:
    """A sentence pair, and where the model looked for each target word.

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
        weights: float64 (target words, source words). What falls on the pieces of a source word is
            added up; a row sums to 1 less what fell on the end of the sentence, so that a word
            which comes from nowhere can be told. Zeros for a model without attention.
    """

    source_words: tuple[str, ...]
    target_words: tuple[str, ...]
    weights: np.ndarray = field(compare=False, repr=False)

    def links(self, threshold: float = 0.0) -> frozenset[Link]:
        """For each target word, a link (i, j) from the source word i that it looks at most.

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
        note: why the model was not asked, where the text is a copy of the source; else "".
    """

    text: str
    score: float
    log_prob: float
    note: str = ""

    @classmethod
    def empty(cls) -> "Translation":
        """Of a text without words: it has one translation, of which one can be certain."""
        return cls((), (), np.zeros((0, 0)), "", 0.0, 0.0)


def to_json(one: Translation) -> dict[str, Any]:
    """A translation as the command line and the playground tell it: four digits are enough.

    Example:
        >>> from regard.seq2seq.translation import Translation, to_json
        >>> to_json(Translation.empty())["weights"]
        []
    """
    score = float(one.score)
    told: dict[str, Any] = {
        "text": one.text,
        "score": round(score, 4) if abs(score) < 1e30 else None,  # JSON has no infinity
        "source_words": list(one.source_words),
        "target_words": list(one.target_words),
        "weights": np.round(np.asarray(one.weights, np.float64), 4).tolist(),
    }
    return told | ({"note": one.note} if one.note else {})
