"""regard's translator beside Joey NMT's: training and beam search, the same batches, in turns.

    python benchmarks/joey.py DATA --joey-python PATH [--rounds 7] [--record]

DATA has Multi30k: train.en.gz, train.de.gz, val.en, val.de. PATH is a Python with joeynmt 2.3 and
torch; this one has regard[translate]. Each framework runs in a process of its own, and waits while
the other runs. Five minutes on two quiet cores. What is compared, and what differs, is in
benchmarks/README.md.
"""

import argparse
import collections
import gzip
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

PAD, UNK, BOS, EOS = range(4)  # regard's; Joey has UNK and PAD the other way around
EMBEDDING, ENCODER, DECODER, ROWS, BEAM = 256, 256, 512, 64, 5
SIDES = ("source", "target")
GOALS = {"train": 3.0, "decode": 5.0}
UNITS = {"train": "target tokens/s", "decode": "sentences/s"}

# Each does its work once and says how much it was. Models that search are untrained and end no
# sentence by themselves, so that both frameworks write as many tokens: the longest reference's.
Programs = dict[str, Callable[[], float]]


# Data -----------------------------------------------------------------------------------------


def words_of(path: Path) -> list[list[str]]:
    """Lowercased lines, punctuation apart."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        return [re.findall(r"\w+|[^\w\s]", line.lower()) for line in file]


def make_work(folder: Path, train_batches: int, decode_batches: int) -> dict[str, np.ndarray]:
    """Batches of 64 pairs of about one length, from the shortest to the longest in even steps.

    Returns:
        "source_vocab", "target_vocab"; and for every batch "train.<i>.source" [64, S] and
        "train.<i>.target" [64, T], ids with <eos> and padding; likewise "decode.<i>".
    """
    sides = [words_of(folder / f"train.{language}.gz") for language in ("en", "de")]
    ids = []
    for lines in sides:
        counts = collections.Counter(word for line in lines for word in line)
        ids.append({word: i for i, (word, _) in enumerate(counts.most_common(), start=4)})
    work = {f"{SIDES[side]}_vocab": np.array(len(known) + 4) for side, known in enumerate(ids)}
    held_out = [words_of(folder / f"val.{language}") for language in ("en", "de")]
    for name, lines, count in (
        ("train", sides, train_batches),
        ("decode", held_out, decode_batches),
    ):
        pairs = sorted(zip(*lines, strict=True), key=lambda pair: (len(pair[1]), len(pair[0])))
        # The middles of `count` equal parts: the mean length is about the corpus's.
        for i in range(count):
            start = int((i + 0.5) / count * (len(pairs) - ROWS))
            for side, known in enumerate(ids):
                rows = [pair[side] for pair in pairs[start : start + ROWS]]
                array = np.full((ROWS, max(map(len, rows)) + 1), PAD, np.int32)
                for r, row in enumerate(rows):
                    array[r, : len(row) + 1] = [*(known.get(word, UNK) for word in row), EOS]
                work[f"{name}.{i}.{SIDES[side]}"] = array
    return work


def batches_of(work: dict[str, np.ndarray], name: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """The (source, target) arrays of "train" or "decode"."""
    count = sum(key.startswith(f"{name}.") for key in work) // 2
    return [(work[f"{name}.{i}.source"], work[f"{name}.{i}.target"]) for i in range(count)]


# The two frameworks ---------------------------------------------------------------------------


def regard_programs(work: dict[str, np.ndarray]) -> tuple[Programs, dict[str, object]]:
    """As `regard train` and `regard translate` run it, widths rounded up to the buckets."""
    from regard.seq2seq.train.runtime_options import keep_freed_memory

    keep_freed_memory()  # before JAX is used
    import importlib.metadata

    import jax
    import jax.numpy as jnp
    from flax import nnx

    from regard.seq2seq.decode.search import SearchOptions, beam_search
    from regard.seq2seq.distributed.devices import DataParallel
    from regard.seq2seq.model.config import Config
    from regard.seq2seq.model.translation_model import Model
    from regard.seq2seq.train.batches import BUCKETS, Batch
    from regard.seq2seq.train.recipe import Recipe
    from regard.seq2seq.train.train_step import TrainState, make_step, optimizer_of

    def batch_of(source: np.ndarray, target: np.ndarray) -> Batch:
        need = max(source.shape[1], target.shape[1])
        rows = ([row[(row != PAD) & (row != EOS)] for row in side] for side in (source, target))
        pairs = list(zip(*rows, strict=True))
        return Batch.of(pairs, rows=ROWS, width=min(w for w in BUCKETS if w >= need))

    sizes = dict(embedding=EMBEDDING, encoder=ENCODER, decoder=DECODER)
    config = Config(int(work["source_vocab"]), int(work["target_vocab"]), **sizes)
    recipe, parallel = Recipe(), DataParallel(jax.local_devices()[:1])
    graph, params = nnx.split(Model(config, rngs=nnx.Rngs(0)))
    untrained = nnx.merge(graph, jax.tree.map(jnp.copy, params))  # training uses up the others
    step = make_step(graph, recipe, parallel)
    fresh = TrainState(params, optimizer_of(recipe).init(params), jnp.array(True))
    state = [parallel.replicate(fresh)]
    training = [batch_of(*batch) for batch in batches_of(work, "train")]
    decoding = [
        (batch_of(source, target), SearchOptions(BEAM, max_ratio=0.0, max_extra=target.shape[1]))
        for source, target in batches_of(work, "decode")
    ]

    def train() -> float:
        for number, batch in enumerate(training):
            shared, rate = parallel.shard(batch), jnp.float32(recipe.learning_rate)
            state[0], measured = step(state[0], shared, jnp.asarray(number, jnp.int32), rate)
        if not bool(measured.healthy):
            raise FloatingPointError("regard's loss is not finite.")
        return float(sum(batch.target_lens.sum() for batch in training))

    def decode() -> float:
        for batch, options in decoding:
            found = beam_search(untrained, batch.source, batch.source_lens, options, n_best=1)
            assert int(found.lens.min()) == options.max_extra, found.lens
        return float(ROWS * len(decoding))

    about = {
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "flax")},
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
    }
    return {"train": train, "decode": decode}, about


def joey_programs(work: dict[str, np.ndarray]) -> tuple[Programs, dict[str, object]]:
    """As joeynmt.training.TrainManager and joeynmt.prediction.predict run it, float32."""
    import copy
    import importlib.metadata
    import types

    import torch
    from joeynmt.batch import Batch
    from joeynmt.model import build_model
    from joeynmt.search import search
    from joeynmt.vocabulary import Vocabulary

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    pad, unk = 1, 0
    special = types.SimpleNamespace(
        **dict(unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>"),
        **dict(unk_id=unk, pad_id=pad, bos_id=BOS, eos_id=EOS),
        **dict(sep_token=None, sep_id=None, lang_tags=[]),
    )
    vocabularies = [
        Vocabulary([f"word {i}" for i in range(int(work[f"{side}_vocab"]) - 4)], special)
        for side in SIDES
    ]
    both = dict(type="recurrent", rnn_type="gru", num_layers=1, dropout=0.3, freeze=False)
    both |= dict(embeddings=dict(embedding_dim=EMBEDDING, scale=False))
    decoder = dict(hidden_size=DECODER, hidden_dropout=0.3, init_hidden="bridge")
    model = build_model(
        dict(
            encoder=both | dict(hidden_size=ENCODER, bidirectional=True),
            decoder=both | decoder | dict(attention="bahdanau", input_feeding=True),
        ),
        *vocabularies,
    )
    model.loss_function = ("crossentropy", 0.1)
    untrained = copy.deepcopy(model).eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def batch_of(source: np.ndarray, target: np.ndarray) -> Batch:
        begun = np.pad(target, ((0, 0), (1, 0)), constant_values=BOS)
        # Ids 0 and 1 change places.
        ours = [torch.tensor(np.where(a < 2, 1 - a, a), dtype=torch.long) for a in (source, begun)]
        lens, rows = (ours[0] != pad).sum(1), torch.arange(ROWS)
        return Batch(ours[0], lens, None, ours[1], None, rows, torch.device("cpu"), pad, EOS)

    training = [batch_of(*batch) for batch in batches_of(work, "train")]
    decoding = [(batch_of(*batch), batch[1].shape[1]) for batch in batches_of(work, "decode")]

    def train() -> float:
        model.train()
        for batch in training:
            optimizer.zero_grad()
            batch.sort_by_src_length()
            loss, *_ = model(return_type="loss", **vars(batch))
            batch.normalize(loss, normalization="tokens").backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if not bool(torch.isfinite(loss)):
            raise FloatingPointError("Joey NMT's loss is not finite.")
        return float(sum(batch.ntokens for batch in training))

    def decode() -> float:
        for batch, length in decoding:
            batch.sort_by_src_length()
            found, _, _ = search(
                untrained, batch, max_output_length=length, beam_size=BEAM, beam_alpha=1.0
            )
            assert found.shape == (ROWS, length), found.shape
        return float(ROWS * len(decoding))

    about = {
        "versions": {name: importlib.metadata.version(name) for name in ("joeynmt", "torch")},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    return {"train": train, "decode": decode}, about


# Measuring ------------------------------------------------------------------------------------


def serve(framework: str, path: str) -> None:
    """The worker: a line in, "train" or "decode"; a line of JSON out."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what the framework prints is no answer
    with np.load(path) as work:
        make = {"regard": regard_programs, "joey": joey_programs}[framework]
        programs, about = make(dict(work))
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        begun, busy = time.perf_counter(), time.process_time()
        amount = programs[line.strip()]()
        seconds, busy = time.perf_counter() - begun, time.process_time() - busy
        print(
            json.dumps({"amount": amount, "seconds": seconds, "cpu_seconds": busy}),
            file=answers,
            flush=True,
        )


