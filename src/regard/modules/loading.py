"""Trees of arrays, as checkpoints and `regard.interop` give them: flattened, fitted to a module."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from regard.modules.parameters import Tree


def fit(expected: Tree, given: Tree) -> dict[str, Any]:
    """`given` in the nesting and dtypes of `expected`, after checking every name and shape.

    Args:
        expected: nested mappings of arrays, or of anything with a shape and a dtype.
        given: nested mappings of arrays, as a checkpoint or `regard.interop` gives them.

    Raises:
        ValueError: lists every array that is missing, unexpected or of another shape.
    """
    wanted, found = flatten(expected), flatten(given)
    problems = []
    for name in sorted(wanted.keys() | found.keys()):
        if name not in found:
            problems.append(f"{name}: expected {list(wanted[name].shape)}, got nothing")
        elif name not in wanted:
            problems.append(f"{name}: expected nothing, got {list(jnp.shape(found[name]))}")
        elif jnp.shape(found[name]) != tuple(wanted[name].shape):
            problems.append(
                f"{name}: expected {list(wanted[name].shape)}, got {list(jnp.shape(found[name]))}"
            )
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise ValueError(
            f"the arrays do not fit this module, and none was loaded:\n{listed}\n"
            "Fix: a module made with the checkpoint's widths, head counts, score and use_bias."
        )
    return unflatten(
        {name: jnp.asarray(found[name]).astype(like.dtype) for name, like in wanted.items()}
    )


def flatten(tree: Tree, prefix: str = "") -> dict[str, Any]:
    """{"query": {"kernel": x}} -> {"query.kernel": x}."""
    flat: dict[str, Any] = {}
    for name, child in tree.items():
        if isinstance(child, Mapping):
            flat |= flatten(child, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = child
    return flat


def unflatten(flat: Tree) -> dict[str, Any]:
    """{"query.kernel": x} -> {"query": {"kernel": x}}."""
    tree: dict[str, Any] = {}
    for name, array in flat.items():
        *path, last = name.split(".")
        node = tree
        for step in path:
            node = node.setdefault(step, {})
        node[last] = array
    return tree
