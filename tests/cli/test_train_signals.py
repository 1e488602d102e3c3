"""Ctrl-C and aborts, in processes of their own: what is said, when, and the exit code."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
WAIT = 600  # a busy machine takes long

# The main thread is inside C code that no signal interrupts, as it is while XLA compiles.
STUCK = """
import hashlib, sys
from regard.cli.train_signals import StopRequest
with StopRequest(lambda: "stopped.", grace=float(sys.argv[1])) as stop, stop.between_steps():
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 2_000_000_000)
"""

# The work asks between its steps, as training does; `finish` is what it does then.
STEPS = """
import sys, time
from regard.cli.train_signals import StopRequest
with StopRequest(lambda: "stopped.") as stop:
    if sys.argv[1] == "steps":
        with stop.between_steps():
            print("ready", flush=True)
            while not stop.made():
                time.sleep(0.01)
            print("checkpoint", flush=True)
    else:
        try:
            print("ready", flush=True)
            time.sleep(600)
        finally:
            print("raised", flush=True)
"""


@pytest.fixture(autouse=True)
def not_in_the_background():
    """A shell's background jobs ignore Ctrl-C, and so do their children; the tests may be one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def start(code: str, *words: object) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
    )
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_second_interrupt_ends_a_process_that_is_busy_at_once():
    process = start(STUCK, 600)
    process.send_signal(signal.SIGINT)
    begun = time.monotonic()
    assert process.stderr.readline() == "\n"
    assert process.stderr.readline().startswith("stopping…")
    assert time.monotonic() - begun < 5, "it is said at once"
    assert process.poll() is None, "one interrupt asks"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=WAIT)
    assert (process.returncode, err) == (130, "stopped.\n")
    assert time.monotonic() - begun < 20


def test_work_that_does_not_stop_in_time_is_ended():
    process = start(STUCK, 0.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=WAIT)
    assert process.returncode == 130
    assert err.endswith("stopped.\n")


@pytest.mark.parametrize(("where", "said"), [("steps", "checkpoint\n"), ("elsewhere", "raised\n")])
def test_one_interrupt_lets_the_work_end_itself(where, said):
    process = start(STEPS, where)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT)
    assert process.returncode == 130
    assert out == said
    assert "stopping…" in err
    assert err.endswith("stopped.\n")
    assert "Traceback" not in err


def test_without_an_interrupt_everything_is_as_before():
    from regard.cli.train_signals import StopRequest

    before = signal.getsignal(signal.SIGINT)
    with StopRequest(lambda: "stopped.") as stop, stop.between_steps():
        assert not stop.made()
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_an_aborted_process_prints_its_message_and_no_other_does():
    code = """
import os, sys
from regard.cli.train_signals import AbortMessage
with AbortMessage("not this one") as message:
    message.change("the\\nmessage")
    print("ready", flush=True)
    if sys.argv[1] == "abort":
        os.abort()
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), 9)
"""
    ends = {"abort": (-signal.SIGABRT, "the message\n"), "kill": (-9, ""), "end": (0, "")}
    for how, expected in ends.items():
        process = start(code, how)
        _, err = process.communicate(timeout=WAIT)
        assert (process.returncode, err) == expected, how
