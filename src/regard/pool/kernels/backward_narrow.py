"""The backward pass for narrow features, by the Triton lowering: d scores never leave a tile.

Two kernels compute every tile again, as in FlashAttention-2: one keeps a block of keys and loops
over the queries that may attend to it, one keeps a block of queries and loops over keys. For wide
features, where computing a tile is most of the work, d scores in memory and cuBLAS
(backward_wide.py) are faster.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from regard.pool.kernels.block_shapes import Blocks
from regard.pool.kernels.forward import visit_all, visits
from regard.pool.kernels.padding import KernelMask
from regard.pool.kernels.tile import (
    LOG2_E,
    AmongDistances,
    FeatureScore,
    KernelPlan,
    d_normalized,
    d_weights,
    dot,
    recomputed_weights,
    run_kernel,
)
from regard.pool.tile import query_visits


class Cotangents(NamedTuple):
    """With `tokens_first`, queries or keys before heads, as in the arrays.

    Attributes:
        phi: [B, N, T, R].
        psi, value: per query head, [B, N, S, R] and [B, N, S, V].
        query_bias, key_bias: [B, N, T] and, per query head, [B, N, S], float32; None: none.
        lines: of numbers per distance on straight lines, `AmongDistances.line_sums`, [B, N, T]
            each, and the blocks of their tiles; None: none.
    """

    phi: Array
    psi: Array
    value: Array
    query_bias: Array | None
    key_bias: Array | None
    lines: tuple[list[Array], Blocks] | None = None


def backward_narrow(
    static: KernelPlan,
    arrays: dict[str, Array],
    mask: KernelMask,
    blocks: tuple[Blocks, Blocks],
    dtype: Any,
) -> Cotangents:
    """Cotangents of features, values and biases.

    Args:
        static: sizes, and how scores are made.
        arrays: as in forward.py, without bounds, and d_out [B, N, T, V], lse and delta [B, N, T]
            float32.
        blocks: of d keys, and of d queries.
        dtype: of d phi, and of d psi where it is not summed over query heads; d value's is
            that of the values.
    """
    of_keys, of_queries = (replace(static, blocks=one) for one in blocks)
    T, S = static.T, static.S
    bounds = query_visits(mask.bounds(of_keys.tile, T, S), S // blocks[0].keys)
    d_psi, d_value, *d_bias = _d_keys(of_keys, arrays | {"bounds": bounds}, dtype)
    arrays = arrays | {"bounds": mask.bounds(of_queries.tile, T, S)}
    d_phi, d_query_bias, lines = _d_queries(of_queries, arrays, dtype)
    return Cotangents(
        d_phi,
        d_psi,
        d_value,
        d_query_bias[0] if d_query_bias else None,
        d_bias[0] if d_bias else None,
        (lines, of_queries.blocks) if lines else None,
    )


def _d_keys(static: KernelPlan, arrays: dict[str, Array], dtype: Any) -> list[Array]:
    """d psi, d value and, where there is one, d key bias: a program keeps a block of keys."""
    score, blocks = _score(static), static.blocks
    biased = "key_bias" in arrays

    def kernel(named: dict[str, Any], *outs: Any) -> None:
        block = pl.program_id(0)
        keys = pl.ds(block * blocks.keys, blocks.keys)
        psi, values = (plt.load(named[name].at[keys, :]) for name in ("key", "value"))

        def visit(iq: Array, carry: list[Array], masked: bool) -> list[Array]:
            rows = pl.ds(iq * blocks.queries, blocks.queries)
            phi, d_out = (plt.load(named[name].at[rows, :]) for name in ("query", "d_out"))
            scores = score.of(psi, phi)
            weights, factor, slope = recomputed_weights(
                static, named, scores, rows, keys, flipped=True, masked=masked
            )
            kept, d_kept = d_weights(
                static, named, weights, values, d_out, rows, keys, flipped=True
            )
            d_value = dot(kept.astype(d_out.dtype), d_out, (1, 0), static.precision)
            d_scores = d_normalized(named, factor, d_kept, slope, rows, flipped=True)
            d_psi = dot(d_scores.astype(phi.dtype), phi, (1, 0), score.precision)
            more = [d_psi, d_value]
            more += [d_scores.sum(axis=1)] if biased else []
            return [sum_ + one for sum_, one in zip(carry, more, strict=True)]

        carry = [jnp.zeros((blocks.keys, width), jnp.float32) for width in (score.width, static.V)]
        carry += [jnp.zeros((blocks.keys,), jnp.float32)] if biased else []
        d_psi, d_value, *d_bias = visit_all(named, visits(named, block), visit, carry)
        plt.store(outs[0].at[keys, :], (d_psi * (score.scale / LOG2_E)).astype(outs[0].dtype))
        d_value = d_value if static.kept_scale == 1.0 else d_value * static.kept_scale
        plt.store(outs[1].at[keys, :], d_value.astype(outs[1].dtype))
        if biased:
            plt.store(outs[2].at[keys], d_bias[0])

    dtypes = (dtype, arrays["value"].dtype)
    if static.group > 1:  # heads are summed before they are rounded
        dtypes = (jnp.float32, jnp.float32)
    widths = (score.width, static.V)
    found: list[tuple[tuple[int, ...], Any]]
    found = [((static.S, width), one) for width, one in zip(widths, dtypes, strict=True)]
    found += [((static.S,), jnp.float32)] if biased else []
    return run_kernel(static, kernel, arrays, static.S // blocks.keys, found, "regard_d_keys")


def _d_queries(
    static: KernelPlan, arrays: dict[str, Array], dtype: Any
) -> tuple[Array, list[Array], list[Array]]:
    """d phi, where there is one, d query bias, and the sums of lines: a program keeps a block of
    queries.
    """
    score, blocks = _score(static), static.blocks
    biased = "query_bias" in arrays
    lines = "distance_bias" in arrays and static.bent is not None
    vectors = biased + 4 * lines
    programs = static.T // blocks.queries

    def kernel(named: dict[str, Any], *outs: Any) -> None:
        block = programs - 1 - pl.program_id(0)  # under a causal mask the last have the most to do
        rows = pl.ds(block * blocks.queries, blocks.queries)
        phi, d_out = (plt.load(named[name].at[rows, :]) for name in ("query", "d_out"))

        def visit(ik: Array, carry: list[Array], masked: bool) -> list[Array]:
            keys = pl.ds(ik * blocks.keys, blocks.keys)
            psi, values = (plt.load(named[name].at[keys, :]) for name in ("key", "value"))
            scores = score.of(phi, psi)
            weights, factor, slope = recomputed_weights(
                static, named, scores, rows, keys, flipped=False, masked=masked
            )
            _, d_kept = d_weights(static, named, weights, values, d_out, rows, keys, flipped=False)
            d_scores = d_normalized(named, factor, d_kept, slope, rows, flipped=False)
            more = [dot(d_scores.astype(psi.dtype), psi, (1, 0), score.precision)]
            more += [d_scores.sum(axis=1)] if biased else []
            more += AmongDistances.of(static, rows, keys).line_sums(d_scores) if lines else []
            return [sum_ + one for sum_, one in zip(carry, more, strict=True)]

        carry = [jnp.zeros((blocks.queries, score.width), jnp.float32)]
        carry += [jnp.zeros((blocks.queries,), jnp.float32)] * vectors
        d_phi, *per_query = visit_all(named, visits(named, block), visit, carry)
        plt.store(outs[0].at[rows, :], (d_phi * (score.scale / LOG2_E)).astype(outs[0].dtype))
        for out, sums in zip(outs[1:], per_query, strict=True):
            plt.store(out.at[rows], sums)

    shapes: list[tuple[tuple[int, ...], Any]] = [((static.T, score.width), dtype)]
    shapes += [((static.T,), jnp.float32)] * vectors
    d_phi, *found = run_kernel(static, kernel, arrays, programs, shapes, "regard_d_queries")
    return d_phi, found[:biased], found[biased:]


def _score(static: KernelPlan) -> FeatureScore:
    assert isinstance(static.score, FeatureScore)
    return static.score
