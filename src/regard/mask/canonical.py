"""From the caller's `Mask` to the `Allowed` that backends receive: checks, and one range per query.

A union or complement stays a range of keys wherever that is known at trace time to be right.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, cast

import jax.numpy as jnp
from jax import Array

from regard.mask.allowed import Allowed, Band, MaskFacts
from regard.mask.mask import Mask, as_lens
from regard.shapes import Axes, as_array, shape_error

NO_BAND = Band(None, None, "start")


def resolve(mask: "Mask | Array | None", valid_lens: Array | None, axes: Axes) -> Allowed:
    """Checks the caller's masks and brings them to canonical axes, ranges as ranges."""
    if mask is None:
        mask = Mask()
    elif not isinstance(mask, Mask):
        mask = Mask.boolean(mask)
    if valid_lens is not None:
        mask = mask & Mask.lengths(valid_lens)
    return _Conditions.of(mask, axes).allowed(axes)


class _Conditions(NamedTuple):
    """A mask on canonical axes; all conditions must hold.

    Attributes:
        starts, ends: int32 [B|1, N|1, T|1], keys starts <= s < ends, besides the band.
        band: aligned at the start.
        segment_ids, arrays: as in `Allowed`.
        shared_ids: whether queries and keys are known to have the same ids.
    """

    starts: Array | None = None
    ends: Array | None = None
    band: Band = NO_BAND
    segment_ids: tuple[tuple[Array, Array], ...] = ()
    arrays: tuple[Array, ...] = ()
    shared_ids: bool = False

    @classmethod
    def of(cls, mask: Mask, axes: Axes) -> "_Conditions":
        found = cls._without_excluded(mask, axes)
        for part in mask.excluded:
            other = cls._of_complement(part, axes)
            found = cls(
                _reduced(jnp.maximum, found.starts, other.starts),
                _reduced(jnp.minimum, found.ends, other.ends),
                _as_one_band((found.band, other.band), axes),
                found.segment_ids + other.segment_ids,
                found.arrays + other.arrays,
                found.shared_ids and not other.segment_ids,
            )
        return found

    @classmethod
    def _without_excluded(cls, mask: Mask, axes: Axes) -> "_Conditions":
        starts: list[Array | None] = []
        ends: list[Array | None] = [_canonical_lens(lens, axes) for lens in mask.lens]
        band = NO_BAND if axes.symbolic() else _as_one_band(mask.bands, axes)
        if axes.symbolic():  # which bound is the least is not known: each one is computed
            bounds = [_band_bounds(_at_start(one, axes), axes) for one in mask.bands]
            starts, ends = [start for start, _ in bounds], ends + [end for _, end in bounds]
        return cls(
            _reduced(jnp.maximum, *starts),
            _reduced(jnp.minimum, *ends),
            band,
            tuple(_canonical_ids(*ids, axes) for ids in mask.segment_ids),
            tuple(_canonical_array(array, axes) for array in mask.arrays),
            len(mask.shared_ids) == len(mask.segment_ids) and all(mask.shared_ids),
        )

    @classmethod
    def _of_complement(cls, mask: Mask, axes: Axes) -> "_Conditions":
        """~(a & b & ~c) is ~a | ~b | c."""
        found = cls._without_excluded(mask, axes)
        parts = [cls.of(excluded, axes) for excluded in mask.excluded]
        if found.ends is not None:
            parts.append(cls(starts=found.ends))
        if found.starts is not None:
            parts.append(cls(ends=found.starts))
        if found.band.left is not None:
            parts.append(cls(band=Band(None, -found.band.left - 1, "start")))
        if found.band.right is not None:
            parts.append(cls(band=Band(-found.band.right - 1, None, "start")))
        for ids in found.segment_ids:
            same = cast(Array, Allowed(None, None, (ids,), ()).dense(axes))
            parts.append(cls(arrays=(~same,)))
        return cls._union([*parts, *(cls(arrays=(~array,)) for array in found.arrays)], axes)

    @classmethod
    def _union(cls, parts: "list[_Conditions]", axes: Axes) -> "_Conditions":
        """One range of keys per query where that is known to be the union; else a bool array."""
        known = [part.allowed(axes) for part in parts]
        if any(part.everything() for part in known):
            return cls()
        if not any(part.segment_ids or part.arrays for part in parts):
            band = _joined([part.band for part in parts])
            if band is not None and all(part.starts is part.ends is None for part in parts):
                return cls(band=band)
            if all(part.start is None for part in known):
                nothing = jnp.zeros((1, 1, 1), jnp.int32)
                return cls(ends=_reduced(jnp.maximum, nothing, *(part.end for part in known)))
            if all(part.end is None for part in known):
                return cls(starts=_reduced(jnp.minimum, *(part.start for part in known)))
        tables = [cast(Array, part.dense(axes)) for part in known]
        return cls(arrays=(functools.reduce(jnp.logical_or, tables),))

    def allowed(self, axes: Axes) -> Allowed:
        start, end = _band_bounds(self.band, axes)
        return Allowed(
            _reduced(jnp.maximum, self.starts, start),
            _reduced(jnp.minimum, self.ends, end),
            self.segment_ids,
            self.arrays,
            self._facts(axes),
        )

    def _facts(self, axes: Axes) -> MaskFacts:
        kind, band = "none", self.band
        if self.starts is not None:
            kind = "per query"
        elif self.ends is not None:
            kind = "per example" if self.ends.shape[1:] == (1, 1) else "per query"
        if axes.T == 1 and band.right is not None:  # for one query, the end of a band is a length
            kind, band = kind if kind != "none" else "per example", band._replace(right=None)
        return MaskFacts(
            kind, band, bool(self.segment_ids), bool(self.arrays), self._on_diagonal(axes)
        )

    def _on_diagonal(self, axes: Axes) -> bool:
        """As `MaskFacts.diagonal`."""
        left, right, _ = self.band
        in_band = (left is None or left >= 0) and (right is None or right >= 0)
        alone = self.starts is self.ends is None and not self.arrays
        packed = bool(self.segment_ids) and self.shared_ids
        return packed and alone and in_band and not axes.symbolic() and axes.T == axes.S


