"""A last line on standard error from a process that is not asked any more.

When another process of a run is gone, JAX's coordination service ends this one where it stands,
by abort() from a thread of its own, behind twenty lines of stack. No Python code runs after that.
So a small helper process holds the other end of a pipe: the C half of Python's signal handling
writes the signal's number into it even then, and the helper says the words.
"""

import os
import signal
import subprocess
import sys
from types import TracebackType

# Control characters are signals' numbers; the last line before an abort's is what to say.
_HELPER = """
import os, sys
heard = b""
while piece := os.read(0, 4096):
    heard += piece
    if bytes([int(sys.argv[1])]) in heard:
        words = heard.split(bytes([int(sys.argv[1])]))[0].split(b"\\n")[-2]
        os.write(2, bytes(byte for byte in words if byte >= 32) + b"\\n")
        break
"""


class LastWords:
    """Words that are said if this process is aborted: `with LastWords("...") as words:`.

    From the main thread only. At the end everything is as it was before.

    Args:
        words: one line.
    """

    def __init__(self, words: str) -> None:
        self._words = words

    def __enter__(self) -> "LastWords":
        hears, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        command = [sys.executable, "-I", "-S", "-c", _HELPER, str(int(signal.SIGABRT))]
        # A session of its own: Ctrl-C is not meant for it.
        self._helper = subprocess.Popen(
            command, stdin=hears, stdout=subprocess.DEVNULL, start_new_session=True
        )
        os.close(hears)
        self._handler = signal.signal(signal.SIGABRT, lambda number, frame: None)
        self._wakeup = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
        self.change(self._words)
        return self

    def change(self, words: str) -> None:
        """Other words from now on."""
        os.write(self._pipe, " ".join(words.split()).encode() + b"\n")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.set_wakeup_fd(self._wakeup)
        signal.signal(signal.SIGABRT, self._handler)
        os.close(self._pipe)
        self._helper.wait()
