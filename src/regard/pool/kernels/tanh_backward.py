"""From d scores to d x, d y and d w: d x = 4 w sum_s g r (1 - r), d w = sum_ts g (1 - 2 r).

r = 1 / (1 + e^2x e^2y), g = d scores, a stripe of queries at a time. tanh_sums.py has the kernel,
run once per side; here are its operands: exponentials, padding, and which part of g is read.
"""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from regard.pool.kernels.block_shapes import pick_parts
from regard.pool.kernels.tanh_operands import NORMAL, blocked, exponents
from regard.pool.kernels.tanh_sums import PAIR, SumBlocks, tanh_sums


def d_projected(
    g: Array,
    x: Float[Array, "E q h"],
    y: Float[Array, "E S h"],
    vector: Array,
    *,
    visits: Int[Array, "E blocks 2"] | None = None,
    keys_first: bool = False,
    blocks: SumBlocks = SumBlocks(),
    interpret: bool = False,
) -> tuple[Float[Array, "E q h"], Float[Array, "E S h"], Float[Array, "E h"]]:
    """The gradient of sum_h w_h tanh(x_h + y_h) for a stripe of d scores.

    Any sizes. Takes the memory of a transposed copy of g, and of a padded one each where q or S are
    not multiples of 128; beside that, linear in q and S.

    Args:
        g: [E, q, S], or with `keys_first` [E, S, q]: d scores, zero where masked, any float dtype.
        x, y: projected queries and keys, padding zeroed, y centered per unit (x takes the shift).
        vector: w, (h,) or (E, h).
        visits: for equal blocks of queries, the keys [first, last) outside of which g is zero and
            is not read, [E, query blocks, 2] int32.

    Returns:
        d x [E, q, h], d y [E, S, h] and d w [E, h], float32.
    """
    by_key = g if keys_first else jnp.swapaxes(g, 1, 2)  # [E, S, q]
    E, S, q = by_key.shape
    if g.size == 0:
        sizes = x.shape, y.shape, (E, x.shape[2])
        d_x, d_y, d_vector = (jnp.zeros(size, jnp.float32) for size in sizes)
        return d_x, d_y, d_vector
    if visits is None:
        visits = jnp.broadcast_to(jnp.array([0, S], jnp.int32), (E, 1, 2))
    size = -(-q // visits.shape[1])
    x, y, in_reach = _sides(x, y)

    def sums(g: Array, streamed: Array, kept: Array, bounds: Array, value: bool) -> list[Array]:
        """sum g r (1 - r), and with `value` sum g r: [E, kept, h]."""
        g = _pad(g, blocks.streamed, blocks.kept)
        streamed = blocked(streamed, blocks.streamed, blocks.units)
        kept = blocked(kept, blocks.kept, blocks.units)
        programs = E * kept.shape[1] * (kept.shape[2] // blocks.units)
        found = tanh_sums(
            g,
            streamed,
            kept,
            bounds,
            in_reach,
            value=value,
            blocks=blocks,
            parts=pick_parts(programs, blocks.warps, streamed.shape[1]),
            interpret=interpret,
        )  # [E, blocks, h, block]
        return [jnp.swapaxes(part, 2, 3).reshape(E, g.shape[2], -1) for part in found]

    [d_x] = sums(by_key, y, x, _steps(visits, size, q, blocks), value=False)
    # In this order: the transpose of g is allocated after the partial sums of d x are freed.
    g, d_x = lax.optimization_barrier((g, d_x))
    by_query = jnp.swapaxes(g, 1, 2) if keys_first else g  # [E, q, S]
    visitors = _visitors(visits, size, q, S, blocks.kept)
    d_y, value = sums(by_query, x, y, _steps(visitors, blocks.kept, S, blocks), value=True)

    hidden = x.shape[2]
    slope = 4.0 * jnp.broadcast_to(vector.astype(jnp.float32), (E, hidden))[:, None, :]
    d_vector = jnp.sum(g, axis=(1, 2), dtype=jnp.float32)[:, None] - 2.0 * value.sum(1)[:, :hidden]
    return slope * d_x[:, :q, :hidden], slope * d_y[:, :S, :hidden], d_vector


def _sides(x: Array, y: Array) -> tuple[Array, Array, Array]:
    """e^2x and e^2y, and [E, 1] ones; x and y themselves and 0 for examples where a product of two
    terms 1 + e^2x e^2y might leave float32's range.
    """
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    x_low, x_high = exponents(x, (1,))  # [E, h]
    y_low, y_high = exponents(y, (1,))
    fits = (x_high + y_high <= PAIR - 1.0) & (jnp.minimum(x_low, y_low) >= -NORMAL)
    fits = jnp.all(fits & (jnp.maximum(x_high, y_high) <= NORMAL), axis=1)  # False on NaN too
    x, y = (jnp.where(fits[:, None, None], jnp.exp(2.0 * side), side) for side in (x, y))
    return x, y, fits[:, None].astype(jnp.int32)


def _pad(g: Array, rows: int, columns: int) -> Array:
    """Zeros up to whole blocks; no copy where they are whole."""
    _, height, width = g.shape
    if height % rows == 0 and width % columns == 0:
        return g
    return jnp.pad(g, ((0, 0), (0, -height % rows), (0, -width % columns)))


def _steps(visits: Array, span: int, size: int, blocks: SumBlocks) -> Int[Array, "E blocks 2"]:
    """From spans of kept tokens to blocks of them, and from streamed tokens to steps."""
    count = -(-size // blocks.kept)
    tokens = jnp.repeat(visits, span, axis=1)[:, :size]  # [E, kept, 2]
    tokens = jnp.pad(tokens, ((0, 0), (0, count * blocks.kept - size), (0, 0)), mode="edge")
    tokens = tokens.reshape(tokens.shape[0], count, blocks.kept, 2)
    low = tokens[..., 0].min(-1) // blocks.streamed
    high = -(-tokens[..., 1].max(-1) // blocks.streamed)
    return jnp.stack([low, jnp.maximum(low, high)], axis=-1).astype(jnp.int32)


def _visitors(visits: Array, size: int, q: int, S: int, block: int) -> Int[Array, "E spans 2"]:
    """The queries [first, last) that visit each block of keys."""
    first = jnp.arange(0, max(S, 1), block, dtype=jnp.int32)[None, None, :]  # of a block of keys
    row = jnp.arange(0, visits.shape[1] * size, size, dtype=jnp.int32)[None, :, None]
    low, high = visits[..., :1], visits[..., 1:]  # [E, query blocks, 1]
    meet = (low < first + block) & (high > first) & (low < high)  # [E, query blocks, key blocks]
    last = jnp.where(meet, jnp.minimum(row + size, q), 0).max(1)
    return jnp.stack([jnp.minimum(jnp.where(meet, row, q).min(1), last), last], axis=-1)
