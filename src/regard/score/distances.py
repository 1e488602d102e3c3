"""Numbers that depend on the distance of a key from its query only: a vector instead of pairs."""

import jax.numpy as jnp
from jax import Array


def spread_distances(numbers: Array, queries: int, keys: int) -> Array:
    """[..., T + S - 1] -> [..., T, S]: the pair (t, s) gets entry s - t + T - 1.

    Example:
        >>> spread_distances(jnp.arange(4), 2, 3).tolist()
        [[1, 2, 3], [0, 1, 2]]
    """
    # Rows of T + S numbers, of which number d, modulo T + S, is that of distance d. Read again in
    # rows that are one shorter, each begins one distance earlier than the one before.
    before, after = numbers[..., : queries - 1], numbers[..., queries - 1 :]
    row = jnp.concatenate([after, jnp.zeros_like(numbers[..., :1]), before], axis=-1)
    lead, period = row.shape[:-1], queries + keys
    rows = jnp.broadcast_to(row[..., None, :], (*lead, queries, period))
    flat = rows.reshape(*lead, queries * period)[..., : queries * (period - 1)]
    return flat.reshape(*lead, queries, period - 1)[..., :keys]


def sum_distances(pairs: Array) -> Array:
    """[..., T, S] -> [..., T + S - 1], the transpose of `spread_distances`: pairs of each distance
    summed, in the same order in every run.

    Example:
        >>> sum_distances(jnp.array([[1, 2, 3], [4, 5, 6]])).tolist()
        [4, 6, 8, 3]
    """
    *lead, queries, keys = pairs.shape
    period, none = queries + keys, [(0, 0)] * len(lead)
    rows = jnp.pad(pairs, [*none, (0, 0), (0, queries - 1)]).reshape(*lead, -1)
    row = jnp.pad(rows, [*none, (0, queries)]).reshape(*lead, queries, period).sum(-2)
    return jnp.concatenate([row[..., keys + 1 :], row[..., :keys]], axis=-1)


def over_distances(table: Array, queries: int, keys: int) -> Array:
    """[..., 2R + 1] of the distances j - i from -R to R -> [..., T + S - 1], past R as at R.

    Entries are those of `spread_distances`, with queries and keys at `default_positions`: the
    last of both stands at the same place.

    Example:
        >>> over_distances(jnp.array([-1, 0, 1]), 2, 4).tolist()
        [-1, -1, -1, 0, 1]
    """
    furthest = table.shape[-1] // 2
    low, high = min(keys - 1, furthest), min(queries - 1, furthest)
    part = table[..., furthest - low : furthest + high + 1]
    more = (keys - 1 - low, queries - 1 - high)
    return jnp.pad(part, [(0, 0)] * (table.ndim - 1) + [more], mode="edge")
