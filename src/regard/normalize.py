"""Step 3, normalize: scores to weights, one class per weight regime, and the empty-row rule.

Each regime is defined twice: dense, as a function of whole rows (`__call__`, the definition),
and in pieces that see one tile of keys at a time (`start`, `absorb`, `finish`, `recall`,
`slope`), from which pooling builds linear-memory forward and backward passes. The rule for
a row with nothing to look at is the same everywhere: weights 0, output 0, gradient 0.

In every method `scores` has -inf where a pair is masked, and `allowed` is the bool of the same
shape, or None where nothing is masked.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from regard.placement import vary_as

Rows = tuple[int, ...]
Sweep = Callable[[Callable[[Any, Array, Array | None, Array], Any], Any], Any]


class Normalizer:
    """The contract of a weight regime.

    Blockwise pooling keeps `acc`, the weighted sum so far, and for each tile of scores computes
    `state, weights, rescale = absorb(...)`, then `acc = acc * rescale + weights @ value`; at the
    end `scale, stats = finish(...)` and the output is `acc * scale`. `stats` are per-row numbers
    from which `recall` gives the weights of any tile again and `slope` their derivative:
    d scores = slope * (d weights - delta).
    """

    uses_scores: ClassVar[bool] = True
    # Whether adding a constant to a row's scores leaves its weights as they are.
    shift_invariant: ClassVar[bool] = True
    # Whether weights stay in [0, 1] before `scale`, so that they can be rounded to 16 bits.
    bounded: ClassVar[bool] = True
    # Whether a gradient reaches the scores.
    learns: ClassVar[bool] = True
    # Where delta comes from: "output" is d_out . out, "none" is 0, "sweep" asks `balance`.
    delta: ClassVar[str] = "output"

    def __call__(self, scores: Array, allowed: Array | None) -> Array:
        """The weights, [..., T, S], of whole rows of scores: the definition."""
        raise NotImplementedError

    def prepare(self, sweep: Sweep, rows: Rows, dtype: jnp.dtype) -> Any:
        """What must be known of a row before the pass that pools; `sweep` runs over its tiles."""
        return ()

    def start(self, rows: Rows, dtype: jnp.dtype) -> Any:
        raise NotImplementedError

    def absorb(
        self, state: Any, known: Any, scores: Array, allowed: Array | None, first_key: Array
    ) -> tuple[Any, Array, Array | None]:
        raise NotImplementedError

    def finish(self, state: Any, known: Any) -> tuple[Array | None, Any]:
        raise NotImplementedError

    def recall(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        """The weights of a tile, given the stats of its whole rows.

        `stats` and `keys` (the indices of the tile's keys) broadcast against the tile, whichever
        of its axes are queries and keys.
        """
        raise NotImplementedError

    def slope(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        """The derivative's factor; softmax's is its weights."""
        return self.recall(stats, scores, allowed, keys)

    def balance(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        """For delta = "sweep": the tile whose product with d weights sums to delta."""
        raise NotImplementedError

    # Whether rows over some keys and rows over others make rows over both: `merge`.
    merges: ClassVar[bool] = False

    def merge(self, stats: Any, other: Any) -> tuple[Any, Array | None, Array | None]:
        """The stats over both sets of keys, and what each output counts there; None is all."""
        raise NotImplementedError

    def nothing(self, rows: Rows, dtype: jnp.dtype) -> Any:
        """The stats over no keys."""
        return self.start(rows, dtype)


@dataclass(frozen=True)
class Softmax(Normalizer):
    """Convex weights: exp(a) / sum exp(a) over the keys that take part.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> regard.masked_softmax(jnp.array([[0.0, 0.0, 5.0]]), valid_lens=jnp.array(2)).tolist()
        [[0.5, 0.5, 0.0]]
    """

    def __call__(self, scores: Array, allowed: Array | None) -> Array:
        top = jax.lax.stop_gradient(_finite(scores.max(-1, keepdims=True, initial=-jnp.inf)))
        return _normalized(jnp.exp(scores - top))

    def start(self, rows: Rows, dtype: jnp.dtype) -> Any:
        # Finite, so that a row without keys needs no care: exp(-inf - lowest) is 0. A select
        # per score instead costs a tenth of the whole pass on a CPU.
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
        return _inverse(state[1]), state

    def recall(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        # exp(a - top) / total, not exp(a - log-sum-exp): rounding the latter costs digits.
        top, total = stats
        return jnp.exp(scores - top) * _inverse(total)

    merges: ClassVar[bool] = True

    def merge(self, stats: Any, other: Any) -> tuple[Any, Array | None, Array | None]:
        top = jnp.maximum(stats[0], other[0])
        first, second = (part[1] * jnp.exp(part[0] - top) for part in (stats, other))
        total = first + second
        return (top, total), first * _inverse(total), second * _inverse(total)


@dataclass(frozen=True)
class Sparsemax(Normalizer):
    """Convex weights with exact zeros: max(a - tau, 0), tau such that they sum to one.

    Martins & Astudillo 2016. Dense by sorting; blockwise by Newton's iteration on tau, which
    starts at max(a) - 1, climbs and stops at the exact threshold after a few sweeps.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> q, k = jnp.array([[1.0]]), jnp.array([[0.0], [1.0], [3.0]])
        >>> regard.weights(q, k, normalize=regard.Sparsemax()).tolist()
        [[0.0, 0.0, 1.0]]
    """

    delta: ClassVar[str] = "sweep"

    def __call__(self, scores: Array, allowed: Array | None) -> Array:
        top = _finite(scores.max(-1, keepdims=True, initial=-jnp.inf))
        # tau is at least max - 1, so anything at -2 below the top weighs nothing.
        below = jnp.where(scores == -jnp.inf, -2.0, scores - jax.lax.stop_gradient(top))
        ordered = -jnp.sort(-below, axis=-1)
        rank = jnp.arange(1, scores.shape[-1] + 1, dtype=scores.dtype)
        rank = rank.reshape((1,) * (scores.ndim - 1) + rank.shape)
        excess = jnp.cumsum(ordered, axis=-1) - 1.0
        support = (ordered * rank > excess).sum(-1, keepdims=True)
        at = jnp.maximum(support - 1, 0)
        tau = jnp.take_along_axis(excess, at, -1) / jnp.maximum(support, 1).astype(scores.dtype)
        return jnp.where(scores == -jnp.inf, 0.0, jnp.maximum(below - tau, 0.0))

    def prepare(self, sweep: Sweep, rows: Rows, dtype: jnp.dtype) -> Any:
        top = _finite(
            sweep(
                lambda top, scores, allowed, first: jnp.maximum(top, scores.max(-1)),
                jnp.full(rows, -jnp.inf, dtype),
            )
        )

        def newton(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            tau, _, rounds = state

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
            new = jnp.maximum(new, tau)  # it only climbs; rounding must not make it oscillate
            return new, jnp.any(new > tau), rounds + 1

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

    def recall(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        return self._weights(stats[:2], scores)

    def slope(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        return (self._weights(stats[:2], scores) > 0).astype(scores.dtype)

    def balance(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        return self.slope(stats, scores, allowed, keys) * _inverse(stats[2])

    def _weights(self, known: Any, scores: Array) -> Array:
        top, tau = known
        return jnp.maximum(scores - top - tau, 0.0)  # -inf -> 0


@dataclass(frozen=True)
class Kernel(Normalizer):
    """Convex weights f(a) / sum f(a), f >= 0: Nadaraya–Watson with any kernel.

    A row whose f(a) are all zero is empty, and pools to 0.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> x = jnp.array([[0.0], [1.0], [2.0]])
        >>> boxcar = regard.Kernel(lambda a: (a > -1.0).astype(a.dtype))  # |q - k| < sqrt(2)
        >>> regard.weights(x, x, score=regard.Gaussian(), normalize=boxcar).round(2).tolist()[0]
        [0.5, 0.5, 0.0]

    Args:
        f: elementwise, differentiable by JAX, never negative.
    """

    f: Callable[[Array], Array]
    shift_invariant: ClassVar[bool] = False
    bounded: ClassVar[bool] = False

    def __call__(self, scores: Array, allowed: Array | None) -> Array:
        return _normalized(self._values(scores, allowed))

    def start(self, rows: Rows, dtype: jnp.dtype) -> Any:
        return jnp.zeros(rows, dtype)

    def absorb(
        self, state: Any, known: Any, scores: Array, allowed: Array | None, first_key: Array
    ) -> tuple[Any, Array, Array | None]:
        weights = self._values(scores, allowed)
        return state + weights.sum(-1), weights, None

    def finish(self, state: Any, known: Any) -> tuple[Array | None, Any]:
        return _inverse(state), state

    def recall(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        return self._values(scores, allowed) * _inverse(stats)

    def slope(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        return self._slopes(scores, allowed) * _inverse(stats)

    merges: ClassVar[bool] = True

    def merge(self, stats: Any, other: Any) -> tuple[Any, Array | None, Array | None]:
        return _merged_totals(stats, other)

    def _values(self, scores: Array, allowed: Array | None) -> Array:
        return self._masked(self.f, scores, allowed)

    def _slopes(self, scores: Array, allowed: Array | None) -> Array:
        def derivative(a: Array) -> Array:
            return jax.jvp(self.f, (a,), (jnp.ones_like(a),))[1]

        return self._masked(derivative, scores, allowed)

    @staticmethod
    def _masked(f: Callable[[Array], Array], scores: Array, allowed: Array | None) -> Array:
        """f where allowed, else 0; through `where` twice, so that no f(-inf) is ever formed."""
        if allowed is None:
            return f(scores).astype(scores.dtype)
        inside = f(jnp.where(allowed, scores, 0.0)).astype(scores.dtype)
        return jnp.where(allowed, inside, 0.0)


@dataclass(frozen=True)
class Cone(Kernel):
    """Nonnegative weights f(a), not normalized: the output lies in the values' cone.

    Example:
        >>> import jax, jax.numpy as jnp, regard
        >>> q, k = jnp.array([[1.0]]), jnp.array([[-1.0], [2.0]])
        >>> regard.weights(q, k, normalize=regard.Cone(jax.nn.relu)).tolist()
        [[0.0, 2.0]]

    Args:
        f: elementwise, differentiable by JAX, never negative.
    """

    delta: ClassVar[str] = "none"

    def __call__(self, scores: Array, allowed: Array | None) -> Array:
        return self._values(scores, allowed)

    def absorb(
        self, state: Any, known: Any, scores: Array, allowed: Array | None, first_key: Array
    ) -> tuple[Any, Array, Array | None]:
        return state, self._values(scores, allowed), None

    def finish(self, state: Any, known: Any) -> tuple[Array | None, Any]:
        return None, ()

    def recall(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        return self._values(scores, allowed)

    def slope(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        return self._slopes(scores, allowed)

    def merge(self, stats: Any, other: Any) -> tuple[Any, Array | None, Array | None]:
        return (), None, None

    def nothing(self, rows: Rows, dtype: jnp.dtype) -> Any:
        return ()


@dataclass(frozen=True)
class Hard(Normalizer):
    """Exactly one weight is 1, at the best score (the first of equals): a database look-up.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> q, k = jnp.array([[1.0]]), jnp.array([[0.0], [3.0], [3.0]])
        >>> regard.weights(q, k, normalize=regard.Hard()).tolist()
        [[0.0, 1.0, 0.0]]

    Args:
        straight_through: False: no gradient reaches the scores. True: the gradient of softmax.
    """

    straight_through: bool = False

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
        at = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        weights = self._one_hot(jnp.where(better, at, -1), scores)
        new_top = jnp.maximum(top, tile_top)
        if self.straight_through:  # softmax's total, for the backward pass
            shift = _finite(new_top)
            total = total * jnp.exp(top - shift) + jnp.exp(scores - shift[..., None]).sum(-1)
        state = new_top, jnp.where(better, at + first_key, best), total
        return state, weights, 1.0 - better.astype(scores.dtype)

    def finish(self, state: Any, known: Any) -> tuple[Array | None, Any]:
        top, best, total = state
        return None, (_finite(top), best, total)

    def recall(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        return (keys == stats[1]).astype(scores.dtype)

    def slope(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        if not self.straight_through:
            return jnp.zeros_like(scores)
        top, _, total = stats
        return Softmax().recall((top, total), scores, allowed, keys)

    def balance(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        return self.slope(stats, scores, allowed, keys)

    @staticmethod
    def _one_hot(at: Array, scores: Array) -> Array:
        keys = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
        return (keys == at[..., None]).astype(scores.dtype)


@dataclass(frozen=True)
class Uniform(Normalizer):
    """Equal weights on the keys that take part: average pooling. The scores are not computed.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> x = jnp.eye(4)
        >>> regard.weights(x[:1], x, valid_lens=jnp.array(2), normalize=regard.Uniform()).tolist()
        [[0.5, 0.5, 0.0, 0.0]]
    """

    uses_scores: ClassVar[bool] = False
    learns: ClassVar[bool] = False
    delta: ClassVar[str] = "none"

    def __call__(self, scores: Array, allowed: Array | None) -> Array:
        return _normalized(self._ones(scores, allowed))

    def start(self, rows: Rows, dtype: jnp.dtype) -> Any:
        return jnp.zeros(rows, dtype)

    def absorb(
        self, state: Any, known: Any, scores: Array, allowed: Array | None, first_key: Array
    ) -> tuple[Any, Array, Array | None]:
        ones = self._ones(scores, allowed)
        return state + ones.sum(-1), ones, None

    def finish(self, state: Any, known: Any) -> tuple[Array | None, Any]:
        return _inverse(state), state

    def recall(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        return self._ones(scores, allowed) * _inverse(stats)

    def slope(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        return jnp.zeros_like(scores)

    merges: ClassVar[bool] = True

    def merge(self, stats: Any, other: Any) -> tuple[Any, Array | None, Array | None]:
        return _merged_totals(stats, other)

    @staticmethod
    def _ones(scores: Array, allowed: Array | None) -> Array:
        if allowed is None:
            return jnp.ones_like(scores)
        return jnp.broadcast_to(allowed, scores.shape).astype(scores.dtype)


def _finite(top: Array) -> Array:
    """The row's largest score, or 0 for a row without any: -inf - (-inf) is never formed."""
    return jnp.where(top == -jnp.inf, 0.0, top)


def _inverse(total: Array) -> Array:
    """1/total, and 0 for a row whose weights sum to nothing: the empty-row rule."""
    empty = total == 0
    return jnp.where(empty, 0.0, 1.0 / jnp.where(empty, 1.0, total))


def _merged_totals(stats: Array, other: Array) -> tuple[Array, Array, Array]:
    """Of regimes whose weights are numbers over their sum."""
    total = stats + other
    return total, stats * _inverse(total), other * _inverse(total)


def _normalized(weights: Array) -> Array:
    return weights * _inverse(weights.sum(-1, keepdims=True))
