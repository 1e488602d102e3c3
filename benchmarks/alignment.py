"""Word alignment beside eflomal: text, training, alignment and error rates, all by this script.

    python benchmarks/alignment.py --train-en train.en.gz --train-fr train.fr.gz \\
        --dev-en dev.en --dev-fr dev.fr --gold dev.talp --folder RUNS [--steps 5000] [--record]

It writes the prepared text to RUNS, trains a model for each direction there (`regard train`, both
at the same time), aligns the gold pairs, and prints the alignment error rate of each way to read
and to combine the two directions. The same command continues a run that was stopped; with more
--steps it trains on; --steps 0 trains none. eflomal (`pip install eflomal`) takes part where this
Python or --eflomal-python has it. What is compared is in benchmarks/README.md.
"""

import argparse
import dataclasses
import gzip
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from regard.seq2seq.alignment import (
    Link,
    Links,
    Symmetrization,
    parse_links,
    read_links,
    symmetrize,
)
from regard.seq2seq.corpus import expanded
from regard.seq2seq.metrics import alignment_error
from regard.seq2seq.text.words import normalize
from regard.seq2seq.train.settings import Settings
from regard.seq2seq.translator import LOOKS, Translator

RESULTS = Path(__file__).parent / "results" / "translator"
REGARD = "import sys; sys.argv[0] = 'regard'; from regard.cli import main; main()"
DIRECTIONS = ("en-fr", "fr-en")
LONGEST = 30  # words of a training example: as many as gold sentences have; the corpus has 18

Pair = tuple[str, str]
Found = dict[str, list[frozenset[Link]]]  # for each way of combining, the links of each gold pair

# eflomal in a process of its own: the arguments are two texts and two files of links to be.
EFLOMAL = """
import sys, time, eflomal
source, target, forward, backward = sys.argv[1:]
begun = time.perf_counter()
with open(source, encoding="utf-8") as first, open(target, encoding="utf-8") as second:
    eflomal.Aligner().align(
        first, second, links_filename_fwd=forward, links_filename_rev=backward
    )
print(time.perf_counter() - begun)
"""


# Text -----------------------------------------------------------------------------------------


def lines_of(path: Path) -> list[str]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        return [line.strip() for line in file]


def plain(text: str) -> str:
    """No accents, no case. Gold text gets no more than this: its links count its words."""
    return normalize(text, lowercase=True, strip_accents=True)


def corpus(source: Path, target: Path) -> list[Pair]:
    """English and French with elisions and contractions written out, no accents, no case."""
    sides = [
        [plain(expanded(line, language)) for line in lines_of(path)]
        for path, language in ((source, "en"), (target, "fr"))
    ]
    return [pair for pair in zip(*sides, strict=True) if all(pair)]


def joined(pairs: Sequence[Pair], seed: int = 0) -> Iterator[Pair]:
    """One to three pairs in a row as one example, up to 30 words a side.

    A model that was trained on short sentences alone aligns long ones badly.
    """
    rng, waiting, wanted = random.Random(seed), list[Pair](), 1
    for pair in pairs:
        both = [*waiting, pair]
        if waiting and any(sum(len(one[k].split()) for one in both) > LONGEST for k in (0, 1)):
            yield _one(waiting)
            both, wanted = [pair], rng.randint(1, 3)
        waiting = both
        if len(waiting) == wanted:
            yield _one(waiting)
            waiting, wanted = [], rng.randint(1, 3)
    if waiting:
        yield _one(waiting)


def _one(pairs: Sequence[Pair]) -> Pair:
    return " ".join(en for en, _ in pairs), " ".join(fr for _, fr in pairs)


def write_text(folder: Path, name: str, pairs: Sequence[Pair]) -> None:
    for side, language in enumerate(("en", "fr")):
        lines = "".join(f"{pair[side]}\n" for pair in pairs)
        (folder / f"{name}.{language}").write_text(lines, encoding="utf-8")
    print(f"{name}: {len(pairs):,} pairs", file=sys.stderr)


# The two models, and eflomal ------------------------------------------------------------------


