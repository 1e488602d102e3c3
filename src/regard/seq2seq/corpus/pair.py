"""What every corpus yields: sentence pairs, and a report of what it read."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from regard.seq2seq.alignment import Links

# Called from time to time while a corpus is read: the number of pairs so far, and which fraction of
# the whole that is; None where the size is not known.
Progress = Callable[[int, float | None], None]


class CorpusError(ValueError):
    """A file that cannot be read as what it should be; the message has file and line."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A sentence and its translation.

    Example:
        >>> from regard.seq2seq.corpus import Pair
        >>> Pair("Good evening.", "Bonsoir.").target
        'Bonsoir.'

    Attributes:
        source: the sentence.
        target: its translation.
        links: gold links between their words, as `words.split_words` splits them; None where
            there are none.
    """

    source: str
    target: str
    links: Links | None = None


@dataclass
class Report:
    """What a corpus read, kept, mended and dropped, and where.

    Example:
        >>> from regard.seq2seq.corpus import Report
        >>> report = Report(read=3, kept=2)
        >>> report.drop("empty target", "train.tsv:17")
        >>> print(report)
        read 3, kept 2, dropped 1
          empty target: 1 (train.tsv:17)

    Attributes:
        read: pairs, or lines where a line is not even a pair.
        kept: pairs given.
        dropped: for each reason, how many.
        mended: for each kind of repair, how many. A mended pair is kept.
        examples: for each reason and repair, the first places where it occurred.
    """

    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    mended: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    EXAMPLES = 3

    def drop(self, reason: str, where: str) -> None:
        """Counts a pair that is left out."""
        self.dropped[reason] += 1
        self._example(reason, where)

    def mend(self, repair: str, where: str) -> None:
        """Counts a repair."""
        self.mended[repair] += 1
        self._example(repair, where)

    def __str__(self) -> str:
        lines = [f"read {self.read:,}, kept {self.kept:,}, dropped {self.dropped.total():,}"]
        for reason, count in (self.dropped + self.mended).most_common():
            places = self.examples.get(reason, [])
            listed = ", ".join([*places, *(["..."] if count > len(places) else [])])
            mended = " (mended)" if reason in self.mended else ""
            lines.append(f"  {reason}{mended}: {count:,}" + (f" ({listed})" if places else ""))
        return "\n".join(lines)

    def _example(self, reason: str, where: str) -> None:
        places = self.examples.setdefault(reason, [])
        if len(places) < self.EXAMPLES:
            places.append(where)


@runtime_checkable
class Corpus(Protocol):
    """Sentence pairs that can be read any number of times, and a report of the last reading.

    `list(corpus)` reads it all; then `corpus.report` says what was read, kept, dropped and why.
    """

    report: Report

    def __iter__(self) -> Iterator[Pair]: ...
