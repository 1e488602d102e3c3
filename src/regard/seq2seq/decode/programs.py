"""Search, forced decoding and explaining as compiled programs, at one of two optimization levels.

For one sentence, compiling takes fifty times as long as translating. At optimization level 0 it
takes a quarter of the time; the program is then half as fast, which matters from a hundred
sentences on.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from flax import nnx
from jax import Array

from regard.seq2seq.decode.explaining import explain_words
from regard.seq2seq.decode.hypotheses import Hypotheses, SearchOptions
from regard.seq2seq.decode.search import beam_search, force, greedy
from regard.seq2seq.model.translation_model import Model
from regard.seq2seq.train.runtime_options import optimized, unoptimized


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
        return _run(greedy, hurry, model, source, source_lens, options=options)
    return _run(beam_search, hurry, model, source, source_lens, options=options, n_best=n_best)


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


def _run(function: Callable, hurry: bool, model: Model, *arrays: Array, **static: Any) -> Any:
    graph, params = nnx.split(model)
    return compiled(function, hurry, **static)(graph, params, *arrays)


@functools.cache
def compiled(function: Callable, hurry: bool, **static: Any) -> Any:
    """The program that a function of a model and arrays is run by."""

    def program(graph: Any, params: Any, *arrays: Array) -> Any:
        return function(nnx.merge(graph, params), *arrays, **static)

    options = unoptimized() if hurry else optimized()
    return jax.jit(program, static_argnums=0, compiler_options=options)
