"""A million lines translated by one process, and by a Ray cluster of which a worker is killed.

    python benchmarks/corpus.py                    trains the demo's model, makes the lines, 30 min
    python benchmarks/corpus.py --model RUN        with a model that the demo's recipe has trained
    python benchmarks/corpus.py --folder DIR       keeps the lines and goes on with what is there
    python benchmarks/corpus.py --record           leaves results/translator/corpus-*.json

The cluster has two nodes of one CPU each, both on this machine; one worker is killed on the way.
The lines are of the embedded grammar, which knows the French of each. So every line of the output
can be judged in its place: it is the grammar's own French, or what the model says of that English
line when it is asked again. A line that was lost, repeated or moved would show in all behind it.
"""

import argparse
import filecmp
import gzip
import itertools
import json
import multiprocessing
import os
import random
import secrets
import signal
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


# Ray runs in a process of its own, so that this one can measure all that belongs to it.
ON_TWO_NODES = """
import sys
from ray.cluster_utils import Cluster
from regard.cli import main
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
try:
    cluster.add_node(num_cpus=1)
    sys.argv += ["--engine", "ray", "--address", cluster.address]
    main()
finally:
    cluster.shutdown()
"""


class Measured:
    """A program, and what all its processes use, those of Ray's daemons too.

    They are known by a variable in their environment, which every child inherits.
    """

    def __init__(self, program: str, words: list[str]) -> None:
        self.mark = f"REGARD_CORPUS_RUN={secrets.token_hex(8)}"
        name, _, value = self.mark.partition("=")
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *words],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, name: value},
        )
        self.used: dict[int, tuple[float, int, bytes]] = {}

    def look(self) -> None:
        """Notes the CPU seconds and the most memory, in KiB, of each process."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() not in (folder / "environ").read_bytes():
                    continue
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                status = (folder / "status").read_text().splitlines()
                name = (folder / "cmdline").read_bytes()
            except OSError:  # it has ended
                continue
            peak = [int(line.split()[1]) for line in status if line.startswith("VmHWM")]
            seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            self.used[int(folder.name)] = seconds, max(peak, default=0), name

    def workers(self) -> list[int]:
        """Ray's workers that translate."""
        return [pid for pid, (*_, name) in self.used.items() if name.startswith(b"ray::MapWorker")]


def translate(
    program: str, english: Path, out: Path, model: Path, beam: int, kill_at: float | None
) -> dict[str, Any]:
    """Runs the command; kills one worker when a share `kill_at` of the parts is there."""
    words = ["translate", "--model", str(model), "--in", str(english), "--out", str(out)]
    began, parts, killed_at = time.monotonic(), out.with_name(out.name + ".parts"), None
    run = Measured(program, [*words, "--beam", str(beam)])
    while run.process.poll() is None:
        time.sleep(POLL)
        run.look()
        done, total = progress(parts)
        if kill_at is not None and killed_at is None and total and done >= kill_at * total:
            victim = run.workers()[-1]
            os.kill(victim, signal.SIGKILL)
            killed_at = done
            print(f"killed a worker at {done} of {total} parts", file=sys.stderr)
    said = run.process.communicate()[1].strip().splitlines()
    if run.process.returncode or (kill_at is not None and killed_at is None):
        raise SystemExit(f"it failed, or nothing was killed: {said[-3:]}")
    return {
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(sum(seconds for seconds, *_ in run.used.values()), 1),
        "parts_when_killed": killed_at,
        "peak_mib": sorted((round(peak / 1024) for _, peak, _ in run.used.values()))[-2:],
        "said": said[-1].replace(str(out), out.name),
    }


def progress(folder: Path) -> tuple[int, int]:
    """The finished parts, and how many there are in all; 0 while that is not known."""
    try:
        files = json.loads((folder / "manifest.json").read_text())["job"]["files"]
        done = sum(name.startswith("part-") for name in os.listdir(folder))
    except FileNotFoundError:
        return 0, 0
    return done, sum(parts for *_, parts in files)


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


def cores() -> int:
    return len(os.sched_getaffinity(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a folder; without it, one is trained")
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--kill-at", type=float, default=0.4, help="when so much of it is done")
    parser.add_argument("--folder", type=Path, help="where lines and model are kept")
    parser.add_argument("--record", action="store_true", help="leave results/translator/corpus-*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        english, french = make_corpus(folder, options.lines)
        model = options.model or train(folder)
        before = os.getloadavg()[0]
        runs, outs = {}, {}
        for name, program, kill_at in (
            ("one process", REGARD, None),
            ("ray, two nodes", ON_TWO_NODES, options.kill_at),
        ):
            outs[name] = folder / f"{options.lines}.{name.split()[0].strip(',')}"
            run = translate(program, english, outs[name], model, options.beam, kill_at)
            run["lines_per_cpu_second"] = round(options.lines / run["cpu_seconds"])
            runs[name] = run
        load = {"before": round(before, 2), "after": round(os.getloadavg()[0], 2)}
        alone, ray = outs.values()
        same = filecmp.cmp(alone, ray, shallow=False)
        judged = judge(english, french, ray, model, options)
    result = {"load": load, "beam": options.beam, "runs": runs, "same": same, "judged": judged}
    print(json.dumps(result, indent=1, ensure_ascii=False))
    if options.record:
        from regard.bench.results.record import write_script_record

        target = write_script_record("corpus", result, Path(__file__).parent / "results/translator")
        print(f"wrote {target}", file=sys.stderr)


if __name__ == "__main__":
    main()
