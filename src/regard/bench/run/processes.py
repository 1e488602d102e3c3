"""One process for each framework, so that none takes the device's memory from another.

The parent (first half) never touches the device. When a process dies or stops answering, the group
that it was measuring becomes rows with the reason, and a new process measures the other groups.
The worker (second half) reads its request from standard input and answers with lines of JSON of
one key: "ready" when the device has answered (with its description), "watch" for progress, "rows"
for a measured group, "error" when it cannot start, "sick" when its device no longer answers and
another process has to take over, and "done" last.
"""

import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp

from regard.bench.cases.case import Case, Device
from regard.bench.peers import jax_peers as peers
from regard.bench.results.record import describe_device
from regard.bench.run.measure import Row, Settings, Watch, in_table_order, measure_groups, plan
from regard.bench.run.timing import DeviceClock, Timing

WORKER = [sys.executable, "-c", "from regard.bench.run.processes import work; work()"]
READING = 0.02  # seconds of one reading of the device's clock
SILENCE = 180.0  # seconds without a message after which a process is killed: a kernel may hang
THREADS = os.cpu_count() or 8  # compute expected results, and compile; torch's compiler needs one
SHARES = {"jax": 0.6, "torch": 0.75, "flex": 1.0}  # of the time limit, at the end of each process

Messages = Iterator[tuple[str, Any]]
Save = Callable[[list[Row], dict[str, Any] | None], None]


def measure_in_processes(
    cases: Sequence[Case],
    settings: Settings,
    watch: Watch,
    reading: float = READING,
    save: Save = lambda rows, device: None,
) -> tuple[list[Row], dict[str, Any] | None]:
    """Measures the cases, each framework in a process of its own, one after the other.

    Args:
        cases: what to measure, all for one device.
        settings: only `repeats`, `budget`, `quick`, `batch` and `limit` are used. Under a
            limit, torch measures only those groups that JAX reached.
        watch: called with the status.
        reading: seconds of one reading of the clock.
        save: called with the rows in table order and the device after each group.

    Returns:
        The rows in table order, and the device as JAX's process described it; None when that
        process could not start.
    """
    start, device = time.monotonic(), None
    rows: list[Row] = []
    for framework in dict.fromkeys(peers.framework(who) for _, who in plan(cases)):
        settings_sent = {
            "repeats": settings.repeats,
            "budget": settings.budget,
            "quick": settings.quick,
            "framework": framework,
            "solvers": THREADS,
            "builders": THREADS if framework == "jax" else 1,
            "batch": settings.batch,
        }
        reached = {row.group for row in rows}
        others = [case for case in cases if framework == "jax" or case.group in reached]
        deadline = math.inf
        if settings.limit is not None:
            deadline = start + settings.limit * SHARES[framework]
        for found, described in _run_framework(
            others, framework, settings_sent, reading, watch, deadline
        ):
            rows += found
            device = described if framework == "jax" else device
            save(in_table_order(cases, rows), device)
    return in_table_order(cases, rows), device


def _run_framework(
    cases: Sequence[Case],
    framework: str,
    settings: dict[str, Any],
    reading: float,
    watch: Watch,
    deadline: float,
) -> Iterator[tuple[list[Row], dict[str, Any] | None]]:
    """The rows of each group as soon as they are there, and the device."""
    left = list(dict.fromkeys(case.group for case, _ in plan(cases, framework)))
    device = None
    while left and time.monotonic() < deadline:
        request = {
            "cases": [asdict(case) for case in cases if case.group in left],
            "settings": settings,
            "reading": reading,
        }
        began, over, reason = False, False, ""
        for kind, content in _converse(request, environment(framework, cases[0].device), deadline):
            if kind == "ready":
                began, device = True, content
            elif kind == "watch":
                watch(f"{framework}: {content}", 0.0)
            elif kind == "rows":
                measured = [read_row(fields) for fields in content]
                left.remove(measured[0].group)
                for row in measured:
                    watch(f"  {describe(row)}", 0.0)
                yield measured, device
            elif kind == "sick":
                over = True  # this group is measured; the next process takes the others
            else:
                reason = content
        if over or not left:
            continue
        if time.monotonic() >= deadline:
            watch(f"{framework}: time is up, {len(left)} groups are not reached", 0.0)
            return
        # A process that could not start will not start the next time.
        lost = left[:1] if began else list(left)
        watch(f"{framework}: lost {', '.join(lost)}: {reason}", 0.0)
        left = [group for group in left if group not in lost]
        yield (
            [
                Row(case.name, who, group=case.group, absent=f"failed: {reason}")
                for case, who in plan(cases, framework)
                if case.group in lost
            ],
            device,
        )


