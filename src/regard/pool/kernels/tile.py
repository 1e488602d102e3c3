"""One tile inside a Triton kernel: scores, mask, dropout, d scores; and how such a kernel is run.

A kernel gets its arrays by name. Axes of 1 broadcast: an array without heads is read at head 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from regard.dropout import is_kept
from regard.normalize.contract import Normalizer
from regard.placement import kernel_result, vary_as
from regard.pool.kernels.block_shapes import Blocks
from regard.pool.tile import visible_pairs

NO_ENTRY = 1 << 30
LOG2_E = 1.4426950408889634
# Arrays with an axis of tokens and one of heads, which may come in either order.
OF_TOKENS = ("query", "key", "value", "d_out")


class TileScore(Protocol):
    """Scores of one tile, from arrays that lie whole in memory. Static and hashable.

    Both directions ask for tiles: the forward pass with `rows` of queries as the first axis, the
    backward pass with keys first.
    """

    def tile(self, refs: dict[str, Any], rows: Any, keys: Any, flipped: bool) -> Array:
        """float32 [rows, keys] in units of log2, flipped [keys, rows]; without key bias."""
        ...


@dataclass(frozen=True)
class FeatureScore:
    """scale · phi · psi, a chunk of features at a time.

    Attributes:
        width: of the features, whole chunks.
        chunk: features per product.
        scale: positive, in units of log2.
        precision: of float32 products.
    """

    width: int
    chunk: int
    scale: float
    precision: Any = None

    def of(self, left: Array, right: Array) -> Array:
        """The tile of features [rows, width] and [keys, width], or the other way round."""
        return dot(left, right, (1, 1), self.precision) * self.scale

    def tile(self, refs: dict[str, Any], rows: Any, keys: Any, flipped: bool) -> Array:
        left, right = ("query", rows), ("key", keys)
        if flipped:
            left, right = right, left

        def product(first: Any) -> Array:
            features = pl.ds(first, self.chunk)
            one = plt.load(refs[left[0]].at[left[1], features])
            other = plt.load(refs[right[0]].at[right[1], features])
            return dot(one, other, (1, 1), self.precision)

        if self.width == self.chunk:
            return product(0) * self.scale
        zero = jnp.zeros((left[1].size, right[1].size), jnp.float32)
        add = lambda c, sum_: sum_ + product(c * self.chunk)  # noqa: E731
        return lax.fori_loop(0, self.width // self.chunk, add, zero) * self.scale


def dot(left: Array, right: Array, contract: tuple[int, int], precision: Any) -> Array:
    return lax.dot_general(
        left,
        right,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


@dataclass(frozen=True)
class KernelPlan:
    """What is static about a kernel; sizes are padded ones.

    Attributes:
        score: makes the scores of a tile.
        softcap: see `attend`; precise_cap: to float32's precision.
        regime: how scores become weights; None is softmax.
        bent: among the numbers per distance, the last of a straight line before and the first of
            one after: entries up to the one and from the other on; 0 and NO_ENTRY for no line. None
            where it is not known.
        tokens_first: query, key, value and d_out are [B, T, N, ...], the caller's layout, and so
            are results of rank 4.
        page: tokens of a page, where keys and values are read through a page table; decode.py
            alone.
    """

    score: TileScore
    blocks: Blocks
    B: int
    N: int
    K: int
    T: int
    S: int
    V: int
    dropout_rate: float
    precision: Any
    interpret: bool
    tokens_first: bool = False
    softcap: float | None = None
    precise_cap: bool = True
    regime: Normalizer | None = None
    page: int | None = None
    bent: tuple[int, int] | None = None

    @property
    def group(self) -> int:
        return self.N // self.K

    @property
    def kept_scale(self) -> float:
        """What dropout multiplies the weights by that it keeps."""
        return 1.0 / (1.0 - self.dropout_rate)

    @property
    def tile(self) -> tuple[int, int]:
        """Queries and keys of a tile."""
        return self.blocks.queries, self.blocks.keys

    def tanh(self, values: Array) -> Array:
        """In one instruction, off by up to 2^-11 of it, where features are rounded as much; by an
        exponential, off by 2^-23, for float32.
        """
        if self.precise_cap or self.interpret:
            return 1.0 - 2.0 / (1.0 + jnp.exp2(values * (2.0 * LOG2_E)))
        return plt.approx_tanh(values)

    def over_groups(self, array: Array) -> Array:
        """[B, N, ...] -> [B, K, ...]: sums over the query heads of each key head."""
        if self.group == 1:
            return array
        return array.reshape(self.B, self.K, self.group, *array.shape[2:]).sum(2)


def allowed_tile(refs: dict[str, Any], rows: Any, keys: Any, flipped: bool) -> Array | None:
    """bool [rows, keys], or what broadcasts to it; flipped [keys, rows]. None: all of them."""
    row_axis, key_axis = (1, 0) if flipped else (0, 1)

    def along(values: Array, axis: int) -> Array:
        return jnp.expand_dims(values, 1 - axis)

    index = starts = ends = None
    if "start" in refs or "end" in refs:
        index = along(keys.start + jnp.arange(keys.size, dtype=jnp.int32), key_axis)
    if "start" in refs:
        starts = along(plt.load(refs["start"].at[rows]), row_axis)
    if "end" in refs:
        ends = along(plt.load(refs["end"].at[rows]), row_axis)
    ids = []
    for name in refs:
        if name.startswith("query_ids"):
            mine = along(plt.load(refs[name].at[rows]), row_axis)
            theirs = along(plt.load(refs[name.replace("query", "key")].at[keys]), key_axis)
            ids.append((mine, theirs))
    tables = []
    if "keys_taken" in refs:
        tables.append(along(plt.load(refs["keys_taken"].at[keys]) != 0, key_axis))
    if "table" in refs:
        table = plt.load(refs["table"].at[rows, keys]) != 0
        tables.append(table.T if flipped else table)
    return visible_pairs(index, starts, ends, ids, tables)


def keep_tile(
    static: KernelPlan, refs: dict[str, Any], rows: Any, keys: Any, flipped: bool
) -> Array | None:
    """bool: the weights that dropout keeps, the same ones as on every other backend; None without
    dropout. Kept weights count `kept_scale` times.
    """
    if "row0" not in refs:
        return None

    def words(side: str, tokens: Any, along_rows: bool) -> tuple[Array, Array]:
        first, second = (plt.load(refs[f"{side}{i}"].at[tokens]) for i in range(2))
        return _along(first, along_rows), _along(second, along_rows)

    row, key = words("row", rows, flipped), words("key", keys, not flipped)
    return is_kept(row, key, static.dropout_rate)


class Finished(NamedTuple):
    """Scores of a tile after every term, in units of log2; and the slope of the soft cap, what d
    scores are multiplied by for d of the inner product. None: 1.
    """

    scores: Array
    slope: Array | None


def finish_scores(
    static: KernelPlan, refs: dict[str, Any], scores: Array, rows: Any, keys: Any, *, flipped: bool
) -> Finished:
    """Adds the numbers per key, per query and per distance, caps, and adds the bias: no mask yet.

    Args:
        scores: in units of log2, as `TileScore.tile` makes them.
    """
    if "key_bias" in refs:
        scores = scores + _along(plt.load(refs["key_bias"].at[keys]), not flipped)
    if "query_bias" in refs:
        scores = scores + _along(plt.load(refs["query_bias"].at[rows]), flipped)
    if "distance_bias" in refs:
        scores = _add_by_distance(static, refs["distance_bias"], scores, rows, keys, flipped)
    slope = None
    if static.softcap is not None:
        cap = static.softcap * LOG2_E
        part = static.tanh(scores * (1.0 / cap))
        scores, slope = part * cap, 1.0 - part * part
    if "bias" in refs:
        scores = scores + _bias_tile(refs["bias"], rows, keys, flipped) * LOG2_E
    return Finished(scores, slope)


class AmongDistances(NamedTuple):
    """Where a tile lies among the numbers per distance.

    Attributes:
        first: entry of its first query and first key.
        before, after: whether it lies on the straight line of the first or of the last numbers.
        start: the entry that its line starts at.
    """

    first: Array
    before: Array
    after: Array
    start: Array

    @classmethod
    def of(cls, static: KernelPlan, rows: Any, keys: Any) -> "AmongDistances":
        low, high = cast(Any, static.bent)
        first = keys.start - rows.start + (static.T - 1)
        before = first + (keys.size - 1) <= low
        start = jnp.where(before, jnp.int32(max(low - 1, 0)), jnp.int32(high))
        return cls(first, before, first - (rows.size - 1) >= high, start)

    def line_sums(self, d_scores: Array) -> list[Array]:
        """d of the number that its line starts at and of the line's slope, per query of a tile
        [rows, keys]: for the line before, and for the one after; zeros where it is not on it.
        """
        row, key = (jnp.arange(size, dtype=jnp.int32) for size in d_scores.shape)
        total = d_scores.sum(axis=1)
        along = (d_scores * key.astype(jnp.float32)[None, :]).sum(axis=1)
        along = along + total * (self.first - self.start - row).astype(jnp.float32)
        sides = self.before, self.after
        return [jnp.where(side, part, 0.0) for side in sides for part in (total, along)]


def _add_by_distance(
    static: KernelPlan, numbers: Any, scores: Array, rows: Any, keys: Any, flipped: bool
) -> Array:
    """Scores plus the numbers per distance, of [T + S - 1], entry s - t + T - 1.

    A gather takes as long as a matrix product of the tile; most tiles are on a straight line.
    """
    row, key = (jnp.arange(size, dtype=jnp.int32) for size in (rows.size, keys.size))
    first = keys.start - rows.start + (static.T - 1)

    def gather(scores: Array) -> Array:
        index = _along(first + key, not flipped) - _along(row, flipped)
        return scores + plt.load(numbers.at[index])

    if static.bent is None:
        return gather(scores)
    place = AmongDistances.of(static, rows, keys)

    def line(scores: Array) -> Array:
        number = numbers[place.start]
        slope = numbers[place.start + 1] - number
        of_key = number + (place.first - place.start + key).astype(jnp.float32) * slope
        of_row = row.astype(jnp.float32) * slope
        return scores + _along(of_key, not flipped) - _along(of_row, flipped)

    return lax.cond(place.before | place.after, line, gather, scores)


def _bias_tile(bias: Any, rows: Any, keys: Any, flipped: bool) -> Array:
    """float32, what broadcasts to the tile: of [T|1, S|1]."""
    over_rows, over_keys = (size == 1 for size in bias.shape)
    at: tuple[Any, Any] = (pl.ds(0, 1) if over_rows else rows, pl.ds(0, 1) if over_keys else keys)
    if over_rows and not over_keys:
        return _along(plt.load(bias.at[jnp.int32(0), keys]).astype(jnp.float32), not flipped)
    if over_keys and not over_rows:
        return _along(plt.load(bias.at[rows, jnp.int32(0)]).astype(jnp.float32), flipped)
    tile = plt.load(bias.at[at]).astype(jnp.float32)
    return tile.T if flipped else tile


# The backward pass through one tile, in three steps: the kernel chooses the order of products and
# loads, and Triton's compiler keeps it. `flipped` tiles are [keys, rows], others [rows, keys]; all
# are float32.


class Recomputed(NamedTuple):
    """The weights of a tile, the factor of their derivative (the same for softmax), and the slope
    of the soft cap (None: 1).
    """

    weights: Array
    factor: Array
    slope: Array | None


def recomputed_weights(
    static: KernelPlan,
    refs: dict[str, Any],
    scores: Array,
    rows: Any,
    keys: Any,
    *,
    flipped: bool,
    masked: bool = True,
) -> Recomputed:
    """2^(scores - lse), or by the regime's stats; 0 for pairs that take no part.

    Args:
        scores: as `TileScore.tile` makes them.
        masked: False where every pair of the tile takes part.
    """
    scores, cap_slope = finish_scores(static, refs, scores, rows, keys, flipped=flipped)
    allowed = allowed_tile(refs, rows, keys, flipped) if masked else None
    if static.regime is not None:
        natural, allowed = _natural(scores, allowed)
        names = sorted(name for name in refs if name.startswith("stat"))
        stats = tuple(_along(plt.load(refs[name].at[rows]), flipped) for name in names)
        index = _along(keys.start + jnp.arange(keys.size, dtype=jnp.int32), not flipped)
        tile = (stats, natural, allowed, index)
        return Recomputed(static.regime.recompute(*tile), static.regime.slope(*tile), cap_slope)
    lse = plt.load(refs["lse"].at[rows])
    if allowed is None:
        weights = jnp.exp2(scores - _along(lse, flipped))
        return Recomputed(weights, weights, cap_slope)
    non_empty = lse > -jnp.inf  # an empty row has no weights
    weights = jnp.exp2(scores - _along(jnp.where(non_empty, lse, 0.0), flipped))
    weights = jnp.where(allowed & _along(non_empty, flipped), weights, 0.0)
    return Recomputed(weights, weights, cap_slope)


def visible_scores(
    static: KernelPlan, refs: dict[str, Any], scores: Array, rows: Any, keys: Any, *, flipped: bool
) -> tuple[Array, Array | None]:
    """A tile's scores in natural units, every term added, -inf where masked; and which are not."""
    scores, _ = finish_scores(static, refs, scores, rows, keys, flipped=flipped)
    return _natural(scores, allowed_tile(refs, rows, keys, flipped))


