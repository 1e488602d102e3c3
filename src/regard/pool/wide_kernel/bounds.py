"""Which tiles a kernel visits, and which of those need a mask: known before it starts."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class Ranges(NamedTuple):
    """What may be looked at, padded to whole blocks.

    Attributes:
        start, end: [B|1, N|1, T] int32.
        ids: pairs of [B|1, 1, T] and [B|1, 1, S] int32: queries see keys of their own segment.
        keys: [B|1, N|1, S] int8: keys that take part at all.
        table: [B|1, N|1, T, S] int8.
    """

    start: Array | None
    end: Array | None
    ids: tuple[tuple[Array, Array], ...]
    keys: Array | None
    table: Array | None

    def arrays(self) -> dict[str, Array]:
        """By the names that kernels know."""
        named = dict(start=self.start, end=self.end, seen=self.keys, table=self.table)
        for i, (query_ids, key_ids) in enumerate(self.ids):
            named |= {f"query_ids{i}": query_ids, f"key_ids{i}": key_ids}
        return {name: array for name, array in named.items() if array is not None}


def key_bounds(
    ranges: Ranges,
    queries: int,
    keys: int,
    T: int,
    S: int,
    at_least_one: bool = False,
    last_key: bool = False,
) -> Array:
    """[B|1, N|1, query blocks, 4] int32: low <= full_low <= full_high <= high, in key blocks.

    A query block visits the key blocks from low to high; those from full_low to full_high need no
    mask. With `at_least_one`, even a block of queries that sees nothing visits a key block. With
    `last_key` there is a fifth number, in keys: the greatest end of the block's queries.
    """
    rows, columns = T // queries, S // keys
    low = jnp.zeros((1, 1, rows), jnp.int32)
    high = jnp.full((1, 1, rows), columns, jnp.int32)
    full_low, full_high = low, high

    def over_rows(bound: Array, reduce: Callable) -> Array:
        return reduce(bound.reshape(*bound.shape[:2], rows, queries), axis=-1)

    if ranges.start is not None:
        low = over_rows(ranges.start, jnp.min) // keys
        full_low = -(-over_rows(ranges.start, jnp.max) // keys)
    if ranges.end is not None:
        high = -(-over_rows(ranges.end, jnp.max) // keys)
        full_high = over_rows(ranges.end, jnp.min) // keys
    for query_ids, key_ids in ranges.ids:
        first, last = _segment_hull(query_ids, key_ids, rows, columns)
        low, high = jnp.maximum(low, first), jnp.minimum(high, last)
    if at_least_one:
        low = jnp.minimum(low, columns - 1)
    high = jnp.maximum(high, low + int(at_least_one))
    if ranges.ids or ranges.keys is not None or ranges.table is not None:
        full_low = full_high = low
    full_low = jnp.clip(full_low, low, high)
    full_high = jnp.clip(full_high, full_low, high)
    parts = [low, full_low, full_high, high]
    if last_key:
        parts.append(
            jnp.full_like(low, S) if ranges.end is None else over_rows(ranges.end, jnp.max)
        )
    return jnp.stack(jnp.broadcast_arrays(*parts), axis=-1).astype(jnp.int32)


def _segment_hull(query_ids: Array, key_ids: Array, rows: int, columns: int) -> tuple[Array, Array]:
    """First and last key block + 1 whose ids overlap a query block's, by least and greatest."""

    def spans(ids: Array, blocks: int) -> tuple[Array, Array]:
        ids = ids.reshape(ids.shape[0], 1, blocks, -1)
        return ids.min(-1), ids.max(-1)

    query_low, query_high = spans(query_ids, rows)
    key_low, key_high = spans(key_ids, columns)
    meet = (query_low[..., :, None] <= key_high[..., None, :]) & (
        key_low[..., None, :] <= query_high[..., :, None]
    )
    block = jnp.arange(columns, dtype=jnp.int32)[None, None, None, :]
    return jnp.where(meet, block, columns).min(-1), jnp.where(meet, block + 1, 0).max(-1)


def query_bounds(visits: Array, columns: int) -> Array:
    """[B|1, N|1, query blocks, 4] -> [B|1, N|1, key blocks, 2]: who visits a key block."""
    low, high = visits[..., 0, None], visits[..., 3, None]  # [.., rows, 1]
    block = jnp.arange(columns, dtype=jnp.int32)
    meet = (low <= block[None, None, None, :]) & (block[None, None, None, :] < high)
    rows = visits.shape[2]
    row = jnp.arange(rows, dtype=jnp.int32)[None, None, :, None]
    last = jnp.where(meet, row + 1, 0).max(2)
    first = jnp.minimum(jnp.where(meet, row, rows).min(2), last)
    return jnp.stack([first, last], axis=-1)


def query_visits(visits: Array, columns: int) -> Array:
    """[B|1, N|1, query blocks, 4] -> [B|1, N|1, key blocks, 4]: who visits a key block, likewise.

    Whoever needs no mask need not lie together: the longest run of them is told.
    """
    rows = visits.shape[2]
    first, last = jnp.moveaxis(query_bounds(visits, columns), -1, 0)  # [.., columns]
    block = jnp.arange(columns, dtype=jnp.int32)[None, None, None, :]
    row = jnp.arange(rows, dtype=jnp.int32)[None, None, :, None]
    whole = (visits[..., 1, None] <= block) & (block < visits[..., 2, None])  # [.., rows, columns]
    before = lax.cummax(jnp.where(whole, -1, row), axis=2)  # the last that needs one, or -1
    longest = jnp.argmax(row - before, axis=2, keepdims=True)  # where that run ends
    begin = jnp.take_along_axis(before, longest, axis=2)[:, :, 0] + 1
    end = longest[:, :, 0].astype(jnp.int32) + 1
    full_first = jnp.clip(begin, first, last)
    full_last = jnp.clip(end, full_first, last)
    return jnp.stack([first, full_first, full_last, last], axis=-1).astype(jnp.int32)
