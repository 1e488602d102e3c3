"""The Pallas backend: which kernel runs which way of scoring.

Scores with a lift run as features (wide_kernel); additive scores past their lift's range, or exact
by request, as tanh in registers (tanh_kernel).
"""

from dataclasses import replace
from typing import Any, cast

import jax.numpy as jnp
from jax import Array

from regard.pool.passes import Pass, Static, pool_by
from regard.pool.problem import Problem
from regard.pool.ways import Way, find_ways
from regard.pool.wide_kernel.blocks import Blocks
from regard.pool.wide_kernel.wide_pass import WideOperands, WidePass
from regard.score.contract import Lift


def pallas(problem: Problem, blocks: Blocks | None, device: str) -> tuple[Array, Array]:
    """The output, [B, N, T, V], in the value's dtype, and whether the lift ran (bool scalar).

    Args:
        device: "hopper", "gpu" or "interpret".
    """
    ways, in_range = find_ways(problem, tiled=False)
    passes, operands = zip(*(_prepare(problem, way, blocks, device) for way in ways), strict=True)
    static = Static(passes, branch=True, dtype=cast(Array, problem.value).dtype)
    allowed = (problem.allowed,) * len(ways)
    out = pool_by(static, operands, allowed, problem.seed, in_range)
    if ways[0].lift is None or in_range is None:
        return out, jnp.array(ways[0].lift is not None)
    return out, in_range


def _prepare(
    problem: Problem, way: Way, blocks: Blocks | None, device: str
) -> tuple[Pass, Any]:
    axes, value = problem.axes, cast(Array, problem.value)
    if way.lift is None:
        raise NotImplementedError("tanh")
    lift: Lift = way.lift
    if lift.key.shape[1] != axes.K:  # one score per head: no sharing
        value, axes = jnp.repeat(value, axes.N // axes.K, axis=1), replace(axes, K=axes.N)
    wide = WidePass(axes, problem.query.dtype, 1.0, problem.dropout_rate, device, blocks)
    return wide, WideOperands(lift.expansion, lift.query, lift.key, lift.key_bias, value)
