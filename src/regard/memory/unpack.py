"""Attending to a memory: the arguments of an ordinary call of `attend` that equals it.

Keys and values slot by slot, the score of stored keys, and masks of positions in the text as masks
of slots.
"""

import functools
from dataclasses import replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array

from regard.mask import Band, Mask
from regard.memory.memory import Memory
from regard.memory.slots import without_heads
from regard.score.contract import Score
from regard.score.dot import Dot
from regard.score.positions import as_int32

ByAlign = dict[str, Array]  # int32 [B|1, T], where the queries stand for bands of each alignment


class Unpacked(NamedTuple):
    """A memory as an ordinary call: what `attend` gets in its place.

    Attributes:
        lost: bool [B, T], queries whose keys the memory could not keep: their output is NaN.
        at, held: int32 [B, T] and [B|1, S], the positions of queries and of what the slots hold.
    """

    key: Array
    value: Array
    score: Score
    mask: Mask
    lost: Array | None
    at: Array
    held: Array


def unpack(
    memory: Memory,
    query: Array,
    score: Score | None,
    mask: Mask | Array | None,
    valid_lens: Array | None,
    query_positions: Array | None,
) -> Unpacked:
    """What stands for this memory in a call of attend with this query.

    Args:
        score: that the caller gave; None: none.
    """
    made = memory.made
    if query.ndim != made.rank:
        forms = {2: "(T, D)", 3: "(B, T, D)", 4: "(B, T, N, D)"}
        raise ValueError(
            f"this memory was made for queries {forms[made.rank]}. Got query "
            f"{list(query.shape)}, memory.key {list(memory.key.shape)}. Fix: a query of rank "
            f"{made.rank}, or a memory of keys of rank {query.ndim}."
        )
    if memory.score is not None:  # the prepared one need not know what it was made of
        try:
            memory.score.check(query.shape[-1], made.key_width)
        except ValueError as error:
            raise ValueError(
                f"{error} The arrays: query {list(query.shape)}, and a memory of keys of width "
                f"{made.key_width}, stored as memory.key {list(memory.key.shape)}."
            ) from None
    count = query.shape[-2] if made.rank < 4 else query.shape[1]
    mask = mask if isinstance(mask, Mask) else Mask() if mask is None else Mask.boolean(mask)
    mask = mask if valid_lens is None else mask & Mask.lengths(valid_lens)
    at = _query_positions(memory, count, query_positions)
    if query_positions is None:  # as in a call without a memory, see Mask.window
        first = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), at.shape)
    else:
        first = at
    by_align = {"end": at, "start": first}
    lost = None if made.whole else _lost(memory, at, by_align, mask)
    mask = _in_slots(memory, mask, by_align, query_positions is None)
    key, value = _slots(memory, memory.key), _slots(memory, memory.value)
    if key.shape[2] != value.shape[2]:  # prepared by parameters per head: no sharing
        value = jnp.repeat(value, key.shape[2] // value.shape[2], axis=2)
    key, value = (without_heads(a, made.rank) for a in (key, value))
    return Unpacked(key, value, _score_of(memory, score), mask, lost, at, _held(memory))


def _score_of(memory: Memory, given: Score | None) -> Score:
    found = memory.prepared_score()
    if found is None:
        return Dot() if given is None else given
    if given is not None and not _same(given, cast(Score, memory.score)):
        raise ValueError(
            "a memory's keys are prepared for one score, which it carries. Got "
            f"score={type(given).__name__}(...) for a memory made for "
            f"{type(memory.score).__name__}(...). Fix: leave score= out; or Memory.of(key, "
            "value, score=None), which stores raw keys for any score."
        )
    return found


def _slots(memory: Memory, held: Array) -> Array:
    """[B, S, K, F], whatever the kind."""
    if memory.table is None:
        return held
    B, P = memory.table.shape
    pages = held.at[jnp.clip(memory.table, 0)].get(mode="clip")  # [B, P, page, K, F]
    return pages.reshape(B, P * held.shape[1], *held.shape[2:])


def _query_positions(memory: Memory, count: int, given: Array | None) -> Array:
    """int32 [B, T]; the last query is at the last key, unless the caller says otherwise."""
    B, window = memory.length.shape[0], memory.made.window
    if given is None:
        if window is not None and count > memory.max_len - window + 1:
            raise ValueError(
                f"{count} queries at once with a window of {window} need {window + count - 1} "
                f"slots: older keys are overwritten. Got max_len {memory.max_len}. Fix: "
                f"max_len={window + count - 1}, or at most {memory.max_len - window + 1} "
                "queries in a call."
            )
        return memory.positions(count) - count
    given = as_int32("query_positions", given)
    if given.shape not in ((count,), (B, count)) or given.dtype.kind not in "iu":
        raise ValueError(
            "query_positions must be integers (T,) or (B, T): where each query stands in its "
            f"text. Got {list(given.shape)} of dtype {given.dtype} for T = {count}, B = {B}. "
            "Fix: memory.positions(T), before the chunk is appended."
        )
    return jnp.broadcast_to(given.astype(jnp.int32), (B, count))


def _lost(memory: Memory, at: Array, by_align: ByAlign, mask: Mask) -> Array:
    """bool [B, T]: queries that would see a key that was overwritten or never written."""
    if memory.made.window is not None:
        oldest = jnp.maximum(memory.length - memory.max_len, 0)[:, None]
        return (oldest > jnp.maximum(at - memory.made.window + 1, 0)) & (at >= 0)
    room, over = memory.room(), memory.overflowed()[:, None]
    room = room[:, None] if isinstance(room, Array) else room
    for band in mask.bands:
        if band.right is not None:
            over &= by_align[band.align] + band.right >= room
    return jnp.broadcast_to(over, at.shape)


def _in_slots(memory: Memory, mask: Mask, at: ByAlign, at_end: bool) -> Mask:
    """The mask of positions as a mask of slots, and only slots that hold a key."""
    if memory.made.window is not None:
        held = _held(memory)
        window = Mask.window(memory.made.window - 1, 0)
        found = _by_position(mask & window, at, held, memory.made.rank)
        array = _pairs((held >= 0)[:, None], memory.made.rank)
        return found & Mask.boolean(array)
    found = _by_ranges(mask, at, memory.made.rank)
    if memory.made.whole:
        return found
    before = [b for b in mask.bands if b.align == "end" and b.right is not None and b.right <= 0]
    if at_end and before:  # the last key is the last query's: no further
        return found
    length = memory.length[0] if memory.made.rank == 2 else memory.length
    return found & Mask.lengths(length)


def _held(memory: Memory) -> Array:
    """int32 [B|1, S], the position of what each slot holds or will hold; < 0 for none yet."""
    slot = jnp.arange(memory.max_len, dtype=jnp.int32)[None]
    if memory.made.window is None:
        return slot
    last = memory.length[:, None] - 1
    return last - (last - slot) % memory.max_len


def _same(given: Score, carried: Score) -> bool:
    """Whether two scores are known to be equal, without comparing arrays."""
    structures: list[Any] = [jax.tree.structure(given), jax.tree.structure(carried)]
    if structures[0] != structures[1]:
        return False
    ours, theirs = jax.tree.leaves(given), jax.tree.leaves(carried)
    return all(
        a is b or (not (hasattr(a, "shape") or hasattr(b, "shape")) and a == b)
        for a, b in zip(ours, theirs, strict=True)
    )


# ---------------------------------------------------------------------------------------------
# Masks of positions.


def _by_ranges(mask: Mask, at: ByAlign, rank: int) -> Mask:
    """Bands as one range of keys per query, where slot s holds position s."""
    found = replace(
        mask, bands=(), excluded=tuple(_by_ranges(inner, at, rank) for inner in mask.excluded)
    )
    for band in mask.bands:
        there = at[band.align]
        if band.right is not None:
            found &= Mask.lengths(_lens(there + band.right + 1, rank))
        if band.left is not None:
            found &= ~Mask.lengths(_lens(there - band.left, rank))
    return found


def _lens(lens: Array, rank: int) -> Array:
    """[B, T] as the shape that lengths have for arrays of this rank; one per example for T = 1."""
    lens = jnp.maximum(lens, 0)
    if rank == 2:
        return lens[0]
    return lens[:, 0] if lens.shape[1] == 1 else lens


def _by_position(mask: Mask, at: ByAlign, held: Array, rank: int) -> Mask:
    """A mask of positions, where slot s of an example holds position held[b, s], < 0 for none."""

    def ranges(band: Band) -> Array:
        here, there = held[:, None], at[band.align][:, :, None]
        parts = [] if band.right is None else [here <= there + band.right]
        parts += [] if band.left is None else [here >= there - band.left]
        return _pairs(functools.reduce(jnp.logical_and, parts), rank)

    def lengths(lens: Array) -> Array:
        lens = jnp.asarray(lens)
        if not jnp.issubdtype(lens.dtype, jnp.integer):
            raise TypeError(f"valid_lens must be integers. Got dtype {lens.dtype}.")
        most = min(jnp.iinfo(lens.dtype).max, jnp.iinfo(jnp.int32).max)
        lens = jnp.minimum(lens, jnp.asarray(most, lens.dtype)).astype(jnp.int32)
        if rank == 4 and lens.ndim == 3:
            return held[:, None, None] < lens[..., None]
        if lens.ndim == 1:
            lens = lens[None] if rank == 2 else lens[:, None]
        return _pairs(held[:, None] < (lens[..., None] if lens.ndim else lens), rank)

    def segments(pair: tuple[Array, Array]) -> tuple[Array, Array]:
        query_ids, key_ids = (jnp.asarray(ids) for ids in pair)
        ids = jnp.broadcast_to(jnp.atleast_2d(key_ids), (held.shape[0], key_ids.shape[-1]))
        ids = jnp.take_along_axis(ids, jnp.clip(held, 0, ids.shape[1] - 1), axis=1)
        return query_ids, ids[0] if rank == 2 else ids

    def table(array: Array) -> Array:
        """[..., positions] -> [B, ..., slots]."""
        array = jnp.asarray(array)
        if not array.ndim or array.shape[-1] == 1:
            return array
        size, forms = array.shape[-1], {2: 2, 3: 3, 4: 4}[rank]
        array = array.reshape((1,) * (forms - array.ndim) + array.shape)
        array = array[None] if rank == 2 else array  # [B|1, ..., positions]
        array = jnp.broadcast_to(array, (held.shape[0], *array.shape[1:]))
        index = held.reshape(held.shape[0], *(1,) * (array.ndim - 2), held.shape[1])
        index = jnp.broadcast_to(index, (*array.shape[:-1], held.shape[1]))
        found = jnp.take_along_axis(array, jnp.clip(index, 0, size - 1), axis=-1)
        found = found & (index < size)
        return found[0] if rank == 2 else found

    return Mask(
        segment_ids=tuple(segments(pair) for pair in mask.segment_ids),
        arrays=(
            *(table(array) for array in mask.arrays),
            *(ranges(band) for band in mask.bands if band[:2] != (None, None)),
            *(lengths(lens) for lens in mask.lens),
        ),
        excluded=tuple(_by_position(inner, at, held, rank) for inner in mask.excluded),
    )


def _pairs(array: Array, rank: int) -> Array:
    """[B, T|1, S] as what broadcasts to the weights of this rank."""
    return array[:, None] if rank == 4 else array[0] if rank == 2 else array
