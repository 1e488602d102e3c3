"""Pooling for few queries by the Triton lowering, forward and backward: decoding over long keys.

Such a call takes as long as reading keys and values once. All queries that share a key head are the
rows of one tile, and the keys of a head are split over `parts` thread blocks; their results are
merged by log-sum-exp. Keys and values are read from the caller's array, [B, S, K, D], through its
strides, and only where a row may attend to them: no copy of a cache is made to transpose, pad or
zero it, and NaN in padding is never loaded. The forward pass also reads pages of a pool in place,
by their numbers in a table.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from regard.pool.kernels.forward import add_tile, nothing_pooled
from regard.pool.kernels.tanh_operands import TWO_LOG2_E
from regard.pool.kernels.tanh_tile import Float32
from regard.pool.kernels.tile import (
    LOG2_E,
    KernelPlan,
    allowed_tile,
    d_normalized,
    d_weights,
    dot,
    finish_scores,
    run_kernel,
    share_of,
)


class RowScore(Protocol):
    """Scores of all rows against a block of keys, and their backward pass. Static and hashable.

    Attributes:
        columns: numbers of a stored key.
        width: the same, rounded up to a power of two: columns of a tile.
        sums: shapes of what the backward pass sums over keys; float32.
        carried: their shapes while a program loops over its keys, `summed` at the end.
    """

    @property
    def columns(self) -> int: ...

    @property
    def width(self) -> int: ...

    def sums(self, rows: int) -> tuple[tuple[int, ...], ...]: ...

    def carried(self, rows: int, keys: int) -> tuple[tuple[int, ...], ...]: ...

    def summed(self, carried: Array) -> Array: ...

    def scores(self, named: dict[str, Any], key: Array) -> Array:
        """float32 [rows, keys] in units of log2, from keys [keys, width]."""
        ...

    def backward(
        self, named: dict[str, Any], key: Array, d_scores: Array
    ) -> tuple[Array, tuple[Array, ...]]:
        """d key, float32 [keys, width], and what these keys add to what is carried."""
        ...


@dataclass(frozen=True)
class Products:
    """scale · phi · psi + square ‖psi‖², psi = key - center in float32.

    Reads phi [rows, width] and, where there are, phi_low (what rounding took from phi), square
    [rows] and center [width]. Keys of 16 bits are multiplied as they are, and not rounded again:
    phi · center is taken off by `query_bias`.

    Attributes:
        scale: positive, in natural units.
        precision: of float32 products.
        in_tf32: whether psi is rounded to TF32 first, so that ‖psi‖² is that of what is multiplied.
    """

    columns: int
    width: int
    scale: float
    precision: Any
    in_tf32: bool = False

    def sums(self, rows: int) -> tuple[tuple[int, ...], ...]:
        return ((rows, self.width), (rows,))

    def carried(self, rows: int, keys: int) -> tuple[tuple[int, ...], ...]:
        return self.sums(rows)

    def summed(self, carried: Array) -> Array:
        return carried

    def scores(self, named: dict[str, Any], key: Array) -> Array:
        psi = self._psi(named, key)
        right = psi if key.dtype == jnp.float32 else key
        found = dot(plt.load(named["phi"]), right, (1, 1), self.precision)
        if "phi_low" in named:
            found = found + dot(plt.load(named["phi_low"]), right, (1, 1), self.precision)
        found = found * (self.scale * LOG2_E)
        if "square" in named:
            square = plt.load(named["square"]) * LOG2_E
            found = found + square[:, None] * _norms(psi)[None, :]
        return found

    def backward(
        self, named: dict[str, Any], key: Array, d_scores: Array
    ) -> tuple[Array, tuple[Array, ...]]:
        psi, phi = self._psi(named, key), plt.load(named["phi"])
        d_half = d_scores.astype(key.dtype)
        d_phi = dot(d_half, psi.astype(key.dtype), (1, 0), self.precision)
        d_key = dot(d_half.T, phi, (1, 0), self.precision) * self.scale
        if "square" not in named:
            return d_key, (d_phi, jnp.zeros((d_scores.shape[0],), jnp.float32))
        weight = (d_scores * plt.load(named["square"])[:, None]).sum(axis=0)
        d_key = d_key + (2.0 * weight)[:, None] * psi
        return d_key, (d_phi, (d_scores * _norms(psi)[None, :]).sum(axis=1))

    def _psi(self, named: dict[str, Any], key: Array) -> Array:
        psi = key.astype(jnp.float32)
        if "center" in named:
            psi = psi - plt.load(named["center"])[None, :]
        if self.in_tf32:
            bits = lax.bitcast_convert_type(psi, jnp.int32)
            psi = lax.bitcast_convert_type((bits + 0x1000) & ~0x1FFF, jnp.float32)
        return psi


def _norms(psi: Array) -> Array:
    """‖psi‖², [keys]."""
    return (psi * psi).sum(axis=1)


@dataclass(frozen=True)
class Tanh:
    """wᵀ tanh(x + y), y = key, exact to float32.

    Reads x [rows, width] in units of `TWO_LOG2_E` and vector [rows, width], w in natural units.

    Attributes:
        rows: how many there are; rows of a tile past them have scores 0.
    """

    columns: int
    width: int
    rows: int
    interpret: bool

    def sums(self, rows: int) -> tuple[tuple[int, ...], ...]:
        """d x and d w."""
        return ((1 if self.rows == 1 else rows, self.width),) * 2

    def carried(self, rows: int, keys: int) -> tuple[tuple[int, ...], ...]:
        """Of one row, a sum for each key of a block: threads exchange nothing until the end."""
        return ((keys, self.width),) * 2 if self.rows == 1 else self.sums(rows)

    def summed(self, carried: Array) -> Array:
        return carried.sum(axis=0)[None, :] if self.rows == 1 else carried

    def scores(self, named: dict[str, Any], key: Array) -> Array:
        unit, y = Float32(self.interpret), key.astype(jnp.float32)

        def add(row: Any, found: Array) -> Array:
            w = plt.load(named["vector"].at[row, :])[None, :]
            inverse = self._inverse(named, row, y)
            one = unit.fma(-2.0 * w, inverse, w).sum(axis=1) * LOG2_E  # [keys]
            return jnp.where(_is_row(row, found), one[None, :], found)

        zero = jnp.zeros((named["x"].shape[0], key.shape[0]), jnp.float32)
        return self._over_rows(add, zero)

    def backward(
        self, named: dict[str, Any], key: Array, d_scores: Array
    ) -> tuple[Array, tuple[Array, ...]]:
        unit, y = Float32(self.interpret), key.astype(jnp.float32)

        def add(row: Any, found: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d_y, d_x, d_w = found
            w = plt.load(named["vector"].at[row, :])[None, :]
            of_row = jnp.where(_is_row(row, d_scores), d_scores, 0.0).sum(axis=0)[:, None]
            inverse = self._inverse(named, row, y)  # tanh = 1 - 2 r, its slope 4 r (1 - r)
            slope = of_row * w * (4.0 * unit.take(inverse, inverse, inverse))
            value = of_row * (1.0 - 2.0 * inverse)
            if self.rows == 1:
                return slope, slope, value
            d_x = d_x + jnp.where(_is_row(row, d_x), slope.sum(axis=0)[None, :], 0.0)
            d_w = d_w + jnp.where(_is_row(row, d_w), value.sum(axis=0)[None, :], 0.0)
            return d_y + slope, d_x, d_w

        zero = jnp.zeros(named["x"].shape, jnp.float32)  # of many rows
        d_y, d_x, d_w = self._over_rows(add, (jnp.zeros(y.shape, jnp.float32), zero, zero))
        return d_y, (d_x, d_w)

    def _inverse(self, named: dict[str, Any], row: Any, y: Array) -> Array:
        """1 / (1 + e^2(x + y)), [keys, width]."""
        unit, x = Float32(self.interpret), plt.load(named["x"].at[row, :])[None, :]
        return unit.reciprocal(1.0 + unit.exp2(unit.fma(y, TWO_LOG2_E, x)))

    def _over_rows(self, add: Any, carry: Any) -> Any:
        if self.rows == 1:
            return add(jnp.int32(0), carry)
        return lax.fori_loop(0, self.rows, add, carry)


def _is_row(row: Any, tile: Array) -> Array:
    """bool [rows, 1]."""
    return (jnp.arange(tile.shape[0], dtype=jnp.int32) == row)[:, None]


# ---------------------------------------------------------------------------------------------
# Kernels. The heads of `KernelPlan` are key heads here, and its T the rows that share one.


class Merged(NamedTuple):
    """Results of all parts together.

    Attributes:
        out: [B, K, rows, width of V] float32.
        lse: log2-sum-exp2, [B, K, rows] float32; -inf for an empty row.
    """

    out: Array
    lse: Array


def decode_forward(
    static: KernelPlan, arrays: dict[str, Array], sizes: tuple[int, int], parts: int
) -> Merged:
    """Softmax pooling of few rows.

    Args:
        static: its score is a `RowScore`, T the padded rows, S the keys in whole blocks, V a power
            of two.
        arrays: by name: what the score reads, [B|1, K|1, rows, ...]; key [B, S, K, F] and value
            [B, S, K, V] as the caller has them; bounds [B|1, K|1, 2] int32, the first key that some
            row may attend to and the last + 1; and, where there are any, what `allowed_tile`,
            `finish_scores` and `keep_tile` read, keys padded to whole blocks. Where `static.page`:
            key and value [1, pages · page, K, ...], and pages [B, 1, S / page] int32, their
            numbers.
        sizes: rows that are stored, and columns of the values.
        parts: split factor: how many thread blocks share the keys of a head.
    """
    rows_stored, columns = sizes
    rows, value_columns = pl.ds(0, static.T), pl.ds(0, static.V)

    def kernel(named: dict[str, Any], out_ref: Any, stats_ref: Any) -> None:
        part = pl.program_id(1)

        def visit(block: Array, carry: Any) -> Any:
            keys = pl.ds(block * static.blocks.keys, static.blocks.keys)
            seen, allowed = _visible(static, named, rows, keys)
            at = keys if static.page is None else _in_pages(static.page, named, keys, seen)
            scores = _score_of(static).scores(named, _load(static, named, "key", at, seen))
            scores, _ = finish_scores(static, named, scores, rows, keys, flipped=False)
            scores = jnp.where(allowed, scores, -jnp.inf)
            values = functools.partial(_load, static, named, "value", at, seen, columns)
            return add_tile(static, named, carry, scores, values, rows, keys)

        carry = nothing_pooled(static.T, static.V)
        first, last = _visited(static, named)
        out, top, total = lax.fori_loop(*share_of(part, parts, first, last), visit, carry)
        is_stored = jnp.arange(static.T, dtype=jnp.int32) < rows_stored
        where = (is_stored[:, None], is_stored) if rows_stored < static.T else (None, None)
        at = _first(static.T, part)
        plt.store(out_ref.at[part, at, value_columns], out, mask=where[0])
        plt.store(stats_ref.at[jnp.int32(0), part, at], top, mask=where[1])
        plt.store(stats_ref.at[jnp.int32(1), part, at], total, mask=where[1])

    float32 = jnp.dtype(jnp.float32)
    results: list[tuple[tuple[int, ...], Any]]
    results = [((parts, rows_stored, static.V), float32), ((2, parts, rows_stored), float32)]
    name = "regard_decode"
    out, stats = run_kernel(static, kernel, arrays, parts, results, name, heads_first=True)
    top, total = stats[:, :, 0], stats[:, :, 1]  # [B, K, parts, rows]
    highest = top.max(2, keepdims=True)
    share = jnp.exp2(top - highest)
    total = (share * total).sum(2)
    some = total > 0.0
    out = (share[..., None] * out).sum(2) * static.kept_scale
    out = jnp.where(some[..., None], out / jnp.where(some, total, 1.0)[..., None], 0.0)
    lse = jnp.where(some, highest[:, :, 0] + jnp.log2(jnp.where(some, total, 1.0)), -jnp.inf)
    return Merged(out, lse)


class Cotangents(NamedTuple):
    """Of few rows.

    Attributes:
        key, value: [B, S, K, F] and [B, S, K, V], in the dtypes of the arrays.
        sums: the score's, [B, K, ...] float32.
        query_bias: [B, K, rows] float32.
        key_bias: [B, K, S] float32; None: there is none.
        bias: of every pair, [B, K, rows, S in whole blocks] float32; None: there is none.
    """

    key: Array
    value: Array
    sums: list[Array]
    query_bias: Array
    key_bias: Array | None
    bias: Array | None


def decode_backward(
    static: KernelPlan, arrays: dict[str, Array], S: int, columns: int, parts: int
) -> Cotangents:
    """Every cotangent in one pass over keys and values.

    Args:
        static, arrays, columns, parts: as in `decode_forward`; and d_rows, the cotangent of the
            output, [B, K, rows, V], lse and delta [B, K, rows] float32.
        S: keys that there are.
    """
    score = _score_of(static)
    rows = pl.ds(0, static.T)
    shapes = score.sums(static.T)
    with_key_bias, with_bias = ("key_bias" in arrays), ("bias" in arrays)

    def kernel(named: dict[str, Any], key_ref: Any, value_ref: Any, *refs: Any) -> None:
        sum_refs, query_ref, more = refs[: len(shapes)], refs[len(shapes)], refs[len(shapes) + 1 :]
        part, zero = pl.program_id(1), jnp.int32(0)
        d_out = plt.load(named["d_rows"])
        lse = plt.load(named["lse"])
        non_empty = (lse > -jnp.inf)[:, None]
        lse = jnp.where(lse > -jnp.inf, lse, 0.0)[:, None]

        def visit(block: Array, carry: Any) -> Any:
            *sums, d_query_bias = carry
            keys = pl.ds(block * static.blocks.keys, static.blocks.keys)
            seen, allowed = _visible(static, named, rows, keys)
            key = _load(static, named, "key", keys, seen)
            scores = score.scores(named, key)
            scores, slope = finish_scores(static, named, scores, rows, keys, flipped=False)
            weights = jnp.where(allowed & non_empty, jnp.exp2(scores - lse), 0.0)
            values = _load(static, named, "value", keys, seen, columns)
            kept, d_kept = d_weights(
                static, named, weights, values, d_out, rows, keys, flipped=False
            )
            d_value = dot(kept.astype(d_out.dtype).T, d_out, (1, 0), static.precision)
            d_biased = d_normalized(named, weights, d_kept, None, rows, flipped=False)
            d_scores = d_biased if slope is None else d_biased * slope
            d_key, found = score.backward(named, key, d_scores)
            _store(static, key_ref, keys, S, score.columns, d_key)
            _store(static, value_ref, keys, S, columns, d_value * static.kept_scale)
            if with_key_bias:
                plt.store(more[0].at[zero, zero, keys], d_scores.sum(axis=0))
            if with_bias:
                plt.store(more[-1].at[zero, rows, keys], d_biased)
            sums = [sum_ + one for sum_, one in zip(sums, found, strict=True)]
            return (*sums, d_query_bias + d_scores.sum(axis=1))

        carried = score.carried(static.T, static.blocks.keys)
        carry = tuple(jnp.zeros(shape, jnp.float32) for shape in (*carried, (static.T,)))
        whole = static.S // static.blocks.keys  # blocks that no row visits are zeros too
        found = lax.fori_loop(*share_of(part, parts, jnp.int32(0), jnp.int32(whole)), visit, carry)
        *sums, d_query_bias = found
        totals = (*map(score.summed, sums), d_query_bias)
        for ref, sum_ in zip((*sum_refs, query_ref), totals, strict=True):
            at = (part, zero, *(pl.ds(0, size) for size in sum_.shape))
            plt.store(ref.at[at], sum_)

    float32 = jnp.dtype(jnp.float32)
    results: list[tuple[tuple[int, ...], Any]] = [
        ((S, score.columns), arrays["key"].dtype),
        ((S, columns), arrays["value"].dtype),
        *(((parts, 1, *shape), float32) for shape in (*shapes, (static.T,))),
    ]
    results += [((1, 1, static.S), float32)] if with_key_bias else []
    results += [((1, static.T, static.S), float32)] if with_bias else []
    name = "regard_decode_backward"
    found = run_kernel(static, kernel, arrays, parts, results, name, heads_first=True)
    d_key, d_value, *found = found
    *sums, d_query_bias = (one.sum(2)[:, :, 0] for one in found[: len(shapes) + 1])
    more = found[len(shapes) + 1 :]
    return Cotangents(
        d_key,
        d_value,
        sums,
        d_query_bias,
        more[0][:, :, 0, 0] if with_key_bias else None,
        more[-1][:, :, 0] if with_bias else None,
    )


def _score_of(static: KernelPlan) -> RowScore:
    return static.score  # type: ignore[return-value]


def _visited(static: KernelPlan, named: dict[str, Any]) -> tuple[Array, Array]:
    """The first key block that some row visits, and the last + 1."""
    size = jnp.int32(static.blocks.keys)
    low, high = named["bounds"][0], named["bounds"][1]
    return lax.div(low, size), lax.div(high + size - 1, size)


def _visible(
    static: KernelPlan, named: dict[str, Any], rows: Any, keys: Any
) -> tuple[Array, Array]:
    """Keys that some row may attend to, bool [keys]; pairs that take part, what broadcasts to
    [rows, keys].
    """
    index = keys.start + jnp.arange(keys.size, dtype=jnp.int32)
    seen = (index >= named["bounds"][0]) & (index < named["bounds"][1])
    pairs = allowed_tile(named, rows, keys, flipped=False)
    if pairs is None:
        return seen, seen[None, :]
    if pairs.shape[0] == 1:
        return seen & pairs[0], seen[None, :] & pairs
    return seen & (pairs.astype(jnp.int32).max(axis=0) > 0), seen[None, :] & pairs


def _first(size: int, traced: Array) -> Any:
    """The first places of an axis that may have fewer: a load or store masks those past its end.

    JAX 0.12 refuses such a slice where its start is a number, not a traced index: 0 times one.
    """
    return pl.ds(traced * 0, size)


def _in_pages(page: int, named: dict[str, Any], keys: Any, seen: Array) -> Array:
    """Where the keys of a block lie among those of the pool, int32 [keys]."""
    index = keys.start + jnp.arange(keys.size, dtype=jnp.int32)
    entry = lax.div(index, jnp.int32(page))
    number = plt.load(named["pages"].at[entry], mask=seen, other=0)
    number = jnp.clip(number, 0, named["key"].shape[0] // page - 1)  # none: masked, but not -1
    return number * page + (index - entry * page)


def _load(
    static: KernelPlan,
    named: dict[str, Any],
    name: str,
    at: Any,
    seen: Array,
    columns: int | None = None,
) -> Array:
    """A block of keys or values, 0 where no row may attend to it and past the last column.

    Args:
        at: a slice, or where each one lies.
    """
    score = _score_of(static)
    there, width = (score.columns, score.width) if columns is None else (columns, static.V)
    mask = jnp.broadcast_to(seen[:, None], (seen.shape[0], width))
    if there < width:
        mask = mask & (jnp.arange(width, dtype=jnp.int32) < there)[None, :]
    if not isinstance(at, Array):
        return plt.load(named[name].at[at, _first(width, at.start)], mask=mask, other=0.0)
    column = jnp.arange(width, dtype=jnp.int32)  # interpret mode: two arrays of indices
    both = (jnp.broadcast_to(i, mask.shape) for i in (at[:, None], column[None, :]))
    return plt.load(named[name].at[tuple(both)], mask=mask, other=0.0)


def _store(static: KernelPlan, ref: Any, keys: Any, S: int, columns: int, tile: Array) -> None:
    """A block of [S, columns]."""
    width, mask = tile.shape[1], None
    if static.S > S:
        index = keys.start + jnp.arange(keys.size, dtype=jnp.int32)
        mask = jnp.broadcast_to((index < S)[:, None], tile.shape)
    if columns < width:
        there = jnp.broadcast_to((jnp.arange(width, dtype=jnp.int32) < columns)[None], tile.shape)
        mask = there if mask is None else mask & there
    plt.store(ref.at[keys, _first(width, keys.start)], tile.astype(ref.dtype), mask=mask)
