"""The Gaussian kernel's score, a(q, k) = -|q - k|^2 / (2 width^2)."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from regard.placement import current_platform, over_shards
from regard.score.contract import (
    KeyPolynomial,
    Lift,
    RawQueries,
    Score,
    accumulation_dtype,
    as_multiplied,
    over_heads,
    repeat_heads,
    with_heads,
)
from regard.score.registration import register_score
from regard.shapes import require_one_width

SAMPLE = 64  # the mean of at least so many keys stands for the mean of all


@register_score
@dataclass(frozen=True)
class Gaussian(Score):
    """Gaussian kernel: a(q, k) = -‖q - k‖² / (2 width²), Nadaraya–Watson under softmax.

    Lift: exact up to a per-query constant (tests/score/test_gaussian.py). With c the mean of the
    visible keys (of some 64 where all are visible), expanding the square gives
    (q-c).(k-c)/width² - ‖k-c‖²/2width², plus -‖q-c‖²/2width², which is constant per query, so that
    softmax does not change. Without c, float32 would lose all digits far from the origin; the
    norms are always float32. The rounding error is that of squared distances *from c*: about
    eps·(spread of the points / width)².

    Example:
        >>> import jax.numpy as jnp, regard
        >>> x = jnp.array([[0.0], [1.0], [2.0]])
        >>> regard.scores(x[:1], x, score=regard.Gaussian(width=1.0)).tolist()
        [[-0.0, -0.5, -2.0]]

    Args:
        width: a number, a scalar array (it may be learned), or (N,), one per head.
    """

    sums_over_shards = True

    width: float | Array = 1.0

    def scores(self, query: Array, key: Array) -> Array:
        wide = accumulation_dtype(query.dtype)
        gap = query.astype(wide)[..., :, None, :] - key.astype(wide)[..., None, :, :]
        return jnp.square(gap).sum(-1) * (-0.5 * self._inverse_square(query))  # [..., T, S]

    def lift(self, query: Array, key: Array, *, visible: Array | None = None) -> Lift:
        wide = accumulation_dtype(query.dtype)
        center = center_of(key, visible)
        inverse_square = self._inverse_square(query)  # [..., 1, 1]
        # On a GPU the factor 1/width² goes to the keys, so that the forward pass can read the
        # queries in the caller's layout. In float16 it goes to the queries, since the keys could
        # overflow; and on a CPU, where the width's gradient would be a pass over the keys.
        by_keys = jnp.finfo(key.dtype).maxexp > 16 and current_platform(key) != "cpu"
        on_query, on_key = (1.0, inverse_square) if by_keys else (inverse_square, 1.0)
        key = as_multiplied(((key.astype(wide) - center) * on_key).astype(key.dtype))
        if visible is not None:
            key = jnp.where(visible[..., None], key, 0)
        centered = as_multiplied(query.astype(wide) - repeat_heads(center, query))
        # The norm of the *rounded* key: the score is then the exact Gaussian of a key that is off
        # by one rounding. With the norm of the exact key it would not be a squared distance.
        psi = key.astype(wide)
        half = -0.5 * on_query / on_key
        query_norm = _row_sums(jnp.square(centered))  # [..., T]
        raw_queries = RawQueries(query, _row_sums(psi * (psi * half - center))) if by_keys else None
        return Lift(
            centered * on_query,
            key,
            key_bias=_scaled_norms(psi, half),  # [..., S]
            query_bias=(-0.5 * inverse_square[..., 0]) * query_norm,
            raw_queries=raw_queries,
            standing="exact up to a per-query constant",
        )

    def about_keys(self, query: Array, center: Array | None) -> KeyPolynomial:
        inverse_square, away = (
            self._inverse_square(query),
            query.astype(accumulation_dtype(query.dtype)),
        )
        if center is not None:
            away = away - repeat_heads(center, away)
        half = -0.5 * inverse_square
        constant = half[..., 0] * jnp.square(away).sum(-1)
        return KeyPolynomial(away * inverse_square, half, constant)

    def check(self, query_width: int, key_width: int) -> None:
        require_one_width("Gaussian", query_width, key_width)

    def head_axes(self) -> dict[str, tuple[int, ...]]:
        return with_heads(0, width=self.width)

    def _inverse_square(self, query: Array) -> Array:
        return 1.0 / jnp.square(over_heads(self.width, query))


@jax.custom_jvp
def _scaled_norms(rows: Array, factor: Array) -> Array:
    """factor ‖row‖²: [..., S, D] and [..., 1, 1] -> [..., S], without overflow in between."""
    return _row_sums(rows * (rows * factor))


@_scaled_norms.defjvp
def _scaled_norms_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    # By the chain rule the gradient of the factor would be another pass over all rows.
    (rows, factor), (d_rows, d_factor) = primals, tangents
    norms = _scaled_norms(rows, factor)
    known = jnp.isfinite(norms) & (factor[..., 0] != 0)
    relative = (d_factor / jnp.where(factor == 0, 1, factor))[..., 0]
    by_rows = (rows * (2 * factor) * d_rows).sum(-1)
    return norms, by_rows + jnp.where(known, norms, 0) * relative


def _row_sums(array: Array) -> Array:
    """[..., D] -> [...].

    On a CPU a matrix product: a loop that XLA fuses of a sum and of the array it sums takes five
    times as long as the two apart.
    """
    if current_platform(array) != "cpu":
        return array.sum(-1)
    ones = jnp.ones(array.shape[-1:], array.dtype)
    return jnp.einsum("...d,d->...", array, ones, precision="highest")


def center_of(
    key: Array, visible: Array | None, read: Callable[[Array, int], Array] | None = None
) -> Array:
    """The center c of the visible keys, [..., S, D] -> [..., 1, D], float32 or wider; 0 for none.

    Per coordinate: their mean where nearly all have one sign; else 0, so that 16-bit keys need
    not be rounded again. Any center gives the same scores, so no gradient flows through it, and
    a sample of the keys is as good as all of them.

    Args:
        read: of keys that lie elsewhere, those of some numbers: [B, K, n] and S to [B, K, n, D].
            None: they are taken from `key`.
    """
    key, seen = _sample(key, visible, read)
    key = jax.lax.stop_gradient(key.astype(accumulation_dtype(key.dtype)))
    count = over_shards("sum", seen.sum(-1, keepdims=True))
    share = seen.astype(key.dtype) / jnp.maximum(count, 1).astype(key.dtype)
    key = jnp.where(seen[..., None], key, 0)
    mean, size = _weighted_sums(share, (key, jnp.abs(key)))
    return jnp.where(jnp.abs(mean) > 0.8 * size, mean, 0)


def _sample(
    key: Array, visible: Array | None, read: Callable[[Array, int], Array] | None
) -> tuple[Array, Array]:
    """Some of the keys, and which of them are visible: [..., n, D] and [..., n].

    All of few keys; of more, keys at equal distances, the first visible one among them.
    """
    S = key.shape[-2]
    if visible is None:
        key = key[..., :: max(1, S // SAMPLE), :]
        return key, jnp.ones(key.shape[:-1], bool)
    if S <= SAMPLE and read is None:
        return key, visible
    index = jnp.arange(S, dtype=jnp.int32).reshape((1,) * (visible.ndim - 1) + (-1,))
    first = jnp.where(visible, index, S - 1).min(-1, keepdims=True)  # [..., 1]
    last = jnp.where(visible, index, 0).max(-1, keepdims=True)
    count = min(S, SAMPLE)
    step = (last - first + count) // count  # at least 1, where any is visible
    at = jnp.clip(first + index[..., :count] * step, 0, last)  # [..., count]
    seen = jnp.take_along_axis(visible, at, axis=-1)
    if read is not None:
        return read(at, S), seen
    if key.ndim == 2:
        return key[at], seen
    # In the caller's layout, [..., S, K, D]: a pair of transposes that XLA cancels.
    rows = jnp.take_along_axis(key.swapaxes(-3, -2), at.swapaxes(-2, -1)[..., None], axis=-3)
    return rows.swapaxes(-3, -2), seen


def _weighted_sums(share: Array, sides: tuple[Array, ...]) -> tuple[Array, ...]:
    """[..., S] and each [..., S, D] -> each [..., 1, D].

    Computed once: XLA would fuse a plain sum into each of its two uses and add it up in two orders,
    and queries and keys would have two different centers (weights off by 1.6e-5 at offset 1000). On
    a CPU this is a matrix product, which uses all cores; elsewhere a sum behind a barrier.
    """
    if current_platform(share) == "cpu":
        product = functools.partial(jnp.einsum, "...s,...sd->...d", precision="highest")
        return tuple(over_shards("sum", product(share, side)[..., None, :]) for side in sides)
    sums = [(side * share[..., None]).sum(-2, keepdims=True) for side in sides]
    return jax.lax.optimization_barrier(tuple(over_shards("sum", total) for total in sums))
