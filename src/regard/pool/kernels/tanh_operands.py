"""What the tanh kernels read: exponentials in blocks of tokens, and weights.

In a block, hidden units come before tokens: a unit's numbers are one load, and the units of a step
lie at distances fixed at compile time, which spares a kernel two thirds of its address arithmetic.
How far products of exponentials reach is decided here, on the data: past that, the arrays hold x
and y instead, and the kernels take the exponential of the sum.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

STEP = 8  # hidden units per step of a kernel's loop; a group never reaches over its end
TWO_LOG2_E = 2.8853900817779268  # e^2z = 2^(TWO_LOG2_E z)
CLIP = 30.0  # past this power of two, 1 / (1 + e^2z) is 0 to less than float32 can tell from 1
LEAST = 2.0**-24  # weights below so much of the greatest count as that much: its rounding error

# A unit's term is at most 2^BOUND, so that a product of a group's terms stays a normal number, with
# room for the sum of its products; and at least 2^-SHIFT: half of the range lies below 1.
BOUND = {1: 120, 2: 60, 3: 40, 4: 30}
SHIFT = {1: 0, 2: 30, 3: 40, 4: 30}
NORMAL = 125  # numbers that float32 holds to full precision: 2^-125 to 2^125


class TanhArrays(NamedTuple):
    """Operands of `tanh_scores`, h rounded up to whole steps, tokens to whole blocks.

    Attributes:
        query: [B, N, query blocks, h, block].
        key: [B, K, key blocks, h, block].
        terms: [B, N, h + 8]: per unit c / w, then the sum of w, the factor of the sum over units,
            and 1 where query and key are exponentials, 0 where they are x and y.
    """

    query: Array
    key: Array
    terms: Array


def tanh_operands(
    x: Float[Array, "B N T h"],
    y: Float[Array, "B K S h"],
    vector: Array,
    *,
    blocks: tuple[int, int],
    group: int = 3,
) -> TanhArrays:
    """Prepares scores sum_h w_h tanh(x_h + y_h) for a kernel.

    tanh(x + y) = 1 - 2 / (1 + E F), so a score is sum_h w_h - 2 sum_h 1 / t_h with terms
    t = (1 + E F) / w.

    Args:
        x, y: projected queries and keys, padding zeroed, y centered per unit (x takes the shift).
        vector: w, (h,) or (N, h), in whatever units the scores shall have.
        blocks: tokens of a tile, queries and keys.
        group: hidden units that share a reciprocal, as in `tanh_scores`.
    """
    x, y = blocked(x, blocks[0], STEP), blocked(y, blocks[1], STEP)
    w = jnp.broadcast_to(vector.astype(jnp.float32), (x.shape[1], vector.shape[-1]))
    w = jnp.pad(w, ((0, 0), (0, x.shape[3] - w.shape[1])))
    top = jnp.max(jnp.abs(w), axis=1, keepdims=True, initial=0.0)
    top = jnp.where(top > 0.0, top, 1.0)
    w = w / top  # [N, h], abs(w) <= 1
    w = jnp.where(jnp.abs(w) < LEAST, LEAST, w)

    of_keys = _in_reach(x, y, w, group)  # [B, K]
    of_queries = jnp.repeat(of_keys, x.shape[1] // y.shape[1], axis=1)  # [B, N]
    inverse = 2.0 ** -SHIFT[group] / w  # [N, h]
    product = jnp.exp(2.0 * x) * inverse[None, :, None, :, None]
    query = jnp.where(of_queries[:, :, None, None, None], product, x)
    key = jnp.where(of_keys[:, :, None, None, None], jnp.exp(2.0 * y), y)

    total, factor = top * w.sum(1, keepdims=True), -2.0 * top * 2.0 ** -SHIFT[group]
    shared = jnp.concatenate([inverse, total, factor], axis=1)  # [N, h + 2]
    shared = jnp.broadcast_to(shared[None], (*of_queries.shape, shared.shape[1]))
    terms = jnp.concatenate([shared, of_queries[:, :, None].astype(jnp.float32)], axis=2)
    return TanhArrays(query, key, jnp.pad(terms, ((0, 0), (0, 0), (0, STEP - 3))))


def blocked(side: Float[Array, "*lead T h"], block: int, step: int) -> Float[Array, "..."]:
    """Float32 [*lead, blocks, h, block], zeros up to whole blocks of tokens and steps of units."""
    *lead, tokens, hidden = side.shape
    widths = [(0, 0)] * len(lead) + [(0, -tokens % block), (0, -hidden % step)]
    side = jnp.pad(side.astype(jnp.float32), widths)
    side = side.reshape(*lead, side.shape[-2] // block, block, side.shape[-1])
    return jnp.swapaxes(side, -1, -2)


def _in_reach(x: Array, y: Array, w: Array, group: int) -> Array:
    """bool [B, K]: whether exponentials and the products of a group's terms are normal numbers."""
    x, y = jax.lax.stop_gradient((x, y))
    heads = x.shape[1] // y.shape[1]
    x_low, x_high = exponents(x, (2, 4))  # [B, N, h]
    y_low, y_high = exponents(y, (2, 4))  # [B, K, h]
    weight = -jnp.log2(jnp.abs(w))[None]  # [1, N, h]
    term = x_high + jnp.repeat(y_high, heads, axis=1) + weight
    fits = (
        (term <= BOUND[group] + SHIFT[group] - 1)
        & (x_low - SHIFT[group] >= -NORMAL)
        & (x_high + weight - SHIFT[group] <= NORMAL)
    )  # False on NaN too
    fits = jnp.all(fits, axis=-1).reshape(*y.shape[:2], heads).all(-1)
    return fits & jnp.all((y_low >= -NORMAL) & (y_high <= NORMAL), axis=-1)


def exponents(side: Array, tokens: tuple[int, ...]) -> tuple[Array, Array]:
    """Least and greatest power of two that e^2x reaches over the tokens' axes; 0 among them."""
    low, high = side.min(tokens, initial=0.0), side.max(tokens, initial=0.0)
    return low * TWO_LOG2_E, high * TWO_LOG2_E
