"""Which pairs a corpus keeps: one definition for all readers."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from regard.seq2seq.corpus.pair import CorpusError, Pair, Progress, Report

EVERY = 1000  # pairs between two calls of a progress callback


@dataclass(frozen=True)
class Cleaning:
    """What is left out of a corpus.

    The default is for training. `Cleaning.nothing()` is for text to be translated or scored,
    where line n must stay line n.

    Attributes:
        empty: leave out pairs with an empty side.
        duplicates: leave out pairs that are equal, on both sides, to an earlier one.
        max_words: leave out pairs with more words, between spaces, on a side; None, any number.
        max_ratio: leave out pairs one side of which has more than this many times the words of the
            other, and at least ten more; None, any.
    """

    empty: bool = True
    duplicates: bool = True
    max_words: int | None = 200
    max_ratio: float | None = None

    @classmethod
    def nothing(cls) -> "Cleaning":
        """Keeps every pair."""
        return cls(empty=False, duplicates=False, max_words=None)

    def objection(self, pair: Pair) -> str:
        """Why a pair is left out, apart from being a duplicate; "" if it is not.

        Example:
            >>> from regard.seq2seq.corpus import Cleaning, Pair
            >>> Cleaning(max_words=3).objection(Pair("He sleeps.", "Il dort bien ici."))
            'more than 3 words'
        """
        if self.empty and not pair.source.strip():
            return "empty source"
        if self.empty and not pair.target.strip():
            return "empty target"
        if self.max_words is None and self.max_ratio is None:
            return ""
        short, long = sorted((len(pair.source.split()), len(pair.target.split())))
        if self.max_words is not None and long > self.max_words:
            return f"more than {self.max_words} words"
        if self.max_ratio is not None and long > self.max_ratio * short and long >= short + 10:
            return f"one side {self.max_ratio:g} times as long as the other"
        return ""


TRAINING = Cleaning()


@dataclass(frozen=True, slots=True)
class Found:
    """What a reader found in one place: a pair, or the problem with it."""

    where: str
    pair: Pair | None
    problem: str = ""
    mended: tuple[str, ...] = ()
    fraction: float | None = None


def keep(
    found: Iterable[Found], cleaning: Cleaning, report: Report, progress: Progress | None
) -> Iterator[Pair]:
    """The pairs that are kept; the report counts them all.

    Raises:
        CorpusError: at the end, where nothing was kept.
    """
    seen: set[bytes] = set()
    fraction = None
    for item in found:
        report.read += 1
        fraction = item.fraction
        if progress is not None and report.read % EVERY == 0:
            progress(report.read, fraction)
        for repair in item.mended:
            report.mend(repair, item.where)
        problem = item.problem
        if item.pair is not None and not problem:
            problem = cleaning.objection(item.pair)
            if not problem and cleaning.duplicates:
                # 16 bytes each, however long the sentences: a corpus may have millions.
                both = f"{item.pair.source}\0{item.pair.target}".encode("utf-8", "surrogatepass")
                mark = hashlib.blake2b(both, digest_size=16).digest()
                problem = "duplicate" if mark in seen else ""
                seen.add(mark)
        if problem:
            report.drop(problem, item.where)
        elif item.pair is not None:
            report.kept += 1
            yield item.pair
    if progress is not None:
        progress(report.read, 1.0)
    if report.kept == 0:
        raise CorpusError(f"no pair is left of the corpus: {report}")


@dataclass(kw_only=True)
class Reader:
    """A corpus that is read from somewhere, with a report of what it kept.

    Args:
        cleaning: what is left out.
        progress: called after every thousand pairs.

    Attributes:
        report: an account of the last reading.
    """

    cleaning: Cleaning = TRAINING
    progress: Progress | None = None
    report: Report = field(default_factory=Report, init=False)

    def __iter__(self) -> Iterator[Pair]:
        self.report = Report()
        return keep(self._found(), self.cleaning, self.report, self.progress)

    def _found(self) -> Iterator[Found]:
        """All that the corpus has, in order."""
        raise NotImplementedError