class Worker:
    """A framework in its process."""

    def __init__(self, python: str, framework: str, work: Path) -> None:
        self.framework = framework
        self.process = subprocess.Popen(
            [python, __file__, "--serve", framework, str(work)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.about = self._answer()

    def run(self, name: str) -> dict[str, float]:
        assert self.process.stdin is not None
        print(name, file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(
                f"the process with {self.framework} ended, with status {self.process.wait()}. What "
                "it said is above. Fix: --joey-python, a Python with joeynmt and torch; and run "
                "this script with one that has regard[translate]."
            )
        return json.loads(line)


def measure(workers: list[Worker], rounds: int) -> dict[str, list[dict[str, dict[str, float]]]]:
    """For "train" and "decode" the rounds: what each framework did, by its name."""
    found: dict[str, list[dict[str, dict[str, float]]]] = {}
    for name in ("train", "decode"):
        for worker in workers:  # compiles, and is not counted
            worker.run(name)
        found[name] = []
        for index in range(rounds):
            answers = {}
            for worker in workers[:: 1 if index % 2 else -1]:  # each goes first as often
                time.sleep(0.2)  # the other's threads come to rest
                answers[worker.framework] = worker.run(name)
            found[name].append(answers)
            told = ", ".join(f"{who} {speed(answer):,.1f}" for who, answer in answers.items())
            print(f"{name} {index + 1}/{rounds}: {told} {UNITS[name]}", file=sys.stderr)
    return found


def speed(answer: dict[str, float], clock: str = "seconds") -> float:
    return answer["amount"] / answer[clock]


def summarize(name: str, rounds: list[dict[str, dict[str, float]]]) -> dict[str, float | str]:
    """Medians; the ratio is the median of the rounds' ratios."""
    ratios, busy = (
        sorted(speed(one["regard"], clock) / speed(one["joey"], clock) for one in rounds)
        for clock in ("seconds", "cpu_seconds")
    )
    return {
        "unit": UNITS[name],
        **{who: statistics.median(speed(one[who]) for one in rounds) for who in ("joey", "regard")},
        "ratio": statistics.median(ratios),
        "lowest": ratios[0],
        "highest": ratios[-1],
        "cpu_ratio": statistics.median(busy),
        "goal": GOALS[name],
    }


def table(summaries: dict[str, dict]) -> str:
    lines = [
        "| work | Joey NMT | regard | ratio (lowest to highest) | by CPU time | goal | |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, s in summaries.items():
        verdict = "reached" if s["ratio"] >= s["goal"] else "short"
        lines.append(
            f"| {name}, {s['unit']} | {s['joey']:,.1f} | {s['regard']:,.1f} | {s['ratio']:.2f}× "
            f"({s['lowest']:.2f} to {s['highest']:.2f}) | {s['cpu_ratio']:.2f}× | "
            f"≥ {s['goal']:g}× | {verdict} |"
        )
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="the folder with Multi30k")
    parser.add_argument("--joey-python", required=True, help="a Python with joeynmt and torch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--train-batches", type=int, default=4, help="in each round")
    parser.add_argument("--decode-batches", type=int, default=2, help="in each round")
    parser.add_argument(
        "--record", action="store_true", help="leave results/translator/joey-*.json"
    )
    options = parser.parse_args()
    before = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "work.npz"
        np.savez(path, **make_work(options.data, options.train_batches, options.decode_batches))
        workers = [
            Worker(options.joey_python, "joey", path),
            Worker(sys.executable, "regard", path),
        ]
        rounds = measure(workers, options.rounds)
        for worker in workers:
            worker.process.communicate()  # the end of its input ends it
    summaries = {name: summarize(name, of) for name, of in rounds.items()}
    print(table(summaries))
    load = {"before": before[0], "after": os.getloadavg()[0]}
    print(f"load average {load['before']:.1f} before, {load['after']:.1f} after", file=sys.stderr)
    if options.record:
        from regard.bench.results.record import write_script_record

        result = {
            "load": load,
            "frameworks": {worker.framework: worker.about for worker in workers},
            "summary": summaries,
            "rounds": rounds,
        }
        target = write_script_record("joey", result, Path(__file__).parent / "results/translator")
        print(f"wrote {target}", file=sys.stderr)


if __name__ == "__main__":
    main()
