"""Flax's decode=True: its cache variables as a `Memory`, and back.

Flax keeps one index for the whole batch; a `Memory` has a length per example.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import Array

from regard.memory import Memory


def from_flax(key: Array, value: Array, index: Array, options: Mapping[str, Any]) -> Memory:
    """From Flax's cache variables: (batch..., max_len, K, width), and one index for all.

    Raises:
        ValueError: the call's options ask for what one index cannot do.
    """
    given = [name for name in ("valid_lens", "cache", "memory") if options.get(name) is not None]
    if given:
        raise ValueError(
            "decode=True keeps a cache of its own with one index for the whole batch, as Flax "
            f"does. Got {' and '.join(given)} as well. Fix: decode=False and "
            "cache=init_cache(batch, max_len) in the call, which keeps one per example."
        )
    batch = math.prod(key.shape[:-3])
    sizes: Any = dict(key_heads=key.shape[-2], key_width=key.shape[-1], value_width=value.shape[-1])
    return replace(
        Memory.empty(batch, 0, **sizes, score=None, dtype=key.dtype),
        key=key.reshape(batch, *key.shape[-3:]),
        value=value.reshape(batch, *value.shape[-3:]),
        length=jnp.broadcast_to(index, (batch,)),
    )


def as_flax(memory: Memory, key_shape: Sequence[int]) -> tuple[Array, Array, Array]:
    """Flax's cache variables: (batch..., max_len, K, width), and one index for all."""
    batch = tuple(key_shape[:-3])
    index = memory.length.max(initial=0)
    return (
        memory.key.reshape(*batch, *memory.key.shape[1:]),
        memory.value.reshape(*batch, *memory.value.shape[1:]),
        index,
    )
