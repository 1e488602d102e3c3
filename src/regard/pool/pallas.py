"""The Pallas backend: GPU kernels for softmax over every score with a lift, and over additive ones.

Scores with a lift run as features (kernels/feature_pass.py). Additive scores past their lift's
range, or exact by request, run as tanh in registers (kernels/tanh_pass.py).
"""

import functools
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array

from regard.normalize import Normalizer, Softmax
from regard.placement import Device, with_value
from regard.pool.backend import Backend, Problem, Request, zero_for_gradient
from regard.pool.kernels.block_shapes import Blocks, current_blocks
from regard.pool.score_plan import Pass, ScorePath, ScorePlan, run_pass
from regard.score.additive import lift_policy
from regard.score.contract import Lift, Score
from regard.shapes import Axes

AMPERE, HOPPER = (8, 0), (9, 0)
MOSAIC_SINCE = (0, 11)  # the JAX whose Mosaic GPU lowering hopper.py is written for
_DTYPES = ("bfloat16", "float16", "float32")

# Against tanh in registers, a lift of an additive score costs T + S, and time for several small
# kernels; it saves T·S. It is taken where T·S is so many times T + S, and so many tanhs are saved.
LIFTED_SINCE, LIFT_SAVES = 100, 2.5e8

_interpreted: ContextVar[bool] = ContextVar("interpreted", default=False)


def interpreted() -> AbstractContextManager[None]:
    """Runs the kernels on a CPU, step by step and slowly; for tests.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> from regard.pool.pallas import interpreted
        >>> x = jnp.ones((1, 16, 16))
        >>> with interpreted():
        ...     regard.attend(x, x, x, implementation="pallas").shape
        (1, 16, 16)
    """
    return with_value(_interpreted, True)


@dataclass(frozen=True)
class Settings:
    """What kernels are traced for.

    Attributes:
        kernel: "hopper", "gpu" (Ampere and later) or "interpret".
        device: of the call.
        blocks: forced block shapes; None looks them up.
        scale: a number that the score only multiplies by, known before any data: the kernel
            multiplies, and no copy of the queries is made. None: the lift multiplies.
        few_queries: decode.py takes the call.
        in_pages: it reads the pages of a memory in place.
        exact: tanh in registers, where a lift would be slower.
    """

    kernel: str
    device: Device
    blocks: Blocks | None
    scale: float | None
    few_queries: bool
    in_pages: bool = False
    exact: bool = False


def kernel_for(device: Device) -> str:
    """Which kernels run on a device, as in `Settings`."""
    if _interpreted.get():
        return "interpret"
    mosaic = device.capability == HOPPER and jax.__version_info__ >= MOSAIC_SINCE
    # As of JAX 0.11, Mosaic's loops do not take bounds that vary over a mesh.
    return "hopper" if mosaic and not device.varies else "gpu"


def kernel_for_parts(request: Request) -> str | None:
    """Which kernels may pool a part of the keys of this call inside a shard_map; None for none."""
    device = request.device._replace(varies=True)
    dtypes = {jnp.dtype(dtype).name for dtype in (request.dtype, request.value_dtype or "float32")}
    on_gpu = device.capability is not None and device.capability >= AMPERE
    known = type(request.normalize) is Softmax and dtypes <= set(_DTYPES)
    return kernel_for(device) if known and (on_gpu or _interpreted.get()) else None


def summary_settings(request: Request) -> Settings | None:
    """What the kernels of `summarize_by_kernels` are traced for; None where none of them runs."""
    kernels, axes = Pallas(), request.axes
    if type(request.normalize) is not Softmax or axes.symbolic() or axes.empty():
        return None
    if request.device.platform != "gpu" and not _interpreted.get():
        return None
    request = replace(request, value_dtype=request.dtype)  # there is no value
    return kernels.settings(request) if kernels.refuses(request) is None else None


