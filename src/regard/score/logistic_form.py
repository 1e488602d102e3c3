"""The additive score without a tanh per pair: tanh(x + y) = 1 - 2 / (1 + e^2x e^2y), exactly.

The exponentials are computed once per token; per pair and hidden unit there remain a product and a
division, which on a CPU take a third of the time of tanh. Blockwise pooling scores its tiles this
way on devices without a matrix unit, where the lift would not pay.
"""

from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from regard.placement import vary_as
from regard.score.contract import (
    Score,
    TileForm,
    accumulation_dtype,
    inner_products,
    matmul_precision,
    project,
    with_heads,
)
from regard.score.registration import register_score

# For larger arguments e^2x e^2y, or its inverse, would leave the range of float32.
REACH = 20.0

# An [..., T, S, h] array of at most so many numbers is stored and multiplied with w as a matrix
# product; a larger one is reduced while it is computed, and never stored.
_CACHED = 1 << 23


@register_score
@dataclass(frozen=True)
class LogisticForm(Score):
    """a = sum_h w_h (1 - 2 r_h), r = 1 / (1 + query key), for query = e^2x and key = e^2y.

    Standing: exact while abs(x) and abs(y) are at most REACH (tests/score/test_additive.py).
    """

    vector: Array

    def scores(self, query: Array, key: Array) -> Array:
        pairs = query[..., :, None, :] * key[..., None, :, :]  # [..., T, S, h]
        weighted = align(self.vector, pairs.ndim - 1)[..., None, :] / (1.0 + pairs)
        total = self.vector.sum(-1)
        total = total.reshape(total.shape + (1, 1)) if total.ndim else total
        total = total.reshape((1,) * (query.ndim - total.ndim) + total.shape)
        return total - 2.0 * weighted.sum(-1)  # summed while it is computed, never stored

    def scores_back(self, query: Array, key: Array, d_scores: Array) -> tuple[Score, Array, Array]:
        def row(query: Array) -> tuple[Array, Array]:
            inverse = 1.0 / (1.0 + query[..., None, :] * key)  # [..., S, h]
            return inverse * (1.0 - inverse), inverse  # XLA takes twice as long for r - r r

        d_x, d_y, d_inverse = back_by_rows(row, query, key, d_scores)
        w = align(self.vector, key.ndim)
        d_vector = d_scores.sum((-2, -1))[..., None] - 2.0 * d_inverse  # [..., N, h]
        scale = 2.0 * w  # d a / d x = 4 w (r - r^2), and d x = d query / 2 query
        return (
            LogisticForm(sum_to(d_vector, self.vector)),
            scale * d_x / query,
            scale * d_y / jnp.where(key == 0, 1, key),  # a slot never written holds zeros
        )

    def head_axes(self) -> dict[str, tuple[int, ...]]:
        return with_heads(1, vector=self.vector)

    def tile_width(self, query_width: int) -> int:
        return self.vector.shape[-1]


# Where keys are stored as e^2y, for any number of calls. e^2x e^2y may overflow to infinity or
# vanish, as r needs it then, but the two factors may not.
STORED_REACH = 40.0


def exponential(y: Float[Array, "... h"]) -> Float[Array, "... h"]:
    """e^2y, from which `exponent` finds y again.

    A key with any number past STORED_REACH (or NaN) is stored as y itself, marked by a negative
    first number: -1 - y for y >= 0, -1 / (1 - y) for y < 0. So a call that wants to know whether
    all keys are in range looks at one number of each.
    """
    inside = jnp.all(jnp.abs(y) <= STORED_REACH, axis=-1, keepdims=True)  # False on NaN
    first = jnp.where(y >= 0, -1.0 - y, -1.0 / (1.0 - jnp.clip(y, -1e30, 0.0)))
    plain = jnp.where(jnp.arange(y.shape[-1]) == 0, first, y)
    return jnp.where(inside, jnp.exp(2.0 * jnp.where(inside, y, 0.0)), plain)


def exponent(stored: Float[Array, "... h"]) -> Float[Array, "... h"]:
    """y of `exponential(y)`, to a rounding of its own; 0 for a slot never written, all zeros."""
    inside = stored[..., :1] >= 0
    first = jnp.where(stored <= -1, -1.0 - stored, 1.0 + 1.0 / jnp.where(stored < 0, stored, -1.0))
    plain = jnp.where(jnp.arange(stored.shape[-1]) == 0, first, stored)
    return jnp.where(inside, 0.5 * jnp.log(jnp.where(inside & (stored > 0), stored, 1.0)), plain)


@register_score
@dataclass(frozen=True)
class ExponentialKeys(Score):
    """The additive score of queries and of keys stored as `exponential(W_k k)`.

    Standing: exact (tests/score/test_prepared.py). By the logistic form where all of the data is
    in its range, else by tanh.
    """

    query_kernel: Array | None
    vector: Array

    def scores(self, query: Array, key: Array) -> Array:
        score, x, key = self.projected(query, key)
        vector = cast(ExponentialKeys, score).vector
        if not vector.shape[-1]:  # no hidden units: every score is 0
            return inner_products(x, key)
        return _stored_scores(vector, x, key)

    def tile_form(
        self, query: Array, key: Array, *, visible: Array | None = None
    ) -> TileForm | None:
        if not self.vector.shape[-1]:
            return None
        score, x, key = self.projected(query, key)
        form = LogisticForm(cast(ExponentialKeys, score).vector)
        in_range = _in_range(x, key)
        standing = "exact, by tanh(x+y) = 1 - 2/(1 + e^2x e^2y) on stored e^2y"
        return TileForm(form, jnp.exp(2.0 * _inside(x)), key, in_range, standing)

    def projected(self, query: Array, key: Array) -> tuple[Score, Array, Array]:
        wide = accumulation_dtype(query.dtype, key.dtype)
        x = query.astype(wide) if self.query_kernel is None else project(query, self.query_kernel)
        vector = self.vector.astype(wide)
        return ExponentialKeys(None, vector), x.astype(wide), key.astype(wide)

    def head_axes(self) -> dict[str, tuple[int, ...]]:
        return with_heads(2, query_kernel=self.query_kernel) | with_heads(1, vector=self.vector)

    def tile_width(self, query_width: int) -> int:
        return self.vector.shape[-1]


