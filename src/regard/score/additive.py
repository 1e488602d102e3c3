"""The additive (Bahdanau) score, w^T tanh(W_q q + W_k k), and its two lifts.

The narrow lift is in narrow_lift.py, the series of the other one in sine_series.py. Here: the
definition, and which lift is tried first; data that neither may score take the definition.
"""

import math
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool

from regard.placement import current_platform, over_shards, with_value
from regard.score.contract import (
    Lift,
    Score,
    TileForm,
    accumulation_dtype,
    matmul_precision,
    project,
    repeat_heads,
    with_heads,
)
from regard.score.logistic_form import (
    REACH,
    ExponentialKeys,
    LogisticForm,
    align,
    back_by_rows,
    exponential,
    sum_to,
    weigh,
)
from regard.score.narrow_lift import narrow_lift
from regard.score.registration import register_score
from regard.score.sine_features import SineExpansion
from regard.score.sine_series import SeriesTable
from regard.shapes import require_arrays

# One rounding of the number itself, in the types whose rounding is coarser than 1e-6.
DEFAULT_TOLERANCE = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 1e-6}

_TILE_FORM_STANDING = (
    "exact, by tanh(x+y) = 1 - 2/(1 + e^2x e^2y), faster on a CPU than the lift, "
    f"while abs(x) and abs(y) <= {REACH:g}"
)

# The narrow lift comes first where it is at most this part of the sine series' width. It measures
# the data first, which costs T + S, and time for many small kernels; it saves T·S. So it is taken
# where T·S is so many times T + S, and it saves so many products over all pairs.
WORTH, NARROW_SINCE, NARROW_SAVES = 0.75, 1000, 2.5e10

# Of a sine series' range, as the package's tables have it.
LEAST_LIMIT, LARGEST_LIMIT = 7.0, 14.25

# A kernel may keep features in float16, where they have to be far from its largest number.
LARGEST_WEIGHT = 1e4


@dataclass(frozen=True)
class LiftPolicy:
    """Switches of tests and benchmarks; never of an answer's accuracy."""

    guarded: bool = True  # check the data's range
    anywhere: bool = False  # lift on a CPU and for short sides too


_DEFAULT_POLICY = LiftPolicy()
_policy: ContextVar[LiftPolicy] = ContextVar("policy", default=_DEFAULT_POLICY)


def lift_policy() -> LiftPolicy:
    return _policy.get()


def _with_policy(**changes: bool) -> AbstractContextManager[None]:
    return with_value(_policy, replace(_policy.get(), **changes))


def unguarded() -> AbstractContextManager[None]:
    """Traces the lift without its range check, to measure what the check costs. Not for use."""
    return _with_policy(guarded=False)


def lift_anywhere() -> AbstractContextManager[None]:
    """Traces the lift also where the definition is faster; for tests and tuning."""
    return _with_policy(anywhere=True)


