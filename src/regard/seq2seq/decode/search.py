"""Search: the best translations of a batch; and forced decoding, the attention for given ones.

Each is one compiled program. The beam itself is in beam.py, options and results in hypotheses.py.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from regard.seq2seq.decode.beam import search_with_beam, start
from regard.seq2seq.decode.compiled import compiled
from regard.seq2seq.decode.hypotheses import Hypotheses, SearchOptions, candidates, penalized
from regard.seq2seq.model.output_layer import OutputLayer
from regard.seq2seq.model.prepared import prepared
from regard.seq2seq.model.translation_model import Model
from regard.seq2seq.text.vocabulary import EOS, PAD

__all__ = ["Hypotheses", "SearchOptions", "beam_search", "greedy", "force"]


def beam_search(
    model: Model,
    source: Array,
    source_lens: Array,
    options: SearchOptions = SearchOptions(),
    *,
    n_best: int | None = None,
    hurry: bool = False,
) -> Hypotheses:
    """The best translations that a beam finds, each with its attention.

    A hypothesis is finished when <eos> is among the `beam` best extensions of its sentence; the
    search for a sentence ends with the `beam`-th that is, or before, by `early_stop`. With beam=1
    this is greedy search.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from regard.seq2seq.model.config import Config
        >>> from regard.seq2seq.model.translation_model import Model
        >>> from regard.seq2seq.decode.search import SearchOptions, beam_search
        >>> model = Model(Config(20, 30, embedding=8, encoder=8, decoder=16), rngs=nnx.Rngs(0))
        >>> source, lens = jnp.array([[5, 6, 3], [7, 3, 0]]), jnp.array([3, 2])
        >>> found = beam_search(model, source, lens, SearchOptions(beam=4), n_best=2)
        >>> found.tokens.shape, found.attention.shape
        ((2, 2, 14), (2, 2, 14, 3))
        >>> bool((found.scores[:, 0] >= found.scores[:, 1]).all())
        True

    Args:
        model: the translator.
        source: [B, S] token ids.
        source_lens: [B]; a row of length 0 gets no hypotheses.
        options: the beam and what else there is to choose.
        n_best: how many hypotheses to return, at most the beam; None: the beam.
        hurry: whether to compile at optimization level 0.

    Returns:
        The hypotheses; T is the longest that max_ratio and max_extra allow for S.
    """
    n_best = options.beam if n_best is None else n_best
    if not 1 <= n_best <= options.beam:
        raise ValueError(f"n_best must be from 1 to beam. Got {n_best}, beam {options.beam}.")
    program = compiled(search_with_beam, hurry, options=options, n_best=n_best)
    ready = prepared(model, options.dtype)
    return program(*ready, jnp.asarray(source), jnp.asarray(source_lens))


def greedy(
    model: Model,
    source: Array,
    source_lens: Array,
    options: SearchOptions = SearchOptions(),
    *,
    hurry: bool = False,
) -> Hypotheses:
    """The best token at every step: what `beam_search` finds with beam=1.

    Args and returns are those of `beam_search`, with one hypothesis; `options.beam` is not used.
    """
    program = compiled(_greedy, hurry, options=replace(options, beam=1))
    ready = prepared(model, options.dtype)
    return program(*ready, jnp.asarray(source), jnp.asarray(source_lens))


def force(model: Model, source: Array, source_lens: Array, target_in: Array) -> Array:
    """The attention weights when the target is given: forced decoding.

    Args:
        model: the translator.
        source: [B, S] token ids.
        source_lens: [B].
        target_in: [B, T], the target behind <bos>, as `Batch.target_in`.

    Returns:
        The weights [B, T, S], float32: row t is computed before the t-th token is written.
    """
    graph, params = nnx.split(model)
    arrays = (jnp.asarray(array) for array in (source, source_lens, target_in))
    return _force(graph, params, *arrays)


@functools.partial(jax.jit, static_argnums=0)
def _force(graph: Any, params: Any, source: Array, lens: Array, target_in: Array) -> Array:
    model = nnx.merge(graph, params)
    _, weights = model.decode(model.encode(source, lens), target_in, return_weights=True)
    return weights.astype(jnp.float32)


def _greedy(
    model: Model, output: OutputLayer, source: Array, lens: Array, *, options: SearchOptions
) -> Hypotheses:
    B, S = source.shape
    T = options.longest(S)
    begun = start(model, options, source, lens)

    def going(carry: tuple) -> Array:
        step, *_, active, _, _, _ = carry
        return (step < T) & active.any()

    def advance(carry: tuple) -> tuple:
        step, state, token, active, log_prob, tokens, attention = carry
        state, readout, weights = model.step(begun.encoded, state, token)
        logits = output.logits(readout)
        scores, best = candidates(options, logits, 2, token, step + 1 >= begun.limit)
        place = scores[:, 0].argmax(-1, keepdims=True)  # what may not be written is -inf
        token = jnp.take_along_axis(best[:, 0], place, axis=1)  # [B, 1]
        gain = jnp.take_along_axis(scores[:, 0], place, axis=1)[:, 0]
        log_prob = jnp.where(active, log_prob + gain, log_prob)
        tokens = tokens.at[:, step].set(jnp.where(active, token[:, 0], PAD))
        look = jnp.where(active[:, None], weights[:, 0].astype(jnp.float32), 0.0)
        attention = attention.at[:, step].set(look)
        return step + 1, state, token, active & (token[:, 0] != EOS), log_prob, tokens, attention

    carry = (
        jnp.zeros((), jnp.int32),
        begun.state,
        begun.token,
        begun.active,
        jnp.zeros(B, jnp.float32),
        jnp.full((B, T), PAD, jnp.int32),
        jnp.zeros((B, T, S), jnp.float32),
    )
    *_, log_prob, tokens, attention = jax.lax.while_loop(going, advance, carry)
    length = (tokens != PAD).sum(1, dtype=jnp.int32)
    none = length == 0
    log_prob = jnp.where(none, -jnp.inf, log_prob)
    score = penalized(options, log_prob, length)
    found = Hypotheses(tokens, length, score, log_prob, attention)
    return jax.tree.map(lambda array: array[:, None], found)
