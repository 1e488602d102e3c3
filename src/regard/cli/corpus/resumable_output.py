"""A file that is made in parts, by any number of processes, any of which may be killed.

Beside `out.txt` stands the folder `out.txt.parts`:

manifest.json             what is being made, and from what; once it is whole, its length
claims                    empty; a process that works on part i holds a lock on its byte i + 1
part-000000.<digest> ...  the finished parts, each with a digest of its content in its name

A folder without this manifest belongs to somebody else and is refused; only files with the names
above are ever removed. Correctness rests on renaming alone: parts and the whole file are written
under other names and then renamed. The locks save work: no two processes make the same part, and
one process joins them. The kernel releases the locks of a process that dies, so none are stale;
where a file system has no locks, a part may be made twice, with the same result.
"""

import contextlib
import errno
import gzip
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from regard.atomic_file import open_atomically, write_atomically
from regard.cli.corpus.corpus_file import CorpusFile, Run
from regard.seq2seq.distributed.launch import Process

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FORMAT = "regard translation parts 1"
MANIFEST, CLAIMS = "manifest.json", "claims"
PARTS = "parts"  # the entry of a job that says how many there are
POLL = 0.5  # seconds between two looks at what the other processes have finished
_FOLDER = 0  # the byte that is the folder's own lock
_PART = re.compile(r"part-(\d{6,})\.([0-9a-f]{32})")
_DRAFT = re.compile(r"\..+\.[0-9a-f]{12}\.new")  # what a killed process leaves, see atomic_file.py


class Parts:
    """The parts of a file, started or resumed.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> out = Path(tempfile.mkdtemp()) / "out.txt"
        >>> job = {"parts": 2, "beam": 5}
        >>> with Parts(out, job) as parts:
        ...     parts.write(1, "deux\\n")
        ...     parts.missing()
        [0]
        >>> with Parts(out, job) as parts:  # another process, or a later one
        ...     with parts.claim(0) as mine:
        ...         if mine:
        ...             parts.write(0, "un\\n")
        ...     parts.join()
        True
        >>> out.read_text()
        'un\\ndeux\\n'

    Args:
        out: the file; where its name ends in .gz, it is compressed.
        job: what the file is made of and how, in JSON types: parts of another job are not reused.
            `job["parts"]` says how many there are.
        stays: whether the manifest stays when the file is whole, so that a process which starts
            late can tell that there is nothing left to do.

    Raises:
        ValueError: the folder is not one of ours, or its parts are those of another job.
        OSError: the folder cannot be made.
    """

    def __init__(self, out: Path, job: Mapping[str, Any], *, stays: bool = False) -> None:
        self.out, self.job, self.stays = out.resolve(), dict(job), stays
        self.count = int(job[PARTS])
        self.folder = folder_of(out)
        while True:
            check_place(self.out)
            self.folder.mkdir(exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
            try:
                self._claims = os.open(self.folder / CLAIMS, flags, 0o666)
            except FileNotFoundError:  # another process has just removed the folder
                continue
            with contextlib.ExitStack() as unless_begun:
                unless_begun.push(self.__exit__)
                with self._locked(_FOLDER, wait=True):
                    if self._same_folder():
                        self._begin()
                        unless_begun.pop_all()
                        return

    def __enter__(self) -> "Parts":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._claims)  # this releases all locks of this process

    def missing(self) -> list[int]:
        """The parts that are still to be made; none, once the whole file is there."""
        there = self._finished()
        missing = [index for index in range(self.count) if index not in there]
        # In this order: the manifest says that all is done before the first part is removed.
        return missing if missing and self.unfinished() else []

    def needs(self, index: int) -> bool:
        """Whether a part is still to be made."""
        return index not in self._finished() and self.unfinished()

    def claim(self, index: int) -> contextlib.AbstractContextManager[bool]:
        """Locks a part while this process works on it; gives whether it got the lock."""
        return self._locked(1 + index, wait=False)

    def is_free(self, index: int) -> bool:
        """Whether no other process is working on a part."""
        with self.claim(index) as mine:
            return mine

    def write(self, index: int, text: str) -> None:
        """Writes a part completely or not at all; when this returns, it is on the disk."""
        data = text.encode()
        if self.out.suffix == ".gz":  # compressed one by one; joined, they are a gzip file too
            data = gzip.compress(data, mtime=0)
        digest = _hash(data).hexdigest()
        write_atomically(self.folder / f"part-{index:06d}.{digest}", data)

    def join(self) -> bool:
        """Joins the parts as the file, unless another process has done it.

        A part whose content is not that of its digest (a disk that lost power, a copy that was cut
        short) is removed instead, and is missing again.

        Returns:
            Whether this call joined them.
        """
        with self._locked(_FOLDER, wait=True):
            if not self.unfinished():
                return False
            there = self._finished()
            try:
                with open_atomically(self.out, draft_folder=self.folder) as whole:
                    for index in range(self.count):
                        data = there[index].read_bytes()
                        if not there[index].name.endswith(_hash(data).hexdigest()):
                            raise _DamagedPart(there[index])
                        whole.write(data)
                    size = whole.tell()
            except _DamagedPart as damaged:
                damaged.path.unlink(missing_ok=True)
                return False
            except (FileNotFoundError, KeyError):  # without locks, another may have cleaned up
                if self.unfinished():
                    raise
                return False
            self._write_manifest(whole=size)
            self._clear()
            if not self.stays:
                for name in (MANIFEST, CLAIMS):
                    (self.folder / name).unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # somebody else has put something into it
                    self.folder.rmdir()
            return True

    def unfinished(self) -> bool:
        """Whether the file is still to be made or joined, and nobody has begun another job."""
        found = read_manifest(self.out)
        return found is not None and found["whole"] is None and found["job"] == self.job

    def _begin(self) -> None:
        """With the folder's lock: resumes what is there, or starts anew."""
        found = read_manifest(self.out)
        if found is not None and found["whole"] is None:
            if found["job"] != self.job:
                raise ValueError(_refusal(self.folder, found["job"], self.job))
            return
        self._clear()  # first: parts of an earlier job must never stand beside a new manifest
        if found is None or found["job"] != self.job or not self._is_there(found["whole"]):
            self._write_manifest(whole=None)

    def _is_there(self, size: int) -> bool:
        try:
            return self.out.stat().st_size == size
        except FileNotFoundError:
            return False

    def _finished(self) -> dict[int, Path]:
        """The files of the finished parts, by number."""
        try:
            found = map(_PART.fullmatch, os.listdir(self.folder))
        except FileNotFoundError:  # whole, and cleaned up
            return {}
        return {int(name[1]): self.folder / name[0] for name in found if name}

    def _write_manifest(self, whole: int | None) -> None:
        told = {"format": FORMAT, "job": self.job, "whole": whole}
        write_atomically(self.folder / MANIFEST, json.dumps(told, indent=1) + "\n")

    def _clear(self) -> None:
        for name in os.listdir(self.folder):
            if _PART.fullmatch(name) or _DRAFT.fullmatch(name):
                (self.folder / name).unlink(missing_ok=True)

    def _same_folder(self) -> bool:
        """Whether the open claims file is still the one that other processes see."""
        try:
            return os.path.samestat(os.fstat(self._claims), os.stat(self.folder / CLAIMS))
        except FileNotFoundError:
            return False

    @contextlib.contextmanager
    def _locked(self, byte: int, wait: bool) -> Iterator[bool]:
        if fcntl is None:
            yield True
            return
        how = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
        try:
            fcntl.lockf(self._claims, how, 1, byte)
        except OSError as error:
            # Another process has it; or there are no locks here, and then every claim is granted.
            yield error.errno not in (errno.EAGAIN, errno.EACCES)
            return
        try:
            yield True
        finally:
            fcntl.lockf(self._claims, fcntl.LOCK_UN, 1, byte)