@register_score
@dataclass(frozen=True)
class Additive(Score):
    """Additive score: a(q, k) = wᵀ tanh(W_q q + W_k k), for queries and keys of any two widths.

    Bahdanau et al. 2015, appendix A.1.2; d2l "Attention Scoring Functions".

    Lift: within `tolerance`, measured on the data (tests/score/test_narrow_lift.py and
    test_additive.py). tanh(x + y), x = W_q q and y = W_k k, is f(x) + g(y) + a short inner product
    of features of x and of y, in bfloat16 8 for each of the h hidden units. They are fitted for
    numbers that are spread as these are, and their error over all pairs of this call is measured.
    Where it is too large, a sine series is tried, which needs twice the width and holds for every
    pair in a range; where the data leave that too, the definition runs: the lift is never silently
    outside its tolerance. Short sequences take the sines first, and shorter ones the definition,
    where these are faster. On a CPU, where no matrix unit makes the lift worth while, scores are
    exact at every tolerance.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> score = regard.Additive(jnp.ones((2, 8)), jnp.ones((3, 8)), jnp.ones(8))
        >>> q, k = jnp.zeros((1, 2)), jnp.zeros((4, 3))
        >>> regard.scores(q, k, score=score).tolist()
        [[0.0, 0.0, 0.0, 0.0]]

    Args:
        query_kernel: W_q, (Hq, h), or (N, Hq, h), one per head; None where the queries are
            projected already.
        key_kernel: W_k, (Hk, h), or (N, Hk, h); None where the keys are projected already.
        vector: w, (h,), or (N, h).
        tolerance: bound on the error of the tanhs, so that a score is off by at most
            tolerance·‖w‖₁. None: 2⁻⁸ in bfloat16, 2⁻¹¹ in float16, 1e-6 in float32, and the
            definition in float64. "exact": the definition always.
        bound: what the tolerance bounds. "rms": the root mean square of the error over all pairs
            of a query and a visible key of this call, for every example and head; over the pairs
            of any one query or key it may be 16 times as large. "worst": the error of every
            tanh, at twice the width.
    """

    sums_over_shards = True

    query_kernel: Array | None
    key_kernel: Array | None
    vector: Array
    tolerance: float | str | None = field(default=None, metadata=dict(static=True))
    bound: Literal["rms", "worst"] = field(default="rms", metadata=dict(static=True))

    def scores(self, query: Array, key: Array) -> Array:
        projected, x, y = self.projected(query, key)
        return weigh(jnp.tanh(x[..., :, None, :] + y[..., None, :, :]), projected.vector)

    def scores_back(self, query: Array, key: Array, d_scores: Array) -> tuple[Score, Array, Array]:
        if self.query_kernel is not None or self.key_kernel is not None:
            return super().scores_back(query, key, d_scores)
        return jax.lax.platform_dependent(
            self, query, key, d_scores, cpu=_back_on_cpu, default=_back_by_products
        )

    def tile_form(
        self, query: Array, key: Array, *, visible: Array | None = None
    ) -> TileForm | None:
        """1 - 2 / (1 + e^2x e^2y): exact, and on a CPU faster than the lift and than tanh."""
        if current_platform(query, key) != "cpu" or lift_policy().anywhere:
            return None
        if not self.vector.shape[-1]:  # no hidden units: every score is 0
            return None
        projected, x, y = self.projected(query, key)
        *_, shift = _ranges(x, y, visible)
        x, y = x + repeat_heads(shift, x), y - shift
        if visible is not None:
            y = jnp.where(visible[..., None], y, 0)
        reach = [jnp.max(jnp.abs(jax.lax.stop_gradient(side))) for side in (x, y)]
        in_range = all_over_vmap(jnp.maximum(*reach) <= REACH)  # False on NaN too
        # Out of range this form is not used, but its exponentials still have a gradient, and zero
        # times infinity is NaN.
        x, y = (jnp.exp(2.0 * jnp.where(in_range, side, 0)) for side in (x, y))
        return TileForm(LogisticForm(projected.vector), x, y, in_range, _TILE_FORM_STANDING)

    def projected(self, query: Array, key: Array) -> "tuple[Additive, Array, Array]":
        """x = W_q q, [..., T, h], and y = W_k k, [..., S, h], in float32 or wider."""
        wide = accumulation_dtype(query.dtype)
        x = query.astype(wide) if self.query_kernel is None else project(query, self.query_kernel)
        y = key.astype(wide) if self.key_kernel is None else project(key, self.key_kernel)
        tolerance = self.lift_tolerance(query.dtype)  # x and y no longer tell the compute dtype
        # float32 on a GPU: tanh in registers is faster than products without TF32, which the lift's
        # tolerance forbids (one H200, B=8, T=S=2048, h=V=64: 0.87 ms, the lift 18.2).
        if query.dtype == jnp.float32 and current_platform(query) == "gpu":
            tolerance = tolerance if lift_policy().anywhere else None
        known = "exact" if tolerance is None else tolerance
        projected = Additive(None, None, self.vector.astype(wide), known, self.bound)
        return projected, x, y

    def prepared(self, key: Array, positions: Array) -> tuple[Score, Array]:
        """y = W_k k, in float32 or wider; on a CPU its exponential."""
        if self.key_kernel is not None and self.key_kernel.ndim == 3:
            key = jnp.repeat(key, self.key_kernel.shape[0] // key.shape[-3], axis=-3)
        y = key.astype(accumulation_dtype(key.dtype))
        y = y if self.key_kernel is None else project(key, self.key_kernel)
        vector, tolerance = self.vector.astype(y.dtype), self.lift_tolerance(key.dtype)
        if current_platform(key) == "cpu" and not lift_policy().anywhere:
            return ExponentialKeys(self.query_kernel, vector), exponential(y)
        known = "exact" if tolerance is None else tolerance  # y no longer tells the compute dtype
        return replace(self, key_kernel=None, vector=vector, tolerance=known), y

    def lift(self, query: Array, key: Array, *, visible: Array | None = None) -> Lift | None:
        tolerance = self.lift_tolerance(query.dtype)
        if tolerance is None or not worth_lifting(query, key) or not self.vector.shape[-1]:
            return None
        projected, x, y = self.projected(query, key)
        sines = _sine_lift(x, y, projected.vector, visible, tolerance)
        if self.bound == "worst" or x.ndim != 4:
            return sines
        vector = align(projected.vector, x.ndim)
        narrow = narrow_lift(x, y, vector, visible, tolerance)
        if narrow is None or not _worth_measuring(narrow, sines):
            return sines
        return replace(narrow, in_range=_guard(narrow.in_range, vector), otherwise=sines)

    def check(self, query_width: int, key_width: int) -> None:
        kernels = dict(query_kernel=self.query_kernel, key_kernel=self.key_kernel)
        arrays = kernels | dict(vector=self.vector)
        require_arrays(self.label(), **arrays)
        hidden = self.vector.shape[-1] if self.vector.ndim in (1, 2) else -1
        query_shape = _shape(self.query_kernel, query_width, hidden)
        key_shape = _shape(self.key_kernel, key_width, hidden)
        if query_shape != (query_width, hidden) or key_shape != (key_width, hidden):
            got = ", ".join(
                f"{name} {None if array is None else list(array.shape)}"
                for name, array in arrays.items()
            )
            raise ValueError(
                "Additive needs query_kernel (Hq, h), key_kernel (Hk, h) and vector (h,), or each "
                "with a leading N, one per head; a kernel of None means projected already, width "
                f"h. Got {got} for query width {query_width}, key width {key_width}. Fix: kernels "
                "whose first axis is the input width and whose last is the vector's length."
            )

    def __post_init__(self) -> None:
        tolerance = self.tolerance
        if self.bound not in ("rms", "worst"):
            raise ValueError(
                f'bound must be "rms" or "worst": what the tolerance bounds. Got {self.bound!r}. '
                'Fix: "rms" for the root mean square over all pairs, "worst" for every pair.'
            )
        if tolerance is None or tolerance == "exact":
            return
        if isinstance(tolerance, str) or not 0 < tolerance < math.inf:
            raise ValueError(
                f'tolerance must be a positive number, "exact", or None. Got {tolerance!r}. '
                "Fix: None follows the compute dtype."
            )

    def head_axes(self) -> dict[str, tuple[int, ...]]:
        kernels = with_heads(2, query_kernel=self.query_kernel, key_kernel=self.key_kernel)
        return kernels | with_heads(1, vector=self.vector)

    def tile_width(self, query_width: int) -> int:
        return self.vector.shape[-1]

    def lift_tolerance(self, dtype: jnp.dtype) -> float | None:
        """The tolerance in force for this compute dtype; None: the definition."""
        if self.tolerance == "exact":
            return None
        if self.tolerance is None:
            return DEFAULT_TOLERANCE.get(jnp.dtype(dtype).name)
        return float(self.tolerance)

    def tanh_vector(self) -> Array:
        return self.vector

    def projects_keys(self) -> bool:
        return self.key_kernel is not None

    def scaled(self, factor: Array) -> Score:
        return replace(self, vector=factor[..., None] * self.vector)


def _back_on_cpu(
    score: Additive, x: Array, y: Array, d_scores: Array
) -> tuple[Score, Array, Array]:
    def row(x: Array) -> tuple[Array, Array]:
        tanh = jnp.tanh(x[..., None, :] + y)  # [..., S, h]
        return 1.0 - tanh * tanh, tanh

    d_x, d_y, d_vector = back_by_rows(row, x, y, d_scores)
    w = align(score.vector, y.ndim)
    d_score = replace(score, vector=sum_to(d_vector, score.vector))
    return d_score, d_x * w, d_y * w


def _back_by_products(
    score: Additive, x: Array, y: Array, d_scores: Array
) -> tuple[Score, Array, Array]:
    """The three sums as matrix products over one stored tile of tanh.

    Left to autodiff they become one reduction over all of its axes, which takes XLA's GPU
    backend minutes to compile.
    """
    tanh = jnp.tanh(x[..., :, None, :] + y[..., None, :, :])  # [..., T, S, h]
    slope = 1.0 - tanh * tanh
    w, precision = align(score.vector, y.ndim), matmul_precision(y.dtype)
    d_x = jnp.einsum("...ts,...tsh->...th", d_scores, slope, precision=precision)
    d_y = jnp.einsum("...ts,...tsh->...sh", d_scores, slope, precision=precision)
    d_w = jnp.einsum("...ts,...tsh->...th", d_scores, tanh, precision=precision).sum(-2)
    return replace(score, vector=sum_to(d_w, score.vector)), d_x * w, d_y * w


def _sine_lift(x: Array, y: Array, vector: Array, visible: Array | None, tolerance: float) -> Lift:
    """By the sine series: every tanh within the tolerance."""
    units = math.prod(size for size in (*x.shape[:-2], x.shape[-1]) if isinstance(size, int))
    table = SeriesTable.of(tolerance, design_limit(x.shape[-2], y.shape[-2], units))
    low, high, shift = _ranges(x, y, visible)
    reach = jnp.maximum(high, -low)  # [..., K, 1, h]: max abs(x + y) over the pairs
    limits = jnp.asarray(table.limits, reach.dtype)
    entry = jnp.searchsorted(limits, reach, method="compare_all")  # one kernel, not a loop
    entry = jnp.minimum(entry, len(table.limits) - 1)
    frequency = jnp.asarray(table.frequency, x.dtype)[entry]  # [..., K, 1, h]
    coefficients = jnp.asarray(table.coefficients, x.dtype)[:, entry]  # [R, ..., K, 1, h]
    coefficients = repeat_heads(jnp.moveaxis(coefficients, 0, -2)[..., 0, :, :], x)
    expansion = SineExpansion(
        frequency, shift, coefficients * align(vector, x.ndim)
    )  # w: [.., 1, h]
    in_range = _guard(jnp.all(reach <= float(table.limits[-1])), vector)  # False on NaN too
    standing = (
        f"each tanh within {tolerance:.3g} by {len(table.coefficients)} sines "
        f"while abs(x+y) <= {table.limits[-1]:.2f}"
    )
    return Lift(x, y, expansion=expansion, in_range=in_range, standing=standing)


def _guard(in_range: Array | None, vector: Array) -> Array | None:
    """In range, and with features that a kernel can hold; None where nothing is to be guarded."""
    if in_range is None or not lift_policy().guarded:
        return None
    return all_over_vmap(in_range & jnp.all(jnp.abs(vector) <= LARGEST_WEIGHT))


def worth_lifting(query: Array, key: Array) -> bool:
    """Whether matrix products beat tanh: on a matrix unit, and not for one decoding step.

    Features cost T + S and save T·S. A CPU has no such unit: there `tile_form` is faster at every
    length and tolerance (benchmarks/README.md), and exact.
    """
    if lift_policy().anywhere:
        return True
    T, S = query.shape[-2], key.shape[-2]
    return T * S >= 32 * (T + S) and current_platform(query, key) != "cpu"


def _worth_measuring(narrow: Lift, sines: Lift) -> bool:
    """Whether the narrow lift saves more than it costs to measure the data."""
    less = sines.width() - narrow.width()
    if lift_policy().anywhere or narrow.width() > WORTH * sines.width():
        return narrow.width() <= WORTH * sines.width()
    (B, N, T, _), S = narrow.query.shape, narrow.key.shape[-2]
    return T * S >= NARROW_SINCE * (T + S) and B * N * T * S * less >= NARROW_SAVES


def design_limit(query_len: int, key_len: int, units: int) -> float:
    """The range of x + y that R is chosen for, a static function of the shapes.

    The largest of n unit normals is about r = sqrt(2 ln n), and falls off as exp(-r z) from there:
    the largest of `units` of them, of all hidden units, heads and examples, is ln(units) / r
    further out. A tenth more is room for variances that are one only on average, as those of a
    random projection are. Rounded up to quarters, so that few series are ever fitted.
    """
    reach = sum(math.sqrt(2 * math.log(max(n, 2))) for n in (query_len, key_len))
    reach += 2 * math.log(2 * max(units, 1)) / reach
    return min(max(math.ceil(4 * 1.1 * reach) / 4, LEAST_LIMIT), LARGEST_LIMIT)


@jax.custom_batching.custom_vmap
def all_over_vmap(flag: Bool[Array, ""]) -> Bool[Array, ""]:
    """The flag; under vmap, whether *all* of the batch's flags hold.

    A per-example flag would turn the guard's branch into a select that runs both sides.
    """
    return flag


@all_over_vmap.def_vmap
def _all_over_vmap_rule(axis_size: int, in_batched: list[bool], flag: Array) -> tuple[Array, bool]:
    return (jnp.all(flag, axis=0) if in_batched[0] else flag), False


def _ranges(x: Array, y: Array, visible: Array | None) -> tuple[Array, Array, Array]:
    """Least and greatest x + y per hidden unit, [..., K, 1, h], and y's middle, to center by.

    min x + min y and max x + max y bound the sum more tightly than max abs x + max abs y
    would, and need no centering; the shift is there for the accuracy of the sines alone.
    """
    x, y = jax.lax.stop_gradient((x, y))
    y_low, y_high = y, y
    if visible is not None:
        y_low = jnp.where(visible[..., None], y, jnp.inf)
        y_high = jnp.where(visible[..., None], y, -jnp.inf)
    y_low = over_shards("min", y_low.min(-2, keepdims=True))  # [..., K, 1, h]
    y_high = over_shards("max", y_high.max(-2, keepdims=True))
    nothing = y_low > y_high  # no visible key at all
    y_low, y_high = jnp.where(nothing, 0, y_low), jnp.where(nothing, 0, y_high)
    x_low = over_shards("min", x.min(-2, keepdims=True))  # [..., N, 1, h]
    x_high = over_shards("max", x.max(-2, keepdims=True))
    if x.ndim > 2 and x.shape[-3] != y.shape[-3]:  # a group of query heads shares its key head
        grouped = (*y.shape[:-2], x.shape[-3] // y.shape[-3], x.shape[-1])
        x_low = x_low.reshape(grouped).min(-2, keepdims=True)
        x_high = x_high.reshape(grouped).max(-2, keepdims=True)
    return x_low + y_low, x_high + y_high, 0.5 * (y_low + y_high)


def _shape(kernel: Array | None, width: int, hidden: int) -> tuple[int, ...]:
    if kernel is None:
        return (width, width)
    return kernel.shape[-2:] if kernel.ndim in (2, 3) else kernel.shape
