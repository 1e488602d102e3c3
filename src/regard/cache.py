"""The keys and values of the tokens decoded so far, as a pytree of fixed shape.

Appending returns a new cache, so a cache works in jit, scan and vmap like any array.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from regard.mask import Mask


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Projected keys and values of the tokens so far, in arrays of a fixed length.

    Made by `MultiHeadAttention.init_cache(batch, max_len)`. Each call with `cache=` appends a
    chunk of any length; with `valid_lens` it appends only that many tokens of each example. A
    token's position counts the tokens of its own example: the query at position p sees the keys
    0 ... p. So a cached call is causal, and equals the same rows of the full causal pass, ragged
    or not.

    A chunk that does not fit raises ValueError wherever the lengths are known. Under jit and scan
    they are traced and nothing can be raised, so there the tokens past the end are not written,
    no token that was written is lost, the outputs of those tokens are NaN, and `overflowed()` is
    true for their example.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard.cache import KVCache
        >>> cache = KVCache.empty(2, 5, key_heads=1, key_width=4, value_width=3)
        >>> ones = jnp.ones((2, 3, 1, 4))
        >>> cache = cache.append(ones, ones[..., :3], lens=jnp.array([3, 1]))
        >>> cache = cache.append(2 * ones[:, :1], ones[:, :1, :, :3])
        >>> cache.length.tolist(), cache.key[:, :, 0, 0].tolist()
        ([4, 2], [[1.0, 1.0, 1.0, 2.0, 0.0], [1.0, 2.0, 0.0, 0.0, 0.0]])

    Attributes:
        key: (B, max_len, K, Hk).
        value: (B, max_len, K, V).
        length: int32 (B,): how many tokens have been appended to each example.
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
        """A cache with room for max_len tokens in each example."""
        return cls(
            jnp.zeros((batch, max_len, key_heads, key_width), dtype),
            jnp.zeros((batch, max_len, key_heads, value_width), dtype),
            jnp.zeros((batch,), jnp.int32),
        )

    @classmethod
    def of_flax(
        cls, key: Array, value: Array, index: Array, options: Mapping[str, Any]
    ) -> "KVCache":
        """From Flax's cache variables: (batch..., max_len, K, width), and one index for all.

        Raises:
            ValueError: the call's options ask for what one index cannot do.
        """
        given = [name for name in ("valid_lens", "cache") if options.get(name) is not None]
        if given:
            raise ValueError(
                "decode=True keeps a cache of its own with one index for the whole batch, as Flax "
                f"does. Got {' and '.join(given)} as well. Fix: decode=False and "
                "cache=init_cache(batch, max_len) in the call, which keeps one per example."
            )
        batch = math.prod(key.shape[:-3])
        return cls(
            key.reshape(batch, *key.shape[-3:]),
            value.reshape(batch, *value.shape[-3:]),
            jnp.broadcast_to(index, (batch,)),
        )

    def as_flax(self, key_shape: Sequence[int]) -> tuple[Array, Array, Array]:
        """Flax's cache variables: (batch..., max_len, K, width), and one index for all."""
        batch = tuple(key_shape[:-3])
        index = self.length.max(initial=0)
        return (
            self.key.reshape(*batch, *self.key.shape[1:]),
            self.value.reshape(*batch, *self.value.shape[1:]),
            index,
        )

    @property
    def max_len(self) -> int:
        """The number of tokens there is room for."""
        return self.key.shape[1]

    def overflowed(self) -> Array:
        """bool (B,): whether more tokens came than there is room for."""
        return self.length > self.max_len

    def positions(self, count: int) -> Array:
        """int32 (B, count): the positions of the next tokens of each example."""
        return self.length[:, None] + jnp.arange(count, dtype=jnp.int32)[None]

    def append(self, key: Array, value: Array, lens: Array | None = None) -> "KVCache":
        """The cache with one chunk more, written after each example's own end.

        Args:
            key: (B, T, K, Hk).
            value: (B, T, K, V).
            lens: integers () or (B,): how many tokens of the chunk belong to each example,
                clipped to [0, T]; None: all.

        Raises:
            ValueError: the chunk is of other sizes, or does not fit.
            TypeError: lens are not integers.
        """
        self._check(key, value)
        count = key.shape[1]
        lens = self.chunk_lens(lens, count)
        self._check_room(key, lens)
        end = self.length + lens
        if count == 0:
            return self
        write = jax.vmap(_write)
        held = write(self.key, key, self.length, lens), write(self.value, value, self.length, lens)
        return KVCache(*held, end)

    def chunk_lens(self, lens: Array | None, count: int) -> Array:
        """int32 (B,): how many of a chunk's `count` tokens belong to each example."""
        batch = self.length.shape[0]
        # NumPy as long as the numbers are known: within jit, JAX would turn them into tracers.
        found: Any = jnp if isinstance(lens, jax.core.Tracer) else np
        lens = found.asarray(count if lens is None else lens)
        if not jnp.issubdtype(lens.dtype, jnp.integer):
            raise TypeError(
                "lengths must be integers: how many tokens of the chunk belong to each example. "
                f"Got dtype {lens.dtype}, shape {list(lens.shape)}. Fix: valid_lens.astype(int)."
            )
        if lens.shape not in ((), (batch,)):
            raise ValueError(
                "with a cache, valid_lens say how many tokens of the chunk belong to each example: "
                f"() or (B,). Got valid_lens {list(lens.shape)}, cache.key {list(self.key.shape)}. "
                "Fix: mask=regard.Mask.lengths(lens) for lengths per query, in positions of the "
                "whole text."
            )
        most = min(count, jnp.iinfo(lens.dtype).max)  # clipped in its own dtype: int64 would wrap
        clipped = found.clip(lens, found.asarray(0, lens.dtype), found.asarray(most, lens.dtype))
        return found.broadcast_to(clipped.astype(jnp.int32), (batch,))

    def mask(self, given: Mask, count: int, lens: Array) -> Mask:
        """Which keys of the cache the next `count` queries see: causal order, and `given`.

        Causal order and windows in `given` are in positions of the whole text. Its arrays and
        the key side of its segments span the cache, S = max_len. Queries past `lens` are padding
        and see no key.
        """
        position = self.positions(count)  # [B, T]
        real = is_real(count, lens)
        rights = [0, *(band.right for band in given.bands if band.right is not None)]
        ends = jnp.where(real, jnp.maximum(position + min(rights) + 1, 0), 0)
        # One length per example where there is one query: backends take it as a plain length.
        ends = ends[:, 0] if count == 1 else ends
        lefts = [band.left for band in given.bands if band.left is not None]
        keys = jnp.arange(self.max_len, dtype=jnp.int32)[None, None, None]
        windows = (keys >= position[:, None, :, None] - min(lefts),) if lefts else ()  # [B,1,T,S]
        excluded = tuple(self._in_positions(mask, position) for mask in given.excluded)
        arrays = (*given.arrays, *windows)
        return replace(given, lens=(*given.lens, ends), arrays=arrays, bands=(), excluded=excluded)

    def _in_positions(self, mask: Mask, position: Array) -> Mask:
        """The same mask, bands as arrays over the cache's keys, [B, 1, T, S]."""
        keys = jnp.arange(self.max_len, dtype=jnp.int32)[None, None, None]
        at, arrays = position[:, None, :, None], []
        for band in mask.bands:
            if band.right is not None:
                arrays.append(keys <= at + band.right)
            if band.left is not None:
                arrays.append(keys >= at - band.left)
        excluded = tuple(self._in_positions(inner, position) for inner in mask.excluded)
        return replace(mask, arrays=(*mask.arrays, *arrays), bands=(), excluded=excluded)

    def late(self, count: int, lens: Array) -> Array | None:
        """bool (B, count): queries past the cache's end; None where there are known to be none."""
        if _known(self.length) is not None and _known(lens) is not None:
            return None  # append raises
        return (self.positions(count) >= self.max_len) & is_real(count, lens)

    def _check(self, key: Array, value: Array) -> None:
        for name, chunk, held in (("key", key, self.key), ("value", value, self.value)):
            if (chunk.shape[0], *chunk.shape[2:]) != (held.shape[0], *held.shape[2:]):
                raise ValueError(
                    f"the cache was made for another batch, head count or width. Got {name} "
                    f"{list(chunk.shape)}, cache.{name} {list(held.shape)}. Fix: a cache from "
                    "this module's init_cache(batch, max_len)."
                )
        if value.shape[1] != key.shape[1]:
            raise ValueError(
                "key and value must have the same length. Got key "
                f"{list(key.shape)}, value {list(value.shape)}."
            )

    def _check_room(self, key: Array, lens: Array) -> None:
        """Raises if the chunk does not fit, as far as that is known."""
        known_length, known_lens = _known(self.length), _known(lens)
        if known_lens is None:
            return
        length = np.zeros_like(known_lens) if known_length is None else known_length
        needed = int((length + known_lens).max(initial=0))
        if needed > self.max_len:
            example = int((length + known_lens).argmax())
            held_now = "" if known_length is None else f"{length[example]} tokens are in it, and "
            raise ValueError(
                f"the cache would overflow: it has room for {self.max_len} tokens, {held_now}"
                f"{known_lens[example]} more were given (example {example}). Got key "
                f"{list(key.shape)}, cache.key {list(self.key.shape)}. Fix: init_cache(batch, "
                f"max_len) with max_len at least {needed}."
            )


def _known(array: Array) -> np.ndarray | None:
    return None if isinstance(array, jax.core.Tracer) else np.asarray(array)


def is_real(count: int, lens: Array) -> Array:
    """bool (B, count): which tokens of a chunk are not padding."""
    return jnp.arange(count, dtype=jnp.int32)[None] < lens[:, None]


def _write(held: Array, chunk: Array, length: Array, lens: Array) -> Array:
    """Writes the first `lens` rows of one example's chunk at `length`, dropping those past the end.

    dynamic_update_slice shifts a slice that does not fit. So the slice holds what the cache has
    there, overwritten by the chunk's rows, and only T rows of the cache are read or written.
    """
    chunk = chunk[: held.shape[0]].astype(held.dtype)
    count = chunk.shape[0]
    start = jnp.clip(length, 0, held.shape[0] - count)
    before = jax.lax.dynamic_slice_in_dim(held, start, count)
    row = start - length + jnp.arange(count, dtype=jnp.int32)  # < 0: written by an earlier chunk
    moved = jnp.take(chunk, jnp.clip(row, 0), axis=0)
    rows = jnp.where(((row >= 0) & (row < lens))[:, None, None], moved, before)
    return jax.lax.dynamic_update_slice_in_dim(held, rows, start, axis=0)
