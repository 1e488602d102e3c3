"""Blockwise pooling in plain XLA: tiles of queries and keys, memory linear in T and S.

The forward pass keeps a running state per query (online softmax, and its likes for the other
regimes); the backward pass makes every tile's scores again instead of storing them. Tiles that
no query of the block may look at are never visited.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from regard.mask import Allowed
from regard.pool.problem import Problem
from regard.pool.reference import dense_weights
from regard.pool.tiles import (
    Operands,
    TilePlan,
    Tiles,
    Tiling,
    make_operands,
    pad_rows,
    product_dtype,
)
from regard.score.contract import Lift, Score, accumulation_dtype, repeat_heads

_forced: ContextVar[Tiling | None] = ContextVar("tiling", default=None)


@contextlib.contextmanager
def tiling(*, block_q: int, block_k: int, block_b: int = 1) -> Iterator[None]:
    """Forces the tile sizes of calls traced inside; for tests and tuning."""
    token = _forced.set(Tiling(block_b, block_q, block_k))
    try:
        yield
    finally:
        _forced.reset(token)


def forced_tiling() -> Tiling | None:
    return _forced.get()


def blockwise(problem: Problem, sizes: Tiling | None, platform: str) -> tuple[Array, Array]:
    """The output, [B, N, T, V], in the value's dtype, and whether the lift ran (bool scalar)."""
    scored, lift = score_or_lift(problem)

    def run(lift: Lift | None) -> Array:
        plan, operands, allowed = lay_out(problem, scored, lift, sizes, platform)
        out = _pool(plan, operands, allowed, problem.seed)
        return out[:, :, : problem.axes.T]

    return guarded(lift, run)


def blockwise_weights(problem: Problem) -> Array:
    """The weights that `blockwise` pools with, [B, N, T, S], dense: lifted where it lifts."""
    scored, lift = score_or_lift(problem)
    if scored is None:
        axes = problem.axes
        return dense_weights(problem, jnp.zeros((axes.B, axes.N, axes.T, axes.S), jnp.float32))
    score, query, key = scored

    def run(lift: Lift | None) -> Array:
        dense = lift.scores() if lift else score.scores(query, repeat_heads(key, query))
        return dense_weights(problem, dense)

    return guarded(lift, run)[0]