class Pallas(Backend):
    """Kernels for NVIDIA GPUs since Ampere; memory linear in T and S."""

    name = "pallas"

    def refuses(self, request: Request) -> str | None:
        device, axes = request.device, request.axes
        on_gpu = device.capability is not None and device.capability >= AMPERE
        if not on_gpu and not _interpreted.get():
            return (
                "the kernels need an NVIDIA GPU of compute capability 8.0 or later (running on "
                f"{device.platform}); inside regard.pool.pallas.interpreted() a CPU runs them, "
                "slowly"
            )
        if (lack := _lack_of_regime(request)) is not None:
            return lack
        for dtype in (request.dtype, request.value_dtype or request.dtype):
            if jnp.dtype(dtype).name not in _DTYPES:
                return f"the kernels take {', '.join(_DTYPES)}, not {dtype}"
        if axes.empty() or request.score.tanh_vector() is not None:
            return None
        lift, name = request.lift, request.score.label()
        if lift is not None and lift.in_range is None:
            return None
        if lift is not None:
            return f"{name}: its lift holds over a range of data, and no kernel scores it outside"
        return f"{name} has no lift: no inner product for the kernels to compute"

    def describe(self, request: Request) -> str:
        if request.axes.empty():
            return "no query or no key: zeros"
        plan, exact = request.plan(tile_form=False), _is_short(request.score, request.axes)
        few = ", keys split over thread blocks (few queries)" if is_few_on_gpu(request) else ""
        if plan.paths[0].lift is None or exact:
            if not few and _holds_scores(request.axes, request.normalize, current_blocks()):
                return f"exact tanh in registers, {request.pairs:,} scores held at once"
            return f"exact tanh in registers, memory linear in T and S{few}"
        kernel = dict(hopper="Mosaic GPU", gpu="Triton", interpret="Triton, interpreted")
        name = kernel_for(request.device)
        how = kernel["gpu" if few and name == "hopper" else name]
        return f"{how} kernel, memory linear in T and S{few}; scores {plan.describe()}"

    def reads_pages(self, request: Request) -> bool:
        from regard.pool.kernels.decode_pass import reads_pages  # loading Pallas takes long

        return request.paged_as_stored and reads_pages(request)

    def settings(self, request: Request) -> Settings:
        scale = request.score.static_scale(request.axes.query_width)
        kernel = kernel_for(request.device)
        few, exact = is_few_on_gpu(request), _is_short(request.score, request.axes)
        in_pages = few and self.reads_pages(request)
        return Settings(kernel, request.device, current_blocks(), scale, few, in_pages, exact)

    def pool(self, problem: Problem, settings: Settings) -> tuple[Array, Array]:
        if settings.few_queries:
            return _pool_few(problem, settings)
        if settings.scale is None:  # a lift may mix rows, padding with the rest
            return _pool_zeroed(problem, settings)
        forward_only = functools.partial(_pool_forward_only, settings=settings)
        differentiable = functools.partial(_pool_zeroed, settings=settings)
        return zero_for_gradient(forward_only, differentiable, problem)

    def scores(self, problem: Problem, settings: Settings) -> Array:
        if not settings.exact:
            return super().scores(problem, settings)
        return ScorePlan.of(problem, lifted=False).run(ScorePath.dense_scores)


def _lack_of_regime(request: Request) -> str | None:
    regime = request.normalize
    name = type(regime).__name__
    if not regime.in_kernels:
        return (
            f"the kernels support Softmax, Sparsemax, Hard, and Kernel and Cone of plain "
            f"arithmetic, not this {name}"
        )
    if not regime.bounded and request.value_dtype == jnp.float16:
        return f"the weights of {name} have no bound, and float16 has: kernels multiply in it"
    return None


def is_few_on_gpu(request: Request) -> bool:
    """Whether the kernels for few queries would take the call."""
    from regard.pool.kernels.decode_pass import takes  # loading Pallas takes long

    return takes(request)


def _pool_few(problem: Problem, settings: Settings) -> tuple[Array, Array]:
    """Few queries: padding is never read. But where keys are projected or lifted first, the
    gradient of what does that multiplies them by d scores of 0, and 0 · NaN is NaN.
    """
    from regard.pool.kernels.decode_pass import reads_callers_keys

    whole = functools.partial(_decode, settings=settings)
    if reads_callers_keys(problem.score, problem.query):
        return whole(problem)
    if problem.score.tanh_vector() is None:  # a lift may mix rows, padding with the rest
        return whole(problem.zeroed())
    return zero_for_gradient(whole, lambda problem: whole(problem.zeroed()), problem)


def _decode(problem: Problem, settings: Settings) -> tuple[Array, Array]:
    from regard.pool.kernels.decode_pass import DecodePass, prepare

    plan, operands, scale, axes = prepare(problem, settings.scale, settings.in_pages)
    static = DecodePass(
        axes,
        jnp.dtype(jnp.float32),
        scale,
        problem.dropout_rate,
        settings.kernel == "interpret",
        settings.blocks,
        problem.softcap,
    )
    return plan.pool(problem, [(static, operands)], settings.device, branch=True)


def _pool_forward_only(problem: Problem, settings: Settings) -> tuple[Array, Array]:
    """A forward pass without a backward pass: its kernels replace the scores of masked pairs, and
    the output of an empty row is 0.
    """
    from regard.pool.kernels.feature_pass import zeroes_values

    dtypes = problem.query.dtype, cast(Array, problem.value).dtype
    plain = problem.softcap is None and problem.bias is None and _regime(problem) is None
    if plain and zeroes_values(settings.kernel, dtypes, problem.allowed, problem.seed):
        return _pool(problem, settings, raw_values=True)
    return _pool(problem.with_zeroed_values(), settings)


def _pool_zeroed(problem: Problem, settings: Settings) -> tuple[Array, Array]:
    return _pool(problem.zeroed(), settings)