def describe(row: Row) -> str:
    """A row in one line, as a status message.

    >>> describe(Row("case", "book", absent="not here"))
    'case, book: not here'
    """
    parts = [row.absent] if row.absent else []
    if row.timing:
        parts.append(f"{1e3 * row.timing.median:.4g} ms")
    if row.tflops:
        parts.append(f"{row.tflops:.0f} TFLOP/s")
    if row.error is not None:
        parts.append(f"error {row.error:.1e}")
    return f"{row.case}, {row.who}: {', '.join(parts) or 'compiled'}"


def environment(framework: str, device: Device) -> dict[str, str]:
    """The environment of a framework's process."""
    # In torch's process JAX only makes masks, on the CPU.
    on_gpu = framework == "jax" and device == "gpu"
    source = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    # JAX refuses the old and the new name of the memory fraction together.
    inherited = {k: v for k, v in os.environ.items() if k != "XLA_PYTHON_CLIENT_MEM_FRACTION"}
    return inherited | {
        "JAX_PLATFORMS": "cuda" if on_gpu else "cpu",
        "OPENBLAS_NUM_THREADS": "2",  # several results are computed at once
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_CLIENT_MEM_FRACTION": "0.95",
        "PYTHONPATH": path,
    }


def _converse(request: dict[str, Any], env: dict[str, str], deadline: float) -> Messages:
    """The messages of one process; last, if it ended early or was ended, the reason."""
    with tempfile.TemporaryFile("w+") as asked:
        json.dump(request, asked)
        asked.seek(0)
        process = subprocess.Popen(WORKER, stdin=asked, stdout=subprocess.PIPE, text=True, env=env)
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read_lines, args=(process.stdout, lines), daemon=True)
    reader.start()
    try:
        while (line := lines.get(timeout=_patience(deadline))) is not None:
            ((kind, content),) = json.loads(line).items()
            if kind == "done":
                return
            yield kind, content
        yield "ended", f"its process ended with code {process.wait()}"
    except queue.Empty:
        yield "ended", f"its process said nothing for {SILENCE:.0f} s"
    finally:
        process.kill()
        process.wait()
        reader.join(timeout=5)  # a compiler's subprocess may keep the pipe open


def _patience(deadline: float) -> float:
    """Seconds to wait for the next message."""
    return max(0.0, min(SILENCE, deadline - time.monotonic()))


def _read_lines(stream: IO[str], lines: "queue.Queue[str | None]") -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


Send = Callable[[str, Any], None]


def work() -> None:
    """The worker: answers the request on standard input."""
    send = _sender()
    answer(json.load(sys.stdin), send)
    send("done", None)


def answer(request: dict[str, Any], send: Send) -> None:
    """Measures the cases of a request and reports by `send`."""
    clock = DeviceClock(least=request["reading"])
    settings = Settings(clock=clock, reading=clock.least, **request["settings"])
    try:
        send("ready", describe_device())
    except Exception as error:  # no such device or plugin: JAX raises several types
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
    """Forwards status messages, except those of single runs."""

    def watch(what: str, further: float) -> None:
        if not further:
            send("watch", what)

    return watch


def _sender() -> Send:
    """Messages go to the original stdout; all else that is printed there goes to stderr."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    one_at_a_time = threading.Lock()

    def send(kind: str, content: Any) -> None:
        with one_at_a_time:
            channel.write(json.dumps({kind: content}) + "\n")
            channel.flush()

    return send


def _device_answers() -> bool:
    """Whether the device still works: after an illegal access, it fails for the whole process."""
    torch = sys.modules.get("torch")
    try:
        jax.block_until_ready(jnp.zeros(1) + 1)
        if torch is not None and torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def read_case(fields: dict[str, Any]) -> Case:
    """A case from JSON; `dataclasses.asdict` writes it."""
    return Case(**fields | {"against": tuple(fields["against"])})


def write_row(row: Row) -> dict[str, Any]:
    """A row for JSON.

    >>> read_row(write_row(Row("case", "book", timing=Timing((1.0, 2.0))))).timing
    Timing(seconds=(1.0, 2.0))
    """
    return vars(row) | {"timing": row.timing and row.timing.seconds}


def read_row(fields: dict[str, Any]) -> Row:
    """A row from JSON."""
    seconds = fields["timing"]
    return Row(**fields | {"timing": Timing(tuple(seconds)) if seconds else None})
