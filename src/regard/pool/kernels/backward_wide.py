"""The backward pass up to the scores, for wide features and for tanh, by the Triton lowering.

Tiles are computed again, transposed: keys before queries, so that none of the three products of a
tile needs a transposed operand. One program takes a block of keys over the queries that may attend
to it, sums d value and d key_bias on the way, and writes d scores. feature_pass.py turns those into
d features by matrix products, tanh_backward.py into d x, d y and d w.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from regard.pool.kernels.tile import (
    KernelPlan,
    d_normalized,
    d_weights,
    dot,
    recomputed_weights,
    run_kernel,
    share_of,
)


class Cotangents(NamedTuple):
    """Of one stripe of queries.

    Attributes:
        scores: [B, N, S, T], before a soft cap, in natural units, in the dtype of products.
        value: [B, N, S, V] float32, per query head.
        key_bias: [B, N, S] float32, in natural units.
    """

    scores: Array
    value: Array
    key_bias: Array


def d_scores(
    static: KernelPlan, arrays: dict[str, Array], dtype: jnp.dtype, parts: int = 1
) -> Cotangents:
    """d scores of every pair of a stripe.

    Args:
        static, arrays: as in forward.py, and d_out [B, N, T, V], lse and delta [B, N, T] float32;
            bounds here are [.., key blocks, 2]: the query blocks that visit a key block.
        dtype: of d scores.
        parts: split factor: how many programs share the queries of a block of keys, so that small
            problems fill the GPU; their sums are added.
    """
    blocks, query_blocks = static.blocks, static.T // static.blocks.queries

    def kernel(named: dict[str, Any], scores_ref: Any, value_ref: Any, bias_ref: Any) -> None:
        block = lax.div(pl.program_id(0), jnp.int32(parts))
        part = lax.rem(pl.program_id(0), jnp.int32(parts))
        keys = pl.ds(block * blocks.keys, blocks.keys)
        values = plt.load(named["value"].at[keys, :])

        def visit(iq: Array, carry: Any) -> Any:
            d_value, d_bias = carry
            rows = pl.ds(iq * blocks.queries, blocks.queries)
            scores = static.score.tile(named, rows, keys, flipped=True)
            weights, factor, slope = recomputed_weights(
                static, named, scores, rows, keys, flipped=True
            )
            d_out = plt.load(named["d_out"].at[rows, :])
            kept, d_kept = d_weights(
                static, named, weights, values, d_out, rows, keys, flipped=True
            )
            d_value = d_value + dot(kept.astype(d_out.dtype), d_out, (1, 0), static.precision)
            d_tile = d_normalized(named, factor, d_kept, slope, rows, flipped=True)
            plt.store(scores_ref.at[keys, rows], d_tile.astype(scores_ref.dtype))
            return d_value, d_bias + d_tile.sum(axis=1)

        def write_zeros(iq: Array, carry: None) -> None:
            zeros = jnp.zeros((blocks.keys, blocks.queries), scores_ref.dtype)
            plt.store(scores_ref.at[keys, pl.ds(iq * blocks.queries, blocks.queries)], zeros)

        low, high = (named["bounds"][block, i] for i in range(2))
        carry = (
            jnp.zeros((blocks.keys, static.V), jnp.float32),
            jnp.zeros((blocks.keys,), jnp.float32),
        )
        lax.fori_loop(jnp.where(part == 0, 0, low), low, write_zeros, None)
        d_value, d_bias = lax.fori_loop(*share_of(part, parts, low, high), visit, carry)
        lax.fori_loop(high, jnp.where(part == parts - 1, query_blocks, high), write_zeros, None)
        plt.store(value_ref.at[part, keys, :], d_value * static.kept_scale)
        plt.store(bias_ref.at[part, keys], d_bias)

    float32 = jnp.dtype(jnp.float32)
    results = [
        ((static.S, static.T), dtype),
        ((parts, static.S, static.V), float32),
        ((parts, static.S), float32),
    ]
    programs = static.S // blocks.keys * parts
    found = run_kernel(static, kernel, arrays, programs, results, "regard_d_scores")
    return Cotangents(found[0], found[1].sum(2), found[2].sum(2))
