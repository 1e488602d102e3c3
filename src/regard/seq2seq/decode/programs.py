"""Search, forced decoding and explaining, compiled for few sentences or for many."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from flax import nnx
from jax import Array

from regard.seq2seq.decode.compiled import compiled
from regard.seq2seq.decode.explaining import explain_words
from regard.seq2seq.decode.hypotheses import Hypotheses, SearchOptions
from regard.seq2seq.decode.search import beam_search, force, greedy
from regard.seq2seq.model.translation_model import Model


def search(
    model: Model,
    source: Array,
    source_lens: Array,
    options: SearchOptions,
    n_best: int,
    *,
    hurry: bool,
) -> Hypotheses:
    """`beam_search`, or `greedy` for a beam of 1.

    Args:
        hurry: whether to compile at optimization level 0.
    """
    if hurry and options.dtype == "auto" and jax.default_backend() == "cpu":
        options = replace(options, dtype="float32")  # less to compile than bfloat16
    if options.beam == 1:
        return greedy(model, source, source_lens, options, hurry=hurry)
    return beam_search(model, source, source_lens, options, n_best=n_best, hurry=hurry)


def forced(
    model: Model, source: Array, source_lens: Array, target_in: Array, *, hurry: bool
) -> Array:
    """`force`, with hurry as in `search`."""
    return _run(force, hurry, model, source, source_lens, target_in)


def explained(
    model: Model,
    source: Array,
    source_lens: Array,
    target_in: Array,
    target_out: Array,
    *,
    hurry: bool,
) -> Array:
    """`explain_words`, with hurry as in `search`."""
    return _run(explain_words, hurry, model, source, source_lens, target_in, target_out)


def _run(function: Callable, hurry: bool, model: Model, *arrays: Array) -> Any:
    return compiled(function, hurry)(*nnx.split(model), *arrays)