def _inside(x: Array) -> Array:
    """Where the form is not used, its exponentials still have a gradient, and must be finite."""
    return jnp.clip(x, -STORED_REACH, STORED_REACH)


def _in_range(x: Array, stored: Array) -> Array:
    x, stored = jax.lax.stop_gradient((x, stored))
    known = jnp.all(stored[..., :1] >= 0)  # False on NaN too
    return known & jnp.all(jnp.abs(x) <= STORED_REACH)


@jax.custom_vjp
def _stored_scores(vector: Array, x: Array, stored: Array) -> Array:
    """The scores of projected queries x and stored keys.

    The backward pass computes the pairs again: each step of a decoder would otherwise store them
    all, those of the branch that did not run too.
    """
    return jax.lax.cond(_in_range(x, stored), _by_logistic, _by_tanh, vector, x, stored)


def _by_logistic(vector: Array, x: Array, stored: Array) -> Array:
    return LogisticForm(vector).scores(jnp.exp(2.0 * _inside(x)), stored)


def _by_tanh(vector: Array, x: Array, stored: Array) -> Array:
    y = exponent(stored)
    return weigh(jnp.tanh(x[..., :, None, :] + y[..., None, :, :]), vector)


def _back_by_logistic(vector: Array, x: Array, stored: Array, d_scores: Array) -> tuple:
    query = jnp.exp(2.0 * _inside(x))
    d_form, d_query, d_stored = LogisticForm(vector).scores_back(query, stored, d_scores)
    return cast(LogisticForm, d_form).vector, 2.0 * query * d_query, d_stored


def _back_by_tanh(vector: Array, x: Array, stored: Array, d_scores: Array) -> tuple:
    return jax.vjp(_by_tanh, vector, x, stored)[1](d_scores)


def _stored_back(residuals: tuple[Array, Array, Array], d_scores: Array) -> tuple:
    _, x, stored = residuals
    back = _in_range(x, stored), _back_by_logistic, _back_by_tanh
    return jax.lax.cond(*back, *residuals, d_scores)


_stored_scores.defvjp(
    lambda *inputs: (_stored_scores(*inputs), inputs),
    _stored_back,
)


def weigh(values: Float[Array, "... T S h"], vector: Array) -> Float[Array, "... T S"]:
    """sum_h values_h w_h, with w (h,), or (N, h) for a head axis at -4."""
    known = isinstance(values.size, int)  # not where jax.export leaves a size open
    if known and values.size <= _CACHED and vector.ndim == 1:
        return jnp.matmul(values, vector, precision=matmul_precision(values.dtype))
    return jnp.sum(values * align(vector, values.ndim - 1)[..., None, :], axis=-1)


def back_by_rows(row, x: Array, y: Array, d_scores: Array) -> tuple[Array, Array, Array]:
    """The sums of an additive score's backward pass, one query at a time.

    `row(x)` gives slope and value of every key, [..., S, h] each: they stay in cache and are used
    by all three sums. Autodiff would instead reduce a stored [T, S, h] array along its middle axes,
    which takes a CPU seven times as long.

    Returns:
        sum_s ds slope, [..., T, h]; sum_t ds slope, [..., S, h]; sum_ts ds value, [..., h].
    """
    precision = matmul_precision(y.dtype)

    def step(carry: tuple[Array, Array], inputs: tuple[Array, Array]):
        d_y, d_value = carry
        x, ds = inputs  # [..., h], [..., S]
        slope, value = row(x)
        d_x = jnp.einsum("...s,...sh->...h", ds, slope, precision=precision)
        d_value = d_value + jnp.einsum("...s,...sh->...h", ds, value, precision=precision)
        return (d_y + ds[..., None] * slope, d_value), d_x

    start = vary_as((jnp.zeros_like(y), jnp.zeros_like(y[..., 0, :])), (x, y, d_scores))
    if x.shape[-2] == 1:  # one query per sequence, as in decoding
        (d_y, d_value), d_x = step(start, (x[..., 0, :], d_scores[..., 0, :]))
        return d_x[..., None, :], d_y, d_value
    rows = jnp.moveaxis(x, -2, 0), jnp.moveaxis(d_scores, -2, 0)
    (d_y, d_value), d_x = jax.lax.scan(step, start, rows)
    return jnp.moveaxis(d_x, 0, -2), d_y, d_value


def sum_to(d_vector: Float[Array, "... h"], vector: Array) -> Array:
    """Sums leading axes until the shape is the vector's: (h,) or (N, h)."""
    return d_vector.sum(range(d_vector.ndim - vector.ndim)).astype(vector.dtype)


def align(vector: Array, ndim: int) -> Array:
    """(h,) or (N, h) -> [..., N, 1, h] of rank `ndim`."""
    shape = vector.shape[:-1] + (1,) + vector.shape[-1:]
    return vector.reshape((1,) * (ndim - len(shape)) + shape)
