"""Sparsemax: the Euclidean projection of the scores onto the simplex."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from regard.normalize.contract import Normalizer, Rows, Sweep, below_top, finite, inverse
from regard.placement import vary_as


@dataclass(frozen=True)
class Sparsemax(Normalizer):
    """Convex weights with exact zeros: alpha_s = max(a_s - tau, 0), with tau so that they sum to 1.

    Martins & Astudillo 2016. Dense by sorting; blockwise by Newton's iteration on tau, which
    starts at max(a) - 1, grows, and stops at the exact threshold after a few sweeps.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> q, k = jnp.array([[1.0]]), jnp.array([[0.0], [1.0], [3.0]])
        >>> regard.weights(q, k, normalize=regard.Sparsemax()).tolist()
        [[0.0, 0.0, 1.0]]
    """

    delta: ClassVar[str] = "sweep"
    in_kernels: ClassVar[bool] = True

    def __call__(self, scores: Array, allowed: Array | None) -> Array:
        # tau is at least -1, so that anything at -2 has weight 0.
        below = jnp.maximum(below_top(scores), -2.0)
        ordered = -jnp.sort(-below, axis=-1)
        rank = jnp.arange(1, scores.shape[-1] + 1, dtype=scores.dtype)
        rank = rank.reshape((1,) * (scores.ndim - 1) + rank.shape)
        excess = jnp.cumsum(ordered, axis=-1) - 1.0
        support = (ordered * rank > excess).sum(-1, keepdims=True)
        at = jnp.maximum(support - 1, 0)
        tau = jnp.take_along_axis(excess, at, -1) / jnp.maximum(support, 1).astype(scores.dtype)
        return jnp.where(scores == -jnp.inf, 0.0, jnp.maximum(below - tau, 0.0))

    def prepare(self, sweep: Sweep, rows: Rows, dtype: jnp.dtype) -> Any:
        top = finite(
            sweep(
                lambda top, scores, allowed, first: jnp.maximum(top, scores.max(-1)),
                jnp.full(rows, -jnp.inf, dtype),
            )
        )

        def newton(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            tau, _, iterations = state

            def add(sums: Any, scores: Array, allowed: Array | None, first: Array) -> Any:
                below = scores - top[..., None]
                inside = below > tau[..., None]
                total, count = sums
                return (
                    total + jnp.where(inside, below, 0.0).sum(-1),
                    count + inside.sum(-1, dtype=dtype),
                )

            total, count = sweep(add, (jnp.zeros(rows, dtype), jnp.zeros(rows, dtype)))
            new = jnp.where(count > 0, (total - 1.0) / jnp.maximum(count, 1.0), tau)
            new = jnp.maximum(new, tau)  # it only grows; rounding must not make it oscillate
            # A maximum of integers, which lowers to a kernel too: `any` does not.
            return new, (new > tau).astype(jnp.int32).max() > 0, iterations + 1

        def moving(state: tuple[Array, Array, Array]) -> Array:
            return state[1] & (state[2] < 64)

        start = (jnp.full(rows, -1.0, dtype), jnp.array(True), jnp.array(0, jnp.int32))
        tau = jax.lax.while_loop(moving, newton, vary_as(start, top))[0]
        return top, tau

    def start(self, rows: Rows, dtype: jnp.dtype) -> Any:
        return jnp.zeros(rows, dtype)

    def absorb(
        self, state: Any, known: Any, scores: Array, allowed: Array | None, first_key: Array
    ) -> tuple[Any, Array, Array | None]:
        top, tau = known
        weights = self._weights((top[..., None], tau[..., None]), scores)
        return state + (weights > 0).sum(-1, dtype=state.dtype), weights, None

    def finish(self, state: Any, known: Any) -> tuple[Array | None, Any]:
        return None, (*known, state)

    def recompute(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        return self._weights(stats[:2], scores)

    def slope(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        return (self._weights(stats[:2], scores) > 0).astype(scores.dtype)

    def balance(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        return self.slope(stats, scores, allowed, keys) * inverse(stats[2])

    def pieces(
        self, stats: Any, scores: Array, allowed: Array | None, keys: Array
    ) -> tuple[Array, ...]:
        inside = self._weights(stats[:2], scores) > 0  # the support, constant nearby
        return jnp.where(inside, scores - stats[0], 0.0), inside.astype(scores.dtype)

    def factors(self, stats: Any, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        total, count = totals
        tau = (total - 1.0) / jnp.maximum(jax.lax.stop_gradient(count), 1.0)
        return jnp.ones_like(total), -tau

    def _weights(self, known: Any, scores: Array) -> Array:
        top, tau = known
        return jnp.maximum(scores - top - tau, 0.0)  # -inf -> 0
