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


Seed = Array | Draw | None  # of a pass over the weights; None: no dropout


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
    keep = is_kept(row_words(seed, row), key_words(seed, key), rate)
    return jnp.where(keep, 1.0 / (1.0 - rate), 0.0).astype(dtype)


# A pair is hashed in two steps. The first is expensive and made once per row and once per key; the
# second is seven integer instructions per pair, which a GPU overlaps with its matrix products.

Words = tuple[Array, Array]


def row_words(seed: Array | Words, row: Array) -> Words:
    """Two uint32 words for each row."""
    return threefry(seed, row.astype(jnp.uint32), jnp.uint32(0))


def key_words(seed: Array | Words, key: Array) -> Words:
    """Two uint32 words for each key; the second is odd, a factor that has an inverse."""
    first, second = threefry(seed, key.astype(jnp.uint32), jnp.uint32(1))
    return first, second | jnp.uint32(1)


def is_kept(rows: Words, keys: Words, rate: float) -> Array:
    """Whether each weight is kept: rows broadcast against keys.

    The hash is two products of 32 bits with a shift between them, so that the highest bits, which
    decide, depend on all 128 bits of the words. tests/test_dropout.py compares it with
    independent coins: rows, columns, pairs of them and rectangles.
    """
    bits = (rows[0] ^ keys[0]) * keys[1]
    bits = (bits ^ (bits >> 15) ^ rows[1]) * jnp.uint32(0x2C1B3C6D)
    return bits >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))


def threefry(seed: Array | Words, first: Array, second: Array) -> Words:
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
    return x, y