def recipe(quick: bool) -> Settings:
    """The recipe "hansards", or one that takes seconds: a tiny model, one shape of batch."""
    settings = Settings.named("hansards")
    if not quick:
        return settings
    sizes: dict[str, Any] = dict(embedding=8, encoder=8, decoder=8)
    return dataclasses.replace(
        settings,
        data=dataclasses.replace(settings.data, valid_sentences=2),
        tokenizer=dataclasses.replace(settings.tokenizer, size=200),
        batches=dataclasses.replace(settings.batches, tokens=256, buckets=(LONGEST + 2,)),
    ).with_model(**sizes)


def train(folder: Path, steps: int, settings: Settings) -> None:
    """Trains both directions at the same time, each on a core of its own where there are two."""
    path = folder / "recipe.json"
    path.write_text(settings.to_json(), encoding="utf-8")
    cores, started = sorted(os.sched_getaffinity(0)), []
    for number, name in enumerate(DIRECTIONS):
        command = [str(folder / name), "--max-steps", str(steps), "--epochs", "1000"]
        if (folder / name).exists():
            command += ["--resume"]
        else:
            command += ["--recipe", str(path), "--source", str(folder / "joined.en")]
            command += ["--target", str(folder / "joined.fr")]
            command += ["--reverse"] if name == "fr-en" else []
        mine = {cores[number % len(cores)]} if len(cores) <= 2 else set(cores)
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", REGARD, "train", *command],
                stdout=sys.stderr,
                preexec_fn=lambda mine=mine: os.sched_setaffinity(0, mine),
            )
        )
    codes = [process.wait() for process in started]
    if any(codes):
        raise SystemExit(f"training ended with exit codes {codes}: what was said is above.")


def neural(folder: Path, gold: Sequence[Pair]) -> dict[str, Found]:
    """For each reading of the attention, the links of the gold pairs by each way of combining."""
    given = [(en.split(), fr.split()) for en, fr in gold]
    turned = [(fr, en) for en, fr in given]
    aligned = [
        Translator.load(folder / name).align_by(LOOKS, pairs)
        for name, pairs in zip(DIRECTIONS, (given, turned), strict=True)
    ]
    found = {}
    for look in LOOKS:
        there, back = (one[look] for one in aligned)
        directed = combined([one.links() for one in there], [_turned(one.links()) for one in back])
        both = zip(there, back, strict=True)
        directed["agreement"] = [agreed(one.weights, other.weights) for one, other in both]
        found[f"regard, {look}"] = directed
    return found


def by_eflomal(folder: Path, gold: Sequence[Pair], python: str) -> tuple[Found, float] | None:
    """What eflomal says of the gold pairs, which it reads as the end of the corpus; its seconds."""
    for side, language in enumerate(("en", "fr")):
        text = (folder / f"text.{language}").read_text(encoding="utf-8")
        more = "".join(f"{pair[side]}\n" for pair in gold)
        (folder / f"eflomal.{language}").write_text(text + more, encoding="utf-8")
    names = [folder / f"eflomal.{end}" for end in ("en", "fr", "forward", "backward")]
    ran = subprocess.run(
        [python, "-c", EFLOMAL, *map(str, names)], stdout=subprocess.PIPE, text=True
    )
    if ran.returncode:
        print("eflomal is left out: what it said is above.", file=sys.stderr)
        return None
    # Both files have links source-target.
    sides = [lines_of(path)[-len(gold) :] for path in names[2:]]
    forward, backward = ([parse_links(line).sure for line in side] for side in sides)
    return combined(forward, backward), float(ran.stdout)


def combined(forward: Sequence[frozenset[Link]], backward: Sequence[frozenset[Link]]) -> Found:
    """Both directions alone, and every symmetrization."""
    found: Found = {"en→fr alone": list(forward), "fr→en alone": list(backward)}
    for how in get_args(Symmetrization):
        both = zip(forward, backward, strict=True)
        found[how] = [symmetrize(there, back, how) for there, back in both]
    return found


