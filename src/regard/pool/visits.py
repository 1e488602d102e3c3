"""Which tiles are visited: blocks of keys that no query of a block may look at cost nothing."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from regard.mask import Allowed
from regard.pool.tiles import TilePlan, Tiles


def visit_bounds(
    plan: TilePlan, allowed: Allowed, active: Array | None = None
) -> tuple[Array, Array] | None:
    """First and last key block + 1 to visit, [groups, query_blocks] each; None: visit all.

    Where `active` is False nothing is visited. Leaving out the loop around is not enough: with one
    group of examples its body depends on no index, and XLA moves it out of the loop and runs it.
    """
    sizes, shape = plan.tiling, (plan.groups, plan.query_blocks)

    def per_block(bound: Array, reduce: Callable) -> Array:
        """[B|1, N|1, T|1] -> [groups|1, query_blocks|1]."""
        b, n, t = bound.shape
        groups, blocks = (1 if b == 1 else shape[0]), (1 if t == 1 else shape[1])
        return reduce(bound.reshape(groups, b // groups, n, blocks, t // blocks), axis=(1, 2, 4))

    if allowed.everything() and active is None:
        return None
    low, high = jnp.zeros(shape, jnp.int32), jnp.full(shape, plan.key_blocks, jnp.int32)
    if allowed.start is not None:
        low = jnp.maximum(low, per_block(allowed.start, jnp.min) // sizes.block_k)
    if allowed.end is not None:
        high = jnp.minimum(high, -(-per_block(allowed.end, jnp.max) // sizes.block_k))
    for query_ids, key_ids in allowed.segment_ids:
        first, last = _segment_bounds(plan, query_ids, key_ids)
        low, high = jnp.maximum(low, first), jnp.minimum(high, last)
    return low, high if active is None else jnp.where(active, high, low)


def _segment_bounds(plan: TilePlan, query_ids: Array, key_ids: Array) -> tuple[Array, Array]:
    """The hull of the key blocks whose ids overlap a query block's, by their least and greatest."""

    def spans(ids: Array, block: int) -> tuple[Array, Array]:
        groups = 1 if ids.shape[0] == 1 else plan.groups
        ids = ids.reshape(groups, ids.shape[0] // groups, -1, block)
        return ids.min((1, 3)), ids.max((1, 3))  # [groups|1, blocks]

    query_low, query_high = spans(query_ids, plan.tiling.block_q)
    key_low, key_high = spans(key_ids, plan.tiling.block_k)
    meet = (query_low[:, :, None] <= key_high[:, None, :]) & (
        key_low[:, None, :] <= query_high[:, :, None]
    )
    block = jnp.arange(plan.key_blocks, dtype=jnp.int32)[None, None, :]
    first = jnp.where(meet, block, plan.key_blocks).min(-1)
    return first, jnp.where(meet, block + 1, 0).max(-1)


def visited(
    tiles: Tiles, bounds: tuple[Array, Array] | None, iq: Array
) -> tuple[Array | int, Array | int]:
    """First and last key block + 1 of a query block."""
    if bounds is None:
        return 0, tiles.plan.key_blocks
    return bounds[0][tiles.group, iq], bounds[1][tiles.group, iq]
