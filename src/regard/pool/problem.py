"""What every backend is given: one checked attention problem on canonical axes.

Nothing in `pool` checks or reshapes the caller's arrays; attend.py has done that.
"""

from dataclasses import dataclass, field

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

    Keys and values no query may look at, and queries that may look at nothing, are zero.

    Attributes:
        value: None where only the weights are asked for.
        visible: [B, K, S] bool, keys that some query may look at; None means all.
        bias: [B|1, N|1, T|1, S|1]; None is zero.
        seed: two uint32 words for dropout; None means none.
    """

    query: Array
    key: Array
    value: Array | None
    score: Score
    allowed: Allowed
    visible: Array | None
    bias: Array | None
    seed: Array | None
    normalize: Normalizer = field(metadata=dict(static=True))
    dropout_rate: float = field(metadata=dict(static=True))
    axes: Axes = field(metadata=dict(static=True))


def hide_padding(
    query: Array,
    key: Array,
    value: Array | None,
    visible: Array | None,
    seeing: Array | None,
    axes: Axes,
) -> tuple[Array, Array, Array | None, Array | None]:
    """Zeroes what nobody may look at, and who may look at nothing; NaN there reaches nothing.

    Args:
        visible: [B|1, N|1, S] bool, keys that some query may look at; None means all.
        seeing: [B|1, N|1, T|1] bool, queries that may look at some key; None means all.

    Returns query, key, value and the keys' visibility, [B, K, S].
    """
    if axes.empty():
        return query, key, value, None
    if visible is not None:
        if visible.shape[1] not in (1, axes.K):  # any of the query heads that share a key head
            visible = visible.reshape(visible.shape[0], axes.K, -1, axes.S).any(2)
        visible = jnp.broadcast_to(visible, (axes.B, axes.K, axes.S))
        key = jnp.where(visible[..., None], key, 0)
        value = None if value is None else jnp.where(visible[..., None], value, 0)
    if seeing is not None:
        query = jnp.where(seeing[..., None], query, 0)
    return query, key, value, visible
