"""Search: greedy and beam search, each in one jitted program, and forced decoding.

A step of the beam extends every live hypothesis by every token and keeps the best; what ends with
<eos> is finished and takes no more part. The loop runs on the device from the first token to
the last. What was written, from where and looking at what, is noted step by step and put
together at the end, so that no step copies what is already written.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from regard.seq2seq.best_of import best_of
from regard.seq2seq.config import DTYPES
from regard.seq2seq.decoder import gather_hypotheses
from regard.seq2seq.look import Memory
from regard.seq2seq.model import Model
from regard.seq2seq.output_layer import OutputLayer, cast_kernels, for_search
from regard.seq2seq.vocabulary import BOS, EOS, PAD, UNK


@dataclass(frozen=True)
class SearchOptions:
    """How to search.

    Attributes:
        beam: how many hypotheses are kept alive; 1 is greedy search.
        length_penalty: α. Hypotheses are ranked by log p / ((5 + length) / 6)^α, <eos> counted (Wu
            et al. 2016, equation 14): 0 favors short ones, 1 about the best average token.
        max_ratio, max_extra: a translation has at most max_ratio · source length + max_extra
            tokens, <eos> counted; the last of them can only be <eos>.
        early_stop: True: a sentence is done as soon as `n_best` hypotheses are finished and no live
            one has a better score, as it stands, than the worst of those; False: only when `beam`
            are finished. It saves steps, and seldom changes what is best.
        forbid_unknown: never write <unk>.
        dtype: of the matrix products: "float32", "bfloat16", or "auto": bfloat16 where the machine
            is faster with it, which moves a log-probability by about 0.01.
    """

    beam: int = 5
    length_penalty: float = 1.0
    max_ratio: float = 1.5
    max_extra: int = 10
    early_stop: bool = True
    forbid_unknown: bool = False
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.beam < 1:
            raise ValueError(f"beam must be at least 1. Got {self.beam}.")
        if self.dtype not in DTYPES:
            listed = ", ".join(repr(name) for name in DTYPES)
            raise ValueError(f"dtype must be one of {listed}. Got {self.dtype!r}.")
        if self.max_ratio < 0 or self.max_extra < 1:
            raise ValueError(
                "max_ratio must not be negative and max_extra at least 1: room for <eos>. "
                f"Got max_ratio {self.max_ratio}, max_extra {self.max_extra}."
            )

    def longest(self, source_len: int) -> int:
        """How many tokens a translation of so long a source may have."""
        return int(self.max_ratio * source_len) + self.max_extra


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Hypotheses:
    """Translations of a batch, for each sentence the best first.

    Attributes:
        tokens: [B, K, T] int32, ended by <eos>, then padding.
        lens: [B, K], how many tokens, <eos> counted; 0 where there is no hypothesis.
        scores: [B, K], what they are ranked by; -inf where there is no hypothesis.
        log_probs: [B, K], log p(target | source).
        attention: [B, K, T, S], for each token the weights it was written with.
    """

    tokens: Array
    lens: Array
    scores: Array
    log_probs: Array
    attention: Array


def beam_search(
    model: Model,
    source: Array,
    source_lens: Array,
    options: SearchOptions = SearchOptions(),
    *,
    n_best: int | None = None,
) -> Hypotheses:
    """The best translations that a beam finds, each with its attention.

    A hypothesis is finished when <eos> is among the `beam` best extensions of its sentence; the
    search for a sentence ends with the `beam`-th that is, or before, by `early_stop`. With beam=1
    this is greedy search.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from regard.seq2seq.config import Config
        >>> from regard.seq2seq.model import Model
        >>> from regard.seq2seq.search import SearchOptions, beam_search
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

    Returns:
        The hypotheses; T is the longest that max_ratio and max_extra allow for S.
    """
    n_best = options.beam if n_best is None else n_best
    if not 1 <= n_best <= options.beam:
        raise ValueError(f"n_best must be from 1 to beam. Got {n_best}, beam {options.beam}.")
    graph, params = for_search(model, options.dtype)
    return _beam(graph, options, n_best, params, jnp.asarray(source), jnp.asarray(source_lens))


def greedy(
    model: Model, source: Array, source_lens: Array, options: SearchOptions = SearchOptions()
) -> Hypotheses:
    """The best token at every step: what `beam_search` finds with beam=1.

    Args and returns are those of `beam_search`, with one hypothesis; `options.beam` is not used.
    """
    graph, params = for_search(model, options.dtype)
    return _greedy(graph, options, params, jnp.asarray(source), jnp.asarray(source_lens))


def force(model: Model, source: Array, source_lens: Array, target_in: Array) -> Array:
    """Where the model looks while it is made to write a given target: forced decoding.

    Args:
        model: the translator.
        source: [B, S] token ids.
        source_lens: [B].
        target_in: [B, T], the target behind <bos>, as `Batch.target_in`.

    Returns:
        The attention [B, T, S], float32: row t is the look before the t-th token was written.
    """
    graph, params = nnx.split(model)
    arrays = (jnp.asarray(array) for array in (source, source_lens, target_in))
    return _force(graph, params, *arrays)


@functools.partial(jax.jit, static_argnums=0)
def _force(graph: Any, params: Any, source: Array, lens: Array, target_in: Array) -> Array:
    model = nnx.merge(graph, params)
    _, weights = model.decode(model.encode(source, lens), target_in, return_weights=True)
    return weights.astype(jnp.float32)


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
    """Sentences that are being translated, one per row; every array has them as its first axis."""

    row: Array  # [B], which sentence of the batch this is
    memory: Memory
    limit: Array  # [B], tokens that may be written
    state: Any  # [B, K, decoder] for each layer
    token: Array  # [B, K], the last one
    log_prob: Array  # [B, K]
    active: Array  # [B] bool: whether there is a hypothesis to extend
    notes: _Notes
    finished: _Finished


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _beam(
    graph: Any, options: SearchOptions, n_best: int, params: Any, source: Array, lens: Array
) -> Hypotheses:
    model, output = _ready(graph, params)
    B, S = source.shape
    T = options.longest(S)
    beam = _start(model, options, source, lens)
    notes, finished = beam.notes, beam.finished
    step = jnp.zeros((), jnp.int32)
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


def _ready(graph: Any, params: Any) -> tuple[Model, OutputLayer]:
    """The model with its kernels in the dtype of the products, and the vocabulary's layer."""
    model = nnx.merge(graph, params)
    output = OutputLayer.of(model)
    return nnx.merge(graph, cast_kernels(params, model.config.compute_dtype)), output


