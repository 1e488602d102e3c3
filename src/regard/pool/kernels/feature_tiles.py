"""The feature kernels in the place of a `TiledPass`: for parts of the keys, which are merged.

Operands and statistics are those of plain XLA, so that a ring merges either and differentiates
either a second time in the same way.
"""

from dataclasses import dataclass
from typing import Any, cast

import jax.numpy as jnp
from jax import Array

from regard.dropout import Seed
from regard.mask import Allowed
from regard.pool.backend import Problem
from regard.pool.kernels.block_shapes import Blocks
from regard.pool.kernels.feature_pass import FeatureOperands, FeaturePass
from regard.pool.kernels.tile import LOG2_E
from regard.pool.score_plan import Flag, Results
from regard.pool.xla_tiles import Operands
from regard.shapes import Axes


@dataclass(frozen=True)
class FeatureTiles:
    """Forward and backward over one part, by kernels."""

    kernel: FeaturePass

    @classmethod
    def of(cls, problem: Problem, axes: Axes, kernel: str, blocks: Blocks | None) -> "FeatureTiles":
        """
        Args:
            axes: of a part.
            kernel, blocks: as in `pallas.Settings`.
        """
        rate, cap = problem.dropout_rate, problem.softcap
        dtype = problem.query.dtype
        return cls(FeaturePass(axes, dtype, 1.0, rate, kernel, blocks, softcap=cap))

    @property
    def checks_varying(self) -> bool:
        """False in interpret mode, which does not track what varies over a mesh."""
        return self.kernel.device != "interpret"

    def forward(
        self, operands: Operands, allowed: Allowed, seed: Seed, active: Flag
    ) -> tuple[Array, Any]:
        """Output [B, N, T, V], and Softmax's statistics: the largest score and the sum, [B, N, T].

        The log-sum-exp with a sum of 1 says the same.
        """
        out, lse = self.kernel.forward(_features_of(operands), allowed, seed, active)
        empty = lse == -jnp.inf
        lowest = jnp.finfo(lse.dtype).min  # as Softmax has it, so that differences are no NaN
        return out, (jnp.where(empty, lowest, lse / LOG2_E), jnp.where(empty, 0.0, 1.0))

    def backward(
        self, operands: Operands, allowed: Allowed, seed: Seed, active: Flag, results: Results
    ) -> Operands:
        """Cotangents, from (d out, delta, the statistics over all parts)."""
        d_out, delta, (top, total) = results
        empty = total == 0
        lse = (top + jnp.log(jnp.where(empty, 1.0, total))) * LOG2_E
        lse = jnp.where(empty, -jnp.inf, lse)
        features = _features_of(operands)
        found = self.kernel.backward(features, allowed, seed, active, (d_out, delta, lse))
        return Operands(
            None,
            found.expansion,
            (found.query, _column(found.query_bias)),
            (found.key, _column(found.key_bias)),
            found.value,
            None,
        )


def _features_of(operands: Operands) -> FeatureOperands:
    (query, query_bias), (key, key_bias) = cast(Any, (operands.query, operands.key))
    biases = [None if bias is None else bias[..., 0] for bias in (key_bias, query_bias)]
    value = cast(Array, operands.value)
    return FeatureOperands(operands.expansion, query, key, biases[0], value, None, biases[1])


def _column(bias: Array | None) -> Array | None:
    return None if bias is None else bias[..., None]
