"""A task for tiny models: write the source backwards. As a program: a short run, to be killed.

python reversing.py FOLDER [transformer] [resume]      trains in FOLDER, telling each step on stdout
"""

import dataclasses
import sys

import numpy as np

from regard.seq2seq.model.config import Config, TransformerConfig
from regard.seq2seq.train.batches import Batches
from regard.seq2seq.train.progress import Progress
from regard.seq2seq.train.recipe import Recipe
from regard.seq2seq.train.validation import Validation

VOCAB = 9
CONFIG = Config(
    source_vocab=VOCAB,
    target_vocab=VOCAB,
    embedding=16,
    encoder=16,
    decoder=32,
    embedding_dropout=0.1,
    annotation_dropout=0.1,
    output_dropout=0.1,
)
TRANSFORMER = TransformerConfig(
    VOCAB, VOCAB, embedding=16, heads=2, feed_forward=32, encoder_layers=1, decoder_layers=1
)
RECIPE = Recipe(
    epochs=4,
    learning_rate=1e-2,
    warmup_steps=5,
    schedule="plateau",
    plateau_patience=1,
    checkpoint_every=2,
    average=2,
    log_every=1,
)


def pairs(count: int, seed: int) -> list[tuple[list[int], list[int]]]:
    draw = np.random.default_rng(seed)
    sources = [draw.integers(4, VOCAB, size=draw.integers(1, 7)).tolist() for _ in range(count)]
    return [(source, source[::-1]) for source in sources]


def training_data(count: int = 72) -> Batches:
    return Batches(pairs(count, seed=0), tokens=64, buckets=(8,))


def validation() -> Validation:
    held_out = pairs(20, seed=1)

    def exact(translations: list[list[int]]) -> float:
        """How many are right, in percent; it stands in for BLEU."""
        right = [ids == target for ids, (_, target) in zip(translations, held_out, strict=True)]
        return 100.0 * float(np.mean(right))

    return Validation(Batches(held_out, tokens=64, buckets=(8,), shuffle=False), bleu=exact)


class Telling(Progress):
    """Says what happens, a line each, at once."""

    def stepped(self, report):
        print("step", report.step, flush=True)

    def saved(self, step, path):
        print("saved", step, flush=True)


if __name__ == "__main__":
    from regard.seq2seq.train.training import train

    folder, *rest = sys.argv[1:]
    train(
        TRANSFORMER if "transformer" in rest else CONFIG,
        RECIPE,
        training_data(),
        folder,
        validation=dataclasses.replace(validation(), bleu=None),
        resume="resume" in rest,
        progress=Telling(),
    )
    print("done", flush=True)
