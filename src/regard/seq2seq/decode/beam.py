"""Beam search on the device, from the first token to the last.

A step extends every live hypothesis by every token and keeps the best; what ends with <eos> is
finished and takes no more part. What was written, from where and looking at what, is noted step
by step and put together at the end, so that no step copies what is already written.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from regard.seq2seq.decode.hypotheses import Hypotheses, SearchOptions, candidates, penalized
from regard.seq2seq.model.attention import Memory
from regard.seq2seq.model.decoder import gather_hypotheses
from regard.seq2seq.model.output_layer import OutputLayer
from regard.seq2seq.model.translation_model import Model
from regard.seq2seq.text.vocabulary import BOS, EOS, PAD


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Notes:
    """What was written at each step; [B, T, K, ...], K the beam.

    Attributes:
        token: of each hypothesis that lived on.
        parent: which hypothesis of the step before it extended.
        weights: where each hypothesis *of the step before* looked.
    """

    token: Array
    parent: Array
    weights: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Finished:
    """Hypotheses that have ended, [B, K]; a place that is still free has a score of -inf.

    Attributes:
        score: with the length penalty.
        log_prob: without.
        step: at which <eos> was written.
        parent: the live hypothesis that it ended.
        count: [B], how many there are.
    """

    score: Array
    log_prob: Array
    step: Array
    parent: Array
    count: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Beam:
    """Sentences that are being translated, one per row; every array has them as its first axis.

    K is 1 before the first step, when there is nothing but the empty hypothesis, then the beam.
    """

    row: Array  # [B], which sentence of the batch this is
    memory: Memory
    limit: Array  # [B], tokens that may be written
    state: Any  # [B, K, decoder] for each layer
    token: Array  # [B, K], the last one
    log_prob: Array  # [B, K]
    active: Array  # [B] bool: whether there is a hypothesis to extend
    notes: _Notes
    finished: _Finished


def search_with_beam(
    model: Model,
    output: OutputLayer,
    options: SearchOptions,
    n_best: int,
    source: Array,
    lens: Array,
) -> Hypotheses:
    """The n best of a beam; see `regard.seq2seq.decode.search.beam_search`."""
    B, S = source.shape
    T = options.longest(S)
    # The first step is by itself: it has one hypothesis to extend, the empty one.
    step = jnp.zeros((), jnp.int32)
    beam = start(model, options, source, lens)
    beam, step = _advance(model, output, options, n_best, step, beam), step + 1
    notes, finished = beam.notes, beam.finished
    # When half of the sentences are done, the other half goes on as a smaller batch.
    for rows in _sizes(B):
        beam = _keep_active(beam, rows)
        least = rows // 2 if rows > 8 else 0

        def going(state: tuple[Array, _Beam], least: int = least) -> Array:
            step, beam = state
            return (step < T) & (beam.active.sum() > least)

        def advance(state: tuple[Array, _Beam]) -> tuple[Array, _Beam]:
            step, beam = state
            return step + 1, _advance(model, output, options, n_best, step, beam)

        step, beam = jax.lax.while_loop(going, advance, (step, beam))
        notes, finished = jax.tree.map(
            lambda all_rows, part, row=beam.row: all_rows.at[row].set(part),
            (notes, finished),
            (beam.notes, beam.finished),
        )
    return _read_out(notes, finished, n_best)


def _sizes(B: int) -> list[int]:
    """B, and its halves down to 8 or so: 64, 32, 16, 8."""
    sizes = [B]
    while sizes[-1] > 8:
        sizes.append(sizes[-1] // 2)
    return sizes


def start(model: Model, options: SearchOptions, source: Array, lens: Array) -> _Beam:
    """The empty hypothesis of every sentence, before the first step."""
    B, S = source.shape
    T, K = options.longest(S), options.beam
    memory = model.encode(source, lens)
    lens = lens.astype(jnp.int32)
    longest = (options.max_ratio * lens.astype(jnp.float32)).astype(jnp.int32) + options.max_extra
    integers, floats = (jnp.zeros((B, K), dtype) for dtype in (jnp.int32, jnp.float32))
    notes = _Notes(
        jnp.full((B, T, K), PAD, jnp.int32),
        jnp.zeros((B, T, K), jnp.int32),
        jnp.zeros((B, T, K, S), jnp.float32),
    )
    finished = _Finished(
        floats - jnp.inf, floats - jnp.inf, integers - 1, integers, jnp.zeros(B, jnp.int32)
    )
    return _Beam(
        jnp.arange(B, dtype=jnp.int32),
        memory,
        jnp.minimum(longest, T),
        model.start(memory),
        jnp.full((B, 1), BOS, jnp.int32),
        jnp.where(lens > 0, 0.0, -jnp.inf)[:, None],
        lens > 0,
        notes,
        finished,
    )


def _keep_active(beam: _Beam, rows: int) -> _Beam:
    """The first `rows` sentences, those that are not done before those that are."""
    if rows == beam.row.shape[0]:
        return beam
    order = jnp.argsort(~beam.active, stable=True)[:rows]
    per_sentence = dict(
        row=beam.row,
        limit=beam.limit,
        state=beam.state,
        token=beam.token,
        log_prob=beam.log_prob,
        active=beam.active,
        notes=beam.notes,
        finished=beam.finished,
    )
    kept = jax.tree.map(lambda array: array[order], per_sentence)
    return _Beam(memory=beam.memory.rows(order), **kept)


def _advance(
    model: Model,
    output: OutputLayer,
    options: SearchOptions,
    n_best: int,
    step: Array,
    beam: _Beam,
) -> _Beam:
    """Every live hypothesis one token further."""
    B, K = beam.token.shape[0], options.beam
    state, readout, weights = model.step(beam.memory, beam.state, beam.token)
    logits = output.logits(readout)
    # Of one hypothesis K extensions may live on, and one may end.
    scores, tokens = candidates(options, logits, K + 1, last=step + 1 >= beam.limit)
    each = tokens.shape[-1]
    total = (beam.log_prob[:, :, None] + scores).reshape(B, -1)
    # 2K, because up to K of them may end: enough is left to live on.
    total, place = jax.lax.top_k(total, min(2 * K, total.shape[1]))  # [B, 2K]
    token = jnp.take_along_axis(tokens.reshape(B, -1), place, axis=1)
    parent = (place // each).astype(jnp.int32)
    possible = total > -jnp.inf
    ends = (token == EOS) & possible
    finished = _finish(options, step, beam, total, parent, ends)

    # The K best that go on, in their order: those that do not are moved behind them.
    order = jnp.argsort(~(possible & ~ends), axis=1, stable=True)[:, :K]
    token, parent, total, goes_on = (
        jnp.take_along_axis(array, order, axis=1)
        for array in (token, parent, total, possible & ~ends)
    )
    short = K - token.shape[1]  # a tiny vocabulary has fewer than K extensions
    if short > 0:
        token, parent, total = (jnp.pad(a, ((0, 0), (0, short))) for a in (token, parent, total))
        goes_on = jnp.pad(goes_on, ((0, 0), (0, short)))
    log_prob = jnp.where(goes_on, total, -jnp.inf)
    weights = jnp.broadcast_to(weights.astype(jnp.float32), (B, K, weights.shape[-1]))
    notes = _Notes(
        beam.notes.token.at[:, step].set(token),
        beam.notes.parent.at[:, step].set(parent),
        beam.notes.weights.at[:, step].set(weights),
    )
    return _Beam(
        beam.row,
        beam.memory,
        beam.limit,
        gather_hypotheses(state, parent),
        token,
        log_prob,
        beam.active & _goes_on(options, n_best, step, log_prob, finished),
        notes,
        finished,
    )


def _goes_on(
    options: SearchOptions, n_best: int, step: Array, log_prob: Array, finished: _Finished
) -> Array:
    """[B]: whether there is a hypothesis to extend, and a reason to."""
    live = log_prob > -jnp.inf
    goes_on = live.any(1) & (finished.count < log_prob.shape[1])
    if options.early_stop:
        to_beat = jax.lax.top_k(finished.score, n_best)[0][:, -1]
        goes_on &= penalized(options, log_prob.max(1), step + 1) > to_beat
    return goes_on


def _finish(
    options: SearchOptions, step: Array, beam: _Beam, total: Array, parent: Array, ends: Array
) -> _Finished:
    """Puts what ends into the free places; [B, 2K] candidates, best first."""
    K, old = options.beam, beam.finished
    among_best = jnp.arange(total.shape[1])[None, :] < K
    place = old.count[:, None] + jnp.cumsum(ends & among_best, axis=1, dtype=jnp.int32) - 1
    takes = ends & among_best & (place < K) & beam.active[:, None]
    place = jnp.where(takes, place, K)  # K is no place
    score = penalized(options, total, step + 1)
    rows = jnp.arange(total.shape[0])[:, None]

    def put(places: Array, new: Array) -> Array:
        return places.at[rows, place].set(jnp.broadcast_to(new, place.shape), mode="drop")

    return _Finished(
        put(old.score, score),
        put(old.log_prob, total),
        put(old.step, step),
        put(old.parent, parent),
        old.count + takes.sum(1, dtype=jnp.int32),
    )


def _read_out(notes: _Notes, finished: _Finished, n_best: int) -> Hypotheses:
    """Follows each finished hypothesis back to its first token."""
    score, best = jax.lax.top_k(finished.score, n_best)  # [B, K]
    log_prob, end, parent = (
        jnp.take_along_axis(array, best, axis=1)
        for array in (finished.log_prob, finished.step, finished.parent)
    )

    def back(hypothesis: Array, noted: tuple[Array, _Notes]) -> tuple[Array, tuple[Array, Array]]:
        """`hypothesis` is whom the step after this one extended."""
        step, note = noted
        is_end, before_end = end == step, end > step
        token = jnp.take_along_axis(note.token, hypothesis, axis=1)
        token = jnp.where(is_end, EOS, jnp.where(before_end, token, PAD))
        extended = jnp.take_along_axis(note.parent, hypothesis, axis=1)
        extended = jnp.where(is_end, parent, jnp.where(before_end, extended, 0))
        weights = jnp.take_along_axis(note.weights, extended[:, :, None], axis=1)
        weights = jnp.where((is_end | before_end)[:, :, None], weights, 0.0)
        return extended, (token, weights)

    by_step = jax.tree.map(lambda array: array.swapaxes(0, 1), notes)  # [T, B, ...]
    steps = jnp.arange(by_step.token.shape[0], dtype=jnp.int32)
    start = jnp.zeros_like(parent)
    _, (tokens, weights) = jax.lax.scan(back, start, (steps, by_step), reverse=True)
    return Hypotheses(
        jnp.moveaxis(tokens, 0, -1),  # [B, K, T]
        end + 1,
        score,
        log_prob,
        jnp.moveaxis(weights, 0, -2),  # [B, K, T, S]
    )
