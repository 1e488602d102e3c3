"""Pairs from one file with a tab between the sides, as Tatoeba and ManyThings give them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from regard.seq2seq.corpus.cleaning import Found, Reader
from regard.seq2seq.corpus.lines import Lines
from regard.seq2seq.corpus.pair import Pair


@dataclass
class TabSeparated(Reader):
    """Sentence pairs, one per line: source, a tab, target.

    Columns behind these two, such as ManyThings' attribution, are not read. A line without a tab
    is dropped, and counted.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from regard.seq2seq.corpus import TabSeparated
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "fra.txt"
        ...     _ = path.write_text("Go.\\tVa !\\tCC-BY 2.0\\nHi.\\n", encoding="utf-8")
        ...     corpus = TabSeparated(path)
        ...     list(corpus)
        [Pair(source='Go.', target='Va !', links=None)]
        >>> print(corpus.report)
        read 2, kept 1, dropped 1
          no tab: 1 (...fra.txt:2)

    Args:
        path: the file, plain or gzip.
        source: the column of the source, counted from 0.
        target: the column of the target.
        encoding: of the text.
        cleaning, progress: see `Reader`; its `report` is an account of the last reading.

    Raises:
        CorpusError: when it is read: a file that is empty or not in its encoding, with file and
            line; or nothing kept.
    """

    path: str | Path
    source: int = 0
    target: int = 1
    encoding: str = "utf-8"

    def _found(self) -> Iterator[Found]:
        lines = Lines(self.path, encoding=self.encoding)
        for line in lines:
            columns = line.text.split("\t")
            pair, problem = None, line.problem
            if not problem and len(columns) == 1:
                problem = "empty line" if not line.text.strip() else "no tab"
            elif not problem and len(columns) <= max(self.source, self.target):
                problem = f"fewer than {max(self.source, self.target) + 1} columns"
            elif not problem:
                pair = Pair(columns[self.source], columns[self.target])
            yield Found(line.where, pair, problem, line.mended, lines.fraction)
