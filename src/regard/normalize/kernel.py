"""Weights from any nonnegative function of the score: divided by their sum, or as they are."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.extend.core
import jax.numpy as jnp
from jax import Array

from regard.normalize.contract import Normalizer, Rows, inverse, over_sum


class _OverSum(Normalizer):
    """Weights that are nonnegative numbers over their sum; `_values` says which."""

    merges: ClassVar[bool] = True

    def _values(self, scores: Array, allowed: Array | None) -> Array:
        """What is divided by its sum, [..., T, S]: finite, at least 0, and 0 where masked."""
        raise NotImplementedError

    def __call__(self, scores: Array, allowed: Array | None) -> Array:
        # Divided by the largest first, so that the sum stays in range wherever f(a) does.
        values = self._values(scores, allowed)
        top = jax.lax.stop_gradient(values.max(-1, keepdims=True, initial=0))
        return over_sum(values / _unit(top))

    def start(self, rows: Rows, dtype: jnp.dtype) -> Any:
        return jnp.zeros(rows, dtype), jnp.zeros(rows, dtype)

    def absorb(
        self, state: Any, known: Any, scores: Array, allowed: Array | None, first_key: Array
    ) -> tuple[Any, Array, Array | None]:
        top, total = state
        values = self._values(scores, allowed)
        new_top = jnp.maximum(top, values.max(-1))
        weights = values / _unit(new_top)[..., None]
        rescale = _unit(top) / _unit(new_top)
        return (new_top, total * rescale + weights.sum(-1)), weights, rescale

    def finish(self, state: Any, known: Any) -> tuple[Array | None, Any]:
        return inverse(state[1]), state

    def recompute(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        top, total = stats
        return self._values(scores, allowed) / _unit(top) * inverse(total)

    def pieces(
        self, stats: Any, scores: Array, allowed: Array | None, keys: Array
    ) -> tuple[Array, ...]:
        return (self._values(scores, allowed) / _unit(stats[0]),)

    def factors(self, stats: Any, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        return (inverse(totals[0]),)

    def merge(self, stats: Any, other: Any) -> tuple[Any, Array | None, Array | None]:
        top = jnp.maximum(stats[0], other[0])
        first, second = (part[1] * (_unit(part[0]) / _unit(top)) for part in (stats, other))
        total = first + second
        return (top, total), first * inverse(total), second * inverse(total)


@dataclass(frozen=True)
class Kernel(_OverSum):
    """Convex weights: alpha_s = f(a_s) / sum_r f(a_r), f >= 0: Nadaraya–Watson with any kernel.

    A row whose f(a) are all zero is empty, and pools to 0.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> x = jnp.array([[0.0], [1.0], [2.0]])
        >>> boxcar = regard.Kernel(lambda a: (a > -1.0).astype(a.dtype))  # |q - k| < sqrt(2)
        >>> regard.weights(x, x, score=regard.Gaussian(), normalize=boxcar).round(2).tolist()[0]
        [0.5, 0.5, 0.0]

    Args:
        f: elementwise, differentiable by JAX, never negative, finite; pure, as `jax.jit` needs it.
    """

    f: Callable[[Array], Array]
    shift_invariant: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not callable(self.f):
            raise TypeError(
                f"{type(self).__name__} needs a function f of the scores. Got {self.f!r}. Fix: "
                f"{type(self).__name__}(jax.nn.relu)."
            )

    @property
    def in_kernels(self) -> bool:  # type: ignore[override]
        return _is_arithmetic(self.f)

    def slope(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        top, total = stats
        return self._slopes(scores, allowed) / _unit(top) * inverse(total)

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
    """Nonnegative weights, not normalized: alpha_s = f(a_s). The output lies in the values' cone.

    Example:
        >>> import jax, jax.numpy as jnp, regard
        >>> q, k = jnp.array([[1.0]]), jnp.array([[-1.0], [2.0]])
        >>> regard.weights(q, k, normalize=regard.Cone(jax.nn.relu)).tolist()
        [[0.0, 2.0]]

    Args:
        f: elementwise, differentiable by JAX, never negative, finite; pure, as `jax.jit` needs it.
    """

    bounded: ClassVar[bool] = False
    delta: ClassVar[str] = "none"

    def __call__(self, scores: Array, allowed: Array | None) -> Array:
        return self._values(scores, allowed)

    def start(self, rows: Rows, dtype: jnp.dtype) -> Any:
        return ()

    def absorb(
        self, state: Any, known: Any, scores: Array, allowed: Array | None, first_key: Array
    ) -> tuple[Any, Array, Array | None]:
        return state, self._values(scores, allowed), None

    def finish(self, state: Any, known: Any) -> tuple[Array | None, Any]:
        return None, ()

    def recompute(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        return self._values(scores, allowed)

    def slope(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        return self._slopes(scores, allowed)

    def pieces(
        self, stats: Any, scores: Array, allowed: Array | None, keys: Array
    ) -> tuple[Array, ...]:
        return (self._values(scores, allowed),)

    def factors(self, stats: Any, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        return (jnp.ones_like(totals[0]),)

    def merge(self, stats: Any, other: Any) -> tuple[Any, Array | None, Array | None]:
        return (), None, None


@dataclass(frozen=True)
class Uniform(_OverSum):
    """Average pooling: alpha_s = 1 / n for each of the n keys that take part, whatever the scores.

    The scores are not computed.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> x = jnp.eye(4)
        >>> regard.weights(x[:1], x, valid_lens=jnp.array(2), normalize=regard.Uniform()).tolist()
        [[0.5, 0.5, 0.0, 0.0]]
    """

    uses_scores: ClassVar[bool] = False
    learns: ClassVar[bool] = False
    delta: ClassVar[str] = "none"

    def absorb(
        self, state: Any, known: Any, scores: Array, allowed: Array | None, first_key: Array
    ) -> tuple[Any, Array, Array | None]:
        ones = self._values(scores, allowed)  # the largest is known: 1
        return (jnp.ones_like(state[0]), state[1] + ones.sum(-1)), ones, None

    def slope(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        return jnp.zeros_like(scores)

    def _values(self, scores: Array, allowed: Array | None) -> Array:
        if allowed is None:
            return jnp.ones_like(scores)
        return jnp.broadcast_to(allowed, scores.shape).astype(scores.dtype)


# What `_is_arithmetic` allows: elementwise, of floats and bools, with a lowering in Triton.
_ARITHMETIC = frozenset(
    ("abs", "add", "add_any", "clamp", "div", "exp", "exp2", "expm1", "integer_pow", "log")
    + ("log1p", "logistic", "max", "min", "mul", "neg", "rsqrt", "sign", "sqrt")
    + ("square", "sub", "tanh", "and", "not", "or", "xor", "eq", "ge", "gt", "le", "lt", "ne")
    + ("broadcast_in_dim", "convert_element_type", "select_n", "stop_gradient")
)
_CALLS = frozenset(("jit", "closed_call", "custom_jvp_call"))


@functools.lru_cache(maxsize=64)
def _is_arithmetic(f: Callable[[Array], Array]) -> bool:
    """Whether f and its derivative are plain float32 arithmetic, as kernels support it."""

    def both(a: Array) -> Any:
        return jax.jvp(f, (a,), (jnp.ones_like(a),))

    def plain(jaxpr: Any) -> bool:
        for equation in jaxpr.eqns:
            if equation.primitive.name in _CALLS:
                if not all(map(plain, jax.extend.core.jaxprs_in_params(equation.params))):
                    return False
            elif equation.primitive.name not in _ARITHMETIC:
                return False
        return True

    try:
        found = jax.make_jaxpr(both)(jax.ShapeDtypeStruct((16, 16), jnp.float32))
    except Exception:  # the caller's own function: the backend that runs it says what is wrong
        return False
    return not found.consts and plain(found.jaxpr)


def _unit(top: Array) -> Array:
    """What a row is measured in: its largest f(a), bounded so that the inverse is a normal number;
    1 for an empty row, so that 0 / 0 is never formed.
    """
    largest = 1.0 / float(jnp.finfo(top.dtype).tiny)
    return jnp.where(top == 0, 1.0, jnp.minimum(top, largest))
