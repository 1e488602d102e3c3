"""The way back through one tile: its weights again, and d of its scores."""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import triton as plt

from regard.pool.wide_kernel.tile import TilePass, allowed_tile, dot, keep_tile


def d_tile(
    static: TilePass,
    refs: dict[str, Any],
    scores: Array,
    values: Array,
    d_out: Array,
    rows: Any,
    keys: Any,
    *,
    flipped: bool,
    masked: bool = True,
) -> tuple[Array, Array]:
    """With p = 2^(scores - lse), d scores = p · (d out · value - delta).

    Args:
        scores: [rows, keys] in units of log2, without key bias.
        values: [keys, V].
        d_out: [rows, V].
        flipped: scores and results are [keys, rows].
        masked: False where every pair of the tile takes part.

    Returns:
        The weights that values are multiplied by (after dropout), and d scores in natural units;
        both float32, of the scores' shape.
    """

    def per_row(name: str) -> Array:
        return plt.load(refs[name].at[rows])

    def along(values: Array) -> Array:
        return values[None, :] if flipped else values[:, None]

    if "key_bias" in refs:
        bias = plt.load(refs["key_bias"].at[keys])
        scores = scores + (bias[:, None] if flipped else bias[None, :])
    lse = per_row("lse")
    allowed = allowed_tile(refs, rows, keys, flipped) if masked else None
    if allowed is None:
        weights = jnp.exp2(scores - along(lse))
    else:
        sees = lse > -jnp.inf  # a row that sees nothing has no weights
        weights = jnp.exp2(scores - along(jnp.where(sees, lse, 0.0)))
        weights = jnp.where(allowed & along(sees), weights, 0.0)
    left, right = (values, d_out) if flipped else (d_out, values)
    d_weights = dot(left, right, (1, 1), static.precision)
    keep = keep_tile(static, refs, rows, keys, flipped)
    kept = weights
    if keep is not None:
        kept, d_weights = weights * keep, d_weights * keep
    return kept, weights * (d_weights - along(per_row("delta")))
