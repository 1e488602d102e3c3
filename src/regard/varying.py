"""Loops inside jax.shard_map: what a loop carries must vary over the mesh from its first round on.

Inside shard_map JAX knows over which mesh axes an array varies, and a loop's carry may not gain
one on the way. A running sum that starts as plain zeros would; `vary_as` makes it start right.
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


def vary_as(tree: Any, like: Any) -> Any:
    """The tree, varying over every mesh axis that `like` varies over."""
    wanted = varying_axes(like)
    if not wanted:
        return tree

    def vary(leaf: Any) -> Any:
        missing = wanted - varying_axes(leaf)
        return lax.pcast(leaf, tuple(sorted(missing)), to="varying") if missing else leaf

    return jax.tree.map(vary, tree)
