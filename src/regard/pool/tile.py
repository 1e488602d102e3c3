"""What happens inside a tile of pairs, defined once for every tiled backend.

Tiles in plain XLA are [.., q, s], or transposed where that is faster; Triton kernels load theirs
from memory. Either brings its arrays here in a form that broadcasts to its own tile.
"""

from collections.abc import Sequence
from typing import Any

from jax import Array


def visible_pairs(
    keys: Any,
    start: Array | None,
    end: Array | None,
    segment_ids: Sequence[tuple[Array, Array]],
    tables: Sequence[Array],
) -> Array | None:
    """Which pairs of a tile take part, bool; None: all of them.

    Args:
        keys: the index of each key in its sequence; read only where there are ranges.
        start, end: per query, the keys start <= s < end; None is no bound.
        segment_ids: per query and per key: equal ids attend to each other.
        tables: bool.
    """
    parts = []
    if start is not None:
        parts.append(keys >= start)
    if end is not None:
        parts.append(keys < end)
    parts += [query_ids == key_ids for query_ids, key_ids in segment_ids]
    parts += tables
    visible = None
    for part in parts:
        visible = part if visible is None else visible & part
    return visible
