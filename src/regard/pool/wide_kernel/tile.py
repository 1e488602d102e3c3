"""What both directions do with one tile inside a kernel: scores, mask, dropout.

A kernel is given its arrays by name. Axes of 1 broadcast: whoever has no heads of its own is read
at head 0.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from regard.dropout import keep_scale
from regard.pool.wide_kernel.blocks import Blocks
from regard.pool.wide_kernel.bounds import Ranges, key_bounds

LOG2_E = 1.4426950408889634


class TileScore(Protocol):
    """Scores of one tile, from arrays that lie whole in memory. Static and hashable.

    Both directions ask for tiles: the forward pass with `rows` of queries as the first axis, the
    backward pass with keys first.
    """

    def tile(self, refs: dict[str, Any], rows: Any, keys: Any, flipped: bool) -> Array:
        """float32 [rows, keys] in units of log2, flipped [keys, rows]; without key bias."""
        ...


@dataclass(frozen=True)
class FeatureScore:
    """scale · phi · psi, a chunk of features at a time.

    Attributes:
        width: of the features, whole chunks.
        chunk: features per product.
        scale: positive, in units of log2.
        precision: of float32 products.
    """

    width: int
    chunk: int
    scale: float
    precision: Any = None

    def of(self, left: Array, right: Array) -> Array:
        """The tile of features [rows, width] and [keys, width], or the other way round."""
        return dot(left, right, (1, 1), self.precision) * self.scale

    def tile(self, refs: dict[str, Any], rows: Any, keys: Any, flipped: bool) -> Array:
        left, right = ("query", rows), ("key", keys)
        if flipped:
            left, right = right, left

        def product(first: Any) -> Array:
            features = pl.ds(first, self.chunk)
            one = plt.load(refs[left[0]].at[left[1], features])
            other = plt.load(refs[right[0]].at[right[1], features])
            return dot(one, other, (1, 1), self.precision)

        if self.width == self.chunk:
            return product(0) * self.scale
        zero = jnp.zeros((left[1].size, right[1].size), jnp.float32)
        add = lambda c, sum_: sum_ + product(c * self.chunk)  # noqa: E731
        return lax.fori_loop(0, self.width // self.chunk, add, zero) * self.scale


def dot(left: Array, right: Array, contract: tuple[int, int], precision: Any) -> Array:
    return lax.dot_general(
        left,
        right,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


@dataclass(frozen=True)
class TilePass:
    """What is static about a kernel; sizes are padded ones.

    Attributes:
        score: makes the scores of a tile.
        tokens_first: query, key, value and d_out are [B, T, N, ...], as callers of attend keep
            them; narrow_back.py alone.
    """

    score: TileScore
    blocks: Blocks
    B: int
    N: int
    K: int
    T: int
    S: int
    V: int
    dropout_rate: float
    precision: Any
    interpret: bool
    tokens_first: bool = False

    @property
    def group(self) -> int:
        return self.N // self.K

    def visits(self, ranges: Ranges) -> Array:
        """`key_bounds` of this kernel's blocks."""
        return key_bounds(ranges, self.blocks.queries, self.blocks.keys, self.T, self.S)

    def over_groups(self, array: Array) -> Array:
        """[B, N, ...] -> [B, K, ...]: sums over the query heads of each key head."""
        if self.group == 1:
            return array
        return array.reshape(self.B, self.K, self.group, *array.shape[2:]).sum(2)


def allowed_tile(refs: dict[str, Any], rows: Any, keys: Any, flipped: bool) -> Array | None:
    """bool [rows, keys], or what broadcasts to it; flipped [keys, rows]. None: all of them."""
    row_axis, key_axis = (1, 0) if flipped else (0, 1)

    def along(values: Array, axis: int) -> Array:
        return jnp.expand_dims(values, 1 - axis)

    parts = []
    if "start" in refs or "end" in refs:
        index = keys.start + jnp.arange(keys.size, dtype=jnp.int32)
        if "start" in refs:
            starts = plt.load(refs["start"].at[rows])
            parts.append(along(index, key_axis) >= along(starts, row_axis))
        if "end" in refs:
            ends = plt.load(refs["end"].at[rows])
            parts.append(along(index, key_axis) < along(ends, row_axis))
    for name in refs:
        if name.startswith("query_ids"):
            mine = plt.load(refs[name].at[rows])
            theirs = plt.load(refs[name.replace("query", "key")].at[keys])
            parts.append(along(mine, row_axis) == along(theirs, key_axis))
    if "seen" in refs:
        parts.append(along(plt.load(refs["seen"].at[keys]) != 0, key_axis))
    if "table" in refs:
        table = plt.load(refs["table"].at[rows, keys]) != 0
        parts.append(table.T if flipped else table)
    allowed = None
    for part in parts:
        allowed = part if allowed is None else allowed & part
    return allowed


def keep_tile(
    static: TilePass, refs: dict[str, Any], rows: Any, keys: Any, flipped: bool
) -> Array | None:
    """Dropout's factors, the same numbers that every other backend draws; None without dropout."""
    if "seed" not in refs:
        return None
    seed = (refs["seed"][0], refs["seed"][1])
    row = refs["first_row"][0] + rows.start + jnp.arange(rows.size, dtype=jnp.int32)
    key = keys.start + jnp.arange(keys.size, dtype=jnp.int32)
    row, key = (row[None, :], key[:, None]) if flipped else (row[:, None], key[None, :])
    return keep_scale(seed, row, key, static.dropout_rate, jnp.dtype(jnp.float32))


def read_spec(array: Array, static: TilePass, tokens_first: bool = False) -> pl.BlockSpec:
    """One example and head of an array whole, for grids (block, head, example).

    [B|1, N|K|1, ...] is read as [...]; tokens first, [B, T, N|K, ...] is; anything of rank 1 as it
    is.
    """
    if array.ndim == 1:
        return pl.BlockSpec(array.shape, lambda *grid: (0,))
    examples, heads, *shape = heads_second(array.shape, tokens_first)

    def index(block: Array, head: Array, example: Array) -> tuple[Any, ...]:
        at = 0 if heads == 1 else (head if heads == static.N else head // static.group)
        first = (0 if examples == 1 else example, at)
        return heads_second((*first, *(0,) * len(shape)), tokens_first)

    return pl.BlockSpec(heads_second((None, None, *shape), tokens_first), index)


def write_spec(*shape: int, tokens_first: bool = False) -> pl.BlockSpec:
    """One example and head of a result whole: [B, N, *shape] is written as [*shape]."""

    def index(block: Array, head: Array, example: Array) -> tuple[Any, ...]:
        return heads_second((example, head, *(0,) * len(shape)), tokens_first)

    return pl.BlockSpec(heads_second((None, None, *shape), tokens_first), index)


def heads_second(axes: tuple[Any, ...], tokens_first: bool) -> tuple[Any, ...]:
    """Swaps the second and third where tokens come first: there and back."""
    return (axes[0], axes[2], axes[1], *axes[3:]) if tokens_first else tuple(axes)


def share_of(part: Array, parts: int, low: Array, high: Array) -> tuple[Array, Array]:
    """Where one of `parts` equal shares of the range from low to high begins and ends."""
    size = high - low
    first, last = (low + lax.div(size * (part + i), jnp.int32(parts)) for i in range(2))
    return first, last
