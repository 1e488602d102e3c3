"""Any tree of arrays as a flat dictionary with readable names, and back."""

import zlib
from typing import Any

import jax
import numpy as np


def to_named(tree: Any) -> dict[str, np.ndarray]:
    """{"decoder.input.kernel": array, ...}: on the host, a name for each leaf of the tree.

    Example:
        >>> from regard.seq2seq.model.named_arrays import to_named
        >>> sorted(to_named({"a": [1, 2], "b": {"c": 3}}))
        ['a.0', 'a.1', 'b.c']
    """
    leaves = jax.tree.leaves_with_path(tree)
    arrays = jax.device_get([leaf for _, leaf in leaves])
    return {_name(path): np.asarray(array) for (path, _), array in zip(leaves, arrays, strict=True)}


def from_named(like: Any, named: dict[str, np.ndarray], origin: str) -> Any:
    """The inverse: a tree of the structure, shapes and dtypes of `like`.

    Args:
        like: a tree of arrays, or of anything with a shape and a dtype.
        named: of `to_named`.
        origin: where the arrays come from, for the error message.

    Raises:
        ValueError: lists every array that is missing, unexpected or of another shape.
    """
    leaves = jax.tree.leaves_with_path(like)
    wanted = {_name(path): tuple(leaf.shape) for path, leaf in leaves}
    problems = []
    for name in sorted(wanted.keys() | named.keys()):
        expected = list(wanted[name]) if name in wanted else "nothing"
        found = list(named[name].shape) if name in named else "nothing"
        if expected != found:
            problems.append(f"  {name}: expected {expected}, got {found}")
    if problems:
        listed = "\n".join(problems)
        raise ValueError(
            f"the arrays of {origin} are not this model's:\n{listed}\n"
            "Fix: use the configuration that they were written with."
        )
    values = [named[_name(path)].astype(leaf.dtype, copy=False) for path, leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(like), values)


def checksums(named: dict[str, np.ndarray]) -> dict[str, int]:
    """A CRC-32 of every array's bytes."""
    return {name: zlib.crc32(array.tobytes()) for name, array in named.items()}


def _name(path: tuple) -> str:
    parts = []
    for entry in path:
        for attribute in ("key", "name", "idx"):
            if hasattr(entry, attribute):
                parts.append(str(getattr(entry, attribute)))
                break
    # nnx puts each parameter's array into a leaf called "value" or "get_raw_value".
    return ".".join(part for part in parts if part not in ("value", "raw_value", "get_raw_value"))
