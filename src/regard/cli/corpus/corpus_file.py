"""A large file of lines to translate: its digest, and its lines in runs of a few thousand."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from regard.cli import text_lines


@dataclass(frozen=True)
class Run:
    """Consecutive lines.

    Attributes:
        index: which run this is, from 0.
        first: the number of its first line, from 0.
        lines: the lines.
    """

    index: int
    first: int
    lines: list[str]


class CorpusFile:
    """A file with a sentence per line, plain or gzip.

    It is read as a stream, one run at a time, so that ten million lines take the memory of one run.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "in.txt"
        >>> _ = path.write_text("one\\ntwo\\nthree\\n")
        >>> file = CorpusFile(path, 2)
        >>> [(run.first, run.lines) for run in file.runs()]
        [(0, ['one', 'two']), (2, ['three'])]

    Args:
        path: the file.
        per_run: lines of a run; fewer where they are very long.

    Attributes:
        digest: of its bytes.
    """

    def __init__(self, path: Path, per_run: int) -> None:
        self.path, self.per_run = path, per_run
        self._stamp = self._stamp_now()
        with open(path, "rb") as file:
            self.digest = hashlib.file_digest(file, _hash).hexdigest()

    def runs(self) -> Iterator[Run]:
        """The runs, in order.

        Raises:
            ValueError: the file is empty, damaged or not UTF-8, or was changed since it was opened.
        """
        first = 0
        for index, lines in enumerate(
            text_lines.chunks(text_lines.from_file(self.path), self.per_run)
        ):
            if self._stamp_now() != self._stamp:
                raise ValueError(
                    f"{self.path} was changed while it was being translated. "
                    "Fix: start again, and do not change it meanwhile."
                )
            yield Run(index, first, lines)
            first += len(lines)

    def count(self) -> tuple[int, int]:
        """The numbers of lines and of runs; the whole file is read."""
        lines = runs = 0
        for run in self.runs():
            lines, runs = lines + len(run.lines), runs + 1
        return lines, runs

    def _stamp_now(self) -> tuple[int, int]:
        now = self.path.stat()
        return now.st_size, now.st_mtime_ns


def digest_of(paths: list[Path]) -> str:
    """One digest of several files, in their order.

    Example:
        >>> digest_of([]) == digest_of([])
        True
    """
    total = _hash()
    for path in paths:
        with open(path, "rb") as file:
            total.update(hashlib.file_digest(file, _hash).digest())
    return total.hexdigest()


def _hash() -> "hashlib.blake2b":
    return hashlib.blake2b(digest_size=16)
