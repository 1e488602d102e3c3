"""Files that are made in parts, by a process that may be killed at any moment.

Beside `out.txt` stands the folder `out.txt.parts`:

manifest.json             what is being made, and from what
lock                      empty; the process that works on the parts holds a lock on it
part-000000.<digest> ...  the finished parts, each with a digest of its content in its name

A folder without this manifest belongs to somebody else and is refused; only files with the names
above are ever removed. Parts and whole files are written under other names and then renamed, so
that each of them is there completely or not at all. The kernel releases the lock of a process that
dies; where a file system has no locks, two processes may do the same work, with the same result.
"""

import contextlib
import errno
import gzip
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from regard.atomic_file import open_atomically, write_atomically

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FORMAT = "regard translation parts 2"
MANIFEST, LOCK = "manifest.json", "lock"
_PART = re.compile(r"part-(\d{6,})\.([0-9a-f]{32})")
_DRAFT = re.compile(r"\..+\.[0-9a-f]{12}\.new")  # what a killed process leaves, see atomic_file.py


class Parts:
    """The parts of a file, or of the files in a folder, started or resumed.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> out = Path(tempfile.mkdtemp()) / "out.txt"
        >>> with Parts(out, {"beam": 5}, [(out, 2)]) as parts:
        ...     parts.write(1, "deux\\n")
        ...     parts.missing()
        [0]
        >>> with Parts(out, {"beam": 5}, [(out, 2)]) as parts:  # a later process
        ...     parts.write(0, "un\\n")
        ...     parts.join()
        True
        >>> out.read_text()
        'un\\ndeux\\n'

    Args:
        out: the file, or the folder of the files.
        job: what they are made of and how, in JSON types: parts of another job are not reused.
        files: each file and the number of its parts. Where a name ends in .gz, it is compressed.

    Raises:
        ValueError: the folder for the parts is not ours, its parts are those of another job, or
            another process is working on them.
        OSError: the folder cannot be made.
    """

    def __init__(
        self, out: Path, job: Mapping[str, Any], files: Sequence[tuple[Path, int]]
    ) -> None:
        self.out, self.job = out.resolve(), dict(job)
        self.files = [path.resolve() for path, _ in files]  # where a link points to
        ends = accumulate((count for _, count in files), initial=0)
        self._indices = [range(first, end) for first, end in pairwise(ends)]
        self.count = self._indices[-1].stop
        self.folder = folder_of(out)
        with contextlib.ExitStack() as unless_begun:
            self._lock = self._locked()
            unless_begun.push(self.__exit__)
            self._begin()
            unless_begun.pop_all()

    def __enter__(self) -> "Parts":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)  # this releases the lock

    def missing(self) -> list[int]:
        """The parts that are still to be made."""
        finished = self._finished()
        return [index for index in range(self.count) if index not in finished]

    def write(self, index: int, text: str) -> None:
        """Writes a part completely or not at all; when this returns, it is on the disk."""
        data = text.encode()
        file = next(f for f, own in zip(self.files, self._indices, strict=True) if index in own)
        if file.suffix == ".gz":  # compressed one by one; joined, they are a gzip file too
            data = gzip.compress(data, mtime=0)
        digest = _hash(data).hexdigest()
        write_atomically(self.folder / f"part-{index:06d}.{digest}", data)

    def join(self) -> bool:
        """Joins the parts as the files, and removes them.

        A part whose content is not that of its digest (a disk that lost power, a copy that was cut
        short) is removed instead, and is missing again.

        Returns:
            False where a part was damaged.
        """
        finished = self._finished()
        for path, own in zip(self.files, self._indices, strict=True):
            path.parent.mkdir(exist_ok=True)
            try:
                with open_atomically(path, draft_folder=self.folder) as whole:
                    for index in own:
                        data = finished[index].read_bytes()
                        if not finished[index].name.endswith(_hash(data).hexdigest()):
                            raise _DamagedPart(finished[index])
                        whole.write(data)
            except _DamagedPart as damaged:
                damaged.path.unlink(missing_ok=True)
                return False
        self._clear()
        for name in (MANIFEST, LOCK):  # last: the manifest marks the folder as ours
            (self.folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it has files that are not ours
            self.folder.rmdir()
        return True

    def _locked(self) -> int:
        """Makes the folder where there is none, and locks it; returns the lock's descriptor."""
        while True:
            check_place(self.out)
            self.folder.mkdir(exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
            try:
                lock = os.open(self.folder / LOCK, flags, 0o666)
            except FileNotFoundError:  # another process has just removed the folder
                continue
            try:
                if fcntl is not None:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(lock), os.stat(self.folder / LOCK)):
                        return lock
            except BlockingIOError:
                os.close(lock)
                raise ValueError(
                    f"another process is translating into {self.out}. Fix: wait for its end, "
                    "or write to another --out."
                ) from None
            except OSError as error:
                if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    return lock  # there are no locks here
                os.close(lock)
                raise
            os.close(lock)

    def _begin(self) -> None:
        """Resumes what is there, or starts anew."""
        found = read_manifest(self.out)
        if found is None:
            self._clear()  # first: parts of an earlier job must never stand beside a new manifest
            manifest = {"format": FORMAT, "job": self.job}
            write_atomically(self.folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        elif found != self.job:
            raise ValueError(_refusal(self.folder, found, self.job))

    def _finished(self) -> dict[int, Path]:
        """The finished parts, by number."""
        found = map(_PART.fullmatch, os.listdir(self.folder))
        return {int(name[1]): self.folder / name[0] for name in found if name}

    def _clear(self) -> None:
        for name in os.listdir(self.folder):
            if _PART.fullmatch(name) or _DRAFT.fullmatch(name):
                (self.folder / name).unlink(missing_ok=True)


def check_place(out: Path) -> None:
    """Raises at the beginning what would fail only at the end.

    Raises:
        OSError: the folder of `out` is missing.
        ValueError: the folder for its parts was not made by us: what is in it is the user's.
    """
    out, folder = out.resolve(), folder_of(out)
    if not out.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(out))
    try:
        names = set(os.listdir(folder))
    except FileNotFoundError:
        if not folder.is_symlink():
            return
        names = set()
    # A process may have been killed after it made the folder and before it wrote the manifest.
    started = all(name == LOCK or _DRAFT.fullmatch(name) for name in names)
    if folder.is_symlink() or not (MANIFEST in names or started):
        raise ValueError(
            f"{folder} is needed for the parts of the translation, and regard did not make it. "
            f"{_fix(folder)}"
        )
    read_manifest(out)


def folder_of(out: Path) -> Path:
    """The folder of the parts, beside the file or folder that is made of them.

    Example:
        >>> folder_of(Path("/data/out.txt.gz")).name
        'out.txt.gz.parts'
    """
    out = out.resolve()  # where a link points to
    return out.with_name(out.name + ".parts")


def read_manifest(out: Path) -> dict[str, Any] | None:
    """The job of a file that is being made in parts; None where there is no manifest.

    Raises:
        ValueError: the manifest is not one of ours, or its folder is a symbolic link.
    """
    path = folder_of(out) / MANIFEST
    try:
        found = json.loads(path.read_bytes())
        if found["format"] != FORMAT or path.parent.is_symlink():
            raise ValueError
        return dict(found["job"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is not a manifest of regard. {_fix(path.parent)}") from None


class _DamagedPart(Exception):
    """The content of a part is not that of the digest in its name."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path = path


def _fix(folder: Path) -> str:
    return f"Fix: rename {folder.name}, or write to another --out."


def _refusal(folder: Path, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    names = [name for name in {**theirs, **mine} if theirs.get(name) != mine.get(name)]
    listed = ", ".join(f"{name} {theirs.get(name)}, not {mine.get(name)}" for name in names)
    return (
        f"the unfinished parts in {folder} were made with {listed}. "
        "Fix: use the same options to resume, or remove the folder to start anew."
    )


def _hash(data: bytes) -> "hashlib.blake2b":
    return hashlib.blake2b(data, digest_size=16)
