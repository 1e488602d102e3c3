"""A sequence sharded over one axis of a mesh: which devices hold it, and what masks mean there.

Inside the caller's own shard_map a call's arrays are one device's shard. Masks still refer to the
whole sequence, so lengths per query and segment ids, four bytes each, are gathered; queries, keys
and values are not. ring.py pools over the shards.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType

from regard.mask import Allowed, Mask, MaskFacts, resolve
from regard.shapes import Axes


@dataclass(frozen=True)
class SequenceAxis:
    """The devices along one axis of a mesh, which share a sequence in their order."""

    mesh: Any
    axis: str

    def __post_init__(self) -> None:
        if self.mesh.empty:
            raise ValueError(
                f"sequence_axis={self.axis!r} names an axis of a mesh, and there is none. Fix: "
                f"mesh=, or jax.set_mesh(mesh), or call inside a shard_map over {self.axis!r}."
            )
        if self.axis not in self.mesh.shape:
            raise ValueError(
                f"sequence_axis must name an axis of the mesh. Got {self.axis!r}, mesh "
                f"{dict(self.mesh.shape)}."
            )

    @classmethod
    def of(cls, mesh: Any, axis: str | None) -> "SequenceAxis":
        """The axis that a caller of `attend` asked for."""
        if axis is None:
            raise ValueError(
                "mesh= goes with sequence_axis=, the axis that shards T and S. Got a mesh of "
                f"{dict(mesh.shape)} and no sequence_axis. Fix: name one; for a sharded batch "
                "no argument is needed."
            )
        around = jax.sharding.get_abstract_mesh()
        if mesh is None or axis in around.manual_axes:  # inside the caller's shard_map
            mesh = around
        elif isinstance(mesh, jax.sharding.Mesh):
            # The same devices, with every other sharding (of the batch, say) left to XLA.
            kinds = (AxisType.Auto,) * len(mesh.axis_names)
            mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)
        return cls(mesh, axis)

    @property
    def has_other_axes(self) -> bool:
        """Whether the mesh has other axes, by which the compiler may shard the batch."""
        return not self.inside and any(
            size > 1 for name, size in self.mesh.shape.items() if name != self.axis
        )

    @property
    def inside(self) -> bool:
        """Whether the call is made inside a shard_map over this axis, on one device's shard."""
        return self.axis in getattr(self.mesh, "manual_axes", ())

    @property
    def size(self) -> int:
        return self.mesh.shape[self.axis]

    def whole(self, axes: Axes) -> Axes:
        """The sizes of the whole sequence, given those of a call."""
        if not self.inside:
            return axes
        return replace(axes, T=axes.T * self.size, S=axes.S * self.size)

    def resolve_shard(
        self, mask: Mask | Array | None, valid_lens: Array | None, axes: Axes
    ) -> tuple[Allowed, Array | None, Array | None]:
        """The mask of one device's shard, with keys numbered as in the whole sequence.

        Returns:
            The mask; which of the shard's keys are visible to some query of the whole sequence,
            [B|1, N|1, S]; which of its queries have a visible key, [B|1, N|1, T|1].
        """
        if not isinstance(mask, Mask):
            mask = Mask() if mask is None else Mask.boolean(mask)
        if valid_lens is not None:
            mask = mask & Mask.lengths(valid_lens)
        lens = tuple(self._gathered(jnp.asarray(one), axes) for one in mask.lens)
        whole = self.whole(axes)
        ids = tuple(
            tuple(
                lax.all_gather(one, self.axis, axis=jnp.ndim(one) - 1, tiled=True) for one in pair
            )
            for pair in mask.segment_ids
        )
        known = Mask(lens=lens, bands=mask.bands, segment_ids=cast(Any, ids))
        allowed = resolve(known, None, whole)
        facts = cast(MaskFacts, allowed.facts)
        # Anything else is refused by the ring, whose request has these facts.
        facts = facts._replace(boolean=bool(mask.arrays or mask.excluded))

        def own(array: Any, size: int, axis: int = 2) -> Any:
            if array is None or array.shape[axis] == 1 != size * self.size:
                return array
            return lax.dynamic_slice_in_dim(array, lax.axis_index(self.axis) * size, size, axis)

        ids = tuple((own(q, axes.T, 1), own(k, axes.S, 1)) for q, k in allowed.segment_ids)
        bounds = own(allowed.start, axes.T), own(allowed.end, axes.T)
        visible, non_empty = allowed.visible_keys(whole), allowed.non_empty_rows(whole)
        return Allowed(*bounds, ids, (), facts), own(visible, axes.S), own(non_empty, axes.T)

    def _gathered(self, lens: Array, axes: Axes) -> Array:
        """Lengths per query, of all queries; any other lengths unchanged."""
        if lens.ndim < (1 if axes.rank == 2 else 2):
            return lens
        return lax.all_gather(lens, self.axis, axis=lens.ndim - 1, tiled=True)
