"""What a weight regime is: the contract, and the arithmetic that every regime shares.

Each regime is defined twice: dense, as a function of whole rows (`__call__`, the definition),
and in pieces that see one tile of keys at a time (`start`, `absorb`, `finish`, `recompute`,
`slope`), from which pooling builds linear-memory forward and backward passes. The rule for an
empty row is the same everywhere: weights 0, output 0, gradient 0.

In every method `scores` is -inf where a pair is masked, and `allowed` is the bool of the same
shape, or None where nothing is masked.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

Rows = tuple[int, ...]
Sweep = Callable[[Callable[[Any, Array, Array | None, Array], Any], Any], Any]


class Normalizer:
    """The contract of a weight regime: how a row of scores becomes a row of weights.

    Dense pooling calls the regime on whole rows. Blockwise pooling keeps `acc`, the weighted sum so
    far. For each tile of scores it computes `state, weights, rescale = absorb(...)`, then
    `acc = acc * rescale + weights @ value`; at the end `scale, stats = finish(...)`, and the output
    is `acc * scale`. `stats` are numbers per row from which `recompute` gives the weights of any
    tile again, and `slope` their derivative: d scores = slope * (d weights - delta).

    Example:
        >>> import jax.numpy as jnp, regard
        >>> softmax = regard.Softmax()
        >>> softmax(jnp.array([[0.0, 0.0, -jnp.inf]]), jnp.array([[True, True, False]])).tolist()
        [[0.5, 0.5, 0.0]]

    Attributes:
        uses_scores: whether the weights depend on the scores at all.
        shift_invariant: whether adding a constant to a row's scores leaves its weights unchanged.
        bounded: whether the weights of `absorb` stay in [0, 1], so that they fit 16-bit numbers.
        learns: whether a gradient reaches the scores.
        delta: what it is: "output" means d_out . out, "none" means 0, "sweep" asks `balance`.
        in_kernels: whether all pieces lower to a kernel, which has no sorts and no gathers.
        merges: whether rows over some keys and rows over the others can be merged.
    """

    uses_scores: ClassVar[bool] = True
    shift_invariant: ClassVar[bool] = True
    bounded: ClassVar[bool] = True
    learns: ClassVar[bool] = True
    delta: ClassVar[str] = "output"
    in_kernels: ClassVar[bool] = False
    merges: ClassVar[bool] = False

    def __call__(self, scores: Array, allowed: Array | None) -> Array:
        """The weights, [..., T, S], of whole rows of scores: the definition."""
        raise NotImplementedError

    def prepare(self, sweep: Sweep, rows: Rows, dtype: jnp.dtype) -> Any:
        """What must be known of a row before the pass that pools; `sweep` runs over its tiles."""
        return ()

    def start(self, rows: Rows, dtype: jnp.dtype) -> Any:
        """The state before any tile."""
        raise NotImplementedError

    def absorb(
        self, state: Any, known: Any, scores: Array, allowed: Array | None, first_key: Array
    ) -> tuple[Any, Array, Array | None]:
        """The state after one more tile, the tile's weights up to a factor per row, and the factor
        for what was summed before; None is 1. `known` comes from `prepare`.
        """
        raise NotImplementedError

    def finish(self, state: Any, known: Any) -> tuple[Array | None, Any]:
        """The factor per row that is left, None is 1; and the row's stats."""
        raise NotImplementedError

    def recompute(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        """The weights of a tile, given the stats of its whole rows.

        `stats` and `keys` (the indices of the tile's keys) broadcast against the tile, whichever
        of its axes are queries and keys.
        """
        raise NotImplementedError

    def slope(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        """The derivative's factor; softmax's is its weights."""
        return self.recompute(stats, scores, allowed, keys)

    def balance(self, stats: Any, scores: Array, allowed: Array | None, keys: Array) -> Array:
        """For delta = "sweep": the tile whose product with d weights sums to delta."""
        raise NotImplementedError

    # Derivatives of any order, and in both modes, are those of weights = sum_i factor_i · piece_i,
    # where a factor depends on sums of pieces over the whole row.

    def pieces(
        self, stats: Any, scores: Array, allowed: Array | None, keys: Array
    ) -> tuple[Array, ...]:
        """The pieces of a tile's weights, as differentiable functions of its scores.

        `stats` are constants, which may say in what units pieces are.
        """
        raise NotImplementedError(
            f"forward mode and second derivatives need {type(self).__name__}.pieces and .factors"
        )

    def factors(self, stats: Any, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        """The factor per row of each piece, given each piece's sum over the row's keys."""
        raise NotImplementedError

    def log_sum(self, stats: Any, totals: tuple[Array, ...]) -> Array | None:
        """The log-sum-exp of a row's scores, given its first piece's sum; None for other regimes
        than softmax.
        """
        return None

    def merge(self, stats: Any, other: Any) -> tuple[Any, Array | None, Array | None]:
        """The stats over both sets of keys, and the factor of each output; None is 1."""
        raise NotImplementedError

    def nothing(self, rows: Rows, dtype: jnp.dtype) -> Any:
        """The stats over no keys."""
        return self.start(rows, dtype)


def below_top(scores: Array) -> Array:
    """Each row of scores minus its largest, which carries no gradient; -inf where masked.

    The difference is exactly 0 at the maximum. Written as scores - top it need not be: where the
    scores end in a product, a CPU computes product and difference in one rounding, top in two,
    and past scores of 7e8 one rounding is more than exp can bear. The bound in between, which
    changes no finite score, keeps the two operations apart.
    """
    top = scores.max(-1, keepdims=True, initial=-jnp.inf)
    top = jax.lax.stop_gradient(jnp.where(top == -jnp.inf, 0.0, top))
    below = jnp.maximum(scores, jnp.finfo(scores.dtype).min) - top
    return jnp.where(scores == -jnp.inf, -jnp.inf, below)


def finite(top: Array) -> Array:
    """The row's largest score, or 0 for an empty row, so that -inf - (-inf) is never formed."""
    return jnp.where(top == -jnp.inf, 0.0, top)


def inverse(total: Array) -> Array:
    """1/total, and 0 for a row whose weights sum to 0: the rule for empty rows."""
    empty = total == 0
    return jnp.where(empty, 0.0, 1.0 / jnp.where(empty, 1.0, total))


def over_sum(weights: Array) -> Array:
    """Each row divided by its sum; an empty row stays 0."""
    return weights * inverse(weights.sum(-1, keepdims=True))
