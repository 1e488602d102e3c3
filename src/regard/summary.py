"""The weights without the T×S matrix: per-query and per-key summaries, and pictures.

Both run over tiles like blockwise pooling: once for the regime's per-query stats, once more to
compute each tile's weights. On a GPU, softmax over a lift runs by two kernels instead
(pool/kernels/weight_summary.py). Memory is linear in T and S.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from regard.front_door import Pipeline, prepare
from regard.memory import Memory
from regard.placement import Device, on_device, vary_as
from regard.pool.backend import Problem, Request
from regard.pool.blockwise import TiledPass, pool_query_block, sweeper
from regard.pool.layout import forced_tiling, join, visited_blocks
from regard.pool.merge import sink_rows, with_sink
from regard.pool.pallas import Settings as KernelSettings
from regard.pool.pallas import summarize_by_kernels, summary_settings
from regard.pool.score_plan import ScorePath, ScorePlan
from regard.pool.tile import bins_of
from regard.pool.xla_tiles import TilePlan, Tiles, Tiling, make_operands
from regard.score.additive import LiftPolicy, lift_policy
from regard.score.contract import accumulation_dtype
from regard.score.registration import classes_in
from regard.shapes import Axes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Summary:
    """Statistics of the weights, query by query and key by key.

    Attributes:
        entropy: -sum_s alpha log alpha per query, in nats; (T,), (B, T) or (B, N, T).
        argmax: the key with the largest weight; -1 for an empty row.
        max_weight: that weight.
        key_total: the weight a key receives from all queries; (S,), (B, S) or (B, N, S).

    Example:
        >>> import jax.numpy as jnp, regard
        >>> x = jnp.eye(3) * 100
        >>> regard.summarize(x, x).argmax.tolist()
        [0, 1, 2]
    """

    entropy: Array
    argmax: Array
    max_weight: Array
    key_total: Array


def summarize(query: Array, key: Array | Memory, **pipeline: Unpack[Pipeline]) -> Summary:
    """Entropy, best key and its weight per query, and the weight received per key.

    On a GPU, `Softmax` of 16-bit or float32 numbers runs by two Triton kernels wherever the score's
    lift does; every other call, and every derivative, by tiles in plain XLA.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> x = jnp.zeros((2, 4, 1))
        >>> summary = regard.summarize(x, x, valid_lens=jnp.array([2, 0]))
        >>> summary.key_total.tolist()
        [[2.0, 2.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
        >>> summary.argmax[1].tolist()
        [-1, -1, -1, -1]

    Args:
        query, key: as in `attend`.
        pipeline: score, valid_lens, mask, bias, normalize, softcap, sink and positions, as in
            `attend`.
    """
    problem, request = prepare(query, key, None, **pipeline)
    return _summarize(problem, _settings(request), lift_policy())


def attention_map(
    query: Array,
    key: Array | Memory,
    *,
    resolution: tuple[int, int] = (512, 512),
    **pipeline: Unpack[Pipeline],
) -> Array:
    """The weights as a picture: block-averaged to at most `resolution` rows and columns.

    Where T and S fit in the resolution these are the weights themselves. Kernels run where they do
    for `summarize`.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> x = jnp.zeros((1000, 1))
        >>> regard.attention_map(x, x, mask=regard.Mask.causal(), resolution=(10, 20)).shape
        (10, 20)

    Args:
        query, key: as in `attend`.
        resolution: (rows, columns) at most.
        pipeline: score, valid_lens, mask, bias, normalize, softcap, sink and positions, as in
            `attend`.

    Returns:
        (rows, columns), with the weights' leading axes (), (B,) or (B, N).
    """
    try:
        rows, columns = map(operator.index, resolution)
    except (TypeError, ValueError):
        rows = columns = 0
    if rows <= 0 or columns <= 0:
        raise ValueError(
            "resolution must be two positive integers, (rows, columns) at most. Got "
            f"{resolution!r}. Fix: resolution=(512, 512)."
        )
    problem, request = prepare(query, key, None, **pipeline)
    axes = problem.axes
    picture = (min(rows, axes.T), min(columns, axes.S))
    return _attention_map(problem, _settings(request), lift_policy(), picture)


class Settings(NamedTuple):
    """Forced tile sizes, the device of the call, what its kernels are traced for, if any, and the
    classes of its score.
    """

    sizes: Tiling | None
    device: Device
    kernels: KernelSettings | None
    classes: tuple[type, ...]


def _settings(request: Request) -> Settings:
    kernels, classes = summary_settings(request), classes_in(request.score)
    return Settings(forced_tiling(), request.device, kernels, classes)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _by_tiles(function: Callable, problem: Problem) -> Any:
    """function(problem, smooth=False), whose derivatives are those of the smooth form: an equal
    one whose loops JAX differentiates in both modes.
    """
    return function(problem, smooth=False)


@_by_tiles.defjvp
def _(function: Callable, problem: tuple[Problem], tangents: tuple[Problem]) -> Any:
    return jax.jvp(functools.partial(function, smooth=True), problem, tangents)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _summarize(problem: Problem, settings: Settings, policy: LiftPolicy) -> Summary:
    return _by_tiles(functools.partial(_summary_of, settings=settings), problem)


def _summary_of(problem: Problem, *, settings: Settings, smooth: bool) -> Summary:
    axes = problem.axes
    if axes.empty():
        rows = jnp.zeros((axes.B, axes.N, axes.T), jnp.float32)
        keys = jnp.zeros((axes.B, axes.N, axes.S), jnp.float32)
        empty = Summary(rows, jnp.full(rows.shape, -1, jnp.int32), rows, keys)
        return jax.tree.map(axes.callers_pairs, empty)

    def start(plan: TilePlan) -> Array:
        keys = plan.key_blocks * plan.tiling.block_k
        return jnp.zeros((*plan.lead, keys), plan.wide)

    def query_block(tiles: Tiles, sweep: Callable, iq: Array, total: Array) -> Any:
        plan = tiles.plan
        rows = (*plan.lead, plan.tiling.block_q)
        real = _rows_inside(plan, iq)

        def add_tile(carry: Any, alpha: Array, ik: Array) -> Any:
            total, entropy, best, at = carry
            first_key = ik * plan.tiling.block_k
            alpha = alpha * real
            axis = len(plan.lead)
            here = lax.dynamic_slice_in_dim(total, first_key, plan.tiling.block_k, axis)
            here = here + alpha.sum(-2)  # [Z, s]
            total = lax.dynamic_update_slice_in_dim(total, here, first_key, axis)
            entropy = entropy - (alpha * jnp.log(jnp.where(alpha > 0, alpha, 1.0))).sum(-1)
            peak = alpha.max(-1)
            place = first_key + jnp.argmax(alpha, -1).astype(jnp.int32)
            return (
                total,
                entropy,
                jnp.maximum(best, peak),
                jnp.where(peak > best, place, at),
            )

        zeros = jnp.zeros(rows, plan.wide)
        total, *per_query = sweep(add_tile, (total, zeros, zeros, jnp.full(rows, -1, jnp.int32)))
        return total, tuple(per_query)

    def finish(plan: TilePlan, totals: Array, per_query: Any) -> Summary:
        entropy, best, at = (
            join(plan, a[..., None]).reshape(axes.B, axes.N, -1)[..., : axes.T] for a in per_query
        )
        received = _heads_joined(totals, axes, 1)[..., : axes.S]
        return Summary(problem.nan_where_lost(entropy), at, problem.nan_where_lost(best), received)

    def by_kernels(path: ScorePath, sink: Array | None, kernels: KernelSettings) -> Summary:
        entropy, best, at, received = summarize_by_kernels(problem, path, sink, kernels)
        return Summary(problem.nan_where_lost(entropy), at, problem.nan_where_lost(best), received)

    summary = _visit_tiles(problem, settings, start, query_block, finish, by_kernels, smooth)
    return jax.tree.map(axes.callers_pairs, summary)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _attention_map(
    problem: Problem, settings: Settings, policy: LiftPolicy, picture: tuple[int, int]
) -> Array:
    draw = functools.partial(_map_of, settings=settings, picture=picture)
    return _by_tiles(draw, problem)


def _map_of(
    problem: Problem, *, settings: Settings, picture: tuple[int, int], smooth: bool
) -> Array:
    axes, (height, width) = problem.axes, picture
    if axes.empty():
        return axes.callers_pairs(jnp.zeros((axes.B, axes.N, height, width), jnp.float32))

    def local_bins(block: int, bins: int, length: int) -> int:
        """How many bins a block of rows can touch."""
        return min(bins, block * bins // length + 2)

    def start(plan: TilePlan) -> Array:
        return jnp.zeros((*plan.lead, height, width), plan.wide)

    def average(index: Array, block: int, bins: int, length: int, dtype: Any) -> tuple:
        """The first bin a block touches, and [local bins, block] averaging weights."""
        at = index * block + jnp.arange(block, dtype=jnp.int32)
        # Bins in float64-free integer arithmetic: floor(at * bins / length), split to stay small.
        bin_of = (at // length) * bins + (at % length) * bins // length
        sizes = jnp.zeros(bins, jnp.int32).at[bins_of(length, bins)].add(1)
        local = local_bins(block, bins, length)
        first = jnp.clip(bin_of[0], 0, bins - local)
        inside = (at < length)[None, :]
        hit = (bin_of[None, :] == first + jnp.arange(local, dtype=jnp.int32)[:, None]) & inside
        share = 1.0 / sizes[jnp.clip(bin_of, 0, bins - 1)].astype(dtype)
        return first, hit.astype(dtype) * share[None, :]

    def query_block(tiles: Tiles, sweep: Callable, iq: Array, image: Array) -> Any:
        plan = tiles.plan
        top, down = average(iq, plan.tiling.block_q, height, axes.T, plan.wide)

        def add_tile(image: Array, alpha: Array, ik: Array) -> Array:
            left, across = average(ik, plan.tiling.block_k, width, axes.S, plan.wide)
            patch = jnp.einsum("rq,...qs,cs->...rc", down, alpha, across)
            at = (*(jnp.int32(0) for _ in plan.lead), top, left)
            here = lax.dynamic_slice(image, at, patch.shape)
            return lax.dynamic_update_slice(image, here + patch, at)

        return sweep(add_tile, image), ()

    def finish(plan: TilePlan, images: Array, per_query: Any) -> Array:
        return _heads_joined(images, axes, 2)

    def by_kernels(path: ScorePath, sink: Array | None, kernels: KernelSettings) -> Array:
        return summarize_by_kernels(problem, path, sink, kernels, picture)[0]

    image = _visit_tiles(problem, settings, start, query_block, finish, by_kernels, smooth)
    return axes.callers_pairs(image)


def _visit_tiles(
    problem: Problem,
    settings: Settings,
    start: Callable,
    query_block: Callable,
    finish: Callable,
    by_kernels: Callable,
    smooth: bool,
) -> Any:
    """Runs `query_block` over every block of queries, group by group.

    Args:
        query_block: (tiles, sweep, iq, carry) -> (carry, results per query); sweep(visit, carry)
            calls visit(carry, weights of a tile, ik) for the tiles of that block.
        by_kernels: (path, sink, settings of kernels) -> what `finish` returns, for a path with a
            lift where kernels run.
    """
    problem = problem.zeroed()

    def run(path: ScorePath) -> Any:
        sink = _sink_of(problem, path)
        if settings.kernels is not None and path.lift is not None and not smooth:
            return by_kernels(path, sink, settings.kernels)
        tiled = TiledPass.of(problem, path, settings.sizes, settings.device.platform)
        plan, operands, allowed = tiled.lay(make_operands(problem, path), problem.allowed)
        bounds = visited_blocks(plan, allowed)
        weights_of, sinks = _smooth_weights if smooth else _weights, None
        if sink is not None:  # per query, as stats lie: [groups, Z, rows, 1]
            length = plan.query_blocks * plan.tiling.block_q
            rows = jnp.broadcast_to(sink, (problem.axes.B, problem.axes.N, problem.axes.T))
            rows = jnp.pad(rows, ((0, 0), (0, 0), (0, length - problem.axes.T)))
            sinks = rows.reshape(plan.groups, *plan.lead, length, 1)

        def group(index: Array) -> Any:
            tiles = Tiles(plan, operands, allowed, None, index)
            constant = Tiles(plan, lax.stop_gradient(operands), allowed, None, index)

            def one(carry: Any, iq: Array) -> Any:
                _, stats = pool_query_block(constant, bounds, iq)
                stats = jax.tree.map(lambda a: a[..., None], stats)  # [Z, q, 1]
                own = None
                if sinks is not None:
                    size = plan.tiling.block_q
                    own = lax.dynamic_slice_in_dim(sinks[index], iq * size, size, -2)
                sweep = weights_of(tiles, bounds, iq, stats, own)
                return query_block(tiles, sweep, iq, carry)

            blocks = jnp.arange(plan.query_blocks, dtype=jnp.int32)
            return lax.scan(one, vary_as(start(plan), operands), blocks)

        carry, per_query = lax.map(group, jnp.arange(plan.groups, dtype=jnp.int32))
        return finish(plan, carry, per_query)

    with on_device(settings.device):
        return ScorePlan.of(problem).run(run)


def _sink_of(problem: Problem, path: ScorePath) -> Array | None:
    """[B|1, N|1, T|1], relative to scores without the constant per query that no pass adds."""
    if problem.sink is None:
        return None
    sink = sink_rows(problem.sink).astype(accumulation_dtype(problem.query.dtype))
    constant = path.omitted_constant(problem)
    return sink if constant is None else sink - constant.astype(sink.dtype)


def _weights(
    tiles: Tiles, bounds: tuple[Array, Array] | None, iq: Array, stats: Any, sink: Array | None
) -> Callable[[Callable, Any], Any]:
    """sweep(visit, carry) over the tiles of one block of queries; tiles without a visible pair are
    left out.
    """
    query = tiles.open_query(tiles.expansion, tiles.query_block(iq))
    sweep, normalize = sweeper(tiles, bounds, iq, query), tiles.plan.normalize
    share = (
        None
        if sink is None
        else with_sink(cast(Array, normalize.log_sum(stats, stats[1:])), sink)[0]
    )

    def over_tiles(visit: Callable, carry: Any) -> Any:
        def step(carry: Any, scores: Array, allowed: Array | None, ik: Array) -> Any:
            alpha = normalize.recompute(stats, scores, allowed, tiles.key_indices(ik))
            return visit(carry, alpha if share is None else alpha * share, ik)

        return sweep(step, carry)

    return over_tiles


def _smooth_weights(
    tiles: Tiles, bounds: tuple[Array, Array] | None, iq: Array, stats: Any, sink: Array | None
) -> Callable[[Callable, Any], Any]:
    """The same by loops of fixed length; the weights are functions of the scores to any order."""
    from regard.pool.derivatives import sum_over_blocks  # for derivatives only

    plan, normalize = tiles.plan, tiles.plan.normalize

    def pieces(ik: Array) -> tuple[Array, ...]:
        return normalize.pieces(stats, *tiles.scores_of_tile(iq, ik), tiles.key_indices(ik))

    def summed(ik: Array) -> tuple[Array, ...]:
        return tuple(piece.sum(-1, keepdims=True) for piece in pieces(ik))

    totals = sum_over_blocks(summed, plan.key_blocks, tiles.everything())
    factors = normalize.factors(stats, totals)  # [Z, q, 1]
    if sink is not None:
        share = with_sink(cast(Array, normalize.log_sum(stats, totals)), sink)[0]
        factors = tuple(factor * share for factor in factors)

    def over_tiles(visit: Callable, carry: Any) -> Any:
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def step(carry: Any, ik: Array) -> Any:
            parts = [p * f for p, f in zip(pieces(ik), factors, strict=True)]
            return visit(carry, functools.reduce(jnp.add, parts), ik), None

        carry = vary_as(carry, tiles.everything())
        return lax.scan(step, carry, jnp.arange(plan.key_blocks, dtype=jnp.int32))[0]

    return over_tiles


def _rows_inside(plan: TilePlan, iq: Array) -> Array:
    """1 for real queries, 0 for padded ones: [1, q, 1] against a tile's [Z, q, s]."""
    row = iq * plan.tiling.block_q + jnp.arange(plan.tiling.block_q, dtype=jnp.int32)
    return (row < plan.axes.T).astype(plan.wide).reshape(*(1 for _ in plan.lead), -1, 1)


def _heads_joined(array: Array, axes: Axes, keep: int) -> Array:
    """[groups, Z, ...] -> [B, N, ...]."""
    tail = array.shape[1:] if array.shape[0] == axes.B * axes.N else array.shape[2:]
    return array.reshape(axes.B, axes.N, *tail)
