"""Search, forced decoding and explaining as programs: in a hurry, where there is little to do.

For one sentence the compiler takes fifty times as long as the translation. Told not to optimize,
it is four times as quick; the program then takes twice as long, which a hundred sentences make up
for.
"""

import functools
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
        hurry: whether the program should rather be ready soon than be fast.
    """
    graph, params = nnx.split(model)
    if hurry and options.dtype == "auto" and jax.default_backend() == "cpu":
        options = replace(options, dtype="float32")  # less to compile than bfloat16
    return _search(options, n_best, hurry)(graph, params, source, source_lens)


def looks(
    model: Model, source: Array, source_lens: Array, target_in: Array, *, hurry: bool
) -> Array:
    """`force`, with hurry as in `search`."""
    graph, params = nnx.split(model)
    return _looks(hurry)(graph, params, source, source_lens, target_in)


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
    graph, params = nnx.split(model)
    return _explained(hurry)(graph, params, source, source_lens, target_in, target_out)


@functools.cache
def _search(options: SearchOptions, n_best: int, hurry: bool) -> Any:
    def program(graph: Any, params: Any, source: Array, lens: Array) -> Hypotheses:
        model = nnx.merge(graph, params)
        if options.beam == 1:
            return greedy(model, source, lens, options)
        return beam_search(model, source, lens, options, n_best=n_best)

    return _compiled(program, hurry)


@functools.cache
def _looks(hurry: bool) -> Any:
    def program(graph: Any, params: Any, source: Array, lens: Array, target_in: Array) -> Array:
        return force(nnx.merge(graph, params), source, lens, target_in)

    return _compiled(program, hurry)


@functools.cache
def _explained(hurry: bool) -> Any:
    def program(graph: Any, params: Any, *arrays: Array) -> Array:
        return explain_words(nnx.merge(graph, params), *arrays)

    return _compiled(program, hurry)


def _compiled(program: Any, hurry: bool) -> Any:
    options = unoptimized() if hurry else optimized()
    return jax.jit(program, static_argnums=0, compiler_options=options)
