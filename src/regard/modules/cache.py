"""The keys and values that incremental decoding has seen, as a pytree of fixed shape.

A cache goes in and a new one comes out, so it lives in jit, scan and vmap like any array.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from regard.mask import Band, Mask


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Projected keys and values of the tokens so far, in arrays of a fixed length.

    Made by `MultiHeadAttention.init_cache(batch, max_len)`; each call with `cache=` appends a
    chunk of any length and returns the grown cache. The query at position p sees the keys
    0 ... p: a cached call is causal, and equals the same rows of the full causal pass.

    A chunk that does not fit is a ValueError wherever the length is known. Under jit and scan it
    is a traced number and nothing can be raised, so there the tokens past the end are not
    written, nothing that was written is lost, the outputs of those tokens are NaN, and
    `overflowed()` is true: an overflow can be neither silent nor plausible.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard.modules.cache import KVCache
        >>> cache = KVCache.empty(2, 5, key_heads=1, key_width=4, value_width=3)
        >>> cache = cache.append(jnp.ones((2, 3, 1, 4)), jnp.ones((2, 3, 1, 3)))
        >>> int(cache.length), cache.key[0, :, 0, 0].tolist()
        (3, [1.0, 1.0, 1.0, 0.0, 0.0])

    Attributes:
        key: (B, max_len, K, Hk).
        value: (B, max_len, K, V).
        length: int32 (): how many tokens have been appended.
    """

    key: Array
    value: Array
    length: Array

    @classmethod
    def empty(
        cls,
        batch: int,
        max_len: int,
        *,
        key_heads: int,
        key_width: int,
        value_width: int,
        dtype: Any = jnp.float32,
    ) -> "KVCache":
        """A cache with room for max_len tokens."""
        return cls(
            jnp.zeros((batch, max_len, key_heads, key_width), dtype),
            jnp.zeros((batch, max_len, key_heads, value_width), dtype),
            jnp.zeros((), jnp.int32),
        )

    @property
    def max_len(self) -> int:
        """The number of tokens there is room for."""
        return self.key.shape[1]

    def overflowed(self) -> Array:
        """bool (): whether more tokens came than there is room for."""
        return self.length > self.max_len

    def positions(self, count: int) -> Array:
        """int32 (count,): where in the whole text the next tokens stand."""
        return self.length + jnp.arange(count, dtype=jnp.int32)

    def append(self, key: Array, value: Array) -> "KVCache":
        """The cache with a chunk more: key (B, T, K, Hk), value (B, T, K, V).

        Raises:
            ValueError: the chunk is of other sizes, or does not fit.
        """
        self._check(key, value)
        return KVCache(
            _write(self.key, key, self.length),
            _write(self.value, value, self.length),
            self.length + jnp.int32(key.shape[1]),
        )

    def mask(self, given: Mask, count: int) -> Mask:
        """What the next `count` queries may see of the cache: the causal order, and `given`.

        Causal order and windows in `given` are in positions of the whole text. Its arrays and
        the key side of its segments span the cache, S = max_len.
        """
        position = self.positions(count)
        ends, left = [position + 1], []
        for band in given.bands:
            ends += _end(band, position)
            left += [band.left] if band.left is not None else []
        batch = self.key.shape[0]
        lens = tuple(jnp.broadcast_to(end, (batch, count)) for end in ends)
        keys = jnp.arange(self.max_len, dtype=jnp.int32)[None, :]
        arrays = tuple(keys >= position[:, None] - reach for reach in left)  # [T, S]
        return replace(given, lens=given.lens + lens, arrays=given.arrays + arrays, bands=())

    def _check(self, key: Array, value: Array) -> None:
        for name, chunk, held in (("key", key, self.key), ("value", value, self.value)):
            if (chunk.shape[0], *chunk.shape[2:]) != (held.shape[0], *held.shape[2:]):
                raise ValueError(
                    f"the cache was made for another batch, head count or width. Got {name} "
                    f"{list(chunk.shape)}, cache.{name} {list(held.shape)}. Fix: a cache from "
                    "this module's init_cache(batch, max_len)."
                )
        count = key.shape[1]
        if value.shape[1] != count:
            raise ValueError(
                "key and value must have the same length. Got key "
                f"{list(key.shape)}, value {list(value.shape)}."
            )
        length = None if isinstance(self.length, jax.core.Tracer) else int(self.length)
        if (length or 0) + count > self.max_len:
            held_now = "" if length is None else f"{length} tokens are in it, and "
            raise ValueError(
                f"the cache would overflow: it has room for {self.max_len} tokens, {held_now}"
                f"{count} more were given. Got key {list(key.shape)}, cache.key "
                f"{list(self.key.shape)}. Fix: init_cache(batch, max_len) with max_len at least "
                f"{(length or 0) + count}."
            )


def _end(band: Band, position: Array) -> list[Array]:
    return [] if band.right is None else [jnp.maximum(position + band.right + 1, 0)]


def _write(held: Array, chunk: Array, length: Array) -> Array:
    """The chunk at `length`; what would be past the end is dropped.

    dynamic_update_slice moves a slice that does not fit back to where it does. So the slice is
    made of what stood there, then the chunk: rows before `length` keep what they hold.
    """
    count, room = chunk.shape[1], held.shape[1] - chunk.shape[1]
    start = jnp.clip(length, 0, room)
    late = length - start  # > 0 only on overflow
    before = jax.lax.dynamic_slice_in_dim(held, start, count, axis=1)
    row = jnp.arange(count, dtype=jnp.int32)
    moved = jnp.take(chunk.astype(held.dtype), jnp.clip(row - late, 0, None), axis=1)
    rows = jnp.where((row >= late)[None, :, None, None], moved, before)
    return jax.lax.dynamic_update_slice_in_dim(held, rows, start, axis=1)
