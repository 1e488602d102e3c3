"""Writing chunks of tokens into the slots of a memory, and what chunks need before that."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


def is_real(count: int, lens: Array) -> Array:
    """bool (B, count): which tokens of a chunk are not padding."""
    return jnp.arange(count, dtype=jnp.int32)[None] < lens[:, None]


def zero_padding(key: Array, value: Array, lens: Array) -> tuple[Array, Array]:
    """Zeroes the padding of a chunk, before keys are projected: 0 times a NaN there would be NaN
    in a kernel's gradient."""
    known_lens = known(lens)
    if known_lens is not None and (known_lens == key.shape[1]).all():
        return key, value
    real = is_real(key.shape[1], jnp.asarray(lens))[..., None, None]
    return jnp.where(real, key, 0), jnp.where(real, value, 0)


def with_heads(array: Array, rank: int | None = None) -> Array:
    """(S, D), (B, S, D) or (B, S, K, D) -> [B, S, K, D]."""
    if rank is not None and array.ndim != rank:
        raise ValueError(
            f"this memory was made of arrays of rank {rank}. Got {list(array.shape)}. Fix: the "
            "axes that the memory was made with."
        )
    return {2: lambda: array[None, :, None], 3: lambda: array[:, :, None], 4: lambda: array}[
        array.ndim
    ]()


def without_heads(array: Array, rank: int) -> Array:
    return array if rank == 4 else array[0, :, 0] if rank == 2 else array[:, :, 0]


def known(array: Any) -> np.ndarray | None:
    return None if isinstance(array, jax.core.Tracer) else np.asarray(array)


def own(leaf: Any) -> Any:
    """A copy of a parameter, so that donating the memory deletes no array of the model."""
    concrete = isinstance(leaf, Array) and not isinstance(leaf, jax.core.Tracer)
    return jnp.copy(leaf) if concrete else leaf


def write(held: Array, chunk: Array, at: Array, high: Array, low: Array | int = 0) -> Array:
    """Writes one example's chunk: row r into slot at + r for low <= r < high, if there is one.

    dynamic_update_slice shifts a slice that does not fit. So the slice holds what the slots hold,
    overwritten by the chunk's rows, and only T slots are read or written.
    """
    chunk = chunk[: held.shape[0]].astype(held.dtype)
    count = chunk.shape[0]
    start = jnp.clip(at, 0, held.shape[0] - count)
    before = jax.lax.dynamic_slice_in_dim(held, start, count)
    row = start - at + jnp.arange(count, dtype=jnp.int32)  # < 0: written by an earlier chunk
    moved = jnp.take(chunk, jnp.clip(row, 0), axis=0)
    rows = jnp.where(((row >= low) & (row < high))[:, None, None], moved, before)
    return jax.lax.dynamic_update_slice_in_dim(held, rows, start, axis=0)


def write_ring(held: Array, chunk: Array, length: Array, lens: Array) -> Array:
    """Writes one example's chunk into slots (length + r) % slots; of a long one, the last rows."""
    slots, count = held.shape[0], chunk.shape[0]
    skipped = jnp.int32(0)
    if count > slots:
        skipped = jnp.maximum(lens - slots, 0)
        chunk = jax.lax.dynamic_slice_in_dim(chunk, skipped, slots)
    base, lens = (length + skipped) % slots, lens - skipped
    held = write(held, chunk, base, lens)
    return held if count == 1 else write(held, chunk, base - slots, lens)


def write_pages(table: Array, held: Array, chunk: Array, length: Array, lens: Array) -> Array:
    """Writes chunks [B, T, K, F] into the pages that the table says; what has none is dropped."""
    pages, page = held.shape[:2]
    count, entries = chunk.shape[1], table.shape[1]
    position = length[:, None] + jnp.arange(count, dtype=jnp.int32)[None]  # [B, T]
    entry = position // page
    number = jnp.take_along_axis(table, jnp.clip(entry, 0, entries - 1), axis=1)
    exists = jnp.cumprod((table >= 0) & (table < pages), axis=1, dtype=jnp.int32)
    exists = jnp.take_along_axis(exists, jnp.clip(entry, 0, entries - 1), axis=1) > 0
    real = is_real(count, lens) & exists & (entry < entries)
    number = jnp.where(real, number, pages)  # past the last page: dropped
    return held.at[number, position % page].set(chunk.astype(held.dtype), mode="drop")
