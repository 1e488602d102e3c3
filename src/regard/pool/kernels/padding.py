"""What kernels read: arrays padded to whole blocks, masks, and stripes of queries."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from regard.dropout import Draw, Seed, first_rows, key_words, row_words
from regard.mask import Allowed
from regard.normalize import Softmax
from regard.normalize.contract import Normalizer
from regard.placement import current_platform, vary_as
from regard.pool.blockwise import TiledPass
from regard.pool.kernels.tile import LOG2_E, KernelPlan
from regard.pool.score_plan import Results, row_delta
from regard.pool.tile import kernel_bounds, query_bounds
from regard.pool.xla_tiles import Operands
from regard.shapes import Axes

STRIPE_BYTES = 1 << 30  # d scores held at a time
# Arrays with an axis of queries; there are query_ids too.
OF_QUERIES = ("query", "x", "start", "end", "table", "bias", "query_bias") + (
    "row0",
    "row1",
    "d_out",
    "lse",
    "delta",
    "stat0",
    "stat1",
    "stat2",
)


def round_up(size: int, block: int, power: bool = False) -> int:
    """The next multiple of `block`; with `power`, the next power of two that is at least it."""
    if not power:
        return -(-size // block) * block
    return max(block, 1 << max(size - 1, 0).bit_length())


def pad(array: Array, sizes: dict[int, int], mode: str = "constant") -> Array:
    """Pads axes to sizes; nothing is copied where they fit already."""
    widths = [(0, sizes.get(axis, size) - size) for axis, size in enumerate(array.shape)]
    return jnp.pad(array, widths, mode=mode) if any(more for _, more in widths) else array


class KernelMask(NamedTuple):
    """A mask as kernels read it, padded to whole blocks.

    Attributes:
        start, end: [B|1, N|1, T] int32.
        ids: pairs of [B|1, 1, T] and [B|1, 1, S] int32: queries attend to keys of their segment.
        keys: [B|1, N|1, S] int8: keys that take part at all.
        table: [B|1, N|1, T, S] int8.
    """

    start: Array | None
    end: Array | None
    ids: tuple[tuple[Array, Array], ...]
    keys: Array | None
    table: Array | None

    def arrays(self) -> dict[str, Array]:
        """By the names that kernels read them by."""
        named = dict(start=self.start, end=self.end, keys_taken=self.keys, table=self.table)
        for i, (query_ids, key_ids) in enumerate(self.ids):
            named |= {f"query_ids{i}": query_ids, f"key_ids{i}": key_ids}
        return {name: array for name, array in named.items() if array is not None}

    def bounds(self, blocks: tuple[int, int], T: int, S: int, **more: bool) -> Array:
        """`kernel_bounds` of this mask."""
        ids = [(query_ids[:, 0], key_ids[:, 0]) for query_ids, key_ids in self.ids]
        masked = self.keys is not None or self.table is not None
        return kernel_bounds(self.start, self.end, ids, blocks, T, S, masked=masked, **more)


def pad_mask(allowed: Allowed, axes: Axes, T: int, S: int) -> KernelMask:
    """A checked mask, padded. Padded queries attend to what the last one does, and are cut off
    later; padded keys are past every end.
    """
    start, end, keys, table = allowed.start, allowed.end, None, None
    if end is None and S > axes.S:
        end = jnp.full((1, 1, 1), axes.S, jnp.int32)
    for array in allowed.arrays:
        if array.shape[3] == 1:  # whole rows: a range of all or nothing
            whole = jnp.where(array[..., 0], axes.S, 0).astype(jnp.int32)
            end = whole if end is None else jnp.minimum(end, whole)
        elif array.shape[2] == 1:
            keys = array[:, :, 0] if keys is None else keys & array[:, :, 0]
        else:
            table = array if table is None else table & array
    if table is not None:
        table = jnp.broadcast_to(table, (*table.shape[:2], axes.T, axes.S)).astype(jnp.int8)
        table = pad(table, {2: T, 3: S})

    if keys is not None:
        keys = pad(keys.astype(jnp.int8), {2: S})

    def rows(bound: Array | None) -> Array | None:
        if bound is None:
            return None
        bound = jnp.broadcast_to(bound, (*bound.shape[:2], axes.T))
        return pad(bound, {2: T}, mode="edge")

    ids = tuple(
        (
            pad(query_ids[:, None, :], {2: T}, mode="edge").astype(jnp.int32),
            pad(key_ids[:, None, :], {2: S}, mode="edge").astype(jnp.int32),
        )
        for query_ids, key_ids in allowed.segment_ids
    )
    return KernelMask(rows(start), rows(end), ids, keys, table)


def pad_results(static: KernelPlan, results: Results, dtype: Any) -> dict[str, Array]:
    """What the backward pass reads per query, by name: from (d out, out, log2-sum-exp2 or stats).

    Instead of the output, sum_v d_out · out, [B, N, T], is enough.
    """
    (d_out, _, stats), delta = results, row_delta(results, jnp.float32)
    if static.regime is not None and static.regime.delta != "output":
        delta = jnp.zeros_like(delta)
    found = dict(
        d_out=pad(d_out.astype(dtype), {2: static.T, 3: static.V}),
        delta=pad(delta, {2: static.T}),
    )
    if static.regime is not None:
        return found | {f"stat{i}": pad(stat, {2: static.T}) for i, stat in enumerate(stats)}
    more = ((0, 0), (0, 0), (0, static.T - stats.shape[2]))
    lse = jnp.pad(stats, more, constant_values=jnp.inf)  # no weight: 0 times inf is NaN
    return found | dict(lse=lse)


def with_delta(static: KernelPlan, arrays: dict[str, Array], mask: KernelMask) -> dict[str, Array]:
    """The arrays of a backward pass, with the sum that some regimes need first."""
    if static.regime is None or static.regime.delta != "sweep":
        return arrays
    from regard.pool.kernels.regimes import regime_delta  # needed by few calls

    blocks = replace(static.blocks, stages=min(static.blocks.stages, 2))
    whole = replace(static, blocks=blocks, tokens_first=False)
    bounds = mask.bounds(whole.tile, whole.T, whole.S)
    return arrays | dict(delta=regime_delta(whole, arrays | {"bounds": bounds}, static.regime))


def pad_dropout(seed: Seed, axes: Axes, T: int, S: int) -> dict[str, Array]:
    """The words of rows, [B, N, T], and of keys, [1, 1, S]; by name. Nothing without dropout."""
    if seed is None:
        return {}
    words = seed.words if isinstance(seed, Draw) else seed
    rows, keys = (jnp.arange(size, dtype=jnp.int32)[None, None] for size in (axes.T, axes.S))
    whole = axes.T
    if isinstance(seed, Draw):
        rows = rows if seed.queries is None else seed.queries[None, None]
        keys, whole = keys + seed.first_key, seed.T
    rows = first_rows(seed, axes.B, axes.N, whole) + rows
    row0, row1 = (pad(word, {2: T}) for word in row_words(words, rows))
    key0, key1 = (pad(word, {2: S}) for word in key_words(words, keys))
    return dict(row0=row0, row1=row1, key0=key0, key1=key1)


def pad_bias(bias: Array | None, T: int, S: int) -> dict[str, Array]:
    """[B|1, N|1, T|1, S|1], padded; by name. Nothing without one."""
    if bias is None:
        return {}
    sizes = {axis: size for axis, size in ((2, T), (3, S)) if bias.shape[axis] > 1}
    return dict(bias=pad(bias, sizes))


class KernelDerivatives:
    """What derivatives ask of a kernel's pass besides its backward pass: tiles in plain XLA."""

    axes: Axes
    dtype: Any
    dropout_rate: float
    softcap: float | None
    regime: Normalizer | None = None  # softmax

    def as_tiles(self, operands: Any) -> Operands:
        """The operands of an equal pass in plain XLA."""
        raise NotImplementedError

    def log_sum(self, lse: Array) -> Array:
        return lse / LOG2_E

    def smooth(
        self, operands: Any, allowed: Allowed, seed: Any, stats: Any
    ) -> tuple[Array, Array | None]:
        tiles = self.as_tiles(operands)
        lifted, width = tiles.score is None, 1
        if tiles.score is not None:
            width = tiles.score.tile_width(tiles.query[0].shape[-1])
        tiled = TiledPass(
            self.axes,
            self.regime or Softmax(),
            self.dropout_rate,
            compute=jnp.dtype(self.dtype),
            width=width,
            lifted=lifted,
            wide_features=tiles.expansion is not None,
            sizes=None,
            platform=current_platform(),
            softcap=self.softcap,
        )
        if self.regime is None:
            stats = (jnp.where(stats == -jnp.inf, 0.0, self.log_sum(stats)), None)
        return tiled.smooth(tiles, allowed, seed, stats)


