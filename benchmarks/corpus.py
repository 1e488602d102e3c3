"""A million lines translated by two processes, one of which is killed and started again.

    python benchmarks/corpus.py                    trains the demo's model, makes the lines, 30 min
    python benchmarks/corpus.py --model RUN        with a model that the demo's recipe has trained
    python benchmarks/corpus.py --folder DIR       keeps the lines and goes on with what is there
    python benchmarks/corpus.py --record           leaves results/translator/corpus-*.json

The lines are of the embedded grammar, which knows the French of each. So every line of the output
can be judged in its place: it is the grammar's own French, or what the model says of that English
line when it is asked again. A line that was lost, repeated or moved would show in all behind it.
"""

import argparse
import gzip
import itertools
import json
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REGARD = "from regard.cli import main; main()"
SHARD = 100_000  # lines by one seed, all distinct
POLL = 0.2  # seconds


def make_corpus(folder: Path, lines: int) -> tuple[Path, Path]:
    """English, packed, and the grammar's French; made by all cores, a seed for each shard."""
    english, french = folder / f"{lines}.en.gz", folder / f"{lines}.fr"
    if not french.exists():
        print(f"making {lines:,} lines ...", file=sys.stderr)
        shards = [(seed, min(SHARD, lines - seed * SHARD)) for seed in range(-(-lines // SHARD))]
        draft = french.with_suffix(".new")
        with (
            multiprocessing.get_context("spawn").Pool(cores()) as pool,
            gzip.open(english, "wt", encoding="utf-8", compresslevel=6) as sources,
            open(draft, "w", encoding="utf-8") as targets,
        ):
            for pairs in pool.imap(_shard, shards):
                sources.writelines(source + "\n" for source, _ in pairs)
                targets.writelines(target + "\n" for _, target in pairs)
        draft.rename(french)
    return english, french


def _shard(which: tuple[int, int]) -> list[tuple[str, str]]:
    from regard.seq2seq.corpus import Grammar

    seed, count = which
    return [(pair.source, pair.target) for pair in Grammar(count, scope="demo", seed=1 + seed)]


def train(folder: Path) -> Path:
    """The demo's model, from scratch."""
    run = folder / "run"
    if not (run / "model").is_dir():
        resume = ["--resume"] if run.exists() else ["--recipe", "demo"]
        print("training the demo's model ...", file=sys.stderr)
        subprocess.run([sys.executable, "-c", REGARD, "train", run, *resume], check=True)
    return run


class Translating:
    """One process of two, on a core of its own where there are two."""

    def __init__(self, number: int, words: list[str]) -> None:
        self.number, self.words = number, words
        self.peak = 0
        self.said = ""
        self.start()

    def start(self) -> None:
        core = {sorted(os.sched_getaffinity(0))[self.number % cores()]}
        self.process = subprocess.Popen(
            [sys.executable, "-c", REGARD, *self.words, "--process-id", str(self.number)],
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, core),
        )

    def look(self) -> None:
        """Notes the most memory that it has had; KiB."""
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
        except FileNotFoundError:
            return
        found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
        self.peak = max([self.peak, *map(int, found)])


def translate(english: Path, out: Path, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Two processes; the second is killed on the way and comes back after a while."""
    words = ["translate", "--model", str(model), "--in", str(english), "--out", str(out)]
    words += ["--beam", str(options.beam), "--processes", "2"]
    folder = out.with_name(out.name + ".parts")
    began, cpu = time.monotonic(), children_seconds()
    both = [Translating(number, words) for number in range(2)]
    victim = both[1]
    total: int | None = None
    killed_at: int | None = None
    back_at = float("inf")
    try:
        while any(one.process.poll() is None for one in both) or back_at < float("inf"):
            time.sleep(POLL)
            for one in both:
                one.look()
            if total is None:
                total = parts_wanted(folder)
            done = parts_done(folder)
            if killed_at is None and total and done >= options.kill_at * total:
                victim.process.kill()
                victim.process.communicate()
                killed_at, back_at = done, time.monotonic() + options.away
                print(f"killed one at {done} of {total} parts", file=sys.stderr)
            if time.monotonic() > back_at:
                back_at = float("inf")
                victim.start()
        said = [one.process.communicate()[1].strip().splitlines()[-1] for one in both]
        said = [line.replace(str(out), out.name) for line in said]
        if any(one.process.returncode for one in both):
            raise SystemExit(f"a process failed: {said}")
    finally:
        for one in both:
            one.process.kill()
    seconds = time.monotonic() - began
    if killed_at is None:
        raise SystemExit("nothing was killed: give it more lines.")
    return {
        "seconds": round(seconds, 1),
        "cpu_seconds": round(children_seconds() - cpu, 1),
        "parts": total,
        "parts_when_killed": killed_at,
        "seconds_away": options.away,
        "peak_mib": [round(one.peak / 1024) for one in both],
        "said": said,
    }


def parts_wanted(folder: Path) -> int | None:
    try:
        return json.loads((folder / "manifest.json").read_text())["job"]["parts"]
    except FileNotFoundError:
        return None


def parts_done(folder: Path) -> int:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return 0
    return sum(name.startswith("part-") and not name.endswith(".new") for name in names)


def judge(
    english: Path, french: Path, out: Path, model: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Every line in its place: the grammar's French, or what the model says when asked again."""
    from regard.seq2seq.decode.hypotheses import SearchOptions
    from regard.seq2seq.translator import Translator

    count = right = 0
    doubtful: list[tuple[int, str, str]] = []
    sample = set(random.Random(0).sample(range(options.lines), min(2000, options.lines)))
    asked: list[tuple[int, str, str]] = []
    for source, target, written in itertools.zip_longest(
        lines_of(english), lines_of(french), lines_of(out)
    ):
        if source is None or target is None or written is None:
            raise SystemExit(f"the files have not the same number of lines; one ends at {count:,}.")
        if written == target:
            right += 1
        else:
            doubtful.append((count, source, written))
        if count in sample:
            asked.append((count, source, written))
        count += 1
    print(f"{right:,} of {count:,} as the grammar has them; asking again ...", file=sys.stderr)
    translator, search = Translator.load(model), SearchOptions(beam=options.beam)
    again = {}
    for name, some in (("doubtful", doubtful), ("sample", asked)):
        found = translator.translate([source for _, source, _ in some], search=search)
        other = [
            {"line": number + 1, "source": source, "written": written, "again": best.text}
            for (number, source, written), (best, *_) in zip(some, found, strict=True)
            if best.text != written
        ]
        again[name] = {"asked": len(some), "same": len(some) - len(other), "other": other[:20]}
    return {"lines": count, "as_the_grammar_has_them": right, "asked_again": again}


def lines_of(path: Path) -> Iterator[str]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8", newline="\n") as file:
        for line in file:
            yield line.removesuffix("\n")


def children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cores() -> int:
    return len(os.sched_getaffinity(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a folder; without it, one is trained")
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--kill-at", type=float, default=0.4, help="when so much of it is done")
    parser.add_argument("--away", type=float, default=10, help="seconds until it comes back")
    parser.add_argument("--folder", type=Path, help="where lines and model are kept")
    parser.add_argument("--record", action="store_true", help="leave results/translator/corpus-*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        english, french = make_corpus(folder, options.lines)
        model = options.model or train(folder)
        out = folder / f"{options.lines}.translated"
        out.unlink(missing_ok=True)
        before = os.getloadavg()[0]
        run = translate(english, out, model, options)
        load = {"before": round(before, 2), "after": round(os.getloadavg()[0], 2)}
        judged = judge(english, french, out, model, options)
    run["lines_per_second"] = round(judged["lines"] / run["seconds"])
    run["lines_per_cpu_second"] = round(judged["lines"] / run["cpu_seconds"])
    print(json.dumps({"run": run, "load": load, "judged": judged}, indent=1, ensure_ascii=False))
    if options.record:
        from regard.bench.results.record import write_script_record

        result = {"load": load, "beam": options.beam, "run": run, "judged": judged}
        target = write_script_record("corpus", result, Path(__file__).parent / "results/translator")
        print(f"wrote {target}", file=sys.stderr)


if __name__ == "__main__":
    main()
