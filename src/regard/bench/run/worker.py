"""The process of one framework: reads what to measure from its input, tells what it finds.

Started by processes.py. Every message is a line of JSON with one key: "ready" when the device
has answered (with its description), "watch" for what is going on, "rows" for a measured group,
"error" when it cannot begin, "sick" when its device answers no more and another process has to go
on, and "done" last.
"""

import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from regard.bench.run.machine import describe_device
from regard.bench.run.measure import Settings, Watch, measure_groups
from regard.bench.run.timing import DeviceClock
from regard.bench.run.wire import read_case, write_row

Send = Callable[[str, Any], None]


def main() -> None:
    """Answers the request on standard input."""
    send = _sender()
    answer(json.load(sys.stdin), send)
    send("done", None)


def answer(request: dict[str, Any], send: Send) -> None:
    """Measures what a request asks for, telling everything by `send`."""
    clock = DeviceClock(least=request["reading"])
    settings = Settings(clock=clock, reading=clock.least, **request["settings"])
    try:
        send("ready", describe_device())
    except Exception as error:  # no such device, or no such plugin: JAX has several ways to say so
        words = (str(error).strip() or type(error).__name__).splitlines()[0]
        send("error", f"JAX finds no {os.environ.get('JAX_PLATFORMS')} device ({words})")
        return
    for rows in measure_groups(
        [read_case(case) for case in request["cases"]], settings, watch_by(send)
    ):
        send("rows", [write_row(row) for row in rows])
        if not _device_answers():
            send("sick", None)
            return


def watch_by(send: Send) -> Watch:
    """Passes on what is going on, but not every single run."""

    def watch(what: str, further: float) -> None:
        if not further:
            send("watch", what)

    return watch


def _sender() -> Send:
    """Messages go to what was the standard output; what others print there goes to the errors."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    one_at_a_time = threading.Lock()

    def send(kind: str, content: Any) -> None:
        with one_at_a_time:
            channel.write(json.dumps({kind: content}) + "\n")
            channel.flush()

    return send


def _device_answers() -> bool:
    """Whether the device can still be used: a kernel's bad access ends it for a whole process."""
    torch = sys.modules.get("torch")
    try:
        jax.block_until_ready(jnp.zeros(1) + 1)
        if torch is not None and torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    main()