def _sizes(B: int) -> list[int]:
    """B, and its halves down to 8 or so: 64, 32, 16, 8."""
    sizes = [B]
    while sizes[-1] > 8:
        sizes.append(sizes[-1] // 2)
    return sizes


def _start(model: Model, options: SearchOptions, source: Array, lens: Array) -> _Beam:
    B, S = source.shape
    T, K = options.longest(S), options.beam
    memory = model.encode(source, lens)
    lens = lens.astype(jnp.int32)
    longest = (options.max_ratio * lens.astype(jnp.float32)).astype(jnp.int32) + options.max_extra
    integers, floats = (jnp.zeros((B, K), dtype) for dtype in (jnp.int32, jnp.float32))
    # One hypothesis to begin with: nothing. The others cannot be extended.
    begins = (jnp.arange(K)[None, :] == 0) & (lens[:, None] > 0)
    log_prob = jnp.where(begins, floats, -jnp.inf)
    state = jax.tree.map(
        lambda part: jnp.broadcast_to(part, (B, K, part.shape[-1])), model.start(memory)
    )
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
        state,
        jnp.full((B, K), BOS, jnp.int32),
        log_prob,
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
    B, K = beam.token.shape
    state, readout, weights = model.step(beam.memory, beam.state, beam.token)
    logits = output.logits(readout)
    # Of one hypothesis K extensions may live on, and one may end.
    scores, tokens = _candidates(options, logits, K + 1, last=step + 1 >= beam.limit)
    each = tokens.shape[-1]
    total = (beam.log_prob[:, :, None] + scores).reshape(B, K * each)
    # 2K, because up to K of them may end: enough is left to live on.
    total, place = jax.lax.top_k(total, min(2 * K, K * each))  # [B, 2K]
    token = jnp.take_along_axis(tokens.reshape(B, K * each), place, axis=1)
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
    notes = _Notes(
        beam.notes.token.at[:, step].set(token),
        beam.notes.parent.at[:, step].set(parent),
        beam.notes.weights.at[:, step].set(weights.astype(jnp.float32)),
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
        goes_on &= _penalized(options, log_prob.max(1), step + 1) > to_beat
    return goes_on


def _penalized(options: SearchOptions, log_prob: Array, length: Array) -> Array:
    """log p / ((5 + length) / 6)^α."""
    return log_prob / ((5.0 + length.astype(jnp.float32)) / 6.0) ** options.length_penalty


def _candidates(options: SearchOptions, logits: Array, k: int, last: Array) -> tuple[Array, Array]:
    """For each hypothesis its best tokens: log p [B, K, k] and ids [B, K, k].

    Args:
        logits: [B, K, V].
        k: how many.
        last: [B], where nothing but <eos> may be written.
    """
    never = (PAD, BOS, UNK) if options.forbid_unknown else (PAD, BOS)
    # As many more are asked for as may have to be crossed out.
    k = min(k + len(never), logits.shape[-1])
    values, tokens, log_total = best_of(logits, k)
    tokens, log_total = tokens.astype(jnp.int32), log_total[..., None]
    end = logits[..., EOS : EOS + 1] - log_total
    crossed = functools.reduce(jnp.logical_or, [tokens == token for token in never])
    scores = jnp.where(crossed, -jnp.inf, values - log_total)
    first = (jnp.arange(k) == 0).reshape(1, 1, k)
    last = last[:, None, None]
    scores = jnp.where(last, jnp.where(first, end, -jnp.inf), scores)
    return scores, jnp.where(last, jnp.where(first, EOS, PAD), tokens)


def _finish(
    options: SearchOptions, step: Array, beam: _Beam, total: Array, parent: Array, ends: Array
) -> _Finished:
    """Puts what ends into the free places; [B, 2K] candidates, best first."""
    K = beam.token.shape[1]
    old = beam.finished
    among_best = jnp.arange(total.shape[1])[None, :] < K
    place = old.count[:, None] + jnp.cumsum(ends & among_best, axis=1, dtype=jnp.int32) - 1
    takes = ends & among_best & (place < K) & beam.active[:, None]
    place = jnp.where(takes, place, K)  # K is no place
    score = _penalized(options, total, step + 1)
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


@functools.partial(jax.jit, static_argnums=(0, 1))
def _greedy(
    graph: Any, options: SearchOptions, params: Any, source: Array, lens: Array
) -> Hypotheses:
    model, output = _ready(graph, params)
    S = source.shape[1]
    T = options.longest(S)
    options = SearchOptions(**{**vars(options), "beam": 1})
    start = _start(model, options, source, lens)
    B = source.shape[0]

    def going(carry: tuple) -> Array:
        step, *_, active, _, _, _ = carry
        return (step < T) & active.any()

    def advance(carry: tuple) -> tuple:
        step, state, token, active, log_prob, tokens, attention = carry
        state, readout, weights = model.step(start.memory, state, token)
        logits = output.logits(readout)
        scores, best = _candidates(options, logits, 1, last=step + 1 >= start.limit)
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
        start.state,
        start.token,
        start.active,
        jnp.zeros(B, jnp.float32),
        jnp.full((B, T), PAD, jnp.int32),
        jnp.zeros((B, T, S), jnp.float32),
    )
    *_, log_prob, tokens, attention = jax.lax.while_loop(going, advance, carry)
    length = (tokens != PAD).sum(1, dtype=jnp.int32)
    none = length == 0
    log_prob = jnp.where(none, -jnp.inf, log_prob)
    score = _penalized(options, log_prob, length)
    found = Hypotheses(tokens, length, score, log_prob, attention)
    return jax.tree.map(lambda array: array[:, None], found)
