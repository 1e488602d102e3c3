"""Source words per second on one core: `Translator.translate` beside CTranslate2, in turns.

    python benchmarks/words.py SENTENCES [--peer-python PATH] [--rounds 5] [--record]

SENTENCES has one per line (or a tab-separated pair, of which the first is taken). PATH is a Python
with ctranslate2 and numpy. CTranslate2 runs no recurrent model, so its own is a Transformer of
about as many parameters with random weights, made to write as many tokens as regard wrote for each
sentence. Rates are per second of CPU time of a process bound to one core: a busy machine slows
both, and its load is in the record. See benchmarks/README.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "translator"
BEAMS = (1, 5)
WIDTH, INNER, LAYERS, HEADS = 256, 1024, 2, 4  # the peer's, about the bundled model's parameters


# regard ---------------------------------------------------------------------------------------


class Regard:
    """All of `translate`: splitting into tokens, the search, and the texts with their alignment."""

    def __init__(self, lines: list[str]) -> None:
        import jax

        from regard.cli.compile_cache import keep_compiled_programs
        from regard.seq2seq.translator import Translator

        keep_compiled_programs()
        self.lines = lines
        self.translator = Translator.load()
        leaves = jax.tree.leaves(self.translator.model)
        self.about = {"parameters": sum(leaf.size for leaf in leaves)}

    def run(self, beam: int) -> dict[str, Any]:
        from regard.seq2seq.decode.hypotheses import SearchOptions

        search = SearchOptions(beam=beam)
        found = self.translator.translate(self.lines, search=search, hurry=False)
        self.texts = [best.text for best, *_ in found]
        return {}

    def tokens(self) -> list[tuple[list[str], int]]:
        """For each line its tokens, and how many its last translation has, <eos> counted."""
        source, target = self.translator.tokenizers.source, self.translator.tokenizers.target
        return [
            ([source.pieces[i] for i in source.encode(line).ids], len(target.encode(text).ids) + 1)
            for line, text in zip(self.lines, self.texts, strict=True)
        ]


# CTranslate2 ----------------------------------------------------------------------------------


def random_transformer(vocabulary: list[str], folder: str) -> int:
    """Writes a model with tied embeddings and random weights; returns its parameters."""
    import ctranslate2
    import numpy as np

    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> Any:
        return (rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)

    def linear(spec: Any, rows: int, columns: int) -> None:
        spec.weight, spec.bias = matrix(rows, columns), np.zeros(rows, np.float32)

    def norm(spec: Any) -> None:
        spec.gamma, spec.beta = np.ones(WIDTH, np.float32), np.zeros(WIDTH, np.float32)

    spec = ctranslate2.specs.TransformerSpec.from_config((LAYERS, LAYERS), HEADS)
    shared = matrix(len(vocabulary), WIDTH)
    for side in (spec.encoder, spec.decoder):
        for embeddings in side.embeddings if side is spec.encoder else [side.embeddings]:
            embeddings.weight = shared
        side.scale_embeddings = True
        norm(side.layer_norm)
        for layer in side.layer:
            blocks = [layer.self_attention, layer.ffn]
            linear(layer.self_attention.linear[0], 3 * WIDTH, WIDTH)
            linear(layer.self_attention.linear[1], WIDTH, WIDTH)
            linear(layer.ffn.linear_0, INNER, WIDTH)
            linear(layer.ffn.linear_1, WIDTH, INNER)
            if side is spec.decoder:
                linear(layer.attention.linear[0], WIDTH, WIDTH)
                linear(layer.attention.linear[1], 2 * WIDTH, WIDTH)
                linear(layer.attention.linear[2], WIDTH, WIDTH)
                blocks.append(layer.attention)
            for block in blocks:
                norm(block.layer_norm)
    spec.decoder.projection.weight = shared
    spec.decoder.projection.bias = np.zeros(len(vocabulary), np.float32)
    spec.register_source_vocabulary(vocabulary)
    spec.register_target_vocabulary(vocabulary)
    spec.validate()
    spec.save(folder)
    # The three tied tables are one.
    return sum(one.numpy().size for one in spec.variables().values()) - 2 * shared.size


class Peer:
    """`translate_batch` on tokens, sentences sorted by length, as many to a batch as is fastest."""

    def __init__(self, work: dict[str, Any]) -> None:
        import ctranslate2

        with tempfile.TemporaryDirectory() as folder:
            parameters = random_transformer(work["vocabulary"], folder)
            self.translators = {
                kind: ctranslate2.Translator(
                    folder, compute_type=kind, inter_threads=1, intra_threads=1
                )
                for kind in ("float32", "int8")
            }
        # One call for each length, because a call has one length for all that it writes.
        self.work: dict[int, list[list[str]]] = defaultdict(list)
        for tokens, length in work["tokens"]:
            self.work[length].append([*tokens, "</s>"])
        self.about = {"parameters": parameters, "version": ctranslate2.__version__}

    def run(self, beam: int) -> dict[str, Any]:
        seconds = {}
        for kind, translator in self.translators.items():
            begun = time.process_time()
            for length, sentences in self.work.items():
                translator.translate_batch(
                    sentences,
                    beam_size=beam,
                    max_batch_size=2048,
                    batch_type="tokens",
                    min_decoding_length=length,
                    max_decoding_length=length,
                )
            seconds[kind] = time.process_time() - begun
        return {"by_type": seconds}


# Measuring ------------------------------------------------------------------------------------


def serve(who: str) -> None:
    """The worker: its work as a line of JSON in, then for each beam in a line of JSON out; "tokens"
    asks regard for its last work.
    """
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    answers, sys.stdout = sys.stdout, sys.stderr
    worker: Any = {"regard": Regard, "ctranslate2": Peer}[who](json.loads(sys.stdin.readline()))
    print(json.dumps(worker.about), file=answers, flush=True)
    for line in sys.stdin:
        if line.strip() == "tokens":
            source = worker.translator.tokenizers.source
            answer: dict[str, Any] = {"tokens": worker.tokens(), "vocabulary": list(source.pieces)}
        else:
            begun, busy = time.perf_counter(), time.process_time()
            answer = worker.run(int(line))
            answer["seconds"] = time.perf_counter() - begun
            answer["cpu_seconds"] = time.process_time() - busy
        print(json.dumps(answer), file=answers, flush=True)


class Worker:
    """A framework in its process, which is given its work through a pipe."""

    def __init__(self, python: str, who: str, work: Any) -> None:
        self.process = subprocess.Popen(
            [python, __file__, "--serve", who],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.who = who
        self.about = self.ask(json.dumps(work))

    def ask(self, what: object) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(what, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process with {self.who} ended: what it said is above.")
        return json.loads(line)


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sentences", type=Path)
    parser.add_argument("--count", type=int, default=1000, help="so many lines, evenly spaced")
    parser.add_argument("--peer-python", help="a Python with ctranslate2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true", help="leave results/translator/words-*")
    given = parser.parse_args()
    text = given.sentences.read_text(encoding="utf-8").splitlines()
    places = range(0, len(text), max(len(text) // given.count, 1))[: given.count]
    lines = [text[place].split("\t")[0] for place in places]
    words, before = sum(len(line.split()) for line in lines), os.getloadavg()[0]
    best: dict[str, dict[str, float]] = {str(beam): {} for beam in BEAMS}
    workers = [Worker(sys.executable, "regard", lines)]
    for beam in BEAMS:  # compiles; the last has the tokens that the peer is to write
        workers[0].ask(beam)
    if given.peer_python:
        workers.append(Worker(given.peer_python, "ctranslate2", workers[0].ask("tokens")))
        workers[1].ask(1)
    for number in range(given.rounds):
        for beam in BEAMS:
            fastest = best[str(beam)]
            for worker in workers[:: -1 if number % 2 else 1]:
                answer = worker.ask(beam)
                times = answer.get("by_type") or {"": answer["cpu_seconds"]}
                for kind, seconds in times.items():
                    name = f"{worker.who} {kind}".strip()
                    fastest[name] = max(fastest.get(name, 0.0), words / seconds)
    for worker in workers:
        worker.process.communicate()
    names = list(best["1"])
    print(f"| source words per CPU second, one core | {' | '.join(names)} |")
    print(f"| --- |{' --- |' * len(names)}")
    for beam, rates in best.items():
        print(f"| beam {beam} | {' | '.join(f'{rates[name]:,.0f}' for name in names)} |")
    load = {"before": before, "after": os.getloadavg()[0]}
    print(f"{len(lines):,} sentences, {words:,} words, load {load}", file=sys.stderr)
    if given.record:
        from regard.bench.results.record import write_script_record

        about = {worker.who: worker.about for worker in workers}
        result = {"load": load, "sentences": len(lines), "words": words, "frameworks": about}
        print(write_script_record("words", result | {"words_per_cpu_second": best}, RESULTS))


if __name__ == "__main__":
    main()
