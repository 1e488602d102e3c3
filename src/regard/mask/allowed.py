"""A checked mask, as backends receive it: one range of keys per query, segments, boolean arrays.

canonical.py builds an `Allowed` from the caller's `Mask`; here is what pooling asks of it.
"""

import functools
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array

from regard.placement import current_platform, vary_as
from regard.shapes import Axes

QUERY_BLOCK = 128  # queries whose pairs with all keys are held at once
PAIRS = 1 << 27  # pairs of a block on a GPU, which never stores them; a loop's steps cost more


class Band(NamedTuple):
    """Keys from `left` before to `right` after the query's position; None means no bound."""

    left: int | None
    right: int | None
    align: str


class MaskFacts(NamedTuple):
    """What is known of a mask at trace time: what a backend may choose by.

    Attributes:
        lens: which ranges of keys there are besides the band. "none"; "per example": one length
            for each example; "per query": any other range, such as one length for each query.
        band: the intersection of all bands, positions counted from the first query and the first
            key. A bound that masks no pair is None, even where the caller wrote one.
        segments, boolean: whether there are any.
        diagonal: segments under which every query attends to the key of its own index, as in
            packed self-attention.
    """

    lens: str = "none"
    band: Band = Band(None, None, "start")
    segments: bool = False
    boolean: bool = False
    diagonal: bool = False


