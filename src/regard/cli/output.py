"""Where a command writes: stdout, or a file that is there only when it is whole."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO


@contextlib.contextmanager
def output(path: Path | None) -> Iterator[TextIO]:
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
        path: a file, written beside its place and moved there at the end, or removed if it does
            not come to that; a pipe or a device is written to as it is; None: stdout.
    """
    if path is None:
        if hasattr(sys.stdout, "reconfigure"):  # UTF-8, whatever the locale says
            sys.stdout.reconfigure(encoding="utf-8")
        yield sys.stdout
        sys.stdout.flush()  # a broken pipe shows here, not at exit
        return
    if path.exists() and not path.is_file() and not path.is_dir():
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            yield file  # moving a file to /dev/null would be the end of it
        return
    path = path.resolve()  # where a link points to
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with open(draft, "w", encoding="utf-8", newline="\n") as file:
            yield file
        os.replace(draft, path)
    except FileNotFoundError as error:
        if error.filename == str(draft):
            error.filename = str(path)  # the name that the user knows
        raise
    finally:
        draft.unlink(missing_ok=True)