def _natural(scores: Array, allowed: Array | None) -> tuple[Array, Array | None]:
    scores = scores * (1.0 / LOG2_E)
    if allowed is None:
        return scores, None
    allowed = jnp.broadcast_to(allowed, scores.shape)
    return jnp.where(allowed, scores, -jnp.inf), allowed


def d_weights(
    static: KernelPlan,
    refs: dict[str, Any],
    weights: Array,
    values: Array,
    d_out: Array,
    rows: Any,
    keys: Any,
    *,
    flipped: bool,
) -> tuple[Array, Array]:
    """The weights that values were multiplied by, over `kept_scale`, and d of the weights before
    dropout.

    Args:
        values: [keys, V].
        d_out: [rows, V].
    """
    left, right = (values, d_out) if flipped else (d_out, values)
    found = dot(left, right, (1, 1), static.precision)
    keep = keep_tile(static, refs, rows, keys, flipped)
    if keep is None:
        return weights, found
    return jnp.where(keep, weights, 0.0), jnp.where(keep, found * static.kept_scale, 0.0)


def d_normalized(
    refs: dict[str, Any],
    factor: Array,
    d_weights: Array,
    slope: Array | None,
    rows: Any,
    *,
    flipped: bool,
) -> Array:
    """d scores before a soft cap, in natural units: slope · factor · (d weights - delta).

    Args:
        factor, slope: of `Recomputed`.
    """
    found = factor * (d_weights - _along(plt.load(refs["delta"].at[rows]), flipped))
    return found if slope is None else found * slope


