"""Dropout on activations: inverted, so that nothing is scaled when it is off.

Devices that share a batch drop what one alone would drop: each draws its own rows of the whole
batch's random numbers. So a run's numbers do not depend on how many devices it has.
"""

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.random import threefry_2x32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ShardOfRows:
    """A random key to draw some rows of a batch with: the numbers that the whole batch has there.

    Attributes:
        key: the whole batch's, a JAX key.
        index: an int32 scalar, which of the equal shards of the rows, from 0.
        shards: how many there are.
    """

    key: Array
    index: Array
    shards: int = field(metadata=dict(static=True))


def drop(x: Array, rate: float, rng: Array | ShardOfRows | None, rows: int = -2) -> Array:
    """Each number is 0 with probability `rate`, else it is divided by 1 − rate.

    Args:
        x: any array.
        rate: rounded to a multiple of 1/256 (and the division with it): one byte of random bits
            decides, a quarter of the random numbers that float32 would take.
        rng: a JAX key; None: x as it is.
        rows: the axis of x that a `ShardOfRows` has a shard of.
    """
    threshold = min(round(256 * rate), 255)  # at 256 there would be nothing left to scale up
    if rng is None or threshold == 0:
        return x
    if isinstance(rng, ShardOfRows):
        bytes_ = _some_bytes(rng, x.shape, rows % x.ndim)
    else:
        bytes_ = _bytes(rng, x.shape)
    keep = bytes_ >= threshold
    return jnp.where(keep, x * (256 / (256 - threshold)), jnp.zeros_like(x))


def streams(rng: Array | ShardOfRows | None, count: int) -> tuple:
    """`count` independent keys, or as many None."""
    if isinstance(rng, ShardOfRows):
        keys = jax.random.split(rng.key, count)
        return tuple(ShardOfRows(key, rng.index, rng.shards) for key in keys)
    return (None,) * count if rng is None else tuple(jax.random.split(rng, count))


def _bytes(key: Array, shape: tuple[int, ...]) -> Array:
    """A random byte for each element."""
    size = math.prod(shape)
    words = jax.random.bits(key, (-(-size // 4),), jnp.uint32)
    return _each_byte(words).reshape(-1)[:size].reshape(shape)


def _some_bytes(rng: ShardOfRows, shape: tuple[int, ...], axis: int) -> Array:
    """The bytes that `_bytes` has at this shard's rows; `shape` is that of the shard."""
    mine = shape[axis]
    begin = rng.index * mine
    whole = (*shape[:axis], mine * rng.shards, *shape[axis + 1 :])
    in_words = axis < len(shape) - 1 and shape[-1] % 4 == 0 and math.prod(whole) < 1 << 34
    if not in_words or not _counts_words(rng.key):
        return jax.lax.dynamic_slice_in_dim(_bytes(rng.key, whole), begin, mine, axis)
    # The n-th word is a function of key and n alone, so that no other device's have to be made.
    words = (*shape[:-1], shape[-1] // 4)
    number, stride = jnp.zeros(words, jnp.uint32), 1
    for place in reversed(range(len(words))):
        index = jax.lax.broadcasted_iota(jnp.uint32, words, place)
        index = index + begin.astype(jnp.uint32) if place == axis else index
        number = number + index * jnp.uint32(stride)
        stride *= whole[axis] if place == axis else words[place]
    key = jax.random.key_data(rng.key)
    count = jnp.concatenate([jnp.zeros(number.size, jnp.uint32), number.reshape(-1)])
    first, second = jnp.split(threefry_2x32((key[0], key[1]), count), 2)
    return _each_byte(first ^ second).reshape(shape)


def _counts_words(key: Array) -> bool:
    """Whether JAX draws word n from key and n, as its default generator does."""
    named = str(jax.random.key_impl(key)) == "threefry2x32"
    return named and bool(jax.config.jax_threefry_partitionable)  # type: ignore[attr-defined]


def _each_byte(words: Array) -> Array:
    return jax.lax.bitcast_convert_type(words, jnp.uint8)  # [..., 4]
