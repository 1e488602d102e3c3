"""The Pallas backend: which kernel runs which way of scoring, and what it does not do.

Scores with a lift run as features (wide_kernel); additive scores past their lift's range, or exact
by request, as tanh in registers (tanh_kernel).
"""

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array

from regard.normalize import Softmax
from regard.pool.passes import DivisiblePass, Static, pool_by
from regard.pool.problem import Problem, hide_late
from regard.pool.request import Device, Request
from regard.pool.sharded import ShardedPass
from regard.pool.ways import Way, find_ways, lift_ran
from regard.pool.wide_kernel.blocks import Blocks, current_blocks
from regard.score.additive import Additive
from regard.score.contract import Lift
from regard.varying import vary_as

AMPERE, HOPPER = (8, 0), (9, 0)
MOSAIC_SINCE = (0, 11)  # the JAX whose Mosaic GPU lowering hopper.py is written for
_DTYPES = ("bfloat16", "float16", "float32")

_interpreted: ContextVar[bool] = ContextVar("interpreted", default=False)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Runs the kernels on a CPU, step by step and slowly; for tests.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> from regard.pool.pallas import interpreted
        >>> x = jnp.ones((1, 16, 16))
        >>> with interpreted():
        ...     regard.attend(x, x, x, implementation="pallas").shape
        (1, 16, 16)
    """
    token = _interpreted.set(True)
    try:
        yield
    finally:
        _interpreted.reset(token)


@dataclass(frozen=True)
class Target:
    """What kernels are traced for: "hopper", "gpu" or "interpret", and block shapes forced."""

    device: str
    blocks: Blocks | None

    @classmethod
    def of(cls, device: Device) -> "Target":
        if _interpreted.get():
            return cls("interpret", current_blocks())
        mosaic = device.capability == HOPPER and jax.__version_info__ >= MOSAIC_SINCE
        # As of JAX 0.11, its loops do not take bounds that vary over a mesh.
        mosaic = mosaic and not device.varies
        return cls("hopper" if mosaic else "gpu", current_blocks())


def accepts(request: Request) -> str:
    """Why these kernels can run a request.

    Raises:
        NotImplementedError: naming what they lack.
    """
    device = request.device
    on_gpu = device.capability is not None and device.capability >= AMPERE
    if not on_gpu and not _interpreted.get():
        raise NotImplementedError(
            "the kernels need an NVIDIA GPU of compute capability 8.0 or later (running on "
            f"{device.platform}); inside regard.pool.pallas.interpreted() a CPU runs them, slowly"
        )
    if not isinstance(request.normalize, Softmax):
        raise NotImplementedError(
            f"the kernels know Softmax only, not {type(request.normalize).__name__}"
        )
    if request.bias:
        raise NotImplementedError("the kernels take no bias= per pair of query and key")
    dtypes = [request.dtype] + ([] if request.value_dtype is None else [request.value_dtype])
    for dtype in dtypes:
        if jnp.dtype(dtype).name not in _DTYPES:
            raise NotImplementedError(f"the kernels take {', '.join(_DTYPES)}, not {dtype}")
    if request.axes.V > 256:
        raise NotImplementedError(f"values wider than 256 (here {request.axes.V})")
    if request.axes.empty():
        return "nothing to look at, or nobody to look: zeros"
    if request.lift is not None:
        return _describe(request)
    if isinstance(request.score, Additive):
        return "exact tanh in registers, memory linear in T and S"
    raise NotImplementedError(
        f"{type(request.score).__name__} has no lift: no inner product for the kernels to compute"
    )


def _describe(request: Request) -> str:
    lift = request.lift
    assert lift is not None
    kernel = Target.of(request.device).device
    how = {"hopper": "Mosaic GPU", "gpu": "Triton", "interpret": "Triton, interpreted"}[kernel]
    said = f"memory linear in T and S; {how} kernel over features of width {lift.width}"
    axes = request.axes
    described = request.score.describe_lift(axes.T, axes.S, request.dtype)
    return f"{said}; scores by {described}" if described else said


def pallas(problem: Problem, target: Target, scale: float | None) -> tuple[Array, Array]:
    """The output, [B, N, T, V], in the value's dtype, and whether the lift ran (bool scalar).

    Args:
        scale: a number that the score only multiplies by, known before any data: the kernel
            multiplies, and no copy of the queries is made. None: the lift multiplies.
    """
    if scale is None:  # a lift may mix rows, padding with the rest
        return _pool(problem.hidden(), target, scale)
    ways = (functools.partial(way, target=target, scale=scale) for way in (_alone, _and_back))
    return hide_late(*ways, problem)


def _alone(problem: Problem, target: Target, scale: float) -> tuple[Array, Array]:
    """A forward pass without a way back. Its kernels replace the scores of pairs that may not meet;
    a query that meets no key has no weight, and its output is 0.
    """
    from regard.pool.wide_kernel.wide_pass import hides_values

    dtypes = problem.query.dtype, cast(Array, problem.value).dtype
    if hides_values(target.device, dtypes, problem.allowed, problem.seed):
        return _pool(problem, target, scale, raw_values=True)
    return _pool(problem.with_hidden_values(), target, scale)


def _and_back(problem: Problem, target: Target, scale: float) -> tuple[Array, Array]:
    return _pool(problem.hidden(), target, scale)


def _pool(
    problem: Problem, target: Target, scale: float | None, raw_values: bool = False
) -> tuple[Array, Array]:
    ways, in_range = find_ways(problem, tiled=False)
    prepared = [_prepare(problem, way, target, scale, raw_values) for way in ways]
    passes, operands = zip(*prepared, strict=True)
    static = Static(
        tuple(ShardedPass(one) for one in passes),
        branch=True,
        dtype=cast(Array, problem.value).dtype,
    )
    allowed = (problem.allowed,) * len(ways)
    inputs = (operands, allowed, problem.seed, in_range)
    out = pool_by(static, *vary_as(inputs, inputs))
    return out, lift_ran(ways, in_range)


def _prepare(
    problem: Problem, way: Way, target: Target, scale: float | None, raw_values: bool
) -> tuple[DivisiblePass, Any]:
    # Imported when first used: loading Pallas takes a tenth of `import regard`.
    from regard.pool.tanh_kernel.tanh_pass import TanhPass, TanhRows
    from regard.pool.wide_kernel.wide_pass import WideOperands, WidePass

    axes, value, dtype = problem.axes, cast(Array, problem.value), problem.query.dtype
    keys = way.lift.key if way.lift is not None else cast(Any, way.scored)[2]
    if keys.shape[1] != axes.K:  # one score per head: no sharing
        value, axes = jnp.repeat(value, axes.N // axes.K, axis=1), replace(axes, K=axes.N)
    if way.lift is None:
        score, x, y = cast(Any, way.scored)
        exact = TanhPass(
            axes, dtype, problem.dropout_rate, target.device == "interpret", target.blocks
        )
        return exact, TanhRows(x, y, score, value)
    lift: Lift = way.lift
    query = lift.query
    if scale is not None and scale > 0:
        query = problem.query
    else:
        scale = 1.0
    wide = WidePass(
        axes, dtype, scale, problem.dropout_rate, target.device, target.blocks, raw_values
    )
    # Two ways have to agree on what they have cotangents for.
    as_they_came = lift.as_they_came if lift.in_range is None else None
    return wide, WideOperands(lift.expansion, query, lift.key, lift.key_bias, value, as_they_came)
