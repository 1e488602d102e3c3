"""Beam search on the device, from the first token to the last.

A step extends every live hypothesis by every token and keeps the best. A hypothesis that ends with
<eos> is finished and is not extended any more. The greedy hypothesis, which has the best token at
each step, is never dropped, so that a beam finds nothing worse than greedy search does. The tokens,
parents and weights of each step are noted, and put together at the end: no step copies what is
already written.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from regard.seq2seq.decode.hypotheses import (
    Hypotheses,
    SearchOptions,
    best_possible,
    candidates,
    penalized,
)
from regard.seq2seq.model.attention import Encoded
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
        weights: the attention of each hypothesis *of the step before*.
    """

    token: Array
    parent: Array
    weights: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Finished:
    """Hypotheses that have ended, [B, K + 1]; a place that is still free has a score of -inf.

    The last place is for the greedy hypothesis.

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
    encoded: Encoded
    limit: Array  # [B], tokens that may be written
    state: Any  # [B, K, ...], the decoder's
    token: Array  # [B, K], the last one
    log_prob: Array  # [B, K]
    greedy: Array  # [B], which of the K is the greedy hypothesis; -1 once it has ended
    active: Array  # [B] bool: whether there is a hypothesis to extend
    notes: _Notes
    finished: _Finished


@dataclass(frozen=True)
class _Extensions:
    """Every live hypothesis with each of its candidates, side by side.

    Attributes:
        total: [B, K · each], log p of the hypothesis with the token.
        token: [B, K · each].
        each: candidates of a hypothesis.
        greedy: [B], the place of the greedy hypothesis with its best token.
        greedy_total: [B], its log p.
        greedy_ends, greedy_lives: [B] bool, whether it ends with that, or goes on; neither where
            it had ended before.
    """

    total: Array
    token: Array
    each: int
    greedy: Array
    greedy_total: Array
    greedy_ends: Array
    greedy_lives: Array

    @classmethod
    def of(cls, beam: _Beam, scores: Array, tokens: Array) -> "_Extensions":
        """scores, tokens [B, K, each], as `candidates` gives them."""
        B, _, each = scores.shape
        lane = jnp.maximum(beam.greedy, 0)
        own = jnp.take_along_axis(scores, lane[:, None, None], axis=1)[:, 0]  # [B, each]
        greedy = lane * each + own.argmax(1).astype(jnp.int32)
        total, token = (beam.log_prob[:, :, None] + scores).reshape(B, -1), tokens.reshape(B, -1)
        best, is_end = _at(total, greedy), _at(token, greedy) == EOS
        there = (beam.greedy >= 0) & (best > -jnp.inf)
        return cls(total, token, each, greedy, best, there & is_end, there & ~is_end)


def search_with_beam(
    model: Model,
    output: OutputLayer,
    source: Array,
    lens: Array,
    *,
    options: SearchOptions,
    n_best: int,
) -> Hypotheses:
    """The n best of a beam; see `regard.seq2seq.decode.search.beam_search`."""
    B, S = source.shape
    T = options.longest(S)
    # The first step is by itself: it has one hypothesis to extend, the empty one.
    step = jnp.zeros((), jnp.int32)
    beam = start(model, options, source, lens)
    beam, step = _advance(model, output, options, n_best, step, beam), step + 1
    notes, finished = beam.notes, beam.finished
    # When most of the sentences are done, the others go on as a smaller batch.
    sizes = _sizes(B)
    for rows, least in zip(sizes, [*sizes[1:], 0], strict=True):
        beam = _keep_active(beam, rows)

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
    """B, and on a CPU its quarters: 128, 32, 8.

    Each size is a program to compile: halves take twice as long to, and are no faster. A GPU takes
    as long for few sentences as for many.
    """
    sizes = [B]
    while sizes[-1] > 16 and jax.default_backend() == "cpu":
        sizes.append(max(sizes[-1] // 4, 8))
    return sizes


def start(model: Model, options: SearchOptions, source: Array, lens: Array) -> _Beam:
    """The empty hypothesis of every sentence, before the first step."""
    B, S = source.shape
    T, K = options.longest(S), options.beam
    encoded = model.encode(source, lens, longest=jnp.minimum(lens.max(), S).astype(jnp.int32))
    lens = lens.astype(jnp.int32)
    longest = (options.max_ratio * lens.astype(jnp.float32)).astype(jnp.int32) + options.max_extra
    integers, floats = (jnp.zeros((B, K + 1), dtype) for dtype in (jnp.int32, jnp.float32))
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
        encoded if K == 1 else model.for_hypotheses(encoded),
        jnp.minimum(longest, T),
        model.start(encoded, T),
        jnp.full((B, 1), BOS, jnp.int32),
        jnp.where(lens > 0, 0.0, -jnp.inf)[:, None],
        jnp.zeros(B, jnp.int32),
        lens > 0,
        notes,
        finished,
    )


def _keep_active(beam: _Beam, rows: int) -> _Beam:
    """The first `rows` sentences, those that are not done before those that are."""
    if rows == beam.row.shape[0]:
        return beam
    order = jnp.argsort(~beam.active, stable=True)[:rows]
    per_sentence = {name: part for name, part in vars(beam).items() if name != "encoded"}
    kept = jax.tree.map(lambda array: array[order], per_sentence)
    return _Beam(encoded=beam.encoded.rows(order), **kept)


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
    state, readout, weights = model.step(beam.encoded, beam.state, beam.token)
    logits = output.logits(readout)
    # Of one hypothesis K extensions may live on, and one may end.
    last = step + 1 >= beam.limit
    scores, tokens = candidates(options, logits, K + 1, beam.token, last)
    extensions = _Extensions.of(beam, scores, tokens)
    # 2K, because up to K of them may end: enough is left to live on.
    total, place = jax.lax.top_k(extensions.total, min(2 * K, extensions.total.shape[1]))
    possible = total > -jnp.inf  # [B, 2K]
    ends = (jnp.take_along_axis(extensions.token, place, axis=1) == EOS) & possible
    goes_on = possible & ~ends
    finished = _finish(options, step, beam, extensions, total, place, ends)

    # The K best that go on, in their order: those that do not are moved behind them.
    order = jnp.argsort(~goes_on, axis=1, stable=True)[:, :K]
    place, total, goes_on = (
        jnp.take_along_axis(array, order, axis=1) for array in (place, total, goes_on)
    )
    short = K - place.shape[1]  # a tiny vocabulary has fewer than K extensions
    place, total, goes_on = (jnp.pad(a, ((0, 0), (0, short))) for a in (place, total, goes_on))
    # The greedy hypothesis takes the last place, if it has none.
    greedy = extensions.greedy[:, None]
    there = (place == greedy) & goes_on
    lives = extensions.greedy_lives
    added = (jnp.arange(K) == K - 1)[None] & (lives & ~there.any(1))[:, None]
    place = jnp.where(added, greedy, place)
    log_prob = jnp.where(goes_on, total, -jnp.inf)
    log_prob = jnp.where(added, extensions.greedy_total[:, None], log_prob)
    token = jnp.take_along_axis(extensions.token, place, axis=1)
    parent = (place // extensions.each).astype(jnp.int32)
    lane = jnp.where(lives, (there | added).argmax(1).astype(jnp.int32), -1)

    weights = jnp.broadcast_to(weights.astype(jnp.float32), (B, K, weights.shape[-1]))
    notes = _Notes(
        beam.notes.token.at[:, step].set(token),
        beam.notes.parent.at[:, step].set(parent),
        beam.notes.weights.at[:, step].set(weights),
    )
    beam = replace(
        beam,
        state=gather_hypotheses(state, parent),
        token=token,
        log_prob=log_prob,
        greedy=lane,
        notes=notes,
        finished=finished,
    )
    return replace(beam, active=beam.active & _goes_on(options, n_best, step, beam))


def gather_hypotheses(state: Any, parent: Array) -> Any:
    """The states of the hypotheses that live on: row b gets state[b, parent[b]].

    Args:
        state: a tree of arrays [B, T, ...].
        parent: [B, K] integers below T.
    """
    rows = jnp.arange(parent.shape[0], dtype=parent.dtype)[:, None]
    return jax.tree.map(lambda part: part[rows, parent], state)  # [B, K, ...]


def _at(rows: Array, place: Array) -> Array:
    """[B, N], [B] -> [B]: the number at a place of each row."""
    return jnp.take_along_axis(rows, place[:, None], axis=1)[:, 0]


def _goes_on(options: SearchOptions, n_best: int, step: Array, beam: _Beam) -> Array:
    """[B]: whether there is a hypothesis to extend, and a reason to."""
    finished, log_prob = beam.finished, beam.log_prob
    worst, best = jax.lax.top_k(finished.score, n_best)[0][:, -1], finished.score.max(1)

    def can_beat(log_prob: Array, score: Array) -> Array:
        return best_possible(options, log_prob, step + 2, beam.limit) > score

    greedy = (beam.greedy >= 0) & can_beat(_at(log_prob, jnp.maximum(beam.greedy, 0)), best)
    goes_on = (log_prob > -jnp.inf).any(1) & ((finished.count < options.beam) | greedy)
    return goes_on & can_beat(log_prob.max(1), worst) if options.early_stop else goes_on


def _finish(
    options: SearchOptions,
    step: Array,
    beam: _Beam,
    extensions: "_Extensions",
    total: Array,
    place: Array,
    ends: Array,
) -> _Finished:
    """Puts what ends into the free places.

    Args:
        options: with beam and length penalty.
        step: the present one.
        beam: before it.
        extensions: all of them.
        total, place, ends: [B, 2K] of the best, the best first: log p, which extension each is, and
            whether it ends.
    """
    K, old = options.beam, beam.finished
    is_greedy = (place == extensions.greedy[:, None]) & (beam.greedy >= 0)[:, None]
    takes = ends & beam.active[:, None] & (jnp.arange(total.shape[1]) < K)[None] & ~is_greedy
    taken = old.count - (old.score[:, K] > -jnp.inf).astype(jnp.int32)
    free = taken[:, None] + jnp.cumsum(takes, axis=1, dtype=jnp.int32) - 1
    takes &= free < K
    into = jnp.where(takes, free, K + 1)  # K + 1 is no place
    rows = jnp.arange(total.shape[0])[:, None]
    greedy_ends = extensions.greedy_ends & beam.active

    def put(places: Array, new: Array, greedy: Array) -> Array:
        new = jnp.broadcast_to(new, into.shape)
        places = places.at[rows, into].set(new, mode="drop")
        return places.at[:, K].set(jnp.where(greedy_ends, greedy, places[:, K]))

    score, greedy_score = (
        penalized(options, log_prob, step + 1) for log_prob in (total, extensions.greedy_total)
    )
    each = extensions.each
    return _Finished(
        put(old.score, score, greedy_score),
        put(old.log_prob, total, extensions.greedy_total),
        put(old.step, step, step),
        put(old.parent, (place // each).astype(jnp.int32), extensions.greedy // each),
        old.count + takes.sum(1, dtype=jnp.int32) + greedy_ends.astype(jnp.int32),
    )


def _read_out(notes: _Notes, finished: _Finished, n_best: int) -> Hypotheses:
    """Follows each finished hypothesis back to its first token."""
    score, best = jax.lax.top_k(finished.score, n_best)  # [B, K]
    log_prob, end, parent = (
        jnp.take_along_axis(array, best, axis=1)
        for array in (finished.log_prob, finished.step, finished.parent)
    )

    def back(hypothesis: Array, noted: tuple[Array, _Notes]) -> tuple[Array, tuple[Array, Array]]:
        """`hypothesis` is the one that the step after this one extended."""
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
