"""Other weight regimes than softmax inside kernels: a regime's own pieces, tile by tile.

A regime is defined in pieces that see one tile of keys at a time (normalize/contract.py), in
operations that lower to a kernel as well as to XLA. The forward pass is here, and the sum that some
regimes' backward pass needs first; backward_narrow.py and backward_wide.py do the rest by
`recompute` and `slope`. Softmax has a form of its own (forward.py), in powers of two.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from regard.normalize.contract import Normalizer
from regard.pool.kernels.tile import (
    KernelPlan,
    d_weights,
    dot,
    keep_tile,
    run_kernel,
    visible_scores,
)


def regime_forward(
    static: KernelPlan, arrays: dict[str, Array], regime: Normalizer
) -> tuple[Array, tuple[Array, ...]]:
    """Pooling by the regime's pieces.

    Args:
        static, arrays: as in `forward`.

    Returns:
        Output [B, N, T, V] in the value's dtype, and the regime's stats, each [B, N, T].
    """
    blocks, value = static.blocks, arrays["value"]
    kinds = _stats(regime, blocks.queries)

    def kernel(named: dict[str, Any], out_ref: Any, *stat_refs: Any) -> None:
        block = pl.program_id(0)
        rows = pl.ds(block * blocks.queries, blocks.queries)
        sweep = _sweeper(static, named, block)

        def over_tiles(step: Callable, carry: Any) -> Any:
            return sweep(lambda *of_tile: step(*of_tile[:3], of_tile[3].start), carry)

        shape = (blocks.queries,)
        known = regime.prepare(over_tiles, shape, jnp.dtype(jnp.float32))

        def pool(carry: Any, scores: Array, allowed: Array | None, keys: Any) -> Any:
            out, state = carry
            state, weights, rescale = regime.absorb(state, known, scores, allowed, keys.start)
            out = out if rescale is None else out * rescale[:, None]
            keep = keep_tile(static, named, rows, keys, flipped=False)
            weights = weights if keep is None else jnp.where(keep, weights, 0.0)
            values = plt.load(named["value"].at[keys, :])
            return out + dot(weights.astype(values.dtype), values, (1, 0), static.precision), state

        zero = jnp.zeros((blocks.queries, static.V), jnp.float32)
        out, state = sweep(pool, (zero, regime.start(shape, jnp.dtype(jnp.float32))))
        scale, stats = regime.finish(state, known)
        out = out if scale is None else out * scale[:, None]
        plt.store(out_ref.at[rows, :], (out * static.kept_scale).astype(out_ref.dtype))
        for ref, stat in zip(stat_refs, jax.tree.leaves(stats), strict=True):
            plt.store(ref.at[rows], stat)

    results: list[tuple[tuple[int, ...], Any]] = [((static.T, static.V), value.dtype)]
    results += [((static.T,), kind.dtype) for kind in kinds]
    programs = static.T // blocks.queries
    out, *stats = run_kernel(static, kernel, arrays, programs, results, "regard_regime")
    return out, tuple(stats)


def regime_delta(static: KernelPlan, arrays: dict[str, Array], regime: Normalizer) -> Array:
    """Per query, the sum over keys of balance · d weights, [B, N, T] float32.

    Args:
        static, arrays: as in `forward`, and d_out and stats as in backward_wide.py.
    """
    blocks = static.blocks

    def kernel(named: dict[str, Any], delta_ref: Any) -> None:
        block = pl.program_id(0)
        rows = pl.ds(block * blocks.queries, blocks.queries)
        d_out = plt.load(named["d_out"].at[rows, :])
        stats = tuple(plt.load(named[name].at[rows])[:, None] for name in stat_names(named))

        def add(total: Array, scores: Array, allowed: Array | None, keys: Any) -> Array:
            index = (keys.start + jnp.arange(keys.size, dtype=jnp.int32))[None, :]
            balance = regime.balance(stats, scores, allowed, index)
            values = plt.load(named["value"].at[keys, :])
            zero = jnp.zeros_like(balance)
            _, found = d_weights(static, named, zero, values, d_out, rows, keys, flipped=False)
            return total + (balance * found).sum(axis=1)

        total = _sweeper(static, named, block)(add, jnp.zeros((blocks.queries,), jnp.float32))
        plt.store(delta_ref.at[rows], total)

    result: list[tuple[tuple[int, ...], Any]] = [((static.T,), jnp.dtype(jnp.float32))]
    programs = static.T // blocks.queries
    return run_kernel(static, kernel, arrays, programs, result, "regard_regime_delta")[0]


def stat_names(named: dict[str, Any]) -> list[str]:
    """Of the regime's stats, in order."""
    return sorted(name for name in named if name.startswith("stat"))


def _stats(regime: Normalizer, rows: int) -> list[Any]:
    """The stats of some rows, as shapes."""

    def stats() -> Any:
        def sweep(step: Callable, carry: Any) -> Any:
            return carry

        dtype = jnp.dtype(jnp.float32)
        known = regime.prepare(sweep, (rows,), dtype)
        return regime.finish(regime.start((rows,), dtype), known)[1]

    return jax.tree.leaves(jax.eval_shape(stats))


def _sweeper(static: KernelPlan, named: dict[str, Any], block: Array) -> Callable:
    """sweep(step, carry) over the tiles of a block of queries: step(carry, scores in natural units,
    allowed, keys).
    """
    blocks = static.blocks
    rows = pl.ds(block * blocks.queries, blocks.queries)
    low, high = named["bounds"][block, 0], named["bounds"][block, 3]

    def sweep(step: Callable, carry: Any) -> Any:
        def visit(ik: Array, carry: Any) -> Any:
            keys = pl.ds(ik * blocks.keys, blocks.keys)
            scores = static.score.tile(named, rows, keys, flipped=False)
            scores, allowed = visible_scores(static, named, scores, rows, keys, flipped=False)
            return step(carry, scores, allowed, keys)

        return lax.fori_loop(low, high, visit, carry)

    return sweep
