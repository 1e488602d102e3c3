"""What `regard train` prints and does when a signal ends it: Ctrl-C, or an abort inside JAX.

Python runs signal handlers in the main thread only, between two byte codes. While XLA compiles, or
after abort(), it does not run them at all. So both classes read the signal's number from the pipe
that the C half of Python's signal handling writes to: in a thread, or in a helper process.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType

GRACE = 15.0  # seconds that the main thread has to stop by itself
STOPPING = "stopping…"


class StopRequest:
    """Ctrl-C as a request to stop: `with StopRequest(...) as stop:` in the main thread.

    The first Ctrl-C prints "stopping…" at once. In a block of `stop.between_steps()` the work
    checks `stop.made()` and ends itself; elsewhere KeyboardInterrupt is raised. Where the main
    thread has not stopped after `grace` seconds (XLA may compile for minutes), and at a second
    Ctrl-C, the process exits at once. A run can be continued after it was killed at any moment, so
    nothing is lost but the steps since the last checkpoint.

    A process that is to stop ends with exit code 130 at the end of the block, without the
    teardown of the interpreter, in which the threads of JAX and Orbax have crashed.

    Args:
        last_line: makes the line that is printed when the process has stopped.
        grace: seconds.
    """

    def __init__(self, last_line: Callable[[], str], grace: float = GRACE) -> None:
        self._last_line, self._grace = last_line, grace
        self._made = threading.Event()
        self._deferred = False

    def made(self) -> bool:
        """Whether Ctrl-C was pressed."""
        return self._made.is_set()

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[None]:
        """Around work that checks `made()`: no KeyboardInterrupt is raised in the middle of it."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        if self.made():
            raise KeyboardInterrupt

    def __enter__(self) -> "StopRequest":
        # A process in the background of a shell script ignores Ctrl-C, and continues to.
        self._active = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
        if self._active:
            self._read, self._write = os.pipe()
            os.set_blocking(self._write, False)
            self._handler = signal.signal(signal.SIGINT, self._interrupt)
            self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._active:
            return
        signal.set_wakeup_fd(self._wakeup)
        if not self.made():
            signal.signal(signal.SIGINT, self._handler)
        os.close(self._write)
        self._thread.join()
        os.close(self._read)
        if self.made() and (error is None or isinstance(error, KeyboardInterrupt)):
            self._end()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._made.set()
        if not self._deferred:
            raise KeyboardInterrupt

    def _watch(self) -> None:
        presses = 0
        while True:
            timeout = self._grace if presses else None
            ready, _, _ = select.select([self._read], [], [], timeout)
            numbers = os.read(self._read, 64) if ready else b""
            if ready and not numbers:  # closed: the main thread has stopped
                return
            presses += numbers.count(int(signal.SIGINT))
            if presses == 1 and numbers:
                self._made.set()
                _say(f"\n{STOPPING} (Ctrl-C again: at once)")
            elif presses > 1 or not ready:
                if sys.stderr.isatty():
                    _say("\x1b[?25h")  # the progress bar has hidden the cursor
                self._end()

    def _end(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        _say(self._last_line())
        os._exit(130)


# Control characters are numbers of signals; the last line before an abort's is the message.
_HELPER = f"""
import os, sys
abort, interrupt = (bytes([int(number)]) for number in sys.argv[1:])
heard = b""
while piece := os.read(0, 4096):
    heard += piece
    if interrupt in piece:
        os.write(2, {STOPPING.encode()!r} + b"\\n")
    if abort in heard:
        message = heard.split(abort)[0].split(b"\\n")[-2]
        os.write(2, bytes(byte for byte in message if byte >= 32) + b"\\n")
        break
"""


class AbortMessage:
    """A line on stderr if this process is aborted: `with AbortMessage("...") as message:`.

    When another process of a run is gone, JAX's coordination service ends this one by abort() from
    a thread of its own, behind twenty lines of stack. No Python code runs after that, so a small
    helper process prints the line. From the main thread only; at the end of the block all signal
    handling is as it was before.

    Args:
        line: the message.
    """

    def __init__(self, line: str) -> None:
        self._line = line

    def __enter__(self) -> "AbortMessage":
        read, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        numbers = [str(int(number)) for number in (signal.SIGABRT, signal.SIGINT)]
        # In a session of its own, which Ctrl-C does not reach.
        self._helper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _HELPER, *numbers],
            stdin=read,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(read)
        self._handler = signal.signal(signal.SIGABRT, lambda number, frame: None)
        self._wakeup = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
        self.change(self._line)
        return self

    def change(self, line: str) -> None:
        """Another message from now on."""
        os.write(self._pipe, " ".join(line.split()).encode() + b"\n")

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        signal.signal(signal.SIGABRT, self._handler)
        os.close(self._pipe)
        self._helper.wait()


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # stderr may be closed
        os.write(2, f"{line}\n".encode())