def _along(values: Array, second: bool) -> Array:
    """Along the second axis of a tile, or along the first."""
    return values[None, :] if second else values[:, None]


def run_kernel(
    static: KernelPlan,
    kernel: Callable,
    arrays: dict[str, Array],
    programs: int,
    results: Sequence[tuple[tuple[int, ...], Any]],
    name: str,
    heads_first: bool = False,
) -> list[Array]:
    """Runs `kernel(arrays by name, *result refs)` for every head and example.

    Args:
        programs: per head; numbered by the grid's first axis, or with `heads_first` its second, so
            that concurrent thread blocks read neighboring heads of the same tokens.
        results: shape and dtype of each result for one head; they come back [B, N, *shape], or,
            with `tokens_first`, those of rank 4 with their second and third axis swapped.
    """
    arrays = vary_as(arrays, arrays)
    names = list(arrays)

    def by_name(*refs: Any) -> None:
        kernel(dict(zip(names, refs, strict=False)), *refs[len(names) :])

    def swapped(shape: tuple[int, ...]) -> bool:
        return static.tokens_first and len(shape) == 2

    def whole(shape: tuple[int, ...]) -> tuple[int, ...]:
        return heads_second((static.B, static.N, *shape), swapped(shape))

    def placed(spec: pl.BlockSpec) -> pl.BlockSpec:
        of_block = spec.index_map
        if not heads_first or of_block is None:
            return spec
        return pl.BlockSpec(spec.block_shape, lambda head, block, b: of_block(block, head, b))

    return pl.pallas_call(
        by_name,
        grid=(static.N, programs, static.B) if heads_first else (programs, static.N, static.B),
        in_specs=[
            placed(read_spec(array, static, static.tokens_first and name in OF_TOKENS))
            for name, array in arrays.items()
        ],
        out_specs=[placed(write_spec(*shape, tokens_first=swapped(shape))) for shape, _ in results],
        out_shape=[kernel_result(whole(shape), dtype, arrays) for shape, dtype in results],
        compiler_params=plt.CompilerParams(
            num_warps=static.blocks.warps, num_stages=static.blocks.stages
        ),
        interpret=static.interpret,
        name=name,
    )(*arrays.values())


