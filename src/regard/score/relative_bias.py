"""A learned bias by distance: a table of distances, or T5's buckets of them."""

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from regard.placement import current_platform
from regard.score.contract import (
    Lift,
    Score,
    accumulation_dtype,
    with_heads,
)
from regard.score.distances import over_distances
from regard.score.positions import Placement, Positional, from_columns
from regard.score.registration import register_score
from regard.shapes import require_arrays


@register_score
@dataclass(frozen=True)
class RelativeBias(Positional):
    """A learned bias by distance: a = table[bucket(j - i)], for a query at i and a key at j.

    Shaw et al. 2018 clip distances; T5 has buckets that widen with the distance (Raffel et al.
    2020, section 2.1). Added to another score: T5's is `Dot(scale=1.0) + RelativeBias(table, 128)`.

    Lift: exact, a number per distance (tests/score/test_positions.py); none where positions are
    given, and it is scored tile by tile. The gradient of the table is the same in every run.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> x = jnp.zeros((3, 4))
        >>> score = regard.RelativeBias(jnp.array([-1.0, 0.0, 1.0]))  # before, here, after
        >>> regard.scores(x, x, score=score).tolist()
        [[0.0, 1.0, 1.0], [-1.0, 0.0, 1.0], [-1.0, -1.0, 0.0]]

    Args:
        table: (2R + 1,), of the distances j - i from -R to R, past which they are clipped; with
            `max_distance`, (buckets,), T5's. With a leading axis N, one table per head.
        max_distance: None for a plain table; T5's buckets grow up to this distance.
        bidirectional: of T5's buckets: half of them are for keys after the query. False: these
            count as distance 0, for causal order.
    """

    table: Array
    max_distance: int | None = field(default=None, metadata=dict(static=True))
    bidirectional: bool = field(default=True, metadata=dict(static=True))

    def placed(self, query: Array, key: Array, at: Placement) -> tuple[Score, Array, Array]:
        score = RelativeBiasAt(self.table, self.max_distance, self.bidirectional, at.by_default)
        return score, at.query_columns, at.key_columns

    def prepared(self, key: Array, positions: Array) -> tuple[Score, Array]:
        return self, key[..., :0]  # a memory stores the positions of its keys

    def check(self, query_width: int, key_width: int) -> None:
        require_arrays(self.label(), table=self.table)
        count = self.table.shape[-1] if self.table.ndim in (1, 2) else 0
        if self.max_distance is None:
            rule, fits = "an odd number of entries, for distances -R to R", count % 2 == 1
        else:
            exact = _exact(count, self.bidirectional)
            rule = "an even number of at least 4 buckets" if self.bidirectional else "2 buckets"
            rule += ", and max_distance above the distances with a bucket of their own"
            fits = exact >= 1 and not (self.bidirectional and count % 2)
            fits = fits and self.max_distance > exact
        if not fits:
            raise ValueError(
                f"RelativeBias needs a table of shape (entries,) or (N, entries), with {rule}. Got "
                f"table {list(self.table.shape)}, max_distance {self.max_distance}, bidirectional "
                f"{self.bidirectional}. Fix: 2R + 1 entries; or T5's 32 with max_distance=128."
            )

    def head_axes(self) -> dict[str, tuple[int, ...]]:
        return with_heads(1, table=self.table)


@register_score
@dataclass(frozen=True)
class RelativeBiasAt(Score):
    """`RelativeBias` of columns of positions."""

    table: Array
    max_distance: int | None = field(metadata=dict(static=True))
    bidirectional: bool = field(metadata=dict(static=True))
    by_default: bool = field(default=False, metadata=dict(static=True))

    def label(self) -> str:
        return "RelativeBias"

    def scores(self, query: Array, key: Array) -> Array:
        table = self.table.astype(accumulation_dtype(query.dtype, self.table.dtype))
        # Each head reads its own columns: a mask of its own may have zeroed another head's.
        distance = from_columns(key)[..., None, :] - from_columns(query)[..., :, None]
        bucket = jnp.asarray(buckets(table.shape[-1], self.max_distance, self.bidirectional))
        furthest = bucket.shape[0] // 2
        return _look_up(table, bucket[jnp.clip(distance, -furthest, furthest) + furthest])

    def lift(self, query: Array, key: Array, *, visible: Array | None = None) -> Lift | None:
        if not self.by_default:
            return None
        table = self.table.astype(accumulation_dtype(query.dtype, self.table.dtype))
        table = table if table.ndim == 2 else table[None]  # [N|1, entries]
        if self.max_distance is not None:
            bucket = buckets(table.shape[-1], self.max_distance, self.bidirectional)
            table = jax.vmap(_look_up, (0, None))(table, jnp.asarray(bucket))
        numbers = over_distances(table, query.shape[-2], key.shape[-2])
        numbers = numbers.reshape(*(1,) * (query.ndim - 3), *numbers.shape)
        bends = table.shape[-1] // 2
        return Lift(query[..., :0], key[..., :0], distance_bias=numbers, bends=bends)

    def head_axes(self) -> dict[str, tuple[int, ...]]:
        return with_heads(1, table=self.table)

    def tile_width(self, query_width: int) -> int:
        return self.table.shape[-1]


def _look_up(table: Array, index: Array) -> Array:
    """[entries] and [...], or one table per head, [N, entries] and [..., N, T, S], -> the index's
    shape; with a gradient that is the same in every run.
    """
    if current_platform(table) == "cpu":  # adds up in order
        heads = (jnp.arange(table.shape[0])[:, None, None],) if table.ndim == 2 else ()
        return table.at[(*heads, index)].get(mode="promise_in_bounds")
    hot = jax.nn.one_hot(index, table.shape[-1], dtype=table.dtype)
    axes = "...ntse,ne->...nts" if table.ndim == 2 else "...e,e->..."
    return jnp.einsum(axes, hot, table, precision=jax.lax.Precision.HIGHEST)


def buckets(count: int, max_distance: int | None, bidirectional: bool) -> np.ndarray:
    """int32 [2R + 1]: the entry of the table for each distance j - i from -R to R.

    Example:
        >>> buckets(3, None, True).tolist()
        [0, 1, 2]
        >>> buckets(8, 8, True).tolist()  # 3, 2, 1 and 0 before; 5, 6, 7 after
        [3, 3, 3, 3, 3, 2, 2, 1, 0, 5, 6, 6, 7, 7, 7, 7, 7]
    """
    if max_distance is None:
        return np.arange(count, dtype=np.int32)
    side, exact = count // 2 if bidirectional else count, _exact(count, bidirectional)
    # A distance of its own up to `exact`; from there on, powers of one ratio. 1e-9: those that are
    # whole numbers begin a bucket.
    ratio = math.log(max_distance / exact) / (side - exact)
    wide = [math.ceil(exact * math.exp(ratio * k) - 1e-9) for k in range(1, side - exact)]
    begins = np.array([*range(1, exact + 1), *wide])
    distance = np.arange(-max_distance, max_distance + 1)
    before = np.maximum(-distance, 0)
    far = np.abs(distance) if bidirectional else before
    found = (far[:, None] >= begins[None]).sum(1)
    after = distance > 0
    return np.where(after & bidirectional, found + side, found).astype(np.int32)


def _exact(count: int, bidirectional: bool) -> int:
    """How many distances, from 0 on, have a bucket of their own."""
    return (count // 2 if bidirectional else count) // 2