def _reduced(function: Callable[[Array, Array], Array], *arrays: Array | None) -> Array | None:
    """function over the arrays that are not None; None where all are."""
    found = [array for array in arrays if array is not None]
    return functools.reduce(function, found) if found else None


def _as_one_band(bands: tuple[Band, ...], axes: Axes) -> Band:
    """The intersection, aligned at the start; a bound that masks no pair becomes None."""
    aligned = [_at_start(band, axes) for band in bands]
    left = min((band.left for band in aligned if band.left is not None), default=axes.T)
    right = min((band.right for band in aligned if band.right is not None), default=axes.S)
    return Band(
        None if left >= axes.T - 1 else left,  # the last query attends to the first key
        None if right >= axes.S - 1 else right,  # the first query attends to the last key
        "start",
    )


def _at_start(band: Band, axes: Axes) -> Band:
    """The same band, aligned at the start.

    At align="end" query t is at position t + S - T: counted from the start, its band is S - T
    further right.
    """
    offset = axes.S - axes.T if band.align == "end" else 0
    left = None if band.left is None else band.left - offset
    return Band(left, None if band.right is None else band.right + offset, "start")


def _joined(bands: list[Band]) -> Band | None:
    """The union of bands aligned at the start; None where there is a gap between two of them."""
    spans = sorted(
        (-math.inf if left is None else -left, math.inf if right is None else right)
        for left, right, _ in bands
    )
    spans = [(low, high) for low, high in spans if low <= high]
    if not spans or any(
        low > max(high for _, high in spans[:i]) + 1 for i, (low, _) in enumerate(spans) if i
    ):
        return None
    low, high = spans[0][0], max(high for _, high in spans)
    return Band(
        None if low == -math.inf else -int(low), None if high == math.inf else int(high), "start"
    )


def _band_bounds(band: Band, axes: Axes) -> tuple[Array | None, Array | None]:
    """The range of keys of each query, int32 [1, 1, T], for a band aligned at the start."""
    position = jnp.arange(axes.T, dtype=jnp.int32)[None, None, :]

    def bound(offset: int) -> Array:
        return jnp.clip(position + _int32(offset), 0, _int32(axes.S))

    start = None if band.left is None else bound(-band.left)
    end = None if band.right is None else bound(band.right + 1)
    return start, end


def _int32(size: int) -> Array | int:
    """A number; a size that jax.export leaves open, as an array."""
    return size if isinstance(size, int) else jnp.asarray(size, jnp.int32)


def _canonical_lens(lens: Array, axes: Axes) -> Array:
    """-> int32 [B|1, N|1, T|1], clipped to [0, S]."""
    lens = as_array("valid_lens", as_lens(lens))
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
    # Clipped in its own dtype: int64 and uint64 past the range of int32 would wrap around.
    largest = min(jnp.iinfo(lens.dtype).max, jnp.iinfo(jnp.int32).max)
    largest = largest if axes.symbolic() else min(axes.S, largest)
    lens = jnp.clip(lens, jnp.asarray(0, lens.dtype), jnp.asarray(largest, lens.dtype))
    lens = lens.astype(jnp.int32)
    if axes.symbolic():  # int8 may not hold S
        lens = jnp.minimum(lens, _int32(axes.S))
    if lens.ndim == 3:
        return lens
    if axes.rank == 2:
        return lens.reshape(1, 1, T if lens.ndim else 1)
    return lens.reshape((B, 1, T if lens.ndim == 2 else 1) if lens.ndim else (1, 1, 1))


def _canonical_ids(query_ids: Array, key_ids: Array, axes: Axes) -> tuple[Array, Array]:
    query_ids, key_ids = as_array("query_ids", query_ids), as_array("key_ids", key_ids)
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
            "one id per query and one per key; Mask.segments(ids) is for T = S",
        )
    return jnp.atleast_2d(query_ids), jnp.atleast_2d(key_ids)


def _canonical_array(array: Array, axes: Axes) -> Array:
    """-> bool [B|1, N|1, T|1, S|1]."""
    if callable(array) or isinstance(array, str):
        raise TypeError(
            "mask must be a regard.Mask or a bool array (True takes part). Got "
            f"{array!r}. Fix: mask=regard.Mask.causal()."
        )
    array = as_array("mask", array)
    if array.dtype != jnp.bool_:
        raise TypeError(
            f"mask must be bool (True takes part) or a regard.Mask. Got dtype {array.dtype}, shape "
            f"{list(array.shape)}. Fix: mask.astype(bool), or bias= for numbers added to scores."
        )
    return axes.canonical_pairs("mask", array)
