"""The kernel of the tanh backward pass: sums over one side's tokens, for every token of the other.

A thread keeps a few tokens of one side and loops over the other, so that sums stay in its
registers: no atomics, no exchange between threads, the same bits every time. Two tokens of that
loop share a reciprocal: r_1 = b / ab, r_2 = a / ab. Per element and unit that is 4.5 products and
sums (5.5 with the second sum), 1/2 reciprocal, and 0.7 for loads, addresses and conversions: 5.7
and 6.7 clocks of a scheduler, where a reciprocal each would take 8. At B=8, T=S=4096, h=64 a clock
is 0.26 ms of an H200: 3.2 ms for both sides at best. g is read once per 4 hidden units, 10 bytes
per clock and multiprocessor in bfloat16, two fifths of what the L2 cache delivers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Float, Int

from regard.placement import kernel_result, vary_as
from regard.pool.kernels.tanh_operands import TWO_LOG2_E
from regard.pool.kernels.tanh_tile import Float32
from regard.pool.kernels.tile import share_of

PAIR = 60.0  # powers of two: a product of two terms below 2^60 stays a normal number


@dataclass(frozen=True)
class SumBlocks:
    """Block shapes; every number a power of two.

    Attributes:
        kept: tokens that a program keeps.
        streamed: tokens of the other side per step of its loop, at least 2.
        units: hidden units per program.
        warps: of Triton's compiler.
    """

    kept: int = 128
    streamed: int = 4
    units: int = 4
    warps: int = 1


def tanh_sums(
    g: Float[Array, "E streamed kept"],
    streamed: Float[Array, "E steps h step"],
    kept: Float[Array, "E blocks h block"],
    bounds: Int[Array, "E blocks 2"],
    in_reach: Int[Array, "E 1"],
    *,
    value: bool,
    blocks: SumBlocks,
    parts: int = 1,
    interpret: bool,
) -> list[Float[Array, "E blocks h block"]]:
    """[sum g r (1 - r)] over the streamed tokens, and with `value` [.., sum g r].

    Args:
        g: d scores, in whole blocks.
        streamed, kept: e^2x and e^2y, either way round, blocked; x and y where in_reach is 0.
        bounds: first and last + 1 step of each kept block's loop.
        parts: split factor: how many programs share a loop; their sums are added.
    """
    E, count, hidden, _ = kept.shape
    units, unit = blocks.units, Float32(interpret)

    def kernel(*refs: Any) -> None:
        g_ref, walked_ref, kept_ref, bounds_ref, reach_ref, *sum_refs = refs
        first, block = pl.program_id(0) * units, lax.div(pl.program_id(1), jnp.int32(parts))
        part = lax.rem(pl.program_id(1), jnp.int32(parts))
        tokens = pl.ds(block * blocks.kept, blocks.kept)

        def step(i: Array, sums: Sequence[Array], term: Callable) -> tuple[Array, ...]:
            slopes, values = list(sums[:units]), list(sums[units:])
            steps = range(blocks.streamed)
            weights = [plt.load(g_ref.at[i * blocks.streamed + j, tokens]) for j in steps]
            weights = [weight.astype(jnp.float32) for weight in weights]
            for k in range(units):
                mine = plt.load(kept_ref.at[block, first + k, :])
                terms = [term(walked_ref[i, first + k, j], mine) for j in steps]
                for weight, r in zip(weights, _inverses(unit, terms), strict=True):
                    slopes[k] = unit.fma(weight, unit.take(r, r, r), slopes[k])
                    if value:
                        values[k] = unit.fma(weight, r, values[k])
            return (*slopes, *values)

        def sums(term: Callable) -> tuple[Array, ...]:
            zeros = (jnp.zeros((blocks.kept,), jnp.float32),) * (units * len(sum_refs))
            low, high = share_of(part, parts, *(bounds_ref[block, i] for i in range(2)))
            return lax.fori_loop(low, high, lambda i, sums: step(i, sums, term), zeros)

        def by_product(theirs: Array, mine: Array) -> Array:
            return unit.fma(theirs, mine, 1.0)

        def by_sum(theirs: Array, mine: Array) -> Array:
            return 1.0 + unit.exp2(jnp.minimum((theirs + mine) * TWO_LOG2_E, PAIR - 1.0))

        near = reach_ref[0] > 0
        found = lax.cond(near, lambda: sums(by_product), lambda: sums(by_sum))
        for k, one in enumerate(found):
            sum_refs[k // units][part, block, first + k % units, :] = one

    def whole(array: Any) -> pl.BlockSpec:
        zeros = (0,) * (array.ndim - 1)
        return pl.BlockSpec((None, *array.shape[1:]), lambda unit, block, e: (e, *zeros))

    arrays = (g, streamed, kept, bounds, in_reach)
    arrays = vary_as(arrays, arrays)
    out = kernel_result((E, parts, *kept.shape[1:]), jnp.float32, arrays)
    sums = pl.pallas_call(
        kernel,
        grid=(hidden // units, count * parts, E),  # programs that share g are neighbors
        in_specs=[whole(array) for array in arrays],
        out_specs=[whole(out)] * (1 + value),
        out_shape=[out] * (1 + value),
        compiler_params=plt.CompilerParams(num_warps=blocks.warps, num_stages=1),
        interpret=interpret,
        name="regard_tanh_sums",
    )(*arrays)
    return [one.sum(1) for one in sums]


def _inverses(unit: Float32, terms: Sequence[Array]) -> list[Array]:
    """1 / t of every term, a reciprocal for two."""
    inverses = []
    for a, b in zip(terms[::2], terms[1::2], strict=True):
        both = unit.reciprocal(a * b)
        inverses += [b * both, a * both]
    return inverses
