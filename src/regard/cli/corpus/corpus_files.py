"""The files that a corpus is read from, their digest, and their lines in runs of a few thousand."""

import hashlib
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from regard.cli import text_lines


@dataclass(frozen=True)
class Run:
    """Consecutive lines of one file.

    Attributes:
        index: which run of the corpus this is, from 0.
        first: the number of its first line in its file, from 0.
        lines: the lines.
    """

    index: int
    first: int
    lines: list[str]


class CorpusFiles:
    """Files with a sentence per line, plain or gzip, one after the other.

    They are read as a stream, one run at a time, so that ten million lines take the memory of one
    run.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "in.txt"
        >>> _ = path.write_text("one\\ntwo\\nthree\\n")
        >>> [(run.first, run.lines) for run in CorpusFiles([path], 2).runs()]
        [(0, ['one', 'two']), (2, ['three'])]

    Args:
        paths: the files.
        per_run: lines of a run; fewer where they are very long, and at the end of a file.

    Attributes:
        digest: of the bytes of all files.
    """

    def __init__(self, paths: Sequence[Path], per_run: int) -> None:
        self.paths, self.per_run = list(paths), per_run
        self._stamps = [_stamp(path) for path in self.paths]
        self.digest = digest_of(self.paths)

    def runs(self, wanted: Collection[int] | None = None) -> Iterator[Run]:
        """The runs, in order; of those `wanted`, the files are read no further than the last.

        Raises:
            ValueError: a file is empty, damaged or not UTF-8, or was changed since it was opened.
        """
        last = None if wanted is None else max(wanted, default=-1)
        for run in self._all():
            if last is not None and run.index > last:
                return
            if wanted is None or run.index in wanted:
                yield run

    def count(self) -> list[tuple[int, int]]:
        """For each file its numbers of lines and of runs; all files are read to their end."""
        counts = []
        for path in self.paths:
            lines = runs = 0
            for chunk in self._chunks(path):
                lines, runs = lines + len(chunk), runs + 1
            counts.append((lines, runs))
        return counts

    def _all(self) -> Iterator[Run]:
        index = 0
        for path, stamp in zip(self.paths, self._stamps, strict=True):
            first = 0
            for lines in self._chunks(path):
                if _stamp(path) != stamp:
                    raise ValueError(
                        f"{path} was changed while it was being translated. "
                        "Fix: start again, and do not change it meanwhile."
                    )
                yield Run(index, first, lines)
                index, first = index + 1, first + len(lines)

    def _chunks(self, path: Path) -> Iterator[list[str]]:
        return text_lines.chunks(text_lines.from_file(path), self.per_run)


def pair_files(source: Path, out: Path) -> tuple[list[Path], list[Path]]:
    """The files to read and, for each, the file to write: one each, or those of two folders.

    Raises:
        OSError: the source is missing, or `out` is a folder and the source is not.
        ValueError: the source is a folder without files, or has folders in it; or both are one.
    """
    if not source.is_dir():
        text_lines.check_not_read(out, source)
        return [source], [out]
    entries = sorted(path for path in source.iterdir() if not path.name.startswith("."))
    folders = [path.name for path in entries if path.is_dir()]
    if folders or not entries:
        got = f"folders: {', '.join(folders[:5])}" if folders else "no file"
        raise ValueError(
            f"a folder to translate has files in it, and no folders. Got {source} with {got}. "
            "Fix: one command for each folder."
        )
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(
            f"--in is a folder, so that --out must be one. Got the file {out}."
        )
    if out.exists() and os.path.samefile(source, out):
        raise ValueError(f"--in and --out must be two folders. Got {source} for both.")
    return entries, [out / path.name for path in entries]


def digest_of(paths: Sequence[Path]) -> str:
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


def _stamp(path: Path) -> tuple[int, int]:
    now = path.stat()
    return now.st_size, now.st_mtime_ns
