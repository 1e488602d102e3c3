"""What every backend is given: one checked attention problem on canonical axes.

Nothing in `pool` checks or reshapes the caller's arrays; attend.py has done that. What they hold in
the padding is still the caller's, NaN perhaps. A backend is given `hidden()`, but for cudnn and
pallas, which hide themselves what they need hidden, and no more.
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
    """One call of attend, on axes [B, N, T, Hq], [B, K, S, Hk] and [B, K, S, V].

    Attributes:
        value: None where only the weights are asked for.
        visible: [B, K, S] bool, keys that some query may look at; None means all.
        seeing: [B|1, N|1, T|1] bool, queries that may look at some key; None means all.
        bias: [B|1, N|1, T|1, S|1]; None is zero.
        seed: two uint32 words for dropout; None means none.
    """

    query: Array
    key: Array
    value: Array | None
    score: Score
    allowed: Allowed
    visible: Array | None
    seeing: Array | None
    bias: Array | None
    seed: Array | None
    normalize: Normalizer = field(metadata=dict(static=True))
    dropout_rate: float = field(metadata=dict(static=True))
    axes: Axes = field(metadata=dict(static=True))

    def hidden(self) -> "Problem":
        """Zero where nobody may look, and who may look at nothing; NaN there reaches nothing."""
        query, key = _zero_but(self.seeing, self.query), _zero_but(self.visible, self.key)
        return replace(self.with_hidden_values(), query=query, key=key)

    def with_hidden_values(self) -> "Problem":
        """The same of the values alone."""
        value = None if self.value is None else _zero_but(self.visible, self.value)
        return replace(self, value=value)

    def with_hidden_keys_and_values(self) -> "Problem":
        """The same of keys and values, for a backend whose gradients are 0 there by themselves: the
        way back copies none of them to make sure.
        """
        if self.visible is None:
            return self
        value = None if self.value is None else _zero_one_way(self.visible, self.value)
        return replace(self, key=_zero_one_way(self.visible, self.key), value=value)


def _zero_but(rows: Array | None, array: Array) -> Array:
    return array if rows is None else jnp.where(rows[..., None], array, 0)


@jax.custom_vjp
def _zero_one_way(rows: Array, array: Array) -> Array:
    """`_zero_but` forward; a cotangent passes whole."""
    return _zero_but(rows, array)


_zero_one_way.defvjp(
    lambda rows, array: (_zero_but(rows, array), None), lambda _, back: (None, back)
)


Pool = Callable[[Problem], tuple[Array, Array]]  # to the output, and whether the lift ran


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def hide_late(alone: Pool, pool: Pool, problem: Problem) -> tuple[Array, Array]:
    """alone(problem); where the call is differentiated, pool(problem). Neither is given it hidden.

    A kernel that replaces the scores a mask forbids does not care what they were made of, so a
    forward pass alone needs no copy of queries and keys: on a GPU each would take a twentieth of
    the kernel's own time. The way back needs more: there d scores of 0 are multiplied by queries
    and keys, and 0 · NaN is NaN.

    Args:
        alone: a forward pass.
        pool: equals it, and has a way back. NaN in the padding reaches neither. Both are static:
            they close over no array.
    """
    return alone(problem)


def _forward(alone: Pool, pool: Pool, problem: Problem) -> tuple[tuple[Array, Array], Any]:
    out, back, lifted = jax.vjp(pool, problem, has_aux=True)
    return (out, lifted), back


def _backward(alone: Pool, pool: Pool, back: Any, cotangents: tuple[Array, Any]) -> tuple[Problem]:
    return back(cotangents[0])


hide_late.defvjp(_forward, _backward)
