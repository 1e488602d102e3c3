"""One differentiable pooling out of passes: by the first, or by the second where data forbids it.

A pass knows how to pool one way of scoring, forward and backward (tiles in plain XLA, a kernel over
features, a kernel over tanh). Here is only what they share: the custom gradient, and the branch on
the data's range.
"""

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from regard.mask import Allowed
from regard.shapes import Axes


class Pass(Protocol):
    """One way to pool; static and hashable.

    Arrays that pad T may come back longer than T: the caller cuts them. Where `active` is given
    and False, nothing has to be computed and zeros come back.
    """

    def forward(
        self, operands: Any, allowed: Allowed, seed: Any, active: Array | None
    ) -> tuple[Array, Any]:
        """Output [B, N, T, V] and what the way back needs per query, leaves [B, N, T]."""
        ...

    def backward(
        self,
        operands: Any,
        allowed: Allowed,
        seed: Any,
        active: Array | None,
        results: tuple[Array, Array, Any],
    ) -> Any:
        """Cotangents of the operands, from (d out, out, the leaves)."""
        ...


class DivisiblePass(Pass, Protocol):
    """A pass that can do a part of the batch and of the heads by itself."""

    @property
    def axes(self) -> Axes: ...

    def share(self, axes: Axes) -> "DivisiblePass":
        """The same pass for a part of that size."""
        ...


class Static(NamedTuple):
    """What is static: the passes, how one is left out, and the output's dtype."""

    passes: tuple[Pass, ...]
    branch: bool
    dtype: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def pool_by(
    static: Static,
    operands: tuple[Any, ...],
    allowed: tuple[Allowed, ...],
    seed: Array | None,
    in_range: Array | None,
) -> Array:
    """Pools by the first pass; with two, by the second where `in_range` is False."""
    return _forward(static, operands, allowed, seed, in_range)[0]


def _forward(
    static: Static,
    operands: tuple[Any, ...],
    allowed: tuple[Allowed, ...],
    seed: Array | None,
    in_range: Array | None,
) -> tuple[Array, Any]:
    def run(way: int, active: Array | None) -> tuple[Array, Any]:
        return static.passes[way].forward(operands[way], allowed[way], seed, active)

    if in_range is None:
        out, stats = run(0, None)
    elif static.branch:
        out, stats = lax.cond(in_range, lambda: run(0, None), lambda: run(1, None))
    else:
        choose = functools.partial(jnp.where, in_range)
        out, stats = jax.tree.map(choose, run(0, in_range), run(1, ~in_range))
    return out.astype(static.dtype), (operands, allowed, seed, in_range, out, stats)


def _backward(
    static: Static, residuals: Any, d_out: Array
) -> tuple[tuple[Any, ...], None, None, None]:
    operands, allowed, seed, in_range, out, stats = residuals

    def run(way: int, active: Array | None) -> Any:
        results = (d_out, out, stats)
        return static.passes[way].backward(operands[way], allowed[way], seed, active, results)

    if in_range is None:
        return (run(0, None),), None, None, None
    if not static.branch:
        return (run(0, in_range), run(1, ~in_range)), None, None, None
    nothing = jax.tree.map(jnp.zeros_like, operands)
    cotangents = lax.cond(
        in_range,
        lambda: (run(0, None), nothing[1]),
        lambda: (nothing[0], run(1, None)),
    )
    return cotangents, None, None, None


pool_by.defvjp(_forward, _backward)