def read_spec(array: Array, static: KernelPlan, tokens_first: bool = False) -> pl.BlockSpec:
    """One example and head of an array whole, for grids (block, head, example).

    [B|1, N|K|1, ...] is read as [...]; tokens first, [B, T, N|K, ...] is; anything of rank 1 as it
    is.
    """
    if array.ndim == 1:
        return pl.BlockSpec(array.shape, lambda *grid: (0,))
    examples, heads, *shape = heads_second(array.shape, tokens_first)

    def index(block: Array, head: Array, example: Array) -> tuple[Any, ...]:
        at = 0 if heads == 1 else (head if heads == static.N else head // static.group)
        first = (0 if examples == 1 else example, at)
        return heads_second((*first, *(0,) * len(shape)), tokens_first)

    return pl.BlockSpec(heads_second((None, None, *shape), tokens_first), index)


def write_spec(*shape: int, tokens_first: bool = False) -> pl.BlockSpec:
    """One example and head of a result whole: [B, N, *shape] is written as [*shape]."""

    def index(block: Array, head: Array, example: Array) -> tuple[Any, ...]:
        return heads_second((example, head, *(0,) * len(shape)), tokens_first)

    return pl.BlockSpec(heads_second((None, None, *shape), tokens_first), index)


def heads_second(axes: tuple[Any, ...], tokens_first: bool) -> tuple[Any, ...]:
    """Swaps the second and third where tokens come first; its own inverse."""
    return (axes[0], axes[2], axes[1], *axes[3:]) if tokens_first else tuple(axes)


def share_of(part: Array, parts: int, low: Array, high: Array) -> tuple[Array, Array]:
    """Where one of `parts` equal shares of the range from low to high begins and ends."""
    size = high - low
    first, last = (low + lax.div(size * (part + i), jnp.int32(parts)) for i in range(2))
    return first, last