def run_corpus(
    file: CorpusFile,
    parts: Parts,
    process: Process,
    make: Callable[[Run], str],
    *,
    done: Callable[[Run], None] = lambda run: None,
    waits: Callable[[int], None] = lambda count: None,
) -> bool:
    """Makes parts until none is missing, and joins them.

    The processes share nothing but the folder of the parts. Each makes the parts that are its own
    by their number, then those that nobody is working on, whosever they are: a process that was
    killed, or that never started, costs time and nothing else.

    Args:
        file: what to translate.
        parts: of the translation, one for each run of the file.
        process: which one this is; process i of N begins with the parts i, i + N, i + 2N, ...
        make: translates a run, its lines ended by "\\n".
        done: called with each run that was made here.
        waits: called, now and then, with the number of parts that other processes are working on,
            where nothing else is left.

    Returns:
        Whether this process is the one that joined them.
    """
    wanted = [index for index in parts.missing() if index % process.count == process.number]
    while True:
        for run in _among(file, wanted):
            # Asked twice: another process may have finished it between the two questions.
            if not parts.needs(run.index):
                continue
            with parts.claim(run.index) as mine:
                if mine and parts.needs(run.index):
                    parts.write(run.index, make(run))
                    done(run)
        missing = parts.missing()
        if not missing:
            joined = parts.join()
            if joined or not parts.unfinished():
                return joined
            missing = parts.missing()  # a damaged part was removed
        wanted = [index for index in missing if parts.is_free(index)]
        if not wanted:
            waits(len(missing))
            time.sleep(POLL)


def _among(file: CorpusFile, wanted: list[int]) -> Iterator[Run]:
    """The runs with some numbers; the file is read no further than the last of them."""
    if not wanted:
        return
    among, last = frozenset(wanted), max(wanted)
    for run in file.runs():
        if run.index in among:
            yield run
        if run.index == last:
            return


def check_place(out: Path) -> None:
    """Raises at the beginning what would fail only at the end.

    Raises:
        OSError: `out` is a folder, or its folder is missing.
        ValueError: the folder for its parts was not made by us: what is in it is the user's.
    """
    out, folder = out.resolve(), folder_of(out)
    if out.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(out))
    if not out.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(out))
    try:
        names = set(os.listdir(folder))
    except FileNotFoundError:
        if not folder.is_symlink():
            return
        names = set()
    # Another process may have made the folder just now, and not have written the manifest yet.
    started = all(name == CLAIMS or _DRAFT.fullmatch(name) for name in names)
    if folder.is_symlink() or not (MANIFEST in names or started):
        raise ValueError(
            f"{folder} is needed for the parts of the translation, and regard did not make it. "
            f"{_fix(folder)}"
        )
    read_manifest(out)


def folder_of(out: Path) -> Path:
    """The folder of a file's parts, beside it.

    Example:
        >>> folder_of(Path("/data/out.txt.gz")).name
        'out.txt.gz.parts'
    """
    out = out.resolve()  # where a link points to
    return out.with_name(out.name + ".parts")


def read_manifest(out: Path) -> dict[str, Any] | None:
    """What is known of a file that is made in parts: its "job", and the length of the "whole".

    Returns:
        None where there is no manifest.

    Raises:
        ValueError: the manifest is not one of ours, or its folder is a symbolic link.
    """
    path = folder_of(out) / MANIFEST
    try:
        found = json.loads(path.read_bytes())
        if found["format"] != FORMAT or path.parent.is_symlink():
            raise ValueError
        return {"job": dict(found["job"]), "whole": found["whole"]}
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
