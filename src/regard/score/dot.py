"""The scaled dot product, a(q, k) = scale q . k."""

import math
from dataclasses import dataclass
from typing import cast

from jax import Array

from regard.score.contract import (
    KeyPolynomial,
    Lift,
    Score,
    accumulation_dtype,
    inner_products,
    over_heads,
    repeat_heads,
    with_heads,
)
from regard.score.registration import register_score
from regard.shapes import require_one_width


@register_score
@dataclass(frozen=True)
class Dot(Score):
    """Scaled dot product: a(q, k) = scale · q.k, with scale = 1/sqrt(D) unless given.

    For q and k of independent unit-variance entries q.k has variance D, so that without the
    scale the softmax saturates as D grows (Vaswani et al. 2017, section 3.2.1).

    Lift: exact (tests/score/test_every_score.py).

    Example:
        >>> import jax.numpy as jnp, regard
        >>> q, k = jnp.ones((1, 4)), jnp.ones((2, 4))
        >>> regard.scores(q, k, score=regard.Dot()).tolist()
        [[2.0, 2.0]]
        >>> regard.scores(q, k, score=regard.Dot(scale=1.0)).tolist()
        [[4.0, 4.0]]

    Args:
        scale: a number, a scalar array (it may be learned), or (N,), one per head.
    """

    sums_over_shards = True

    scale: float | Array | None = None

    def scores(self, query: Array, key: Array) -> Array:
        return inner_products(query, key) * self._scale(query)

    def lift(self, query: Array, key: Array, *, visible: Array | None = None) -> Lift:
        # The product with the scale stays in float32: rounding it to bfloat16 would move
        # every query by up to 2^-9.
        return Lift(self.about_keys(query, None).linear, key)

    def about_keys(self, query: Array, center: Array | None) -> KeyPolynomial:
        linear = query.astype(accumulation_dtype(query.dtype)) * self._scale(query)
        if center is None:
            return KeyPolynomial(linear)
        return KeyPolynomial(linear, None, (linear * repeat_heads(center, linear)).sum(-1))

    def static_scale(self, query_width: int) -> float | None:
        if self.scale is None:
            return 1.0 / math.sqrt(max(query_width, 1))
        # Not an array, and positive: a kernel finds a row's maximum before it scales it.
        plain = isinstance(self.scale, (int, float)) and 0 < self.scale < math.inf
        return float(cast(float, self.scale)) if plain else None

    def check(self, query_width: int, key_width: int) -> None:
        require_one_width("Dot", query_width, key_width)

    def head_axes(self) -> dict[str, tuple[int, ...]]:
        return with_heads(0, scale=self.scale)

    def _scale(self, query: Array) -> Array:
        """Broadcasts against [..., T, D] and [..., T, S]."""
        scale = 1.0 / math.sqrt(max(query.shape[-1], 1)) if self.scale is None else self.scale
        return over_heads(scale, query)
