"""BLEU against the length of the source, of several models on the same sentences, in one picture.

    python benchmarks/lengths.py --source val.en --target val.de --lowercase \\
        attention=RUN "no attention=RUN" --record

What attention buys shows in long sentences: a model without it has one vector for all of them.
"""

import argparse
import dataclasses
import datetime
from pathlib import Path
from typing import Any

from regard.bench.results.record import write
from regard.cli.length_plot import draw_lengths
from regard.seq2seq.metrics import bleu, bleu_by_length
from regard.seq2seq.translator import Translator

EDGES = (8, 10, 12, 14, 16, 19)
RESULTS = Path(__file__).parent / "results" / "translator"


def judge(model: str, sources: list[str], references: list[str], lowercase: bool) -> dict[str, Any]:
    """BLEU of all, and by the number of source words."""
    found = Translator.load(model).translate(sources)
    texts = [best.text for best, *_ in found]
    bins = bleu_by_length(sources, texts, references, edges=EDGES, lowercase=lowercase)
    return {
        "bleu": dataclasses.asdict(bleu(texts, references, lowercase=lowercase)),
        "bleu_by_length": [dataclasses.asdict(one) for one in bins],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--lowercase", action="store_true")
    parser.add_argument("--record", action="store_true", help="leave JSON and PNG in results")
    parser.add_argument("models", nargs="+", help="NAME=FOLDER")
    given = parser.parse_args()
    sides = [path.read_text(encoding="utf-8").splitlines() for path in (given.source, given.target)]
    named = [model.partition("=")[::2] for model in given.models]
    found = {name: judge(folder, *sides, given.lowercase) for name, folder in named}
    for name, one in found.items():
        print(f"{name:<16} {one['bleu']['value']:.2f}  {one['bleu']['signature']}")
    if given.record:
        stem = f"lengths-{given.target.suffix[1:]}-{datetime.date.today()}"
        write(found, RESULTS, stem)
        curves = {name: one["bleu_by_length"] for name, one in found.items()}
        print(draw_lengths(curves, RESULTS / f"{stem}.png"))


if __name__ == "__main__":
    main()
