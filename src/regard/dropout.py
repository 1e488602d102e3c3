"""Counter-based dropout on the weights: whether one is kept depends on (seed, row, key) alone.

Any tile of the weights can therefore be drawn alone, in any order, and equals the same part of the
dense draw.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


class Draw(NamedTuple):
    """The seed of one part of a call: of some heads, queries and keys, with their global indices.

    Attributes:
        words: two uint32 words.
        heads: int32 [B, N] of the part, each the global batch · N + head; None: all heads.
        queries: int32 [T of the part], the global index of each query; None: all queries.
        first_key: int32, the global index of the part's first key.
        T: the number of queries of the whole call.
    """

    words: Array
    heads: Array | None
    queries: Array | None
    first_key: Array | int
    T: int


def first_rows(seed: Array | Draw, B: int, N: int, T: int) -> Array:
    """The global row, (batch · N + head) · T, of each head's first query: int32 [B, N, 1]."""
    heads = seed.heads if isinstance(seed, Draw) else None
    if heads is None:
        heads = jnp.arange(B * N, dtype=jnp.int32).reshape(B, N)
    return (heads * T)[..., None]


def seed_words(rng: Array) -> Array:
    """Two uint32 words from a JAX key of any kind."""
    return jax.random.bits(rng, (2,), jnp.uint32)


def keep_scale(
    seed: Array | tuple[Array, Array], row: Array, key: Array, rate: float, dtype: jnp.dtype
) -> Array:
    """1/(1-rate) where a weight is kept and 0 where it is dropped.

    Args:
        seed: two uint32 words.
        row: int32, (batch · N + head) · T + query; broadcasts against `key`.
        key: int32, the key's index.
    """
    bits = threefry(seed, row.astype(jnp.uint32), key.astype(jnp.uint32))
    # 24 bits are exact in float32, so that every backend compares the same number.
    uniform = (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
    return jnp.where(uniform >= rate, 1.0 / (1.0 - rate), 0.0).astype(dtype)


def threefry(seed: Array | tuple[Array, Array], first: Array, second: Array) -> Array:
    """Threefry-2x32 with 13 rounds, the fewest that pass BigCrush (Salmon et al. 2011)."""
    keys = (seed[0], seed[1], seed[0] ^ seed[1] ^ jnp.uint32(0x1BD11BDA))
    x, y = first + keys[0], second + keys[1]
    for step in range(13):
        x = x + y
        turn = _ROTATIONS[step // 4 % 2][step % 4]
        y = ((y << turn) | (y >> (32 - turn))) ^ x
        if step % 4 == 3:
            group = step // 4 + 1
            x = x + keys[group % 3]
            y = y + keys[(group + 1) % 3] + jnp.uint32(group)
    return x
