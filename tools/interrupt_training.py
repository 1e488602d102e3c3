"""Kills and interrupts `regard train` at random moments, and verifies what each run leaves.

    python tools/interrupt_training.py --kills 60 --interrupts 30 --size small
    python tools/interrupt_training.py --interrupts 30 --size default --tsv pairs.tsv

A run is killed (SIGKILL) or interrupted (Ctrl-C) again and again, each time at a random moment
after it has begun to read its corpus, and continued. Every interrupt must end with exit code 130
and the command that continues the run. Each run that comes to its end must have the checkpoint,
the model and the log of an undisturbed run, bit for bit; then a new one is started. With `--size
default` runs are only interrupted and resumed, because they take long.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TextIO

SMALL = {
    "about": "Compiles three shapes, validates often and saves often: every phase takes its time.",
    "data": {"valid_sentences": 12},
    "tokenizer": {"kind": "word", "joint": False},
    "batches": {"tokens": 128, "buckets": [4, 6, 8]},
    "model": {"embedding": 8, "encoder": 8, "decoder": 16},
    "recipe": {
        "epochs": 9,
        "max_steps": 60,
        "learning_rate": 0.01,
        "validate_every": 10,
        "checkpoint_every": 3,
        "log_every": 1,
        "average": 2,
    },
}
COMMAND = "from regard.cli import main; main()"
TIMELESS = ("step", "epoch", "learning_rate", "train_loss", "valid_loss", "valid_bleu")


class Run:
    """`regard train` in a process, whose stderr is a file, so that it can be looked at."""

    def __init__(self, words: list[str], cache: Path) -> None:
        self.err = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = start(words, cache, self.err)

    def wait(self) -> str:
        self.process.communicate()
        self.err.seek(0)
        return self.err.read()

    def begun(self) -> bool:
        """Waits for the first line on stderr; False where the process ends before."""
        while os.fstat(self.err.fileno()).st_size == 0:
            if self.process.poll() is not None:
                return False
            time.sleep(0.01)
        return True


def start(words: list[str], cache: Path, err: TextIO) -> subprocess.Popen:
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PLATFORMS": "cpu",
        "PYTHONFAULTHANDLER": "1",
    }
    command = [sys.executable, "-c", COMMAND, "train", *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=err, env=environment)


def outcome(folder: Path) -> tuple:
    """What a finished run comes to: its last checkpoint, its model, its log without the times."""
    from regard.seq2seq.train.checkpoints import Store
    from regard.seq2seq.train.log import read_log

    store = Store(folder / "checkpoints")
    arrays = store.load(store.steps()[-1]).arrays
    log = [tuple(row[name] for name in TIMELESS) for row in read_log(folder / "log.csv")]
    weights = (folder / "model" / "model.safetensors").read_bytes()
    return {name: array.tobytes() for name, array in arrays.items()}, weights, log


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--interrupts", type=int, default=0)
    parser.add_argument("--size", choices=("small", "default"), default="small")
    parser.add_argument("--tsv", type=Path, help="the corpus; else a made-up one")
    parser.add_argument("--longest", type=float, default=60.0, help="s, with --size default")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    draw = random.Random(options.seed)
    work = Path(tempfile.mkdtemp(prefix="interrupt-"))
    cache = work / "cache"
    tsv = options.tsv or work / "pairs.tsv"
    if options.tsv is None:
        lines = [f"{'cat ' * (n % 6)}{n}\t{'chat ' * (n % 6)}{n}\n" for n in range(400)]
        tsv.write_text("".join(lines), encoding="utf-8")
    fresh = ["--tsv", str(tsv)]
    expected, longest = None, options.longest
    if options.size == "small":
        (work / "small.json").write_text(json.dumps(SMALL), encoding="utf-8")
        fresh += ["--recipe", str(work / "small.json")]
        for name in ("warm", "whole"):  # the second finds its programs compiled, as the others do
            running = Run([str(work / name), *fresh], cache)
            assert running.begun()
            begun = time.monotonic()
            err = running.wait()
            assert running.process.returncode == 0, err
            longest = time.monotonic() - begun
        expected = outcome(work / "whole")
    print(f"up to {longest:.1f} s after the first line, seed {options.seed}", flush=True)

    signals = ["kill"] * options.kills + ["interrupt"] * options.interrupts
    draw.shuffle(signals)
    run, finished, failures, phases, slowest = 0, 0, [], {}, 0.0

    def complete(running: Run, folder: Path) -> None:
        nonlocal run, finished
        err = running.wait()
        if running.process.returncode != 0:
            failures.append(f"{folder.name}: code {running.process.returncode}: {err[-2000:]}")
        elif expected is not None and outcome(folder) != expected:
            failures.append(f"{folder.name}: other numbers than the undisturbed run")
        else:
            finished += 1
        run += 1
        print(f"{finished} of {run} runs ended as the undisturbed one", flush=True)

    while signals:
        folder = work / f"run{run}"
        resumes = (folder / "settings.json").exists()
        running = Run([str(folder), *(["--resume"] if resumes else fresh)], cache)
        if running.begun():
            time.sleep(draw.uniform(0.0, 0.7 * longest))  # or many would end undisturbed
        if running.process.poll() is not None:
            complete(running, folder)
            continue
        what = signals.pop()
        running.process.send_signal(signal.SIGKILL if what == "kill" else signal.SIGINT)
        begun = time.monotonic()
        err = running.wait()
        if what == "kill":
            print("kill", flush=True)
            continue
        slowest = max(slowest, time.monotonic() - begun)
        code = running.process.returncode
        if code in (0, -signal.SIGINT) and (folder / "curves.png").exists():
            signals.append(what)  # the run had ended, and Python was shutting down
            continue
        begins = [line for line in err.splitlines() if line.startswith(("step ", "compiling"))]
        phase = begins[-1].split(" ")[0] if begins else "before the first step"
        phases[phase] = phases.get(phase, 0) + 1
        saves = (folder / "settings.json").exists()
        last = err.strip().splitlines()[-1] if err.strip() else ""
        promised = f"regard train {folder} --resume" if saves else "stopped."
        if code != 130 or promised not in last or "Traceback" in err:
            failures.append(f"{folder.name}: interrupt, code {code}: {err[-2000:]}")
        print(f"interrupt in {phase!r}: code {code}, {last!r}", flush=True)
    if options.size == "small":
        complete(Run([str(work / f"run{run}"), *(["--resume"] if
                 (work / f"run{run}" / "settings.json").exists() else fresh)], cache),
                 work / f"run{run}")  # fmt: skip
    print(f"{options.kills} kills, {options.interrupts} interrupts (slowest {slowest:.1f} s)")
    print(f"where the interrupts came, by the last line before them: {phases}")
    print(f"{finished} runs came to their end with the numbers of the undisturbed one")
    print("\n".join([f"{len(failures)} failures", *failures]))
    shutil.rmtree(work, ignore_errors=True)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