def score_or_lift(problem: Problem) -> tuple[tuple[Score, Array, Array] | None, Lift | None]:
    """The projected score, and its lift where it has one; nothing where scores are not used."""
    if not problem.normalize.uses_scores:
        return None, None
    query, key = problem.query, problem.key
    if problem.score.per_head():
        key = repeat_heads(key, query)
    score, query, key = problem.score.projected(query, key)
    visible = problem.visible
    if visible is not None and visible.shape[1] != key.shape[1]:
        visible = jnp.repeat(visible, key.shape[1] // visible.shape[1], axis=1)
    return (score, query, key), score.lift(query, key, visible=visible)


def guarded(lift: Lift | None, run: Callable[[Lift | None], Any]) -> tuple[Any, Array]:
    """run(lift), or run(None) where the data is out of the lift's range; and which it was."""
    if lift is None or lift.in_range is None:
        return run(lift), jnp.array(lift is not None)
    return lax.cond(lift.in_range, lambda: run(lift), lambda: run(None)), lift.in_range


def lay_out(
    problem: Problem,
    scored: tuple[Score, Array, Array] | None,
    lift: Lift | None,
    sizes: Tiling | None,
    platform: str,
) -> tuple[TilePlan, Operands, Allowed]:
    """Picks tile sizes and pads every array to whole blocks."""
    operands = make_operands(problem, scored, lift)
    value, axes = problem.value, problem.axes
    if operands.key and operands.key[0].shape[1] != axes.K:  # one score per head: no sharing
        value = None if value is None else jnp.repeat(value, axes.N // axes.K, axis=1)
        operands, axes = replace(operands, value=value), replace(axes, K=axes.N)
    compute = problem.query.dtype
    wide = accumulation_dtype(compute, *([] if value is None else [value.dtype]))
    width = 1 if scored is None or lift is not None else scored[0].tile_width(axes.query_width)
    plan = TilePlan(
        axes=axes,
        tiling=_fit(sizes or default_tiling(problem, lift, width, platform), problem),
        normalize=problem.normalize,
        dropout_rate=problem.dropout_rate,
        lifted=lift is not None,
        wide=wide,
        product=product_dtype(platform, compute, wide),
        value_dtype=None if value is None else value.dtype,
    )
    rows, keys = plan.query_blocks * plan.tiling.block_q, plan.key_blocks * plan.tiling.block_k
    operands = Operands(
        operands.score,
        operands.expansion,
        jax.tree.map(lambda a: pad_rows(a, -2, rows), operands.query),
        jax.tree.map(lambda a: pad_rows(a, -2, keys), operands.key),
        None if value is None else pad_rows(value, 2, keys),
        None if operands.bias is None else pad_rows(pad_rows(operands.bias, 2, rows), 3, keys),
    )
    return plan, operands, _pad_allowed(problem.allowed, plan, rows, keys)


def default_tiling(problem: Problem, lift: Lift | None, width: int, platform: str) -> Tiling:
    """Tile sizes that keep a tile in cache on a CPU, and a GPU busy."""
    axes = problem.axes
    if platform == "cpu":
        wide_features = lift is not None and lift.expansion is not None
        block_k = 512 if wide_features or width > 1 else 1024
        budget = (1 << 21) // max(1, width // 4)  # numbers in a tile
        block_k = min(axes.S, block_k, max(64, budget // axes.N // 64))
        block_q = max(32, min(1024 if wide_features else 512, budget // (axes.N * block_k)))
    else:
        budget = (1 << 26) // width
        block_k = min(axes.S, 512)
        block_q = max(128, budget // (axes.B * axes.N * block_k))
        return Tiling(axes.B, _even(axes.T, block_q), _even(axes.S, block_k))
    block_q, block_k = _even(axes.T, block_q), _even(axes.S, block_k)
    examples = max(1, budget // (axes.N * block_q * block_k))
    block_b = max(b for b in range(1, axes.B + 1) if axes.B % b == 0 and b <= examples)
    return Tiling(block_b, block_q, block_k)


def _even(length: int, block: int) -> int:
    """The smallest multiple of 8 that covers `length` in as few blocks as `block` does."""
    blocks = -(-length // min(block, length))
    return length if blocks == 1 else -(-length // blocks // 8) * 8


def _fit(sizes: Tiling, problem: Problem) -> Tiling:
    axes = problem.axes
    block_b = sizes.block_b if axes.B % sizes.block_b == 0 else 1
    return Tiling(block_b, min(sizes.block_q, axes.T), min(sizes.block_k, axes.S))


def _pad_allowed(allowed: Allowed, plan: TilePlan, rows: int, keys: int) -> Allowed:
    """Padded queries see nothing, padded keys are past every end."""
    end = allowed.end
    if end is None and keys > plan.axes.S:
        end = jnp.full((1, 1, 1), plan.axes.S, jnp.int32)
    return Allowed(
        None if allowed.start is None else pad_rows(allowed.start, 2, rows, fill=plan.axes.S),
        None if end is None else pad_rows(end, 2, rows),
        tuple((pad_rows(q, 1, rows), pad_rows(k, 1, keys)) for q, k in allowed.segment_ids),
        tuple(pad_rows(pad_rows(a, 2, rows), 3, keys) for a in allowed.arrays),
    )


def visit_bounds(plan: TilePlan, allowed: Allowed) -> tuple[Array, Array] | None:
    """First and last key block + 1 to visit, [groups, query_blocks] each; None: visit all."""
    sizes, shape = plan.tiling, (plan.groups, plan.query_blocks)

    def per_block(bound: Array, reduce: Callable) -> Array:
        """[B|1, N|1, T|1] -> [groups|1, query_blocks|1]."""
        b, n, t = bound.shape
        groups, blocks = (1 if b == 1 else shape[0]), (1 if t == 1 else shape[1])
        return reduce(bound.reshape(groups, b // groups, n, blocks, t // blocks), axis=(1, 2, 4))

    if allowed.everything():
        return None
    low, high = jnp.zeros(shape, jnp.int32), jnp.full(shape, plan.key_blocks, jnp.int32)
    if allowed.start is not None:
        low = jnp.maximum(low, per_block(allowed.start, jnp.min) // sizes.block_k)
    if allowed.end is not None:
        high = jnp.minimum(high, -(-per_block(allowed.end, jnp.max) // sizes.block_k))
    for query_ids, key_ids in allowed.segment_ids:
        first, last = _segment_bounds(plan, query_ids, key_ids)
        low, high = jnp.maximum(low, first), jnp.minimum(high, last)
    return low, high


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


def sweeper(
    tiles: Tiles, bounds: tuple[Array, Array] | None, iq: Array, query: Any
) -> Callable[[Callable, Any], Any]:
    """A loop over the key blocks of one query block: sweep(step, carry) -> carry.

    `step(carry, scores, allowed, ik)` sees each visited tile once, in order of the keys.
    """
    low, high = visited(tiles, bounds, iq)

    def sweep(step: Callable[[Any, Array, Array | None, Array], Any], carry: Any) -> Any:
        def body(ik: Array, carry: Any) -> Any:
            key = tiles.open_key(tiles.expansion, tiles.key_block(ik))
            scores, allowed = tiles.finish_scores(tiles.pair(tiles.score, query, key), iq, ik)
            return step(carry, scores, allowed, ik)

        return lax.fori_loop(low, high, body, carry)

    return sweep


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pool(plan: TilePlan, operands: Operands, allowed: Allowed, seed: Array | None) -> Array:
    return _forward(plan, operands, allowed, seed)[0].astype(plan.value_dtype)


def _forward(
    plan: TilePlan, operands: Operands, allowed: Allowed, seed: Array | None
) -> tuple[Array, Any]:
    """Output [B, N, rows, V] and the per-query stats, leaves [B, N, rows]."""
    bounds = visit_bounds(plan, allowed)

    def group(index: Array) -> tuple[Array, Any]:
        tiles = Tiles(plan, operands, allowed, seed, index)
        return lax.map(lambda iq: pool_query_block(tiles, bounds, iq), _indices(plan.query_blocks))

    out, stats = lax.map(group, _indices(plan.groups))
    return join(plan, out), jax.tree.map(lambda leaf: join(plan, leaf[..., None])[..., 0], stats)


def pool_query_block(
    tiles: Tiles, bounds: tuple[Array, Array] | None, iq: Array
) -> tuple[Array, Any]:
    """Output [Z, q, V] and stats [Z, q] of one block of queries."""
    plan, normalize = tiles.plan, tiles.plan.normalize
    rows = (*plan.lead, plan.tiling.block_q)
    query = tiles.open_query(tiles.expansion, tiles.query_block(iq))
    sweep = sweeper(tiles, bounds, iq, query)
    known = normalize.prepare(sweep, rows, plan.wide)

    def step(carry: Any, scores: Array, allowed: Array | None, ik: Array) -> Any:
        out, state = carry
        first_key = ik * plan.tiling.block_k
        state, weights, rescale = normalize.absorb(state, known, scores, allowed, first_key)
        if rescale is not None:
            out = out * rescale[..., None]
        if tiles.value is not None:
            keep = tiles.keep_block(iq, ik)
            weights = weights if keep is None else weights * keep
            out = out + tiles.pool(weights, tiles.value_block(ik))
        return out, state

    width = 0 if tiles.value is None else tiles.value.shape[-1]
    start = jnp.zeros((*rows, width), plan.wide), normalize.start(rows, plan.wide)
    out, state = sweep(step, start)
    scale, stats = normalize.finish(state, known)
    return (out if scale is None else out * scale[..., None]), stats


def join(plan: TilePlan, blocks: Array) -> Array:
    """[groups, query_blocks, Z, q, x] -> [B, N, rows, x]."""
    shape = (plan.groups, plan.query_blocks, -1, plan.tiling.block_q, blocks.shape[-1])
    blocks = jnp.moveaxis(blocks.reshape(shape), 1, 2)  # [groups, Z, query_blocks, q, x]
    return blocks.reshape(plan.axes.B, plan.axes.N, -1, blocks.shape[-1])


def _indices(count: int) -> Array:
    return jnp.arange(count, dtype=jnp.int32)


def _pool_forward(
    plan: TilePlan, operands: Operands, allowed: Allowed, seed: Array | None
) -> tuple[Array, Any]:
    out, stats = _forward(plan, operands, allowed, seed)
    return out.astype(plan.value_dtype), (operands, allowed, seed, out, stats)


def _pool_backward(plan: TilePlan, residuals: Any, d_out: Array) -> tuple[Operands, None, None]:
    operands, allowed, seed, out, stats = residuals
    bounds = visit_bounds(plan, allowed)

    def group(carry: Any, index: Array) -> tuple[Any, Any]:
        tiles = Tiles(plan, operands, allowed, seed, index)
        size = plan.tiling.block_b
        rows = jax.tree.map(
            lambda a: lax.dynamic_slice_in_dim(a, index * size, size).reshape(
                *plan.lead, *a.shape[2:]
            ),
            (d_out.astype(plan.wide), out, stats),
        )
        return _group_backward(tiles, bounds, carry, rows)

    shared = _zeros(plan, (operands.score, operands.bias))
    (d_score, d_bias), (d_query, d_key, d_value, d_expansion) = lax.scan(
        group, shared, _indices(plan.groups)
    )
    d_query = jax.tree.map(lambda a: join(plan, a), d_query)
    d_key, d_value, d_expansion = jax.tree.map(  # [groups, b, ...] -> [B, ...]
        lambda a: a.reshape(-1, *a.shape[2:]), (d_key, d_value, d_expansion)
    )
    cotangents = Operands(d_score, d_expansion, d_query, d_key, d_value, d_bias)
    return jax.tree.map(lambda d, x: d.astype(x.dtype), cotangents, operands), None, None


_pool.defvjp(_pool_forward, _pool_backward)


def _group_backward(
    tiles: Tiles, bounds: tuple[Array, Array] | None, shared: Any, rows: Any
) -> tuple[Any, Any]:
    """Cotangents of one group of examples; d_key and d_value are summed over query blocks."""
    plan = tiles.plan

    def query_block(carry: Any, iq: Array) -> tuple[Any, Any]:
        d_out, out, stats = jax.tree.map(
            lambda a: lax.dynamic_slice_in_dim(
                a, iq * plan.tiling.block_q, plan.tiling.block_q, axis=len(plan.lead)
            ),
            rows,
        )
        compact = tiles.query_block(iq)
        query, pull_query = jax.vjp(tiles.open_query, tiles.expansion, compact)
        sweep = sweeper(tiles, bounds, iq, query)
        delta = _delta(tiles, sweep, iq, d_out, out, stats)
        d_opened, carry = _sweep_back(
            tiles, bounds, iq, query, d_out, stats, delta, (_zeros(plan, query), carry)
        )
        d_opened = jax.tree.map(lambda d, x: d.astype(x.dtype), d_opened, query)
        d_expansion, d_query = pull_query(d_opened)
        shared, (d_key, d_value, sum_expansion) = carry
        sum_expansion = jax.tree.map(jnp.add, sum_expansion, d_expansion)
        return (shared, (d_key, d_value, sum_expansion)), d_query

    own = _zeros(plan, (tiles.key, tiles.value, tiles.expansion))
    carry, d_query = lax.scan(query_block, (shared, own), _indices(plan.query_blocks))
    shared, (d_key, d_value, d_expansion) = carry
    return shared, (d_query, d_key, d_value, d_expansion)


def _delta(
    tiles: Tiles, sweep: Callable, iq: Array, d_out: Array, out: Array, stats: Any
) -> Array | None:
    """Per query, what d weights is measured against: d scores = slope * (d weights - delta)."""
    plan, normalize = tiles.plan, tiles.plan.normalize
    if normalize.delta == "none":
        return None
    if normalize.delta == "output":
        return jnp.sum(d_out * out, -1)

    def step(total: Array, scores: Array, allowed: Array | None, ik: Array) -> Array:
        balance = normalize.balance(stats, scores, allowed, ik * plan.tiling.block_k)
        d_weights = tiles.pool_back(balance, tiles.value_block(ik), d_out)[0]
        keep = tiles.keep_block(iq, ik)
        d_weights = d_weights if keep is None else d_weights * keep
        return total + jnp.sum(balance * d_weights, -1)

    return sweep(step, jnp.zeros(d_out.shape[:-1], plan.wide))


def _sweep_back(
    tiles: Tiles,
    bounds: tuple[Array, Array] | None,
    iq: Array,
    query: Any,
    d_out: Array,
    stats: Any,
    delta: Array | None,
    carry: Any,
) -> Any:
    """One query block's way back over its key blocks; adds into (d_opened query, sums)."""
    plan, normalize = tiles.plan, tiles.plan.normalize
    block_k = plan.tiling.block_k

    def body(ik: Array, carry: Any) -> Any:
        d_query, ((d_score, d_bias), (d_key, d_value, d_expansion)) = carry
        key, pull_key = jax.vjp(tiles.open_key, tiles.expansion, tiles.key_block(ik))
        scores = tiles.pair(tiles.score, query, key)
        scores, allowed = tiles.finish_scores(scores, iq, ik)
        weights = normalize.recall(stats, scores, allowed, ik * block_k)
        keep = tiles.keep_block(iq, ik)
        kept = weights if keep is None else weights * keep
        d_weights, value_part = tiles.pool_back(kept, tiles.value_block(ik), d_out)
        d_value = _add_block(d_value, value_part, 2, ik)
        if query and normalize.learns:
            d_weights = d_weights if keep is None else d_weights * keep
            slope = normalize.slope(stats, scores, allowed, ik * block_k)
            d_scores = slope * (d_weights if delta is None else d_weights - delta[..., None])
            score_part, query_part, key_opened = tiles.pair_back(tiles.score, query, key, d_scores)
            key_opened = jax.tree.map(lambda d, x: d.astype(x.dtype), key_opened, key)
            expansion_part, key_part = pull_key(key_opened)
            add = functools.partial(jax.tree.map, jnp.add)
            d_score, d_query = add(d_score, score_part), add(d_query, query_part)
            d_expansion = add(d_expansion, expansion_part)
            d_key = jax.tree.map(
                lambda total, part: _add_block(total, part, -2, ik), d_key, key_part
            )
            if d_bias is not None:
                d_bias = _add_bias(tiles, d_bias, d_scores, iq, ik)
        return d_query, ((d_score, d_bias), (d_key, d_value, d_expansion))

    return lax.fori_loop(*visited(tiles, bounds, iq), body, carry)


def _add_block(total: Array, part: Array, axis: int, index: Array) -> Array:
    """total[block index] += part; in place inside a loop."""
    axis %= total.ndim
    size = part.shape[axis]
    if total.shape[axis] == size:
        return total + part.astype(total.dtype)
    here = lax.dynamic_slice_in_dim(total, index * size, size, axis)
    return lax.dynamic_update_slice_in_dim(
        total, here + part.astype(total.dtype), index * size, axis
    )


def _add_bias(tiles: Tiles, total: Array, d_scores: Array, iq: Array, ik: Array) -> Array:
    """Adds a tile's d scores into d bias, summed over the axes the bias broadcasts."""
    d_scores = d_scores.reshape(tiles.plan.tiling.block_b, tiles.plan.axes.N, *d_scores.shape[-2:])
    for axis in range(4):
        if total.shape[axis] == 1:
            d_scores = d_scores.sum(axis, keepdims=True)
    starts, sizes = (tiles.group, 0, iq, ik), d_scores.shape
    at = [
        jnp.int32(0) if total.shape[i] == 1 else jnp.int32(starts[i] * sizes[i]) for i in range(4)
    ]
    here = lax.dynamic_slice(total, at, sizes)
    return lax.dynamic_update_slice(total, here + d_scores.astype(total.dtype), at)


def _zeros(plan: TilePlan, tree: Any) -> Any:
    return jax.tree.map(lambda a: jnp.zeros(jnp.shape(a), plan.wide), tree)
