"""Which rows and hidden units a program of the feature kernels has."""

from typing import Any

from jax import Array
from jax.experimental import pallas as pl


def lanes_of(size: int) -> int:
    """Hidden units of one program: the largest power of two up to 64 that divides all of them."""
    return min(64, size & -size)


def grid(rows: Array, block: int) -> tuple[int, ...]:
    """Of programs with `block` rows of [B, N, T, h] each."""
    B, N, T, h = rows.shape
    return T // block, h // lanes_of(h), B * N


def program(rows: Array, block: int) -> tuple[Any, Any]:
    """The rows and the hidden units of this program."""
    width = lanes_of(rows.shape[3])
    at, lanes = (pl.program_id(axis) for axis in range(2))
    return pl.ds(at * block, block), pl.ds(lanes * width, width)


def whole(shape: tuple[int, ...], heads: int) -> pl.BlockSpec:
    """[B or 1, N or a divisor, ...], read as [...] of this program's example and head."""
    zeros, group = (0,) * (len(shape) - 2), heads // shape[1]
    one_for_all = shape[0] == 1

    def index(i: Any, j: Any, e: Any) -> tuple[Any, ...]:
        return (0 if one_for_all else e // heads, e % heads // group, *zeros)

    return pl.BlockSpec((None, None, *shape[2:]), index)
