"""The gradient of a bias: d scores of the pairs that share each of its numbers, summed.

One program keeps a tile of the bias and visits, in a fixed order, every tile of scores that it was
added to: all examples and heads that share it, all queries or keys that do. So the sum is the same
in every run, and no d scores are stored. Of numbers per distance, a program keeps the tile that is
the sum of those of one distance, in blocks, and its diagonals are added up afterwards.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from regard.placement import kernel_result, vary_as
from regard.pool.kernels.block_shapes import Blocks, pick_parts
from regard.pool.kernels.tile import (
    NO_ENTRY,
    OF_TOKENS,
    AmongDistances,
    KernelPlan,
    d_normalized,
    d_weights,
    heads_second,
    recomputed_weights,
    share_of,
)
from regard.score.distances import sum_distances


class HeadOf:
    """One example and head of an array [B|1, N|K|1, ...], as kernels of one head read it; of
    [B, T, N|K, ...] where tokens come first.
    """

    def __init__(
        self, ref: Any, static: KernelPlan, example: Array, head: Array, tokens_first: bool
    ):
        examples, heads, *shape = heads_second(ref.shape, tokens_first)
        at = head if heads == static.N else lax.div(head, jnp.int32(static.group))
        first = (jnp.int32(0) if examples == 1 else example, jnp.int32(0) if heads == 1 else at)
        self.ref, self.first, self.shape, self.dtype = ref, first, tuple(shape), ref.dtype
        self.tokens_first, self.at = tokens_first, _Place(self)

    def __getitem__(self, index: Any) -> Array:
        return self.ref[self.whole(index)]

    def whole(self, index: Any) -> tuple[Any, ...]:
        index = index if isinstance(index, tuple) else (index,)
        return heads_second((*self.first, *index), self.tokens_first)


class _Place:
    def __init__(self, head: HeadOf):
        self.head = head

    def __getitem__(self, index: Any) -> Any:
        return self.head.ref.at[self.head.whole(index)]


Place = tuple[Array, ...]  # example, head, query block, key block


class Sums(NamedTuple):
    """Sums of tiles of d scores.

    Attributes:
        own: how many places there are along each axis, with a sum each.
        most: tiles of a sum.
        tiles, visited: how many those of a place are, and where each is.
        shape: of the result.
        write: stores the sum of a place, of one part of its tiles.
        before_cap: d scores before a soft cap.
        wanted: whether a tile, of these blocks of queries and keys, counts.
    """

    own: tuple[int, ...]
    most: int
    tiles: Callable[[Place], Array]
    visited: Callable[[Place, Array], Place]
    shape: tuple[int, ...]
    write: Callable[[Any, Array, Place, Array], None]
    before_cap: bool
    name: str
    wanted: Callable[[Array, Array], Array | bool] = lambda iq, ik: True


def bias_gradient(static: KernelPlan, arrays: dict[str, Array], shape: tuple[int, ...]) -> Array:
    """d bias, float32.

    Args:
        static, arrays: as in backward_wide.py, but bounds are [.., query blocks, 4].
        shape: of the bias, [B|1, N|1, T|1, S|1], padded.
    """
    blocks = static.blocks
    rows, columns = static.T // blocks.queries, static.S // blocks.keys
    whole = (static.B, static.N, rows, columns)
    own = tuple(1 if size == 1 else count for size, count in zip(shape, whole, strict=True))
    shared = tuple(count // one for count, one in zip(whole, own, strict=True))

    def visited(place: Place, index: Array) -> Place:
        at: list[Array] = []
        for mine, count in zip(reversed(place), reversed(shared), strict=True):
            at.append(mine if count == 1 else lax.rem(index, jnp.int32(count)))
            index = index if count == 1 else lax.div(index, jnp.int32(count))
        return tuple(reversed(at))

    def write(out: Any, part: Array, place: Place, total: Array) -> None:
        at_rows: Any = pl.ds(place[2] * blocks.queries, blocks.queries)
        at_keys: Any = pl.ds(place[3] * blocks.keys, blocks.keys)
        if shape[2] == 1:
            total, at_rows = total.sum(axis=0), jnp.int32(0)
        if shape[3] == 1:
            total, at_keys = total.sum(axis=-1), jnp.int32(0)
        plt.store(out.at[(part, *place[:2], at_rows, at_keys)], total)

    most = math.prod(shared)
    sums = Sums(
        own, most, lambda place: jnp.int32(most), visited, shape, write, False, "regard_d_bias"
    )
    return _run(static, arrays, sums)


def distance_gradient(
    static: KernelPlan,
    arrays: dict[str, Array],
    heads: int,
    lines: tuple[list[Array], Blocks] | None,
) -> Array:
    """d of the numbers per distance, [1, N|1, T + S - 1], float32.

    Args:
        static, arrays: as in `bias_gradient`; tiles are square.
        heads: N, or 1 for numbers that all heads share.
        lines: of backward_narrow.py, whose tiles on straight lines are summed there; None: here.
    """
    size = static.blocks.queries
    rows, columns = static.T // size, static.S // size
    last, shared = rows - 1, static.N // heads
    low, high = 0, rows + columns - 1  # distances, in blocks
    if lines is not None and static.bent is not None:
        before, after = static.bent
        around = lines[1].queries + lines[1].keys
        low = max(low, (before - around) // size + 1)
        high = min(high, -(-(after + around) // size) - 1)

    def query_blocks(place: Place) -> tuple[Array, Array]:
        """The first that has a key block at the distance of this place, and how many have one."""
        apart = place[3] + (low - last)
        first = jnp.maximum(0, -apart)
        return first, jnp.minimum(rows, columns - apart) - first

    def visited(place: Place, index: Array) -> Place:
        first, count = query_blocks(place)
        iq, index = first + lax.rem(index, count), lax.div(index, count)
        head = place[1] if shared == 1 else lax.rem(index, jnp.int32(shared))
        return lax.div(index, jnp.int32(shared)), head, iq, iq + place[3] + (low - last)

    def wanted(iq: Array, ik: Array) -> Array | bool:
        if lines is None:
            return True
        of_rows, of_keys = (
            pl.ds(lax.div(block, jnp.int32(whole // size)) * whole, whole)
            for block, whole in ((iq, lines[1].queries), (ik, lines[1].keys))
        )
        place = AmongDistances.of(static, of_rows, of_keys)
        return ~(place.before | place.after)

    def write(out: Any, part: Array, place: Place, total: Array) -> None:
        plt.store(out.at[part, place[1], place[3], :, :], total)

    each = static.B * shared
    sums = Sums(
        (1, heads, 1, high - low),
        each * min(rows, columns),
        lambda place: each * query_blocks(place)[1],
        visited,
        (heads, high - low, size, size),
        write,
        True,
        "regard_d_distances",
        wanted,
    )
    tiles = _run(static, arrays, sums)
    # Tile number d has the distances from d·size on, less T - 1; its last ones are the next's too.
    found = jnp.pad(sum_distances(tiles), ((0, 0), (0, 0), (0, 1)))
    found = found.reshape(heads, high - low, 2, size)
    here, beyond = (
        jnp.pad(found[:, :, half], ((0, 0), (half, 1 - half), (0, 0))) for half in range(2)
    )
    numbers = (here + beyond).reshape(heads, -1)
    numbers = jnp.pad(numbers, ((0, 0), (low * size, (rows + columns - 1 - high) * size)))
    if lines is not None:
        numbers = _with_lines(static, numbers, lines[0])
    return numbers[None, :, :-1]


def _with_lines(static: KernelPlan, numbers: Array, lines: list[Array]) -> Array:
    """Adds what is on straight lines, which two of the numbers stand for."""
    first, last = cast(Any, static.bent)
    per_head = [part.sum((0, 2)) for part in lines]  # [N]
    if numbers.shape[0] == 1:
        per_head = [part.sum(keepdims=True) for part in per_head]
    for start, number, slope in ((first - 1, *per_head[:2]), (last, *per_head[2:])):
        if 0 <= start < NO_ENTRY:
            numbers = numbers.at[:, start].add(number - slope)
            numbers = numbers.at[:, start + 1].add(slope)
    return numbers


def _run(static: KernelPlan, arrays: dict[str, Array], sums: Sums) -> Array:
    blocks, own = static.blocks, sums.own
    parts = pick_parts(math.prod(own), blocks.warps, sums.most)
    arrays = vary_as(arrays, arrays)
    names = list(arrays)

    def kernel(*refs: Any) -> None:
        out, given = refs[-1], dict(zip(names, refs, strict=False))
        tile, part = (f(pl.program_id(0), jnp.int32(parts)) for f in (lax.div, lax.rem))
        place = (
            pl.program_id(2),
            pl.program_id(1),
            lax.div(tile, jnp.int32(own[3])),
            lax.rem(tile, jnp.int32(own[3])),
        )

        def visit(index: Array, total: Array) -> Array:
            example, head, iq, ik = sums.visited(place, index)
            named = {
                name: HeadOf(ref, static, example, head, static.tokens_first and name in OF_TOKENS)
                if len(ref.shape) > 1
                else ref
                for name, ref in given.items()
            }
            low, high = (named["bounds"][iq, jnp.int32(i)] for i in (0, 3))

            def add(total: Array) -> Array:
                rows = pl.ds(iq * blocks.queries, blocks.queries)
                keys = pl.ds(ik * blocks.keys, blocks.keys)
                scores = static.score.tile(named, rows, keys, flipped=False)
                weights, factor, slope = recomputed_weights(
                    static, named, scores, rows, keys, flipped=False
                )
                values = plt.load(named["value"].at[keys, :])
                d_out = plt.load(named["d_out"].at[rows, :])
                _, d_kept = d_weights(
                    static, named, weights, values, d_out, rows, keys, flipped=False
                )
                slope = slope if sums.before_cap else None
                return total + d_normalized(named, factor, d_kept, slope, rows, flipped=False)

            visible = (low <= ik) & (ik < high)
            return lax.cond(visible & sums.wanted(iq, ik), add, lambda total: total, total)

        total = jnp.zeros((blocks.queries, blocks.keys), jnp.float32)
        first, last = share_of(part, parts, jnp.int32(0), sums.tiles(place))
        sums.write(out, part, place, lax.fori_loop(first, last, visit, total))

    result = (parts, *sums.shape)
    found = pl.pallas_call(
        kernel,
        grid=(own[2] * own[3] * parts, own[1], own[0]),
        in_specs=[_all_of(array.shape) for array in arrays.values()],
        out_specs=_all_of(result),
        out_shape=kernel_result(result, jnp.float32, arrays),
        compiler_params=plt.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=static.interpret,
        name=sums.name,
    )(*arrays.values())
    return found.sum(0)


def _all_of(shape: tuple[int, ...]) -> pl.BlockSpec:
    return pl.BlockSpec(shape, lambda *grid: (0,) * len(shape))
