"""The forward pass in Pallas's Triton lowering: online softmax over tiles, on Ampere and later.

One program takes a block of queries over all of its visible keys, as in FlashAttention. hopper.py
has a faster kernel for 16-bit features on Hopper GPUs.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from regard.pool.kernels.tile import (
    KernelPlan,
    allowed_tile,
    dot,
    finish_scores,
    keep_tile,
    run_kernel,
)

LOWEST = -1e30  # where the running maximum starts: finite, so that -inf - LOWEST is -inf


def forward(static: KernelPlan, arrays: dict[str, Array]) -> tuple[Array, Any]:
    """Softmax pooling; regimes.py's for another regime.

    Args:
        static: sizes, blocks, and how scores are made.
        arrays: by name, each [B|1, N|K|1, ...]: what `static.score` reads; value [.., S, V];
            bounds [.., query blocks, 4] int32 (see pool/tile.py); and where there are any,
            key_bias [.., S], distance_bias [.., T + S - 1] and, for a soft cap, query_bias [.., T]
            float32 in units of log2; bias [.., T|1, S|1]; start, end [.., T]; query_ids0 [.., T]
            with key_ids0 [.., S]; keys_taken [.., S] and table [.., T, S] int8; dropout's words,
            uint32 row0 and row1 [.., T], key0 and key1 [.., S].

    Returns:
        Output [B, N, T, V] in the value's dtype, and log2-sum-exp2 [B, N, T] float32, or the
        regime's stats.
    """
    if static.regime is not None:
        from regard.pool.kernels.regimes import regime_forward  # needed by few calls

        return regime_forward(static, arrays, static.regime)
    blocks, value = static.blocks, arrays["value"]

    def kernel(named: dict[str, Any], out_ref: Any, lse_ref: Any) -> None:
        block = pl.program_id(0)
        rows = pl.ds(block * blocks.queries, blocks.queries)

        def visit(ik: Array, carry: Any, masked: bool) -> Any:
            keys = pl.ds(ik * blocks.keys, blocks.keys)
            scores = static.score.tile(named, rows, keys, flipped=False)
            scores, _ = finish_scores(static, named, scores, rows, keys, flipped=False)
            allowed = allowed_tile(named, rows, keys, flipped=False) if masked else None
            if allowed is not None:
                scores = jnp.where(allowed, scores, -jnp.inf)
            values = lambda: plt.load(named["value"].at[keys, :])  # noqa: E731
            return add_tile(static, named, carry, scores, values, rows, keys)

        low, full_low, full_high, high = visits(named, block)
        carry = nothing_pooled(blocks.queries, static.V)
        if masked_before(named):
            carry = lax.fori_loop(low, full_low, lambda i, c: visit(i, c, True), carry)
        carry = lax.fori_loop(full_low, full_high, lambda i, c: visit(i, c, False), carry)
        if needs_mask(named):
            carry = lax.fori_loop(full_high, high, lambda i, c: visit(i, c, True), carry)
        out, top, total = carry
        some = total > 0.0
        share = jnp.where(some, static.kept_scale / jnp.where(some, total, 1.0), 0.0)
        out = out * share[:, None]
        plt.store(out_ref.at[rows, :], out.astype(out_ref.dtype))
        lse = top + jnp.log2(jnp.where(some, total, 1.0))
        plt.store(lse_ref.at[rows], jnp.where(some, lse, -jnp.inf))

    results = [((static.T, static.V), value.dtype), ((static.T,), jnp.dtype(jnp.float32))]
    programs = static.T // blocks.queries
    out, lse = run_kernel(static, kernel, arrays, programs, results, "regard_forward")
    return out, lse


def nothing_pooled(rows: int, width: int) -> tuple[Array, Array, Array]:
    """What online softmax starts from: the output, the running maximum and the sum, per query."""
    return (
        jnp.zeros((rows, width), jnp.float32),
        jnp.full((rows,), LOWEST, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )


def add_tile(
    static: KernelPlan,
    named: dict[str, Any],
    pooled: tuple[Array, Array, Array],
    scores: Array,
    values: Callable[[], Array],
    rows: Any,
    keys: Any,
) -> tuple[Array, Array, Array]:
    """Online softmax: what is pooled so far, and one more tile.

    Args:
        scores: in units of log2, -inf where masked.
        values: loads them, [keys, V], after the weights are computed.
    """
    out, top, total = pooled
    new_top = jnp.maximum(top, scores.max(axis=1))
    rescale = jnp.exp2(top - new_top)
    weights = jnp.exp2(scores - new_top[:, None])
    total = total * rescale + weights.sum(axis=1)
    keep = keep_tile(static, named, rows, keys, flipped=False)
    weights = weights if keep is None else jnp.where(keep, weights, 0.0)
    loaded = values()
    added = dot(weights.astype(loaded.dtype), loaded, (1, 0), static.precision)
    return out * rescale[:, None] + added, new_top, total


def masked_before(named: dict[str, Any]) -> bool:
    """Whether tiles that need a mask come before those that need none."""
    return "start" in named or any("ids" in name for name in named)


def needs_mask(named: dict[str, Any]) -> bool:
    """Whether some tiles need a mask."""
    return any(name in ("start", "end", "keys_taken", "table") or "ids" in name for name in named)


def visits(named: dict[str, Any], block: Array) -> tuple[Array, ...]:
    """The bounds of what a block visits: low <= full_low <= full_high <= high."""
    return tuple(named["bounds"][block, i] for i in range(4))


def visit_all(named: dict[str, Any], bounds: tuple[Array, ...], visit: Callable, carry: Any) -> Any:
    """visit(index, carry, masked) for the blocks within the bounds, without a mask where every pair
    takes part.
    """
    low, full_low, full_high, high = bounds

    def loop(first: Array, last: Array, carry: Any, masked: bool) -> Any:
        return lax.fori_loop(first, last, lambda i, c: visit(i, c, masked), carry)

    if not needs_mask(named):
        return loop(low, high, carry, False)
    if any(name in ("keys_taken", "table") for name in named):
        return loop(low, high, carry, True)  # no tile is known to need no mask
    carry = loop(low, full_low, carry, True)
    carry = loop(full_low, full_high, carry, False)
    return loop(full_high, high, carry, True)