def stripe_rows(axes: Axes, block: int, S: int, dtype: Any, share: int = 1) -> int:
    """Queries whose d scores fit a share of STRIPE_BYTES, in whole blocks; all where they fit."""
    per_row = axes.B * axes.N * S * jnp.dtype(dtype).itemsize
    fitting = max(block, STRIPE_BYTES // share // per_row // block * block)
    stripes = -(-axes.T // fitting)
    return round_up(-(-axes.T // stripes), block)


def run_stripes(
    static: KernelPlan,
    arrays: dict[str, Array],
    rows: int,
    stripe: Callable[[KernelPlan, dict[str, Array]], tuple[Any, Any]],
) -> tuple[Any, Any]:
    """Runs `stripe` on one stripe of queries after the other.

    `stripe` gets the arrays of its queries; `visits` are its key bounds, `bounds` its query bounds.

    Returns:
        Its first results, leaves [B, N, rows, ...], joined along the queries, and the sum of its
        second ones.
    """
    part, count = replace(static, T=rows), static.T // rows
    if count > 1:  # a stripe has other distances
        part = replace(part, bent=None)
    of_queries = {name for name in arrays if name in OF_QUERIES or name.startswith("query_ids")}

    def take(array: Array, at: Any) -> Array:
        """A stripe of [.., T, ...], or of [.., query blocks, ...]; all of [.., 1, ...]."""
        if array.shape[2] == 1 and static.T > 1:
            return array
        per = static.T // array.shape[2]
        return lax.dynamic_slice_in_dim(array, at // per, rows // per, 2)

    def distances(array: Array, at: Any) -> Array:
        """A stripe's, [.., rows + S - 1] of [.., T + S - 1]: the last queries' are first."""
        return lax.dynamic_slice_in_dim(array, static.T - rows - at, rows + static.S - 1, 2)

    def run(index: Array | int) -> tuple[Any, Any]:
        at = index * rows
        mine = {
            name: take(array, at) if name in of_queries else array for name, array in arrays.items()
        }
        if "distance_bias" in arrays:
            mine["distance_bias"] = distances(arrays["distance_bias"], at)
        mine["visits"] = take(arrays["bounds"], at)
        mine["bounds"] = query_bounds(mine["visits"], static.S // static.blocks.keys)
        return stripe(part, mine)

    if count == 1:
        return run(0)
    sums = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
        jax.eval_shape(run, jax.ShapeDtypeStruct((), jnp.int32))[1],
    )
    sums = vary_as(sums, arrays)

    def step(sums: Any, index: Array) -> tuple[Any, Any]:
        own, more = run(index)
        return jax.tree.map(jnp.add, sums, more), own

    sums, own = lax.scan(step, sums, jnp.arange(count, dtype=jnp.int32))

    def join(leaf: Array) -> Array:
        """[stripes, B, N, rows, ...] -> [B, N, T, ...]."""
        leaf = jnp.moveaxis(leaf, 0, 2)
        return leaf.reshape(*leaf.shape[:2], -1, *leaf.shape[4:])

    return jax.tree.map(join, own), sums