def _pool(problem: Problem, settings: Settings, raw_values: bool = False) -> tuple[Array, Array]:
    plan = ScorePlan.of(problem, tile_form=False, lifted=not settings.exact)
    passes = [_prepare(problem, path, settings, raw_values) for path in plan.paths]
    return plan.pool(problem, passes, settings.device, branch=True)


def _is_short(score: Score, axes: Axes) -> bool:
    """Whether tanh in registers is faster than the lift of an additive score."""
    vector = score.tanh_vector()
    if vector is None or lift_policy().anywhere:
        return False
    B, N, T, S = axes.B, axes.N, axes.T, axes.S
    tanhs = B * N * T * S * vector.shape[-1]
    return T * S < LIFTED_SINCE * (T + S) or tanhs < LIFT_SAVES


def _holds_scores(axes: Axes, normalize: Normalizer, blocks: Blocks | None) -> bool:
    """Whether exact additive scores are held all at once: short sequences."""
    from regard.pool.kernels.tanh_dense import is_short

    return type(normalize) is Softmax and blocks is None and is_short(axes)


def _regime(problem: Problem) -> Normalizer | None:
    return None if type(problem.normalize) is Softmax else problem.normalize


def _prepare(
    problem: Problem, path: ScorePath, settings: Settings, raw_values: bool
) -> tuple[Pass, Any]:
    # Imported when first used: loading Pallas takes a tenth of `import regard`.
    from regard.pool.kernels.tanh_dense import DenseTanhPass
    from regard.pool.kernels.tanh_pass import TanhOperands, TanhPass
    from regard.pool.kernels.wide_values import WIDEST, WideValues

    axes, value, dtype = problem.axes, cast(Array, problem.value), problem.query.dtype
    blocks, rate = settings.blocks, problem.dropout_rate
    if path.key_heads != axes.K:  # one score per head: no sharing
        value, axes = jnp.repeat(value, axes.N // axes.K, axis=1), replace(axes, K=axes.N)
    found: tuple[Any, Any]
    if path.lift is None:
        score, x, y = cast(Any, path.scored)
        terms = problem.softcap, _regime(problem)
        kind = DenseTanhPass if _holds_scores(axes, problem.normalize, blocks) else TanhPass
        exact = kind(axes, dtype, rate, settings.kernel == "interpret", blocks, *terms)
        found = exact, TanhOperands(x, y, score, value, problem.bias)
    else:
        found = _by_features(problem, path.lift, value, axes, settings, raw_values)
    if axes.V > WIDEST and not isinstance(found[0], DenseTanhPass):
        found = WideValues(found[0]), found[1]
    return found


def _by_features(
    problem: Problem, lift: Lift, value: Array, axes: Axes, settings: Settings, raw_values: bool
) -> tuple[Pass, Any]:
    from regard.pool.kernels.feature_pass import FeatureOperands, FeaturePass

    query, scale, dtype = lift.query, 1.0, problem.query.dtype
    if settings.scale is not None:
        query, scale = problem.query, settings.scale
    static = FeaturePass(
        axes,
        dtype,
        scale,
        problem.dropout_rate,
        settings.kernel,
        settings.blocks,
        raw_values,
        problem.softcap,
        _regime(problem),
        lift.bends,
    )
    unseen = problem.softcap is None and problem.normalize.shift_invariant
    operands = FeatureOperands(
        lift.expansion,
        query,
        lift.key,
        lift.key_bias,
        value,
        # Both branches of lax.cond must return cotangents of the same structure.
        lift.raw_queries if lift.in_range is None else None,
        None if unseen else lift.query_bias,
        problem.bias,
        lift.distance_bias,
    )
    return static, operands


def summarize_by_kernels(
    problem: Problem,
    path: ScorePath,
    sink: Array | None,
    settings: Settings,
    picture: tuple[int, int] | None = None,
) -> tuple[Array, ...]:
    """What `summarize` or, with a picture, `attention_map` needs, for a path with a lift: see
    `WeightSummary.forward`.

    Args:
        problem: not zeroed, for kernels replace the scores of masked pairs; the path's lift is of
            the zeroed one.
        sink: [B|1, N|1, T|1], relative to scores without the lift's constant per query.
    """
    from regard.pool.kernels.weight_summary import WeightSummary  # as in `_prepare`

    axes, lift = replace(problem.axes, K=path.key_heads), cast(Lift, path.lift)
    nothing = jnp.zeros((axes.B, axes.K, axes.S, 0), problem.query.dtype)
    features, operands = _by_features(problem, lift, nothing, axes, settings, raw_values=False)
    inputs = (operands, sink), problem.allowed, None, None
    one = WeightSummary(cast(Any, features), picture)
    return run_pass(one, "forward", inputs, settings.device, sharded=True)
