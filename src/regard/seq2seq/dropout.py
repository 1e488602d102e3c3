"""Dropout on activations: inverted, so that nothing is scaled when it is off."""

import jax
import jax.numpy as jnp
from jax import Array


def drop(x: Array, rate: float, rng: Array | None) -> Array:
    """Each number is 0 with probability `rate`, else it is divided by 1 − rate.

    Args:
        x: any array.
        rate: rounded to a multiple of 1/256 (and the division with it): one byte of random bits
            decides, a quarter of the random numbers that float32 would take.
        rng: a JAX key; None: x as it is.
    """
    threshold = min(round(256 * rate), 255)  # at 256 there would be nothing left to scale up
    if rng is None or threshold == 0:
        return x
    words = jax.random.bits(rng, (-(-x.size // 4),), jnp.uint32)
    bytes_ = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(-1)[: x.size]
    keep = bytes_.reshape(x.shape) >= threshold
    return jnp.where(keep, x * (256 / (256 - threshold)), jnp.zeros_like(x))


def streams(rng: Array | None, count: int) -> tuple[Array | None, ...]:
    """`count` independent keys, or as many None."""
    return (None,) * count if rng is None else tuple(jax.random.split(rng, count))
