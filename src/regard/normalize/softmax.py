"""Softmax, and its limit: the one best key."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from regard.normalize.contract import Normalizer, Rows, below_top, finite, inverse, over_sum


@dataclass(frozen=True)
class Softmax(Normalizer):
    """Convex weights: alpha_s = exp(a_s) / sum_r exp(a_r) over the keys that take part.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> q, k = jnp.array([[1.0]]), jnp.array([[0.0], [0.0], [5.0]])
        >>> regard.weights(q, k, valid_lens=jnp.array(2), normalize=regard.Softmax()).tolist()
        [[0.5, 0.5, 0.0]]
    """

    merges: ClassVar[bool] = True
    in_kernels: ClassVar[bool] = True

    def __call__(self, scores: Array, allowed: Array | None) -> Array:
        return over_sum(jnp.exp(below_top(scores)))

    def start(self, rows: Rows, dtype: jnp.dtype) -> Any:
        # Finite, so that an empty row needs no care: exp(-inf - lowest) is 0. A select per score
        # instead costs a tenth of the whole pass on a CPU.
        return jnp.full(rows, jnp.finfo(dtype).min, dtype), jnp.zeros(rows, dtype)

    def absorb(
        self, state: Any, known: Any, scores: Array, allowed: Array | None, first_key: Array
    ) -> tuple[Any, Array, Array | None]:
        top, total = state
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.exp(scores - new_top[..., None])
        rescale = jnp.exp(top - new_top)
        return (new_top, total * rescale + weights.sum(-1)), weights, rescale

    def finish(self, state: Any, known: Any) -> tuple[Array | None, Any]:
        return inverse(state[1]), state

    def recompute(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        # exp(a - top) / total, not exp(a - log-sum-exp): rounding the latter costs digits. The
        # scores were computed again, so that a - top may be a rounding above 0.
        top, total = stats
        return jnp.exp(jnp.minimum(scores - top, 0.0)) * inverse(total)

    def pieces(
        self, stats: Any, scores: Array, allowed: Array | None, keys: Array
    ) -> tuple[Array, ...]:
        return (jnp.exp(scores - stats[0]),)

    def factors(self, stats: Any, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        return (inverse(totals[0]),)

    def log_sum(self, stats: Any, totals: tuple[Array, ...]) -> Array | None:
        empty = totals[0] == 0
        return jnp.where(empty, -jnp.inf, stats[0] + jnp.log(jnp.where(empty, 1.0, totals[0])))

    def merge(self, stats: Any, other: Any) -> tuple[Any, Array | None, Array | None]:
        top = jnp.maximum(stats[0], other[0])
        first, second = (part[1] * jnp.exp(part[0] - top) for part in (stats, other))
        total = first + second
        return (top, total), first * inverse(total), second * inverse(total)


@dataclass(frozen=True)
class Hard(Normalizer):
    """A database look-up: alpha_s = 1 at s = argmax_r a_r, the first of equals; 0 elsewhere.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> q, k = jnp.array([[1.0]]), jnp.array([[0.0], [3.0], [3.0]])
        >>> regard.weights(q, k, normalize=regard.Hard()).tolist()
        [[0.0, 1.0, 0.0]]

    Args:
        straight_through: False: no gradient reaches the scores. True: the gradient of softmax.
    """

    straight_through: bool = False
    in_kernels: ClassVar[bool] = True

    @property
    def learns(self) -> bool:  # type: ignore[override]
        return self.straight_through

    @property
    def delta(self) -> str:  # type: ignore[override]
        return "sweep" if self.straight_through else "none"

    def __call__(self, scores: Array, allowed: Array | None) -> Array:
        best = jnp.argmax(scores, axis=-1, keepdims=True) if scores.shape[-1] else 0
        any_key = scores.max(-1, keepdims=True, initial=-jnp.inf) > -jnp.inf
        keys = jnp.arange(scores.shape[-1]).reshape((1,) * (scores.ndim - 1) + (-1,))
        hard = ((keys == best) & any_key).astype(scores.dtype)
        if not self.straight_through:
            return hard
        soft = Softmax()(scores, allowed)
        return hard + (soft - jax.lax.stop_gradient(soft))  # x - x is exactly 0

    def start(self, rows: Rows, dtype: jnp.dtype) -> Any:
        return (
            jnp.full(rows, -jnp.inf, dtype),
            jnp.full(rows, -1, jnp.int32),
            jnp.zeros(rows, dtype),
        )

    def absorb(
        self, state: Any, known: Any, scores: Array, allowed: Array | None, first_key: Array
    ) -> tuple[Any, Array, Array | None]:
        top, best, total = state
        tile_top = scores.max(-1)
        better = tile_top > top  # strictly: the first of equals stays
        at = jax.lax.argmax(scores, scores.ndim - 1, jnp.int32)
        weights = self._one_hot(jnp.where(better, at, -1), scores)
        new_top = jnp.maximum(top, tile_top)
        if self.straight_through:  # softmax's total, for the backward pass
            shift = finite(new_top)
            total = total * jnp.exp(top - shift) + jnp.exp(scores - shift[..., None]).sum(-1)
        state = new_top, jnp.where(better, at + first_key, best), total
        return state, weights, 1.0 - better.astype(scores.dtype)

    def finish(self, state: Any, known: Any) -> tuple[Array | None, Any]:
        top, best, total = state
        return None, (finite(top), best, total)

    def recompute(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        return (keys == stats[1]).astype(scores.dtype)

    def slope(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        if not self.straight_through:
            return jnp.zeros_like(scores)
        top, _, total = stats
        return Softmax().recompute((top, total), scores, allowed, keys)

    def balance(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        return self.slope(stats, scores, allowed, keys)

    def pieces(
        self, stats: Any, scores: Array, allowed: Array | None, keys: Array
    ) -> tuple[Array, ...]:
        hard = self.recompute(stats, scores, allowed, keys)
        if not self.straight_through:
            return (hard,)
        # (soft - soft) + hard, of which the first has a derivative; the difference is exactly 0.
        soft = jnp.exp(scores - stats[0])
        return soft, jax.lax.stop_gradient(soft), hard

    def factors(self, stats: Any, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        ones = jnp.ones_like(totals[0])
        if not self.straight_through:
            return (ones,)
        share = inverse(totals[0])
        return share, -jax.lax.stop_gradient(share), ones

    @staticmethod
    def _one_hot(at: Array, scores: Array) -> Array:
        keys = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
        return (keys == at[..., None]).astype(scores.dtype)
