"""Loops and kernels inside jax.shard_map, where JAX knows over which mesh axes an array varies.

A loop's carry may not gain such an axis on the way. A running sum that starts as plain zeros would;
`vary_as` makes it start right. And a kernel has to say over which axes its results vary: `result`.
"""

from typing import Any

import jax
from jax import lax


def varying_axes(tree: Any) -> frozenset[str]:
    """The mesh axes over which some leaf of the tree varies; none outside shard_map."""
    axes: frozenset[str] = frozenset()
    for leaf in jax.tree.leaves(tree):
        kind = jax.typeof(leaf)
        manual = getattr(kind, "manual_axis_type", None)
        axes |= frozenset(getattr(kind, "vma", ()) if manual is None else manual.varying)
    return axes


def result(shape: tuple[int, ...], dtype: Any, like: Any) -> jax.ShapeDtypeStruct:
    """What a kernel writes: it varies over every mesh axis that what it reads, `like`, does."""
    axes = varying_axes(like)
    if not axes:
        return jax.ShapeDtypeStruct(shape, dtype)
    varying = jax.sharding.ManualAxisType(varying=axes)
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)


def vary_as(tree: Any, like: Any) -> Any:
    """The tree, varying over every mesh axis that `like` varies over."""
    wanted = varying_axes(like)
    if not wanted:
        return tree

    def vary(leaf: Any) -> Any:
        missing = wanted - varying_axes(leaf)
        return lax.pcast(leaf, tuple(sorted(missing)), to="varying") if missing else leaf

    return jax.tree.map(vary, tree)
