"""Masks and biases as Flax gives them: any number of batch axes, one axis of heads, numbers.

multi_head.py brings them to one batch axis here, and picks out the heads that share a score.
"""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from regard.mask import Mask


def as_mask(mask: Mask | Array | None, valid_lens: Array | None, batch: tuple[int, ...]) -> Mask:
    """One Mask, whose parts have one batch axis in place of the caller's none or several."""
    if mask is None:
        mask = Mask()
    elif not isinstance(mask, Mask):
        mask = Mask.boolean(_as_bool(jnp.asarray(mask)))
    if valid_lens is not None:
        mask = mask & Mask.lengths(valid_lens)
    return mask if len(batch) == 1 else _flat_mask(mask, batch)


def _flat_mask(mask: Mask, batch: tuple[int, ...]) -> Mask:
    ids = [
        tuple(flat(x, batch, 1) if jnp.ndim(x) > 1 else x for x in pair)
        for pair in mask.segment_ids
    ]
    return replace(
        mask,
        lens=tuple(flat(lens, batch) if jnp.ndim(lens) else lens for lens in mask.lens),
        segment_ids=tuple((query_ids, key_ids) for query_ids, key_ids in ids),
        arrays=tuple(flat_pairs(array, batch) for array in mask.arrays),
        excluded=tuple(_flat_mask(inner, batch) for inner in mask.excluded),
    )


def _as_bool(mask: Array) -> Array:
    """Flax's mask makers return float32 by default: what is not 0 takes part."""
    if mask.dtype == jnp.bool_:
        return mask
    if not isinstance(mask, jax.core.Tracer) and not np.isin(np.asarray(mask), (0, 1)).all():
        raise ValueError(
            "a mask of numbers must be of zeros and ones; True and 1 take part. Got mask "
            f"{list(mask.shape)} of dtype {mask.dtype}. Fix: bias= for numbers added to the scores."
        )
    return mask != 0


def flat(array: Array, batch: tuple[int, ...], rest: int | None = None) -> Array:
    """One batch axis for (batch..., rest); without the batch in front, the array as it is."""
    shape = jnp.shape(array)
    rest = len(shape) - len(batch) if rest is None else rest
    if len(batch) == 1 or len(shape) != len(batch) + rest or shape[: len(batch)] != batch:
        return array
    return jnp.reshape(array, (math.prod(batch), *shape[len(batch) :]))


def flat_pairs(array: Array, batch: tuple[int, ...]) -> Array:
    """What broadcasts to (batch..., N, T, S), with one batch axis where it has any."""
    if jnp.ndim(array) <= 3 or len(batch) == 1:
        return array
    try:
        return flat(jnp.broadcast_to(array, (*batch, *array.shape[-3:])), batch)
    except ValueError:
        raise ValueError(
            f"mask and bias must broadcast to the weights (batch..., N, T, S), with batch "
            f"{list(batch)}. Got {list(array.shape)}. Fix: size-1 axes where it is shared."
        ) from None


def mask_of_heads(mask: Mask, heads: tuple[int, ...], num_heads: int) -> Mask:
    return replace(
        mask,
        lens=tuple(take(lens, heads, 1) if jnp.ndim(lens) == 3 else lens for lens in mask.lens),
        arrays=tuple(pairs_of_heads(array, heads, num_heads) for array in mask.arrays),
        excluded=tuple(mask_of_heads(inner, heads, num_heads) for inner in mask.excluded),
    )


def pairs_of_heads(array: Any, heads: tuple[int, ...], num_heads: int) -> Any:
    """What broadcasts to [B, N, T, S], for some of the heads."""
    if array is None or jnp.ndim(array) < 3 or array.shape[-3] != num_heads:
        return array
    return take(array, heads, jnp.ndim(array) - 3)


def take(array: Array, at: tuple[int, ...], axis: int) -> Array:
    """array[..., at, ...]: a slice where `at` is one, nothing to do where it is everything."""
    first, size = at[0], len(at)
    if at != tuple(range(first, first + size)):
        return jnp.take(array, jnp.asarray(at), axis=axis)
    if size == array.shape[axis]:
        return array
    return jax.lax.slice_in_dim(array, first, first + size, axis=axis)
