"""The backward pass for narrow features, in Pallas's Triton lowering: d scores never leave a tile.

Two kernels make every tile again: one keeps a block of keys and walks over the queries that may
look at it, one keeps a block of queries and walks over keys. d scores in memory and cuBLAS
(d_scores.py) are better where features are wide: there, making a tile is most of the work.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from regard.pool.wide_kernel.blocks import Blocks
from regard.pool.wide_kernel.bounds import Ranges, query_visits
from regard.pool.wide_kernel.d_tile import d_softmax, d_weights, weights_again
from regard.pool.wide_kernel.tile import (
    LOG2_E,
    FeatureScore,
    TilePass,
    dot,
    heads_second,
    read_spec,
    write_spec,
)
from regard.varying import result, vary_as

# Arrays with an axis of tokens and one of heads, which may come in either order.
OF_TOKENS = ("query", "key", "value", "d_out")


def narrow_back(
    static: TilePass,
    arrays: dict[str, Array],
    ranges: Ranges,
    blocks: tuple[Blocks, Blocks],
    dtype: Any,
) -> tuple[Array, Array, Array, Array | None]:
    """Cotangents of features, values and key bias.

    Args:
        static: sizes, and how scores are made.
        arrays: as in forward.py, without bounds, and d_out [B, N, T, V], lse and delta [B, N, T]
            float32.
        ranges: of the mask.
        blocks: of d keys, and of d queries.
        dtype: of d phi, and of d psi where it is not summed over query heads; d value's is likewise
            that of the values.

    Returns:
        d phi [B, N, T, R]; and per query head d psi [B, N, S, R], d value [B, N, S, V] and d
        key_bias [B, N, S] float32 or None. With `tokens_first`, queries or keys before heads, as
        in the arrays.
    """
    of_keys, of_queries = (replace(static, blocks=one) for one in blocks)
    bounds = query_visits(of_keys.visits(ranges), static.S // blocks[0].keys)
    d_psi, d_value, *d_bias = _d_keys(of_keys, arrays | {"bounds": bounds}, dtype)
    d_phi = _d_queries(of_queries, arrays | {"bounds": of_queries.visits(ranges)}, dtype)
    return d_phi, d_psi, d_value, d_bias[0] if d_bias else None


def _d_keys(static: TilePass, arrays: dict[str, Array], dtype: Any) -> list[Array]:
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
            weights = weights_again(named, scores, rows, keys, flipped=True, masked=masked)
            kept, d_kept = d_weights(
                static, named, weights, values, d_out, rows, keys, flipped=True
            )
            d_value = dot(kept.astype(d_out.dtype), d_out, (1, 0), static.precision)
            d_scores = d_softmax(named, weights, d_kept, rows, flipped=True)
            d_psi = dot(d_scores.astype(phi.dtype), phi, (1, 0), score.precision)
            more = [d_psi, d_value]
            more += [d_scores.sum(axis=1)] if biased else []
            return [sum_ + one for sum_, one in zip(carry, more, strict=True)]

        carry = [jnp.zeros((blocks.keys, width), jnp.float32) for width in (score.width, static.V)]
        carry += [jnp.zeros((blocks.keys,), jnp.float32)] if biased else []
        d_psi, d_value, *d_bias = _walk(named, block, visit, carry)
        plt.store(outs[0].at[keys, :], (d_psi * (score.scale / LOG2_E)).astype(outs[0].dtype))
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
    return _call(static, kernel, arrays, static.S // blocks.keys, found, "regard_d_keys")


def _d_queries(static: TilePass, arrays: dict[str, Array], dtype: Any) -> Array:
    """d phi: a program keeps a block of queries."""
    score, blocks = _score(static), static.blocks
    programs = static.T // blocks.queries

    def kernel(named: dict[str, Any], out: Any) -> None:
        block = programs - 1 - pl.program_id(0)  # under a causal mask the last have the most to do
        rows = pl.ds(block * blocks.queries, blocks.queries)
        phi, d_out = (plt.load(named[name].at[rows, :]) for name in ("query", "d_out"))

        def visit(ik: Array, d_phi: Array, masked: bool) -> Array:
            keys = pl.ds(ik * blocks.keys, blocks.keys)
            psi, values = (plt.load(named[name].at[keys, :]) for name in ("key", "value"))
            scores = score.of(phi, psi)
            weights = weights_again(named, scores, rows, keys, flipped=False, masked=masked)
            _, d_kept = d_weights(static, named, weights, values, d_out, rows, keys, flipped=False)
            d_scores = d_softmax(named, weights, d_kept, rows, flipped=False)
            return d_phi + dot(d_scores.astype(psi.dtype), psi, (1, 0), score.precision)

        d_phi = jnp.zeros((blocks.queries, score.width), jnp.float32)
        d_phi = _walk(named, block, visit, d_phi)
        plt.store(out.at[rows, :], (d_phi * (score.scale / LOG2_E)).astype(out.dtype))

    [d_phi] = _call(
        static, kernel, arrays, programs, [((static.T, score.width), dtype)], "regard_d_queries"
    )
    return d_phi


def _walk(named: dict[str, Any], block: Array, visit: Callable, carry: Any) -> Any:
    """Visits what bounds say, without a mask where every pair takes part."""
    low, full_low, full_high, high = (named["bounds"][block, i] for i in range(4))

    def loop(first: Array, last: Array, carry: Any, masked: bool) -> Any:
        return lax.fori_loop(first, last, lambda i, c: visit(i, c, masked), carry)

    in_pieces = any(name in ("seen", "table") or "ids" in name for name in named)
    if in_pieces:  # no tile is known to be whole
        return loop(low, high, carry, True)
    if "start" not in named and "end" not in named:
        return loop(low, high, carry, False)
    carry = loop(low, full_low, carry, True)
    carry = loop(full_low, full_high, carry, False)
    return loop(full_high, high, carry, True)


def _call(
    static: TilePass,
    kernel: Callable,
    arrays: dict[str, Array],
    programs: int,
    found: list[tuple[tuple[int, ...], Any]],
    name: str,
) -> list[Array]:
    """Runs a kernel for every head; results are [B, N, *shape], or tokens first."""
    arrays = vary_as(arrays, arrays)
    names = list(arrays)

    def by_name(*refs: Any) -> None:
        kernel(dict(zip(names, refs, strict=False)), *refs[len(names) :])

    def swapped(shape: tuple[int, ...]) -> bool:
        return static.tokens_first and len(shape) == 2

    def whole(shape: tuple[int, ...]) -> tuple[int, ...]:
        return heads_second((static.B, static.N, *shape), swapped(shape))

    return pl.pallas_call(
        by_name,
        grid=(programs, static.N, static.B),
        in_specs=[
            read_spec(array, static, static.tokens_first and name in OF_TOKENS)
            for name, array in arrays.items()
        ],
        out_specs=[write_spec(*shape, tokens_first=swapped(shape)) for shape, _ in found],
        out_shape=[result(whole(shape), dtype, arrays) for shape, dtype in found],
        compiler_params=plt.CompilerParams(
            num_warps=static.blocks.warps, num_stages=static.blocks.stages
        ),
        interpret=static.interpret,
        name=name,
    )(*arrays.values())


def _score(static: TilePass) -> FeatureScore:
    assert isinstance(static.score, FeatureScore)
    return static.score
