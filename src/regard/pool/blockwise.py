"""Blockwise pooling in plain XLA: tiles of queries and keys, memory linear in T and S.

The forward pass keeps a running state per query (online softmax, and the same for the other
regimes); the backward pass computes every tile's scores again instead of storing them. Tiles in
which every pair is masked by ranges or segments are never visited.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from regard.dropout import Seed
from regard.mask import Allowed
from regard.placement import Device, vary_as
from regard.pool import few_queries
from regard.pool.backend import Backend, Problem, Request
from regard.pool.layout import Layout, forced_tiling, join, pad_rows, visited_blocks
from regard.pool.score_plan import Flag, Results, ScorePlan, row_delta
from regard.pool.tile import soft_cap_slope
from regard.pool.xla_tiles import (
    Operands,
    TilePlan,
    Tiles,
    Tiling,
    make_operands,
)
from regard.score.distances import sum_distances
from regard.shapes import Axes


class Settings(NamedTuple):
    """Forced tile sizes, the device of the call, and whether few_queries.py pools it."""

    sizes: Tiling | None
    device: Device
    few: bool = False


class Blockwise(Backend):
    """Every score, mask and regime, on every device."""

    name = "blockwise"

    def refuses(self, request: Request) -> str | None:
        return None

    def describe(self, request: Request) -> str:
        if request.axes.empty():
            return "no query or no key: zeros"
        if request.has_few_queries:
            return f"few queries: dense weights; scores {request.plan().describe()}"
        return f"tile by tile, memory linear in T and S; scores {request.plan().describe()}"

    def settings(self, request: Request) -> Settings:
        sizes = forced_tiling()
        return Settings(sizes, request.device, sizes is None and request.has_few_queries)

    def pool(self, problem: Problem, settings: Settings) -> tuple[Any, Array]:
        if settings.few:
            return few_queries.pool(problem), jnp.array(problem.normalize.uses_scores)
        problem, platform = problem.zeroed(), settings.device.platform
        plan = ScorePlan.of(problem)
        passes = [
            (TiledPass.of(problem, path, settings.sizes, platform), make_operands(problem, path))
            for path in plan.paths
        ]
        # XLA's CPU backend runs the body of a branch on one core, so there the path not taken is a
        # loop of no iterations; a GPU synchronizes with the host before each iteration of a loop
        # whose bounds are data, so there it branches.
        return plan.pool(problem, passes, settings.device, branch=platform != "cpu")


def sweeper(
    tiles: Tiles, bounds: tuple[Array, Array] | None, iq: Array, query: Any
) -> Callable[[Callable, Any], Any]:
    """A loop over the key blocks of one query block: sweep(step, carry) -> carry.

    `step(carry, scores, allowed, ik)` is called once for each visited tile, in order of the keys.
    """
    low, high = visited(tiles, bounds, iq)

    def sweep(step: Callable[[Any, Array, Array | None, Array], Any], carry: Any) -> Any:
        def body(ik: Array, carry: Any) -> Any:
            return step(carry, *tiles.scores_of_tile(iq, ik, query), ik)

        return lax.fori_loop(low, high, body, vary_as(carry, tiles.everything()))

    return sweep


class TiledPass(Layout):
    """A pass tile by tile in plain XLA."""

    checks_varying: ClassVar[bool] = True

    def resized(self, axes: Axes) -> "TiledPass":
        return replace(self, axes=axes)

    def forward(
        self, operands: Operands, allowed: Allowed, seed: Seed, active: Flag
    ) -> tuple[Array, Any]:
        axes = self.axes
        plan, laid, laid_mask = self.lay(operands, allowed)
        results = _forward(plan, laid, laid_mask, seed, active)
        return jax.tree.map(
            lambda a: a.reshape(axes.B, axes.N, *a.shape[2:])[:, :, : axes.T], results
        )

    def backward(
        self, operands: Operands, allowed: Allowed, seed: Seed, active: Flag, results: Results
    ) -> Operands:
        plan, _, laid_mask = self.lay(operands, allowed)
        laid, pull = jax.vjp(lambda operands: self.lay(operands, allowed)[1], operands)
        return pull(_backward(plan, laid, laid_mask, seed, active, results))[0]

    def log_sum(self, stats: Any) -> Array:
        return cast(Array, self.normalize.log_sum(stats, (stats[1],)))

    def smooth(
        self, operands: Operands, allowed: Allowed, seed: Seed, stats: Any
    ) -> tuple[Array, Array | None]:
        from regard.pool.derivatives import smooth_outputs  # for derivatives only

        return smooth_outputs(self, operands, allowed, seed, stats)


def visited(
    tiles: Tiles, bounds: tuple[Array, Array] | None, iq: Array
) -> tuple[Array | int, Array | int]:
    """First and last + 1 key block of a query block."""
    if bounds is None:
        return 0, tiles.plan.key_blocks
    return bounds[0][tiles.group, iq], bounds[1][tiles.group, iq]


def _iterations(plan: TilePlan, active: Flag) -> Array | int:
    return plan.groups if active is None else jnp.where(active, plan.groups, 0)


def _forward(
    plan: TilePlan, operands: Operands, allowed: Allowed, seed: Seed, active: Flag
) -> tuple[Array, Any]:
    """Output [B, N, rows, V] and the per-query stats, leaves [B, N, rows]; zeros if not active."""
    bounds = visited_blocks(plan, allowed, active)

    def group(index: Array) -> tuple[Array, Any]:
        tiles = Tiles(plan, operands, allowed, seed, index)
        return lax.map(lambda iq: pool_query_block(tiles, bounds, iq), _indices(plan.query_blocks))

    out, stats = _map_first(group, plan.groups, _iterations(plan, active), operands)
    return join(plan, out), jax.tree.map(lambda leaf: join(plan, leaf[..., None])[..., 0], stats)


def _map_first(f: Callable[[Array], Any], size: int, count: Array | int, like: Any) -> Any:
    """f(0), f(1), ..., stacked; zeros from `count` on."""
    if isinstance(count, int):
        return lax.map(f, _indices(size))
    results = jax.tree.map(
        lambda leaf: jnp.zeros((size, *leaf.shape), leaf.dtype),
        jax.eval_shape(f, jax.ShapeDtypeStruct((), jnp.int32)),
    )

    def body(index: Array, results: Any) -> Any:
        return _store(results, f(index), index)

    return lax.fori_loop(0, count, body, vary_as(results, like))


def _store(stacks: Any, leaves: Any, index: Array) -> Any:
    return jax.tree.map(
        lambda stack, leaf: lax.dynamic_update_index_in_dim(stack, leaf, index, 0), stacks, leaves
    )


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
    if scale is None:
        return out / plan.value_scale, stats
    return out * (scale / plan.value_scale)[..., None], stats


def _indices(count: int) -> Array:
    return jnp.arange(count, dtype=jnp.int32)


def _backward(
    plan: TilePlan, operands: Operands, allowed: Allowed, seed: Seed, active: Flag, rows: Results
) -> Operands:
    """Cotangents of the operands; zeros if not active."""
    bounds = visited_blocks(plan, allowed, active)
    d_out, out, stats = rows

    def lay(array: Array) -> Array:
        """[B, N, T, ...] -> [groups, Z, rows, ...]."""
        array = pad_rows(array, 2, plan.query_blocks * plan.tiling.block_q)
        return array.reshape(plan.groups, *plan.lead, *array.shape[2:])

    laid = jax.tree.map(lay, (d_out.astype(plan.wide), out, stats))

    def group(index: Array, carry: Any) -> Any:
        shared, stacks = carry
        tiles = Tiles(plan, operands, allowed, seed, index)
        rows = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, 0, keepdims=False), laid)
        shared, parts = _group_backward(tiles, bounds, shared, rows)
        return shared, _store(stacks, parts, index)

    shared = _zeros(plan, (operands.score, operands.bias, operands.distance_bias))
    stacks = _zero_stacks(plan, operands)
    (d_score, *d_biases), (d_query, d_key, d_value, d_expansion) = lax.fori_loop(
        0, _iterations(plan, active), group, vary_as((shared, stacks), (operands, d_out))
    )
    d_query = jax.tree.map(lambda a: join(plan, a), d_query)
    d_key, d_value, d_expansion = jax.tree.map(  # [groups, b, ...] -> [B, ...]
        lambda a: a.reshape(a.shape[0] * a.shape[1], *a.shape[2:]), (d_key, d_value, d_expansion)
    )
    cotangents = Operands(d_score, d_expansion, d_query, d_key, d_value, *d_biases)
    return jax.tree.map(lambda d, x: d.astype(x.dtype), cotangents, operands)


def _zero_stacks(plan: TilePlan, operands: Operands) -> Any:
    """Zeros for the d query, d key, d value and d expansion of every group."""

    def per_group(leaf: Array) -> Array:
        shape = (plan.groups, leaf.shape[0] // plan.groups, *leaf.shape[1:])
        return jnp.zeros(shape, plan.wide)

    def per_query_block(leaf: Array) -> Array:
        b, _, _, width = leaf.shape
        shape = (b // plan.groups, plan.axes.N, plan.tiling.block_q, width)
        return jnp.zeros((plan.groups, plan.query_blocks, *shape), plan.wide)

    return (
        jax.tree.map(per_query_block, operands.query),
        jax.tree.map(per_group, operands.key),
        jax.tree.map(per_group, operands.value),
        jax.tree.map(per_group, operands.expansion),
    )


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
        d_opened, carry = _backward_over_keys(
            tiles,
            bounds,
            iq,
            query,
            d_out,
            stats,
            delta,
            (vary_as(_zeros(plan, query), (tiles.everything(), rows)), carry),
        )
        d_opened = jax.tree.map(lambda d, x: d.astype(x.dtype), d_opened, query)
        parts = jax.tree.map(lambda d: d.astype(plan.wide), pull_query(d_opened))
        d_expansion, d_query = parts
        shared, (d_key, d_value, sum_expansion) = carry
        sum_expansion = jax.tree.map(jnp.add, sum_expansion, d_expansion)
        return (shared, (d_key, d_value, sum_expansion)), d_query

    own = _zeros(plan, (tiles.key, tiles.value, tiles.expansion))
    own = vary_as(own, (tiles.everything(), rows))
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
        return row_delta((d_out, out, stats), plan.wide)

    spread = jax.tree.map(lambda a: a[..., None], stats)  # [Z, q, 1]

    def step(total: Array, scores: Array, allowed: Array | None, ik: Array) -> Array:
        balance = normalize.balance(spread, scores, allowed, tiles.key_indices(ik))
        d_weights = tiles.d_weights(tiles.value_block(ik), d_out)
        keep = tiles.keep_block(iq, ik)
        d_weights = d_weights if keep is None else d_weights * keep
        return total + jnp.sum(balance * d_weights, -1)

    return sweep(step, jnp.zeros(d_out.shape[:-1], plan.wide))


def _backward_over_keys(
    tiles: Tiles,
    bounds: tuple[Array, Array] | None,
    iq: Array,
    query: Any,
    d_out: Array,
    stats: Any,
    delta: Array | None,
    carry: Any,
) -> Any:
    """The backward pass of one query block over its key blocks; adds to (d_opened query, sums).

    Tiles are transposed here, [Z, s, r] with keys before queries: of the five matrix products of a
    tile, the two that sum over queries then read their operands along rows, which is three times
    as fast on a CPU.
    """
    normalize = tiles.plan.normalize
    flipped = jax.tree.map(tiles.flip_rows, stats)
    d_rows = tiles.out_operand(d_out)
    base = None if delta is None else tiles.flip_rows(delta)

    def body(ik: Array, carry: Any) -> Any:
        d_query, ((d_score, d_bias, d_distances), (d_key, d_value, d_expansion)) = carry
        key, pull_key = jax.vjp(tiles.open_key, tiles.expansion, tiles.key_block(ik))
        raw = tiles.pair_flipped(tiles.score, query, key)
        raw = tiles.add_by_distance(raw, iq, ik, flipped=True)
        scores, allowed = tiles.finish_scores(raw, iq, ik, flipped=True)
        keys = tiles.key_indices(ik, flipped=True)
        weights = normalize.recompute(flipped, scores, allowed, keys)
        keep = tiles.keep_block(iq, ik, flipped=True)
        kept = weights if keep is None else weights * keep
        d_value = _add_block(d_value, tiles.d_value(kept, d_rows), 2, ik)
        if query and normalize.learns:
            d_weights = tiles.d_weights_flipped(tiles.value_block(ik), d_rows)
            d_weights = d_weights if keep is None else d_weights * keep
            slope = normalize.slope(flipped, scores, allowed, keys)
            d_scores = slope * (d_weights if base is None else d_weights - base)
            cap = tiles.plan.softcap
            d_raw = d_scores if cap is None else d_scores * soft_cap_slope(raw, cap)
            score_part, query_part, key_opened = tiles.pair_back(tiles.score, query, key, d_raw)
            key_opened = jax.tree.map(lambda d, x: d.astype(x.dtype), key_opened, key)
            expansion_part, key_part = pull_key(key_opened)
            add = functools.partial(jax.tree.map, jnp.add)
            d_score, d_query = add(d_score, score_part), add(d_query, query_part)
            d_expansion = add(d_expansion, expansion_part)
            d_key = jax.tree.map(
                lambda total, part: _add_block(total, part, -2, ik), d_key, key_part
            )
            if d_bias is not None:
                d_bias = _add_bias(tiles, d_bias, tiles.unflip(d_scores), iq, ik)
            if d_distances is not None:
                d_distances = _add_distances(tiles, d_distances, tiles.unflip(d_raw), iq, ik)
        return d_query, ((d_score, d_bias, d_distances), (d_key, d_value, d_expansion))

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
    """Adds d scores, [b, N, q, s], into d bias, summed over the axes the bias broadcasts."""
    d_scores = _sum_shared(total.shape, d_scores)
    starts, sizes = (tiles.group, 0, iq, ik), d_scores.shape
    at = [
        jnp.int32(0) if total.shape[i] == 1 else jnp.int32(starts[i] * sizes[i]) for i in range(4)
    ]
    here = lax.dynamic_slice(total, at, sizes)
    return lax.dynamic_update_slice(total, here + d_scores.astype(total.dtype), at)


def _add_distances(tiles: Tiles, total: Array, d_scores: Array, iq: Array, ik: Array) -> Array:
    """Adds d scores, [b, N, q, s], into the cotangent of the numbers per distance, [1, N|1, ..]."""
    d_scores = _sum_shared(total.shape[:2], d_scores)
    found = sum_distances(d_scores)
    example = tiles.group * found.shape[0] if total.shape[0] > 1 else 0
    at = [jnp.int32(start) for start in (example, 0, tiles.first_distance(iq, ik))]
    here = lax.dynamic_slice(total, at, found.shape)
    return lax.dynamic_update_slice(total, here + found.astype(total.dtype), at)


def _sum_shared(shape: tuple[int, ...], array: Array) -> Array:
    """Sums over the axes that are 1 in the shape."""
    return array.sum([i for i, size in enumerate(shape) if size == 1], keepdims=True)


def _zeros(plan: TilePlan, tree: Any) -> Any:
    return jax.tree.map(lambda a: jnp.zeros(jnp.shape(a), plan.wide), tree)
