"""The narrow features of the additive lift by a kernel: Chebyshev polynomials of tanh(x).

A program reads its numbers once, and adds up all features of them while the recurrence runs, in
registers: the polynomials T_0, T_1, ... are never stored.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from regard.pool.kernels.program_rows import lanes_of, program, run_rows
from regard.score.narrow_features import NarrowExpansion

# Rows of one program: each coefficient that it loads serves all of them. In the forward pass as
# many as leave no register spilled, compiled for sm_90: WIDE of up to MOST_FEATURES. The backward
# pass loads less for each product, and other programs run while it waits for loads.
ROWS, WIDE, MOST_FEATURES = 16, 32, 8
BACKWARD_ROWS, BACKWARD_UNROLLED = 8, 3  # one H200, [8, 4096, 64]: 53 µs, and 112 µs of 16 by 1


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
        by_term = polynomials.swapaxes(2, 3)  # what one step of the loop reads lies together
        flat = by_term.reshape(*polynomials.shape[:2], terms * rank, h)
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
        polynomials: [..., terms · rank, h].
    """

    scale: Array
    shift: Array
    polynomials: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _features(static: _Static, rows: Array, tables: _Tables, amplitude: Array | None) -> Array:
    """[B, N, T, h] -> [B, N, T, rank h]: amplitude · p_j(tanh(scale x + shift))."""
    h, rank = rows.shape[-1], static.rank
    block = WIDE if rank <= MOST_FEATURES and rows.shape[2] % WIDE == 0 else ROWS

    def kernel(*refs: Any) -> None:
        *inputs, out = refs
        at, lanes = program(rows, block)
        t = _squashed(inputs, at, lanes)

        def add(m: Any, value: Array, slope: Array, totals: list[Array]) -> list[Array]:
            found = _coefficients(static, inputs[3], m, lanes)
            return [total + one * value for total, one in zip(totals, found, strict=True)]

        totals = _sum_over_terms(static, t, add, [jnp.zeros(t.shape, t.dtype)] * rank, 1)
        for j, total in enumerate(totals):
            if amplitude is not None:
                total = total * plt.load(inputs[4].at[pl.ds(0, 1), lanes])
            where = pl.ds(j * h + lanes.start, lanes.size)
            plt.store(out.at[at, where], total.astype(static.dtype))

    inputs = [rows, *tables] + ([] if amplitude is None else [amplitude])
    result = ((*rows.shape[:3], static.rank * h), static.dtype)
    return run_rows(
        kernel, rows, block, inputs, [result], static.interpret, "regard_narrow_features"
    )[0]


def _forward(static: _Static, rows: Array, tables: _Tables, amplitude: Array | None) -> Any:
    return _features(static, rows, tables, amplitude), (rows, tables, amplitude)


def _backward(static: _Static, residuals: Any, d_features: Array) -> Any:
    rows, tables, amplitude = residuals
    (B, N, _, h), blocks = rows.shape, rows.shape[2] // BACKWARD_ROWS

    def kernel(*refs: Any) -> None:
        d_features_ref, *inputs = refs[: 5 + (amplitude is not None)]
        d_rows_ref, *more = refs[5 + (amplitude is not None) :]
        at, lanes = program(rows, BACKWARD_ROWS)
        t = _squashed(inputs, at, lanes)
        given = [
            plt.load(d_features_ref.at[at, pl.ds(j * h + lanes.start, lanes.size)])
            for j in range(static.rank)
        ]
        given = [one.astype(jnp.float32) for one in given]

        def add(m: Any, value: Array, slope: Array, sums: list[Array]) -> list[Array]:
            found = _coefficients(static, inputs[3], m, lanes)
            total = functools.reduce(
                jnp.add, (one * d for one, d in zip(found, given, strict=True))
            )
            return [of + total * by for of, by in zip(sums, (slope, value), strict=False)]

        sides = 1 if amplitude is None else 2
        zeros = [jnp.zeros(t.shape, jnp.float32)] * sides
        d_t, *pooled = _sum_over_terms(static, t, add, zeros, BACKWARD_UNROLLED)
        d_x = d_t * (1.0 - t * t) * plt.load(inputs[1].at[pl.ds(0, 1), lanes])
        if amplitude is not None:
            d_x = d_x * plt.load(inputs[4].at[pl.ds(0, 1), lanes])
            plt.store(more[0].at[pl.ds(pl.program_id(0), 1), lanes], pooled[0].sum(axis=0)[None, :])
        plt.store(d_rows_ref.at[at, lanes], d_x)

    inputs = [d_features, rows, *tables] + ([] if amplitude is None else [amplitude])
    shapes = [rows.shape] + ([] if amplitude is None else [(B, N, blocks, h)])
    results = [(shape, jnp.float32) for shape in shapes]
    d_rows, *d_amplitude = run_rows(
        kernel, rows, BACKWARD_ROWS, inputs, results, static.interpret, "regard_d_narrow_features"
    )
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


def _coefficients(static: _Static, ref: Any, m: Any, lanes: Any) -> list[Array]:
    """Of T_m in each feature, [1, lanes]."""
    return [plt.load(ref.at[pl.ds(m * static.rank + j, 1), lanes]) for j in range(static.rank)]


def _sum_over_terms(
    static: _Static, t: Array, add: Callable[..., list[Array]], zeros: list[Array], unrolled: int
) -> list[Array]:
    """add(m, T_m(t), its derivative m U_{m-1}(t), sums) for m = 0, 1, ...; a loop, so that the
    coefficients of `unrolled` m are in registers, and not of all.
    """
    one, none = jnp.ones(t.shape, t.dtype), jnp.zeros(t.shape, t.dtype)

    def step(m: Any, carry: Any) -> Any:
        (before, value), (slope_before, slope), sums = carry
        sums = add(m, value, jnp.asarray(m, jnp.float32) * slope, sums)
        values = value, 2.0 * t * value - before
        return values, (slope, 2.0 * t * slope - slope_before), sums

    def steps(i: Array, carry: Any) -> Any:
        for j in range(unrolled):
            carry = step(1 + i * unrolled + j, carry)
        return carry

    start = (one, t), (none, one), add(0, one, none, zeros)
    whole, rest = divmod(static.terms - 1, unrolled)
    carry = jax.lax.fori_loop(0, whole, steps, start)
    for m in range(static.terms - rest, static.terms):
        carry = step(m, carry)
    return carry[2]
