"""Which tiles are visited, and which pairs of a tile take part: for tiles in XLA and in Triton.

Bounds are in blocks of keys per block of queries, so that a block of keys that no query of the
block may attend to costs nothing. Tiles in plain XLA are [.., q, s], or transposed where that is
faster; Triton kernels load theirs from memory. Both bring `visible_pairs` arrays that broadcast to
their own tile. hopper_compute.py compares keys with start and end in its own register layout.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array


def soft_cap(scores: Array, cap: float | None) -> Array:
    """cap · tanh(scores / cap): scores stay within ±cap. None changes nothing."""
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def soft_cap_slope(scores: Array, cap: float) -> Array:
    """The derivative of `soft_cap`, given the scores before it."""
    return 1.0 - jnp.square(jnp.tanh(scores / cap))


def block_bounds(
    start: Array | None,
    end: Array | None,
    segment_ids: Sequence[tuple[Array, Array]],
    rows: int,
    columns: int,
    keys: int,
) -> tuple[Array, Array]:
    """The first key block to visit and the last + 1, each int32 [B|1, N|1, query blocks].

    Args:
        start, end: [B|1, N|1, T|1], the keys start <= s < end of each query; None is no bound.
        segment_ids: pairs of [B|1, T] and [B|1, S].
        rows, columns: blocks of queries and of keys.
        keys: of a block.
    """
    low = jnp.zeros((1, 1, rows), jnp.int32)
    high = jnp.full((1, 1, rows), columns, jnp.int32)
    if start is not None:
        low = jnp.maximum(low, _over_rows(start, rows, jnp.min) // keys)
    if end is not None:
        high = jnp.minimum(high, -(-_over_rows(end, rows, jnp.max) // keys))
    for query_ids, key_ids in segment_ids:
        first, last = _segment_hull(query_ids[:, None], key_ids[:, None], rows, columns)
        low, high = jnp.maximum(low, first), jnp.minimum(high, last)
    return low, high


def kernel_bounds(
    start: Array | None,
    end: Array | None,
    segment_ids: Sequence[tuple[Array, Array]],
    blocks: tuple[int, int],
    T: int,
    S: int,
    *,
    masked: bool = False,
    at_least_one: bool = False,
    last_key: bool = False,
) -> Array:
    """[B|1, N|1, query blocks, 4] int32: low <= full_low <= full_high <= high, in key blocks.

    A query block visits the key blocks from low to high; those from full_low to full_high need no
    mask.

    Args:
        start, end, segment_ids: as in `block_bounds`.
        blocks: queries and keys of a tile.
        masked: every tile needs a mask, whatever its bounds are.
        at_least_one: even a block of queries whose rows are all empty visits a key block.
        last_key: append a fifth number, in keys: the greatest end of the block's queries.
    """
    queries, keys = blocks
    rows, columns = T // queries, S // keys
    low, high = block_bounds(start, end, segment_ids, rows, columns, keys)
    full_low, full_high = low, jnp.full_like(low, columns)
    if start is not None:
        full_low = -(-_over_rows(start, rows, jnp.max) // keys)
    if end is not None:
        full_high = _over_rows(end, rows, jnp.min) // keys
    if at_least_one:
        low = jnp.minimum(low, columns - 1)
    high = jnp.maximum(high, low + int(at_least_one))
    if masked:
        full_low = full_high = low
    elif segment_ids:
        block = jnp.arange(columns, dtype=jnp.int32)[None, None, None, :]
        whole = (full_low[..., None] <= block) & (block < full_high[..., None])
        for query_ids, key_ids in segment_ids:
            whole &= _segment_spans(query_ids[:, None], key_ids[:, None], rows, columns)[1]
        full_low, full_high = _first_run(whole)
    full_low = jnp.clip(full_low, low, high)
    full_high = jnp.clip(full_high, full_low, high)
    parts = [low, full_low, full_high, high]
    if last_key:
        parts.append(jnp.full_like(low, S) if end is None else _over_rows(end, rows, jnp.max))
    return jnp.stack(jnp.broadcast_arrays(*parts), axis=-1).astype(jnp.int32)


def bins_of(length: int, bins: int) -> Array:
    """In which of at most `length` equal bins each position is, int32."""
    return jnp.arange(length, dtype=jnp.int32) * bins // length


def _over_rows(bound: Array, rows: int, reduce: Callable) -> Array:
    """[B|1, N|1, T|1] -> [B|1, N|1, rows|1]: reduced over the queries of each block."""
    rows = 1 if bound.shape[2] == 1 else rows
    return reduce(bound.reshape(*bound.shape[:2], rows, -1), axis=-1)


def _segment_hull(query_ids: Array, key_ids: Array, rows: int, columns: int) -> tuple[Array, Array]:
    """First and last + 1 key block whose ids overlap a query block's, by least and greatest id.

    [B|1, 1, T] and [B|1, 1, S] -> [B|1, 1, rows] each.
    """
    meet, _ = _segment_spans(query_ids, key_ids, rows, columns)
    block = jnp.arange(columns, dtype=jnp.int32)[None, None, None, :]
    return jnp.where(meet, block, columns).min(-1), jnp.where(meet, block + 1, 0).max(-1)


def _segment_spans(
    query_ids: Array, key_ids: Array, rows: int, columns: int
) -> tuple[Array, Array]:
    """bool [B|1, 1, rows, columns] each: the tiles whose ids may meet, by least and greatest id,
    and those that have one id only.
    """

    def spans(ids: Array, blocks: int) -> tuple[Array, Array]:
        ids = ids.reshape(ids.shape[0], 1, blocks, -1)
        return ids.min(-1), ids.max(-1)

    query_low, query_high = (x[..., :, None] for x in spans(query_ids, rows))
    key_low, key_high = (x[..., None, :] for x in spans(key_ids, columns))
    meet = (query_low <= key_high) & (key_low <= query_high)
    return meet, (query_low == key_high) & (key_low == query_high)


def _first_run(whole: Array) -> tuple[Array, Array]:
    """Where the first run of True along the last axis begins and ends, int32."""
    count = whole.shape[-1]
    block = jnp.arange(count, dtype=jnp.int32).reshape((1,) * (whole.ndim - 1) + (-1,))
    first = jnp.where(whole, block, count).min(-1)
    return first, jnp.where(whole | (block < first[..., None]), count, block).min(-1)


def query_bounds(visits: Array, columns: int) -> Array:
    """[B|1, N|1, query blocks, 4] -> [B|1, N|1, key blocks, 2]: the query blocks that visit a key
    block.
    """
    low, high = visits[..., 0, None], visits[..., 3, None]  # [.., rows, 1]
    block = jnp.arange(columns, dtype=jnp.int32)
    meet = (low <= block[None, None, None, :]) & (block[None, None, None, :] < high)
    rows = visits.shape[2]
    row = jnp.arange(rows, dtype=jnp.int32)[None, None, :, None]
    last = jnp.where(meet, row + 1, 0).max(2)
    first = jnp.minimum(jnp.where(meet, row, rows).min(2), last)
    return jnp.stack([first, last], axis=-1)


def query_visits(visits: Array, columns: int) -> Array:
    """[B|1, N|1, query blocks, 4] -> [B|1, N|1, key blocks, 4]: the query blocks that visit a key
    block, and of those the first run that needs no mask.
    """
    first, last = jnp.moveaxis(query_bounds(visits, columns), -1, 0)  # [.., columns]
    block = jnp.arange(columns, dtype=jnp.int32)[None, None, :, None]
    begin, end = (visits[..., i][:, :, None, :] for i in (1, 2))
    full_first, full_last = _first_run((begin <= block) & (block < end))  # [.., columns, rows]
    full_first = jnp.clip(full_first, first, last)
    full_last = jnp.clip(full_last, full_first, last)
    return jnp.stack([first, full_first, full_last, last], axis=-1).astype(jnp.int32)


def visible_pairs(
    keys: Any,
    start: Array | None,
    end: Array | None,
    segment_ids: Sequence[tuple[Array, Array]],
    tables: Sequence[Array],
) -> Array | None:
    """Which pairs of a tile take part, bool; None: all of them.

    Args:
        keys: the index of each key in its sequence; read only where there are ranges.
        start, end: per query, the keys start <= s < end; None is no bound.
        segment_ids: per query and per key: equal ids attend to each other.
        tables: bool.
    """
    parts = []
    if start is not None:
        parts.append(keys >= start)
    if end is not None:
        parts.append(keys < end)
    parts += [query_ids == key_ids for query_ids, key_ids in segment_ids]
    parts += tables
    visible = None
    for part in parts:
        visible = part if visible is None else visible & part
    return visible
