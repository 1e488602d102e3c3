"""The lines of a text file, plain or gzip; damaged lines are reported, not raised.

A line ends at "\\n" and nowhere else: Python's own idea of a line (form feeds, U+2028) would put
two parallel files out of alignment.
"""

import gzip
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from regard.seq2seq.corpus.pair import CorpusError

MAX_BYTES = 1 << 20  # a line longer than this is not read, only counted

_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


@dataclass(frozen=True)
class Line:
    """One line.

    Attributes:
        text: without its end; "" where `problem` says why there is none.
        where: file and line number.
        problem: why the line cannot be used: "over-long line" or "NUL byte"; else "".
        mended: what was repaired in it: "byte order mark", "CRLF line end".
    """

    text: str
    where: str
    problem: str = ""
    mended: tuple[str, ...] = ()


class Lines:
    """Reads a file line by line.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "two.txt"
        ...     _ = path.write_bytes(b"Une ligne.\\r\\nDeux.\\n")
        ...     [(line.text, line.mended) for line in Lines(path)]
        [('Une ligne.', ('CRLF line end',)), ('Deux.', ())]

    Args:
        path: the file; gzip is known by its first bytes, not by its name.
        encoding: of the text.
        max_bytes: a longer line is given as a problem, and never held in memory.

    Attributes:
        fraction: how much of the file has been read, 0 to 1.

    Raises:
        CorpusError: the file is empty, is not in its encoding, or its gzip stream is broken.
        ValueError: an encoding such as UTF-16.
        OSError: it cannot be opened.
    """

    def __init__(
        self, path: str | Path, *, encoding: str = "utf-8", max_bytes: int = MAX_BYTES
    ) -> None:
        self.path, self.encoding, self.max_bytes = Path(path), encoding, max_bytes
        self.fraction = 0.0
        if "\n".encode(encoding) != b"\n":
            raise ValueError(
                "lines are found before they are decoded, so the encoding must have ASCII in it. "
                f"Got encoding={encoding!r}. Fix: iconv -f {encoding} -t UTF-8 {self.path.name}"
            )

    def __iter__(self) -> Iterator[Line]:
        number = 0
        with open(self.path, "rb") as file:
            size = max(self.path.stat().st_size, 1)
            try:
                for number, raw in enumerate(self._raw(file), 1):
                    self.fraction = min(file.tell() / size, 1.0)
                    yield self._line(raw, number)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise CorpusError(
                    f"{self.path}:{number + 1}: the gzip file is broken here ({error}). "
                    "Fix: fetch it again."
                ) from None
        if number == 0:
            raise CorpusError(f"{self.path}: the file is empty.")
        self.fraction = 1.0

    def _raw(self, file: BinaryIO) -> Iterator[bytes | None]:
        """Lines as bytes; None for one that is too long."""
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        stream: BinaryIO = io.BufferedReader(gzip.GzipFile(fileobj=file)) if packed else file
        while raw := stream.readline(self.max_bytes + 1):
            if len(raw) <= self.max_bytes:
                yield raw
                continue
            while raw and not raw.endswith(b"\n"):
                raw = stream.readline(self.max_bytes + 1)
            yield None

    def _line(self, raw: bytes | None, number: int) -> Line:
        where = f"{self.path}:{number}"
        if raw is None:
            return Line("", where, "over-long line")
        mended = []
        if number == 1 and raw[:2] in _MARKS and self.encoding == "utf-8":
            raise CorpusError(
                f"{where}: the file begins like {_MARKS[raw[:2]]}, and was to be read as UTF-8. "
                f"Fix: iconv -f UTF-16 -t UTF-8 {self.path.name}"
            )
        if number == 1 and raw.startswith(b"\xef\xbb\xbf"):
            raw = raw[3:]
            mended.append("byte order mark")
        raw = raw.removesuffix(b"\n")
        if raw.endswith(b"\r"):
            raw = raw[:-1]
            mended.append("CRLF line end")
        try:
            text = raw.decode(self.encoding)
        except UnicodeDecodeError as error:
            raise CorpusError(
                f"{where}: not {self.encoding.upper()}: byte 0x{raw[error.start]:02X} at column "
                f"{error.start + 1}. Fix: say the file's encoding, encoding='latin-1' perhaps, "
                f"or iconv -f LATIN1 -t UTF-8 {self.path.name}"
            ) from None
        if "\0" in text:
            return Line("", where, "NUL byte", tuple(mended))
        return Line(text, where, "", tuple(mended))
