"""A call inside the caller's own shard_map: its arrays are one device's share of a sequence.

Masks still speak of the whole sequence. Lengths per query, four bytes each, are therefore gathered;
queries, keys and values are not.
"""

from dataclasses import replace
from typing import cast

import jax.numpy as jnp
from jax import Array, lax

from regard.mask import Allowed, Mask, MaskFacts, resolve
from regard.pool.request import Ring
from regard.shapes import Axes


def whole_axes(axes: Axes, over: Ring | None) -> Axes:
    """The sizes of the whole sequence, given those of a call."""
    if over is None or not over.inside:
        return axes
    return replace(axes, T=axes.T * over.size, S=axes.S * over.size)


def resolve_share(
    mask: Mask | Array | None, valid_lens: Array | None, axes: Axes, over: Ring
) -> tuple[Allowed, Array | None, Array | None]:
    """A share's mask, with keys numbered as in the whole; which of its keys some query of the
    whole may look at, [B|1, N|1, S]; which of its queries may look at any, [B|1, N|1, T|1].
    """
    if not isinstance(mask, Mask):
        mask = Mask() if mask is None else Mask.boolean(mask)
    if valid_lens is not None:
        mask = mask & Mask.lengths(valid_lens)
    lens = tuple(_gathered(jnp.asarray(one), axes, over) for one in mask.lens)
    whole = whole_axes(axes, over)
    allowed = resolve(Mask(lens=lens, bands=mask.bands), None, whole)
    facts = cast(MaskFacts, allowed.facts)
    facts = facts._replace(segments=bool(mask.segment_ids), boolean=bool(mask.arrays))

    def own(array: Array | None, size: int) -> Array | None:
        if array is None or array.shape[2] == 1 != size * over.size:
            return array
        return lax.dynamic_slice_in_dim(array, lax.axis_index(over.axis) * size, size, 2)

    bounds = own(allowed.start, axes.T), own(allowed.end, axes.T)
    visible, seeing = allowed.visible_keys(whole), allowed.seeing_queries(whole)
    return Allowed(*bounds, (), (), facts), own(visible, axes.S), own(seeing, axes.T)


def _gathered(lens: Array, axes: Axes, over: Ring) -> Array:
    """Lengths per query, of all queries; any others as they are."""
    if lens.ndim < (1 if axes.rank == 2 else 2):
        return lens
    return lax.all_gather(lens, over.axis, axis=lens.ndim - 1, tiled=True)