def agreed(forward: np.ndarray, backward: np.ndarray, threshold: float = 0.4) -> frozenset[Link]:
    """Links by the weights of both directions, instead of by the links that each draws.

    (i, j) is a link where sqrt(p(i | j) p(j | i)) is above the threshold (Liang et al. 2006,
    posterior decoding): a word may have none, or several.
    """
    product = forward.T * backward  # [source words, target words]
    return frozenset((int(i), int(j)) for i, j in np.argwhere(product > threshold**2))


def _turned(links: frozenset[Link]) -> frozenset[Link]:
    return frozenset((i, j) for j, i in links)


# Scores ---------------------------------------------------------------------------------------


def judge(found: dict[str, Found], gold: Sequence[Links]) -> dict[str, dict[str, Any]]:
    return {
        who: {how: dataclasses.asdict(alignment_error(links, gold)) for how, links in of.items()}
        for who, of in found.items()
    }


def table(scores: dict[str, dict[str, Any]]) -> str:
    """AER in percent, a row for each aligner and a column for each way of combining."""
    ways = list(dict.fromkeys(way for of in scores.values() for way in of))
    lines = [f"| AER, % | {' | '.join(ways)} |", f"| --- |{' --- |' * len(ways)}"]
    for who, of in scores.items():
        best = min(one["aer"] for one in of.values())
        cells = (_cell(of.get(way), best) for way in ways)
        lines.append(f"| {who} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(score: dict[str, Any] | None, best: float) -> str:
    if score is None:
        return "–"
    number = f"{score['aer']:.1f}"
    return f"**{number}**" if score["aer"] == best else number


def draw(scores: dict[str, dict[str, Any]], path: Path) -> None:
    """Precision against recall, a point for each way of combining."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for (who, of), marker in zip(scores.items(), "o^sv", strict=False):
        points = [(one["recall"], one["precision"]) for one in of.values()]
        axes.scatter(*np.transpose(points), marker=marker, label=who)
        for point, (way, one) in zip(points, of.items(), strict=True):
            axes.annotate(
                f"{way} {one['aer']:.1f}", point, (5, 3), textcoords="offset points", size=7
            )
    axes.set(xlabel="recall, %", ylabel="precision, %", title="AER beside each point")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("train-en", "train-fr", "dev-en", "dev-fr", "gold", "folder"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=5000, help="of training, for each direction")
    parser.add_argument("--eflomal-python", default=sys.executable, help="a Python with eflomal")
    parser.add_argument("--quick", action="store_true", help="4 steps of a tiny model: a test")
    parser.add_argument("--record", action="store_true", help="leave JSON and PNG in results")
    parser.add_argument("--draw", type=Path, help="a PNG of precision and recall")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    before = os.getloadavg()[0]

    pairs = corpus(given.train_en, given.train_fr)
    write_text(given.folder, "text", pairs)
    write_text(given.folder, "joined", list(joined(pairs)))
    sides = [[plain(line) for line in lines_of(path)] for path in (given.dev_en, given.dev_fr)]
    dev, gold = list(zip(*sides, strict=True)), read_links(given.gold)
    found: dict[str, Found] = {}
    seconds: dict[str, float] = {}
    if steps := 4 if given.quick else given.steps:
        begun = time.perf_counter()
        train(given.folder, steps, recipe(given.quick))
        seconds["training, both directions"] = time.perf_counter() - begun
        found |= neural(given.folder, dev)
    other = by_eflomal(given.folder, dev, given.eflomal_python)
    if other is not None:
        found["eflomal"], seconds["eflomal"] = other
    if not found:
        raise SystemExit("nothing to compare: no --steps of training, and no eflomal.")
    scores = judge(found, gold)
    print(table(scores))
    load = {"before": before, "after": os.getloadavg()[0]}
    print(f"{len(dev)} gold pairs, {len(pairs):,} to learn from, load {load}", file=sys.stderr)
    if given.draw:
        draw(scores, given.draw)
    if given.record:
        from regard.bench.results.record import write_script_record

        about = {"gold": len(dev), "pairs": len(pairs), "steps": steps, "load": load}
        result = about | {"seconds": seconds, "scores": scores}
        target = write_script_record("alignment", result, RESULTS)
        draw(scores, target.with_suffix(".png"))
        print(f"wrote {target}", file=sys.stderr)


if __name__ == "__main__":
    main()
