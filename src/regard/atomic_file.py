"""Atomic file writing: a reader sees the old file or the complete new one, never a part of it.

The only definition of this in the package. It needs nothing outside the standard library.
"""

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

# Windows has no O_NOFOLLOW, and only Windows distinguishes binary files.
_FLAGS = (
    os.O_WRONLY
    | os.O_CREAT
    | os.O_EXCL
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)


def write_atomically(
    path: str | os.PathLike[str], write: bytes | str | Callable[[BinaryIO], None]
) -> None:
    """Writes a file completely or not at all.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from regard.atomic_file import write_atomically
        >>> path = Path(tempfile.mkdtemp()) / "notes.txt"
        >>> write_atomically(path, "Où ?")
        >>> write_atomically(path, lambda file: None if file.write(b"new") else None)
        >>> path.read_text(), [file.name for file in path.parent.iterdir()]
        ('new', ['notes.txt'])

    Args:
        path: the file to write or replace. A symbolic link at this path is replaced, not followed.
        write: the content (text is encoded as UTF-8), or a function that writes it to the open
            binary file it is given.

    Raises:
        OSError: the file cannot be written; `filename` is `path`. An existing file is unchanged.
    """
    with open_atomically(path) as file:
        if isinstance(write, str):
            file.write(write.encode("utf-8"))
        elif isinstance(write, bytes):
            file.write(write)
        else:
            write(file)


@contextlib.contextmanager
def open_atomically(
    path: str | os.PathLike[str], *, draft_folder: Path | None = None
) -> Iterator[BinaryIO]:
    """Opens a file for writing that appears at `path` when the `with` block ends without error.

    The content goes to a draft in the same folder, under a new random name, so that neither a
    planted symbolic link nor another process can redirect it. The draft is flushed to the disk
    before it takes the place of the old file, and is removed on any failure.

    Args:
        path: as for `write_atomically`.
        draft_folder: another folder of the same file system to keep the draft in.

    Raises:
        OSError: as for `write_atomically`.
    """
    path = Path(path)
    # Part of the name only: together with the suffix it must not exceed the file system's limit.
    draft = (draft_folder or path.parent) / f".{path.name[:40]}.{secrets.token_hex(6)}.new"
    try:
        with named_errors(path, draft):
            descriptor = os.open(draft, _FLAGS, 0o666)  # the kernel applies the umask
            with open(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
            sync_folder(path.parent)
    finally:
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def named_errors(path: Path, draft: Path | None = None) -> Iterator[None]:
    """Makes system errors name a file: `No space left on device` alone does not say where.

    Args:
        path: the name for errors without one, such as those of a write.
        draft: a temporary file; errors about it are reported under `path`, which the user knows.
    """
    try:
        yield
    except OSError as error:
        # Errors without a number are not the system's; a broken pipe is not about this file.
        system = error.errno is not None and not isinstance(error, BrokenPipeError)
        if system and error.filename in (None, str(draft)):
            error.filename, error.filename2 = str(path), None
        raise


def sync_folder(folder: Path) -> None:
    """Flushes a folder's entries to the disk, so that a renamed file survives a power failure."""
    if os.name == "nt":  # Windows cannot open a folder
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # Some network file systems cannot; the file itself has been flushed.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
