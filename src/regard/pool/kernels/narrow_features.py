"""The narrow features of the additive lift by a kernel: Chebyshev polynomials of tanh(x).

A program reads its numbers once, and adds up all features of them while the recurrence runs, in
registers: the polynomials T_0, T_1, ... are never stored.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from regard.placement import kernel_result, vary_as
from regard.pool.kernels.program_rows import grid, lanes_of, program, whole
from regard.score.narrow_features import NarrowExpansion

ROWS = 32  # of one program: each coefficient that it loads serves all of them


def can(query: Array, key: Array) -> bool:
    """Whole blocks of rows and of hidden units."""
    return lanes_of(key.shape[-1]) >= 16 and query.shape[2] % ROWS == key.shape[2] % ROWS == 0


def features(
    expansion: NarrowExpansion, query: Array, key: Array, dtype: Any, interpret: bool
) -> tuple[Array, Array]:
    """phi [B, N, T, rank h] and psi [B, K, S, rank h]; differentiable."""

    def side(rows: Array, squash: tuple[Array, Array], polynomials: Array, amplitude: Any) -> Array:
        rank, terms, h = polynomials.shape[2:]
        static = _Static(rank, terms, jnp.dtype(dtype), interpret)
        flat = polynomials.reshape(*polynomials.shape[:2], rank * terms, h)
        return _features(static, rows, _Tables(*squash, flat), amplitude)

    one = expansion
    phi = side(query, one.query_squash, one.query_polynomials, one.amplitude)
    return phi, side(key, one.key_squash, one.key_polynomials, None)


class _Static(NamedTuple):
    rank: int
    terms: int
    dtype: Any
    interpret: bool


class _Tables(NamedTuple):
    """What each hidden unit took: nothing here has a gradient. [1 or B, 1 or heads, ..., h].

    Attributes:
        scale, shift: of the squash, [..., 1, h].
        polynomials: [..., rank · terms, h].
    """

    scale: Array
    shift: Array
    polynomials: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _features(static: _Static, rows: Array, tables: _Tables, amplitude: Array | None) -> Array:
    """[B, N, T, h] -> [B, N, T, rank h]: amplitude · p_j(tanh(scale x + shift))."""
    h = rows.shape[-1]

    def kernel(*refs: Any) -> None:
        *inputs, out = refs
        at, lanes = program(rows, ROWS)
        t = _squashed(inputs, at, lanes)
        totals: list[Any] = [0.0] * static.rank
        for m, (value, _) in enumerate(_recurrence(t, static.terms)):
            for j in range(static.rank):
                totals[j] = totals[j] + _coefficient(static, inputs[3], j, m, lanes) * value
        for j, total in enumerate(totals):
            if amplitude is not None:
                total = total * plt.load(inputs[4].at[pl.ds(0, 1), lanes])
            where = pl.ds(j * h + lanes.start, lanes.size)
            plt.store(out.at[at, where], total.astype(static.dtype))

    inputs = [rows, *tables] + ([] if amplitude is None else [amplitude])
    inputs = vary_as(inputs, inputs)
    shape = (*rows.shape[:3], static.rank * h)
    return pl.pallas_call(
        kernel,
        grid=grid(rows, ROWS),
        in_specs=[whole(array.shape, rows.shape[1]) for array in inputs],
        out_specs=whole(shape, rows.shape[1]),
        out_shape=kernel_result(shape, static.dtype, inputs),
        compiler_params=plt.CompilerParams(num_warps=4),
        interpret=static.interpret,
        name="regard_narrow_features",
    )(*inputs)


def _forward(static: _Static, rows: Array, tables: _Tables, amplitude: Array | None) -> Any:
    return _features(static, rows, tables, amplitude), (rows, tables, amplitude)


def _backward(static: _Static, residuals: Any, d_features: Array) -> Any:
    rows, tables, amplitude = residuals
    (B, N, _, h), blocks = rows.shape, rows.shape[2] // ROWS

    def kernel(*refs: Any) -> None:
        d_features_ref, *inputs = refs[: 5 + (amplitude is not None)]
        d_rows_ref, *more = refs[5 + (amplitude is not None) :]
        at, lanes = program(rows, ROWS)
        t = _squashed(inputs, at, lanes)
        given = [
            plt.load(d_features_ref.at[at, pl.ds(j * h + lanes.start, lanes.size)])
            for j in range(static.rank)
        ]
        given = [one.astype(jnp.float32) for one in given]
        d_t, pooled = jnp.zeros(t.shape, jnp.float32), jnp.zeros(t.shape, jnp.float32)
        for m, (value, slope) in enumerate(_recurrence(t, static.terms)):
            total: Any = 0.0
            for j in range(static.rank):
                total = total + _coefficient(static, inputs[3], j, m, lanes) * given[j]
            d_t = d_t + total * slope
            if amplitude is not None:
                pooled = pooled + total * value
        d_x = d_t * (1.0 - t * t) * plt.load(inputs[1].at[pl.ds(0, 1), lanes])
        if amplitude is not None:
            d_x = d_x * plt.load(inputs[4].at[pl.ds(0, 1), lanes])
            plt.store(more[0].at[pl.ds(pl.program_id(0), 1), lanes], pooled.sum(axis=0)[None, :])
        plt.store(d_rows_ref.at[at, lanes], d_x)

    inputs = [d_features, rows, *tables] + ([] if amplitude is None else [amplitude])
    inputs = vary_as(inputs, inputs)
    shapes = [rows.shape] + ([] if amplitude is None else [(B, N, blocks, h)])
    d_rows, *d_amplitude = pl.pallas_call(
        kernel,
        grid=grid(rows, ROWS),
        in_specs=[whole(array.shape, N) for array in inputs],
        out_specs=[whole(shape, N) for shape in shapes],
        out_shape=[kernel_result(shape, jnp.float32, inputs) for shape in shapes],
        compiler_params=plt.CompilerParams(num_warps=4),
        interpret=static.interpret,
        name="regard_d_narrow_features",
    )(*inputs)
    zeros = jax.tree.map(jnp.zeros_like, tables)
    if amplitude is None:
        return d_rows.astype(rows.dtype), zeros, None
    by_example = d_amplitude[0].sum(2, keepdims=True)
    if amplitude.shape[0] == 1:
        by_example = by_example.sum(0, keepdims=True)
    return d_rows.astype(rows.dtype), zeros, by_example.astype(amplitude.dtype)


_features.defvjp(_forward, _backward)


def _squashed(inputs: Any, at: Any, lanes: Any) -> Array:
    """tanh(scale x + shift), by an exponential: within 1e-7, which 16-bit features do not see."""
    rows, scale, shift = inputs[:3]
    one = pl.ds(0, 1)
    z = plt.load(rows.at[at, lanes]) * plt.load(scale.at[one, lanes])
    return 1.0 - 2.0 / (1.0 + jnp.exp(2.0 * (z + plt.load(shift.at[one, lanes]))))


def _coefficient(static: _Static, ref: Any, j: int, m: int, lanes: Any) -> Array:
    """Of T_m in feature j, [1, lanes]."""
    return plt.load(ref.at[pl.ds(j * static.terms + m, 1), lanes])


def _recurrence(t: Array, terms: int) -> Iterator[tuple[Any, Any]]:
    """T_m(t) and its derivative m U_{m-1}(t), for m = 0, 1, ..."""
    before, value = jnp.ones(t.shape, t.dtype), t
    slope_before, slope = jnp.zeros(t.shape, t.dtype), jnp.ones(t.shape, t.dtype)
    yield before, slope_before
    for m in range(1, terms):
        yield value, m * slope
        before, value = value, 2.0 * t * value - before
        slope_before, slope = slope, 2.0 * t * slope - slope_before
