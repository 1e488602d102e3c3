"""Step 2, mask: which keys a query may look at.

Lengths, causal order and windows are ranges of keys, one [start, end) per query, and stay
ranges all the way into the kernels. Only `Mask.boolean` is ever as large as the weights.
"""

import functools
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array

from regard.placement import vary_as
from regard.shapes import Axes, shape_error


class Band(NamedTuple):
    """Keys from `left` before to `right` after the query's position; None is no bound."""

    left: int | None
    right: int | None
    align: str


class MaskFacts(NamedTuple):
    """What is known of a mask before any data: what a backend may choose by.

    Attributes:
        lens: "none", "per example" or "per query": what the valid lengths belong to.
        band: every band in one, positions counted from the first query and the first key; a
            bound that hides nothing is None, whatever the caller wrote.
        segments, boolean: whether there are any.
    """

    lens: str = "none"
    band: Band = Band(None, None, "start")
    segments: bool = False
    boolean: bool = False


class LengthsAndBand(NamedTuple):
    """A mask that is no more than this: keys s < lens, and of those the ones in the band.

    Attributes:
        lens: int32, [B] or [1], at least 0 and at most S; None is no bound.
        band: aligned at the start.
    """

    lens: Array | None
    band: Band


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mask:
    """What may be looked at. True takes part, everywhere; masks combine with `&`.

    Made by `Mask.causal`, `Mask.lengths`, `Mask.window`, `Mask.segments`, `Mask.boolean`.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> x = jnp.eye(4)
        >>> mask = regard.Mask.causal() & regard.Mask.lengths(jnp.array(3))
        >>> regard.weights(x, x, mask=mask, normalize=regard.Uniform()).round(2).tolist()[3]
        [0.33..., 0.33..., 0.33..., 0.0]
    """

    lens: tuple[Array, ...] = ()
    segment_ids: tuple[tuple[Array, Array], ...] = ()
    arrays: tuple[Array, ...] = ()
    bands: tuple[Band, ...] = field(default=(), metadata=dict(static=True))

    @classmethod
    def causal(cls, align: str = "end") -> "Mask":
        """Each query sees the keys up to its own position.

        With T ≠ S, align="end" (the default) lets the last query see the last key, as in
        decoding with a cache; align="start" lets the first query see the first key only.

        Example:
            >>> import jax.numpy as jnp, regard
            >>> q, k = jnp.zeros((2, 1)), jnp.zeros((3, 1))
            >>> regard.weights(q, k, mask=regard.Mask.causal()).tolist()[0]
            [0.5, 0.5, 0.0]
            >>> regard.weights(q, k, mask=regard.Mask.causal(align="start")).tolist()[0]
            [1.0, 0.0, 0.0]
        """
        return cls.window(None, 0, align=align)

    @classmethod
    def window(cls, left: int | None, right: int | None, align: str = "end") -> "Mask":
        """A query at position p sees the keys p - left ... p + right; None is no bound.

        The position of query t is t + S - T with align="end", t with align="start".

        Example:
            >>> import jax.numpy as jnp, regard
            >>> x = jnp.zeros((3, 1))
            >>> regard.weights(x, x, mask=regard.Mask.window(1, 0)).tolist()
            [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]
        """
        if align not in ("start", "end"):
            raise ValueError(f'align must be "start" or "end". Got {align!r}.')
        for name, reach in (("left", left), ("right", right)):
            if reach is not None and not isinstance(reach, int):
                raise TypeError(f"window's {name} must be an integer or None. Got {reach!r}.")
        return cls(bands=(Band(left, right, align),))

    @classmethod
    def lengths(cls, lens: Array) -> "Mask":
        """Keys s < lens take part; the same as `valid_lens=`.

        Args:
            lens: integers of shape (), (B,), (B, T) or (B, N, T); (T,) for one example.
        """
        return cls(lens=(lens,))

    @classmethod
    def segments(cls, query_ids: Array, key_ids: Array) -> "Mask":
        """Queries see the keys of their own segment: several texts packed into one row.

        Example:
            >>> import jax.numpy as jnp, regard
            >>> x, ids = jnp.zeros((3, 1)), jnp.array([0, 0, 1])
            >>> regard.weights(x, x, mask=regard.Mask.segments(ids, ids)).tolist()
            [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]

        Args:
            query_ids: integers, (T,) or (B, T).
            key_ids: integers, (S,) or (B, S).
        """
        return cls(segment_ids=((query_ids, key_ids),))

    @classmethod
    def boolean(cls, array: Array) -> "Mask":
        """Any mask at all: bool, broadcastable to the weights; True takes part."""
        return cls(arrays=(array,))

    def __and__(self, other: "Mask") -> "Mask":
        if not isinstance(other, Mask):
            return NotImplemented
        return Mask(
            self.lens + other.lens,
            self.segment_ids + other.segment_ids,
            self.arrays + other.arrays,
            self.bands + other.bands,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Allowed:
    """A checked mask on canonical axes: every part broadcasts to [B, N, T, S].

    Attributes:
        start, end: int32, [B|1, N|1, T|1]: the keys start <= s < end; None is no bound.
        segment_ids: pairs of [B|1, T] and [B|1, S].
        arrays: bool, [B|1, N|1, T|1, S|1].
        facts: what is known of all this before any data; None: not recorded.
    """

    start: Array | None
    end: Array | None
    segment_ids: tuple[tuple[Array, Array], ...]
    arrays: tuple[Array, ...]
    facts: MaskFacts | None = field(default=None, metadata=dict(static=True))

    def everything(self) -> bool:
        """Statically known to allow every pair."""
        return self.start is None and self.end is None and not self.segment_ids and not self.arrays

    def as_lengths_and_band(self) -> LengthsAndBand | None:
        """The mask as one length per example and one band; None where it is anything more."""
        facts = self.facts
        if facts is None or facts.lens == "per query" or facts.segments or facts.boolean:
            return None
        if facts.lens == "none":
            return LengthsAndBand(None, facts.band)
        # With a band, `end` rises from query to query up to the length, or up to the last key
        # that the band shows to anyone: as a length the two are the same.
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
        """[B|1, N|1, S] bool: keys that some query may look at; None means all."""
        if self._kinds() > 1:
            return self._by_blocks(axes)[0]
        # That causal order hides no key from everyone is known beforehand: found out on the
        # device, it would cost a pass over keys and values.
        band = self._lone_band()
        if band is not None and _all_meet(axes.S, axes.T, band.right, band.left):
            return None
        if self.start is not None or self.end is not None:
            return self._visible_in_ranges(axes)
        for query_ids, key_ids in self.segment_ids:
            return _is_in(key_ids, query_ids)[:, None, :]
        for array in self.arrays:
            return jnp.broadcast_to(array.any(2), (*array.shape[:2], axes.S))
        return None

    def seeing_queries(self, axes: Axes) -> Array | None:
        """[B|1, N|1, T|1] bool: queries that may look at some key; None means all."""
        if self._kinds() > 1:
            return self._by_blocks(axes)[1]
        band = self._lone_band()
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

    def _lone_band(self) -> Band | None:
        """The band, where the mask is a band and nothing else."""
        if self.facts is None or self.facts != MaskFacts(band=self.facts.band):
            return None
        return self.facts.band

    def _kinds(self) -> int:
        ranges = self.start is not None or self.end is not None
        return ranges + len(self.segment_ids) + len(self.arrays)

    def _by_blocks(self, axes: Axes) -> tuple[Array, Array]:
        """Visible keys and seeing queries of masks combined, a block of queries at a time.

        Each mask may show a key to someone while no query sees it through all of them, so there
        is no way around the pairs; there is one around holding them all.
        """
        block = min(128, axes.T)
        count = -(-axes.T // block)

        def rows(array: Array, axis: int, index: Array) -> Array:
            if array.shape[axis] == 1:
                return array
            at = jnp.minimum(index * block, axes.T - block)  # the last block may overlap
            return jax.lax.dynamic_slice_in_dim(array, at, block, axis)

        def look(visible: Array, index: Array) -> tuple[Array, Array]:
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
        start = vary_as(jnp.zeros((*leading, axes.S), bool), self)
        visible, seeing = jax.lax.scan(look, start, jnp.arange(count, dtype=jnp.int32))
        ends = jnp.minimum(jnp.arange(count) * block, axes.T - block)
        where = (ends[:, None] + jnp.arange(block)[None, :]).reshape(-1)
        seeing = jnp.moveaxis(seeing, 0, 2).reshape(*leading, count * block)
        return visible, jnp.zeros((*leading, axes.T), bool).at[..., where].set(seeing)

    def _visible_in_ranges(self, axes: Axes) -> Array:
        shape = jnp.broadcast_shapes(
            *(bound.shape for bound in (self.start, self.end) if bound is not None)
        )
        start = jnp.zeros(shape, jnp.int32) if self.start is None else self.start
        end = jnp.full(shape, axes.S, jnp.int32) if self.end is None else self.end
        keys = jnp.arange(axes.S, dtype=jnp.int32)[None, None, :]
        if self.start is None or shape[2] == 1:  # nested ranges: their union is their hull
            return (keys >= start.min(2, keepdims=True)) & (keys < end.max(2, keepdims=True))
        # How many ranges cover each key: +1 where one opens, -1 where it closes, summed up.
        start, end = jnp.broadcast_to(start, shape), jnp.broadcast_to(end, shape)
        opens = (end > start).astype(jnp.int32)

        def count(start: Array, end: Array, opens: Array) -> Array:
            change = jnp.zeros(axes.S + 1, jnp.int32).at[start].add(opens).at[end].add(-opens)
            return jnp.cumsum(change)[:-1] > 0

        return jax.vmap(jax.vmap(count))(start, end, opens)


def resolve(mask: "Mask | Array | None", valid_lens: Array | None, axes: Axes) -> Allowed:
    """Checks the caller's masks and brings them to canonical axes, ranges as ranges."""
    if mask is None:
        mask = Mask()
    elif not isinstance(mask, Mask):
        mask = Mask.boolean(mask)
    if valid_lens is not None:
        mask = mask & Mask.lengths(valid_lens)
    lens = [_canonical_lens(lens, axes) for lens in mask.lens]
    band = _as_one_band(mask.bands, axes)
    start, end = _band_bounds(band, axes)
    ends = lens if end is None else [*lens, end]
    return Allowed(
        start,
        functools.reduce(jnp.minimum, ends) if ends else None,
        tuple(_canonical_ids(*ids, axes) for ids in mask.segment_ids),
        tuple(_canonical_array(array, axes) for array in mask.arrays),
        _facts(mask, lens, band, axes),
    )


def _facts(mask: Mask, lens: list[Array], band: Band, axes: Axes) -> MaskFacts:
    kind = "none"
    if lens:
        shared = all(array.shape[1:] == (1, 1) for array in lens)
        kind = "per example" if shared else "per query"
    if axes.T == 1 and band.right is not None:  # for one query, the end of a band is a length
        kind, band = kind if lens else "per example", band._replace(right=None)
    return MaskFacts(kind, band, bool(mask.segment_ids), bool(mask.arrays))


def _as_one_band(bands: tuple[Band, ...], axes: Axes) -> Band:
    """All bands in one, aligned at the start; a bound that hides nothing becomes None.

    At align="end" query t stands at t + S - T, so from the start its band leans over by S - T.
    """
    lean = {"start": 0, "end": axes.S - axes.T}
    left = min((b.left - lean[b.align] for b in bands if b.left is not None), default=axes.T)
    right = min((b.right + lean[b.align] for b in bands if b.right is not None), default=axes.S)
    return Band(
        None if left >= axes.T - 1 else left,  # the last query sees the first key
        None if right >= axes.S - 1 else right,  # the first query sees the last key
        "start",
    )


def _canonical_lens(lens: Array, axes: Axes) -> Array:
    """-> int32 [B|1, N|1, T|1], clipped to [0, S]."""
    lens = jnp.asarray(lens)
    if not jnp.issubdtype(lens.dtype, jnp.integer):
        raise TypeError(
            f"valid_lens must be integers: how many keys take part. Got dtype {lens.dtype}, "
            f"shape {list(lens.shape)}. Fix: valid_lens.astype(int)."
        )
    B, N, T = axes.B, axes.N, axes.T
    forms = {2: [(), (T,)], 3: [(), (B,), (B, T)], 4: [(), (B,), (B, T), (B, N, T)]}[axes.rank]
    if lens.shape not in forms:
        names = {2: "() or (T,)", 3: "(), (B,) or (B, T)", 4: "(), (B,), (B, T) or (B, N, T)"}
        raise shape_error(
            f"valid_lens must have shape {names[axes.rank]} for inputs of rank {axes.rank}",
            dict(valid_lens=lens),
            axes,
            "one length per example (B,), or one per query (B, T)",
        )
    # uint64 beyond int32 would wrap around, so clip first.
    lens = jnp.clip(lens, jnp.asarray(0, lens.dtype), _as_dtype(axes.S, lens.dtype))
    lens = lens.astype(jnp.int32)
    if lens.ndim == 3:
        return lens
    if axes.rank == 2:
        return lens.reshape(1, 1, T if lens.ndim else 1)
    return lens.reshape((B, 1, T if lens.ndim == 2 else 1) if lens.ndim else (1, 1, 1))


def _as_dtype(bound: int, dtype: jnp.dtype) -> Array:
    return jnp.asarray(min(bound, jnp.iinfo(dtype).max), dtype)


def _all_meet(count: int, others: int, before: int | None, after: int | None) -> bool:
    """Whether each i < count has a partner j < others with i - before <= j <= i + after."""
    return (
        (after is None or after >= 0)
        and (before is None or before >= count - others)
        and (before is None or after is None or before + after >= 0)
    )


def _band_bounds(band: Band, axes: Axes) -> tuple[Array | None, Array | None]:
    """The range of keys of each query, int32 [1, 1, T], for a band aligned at the start."""
    position = jnp.arange(axes.T, dtype=jnp.int32)[None, None, :]
    start = None if band.left is None else jnp.clip(position - band.left, 0, axes.S)
    end = None if band.right is None else jnp.clip(position + band.right + 1, 0, axes.S)
    return start, end


def _canonical_ids(query_ids: Array, key_ids: Array, axes: Axes) -> tuple[Array, Array]:
    query_ids, key_ids = jnp.asarray(query_ids), jnp.asarray(key_ids)
    arrays = dict(query_ids=query_ids, key_ids=key_ids)
    for ids in arrays.values():
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise TypeError(f"segment ids must be integers. Got dtype {ids.dtype}.")
    batch = () if axes.rank == 2 else (axes.B,)
    query_forms, key_forms = [(axes.T,), (*batch, axes.T)], [(axes.S,), (*batch, axes.S)]
    if query_ids.shape not in query_forms or key_ids.shape not in key_forms:
        raise shape_error(
            "segments need query_ids (T,) or (B, T) and key_ids (S,) or (B, S)",
            arrays,
            axes,
            "one id per query and one per key",
        )
    return jnp.atleast_2d(query_ids), jnp.atleast_2d(key_ids)


def _canonical_array(array: Array, axes: Axes) -> Array:
    """-> bool [B|1, N|1, T|1, S|1]."""
    array = jnp.asarray(array)
    if array.dtype != jnp.bool_:
        raise TypeError(
            f"mask must be bool (True takes part) or a regard.Mask. Got dtype {array.dtype}, shape "
            f"{list(array.shape)}. Fix: mask.astype(bool), or bias= for numbers added to scores."
        )
    return axes.canonical_pairs("mask", array)


def _is_in(ids: Array, others: Array) -> Array:
    """Which ids occur among the others, row by row; by sorting, so that no pair is ever formed."""
    batch = max(ids.shape[0], others.shape[0])
    ids, others = (jnp.broadcast_to(a, (batch, a.shape[1])) for a in (ids, others))
    return jax.vmap(functools.partial(jnp.isin, method="sort"))(ids, others)
