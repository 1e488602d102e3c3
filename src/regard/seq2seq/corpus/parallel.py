"""Pairs from two files, line by line: Moses style."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from regard.seq2seq.alignment import Links, read_links
from regard.seq2seq.corpus.cleaning import Found, Reader
from regard.seq2seq.corpus.lines import Line, Lines
from regard.seq2seq.corpus.pair import CorpusError, Pair


@dataclass
class ParallelFiles(Reader):
    """Sentence pairs from two files of equal length: line n of one translates line n of the other.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from regard.seq2seq.corpus import ParallelFiles
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     english, french = Path(folder) / "train.en", Path(folder) / "train.fr"
        ...     _ = (
        ...         english.write_text("Thank you.\\nYes.\\n"),
        ...         french.write_text("Merci.\\nOui.\\n"),
        ...     )
        ...     [pair.target for pair in ParallelFiles(english, french)]
        ['Merci.', 'Oui.']

    Args:
        source: the source's file, plain or gzip.
        target: the target's.
        links: a file of gold links, one line per pair, `i-j` sure and `ipj` possible; its words
            are what stands between spaces in the files.
        encoding: of the text.
        cleaning, progress: see `Reader`; its `report` is an account of the last reading.

    Raises:
        CorpusError: when it is read: a file that is empty or not in its encoding, or a link of a
            word that its pair does not have, with file and line; at the end, files that are not
            equally long, with both counts; nothing kept.
    """

    source: str | Path
    target: str | Path
    links: str | Path | None = None
    encoding: str = "utf-8"

    def _found(self) -> Iterator[Found]:
        sources = Lines(self.source, encoding=self.encoding)
        targets = Lines(self.target, encoding=self.encoding)
        gold: list[Links] | None = None if self.links is None else read_links(self.links)
        counts = [0, 0]
        for number, (source, target) in enumerate(itertools.zip_longest(sources, targets)):
            counts = [counts[0] + (source is not None), counts[1] + (target is not None)]
            if source is None or target is None or (gold is not None and number >= len(gold)):
                continue  # count on: the error below says how long both are
            links = None if gold is None else gold[number]
            if links is not None and not (source.problem or target.problem):
                self._check(links, source, target, number)
            yield _found(source, target, links, sources.fraction)
        if counts[0] != counts[1]:
            raise CorpusError(
                "parallel files must have as many lines as each other. Got "
                f"{self.source} with {counts[0]:,} lines, {self.target} with {counts[1]:,}."
            )
        if gold is not None and len(gold) != counts[0]:
            raise CorpusError(
                "a file of links must have a line for each pair. Got "
                f"{self.links} with {len(gold):,} lines, {self.source} with {counts[0]:,}."
            )

    def _check(self, links: Links, source: Line, target: Line, number: int) -> None:
        counts = len(source.text.split()), len(target.text.split())
        try:
            links.check_words(*counts, f"{self.links}:{number + 1}", "words split at spaces")
        except ValueError as error:
            raise CorpusError(str(error)) from None


def _found(source: Line, target: Line, links: Links | None, fraction: float) -> Found:
    bad = source if source.problem else target
    where = bad.where if bad.problem else source.where
    return Found(
        where,
        None if bad.problem else Pair(source.text, target.text, links),
        bad.problem,
        (*source.mended, *target.mended),
        fraction,
    )
