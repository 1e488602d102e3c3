"""What every backend is given: one checked attention problem on canonical axes.

Nothing in `pool` checks or reshapes the caller's arrays; front_door.py has done that.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from regard.mask import Allowed
from regard.normalize import Normalizer
from regard.score.contract import Score
from regard.shapes import Axes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Problem:
    """One call of attend, checked, on axes [B, N, T, Hq], [B, K, S, Hk] and [B, K, S, V].

    What the arrays hold in the padding is still the caller's, NaN perhaps. Backends zero it with
    `zeroed()`, unless they know how to ignore it.

    Attributes:
        value: None where only the weights are asked for.
        visible: [B, K, S] bool, keys that some query may attend to; None means all.
        non_empty: [B|1, N|1, T|1] bool, queries with at least one key; None means all.
        bias: [B|1, N|1, T|1, S|1]; None is zero.
        seed: two uint32 words for dropout; None means none.
    """

    query: Array
    key: Array
    value: Array | None
    score: Score
    allowed: Allowed
    visible: Array | None
    non_empty: Array | None
    bias: Array | None
    seed: Array | None
    normalize: Normalizer = field(metadata=dict(static=True))
    dropout_rate: float = field(metadata=dict(static=True))
    axes: Axes = field(metadata=dict(static=True))

    def zeroed(self) -> "Problem":
        """Zeroes keys and values that every query masks, and queries whose row is empty, so that
        NaN in padding cannot propagate.
        """
        query, key = _zero_rows(self.non_empty, self.query), _zero_rows(self.visible, self.key)
        return replace(self.with_zeroed_values(), query=query, key=key)

    def with_zeroed_values(self) -> "Problem":
        """The same for the values alone."""
        value = None if self.value is None else _zero_rows(self.visible, self.value)
        return replace(self, value=value)

    def with_keys_and_values_zeroed_forward(self) -> "Problem":
        """The same for keys and values, for a backend whose gradients are zero there by themselves:
        the backward pass copies no gradient to zero it once more.
        """
        if self.visible is None:
            return self
        value = None if self.value is None else _zero_rows_forward(self.visible, self.value)
        return replace(self, key=_zero_rows_forward(self.visible, self.key), value=value)


def _zero_rows(keep: Array | None, array: Array) -> Array:
    return array if keep is None else jnp.where(keep[..., None], array, 0)


@jax.custom_vjp
def _zero_rows_forward(keep: Array, array: Array) -> Array:
    """`_zero_rows` in the forward pass; the cotangent passes unchanged."""
    return _zero_rows(keep, array)


_zero_rows_forward.defvjp(
    lambda keep, array: (_zero_rows(keep, array), None), lambda _, cotangent: (None, cotangent)
)


Pool = Callable[[Problem], tuple[Array, Array]]  # to the output, and whether the lift ran


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def zero_for_gradient(forward_only: Pool, differentiable: Pool, problem: Problem) -> Any:
    """forward_only(problem); where the call is differentiated, differentiable(problem).

    A kernel that replaces masked scores does not care what they were made of, so a forward pass
    alone needs no zeroed copy of queries and keys: on a GPU each copy would take a twentieth of the
    kernel's own time. The backward pass does need it: it multiplies d scores of 0 by queries and
    keys, and 0 · NaN is NaN.

    Args:
        forward_only: pools; NaN in the padding does not reach its output.
        differentiable: equals it, and has a backward pass. Both are static: they close over no
            array.
    """
    return forward_only(problem)


def _forward(forward_only: Pool, differentiable: Pool, problem: Problem) -> Any:
    out, pull, lifted = jax.vjp(differentiable, problem, has_aux=True)
    return (out, lifted), pull


def _backward(forward_only: Pool, differentiable: Pool, pull: Any, cotangents: Any) -> Any:
    return pull(cotangents[0])


zero_for_gradient.defvjp(_forward, _backward)