class LengthsAndBand(NamedTuple):
    """A mask that consists of these two conditions only.

    Attributes:
        lens: keys s < lens; int32, [B] or [1], at least 0 and at most S; None means no bound.
        band: aligned at the start.
    """

    lens: Array | None
    band: Band


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Allowed:
    """A checked mask on canonical axes: every part broadcasts to [B, N, T, S]; all must hold.

    Attributes:
        start, end: int32, [B|1, N|1, T|1]: the keys start <= s < end; None means no bound.
        segment_ids: pairs of [B|1, T] and [B|1, S].
        arrays: bool, [B|1, N|1, T|1, S|1].
        facts: what is known of the mask at trace time; None: not recorded.
    """

    start: Array | None
    end: Array | None
    segment_ids: tuple[tuple[Array, Array], ...]
    arrays: tuple[Array, ...]
    facts: MaskFacts | None = field(default=None, metadata=dict(static=True))

    def everything(self) -> bool:
        """Whether the mask is known at trace time to allow every pair."""
        return self.start is None and self.end is None and not self.segment_ids and not self.arrays

    def as_lengths_and_band(self) -> LengthsAndBand | None:
        """The mask as one length per example and one band; None where it is anything more."""
        facts = self.facts
        if facts is None or facts.lens == "per query" or facts.segments or facts.boolean:
            return None
        if facts.lens == "none":
            return LengthsAndBand(None, facts.band)
        # With a band, `end` grows from query to query up to the length, or up to the last key
        # that the band allows to any query: used as a length, both give the same mask.
        end = cast(Array, self.end)
        return LengthsAndBand(end[:, 0, -1], facts.band)

    def dense(self, axes: Axes) -> Array | None:
        """[B|1, N|1, T|1, S] bool: True takes part; None allows everything."""
        keys = jnp.arange(axes.S, dtype=jnp.int32)[None, None, None, :]
        parts = list(self.arrays)
        if self.start is not None:
            parts.append(keys >= self.start[..., None])
        if self.end is not None:
            parts.append(keys < self.end[..., None])
        for query_ids, key_ids in self.segment_ids:
            parts.append((query_ids[:, :, None] == key_ids[:, None, :])[:, None])
        return functools.reduce(jnp.logical_and, parts) if parts else None

    def visible_keys(self, axes: Axes) -> Array | None:
        """[B|1, N|1, S] bool: keys that some query may attend to; None means all."""
        if axes.T == 0:
            return jnp.zeros((1, 1, axes.S), bool)
        if axes.symbolic():
            pairs = self.dense(axes)
            return (
                None
                if pairs is None
                else jnp.broadcast_to(pairs.any(2), (*pairs.shape[:2], axes.S))
            )
        if self._diagonal():
            return None
        if self._conditions() > 1:
            return self._reduced_by_blocks(axes)[0]
        # That a causal mask leaves every key visible is known at trace time. Computed on the
        # device, it would cost a pass over keys and values.
        band = self._band_alone()
        if band is not None and _all_meet(axes.S, axes.T, band.right, band.left):
            return None
        if self.start is not None or self.end is not None:
            return self._keys_in_ranges(axes)
        for query_ids, key_ids in self.segment_ids:
            return _is_in(key_ids, query_ids)[:, None, :]
        for array in self.arrays:
            return jnp.broadcast_to(array.any(2), (*array.shape[:2], axes.S))
        return None

    def non_empty_rows(self, axes: Axes) -> Array | None:
        """[B|1, N|1, T|1] bool: non-empty rows, queries with at least one key; None means all."""
        if axes.S == 0:
            return jnp.zeros((1, 1, 1), bool)
        if axes.symbolic():
            pairs = self.dense(axes)
            return None if pairs is None else pairs.any(3)
        if self._diagonal():
            return None
        if self._conditions() > 1 and axes.T > 0:
            return self._reduced_by_blocks(axes)[1]
        band = self._band_alone()
        if band is not None and _all_meet(axes.T, axes.S, band.left, band.right):
            return None
        if self.end is not None:
            return self.end > (0 if self.start is None else self.start)
        if self.start is not None:
            return self.start < axes.S
        for query_ids, key_ids in self.segment_ids:
            return _is_in(query_ids, key_ids)[:, None, :]
        for array in self.arrays:
            return array.any(3)
        return None

    def _band_alone(self) -> Band | None:
        """The band, where it is the mask's only condition."""
        if self.facts is None or self.facts != MaskFacts(band=self.facts.band):
            return None
        return self.facts.band

    def _diagonal(self) -> bool:
        return self.facts is not None and self.facts.diagonal

    def _conditions(self) -> int:
        ranges = self.start is not None or self.end is not None
        return ranges + len(self.segment_ids) + len(self.arrays)

    def _reduced_by_blocks(self, axes: Axes) -> tuple[Array, Array]:
        """Visible keys and non-empty rows of combined conditions, one block of queries at a time.

        Each condition may allow a key to some query while no query meets all of them, so every
        pair has to be checked; a block of queries at a time, they are never held all at once.
        """
        block = QUERY_BLOCK
        if current_platform(self) == "gpu":
            block = max(block, PAIRS // max(axes.B * axes.S, 1))
        block = min(block, axes.T)
        count = -(-axes.T // block)

        def rows(array: Array, axis: int, index: Array) -> Array:
            if array.shape[axis] == 1:
                return array
            at = jnp.minimum(index * block, axes.T - block)  # the last block may overlap
            return jax.lax.dynamic_slice_in_dim(array, at, block, axis)

        def step(visible: Array, index: Array) -> tuple[Array, Array]:
            part = Allowed(
                None if self.start is None else rows(self.start, 2, index),
                None if self.end is None else rows(self.end, 2, index),
                tuple((rows(q, 1, index), k) for q, k in self.segment_ids),
                tuple(rows(array, 2, index) for array in self.arrays),
            )
            pairs = jnp.broadcast_to(cast(Array, part.dense(axes)), (*leading, block, axes.S))
            return visible | pairs.any(2), pairs.any(3)

        leading = jnp.broadcast_shapes(
            *(bound.shape[:2] for bound in (self.start, self.end) if bound is not None),
            *((ids.shape[0], 1) for pair in self.segment_ids for ids in pair),
            *(array.shape[:2] for array in self.arrays),
        )
        none_visible = vary_as(jnp.zeros((*leading, axes.S), bool), self)
        visible, found = jax.lax.scan(step, none_visible, jnp.arange(count, dtype=jnp.int32))
        starts = jnp.minimum(jnp.arange(count) * block, axes.T - block)
        where = (starts[:, None] + jnp.arange(block)[None, :]).reshape(-1)
        found = jnp.moveaxis(found, 0, 2).reshape(*leading, count * block)
        return visible, jnp.zeros((*leading, axes.T), bool).at[..., where].set(found)

    def _keys_in_ranges(self, axes: Axes) -> Array:
        """Keys inside the range of at least one query."""
        shape = jnp.broadcast_shapes(
            *(bound.shape for bound in (self.start, self.end) if bound is not None)
        )
        start = jnp.zeros(shape, jnp.int32) if self.start is None else self.start
        end = jnp.full(shape, axes.S, jnp.int32) if self.end is None else self.end
        keys = jnp.arange(axes.S, dtype=jnp.int32)[None, None, :]
        if self.start is None or self.end is None or shape[2] == 1:
            # Nested ranges: their union runs from the least start to the greatest end.
            return (keys >= start.min(2, keepdims=True)) & (keys < end.max(2, keepdims=True))
        # How many ranges cover each key: the running sum of +1 where one opens, -1 where it closes.
        start, end = jnp.broadcast_to(start, shape), jnp.broadcast_to(end, shape)
        opens = (end > start).astype(jnp.int32)

        def covered(start: Array, end: Array, opens: Array) -> Array:
            change = jnp.zeros(axes.S + 1, jnp.int32).at[start].add(opens).at[end].add(-opens)
            return jnp.cumsum(change)[:-1] > 0

        return jax.vmap(jax.vmap(covered))(start, end, opens)


def _all_meet(count: int, others: int, before: int | None, after: int | None) -> bool:
    """Whether each i < count has a partner j < others with i - before <= j <= i + after."""
    return (
        (after is None or after >= 0)
        and (before is None or before >= count - others)
        and (before is None or after is None or before + after >= 0)
    )


def _is_in(ids: Array, others: Array) -> Array:
    """Which ids occur among the others, row by row; by sorting, so that no pair is ever formed."""
    batch = max(ids.shape[0], others.shape[0])
    ids, others = (jnp.broadcast_to(a, (batch, a.shape[1])) for a in (ids, others))
    return jax.vmap(functools.partial(jnp.isin, method="sort"))(ids, others)
