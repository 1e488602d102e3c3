"""Block shapes of the Triton-lowered kernels: a small table of what was measured, and a default.

`regard bench --tune` measures on your GPU and prints lines for this table.
"""

from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from regard.placement import with_value


@dataclass(frozen=True)
class Blocks:
    """One kernel's block shapes; every number but the stages a power of two.

    Attributes:
        queries, keys: sizes of a tile of scores.
        chunk: features per matrix product.
        warps, stages: of Triton's compiler.
    """

    queries: int
    keys: int
    chunk: int = 64
    warps: int = 8
    stages: int = 3


WIDTHS = (64, 128, 1 << 30)  # of the features: one product, one product, a loop of products
VALUE_WIDTHS = (64, 128, 256)

# (direction or kernel, bits of a number, width class, value width class). Measured on an H200, JAX
# 0.11.2; Hopper's forward pass in 16 bits is hopper.py's, so those lines serve Ampere and later.
TABLE: dict[tuple[str, int, int, int], Blocks] = {
    ("forward", 16, 64, 64): Blocks(128, 64, 64, 4, 3),
    ("forward", 16, 128, 128): Blocks(128, 64, 128, 8, 3),
    ("forward", 16, WIDTHS[-1], 64): Blocks(128, 256, 64, 8, 3),
    ("forward", 16, WIDTHS[-1], 128): Blocks(128, 128, 64, 8, 3),
    ("forward", 16, WIDTHS[-1], 256): Blocks(64, 128, 64, 8, 3),
    ("backward", 16, WIDTHS[-1], 64): Blocks(128, 64, 64, 4, 3),
    ("backward", 16, WIDTHS[-1], 128): Blocks(128, 64, 64, 8, 3),
    ("backward", 16, WIDTHS[-1], 256): Blocks(128, 64, 64, 8, 3),
    # float32, compiled for sm_80 and sm_90 by Triton 3.5, not yet timed: the largest tiles without
    # spilled registers, in at most 102 KiB of shared memory.
    **{
        ("backward", 32, width, V): Blocks(32, 32, 32, 4, 1) for width in WIDTHS for V in (128, 256)
    },
    ("d keys", 32, 64, 64): Blocks(32, 64, 64, 4, 1),
    ("d queries", 32, 64, 64): Blocks(64, 32, 64, 4, 1),
    # weight_summary.py, compiled for sm_90 without spilled registers, not yet timed.
    ("summary", 16, 64, 64): Blocks(128, 64, 64, 8, 3),
    ("summary", 16, 128, 64): Blocks(128, 64, 128, 8, 3),
    # backward_narrow.py, by the wider of features and values.
    ("d keys", 16, 64, 64): Blocks(128, 64, 64, 4, 2),
    ("d keys", 16, 128, 128): Blocks(64, 128, 128, 8, 3),
    ("d queries", 16, 64, 64): Blocks(64, 64, 64, 4, 3),
    ("d queries", 16, 128, 128): Blocks(128, 64, 128, 8, 3),
}
WARPS = 16384  # of all programs of a kernel: eight times what an H200 runs at a time
DEFAULT = {16: Blocks(128, 64, 64, 8, 2), 32: Blocks(64, 64, 32, 4, 2)}

_forced: ContextVar[Blocks | None] = ContextVar("blocks", default=None)


def forced_blocks(blocks: Blocks | None) -> AbstractContextManager[None]:
    """Forces the block shapes of kernels traced inside; for tests and `regard bench --tune`."""
    return with_value(_forced, blocks)


def current_blocks() -> Blocks | None:
    return _forced.get()


def pick_blocks(direction: str, width: int, value_width: int, dtype: Any) -> Blocks:
    """The table's line for these widths, or the default.

    Example:
        >>> pick_blocks("forward", 896, 64, "bfloat16").keys
        256
    """
    bits = 8 * jnp.dtype(dtype).itemsize
    key = (direction, bits, _class(WIDTHS, width), _class(VALUE_WIDTHS, value_width))
    return TABLE.get(key, DEFAULT[bits])


def pick_parts(programs: int, warps: int, steps: int) -> int:
    """Split factor: how many programs (thread blocks) share the loop of one; 1 is no split.

    Programs are split until a GPU has WARPS to run, eight times what it runs at a time: with fewer,
    it waits for the last ones. A split costs an addition of partial results, so there are at most
    8 parts, of at least 4 iterations each.

    Args:
        programs, warps: the number of programs without a split, and the warps of one.
        steps: iterations of a program's loop.

    Example:
        >>> [pick_parts(programs, warps=4, steps=64) for programs in (512, 1024, 8192)]
        [8, 4, 1]
    """
    return max(1, min(-(-WARPS // max(programs * warps, 1)), steps // 4, 8))


def _class(classes: tuple[int, ...], size: int) -> int:
    return next((limit for limit in classes if size <= limit), classes[-1])
