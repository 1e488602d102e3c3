"""The `regard` command: one file per subcommand.

The command is an extra, so that the library itself stays small. This file imports nothing outside
the standard library: it must be able to say what to install when the extra is missing.
"""

import contextlib
import os
import sys

__all__ = ["main"]

#: What the command line itself is made of, and comes with every extra that has a subcommand.
_CLI_PACKAGES = ("rich", "typer")

_EXTRAS = {
    "bench": "bench",
    "serve": "serve",
    **dict.fromkeys(("demo", "train", "translate", "align", "evaluate", "export"), "translate"),
}

BROKEN_PIPE = 128 + 13  # the exit code of a process that SIGPIPE ends


def main() -> None:
    """Run the `regard` command, or say how to install what it needs."""
    _open_closed_streams()
    if sys.stdout is None:
        _fail("error: stdout is closed. Fix: > FILE, or > /dev/null.", 2)
    try:
        from regard.cli.app import app
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in _CLI_PACKAGES:
            raise
        # A subcommand that needs more than the bare command has an extra of its own.
        extra = _EXTRAS.get("".join(sys.argv[1:2]), "cli")
        _fail(
            f"The regard command needs {package}, which is not installed.\n"
            f'Install it with: pip install "regard[{extra}]"'
        )
    except KeyboardInterrupt:
        _fail("stopped.", 130)
    try:
        app(prog_name="regard")
    except SystemExit as end:
        # Both Typer and Rich end a broken pipe (`| head -1`) by SystemExit, with exit code 1.
        broken = isinstance(end.__context__, BrokenPipeError)
        code = BROKEN_PIPE if broken else end.code
    except BrokenPipeError:
        code = BROKEN_PIPE
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        _fail(f"error: {error.strerror}: stdout")  # such as a full disk
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = BROKEN_PIPE
    except OSError as error:
        _fail(f"error: {error.strerror}: stdout")
    if code == BROKEN_PIPE:
        _discard_output()
    sys.exit(code)


def _open_closed_streams() -> None:
    """Opens /dev/null where stdin, stdout or stderr is closed.

    Otherwise the next file that is opened takes the number of the stream, and is overwritten by
    whatever is printed.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, open to the end of the process


def _fail(message: str, code: int = 1) -> None:
    print(message, file=sys.stderr)
    _discard_output()
    sys.exit(code)


def _discard_output() -> None:
    """What is still buffered would fail again when Python exits, with a message of its own."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
