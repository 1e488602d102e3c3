"""Evaluates a model on sentences that it is not trained on: loss, translations, BLEU."""

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import numpy as np
from flax import nnx

from regard.seq2seq.decode import programs
from regard.seq2seq.decode.search import Hypotheses, SearchOptions
from regard.seq2seq.distributed.devices import DataParallel
from regard.seq2seq.distributed.hosts import Hosts
from regard.seq2seq.model.translation_model import Model
from regard.seq2seq.train.runtime_options import optimized


@dataclass(frozen=True)
class Validation:
    """The validation data and its score.

    Attributes:
        batches: a list of `Batch`, or `Batches(..., shuffle=False)`; read once, and kept.
        bleu: a function from translations, lists of token ids without <eos> in the order of the
            pairs, to a score, the higher the better; None: nothing is translated.
        search: how to translate; beam=1 is greedy.
    """

    batches: Iterable[Any]
    bleu: Callable[[list[list[int]]], float] | None = None
    search: SearchOptions = field(default_factory=lambda: SearchOptions(beam=1))


def translate_batches(
    model: Model, indexed: Iterable[tuple[np.ndarray, Any]], search: SearchOptions
) -> list[list[int]]:
    """The best translation of every sentence, as token ids without <eos>, in the order of pairs.

    Args:
        model: the translator.
        indexed: batches, of which only source and source_lens are read, as of `indexed_batches`.
        search: how to search.
    """
    found: list[tuple[int, list[int]]] = []
    for indices, batch in indexed:
        best = programs.search(model, batch.source, batch.source_lens, search, 1, hurry=False)
        found += [
            (int(index), ids)
            for index, ids in zip(indices, ids_of(best), strict=True)
            if index >= 0
        ]
    return [ids for _, ids in sorted(found, key=lambda pair: pair[0])]


def ids_of(found: Hypotheses) -> list[list[int]]:
    """The best hypothesis of each row as a list of token ids, <eos> left out."""
    tokens, lens = np.asarray(found.tokens[:, 0]), np.asarray(found.lens[:, 0])
    return [row[: max(n - 1, 0)].tolist() for row, n in zip(tokens, lens, strict=True)]


class Validator:
    """Runs a validation, compiled once for each shape of batch.

    Args:
        graph: the model's structure, of nnx.split.
        validation: what to validate on.
        parallel: the devices that share the loss.
        hosts: the processes, of which the first translates.
        before: called before each batch with a description; it may raise to end the validation.
    """

    def __init__(
        self,
        graph: Any,
        validation: Validation,
        parallel: DataParallel,
        hosts: Hosts = Hosts(),
        before: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.graph, self.validation, self.parallel, self.hosts = graph, validation, parallel, hosts
        self.before = before
        self.compiled: set[tuple] = set()  # (what, shape)
        self.indexed = list(indexed_batches(validation.batches))
        if not self.indexed:
            raise ValueError("a validation needs batches. Got none.")
        self.checksum = 0  # of all pairs, so that a run is continued with the same
        for leaf in jax.tree.leaves([batch for _, batch in self.indexed]):
            self.checksum = zlib.crc32(np.asarray(leaf).tobytes(), self.checksum)

        def sums(params: Any, batch: Any, rng: None) -> Any:
            _, nll, count = nnx.merge(graph, params).loss(batch)
            return nll, count

        self._sums = jax.jit(parallel.over_rows(sums), compiler_options=optimized())

    def __call__(self, params: Any) -> tuple[float, float | None]:
        """−log p per token, and BLEU or None."""
        batches = (self.parallel.shard(batch) for _, batch in self._each("validating"))
        sums = [self._sums(params, batch, None) for batch in batches]
        nll, count = (sum(float(part) for part in parts) for parts in zip(*sums, strict=True))
        bleu = None
        if self.validation.bleu is not None:
            # On one device: the devices do not share the search.
            here = self.parallel.here(params)
            bleu = self.hosts.first(lambda: self._bleu(nnx.merge(self.graph, here)))
        return nll / max(count, 1.0), bleu

    def _bleu(self, model: Model) -> float:
        score = cast(Callable, self.validation.bleu)
        return float(
            score(translate_batches(model, self._each("translating"), self.validation.search))
        )

    def _each(self, what: str) -> Iterator[tuple[np.ndarray, Any]]:
        for number, (indices, batch) in enumerate(self.indexed, 1):
            program = what, np.shape(batch.source)
            compiling = "" if program in self.compiled else "compiling, "
            self.compiled.add(program)
            self.before(f"{compiling}{what} {number}/{len(self.indexed)}")
            yield indices, batch

    def sample(self, params: Any) -> tuple[list[int], list[int], list[int], np.ndarray]:
        """The first sentence's source, reference, translation and attention, as in `Sample`."""
        batch = self.indexed[0][1]
        model = nnx.merge(self.graph, params)
        source, lens = batch.source[:1], batch.source_lens[:1]
        found = programs.search(model, source, lens, SearchOptions(), 1, hurry=True)
        S, T = int(batch.source_lens[0]), int(batch.target_lens[0])
        hypothesis = ids_of(found)[0]
        return (
            np.asarray(batch.source[0, :S]).tolist(),
            np.asarray(batch.target_out[0, :T]).tolist(),
            hypothesis,
            np.asarray(found.attention[0, 0, : len(hypothesis), :S]),
        )


def indexed_batches(batches: Any) -> Iterator[tuple[np.ndarray, Any]]:
    """Batches with each row's position among the pairs, −1 for padding."""
    if hasattr(batches, "with_indices"):
        yield from batches.with_indices()
        return
    seen = 0
    for batch in batches:
        lens = np.asarray(batch.source_lens)
        count = int((lens > 0).sum())
        indices = np.full(len(lens), -1)
        indices[lens > 0] = np.arange(seen, seen + count)
        seen += count
        yield indices, batch
