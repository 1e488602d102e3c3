"""A file that is made in parts, by any number of processes, any of which may be killed.

Beside `out.txt` stands the folder `out.txt.parts`:

manifest.json        what is being made, and from what; once it is whole, how long it is
claims               empty; a process that works on part i holds a lock on its byte i + 1
part-000000 ...      what is made already

What is right rests on renaming alone: a part is written beside its place and moved there, and so is
the whole. The locks save work: no two processes make the same part, and one joins them. The kernel
takes a lock from a process that dies, however it dies, so there are no stale ones; where a file
system has no locks, a part may be made twice, and is the same.
"""

import contextlib
import errno
import gzip
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MANIFEST, CLAIMS = "manifest.json", "claims"
PARTS = "parts"  # the entry of a job that says how many there are
_FOLDER = 0  # the byte that is the folder's own lock


class Parts:
    """The parts of a file, begun or gone on with.

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
        out: the file; where its name ends in .gz, it is packed.
        job: what the file is made of and how, as JSON has it: parts of another job are not taken
            for this one's. `job["parts"]` says how many there are.
        stays: whether the manifest stays when the file is whole, so that a process which comes late
            can tell that there is nothing left to do.

    Raises:
        ValueError: the parts that are there are of another job.
        OSError: the folder cannot be made.
    """

    def __init__(self, out: Path, job: Mapping[str, Any], *, stays: bool = False) -> None:
        self.out, self.job, self.stays = out.resolve(), dict(job), stays
        self.count = int(job[PARTS])
        self.folder = folder_of(out)
        _check_place(self.out)
        while True:
            self.folder.mkdir(exist_ok=True)
            try:
                self._claims = open(self.folder / CLAIMS, "ab")  # noqa: SIM115, held to the end
            except FileNotFoundError:  # another process was just cleaning up
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
        self._claims.close()  # and with it go all claims of this process

    def missing(self) -> list[int]:
        """The parts that are still to be made; none, once the whole is there."""
        try:
            there = set(os.listdir(self.folder))
        except FileNotFoundError:  # whole, and cleaned up
            return []
        missing = [index for index in range(self.count) if _name(index) not in there]
        # In this order: the manifest says that all is done before the first part is removed.
        return missing if missing and self.unfinished() else []

    def needs(self, index: int) -> bool:
        """Whether a part is still to be made."""
        return not (self.folder / _name(index)).exists() and self.unfinished()

    def claim(self, index: int) -> contextlib.AbstractContextManager[bool]:
        """Around the work on a part: whether it is this process's to do."""
        return self._locked(1 + index, wait=False)

    def is_free(self, index: int) -> bool:
        """Whether nobody is at work on a part."""
        with self.claim(index) as mine:
            return mine

    def write(self, index: int, text: str) -> None:
        """A part is there when this returns, whatever happens then, and not before it is whole."""
        data = text.encode()
        if self.out.suffix == ".gz":  # packed one by one, and joined they are a gzip file too
            data = gzip.compress(data, mtime=0)
        self._put(self.folder / _name(index), data)

    def join(self) -> bool:
        """Puts the parts together as the file, unless another process has done it.

        Returns:
            Whether it was this one.
        """
        with self._locked(_FOLDER, wait=True):
            if not self.unfinished():
                return False
            draft = self._draft(self.out.name)
            try:
                with open(draft, "xb") as whole:
                    for index in range(self.count):
                        with open(self.folder / _name(index), "rb") as part:
                            shutil.copyfileobj(part, whole, 1 << 20)
                    _to_disk(whole)
                    size = whole.tell()
                self._move(draft, self.out)
            except FileNotFoundError:  # without locks, two may join, and one of them clean up
                if self.unfinished():
                    raise
                return False
            finally:
                draft.unlink(missing_ok=True)
            self._tell(whole=size)
            self._clear()
            if not self.stays:
                for name in (MANIFEST, CLAIMS):
                    (self.folder / name).unlink(missing_ok=True)
                self.folder.rmdir()
            return True

    def _begin(self) -> None:
        """With the folder's lock: goes on with what is there, or begins anew."""
        found = read_manifest(self.out)
        if found is not None and found["whole"] is None:
            if found["job"] != self.job:
                raise ValueError(_refusal(self.folder, found["job"], self.job))
            return
        if found is not None and found["job"] == self.job and self._is_there(found["whole"]):
            self._clear()  # the one who joined them may not have come to it
            return
        self._clear()  # first: parts of an earlier job must never stand beside a new manifest
        self._tell(whole=None)

    def _is_there(self, size: int) -> bool:
        try:
            return self.out.stat().st_size == size
        except FileNotFoundError:
            return False

    def unfinished(self) -> bool:
        """Whether the whole is still to be made or joined, and nobody has begun another."""
        found = read_manifest(self.out)
        return found is not None and found["whole"] is None and found["job"] == self.job

    def _tell(self, whole: int | None) -> None:
        told = json.dumps({"job": self.job, "whole": whole}, indent=1) + "\n"
        self._put(self.folder / MANIFEST, told.encode())

    def _clear(self) -> None:
        for name in os.listdir(self.folder):
            if name not in (MANIFEST, CLAIMS):
                (self.folder / name).unlink(missing_ok=True)

    def _put(self, path: Path, data: bytes) -> None:
        draft = self._draft(path.name)
        try:
            with open(draft, "xb") as file:
                file.write(data)
                _to_disk(file)
            self._move(draft, path)
        finally:
            draft.unlink(missing_ok=True)  # of a full disk, say

    def _move(self, draft: Path, path: Path) -> None:
        os.replace(draft, path)
        if os.name == "posix":  # the new name should outlast the power as well
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _draft(self, name: str) -> Path:
        """A name in the folder that no other process has; what is left of them goes in the end."""
        return self.folder / f"{name}.{secrets.token_hex(6)}.new"

    def _same_folder(self) -> bool:
        """Whether the claims are those that other processes see, and not just cleaned up."""
        try:
            return os.path.samestat(os.fstat(self._claims.fileno()), os.stat(self.folder / CLAIMS))
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


def folder_of(out: Path) -> Path:
    """The folder of a file's parts, beside it.

    Example:
        >>> folder_of(Path("/data/out.txt.gz")).name
        'out.txt.gz.parts'
    """
    out = out.resolve()  # where a link points to
    return out.with_name(out.name + ".parts")


def read_manifest(out: Path) -> dict[str, Any] | None:
    """What is said of a file that is made in parts: its "job", and how long the "whole" is.

    Returns:
        None where there is no manifest.
    """
    path = folder_of(out) / MANIFEST
    try:
        found = json.loads(path.read_bytes())
        return {"job": dict(found["job"]), "whole": found["whole"]}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{path} is not a manifest of regard's. Fix: remove the folder, or another --out."
        ) from None


def _name(index: int) -> str:
    return f"part-{index:06d}"


def _check_place(out: Path) -> None:
    """What would go wrong in the end is said at the beginning."""
    if out.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(out))
    if not out.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(out))


def _to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _refusal(folder: Path, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    names = [name for name in {**theirs, **mine} if theirs.get(name) != mine.get(name)]
    listed = ", ".join(f"{name} {theirs.get(name)}, not {mine.get(name)}" for name in names)
    return (
        f"the unfinished parts in {folder} were made with {listed}. "
        "Fix: the same again goes on with them; remove the folder to begin anew."
    )
