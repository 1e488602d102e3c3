"""Values wider than a kernel's registers hold: pooled a part of their columns at a time."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from regard.mask import Allowed
from regard.pool.score_plan import Flag, Results, row_delta
from regard.score.contract import accumulation_dtype
from regard.shapes import Axes

WIDEST = 256  # columns of values that a kernel pools at a time


@dataclass(frozen=True)
class WideValues:
    """A kernel's pass, once for every part of the values' columns.

    Scores are computed again for each part. d scores are linear in d weights, which are a sum over
    the parts, so that the gradients of the parts add up.
    """

    whole: Any  # a FeaturePass or a TanhPass, of all columns

    @property
    def axes(self) -> Axes:
        return self.whole.axes

    def resized(self, axes: Axes) -> "WideValues":
        return WideValues(self.whole.resized(axes))

    def forward(self, operands: Any, *more: Any) -> tuple[Array, Any]:
        found = [
            self._part(columns).forward(_with_values(operands, columns), *more)
            for columns in self._columns()
        ]
        return jnp.concatenate([out for out, _ in found], axis=-1), found[0][1]

    def backward(
        self, operands: Any, allowed: Allowed, seed: Any, active: Flag, results: Results
    ) -> Any:
        (d_out, _, lse), delta = results, row_delta(results, jnp.float32)
        found = []
        for columns in self._columns():
            part = (d_out[..., columns], delta, lse)
            given = _with_values(operands, columns)
            found.append(self._part(columns).backward(given, allowed, seed, active, part))
            delta = jnp.zeros_like(delta)  # delta counts once, not once per part
        d_value = jnp.concatenate([part.value for part in found], axis=-1)
        found = [replace(part, value=None) for part in found]

        def total(*parts: Array) -> Array:
            wide = accumulation_dtype(parts[0].dtype)
            added = functools.reduce(jnp.add, (part.astype(wide) for part in parts))
            return added.astype(parts[0].dtype)

        return replace(jax.tree.map(total, *found), value=d_value)

    def log_sum(self, lse: Array) -> Array:
        return self.whole.log_sum(lse)

    def smooth(self, *inputs: Any) -> tuple[Array, Array | None]:
        return self.whole.smooth(*inputs)

    def _columns(self) -> list[slice]:
        V = self.axes.V
        return [slice(first, min(first + WIDEST, V)) for first in range(0, V, WIDEST)]

    def _part(self, columns: slice) -> Any:
        return self.whole.resized(replace(self.axes, V=columns.stop - columns.start))


def _with_values(operands: Any, columns: slice) -> Any:
    return replace(operands, value=operands.value[..., columns])
