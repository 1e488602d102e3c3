"""Batch and heads on several devices: each pools its own shard, and nothing is gathered.

Examples and heads never mix in attention, but XLA cannot see that through a kernel or a loop over
tiles, and would gather whole arrays on every device. `run_sharded` declares it, by JAX's
custom_partitioning. The only communication left is sums: gradients of what the devices share.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from regard.dropout import Draw
from regard.pool.axis_kinds import BATCH, HEADS, KEY_HEADS, Kinds, kinds_of
from regard.pool.score_plan import ShardablePass
from regard.shapes import Axes


def run_sharded(whole: ShardablePass, direction: str, inputs: tuple[Any, ...]) -> Any:
    """whole.forward(*inputs) or whole.backward(*inputs), each device its shard of both axes."""
    # Imported when first used: it is needed on several devices only.
    from jax.experimental.custom_partitioning import custom_partitioning

    leaves, flat = jax.tree.flatten(inputs)
    structure: Any = flat
    kinds = tuple(jax.tree.leaves(kinds_of(whole.axes, inputs)))
    form: list[Any] = []  # of the results, once traced

    def alone(*leaves: Array) -> list[Array]:
        results, found = jax.tree.flatten(getattr(whole, direction)(*structure.unflatten(leaves)))
        form[:] = [found]
        return results

    def kinds_of_results(shapes: Sequence[tuple[int, ...]]) -> tuple[Kinds, ...]:
        if direction == "backward":  # a cotangent for each of the operands
            return kinds[: len(shapes)]
        return tuple(Kinds.of((BATCH, HEADS), len(shape)) for shape in shapes)

    def rule(mesh: Any, operands: Any, results: Any) -> Any:
        shapes = [tuple(kind.shape) for kind in results]
        return _rule(kinds, kinds_of_results(shapes))

    def partition(mesh: Mesh, arguments: Any, results: Any) -> Any:
        wanted = kinds_of_results([result.shape for result in results])
        split = Split.of(whole.axes, mesh, kinds, arguments)

        def lower(*leaves: Array) -> list[Array]:
            # Here shards are whole arrays, whatever mesh the caller has set.
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                own = split.locate(structure.unflatten(split.take(kinds, leaves)))
                part = whole.resized(split.axes())
                results = jax.tree.leaves(getattr(part, direction)(*own))
                return [split.give(one, array) for one, array in zip(wanted, results, strict=True)]

        places = [split.place(one) for one in wanted], tuple(split.place(one) for one in kinds)
        return split.mesh, lower, *places

    shared = custom_partitioning(jax.jit(alone))  # jitted, it may hold constants
    shared.def_partition(partition, sharding_rule=rule)
    results = _mappable(shared, alone)(*leaves)
    return form[0].unflatten(results)


def _mappable(shared: Callable, alone: Callable) -> Callable:
    """`shared`, which has no vmap rule; under vmap, `alone`."""

    @jax.custom_batching.custom_vmap
    def mapped(*leaves: Array) -> list[Array]:
        return shared(*leaves)

    @mapped.def_vmap
    def _(size: int, is_mapped: Sequence[bool], *leaves: Array) -> tuple[list[Array], list[bool]]:
        results = jax.vmap(alone, [0 if one else None for one in is_mapped])(*leaves)
        return results, [True] * len(results)

    return mapped


def _rule(operands: Sequence[Kinds], results: Sequence[Kinds]) -> Any:
    """The same as a Shardy rule: which axes are sharded together; the others stay whole."""
    from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule

    # Key heads have a letter of their own. Tied to the heads, four shards of two key heads would
    # ask for half of a mesh axis, which JAX cannot name; `Split` ties them where it can.
    letters = {BATCH: "b", HEADS: "n", KEY_HEADS: "k"}
    whole: list[str] = []

    def mapping(kinds: Kinds) -> Any:
        names = []
        for kind in kinds:
            if kind is None:
                whole.append(f"w{len(whole)}")
            names.append(whole[-1] if kind is None else letters[kind])
        return ArrayMapping(*names)

    mappings = [tuple(mapping(kinds) for kinds in side) for side in (operands, results)]
    return SdyShardingRule(*mappings, need_replication_factors=tuple(whole))


# ---------------------------------------------------------------------------------------------
# Which device has which shard.


@dataclass(frozen=True)
class Split:
    """Shards of a problem: over which axes of a mesh its batch and its heads are divided.

    Where there are more shards of heads than key heads, each shard needs one key head: all of them
    are everywhere then, and a shard takes its own.
    """

    whole: Axes
    mesh: Mesh
    batch: tuple[str, ...]
    heads: tuple[str, ...]

    @classmethod
    def of(cls, axes: Axes, mesh: Mesh, kinds: Sequence[Kinds], arguments: Any) -> "Split":
        """As the arguments are sharded, as far as every shard is whole."""
        if mesh.empty:  # no named axis: nothing is known to be sharded
            devices = sorted(arguments[0].sharding.device_set, key=lambda device: device.id)
            return cls(axes, Mesh(np.array(devices), ("devices",)), (), ())

        def found(kind: str) -> tuple[str, ...]:
            for own, argument in zip(kinds, arguments, strict=True):
                for at, name in zip(own, argument.sharding.spec, strict=False):
                    if at == kind and name is not None:
                        return (name,) if isinstance(name, str) else tuple(name)
            return ()

        batch = found(BATCH)
        if axes.B % _size(mesh, batch):
            batch = ()
        heads = tuple(name for name in found(HEADS) or found(KEY_HEADS) if name not in batch)
        shards = _size(mesh, heads)
        if axes.N % shards or (axes.K % shards and shards % axes.K):
            heads = ()
        return cls(axes, mesh, batch, heads)

    def axes(self) -> Axes:
        """Of one shard."""
        whole, shards = self.whole, _size(self.mesh, self.heads)
        batch = whole.B // _size(self.mesh, self.batch)
        return replace(whole, B=batch, N=whole.N // shards, K=max(1, whole.K // shards))

    def place(self, kinds: Kinds) -> NamedSharding:
        """The sharding of an array."""
        axes = {BATCH: self.batch, HEADS: self.heads, KEY_HEADS: () if self._one else self.heads}
        names = [axes.get(kind, ()) if kind else () for kind in kinds]
        return NamedSharding(self.mesh, PartitionSpec(*(name or None for name in names)))

    @property
    def _one(self) -> bool:
        """Whether a shard uses one key head of several that are on its device."""
        return self.whole.K % _size(self.mesh, self.heads) != 0

    def _own_key_head(self) -> Array:
        shards = _size(self.mesh, self.heads)
        return lax.axis_index(self.heads) // (shards // self.whole.K)

    # On one device -----------------------------------------------------------------------------

    def take(self, kinds: Sequence[Kinds], leaves: Sequence[Array]) -> list[Array]:
        """The shard's own key head where several are on its device."""
        if not self._one:
            return list(leaves)
        own = self._own_key_head()
        return [
            lax.dynamic_slice_in_dim(leaf, own, 1, kind.index(KEY_HEADS))
            if KEY_HEADS in kind
            else leaf
            for kind, leaf in zip(kinds, leaves, strict=True)
        ]

    def give(self, kinds: Kinds, array: Array) -> Array:
        """A result; summed over the devices that have the same part of it in common."""
        if self._one and KEY_HEADS in kinds:
            axis = kinds.index(KEY_HEADS)
            shape = array.shape[:axis] + (self.whole.K,) + array.shape[axis + 1 :]
            array = lax.dynamic_update_slice_in_dim(
                jnp.zeros(shape, array.dtype), array, self._own_key_head(), axis
            )
        divided = jax.tree.leaves(tuple(self.place(kinds).spec))
        common = tuple(name for name in self.batch + self.heads if name not in divided)
        return lax.psum(array, common) if common else array

    def locate(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """A pass's inputs; dropout's seed with the place of each head in the whole."""
        operands, allowed, seed, *rest = inputs
        if seed is not None:
            own, N = self.axes(), self.whole.N
            example = _index(self.batch) * own.B + jnp.arange(own.B, dtype=jnp.int32)
            head = _index(self.heads) * own.N + jnp.arange(own.N, dtype=jnp.int32)
            seed = Draw(seed, example[:, None] * N + head[None, :], None, 0, self.whole.T)
        return operands, allowed, seed, *rest


def _size(mesh: Mesh, names: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[name] for name in names)


def _index(names: tuple[str, ...]) -> Array | int:
    return lax.axis_index(names) if names else 0
