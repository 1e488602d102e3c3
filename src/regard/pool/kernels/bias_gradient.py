"""The gradient of a bias: d scores of the pairs that share each of its numbers, summed.

One program keeps a tile of the bias and visits, in a fixed order, every tile of scores that it was
added to: all examples and heads that share it, all queries or keys that do. So the sum is the same
in every run, and no d scores are stored.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from regard.placement import kernel_result, vary_as
from regard.pool.kernels.block_shapes import pick_parts
from regard.pool.kernels.tile import (
    KernelPlan,
    d_normalized,
    d_weights,
    finish_scores,
    recomputed_weights,
    share_of,
)


class HeadOf:
    """One example and head of an array [B|1, N|K|1, ...], as kernels of one head read it."""

    def __init__(self, ref: Any, static: KernelPlan, example: Array, head: Array):
        examples, heads, *shape = ref.shape
        at = head if heads == static.N else lax.div(head, jnp.int32(static.group))
        first = (jnp.int32(0) if examples == 1 else example, jnp.int32(0) if heads == 1 else at)
        self.ref, self.first, self.shape, self.dtype = ref, first, tuple(shape), ref.dtype
        self.at = _Place(self)

    def __getitem__(self, index: Any) -> Array:
        return self.ref[self.whole(index)]

    def whole(self, index: Any) -> tuple[Any, ...]:
        return (*self.first, *(index if isinstance(index, tuple) else (index,)))


class _Place:
    def __init__(self, head: HeadOf):
        self.head = head

    def __getitem__(self, index: Any) -> Any:
        return self.head.ref.at[self.head.whole(index)]


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
    visits = math.prod(shared)
    parts = pick_parts(math.prod(own), blocks.warps, visits)
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
            at = []
            for mine, count in zip(reversed(place), reversed(shared), strict=True):
                at.append(mine if count == 1 else lax.rem(index, jnp.int32(count)))
                index = index if count == 1 else lax.div(index, jnp.int32(count))
            ik, iq, head, example = at
            named = {
                name: HeadOf(ref, static, example, head) if len(ref.shape) > 1 else ref
                for name, ref in given.items()
            }
            low, high = (named["bounds"][iq, jnp.int32(i)] for i in (0, 3))

            def add(total: Array) -> Array:
                rows = pl.ds(iq * blocks.queries, blocks.queries)
                keys = pl.ds(ik * blocks.keys, blocks.keys)
                scores = static.score.tile(named, rows, keys, flipped=False)
                scores, _ = finish_scores(static, named, scores, rows, keys, flipped=False)
                weights, factor = recomputed_weights(
                    static, named, scores, rows, keys, flipped=False
                )
                values = plt.load(named["value"].at[keys, :])
                d_out = plt.load(named["d_out"].at[rows, :])
                _, d_kept = d_weights(
                    static, named, weights, values, d_out, rows, keys, flipped=False
                )
                return total + d_normalized(named, factor, d_kept, None, rows, flipped=False)

            return lax.cond((low <= ik) & (ik < high), add, lambda total: total, total)

        total = jnp.zeros((blocks.queries, blocks.keys), jnp.float32)
        total = lax.fori_loop(*share_of(part, parts, jnp.int32(0), jnp.int32(visits)), visit, total)
        at_rows: Any = pl.ds(place[2] * blocks.queries, blocks.queries)
        at_keys: Any = pl.ds(place[3] * blocks.keys, blocks.keys)
        if shape[2] == 1:
            total, at_rows = total.sum(axis=0), jnp.int32(0)
        if shape[3] == 1:
            total, at_keys = total.sum(axis=-1), jnp.int32(0)
        plt.store(out.at[(part, *place[:2], at_rows, at_keys)], total)

    result = (parts, *shape)
    found = pl.pallas_call(
        kernel,
        grid=(own[2] * own[3] * parts, own[1], own[0]),
        in_specs=[_all_of(array.shape) for array in arrays.values()],
        out_specs=_all_of(result),
        out_shape=kernel_result(result, jnp.float32, arrays),
        compiler_params=plt.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=static.interpret,
        name="regard_d_bias",
    )(*arrays.values())
    return found.sum(0)


def _all_of(shape: tuple[int, ...]) -> pl.BlockSpec:
    return pl.BlockSpec(shape, lambda *grid: (0,) * len(shape))
