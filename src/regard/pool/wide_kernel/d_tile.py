"""The way back through one tile, in three steps: its weights again, d weights, d scores.

In steps, for the order of products and loads is the kernel's affair: Triton's compiler keeps to it.
`flipped` tiles are [keys, rows], others [rows, keys]; all are float32.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import triton as plt

from regard.pool.wide_kernel.tile import TilePass, allowed_tile, dot, keep_tile


def weights_again(
    refs: dict[str, Any], scores: Array, rows: Any, keys: Any, *, flipped: bool, masked: bool = True
) -> Array:
    """2^(scores + key_bias - lse), 0 for pairs that take no part.

    Args:
        scores: in units of log2, without key bias.
        masked: False where every pair of the tile takes part.
    """
    if "key_bias" in refs:
        bias = plt.load(refs["key_bias"].at[keys])
        scores = scores + (bias[:, None] if flipped else bias[None, :])
    lse = plt.load(refs["lse"].at[rows])
    allowed = allowed_tile(refs, rows, keys, flipped) if masked else None
    if allowed is None:
        return jnp.exp2(scores - _along_rows(lse, flipped))
    sees = lse > -jnp.inf  # a row that sees nothing has no weights
    weights = jnp.exp2(scores - _along_rows(jnp.where(sees, lse, 0.0), flipped))
    return jnp.where(allowed & _along_rows(sees, flipped), weights, 0.0)


def d_weights(
    static: TilePass,
    refs: dict[str, Any],
    weights: Array,
    values: Array,
    d_out: Array,
    rows: Any,
    keys: Any,
    *,
    flipped: bool,
) -> tuple[Array, Array]:
    """The weights that values were multiplied by, after dropout, and d of the weights before it.

    Args:
        values: [keys, V].
        d_out: [rows, V].
    """
    left, right = (values, d_out) if flipped else (d_out, values)
    found = dot(left, right, (1, 1), static.precision)
    keep = keep_tile(static, refs, rows, keys, flipped)
    return (weights, found) if keep is None else (weights * keep, found * keep)


def d_softmax(
    refs: dict[str, Any], weights: Array, d_weights: Array, rows: Any, *, flipped: bool
) -> Array:
    """d scores, in natural units: weights · (d weights - delta)."""
    return weights * (d_weights - _along_rows(plt.load(refs["delta"].at[rows]), flipped))


def _along_rows(values: Array, flipped: bool) -> Array:
    return values[None, :] if flipped else values[:, None]
