"""Which rows and hidden units a program of the feature kernels has."""

from collections.abc import Callable, Sequence
from typing import Any

from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from regard.placement import kernel_result, vary_as


def run_rows(
    kernel: Callable[..., None],
    rows: Array,
    block: int,
    inputs: Sequence[Array],
    results: Sequence[tuple[tuple[int, ...], Any]],
    interpret: bool,
    name: str,
) -> list[Array]:
    """Runs a kernel on every block of rows, of [B, N, T, h]: see `program`.

    Args:
        results: shape, [B, N, ...], and dtype of each.
    """
    inputs = vary_as(list(inputs), inputs)
    read, write = (
        [whole(shape, rows.shape[1]) for shape in shapes]
        for shapes in ([array.shape for array in inputs], [shape for shape, _ in results])
    )
    found: list[Array] = pl.pallas_call(
        kernel,
        grid=grid(rows, block),
        in_specs=read,
        out_specs=write,
        out_shape=[kernel_result(shape, dtype, inputs) for shape, dtype in results],
        compiler_params=plt.CompilerParams(num_warps=4),
        interpret=interpret,
        name=name,
    )(*inputs)
    return found


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
