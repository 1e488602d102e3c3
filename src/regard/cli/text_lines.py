"""Where the commands of the translator read lines, and where they write them.

Line n of the input stays line n: nothing is dropped here, whatever is in it. Readers of corpora,
which may drop lines and count them, are in regard.seq2seq.corpus.
"""

import contextlib
import gzip
import io
import itertools
import os
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

from regard.atomic_file import named_errors, open_atomically

LINES = 1024  # of a chunk, at most
CHARACTERS = 1 << 20  # of a chunk, or a single longer line
LONGEST_LINE = 1 << 26  # bytes: a file without line ends is no text


def from_arguments(texts: Iterable[str]) -> list[str]:
    """Texts of the command line; a byte that was not in the terminal's encoding is U+FFFD.

    Example:
        >>> from_arguments(["été", "caf" + chr(0xDCE9)]) == ["été", "caf" + chr(0xFFFD)]
        True
    """
    return [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts]


def from_file(path: Path) -> Iterator[str]:
    """The lines of a file, plain or gzip, known by its first bytes.

    Raises:
        ValueError: it is empty, not UTF-8, or its gzip stream is broken; with file and line.
    """
    number = 0
    with open(path, "rb") as file:
        packed = file.peek(2)[:2] == b"\x1f\x8b"  # a pipe cannot go back
        stream: BinaryIO = io.BufferedReader(gzip.GzipFile(fileobj=file)) if packed else file
        try:
            for line in _decoded(stream, str(path)):
                number += 1
                yield line
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(
                f"{path}:{number + 1}: the gzip file is broken here ({error}). Fix: fetch it again."
            ) from None
    if number == 0:
        raise ValueError(f"{path}: the file is empty.")


def from_stdin() -> Iterator[str]:
    """The lines of stdin, one by one.

    Raises:
        ValueError: stdin is closed, or not UTF-8.
    """
    if sys.stdin is None:
        raise ValueError("stdin is closed. Fix: --in FILE, or sentences on the command line.")
    return _decoded(sys.stdin.buffer, "stdin")


def check_not_read(out: Path, *inputs: Path | None) -> None:
    """Raises ValueError where the output would replace a file that is read."""
    for path in inputs:
        path = Path("/dev/stdin") if str(path) == "-" else path
        if path is not None and path.is_file() and out.exists() and os.path.samefile(path, out):
            raise ValueError(f"the output would replace the input {path}. Fix: another file.")


@contextlib.contextmanager
def output(path: Path | None, *inputs: Path | None) -> Iterator[TextIO]:
    """A place to write lines to.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "out.txt"
        ...     with output(path) as out:
        ...         print("Où ?", file=out)
        ...         begun = path.exists()
        ...     begun, path.read_text(encoding="utf-8")
        (False, 'Où ?\\n')

    Args:
        path: a file, which appears when the block ends without error; a pipe or a device is
            written to directly; None: stdout.
        inputs: the files that are read, of which none may be replaced.

    Raises:
        ValueError: the file is one of the inputs.
    """
    if path is None:
        if hasattr(sys.stdout, "reconfigure"):  # UTF-8, whatever the locale says
            sys.stdout.reconfigure(encoding="utf-8")
        with named_errors(Path("stdout")):
            yield sys.stdout
            sys.stdout.flush()  # a broken pipe shows here, not at exit
        return
    if path.exists() and not path.is_file() and not path.is_dir():
        # Renaming a file to /dev/null would replace the device.
        with named_errors(path), open(path, "w", encoding="utf-8", newline="\n") as file:
            yield file
        return
    check_not_read(path, *inputs)
    with open_atomically(path.resolve()) as draft:  # where a link points to
        file = io.TextIOWrapper(draft, encoding="utf-8", newline="\n")
        try:
            yield file
        finally:
            file.detach()  # flushes; the draft is closed by its own block


def chunks(lines: Iterable[str], count: int = LINES) -> Iterator[list[str]]:
    """Lines in lists of bounded size, so that a file of any size takes the same memory.

    Example:
        >>> [len(chunk) for chunk in chunks(["a"] * 5, 2)]
        [2, 2, 1]
    """
    lines = iter(lines)
    while chunk := list(itertools.islice(_some(lines), count)):
        yield chunk


def _some(lines: Iterator[str]) -> Iterator[str]:
    size = 0
    for line in lines:
        yield line
        size += len(line)
        if size > CHARACTERS:
            return


def _decoded(stream: BinaryIO, name: str) -> Iterator[str]:
    """Lines end at "\\n" and nowhere else, as every other program counts them."""
    for number in itertools.count(1):
        raw = stream.readline(LONGEST_LINE + 1)
        if not raw:
            return
        if len(raw) > LONGEST_LINE:
            raise ValueError(
                f"{name}:{number}: a line must not be longer than {LONGEST_LINE >> 20} MiB. "
                "Fix: a text file with a sentence per line."
            )
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        try:
            yield raw.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{name}:{number}: not UTF-8: byte 0x{raw[error.start]:02X} at column "
                f"{error.start + 1}. Fix: iconv -f LATIN1 -t UTF-8, or whatever its encoding is."
            ) from None
