"""Features of a lift, computed by a kernel where there is one.

XLA computes each sine and cosine again for every feature it stores, which takes ten times as long
as writing them. The kernel computes one sine and cosine per number and the others by angle
addition, so that it runs at the speed of memory. Narrow features have theirs in narrow_features.py.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from regard.pool.kernels import narrow_features
from regard.pool.kernels.program_rows import lanes_of, program, run_rows
from regard.score.contract import Expansion, repeat_heads
from regard.score.narrow_features import NarrowExpansion
from regard.score.sine_features import SineExpansion

ROWS = 16  # of one program: thousands of small programs keep the memory busy


def make_features(
    expansion: Expansion | None, query: Array, key: Array, dtype: Any, interpret: bool
) -> tuple[Array, Array]:
    """phi [B, N, T, R] and psi [B, K, S, R] in `dtype`; differentiable."""
    if expansion is None:
        return query.astype(dtype), key.astype(dtype)
    if not _kernel_can(expansion, query, key, dtype):
        return expansion.query(query).astype(dtype), expansion.key(key).astype(dtype)
    if isinstance(expansion, NarrowExpansion):
        return narrow_features.features(expansion, query, key, dtype, interpret)
    assert isinstance(expansion, SineExpansion)
    h, terms = key.shape[-1], expansion.amplitude.shape[-2]
    frequency, shift = (
        jnp.broadcast_to(one, (*key.shape[:2], 1, h))
        for one in (expansion.frequency, expansion.shift)
    )
    amplitude = jnp.broadcast_to(expansion.amplitude, (*query.shape[:2], terms, h))
    static = _Static(terms, jnp.dtype(dtype), interpret)
    of_query = repeat_heads(frequency, query), repeat_heads(shift, query)
    phi = _sine_features(static, query, *of_query, amplitude)
    return phi, _sine_features(static, key, frequency, -shift, None)


def _kernel_can(expansion: Expansion, query: Array, key: Array, dtype: Any) -> bool:
    """16-bit features, whose rounding is coarser than that of angle addition; and whole blocks."""
    if jnp.dtype(dtype).itemsize != 2:
        return False
    if isinstance(expansion, NarrowExpansion):
        return narrow_features.can(query, key)
    blocks = lanes_of(key.shape[-1]) >= 16 and query.shape[-2] % ROWS == key.shape[-2] % ROWS == 0
    return isinstance(expansion, SineExpansion) and blocks


class _Static(NamedTuple):
    terms: int
    dtype: Any
    interpret: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sine_features(
    static: _Static, rows: Array, frequency: Array, shift: Array, amplitude: Array | None
) -> Array:
    """[B, N, T, h] -> [B, N, T, 2Rh], with ω_r = (2r-1)·frequency, of x = rows + shift.

    With an amplitude, [B, N, R, h], the query's [a_r sin ω_r x, a_r cos ω_r x]; without one the
    key's [cos ω_r y, sin ω_r y].
    """
    terms, h = static.terms, rows.shape[-1]

    def kernel(*refs: Any) -> None:
        *inputs, features = refs
        at, lanes = program(rows, ROWS)
        angle, _ = _angle(inputs, at, lanes)
        for r, (sine, cosine) in enumerate(_odd_multiples(angle, terms)):
            first, second = cosine, sine
            if amplitude is not None:
                factor = plt.load(inputs[3].at[pl.ds(r, 1), lanes])
                first, second = factor * sine, factor * cosine
            for part, offset in ((first, r * h), (second, (terms + r) * h)):
                where = pl.ds(offset + lanes.start, lanes.size)
                plt.store(features.at[at, where], part.astype(static.dtype))

    inputs = [rows, frequency, shift] + ([] if amplitude is None else [amplitude])
    result = ((*rows.shape[:3], 2 * terms * h), static.dtype)
    return run_rows(kernel, rows, ROWS, inputs, [result], static.interpret, "regard_features")[0]


def _forward(
    static: _Static, rows: Array, frequency: Array, shift: Array, amplitude: Array | None
) -> tuple[Array, tuple[Array, Array, Array, Array | None]]:
    features = _sine_features(static, rows, frequency, shift, amplitude)
    return features, (rows, frequency, shift, amplitude)


def _backward(
    static: _Static, residuals: tuple[Array, Array, Array, Array | None], d_features: Array
) -> tuple[Array, Array, Array, Array | None]:
    """Frequency and shift are picked by the data's range: they have no gradient."""
    rows, frequency, shift, amplitude = residuals
    terms, h = static.terms, rows.shape[-1]
    blocks = rows.shape[2] // ROWS

    def kernel(*refs: Any) -> None:
        d_features_ref, inputs, more = refs[0], refs[1:4], refs[4:]
        at, lanes = program(rows, ROWS)
        angle, turn = _angle(inputs, at, lanes)
        d_angle = jnp.zeros(angle.shape, jnp.float32)
        for r, (sine, cosine) in enumerate(_odd_multiples(angle, terms)):
            first, second = (
                plt.load(d_features_ref.at[at, pl.ds(offset + lanes.start, lanes.size)])
                for offset in (r * h, (terms + r) * h)
            )
            first, second = first.astype(jnp.float32), second.astype(jnp.float32)
            if amplitude is None:
                d_angle = d_angle + (2 * r + 1) * (second * cosine - first * sine)
                continue
            factor = plt.load(more[0].at[pl.ds(r, 1), lanes])
            d_angle = d_angle + (2 * r + 1) * factor * (first * cosine - second * sine)
            d_factor = (first * sine + second * cosine).sum(axis=0)
            where = pl.ds(pl.program_id(0) * terms + r, 1)
            plt.store(more[2].at[where, lanes], d_factor[None, :])
        plt.store(more[-1 if amplitude is None else 1].at[at, lanes], d_angle * turn)

    inputs = [d_features, rows, frequency, shift] + ([] if amplitude is None else [amplitude])
    shapes = [rows.shape]
    if amplitude is not None:
        shapes.append((*rows.shape[:2], blocks * terms, h))
    results = [(shape, jnp.float32) for shape in shapes]
    d_rows, *d_factors = run_rows(
        kernel, rows, ROWS, inputs, results, static.interpret, "regard_d_features"
    )
    d_amplitude = None
    if amplitude is not None:
        d_amplitude = d_factors[0].reshape(*rows.shape[:2], blocks, terms, h).sum(2)
    zeros = jnp.zeros_like(frequency)
    return d_rows.astype(rows.dtype), zeros, zeros, d_amplitude


_sine_features.defvjp(_forward, _backward)


def _angle(inputs: Any, at: Any, lanes: Any) -> tuple[Array, Array]:
    """(x + shift) · frequency, and the frequency."""
    turn, shift = (plt.load(one.at[pl.ds(0, 1), lanes]) for one in inputs[1:3])
    return (plt.load(inputs[0].at[at, lanes]) + shift) * turn, turn


def _odd_multiples(angle: Array, terms: int) -> Iterator[tuple[Array, Array]]:
    """sin and cos of angle, 3·angle, 5·angle, ..."""
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    double_sine, double_cosine = 2 * sine * cosine, 1 - 2 * sine * sine
    for r in range(terms):
        yield sine, cosine
        if r + 1 < terms:
            sine, cosine = (
                sine * double_cosine + cosine * double_sine,
                cosine * double_cosine - sine * double_sine,
            )
