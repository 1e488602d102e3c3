"""The backward pass as far as the scores, in Pallas's Triton lowering.

Tiles are made again, flipped: keys before queries, so that of the three products of a tile none
needs an operand turned. One program takes a block of keys over the queries that may look at it,
sums d value and d key_bias as it goes, and writes d scores; what becomes of those is the score's
affair (products.py for features, tanh_kernel for tanh).
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from regard.pool.wide_kernel.d_tile import d_softmax, d_weights, weights_again
from regard.pool.wide_kernel.tile import TilePass, dot, read_spec, share_of, write_spec
from regard.varying import result, vary_as


class Cotangents(NamedTuple):
    """Of one stripe of queries.

    Attributes:
        scores: [B, N, S, T], in natural units, in the dtype of products.
        value: [B, N, S, V] float32, per query head.
        key_bias: [B, N, S] float32, in natural units.
    """

    scores: Array
    value: Array
    key_bias: Array


def d_scores(
    static: TilePass, arrays: dict[str, Array], dtype: jnp.dtype, parts: int = 1
) -> Cotangents:
    """d scores of every pair of a stripe.

    Args:
        static, arrays: as in forward.py, and d_out [B, N, T, V], lse and delta [B, N, T] float32;
            bounds here are [.., key blocks, 2]: the query blocks that may look at a key block.
        dtype: of d scores.
        parts: programs that share the queries of a block of keys, so that there are enough of them;
            what they sum is added.
    """
    arrays = vary_as(arrays, arrays)
    names, blocks = list(arrays), static.blocks
    query_blocks = static.T // blocks.queries

    def kernel(*refs: Any) -> None:
        named = dict(zip(names, refs, strict=False))
        scores_ref, value_ref, bias_ref = refs[len(names) :]
        block = lax.div(pl.program_id(0), jnp.int32(parts))
        part = lax.rem(pl.program_id(0), jnp.int32(parts))
        keys = pl.ds(block * blocks.keys, blocks.keys)
        values = plt.load(named["value"].at[keys, :])

        def visit(iq: Array, carry: Any) -> Any:
            d_value, d_bias = carry
            rows = pl.ds(iq * blocks.queries, blocks.queries)
            scores = static.score.tile(named, rows, keys, flipped=True)
            weights = weights_again(named, scores, rows, keys, flipped=True)
            d_out = plt.load(named["d_out"].at[rows, :])
            kept, d_kept = d_weights(
                static, named, weights, values, d_out, rows, keys, flipped=True
            )
            d_value = d_value + dot(kept.astype(d_out.dtype), d_out, (1, 0), static.precision)
            d_tile = d_softmax(named, weights, d_kept, rows, flipped=True)
            plt.store(scores_ref.at[keys, rows], d_tile.astype(scores_ref.dtype))
            return d_value, d_bias + d_tile.sum(axis=1)

        def leave_out(iq: Array, carry: None) -> None:
            nothing = jnp.zeros((blocks.keys, blocks.queries), scores_ref.dtype)
            plt.store(scores_ref.at[keys, pl.ds(iq * blocks.queries, blocks.queries)], nothing)

        low, high = (named["bounds"][block, i] for i in range(2))
        carry = (
            jnp.zeros((blocks.keys, static.V), jnp.float32),
            jnp.zeros((blocks.keys,), jnp.float32),
        )
        lax.fori_loop(jnp.where(part == 0, 0, low), low, leave_out, None)
        d_value, d_bias = lax.fori_loop(*share_of(part, parts, low, high), visit, carry)
        lax.fori_loop(high, jnp.where(part == parts - 1, query_blocks, high), leave_out, None)
        plt.store(value_ref.at[part, keys, :], d_value)
        plt.store(bias_ref.at[part, keys], d_bias)

    lead = (static.B, static.N)
    scores, value, key_bias = pl.pallas_call(
        kernel,
        grid=(static.S // blocks.keys * parts, static.N, static.B),
        in_specs=[read_spec(array, static) for array in arrays.values()],
        out_specs=[
            write_spec(static.S, static.T),
            write_spec(parts, static.S, static.V),
            write_spec(parts, static.S),
        ],
        out_shape=[
            result((*lead, static.S, static.T), dtype, arrays),
            result((*lead, parts, static.S, static.V), jnp.float32, arrays),
            result((*lead, parts, static.S), jnp.float32, arrays),
        ],
        compiler_params=plt.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=static.interpret,
        name="regard_d_scores",
    )(*arrays.values())
    return Cotangents(scores, value.sum(2), key_bias.sum(2))
