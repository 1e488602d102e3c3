"""The bilinear score, a(q, k) = q^T M k."""

from dataclasses import dataclass

from jax import Array

from regard.score.contract import (
    KeyPolynomial,
    Lift,
    Score,
    inner_products,
    project,
    with_heads,
)
from regard.score.dot import Dot
from regard.score.registration import register_score
from regard.shapes import require_arrays


@register_score
@dataclass(frozen=True)
class Bilinear(Score):
    """Bilinear score: a(q, k) = qᵀ M k, for queries and keys of any two widths.

    Luong et al. 2015, section 3.1 ("general"). Lift: exact (tests/score/test_every_score.py);
    the wider side is projected to the narrower one's width.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> q, k = jnp.ones((1, 2)), jnp.ones((3, 5))
        >>> regard.scores(q, k, score=regard.Bilinear(jnp.ones((2, 5)))).tolist()
        [[10.0, 10.0, 10.0]]

    Args:
        kernel: M, (Hq, Hk), or (N, Hq, Hk), one per head.
    """

    sums_over_shards = True

    kernel: Array

    def scores(self, query: Array, key: Array) -> Array:
        projected = project(query, self.kernel)  # [..., T, Hk]
        return inner_products(projected, key.astype(projected.dtype))

    def lift(self, query: Array, key: Array, *, visible: Array | None = None) -> Lift:
        query_width, key_width = self.kernel.shape[-2:]
        if query_width >= key_width:
            return Lift(project(query, self.kernel, rounded=True), key)
        return Lift(query, project(key, self.kernel.swapaxes(-1, -2), rounded=True))

    def about_keys(self, query: Array, center: Array | None) -> KeyPolynomial:
        linear = project(query, self.kernel)
        return Dot(1.0).about_keys(linear, center)

    def prepared(self, key: Array, positions: Array) -> tuple[Score, Array]:
        """Keys projected to the queries' width, where that is the narrower one."""
        query_width, key_width = self.kernel.shape[-2:]
        shared = self.kernel.ndim == 3 and self.kernel.shape[0] != key.shape[-3]
        if query_width >= key_width or shared:  # for shared key heads, N/K projections of each key
            return self, key
        projected = project(key, self.kernel.swapaxes(-1, -2), rounded=True)
        return Dot(1.0), projected.astype(key.dtype)

    def check(self, query_width: int, key_width: int) -> None:
        require_arrays(self.label(), kernel=self.kernel)
        if self.kernel.ndim not in (2, 3) or self.kernel.shape[-2:] != (query_width, key_width):
            raise ValueError(
                "Bilinear's kernel must have shape (Hq, Hk), or (N, Hq, Hk) for one per head. "
                f"Got kernel {list(self.kernel.shape)} for query width {query_width}, key width "
                f"{key_width}. Fix: a kernel of shape [{query_width}, {key_width}]."
            )

    def head_axes(self) -> dict[str, tuple[int, ...]]:
        return with_heads(2, kernel=self.kernel)
