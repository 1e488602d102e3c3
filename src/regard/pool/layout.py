"""How a problem is cut into tiles: their sizes, every array padded to whole blocks, and which tiles
are visited.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from regard.mask import Allowed
from regard.normalize import Normalizer
from regard.placement import with_value
from regard.pool.backend import Problem
from regard.pool.score_plan import Flag, ScorePath
from regard.pool.tile import block_bounds
from regard.pool.xla_tiles import (
    Operands,
    TilePlan,
    Tiling,
)
from regard.score.contract import accumulation_dtype
from regard.shapes import Axes

_forced: ContextVar[Tiling | None] = ContextVar("tiling", default=None)


def tiling(*, block_q: int, block_k: int, block_b: int = 1) -> AbstractContextManager[None]:
    """Forces the tile sizes of calls traced inside; for tests and tuning."""
    return with_value(_forced, Tiling(block_b, block_q, block_k))


def forced_tiling() -> Tiling | None:
    return _forced.get()


@dataclass(frozen=True)
class Layout:
    """How the operands of one path are cut into tiles; static.

    Attributes:
        axes: of the call.
        normalize, dropout_rate, softcap: of the call.
        compute: the dtype of query and key.
        width: how many floats the score's definition holds per pair; 1 for a lift.
        lifted: whether there is a lift.
        wide_features: whether the lift has an expansion.
        sizes: forced tile sizes.
        platform: of the call.
        whole_batch: a tile holds all examples. A loop over examples would gather those of one
            device after the other, where the compiler has sharded the batch.
    """

    axes: Axes
    normalize: Normalizer
    dropout_rate: float
    compute: np.dtype
    width: int
    lifted: bool
    wide_features: bool
    sizes: Tiling | None
    platform: str
    whole_batch: bool = False
    softcap: float | None = None

    @classmethod
    def of(cls, problem: Problem, path: ScorePath, sizes: Tiling | None, platform: str) -> Self:
        width = (
            1
            if path.scored is None
            else max(1, path.scored[0].tile_width(problem.axes.query_width))
        )
        return cls(
            axes=problem.axes,
            normalize=problem.normalize,
            dropout_rate=problem.dropout_rate,
            compute=problem.query.dtype,
            width=width,
            lifted=path.lift is not None,
            wide_features=path.lift is not None and path.lift.expansion is not None,
            sizes=sizes,
            platform=platform,
            softcap=problem.softcap,
        )

    def lay(self, operands: Operands, allowed: Allowed) -> tuple[TilePlan, Operands, Allowed]:
        """Picks tile sizes and pads every array to whole blocks."""
        axes, value = self.axes, operands.value
        if operands.key and operands.key[0].shape[1] != axes.K:  # one score per head: no sharing
            value = None if value is None else jnp.repeat(value, axes.N // axes.K, axis=1)
            operands, axes = replace(operands, value=value), replace(axes, K=axes.N)
        # An expansion's arrays are one for each example; where they are shared, an axis of 1.
        expansion = jax.tree.map(
            lambda a: jnp.broadcast_to(a, (axes.B, *a.shape[1:])), operands.expansion
        )
        operands = replace(operands, expansion=expansion)
        if axes.K > 1 and _heads_are_alike(axes, operands, allowed):
            axes, operands, allowed = _heads_as_examples(axes, operands, allowed)
        value = operands.value
        wide = accumulation_dtype(self.compute, *([] if value is None else [value.dtype]))
        sizes = self.sizes or default_tiling(
            axes, self.wide_features, self.width, not allowed.everything(), self.platform
        )
        if self.whole_batch:
            sizes = replace(sizes, block_b=axes.B)
        plan = TilePlan(
            axes=axes,
            tiling=_fit(sizes, axes),
            normalize=self.normalize,
            dropout_rate=self.dropout_rate,
            softcap=self.softcap,
            lifted=self.lifted,
            wide=wide,
            product=product_dtype(self.platform, self.compute, wide),
        )
        rows, keys = plan.query_blocks * plan.tiling.block_q, plan.key_blocks * plan.tiling.block_k
        operands = Operands(
            operands.score,
            operands.expansion,
            jax.tree.map(lambda a: pad_rows(a, -2, rows), operands.query),
            jax.tree.map(lambda a: pad_rows(a, -2, keys), operands.key),
            None if value is None else pad_rows(value, 2, keys),
            None if operands.bias is None else pad_rows(pad_rows(operands.bias, 2, rows), 3, keys),
            pad_distances(operands.distance_bias, (axes.T, axes.S), (rows, keys)),
        )
        return plan, operands, _pad_allowed(allowed, plan, rows, keys)


def default_tiling(
    axes: Axes, wide_features: bool, width: int, skips: bool, platform: str
) -> Tiling:
    """Tile sizes that keep a tile in cache on a CPU, and a GPU busy.

    `width` is the number of floats the definition holds per pair, 1 for a lift.
    """
    if platform != "cpu":
        block_k = _even(axes.S, 1024 if width == 1 else 256)
        block_q = max(128, (1 << 26) // (width * axes.B * axes.N * block_k))
        return Tiling(axes.B, _even(axes.T, block_q), block_k)
    # Numbers in a tile. A definition's tile passes through the cache once per number of width.
    budget = (1 << 19) if width == 1 else (1 << 21) // width
    # Smaller blocks of keys where some can be left out: more of them are.
    longest = 512 if wide_features or width > 1 or skips else 1024
    block_k = _even(axes.S, max(64, min(longest, budget // 64)))
    limit = 1024 if wide_features else 512  # key features are computed again for each query block
    block_q = _even(axes.T, max(32, min(limit, budget // (axes.N * block_k))))
    examples = max(1, budget // (axes.N * block_q * block_k))
    block_b = max(b for b in range(1, axes.B + 1) if axes.B % b == 0 and b <= examples)
    return Tiling(block_b, block_q, block_k)


def _even(length: int, block: int) -> int:
    """The smallest multiple of 8 that covers `length` in as few blocks as `block` does."""
    blocks = -(-length // min(block, length))
    return length if blocks == 1 else -(-length // blocks // 8) * 8


def _fit(sizes: Tiling, axes: Axes) -> Tiling:
    block_b = sizes.block_b if axes.B % sizes.block_b == 0 else 1
    return Tiling(block_b, min(sizes.block_q, axes.T), min(sizes.block_k, axes.S))


def _pad_allowed(allowed: Allowed, plan: TilePlan, rows: int, keys: int) -> Allowed:
    """Padded queries have empty rows, padded keys are past every end."""
    end = allowed.end
    if end is None and keys > plan.axes.S:
        end = jnp.full((1, 1, 1), plan.axes.S, jnp.int32)
    return Allowed(
        None if allowed.start is None else pad_rows(allowed.start, 2, rows, fill=plan.axes.S),
        None if end is None else pad_rows(end, 2, rows),
        tuple((pad_rows(q, 1, rows), pad_rows(k, 1, keys)) for q, k in allowed.segment_ids),
        tuple(pad_rows(pad_rows(a, 2, rows), 3, keys) for a in allowed.arrays),
    )


def _heads_are_alike(axes: Axes, operands: Operands, allowed: Allowed) -> bool:
    """Whether each head can become an example of its own without copying a mask or bias."""
    if operands.score is not None and operands.score.per_head():
        return False
    biases = operands.bias, operands.distance_bias
    pairs = [*allowed.arrays, *(bias for bias in biases if bias is not None)]
    return all(array.shape[:2] in ((1, 1), (axes.B, axes.N)) for array in pairs)


def _heads_as_examples(
    axes: Axes, operands: Operands, allowed: Allowed
) -> tuple[Axes, Operands, Allowed]:
    """Each key head, with the query heads that share it, becomes an example of its own.

    A tile may then take any number of heads, whatever fits the cache best.
    """
    examples, group = axes.B * axes.K, axes.N // axes.K

    def split(array: Array) -> Array:
        """[B, K, ...] -> [BK, 1, ...] and [B, N, ...] -> [BK, G, ...]; [1, 1, ...] stays."""
        if array.shape[:2] == (1, 1):
            return array
        heads = 1 if array.shape[1] == axes.K and group > 1 else array.shape[1] // axes.K
        return array.reshape(examples, heads, *array.shape[2:])

    def split_bound(bound: Array) -> Array:
        if bound.shape[:2] == (1, 1):
            return bound
        return split(jnp.broadcast_to(bound, (axes.B, axes.N, bound.shape[2])))

    def split_ids(ids: Array) -> Array:
        return ids if ids.shape[0] == 1 else jnp.repeat(ids, axes.K, axis=0)

    operands = replace(
        operands,
        expansion=jax.tree.map(split, operands.expansion),
        query=jax.tree.map(split, operands.query),
        key=jax.tree.map(split, operands.key),
        value=jax.tree.map(split, operands.value),
        bias=jax.tree.map(split, operands.bias),
        distance_bias=jax.tree.map(split, operands.distance_bias),
    )
    allowed = Allowed(
        jax.tree.map(split_bound, allowed.start),
        jax.tree.map(split_bound, allowed.end),
        jax.tree.map(split_ids, allowed.segment_ids),
        jax.tree.map(split, allowed.arrays),
    )
    return replace(axes, B=examples, N=group, K=1), operands, allowed


def product_dtype(platform: str, compute: np.dtype, wide: np.dtype) -> np.dtype:
    """Matrix units take 16-bit operands; a CPU is faster, and more exact, in float32."""
    return wide if platform == "cpu" else compute


def pad_rows(array: Array, axis: int, size: int, fill: int = 0) -> Array:
    """Pads an axis to `size`; an axis of 1 that broadcasts is left alone."""
    if array.shape[axis] in (1, size):
        return array
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, size - array.shape[axis])
    return jnp.pad(array, widths, constant_values=fill)


def pad_distances(
    numbers: Array | None, sizes: tuple[int, int], padded: tuple[int, int]
) -> Array | None:
    """[1, N|1, T + S - 1] for queries and keys padded to other sizes."""
    if numbers is None:
        return None
    more = [after - before for before, after in zip(sizes, padded, strict=True)]
    return jnp.pad(numbers, ((0, 0), (0, 0), tuple(more)))


def join(plan: TilePlan, blocks: Array) -> Array:
    """[groups, query_blocks, Z, q, x] -> [B, N, rows, x]."""
    heads = plan.tiling.block_b * plan.axes.N
    shape = (plan.groups, plan.query_blocks, heads, plan.tiling.block_q, blocks.shape[-1])
    blocks = jnp.moveaxis(blocks.reshape(shape), 1, 2)  # [groups, Z, query_blocks, q, x]
    rows = plan.query_blocks * plan.tiling.block_q
    return blocks.reshape(plan.axes.B, plan.axes.N, rows, blocks.shape[-1])


def visited_blocks(
    plan: TilePlan, allowed: Allowed, active: Flag = None
) -> tuple[Array, Array] | None:
    """First and last + 1 key block to visit, [groups, query_blocks] each; None: visit all.

    Where `active` is False nothing is visited. To skip the loop around is not enough: with one
    group of examples its body depends on no index, and XLA moves it out of the loop and runs it.
    """
    if allowed.everything() and active is None:
        return None
    ranges = (allowed.start, allowed.end, allowed.segment_ids)
    bounds = block_bounds(*ranges, plan.query_blocks, plan.key_blocks, plan.tiling.block_k)

    def over_group(bound: Array, reduce: Callable) -> Array:
        """[B|1, N|1, query_blocks] -> [groups, query_blocks]."""
        groups = 1 if bound.shape[0] == 1 else plan.groups
        bound = reduce(bound.reshape(groups, -1, plan.query_blocks), axis=1)
        return jnp.broadcast_to(bound, (plan.groups, plan.query_blocks))

    low, high = over_group(bounds[0], jnp.min), over_group(bounds[1], jnp.max)
    return low, high if active is None else jnp.where(active, high, low)
