"""Pooling for few queries: which calls decode.py takes, their operands, and what its kernels read.

Scores are a polynomial of the key (products and ‖k‖², `Score.about_keys`), another lift's inner
product, or wᵀ tanh(x + y). For a polynomial, the kernel centers the caller's keys as it reads them:
features made before it would be a copy of the keys.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array

from regard.dropout import Seed
from regard.mask import Allowed
from regard.normalize import Softmax
from regard.pool.backend import Pages, Problem, Request
from regard.pool.kernels.block_shapes import Blocks
from regard.pool.kernels.decode import (
    Products,
    RowScore,
    Tanh,
    decode_backward,
    decode_forward,
)
from regard.pool.kernels.padding import (
    KernelDerivatives,
    pad,
    pad_bias,
    pad_dropout,
    pad_results,
    round_up,
)
from regard.pool.kernels.tanh_operands import TWO_LOG2_E
from regard.pool.kernels.tile import LOG2_E, KernelPlan
from regard.pool.score_plan import Flag, ScorePath, ScorePlan
from regard.pool.xla_tiles import Operands
from regard.score.contract import (
    Lift,
    Score,
    matmul_precision,
    multiplies_in_float32,
)
from regard.score.distances import spread_distances
from regard.score.gaussian import center_of
from regard.score.logistic_form import align
from regard.shapes import Axes

MOST_ROWS = 32  # queries that share a key head
MOST_TANH_ROWS = 16  # each costs a pass over the registers that hold a block of keys
WIDEST = {2: 1024, 4: 512}  # keys and values, by bytes of a number: 16 of each in shared memory
WIDEST_TANH = 512
# Thread blocks of a launch: an H200 has 132 multiprocessors and runs about four on each.
PROGRAMS = 1056
LEAST_STEPS = 4  # blocks of keys that a thread block visits, where all keys take part


def takes(request: Request) -> bool:
    """Whether a call has few queries, and scores and sizes that decode.py supports."""
    axes = request.axes
    if axes.symbolic() or axes.empty() or type(request.normalize) is not Softmax:
        return False
    rows = axes.N // axes.K * axes.T
    sizes = jnp.dtype(request.dtype).itemsize, jnp.dtype(request.value_dtype).itemsize
    if rows > MOST_ROWS or WIDEST[sizes[1]] < axes.V:
        return False
    plan = request.plan(tile_form=False)
    lift = plan.paths[0].lift
    if plan.taken is not None:
        return False
    if lift is None:
        vector = request.score.tanh_vector()
        return vector is not None and rows <= MOST_TANH_ROWS and vector.shape[-1] <= WIDEST_TANH
    if lift.distance_bias is not None and request.softcap:  # a dense bias comes after the cap
        return False
    return lift.expansion is None and max(axes.key_width, lift.width()) <= WIDEST[sizes[0]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeOperands:
    """Scores query · (key - center) + square ‖key - center‖² + key_bias, or wᵀ tanh(query + key).

    Attributes:
        query: [B, N, T, F]; in float32 it counts more digits than 16-bit keys have.
        key: [B, K, S, F].
        value: [B, K, S, V].
        key_bias: [B, K, S]; None is zero.
        square: [B, N, T]; None is zero.
        center: [B, K, 1, F], without a gradient; None is zero.
        query_bias: [B, N, T], where a soft cap can see it; None is zero.
        bias: [B|1, N|1, T|1, S|1]; None is zero.
        score: whose `tanh_vector` is w, (F,) or (N, F); None for products.
        visible: [B, K, S] bool, keys that some row may attend to; None means all. The kernels know
            it from the mask, and `as_tiles` does not.
        pages: key and value as they lie in a pool, for the forward pass; without a gradient. None:
            it reads `key` and `value` too.
    """

    query: Array
    key: Array
    value: Array
    key_bias: Array | None = None
    square: Array | None = None
    center: Array | None = None
    query_bias: Array | None = None
    bias: Array | None = None
    score: Score | None = None
    visible: Array | None = None
    pages: Pages | None = None


def reads_callers_keys(score: Score, query: Array) -> bool:
    """Whether the kernels read the caller's own keys, and nothing made of them before."""
    if score.about_keys(query, None) is not None:
        return True
    return score.tanh_vector() is not None and not score.projects_keys()


def reads_pages(request: Request) -> bool:
    """Whether the forward pass reads the pages of a memory in place."""
    if not request.paged_as_stored or not takes(request):
        return False
    axes = request.axes
    query = jax.ShapeDtypeStruct((axes.B, axes.N, axes.T, axes.query_width), request.dtype)
    found: list[bool] = []
    jax.eval_shape(lambda query: found.append(reads_callers_keys(request.score, query)), query)
    return found[0] and request.plan(tile_form=False).paths[0].key_heads == axes.K


class Prepared(NamedTuple):
    """How the scores of a problem are made, and the arrays that they are made of."""

    plan: ScorePlan
    operands: DecodeOperands
    scale: float
    axes: Axes


def prepare(problem: Problem, scale: float | None, in_pages: bool) -> Prepared:
    """The operands of a problem that `takes` is true of.

    Args:
        scale: `Score.static_scale`.
        in_pages: `reads_pages`.
    """
    value, score, axes = cast(Array, problem.value), problem.score, problem.axes
    pages = problem.pages if in_pages else None
    kept: dict[str, Any] = dict(bias=problem.bias, visible=problem.visible, pages=pages)
    capped = problem.softcap is not None
    query = problem.query
    if problem.non_empty is not None:
        query = jnp.where(problem.non_empty[..., None], query, 0)
    if scale is not None:
        path = ScorePath(lift=Lift(query, problem.key))
        operands = DecodeOperands(query, problem.key, value, **kept)
        return Prepared(ScorePlan((path,), None), operands, scale, axes)
    found = score.about_keys(query, None)
    if found is not None:
        center = None
        if found.square is not None:
            center = center_of(problem.key, problem.visible, None if pages is None else pages.keys)
            found = cast(Any, score.about_keys(query, center))
        lift = Lift(found.linear, problem.key, query_bias=found.constant)
        square = found.square
        operands = DecodeOperands(
            found.linear,
            problem.key,
            value,
            square=None if square is None else _of_rows(square[..., 0], query),
            center=center,
            query_bias=None if not capped or found.constant is None else found.constant,
            **kept,
        )
        return Prepared(ScorePlan((ScorePath(lift=lift),), None), operands, 1.0, axes)
    plan = ScorePlan.of(problem, tile_form=False)
    path = plan.paths[0]
    if path.key_heads != axes.K:  # one score per head: no sharing
        group = axes.N // axes.K
        value, axes = jnp.repeat(value, group, axis=1), replace(axes, K=axes.N)
        visible = problem.visible
        kept["visible"] = None if visible is None else jnp.repeat(visible, group, axis=1)
    if path.lift is None:
        own, x, y = cast(Any, path.scored)
        y = y if score.projects_keys() or y.shape != problem.key.shape else problem.key
        return Prepared(plan, DecodeOperands(x, y, value, score=own, **kept), 1.0, axes)
    lift = path.lift
    if lift.distance_bias is not None:
        numbers = spread_distances(lift.distance_bias, axes.T, axes.S)
        kept["bias"] = numbers if problem.bias is None else problem.bias + numbers
    operands = DecodeOperands(
        lift.query,
        lift.key.astype(problem.key.dtype),
        value,
        key_bias=lift.key_bias,
        query_bias=lift.query_bias if capped else None,
        **kept,
    )
    return Prepared(plan, operands, 1.0, axes)


def _of_rows(square: Array, query: Array) -> Array:
    return jnp.broadcast_to(square, query.shape[:3])


@dataclass(frozen=True)
class DecodePass(KernelDerivatives):
    """Pooling by decode.py, forward and backward.

    Attributes:
        dtype: of products, for tiles in plain XLA.
        scale: positive; scores without biases are multiplied by it.
        softcap: see `attend`.
        forced: block shapes; None picks them.
    """

    axes: Axes
    dtype: Any
    scale: float
    dropout_rate: float
    interpret: bool
    forced: Blocks | None
    softcap: float | None = None

    def resized(self, axes: Axes) -> "DecodePass":
        return replace(self, axes=axes)

    def as_tiles(self, operands: DecodeOperands) -> Operands:
        key, value, visible = operands.key, operands.value, operands.visible
        if visible is not None:
            key, value = (jnp.where(visible[..., None], side, 0) for side in (key, value))
        biases = (operands.query_bias, operands.key_bias)
        of_query, of_key = (None if bias is None else bias[..., None] for bias in biases)
        if operands.score is not None:
            rows, keys = (operands.query, None), (key, None)
            return Operands(operands.score, None, rows, keys, value, operands.bias)
        query, key = operands.query.astype(jnp.float32) * self.scale, key.astype(jnp.float32)
        if operands.center is not None:
            key = key - operands.center
        if operands.square is not None:  # ‖psi‖² as one feature more
            query = jnp.concatenate([query, operands.square[..., None]], axis=-1)
            key = jnp.concatenate([key, jnp.square(key).sum(-1, keepdims=True)], axis=-1)
        return Operands(None, None, (query, of_query), (key, of_key), value, operands.bias)

    def forward(
        self, operands: DecodeOperands, allowed: Allowed, seed: Seed, active: Flag
    ) -> tuple[Array, Array]:
        static, parts = self._static(operands, backward=False)
        arrays = self._arrays(static, operands, allowed, seed)
        rows = self._rows
        found = decode_forward(static, arrays, (rows, self.axes.V), parts)
        out = self._by_query(found.out)[..., : self.axes.V]
        return out, self._by_query(found.lse)

    def backward(
        self,
        operands: DecodeOperands,
        allowed: Allowed,
        seed: Seed,
        active: Flag,
        results: tuple[Array, Array, Array],
    ) -> DecodeOperands:
        operands = replace(operands, pages=None)
        static, parts = self._static(operands, backward=True)
        arrays = self._arrays(static, operands, allowed, seed)
        by_row = cast(Any, tuple(self._by_row(one) for one in results))
        of_rows = pad_results(static, by_row, operands.value.dtype)
        of_rows["d_rows"] = of_rows.pop("d_out")
        axes = self.axes
        found = decode_backward(static, arrays | of_rows, axes.S, axes.V, parts)
        d_query, second = found.sums
        d_query = self._by_query(d_query)[..., : operands.query.shape[-1]]
        d_score = None
        if operands.score is not None:
            d_vector = self._by_query(second)[..., : operands.query.shape[-1]].sum((0, 2))
            vector = cast(Array, operands.score.tanh_vector())
            d_vector = (d_vector if vector.ndim == 2 else d_vector.sum(0)).astype(vector.dtype)
            d_score = jax.vjp(lambda score: score.tanh_vector(), operands.score)[1](d_vector)[0]
        else:
            d_query = d_query * self.scale

        def like(cotangent: Array | None, operand: Array | None) -> Array | None:
            return None if operand is None else cast(Array, cotangent).astype(operand.dtype)

        of_key = None if found.key_bias is None else found.key_bias[..., : axes.S]
        return DecodeOperands(
            d_query.astype(operands.query.dtype),
            found.key.swapaxes(1, 2),
            found.value.swapaxes(1, 2),
            like(of_key, operands.key_bias),
            like(self._by_query(second), operands.square),
            None,
            like(self._by_query(found.query_bias), operands.query_bias),
            self._d_bias(found.bias, operands.bias),
            d_score,
        )

    def _d_bias(self, found: Array | None, bias: Array | None) -> Array | None:
        if bias is None:
            return None
        pairs = self._by_query(cast(Array, found))[..., : self.axes.S]  # [B, N, T, S]
        shared = tuple(axis for axis, size in enumerate(bias.shape) if size < pairs.shape[axis])
        return pairs.sum(shared, keepdims=True).astype(bias.dtype)

    # Rows: all queries that share a key head ---------------------------------------------------

    @property
    def _rows(self) -> int:
        return self.axes.N // self.axes.K * self.axes.T

    def _by_row(self, array: Array) -> Array:
        """[B|1, N|1, T|1, ...] -> [B|1, K|1, rows, ...]."""
        axes, (_, heads, _, *rest) = self.axes, array.shape
        group = axes.N // axes.K
        array = jnp.broadcast_to(array, (*array.shape[:2], axes.T, *rest))
        if heads == 1 and axes.N > 1:
            array = jnp.broadcast_to(array, (array.shape[0], group, axes.T, *rest))
        return array.reshape(array.shape[0], -1, group * axes.T, *rest)

    def _by_query(self, array: Array) -> Array:
        """[B, K, rows or more, ...] -> [B, N, T, ...]."""
        axes, rest = self.axes, array.shape[3:]
        return array[:, :, : self._rows].reshape(axes.B, axes.N, axes.T, *rest)

    # What the kernels read ---------------------------------------------------------------------

    def _static(self, operands: DecodeOperands, backward: bool) -> tuple[KernelPlan, int]:
        """The plan, whose heads are key heads and whose queries are rows; and the split factor."""
        axes, columns = self.axes, operands.key.shape[-1]
        width, V = (round_up(size, 16, power=True) for size in (columns, axes.V))
        tanh = operands.score is not None
        rows, dtypes = (
            round_up(self._rows, 16, power=True),
            (operands.key.dtype, operands.value.dtype),
        )
        blocks = self.forced or pick(width, V, dtypes, tanh=tanh, backward=backward)
        if self.forced is None:
            blocks = replace(blocks, keys=min(blocks.keys, round_up(axes.S, 16, power=True)))
            if operands.pages is not None:
                # Page numbers are loaded before keys: Triton gives each of the two half the stages.
                blocks = replace(blocks, stages=blocks.stages + 2)
        score: RowScore
        if tanh:
            score = Tanh(columns, width, self._rows, self.interpret)
        else:
            dtype = operands.key.dtype
            in_tf32 = dtype == jnp.float32 and not multiplies_in_float32(dtype)
            in_tf32 = in_tf32 and operands.square is not None
            score = Products(columns, width, self.scale, matmul_precision(dtype), in_tf32)
        steps = -(-axes.S // blocks.keys)
        static = KernelPlan(
            cast(Any, score),
            replace(blocks, queries=rows),
            axes.B,
            axes.K,
            axes.K,
            rows,
            steps * blocks.keys,
            V,
            dropout_rate=self.dropout_rate,
            precision=matmul_precision(operands.value.dtype),
            interpret=self.interpret,
            tokens_first=True,
            softcap=self.softcap,
            page=None if operands.pages is None else operands.pages.page(axes.S),
        )
        parts = -(-PROGRAMS // (axes.B * axes.K))
        return static, max(1, min(parts, steps // LEAST_STEPS))

    def _arrays(
        self, static: KernelPlan, operands: DecodeOperands, allowed: Allowed, seed: Seed
    ) -> dict[str, Array]:
        """What both kernels read, by name."""
        T, S = static.T, static.S
        # The caller's layout: a pair of transposes that XLA cancels.
        held = operands if operands.pages is None else operands.pages
        key, value = held.key.swapaxes(1, 2), held.value.swapaxes(1, 2)
        arrays = dict(key=key, value=value, **self._mask(allowed, T, S))
        if operands.pages is not None:
            arrays["pages"] = operands.pages.table
        arrays |= self._of_score(static, operands)
        if operands.key_bias is not None:
            arrays["key_bias"] = pad(operands.key_bias.astype(jnp.float32) * LOG2_E, {2: S})
        if operands.query_bias is not None:
            of_query = self._by_row(operands.query_bias.astype(jnp.float32) * LOG2_E)
            of_query = pad(of_query, {2: T})
            arrays["query_bias"] = arrays.get("query_bias", 0.0) + of_query
        if operands.bias is not None:
            bias = operands.bias
            if bias.shape[1] > 1 or bias.shape[2] > 1:
                bias = self._by_row(bias)
            arrays |= pad_bias(bias, T, S)
        words = pad_dropout(seed, self.axes, self.axes.T, S)
        of_rows = ("row0", "row1")
        return arrays | {
            name: pad(self._by_row(word), {2: T}) if name in of_rows else word
            for name, word in words.items()
        }

    def _of_score(self, static: KernelPlan, operands: DecodeOperands) -> dict[str, Array]:
        score = cast(RowScore, static.score)
        whole = {2: static.T, 3: score.width}
        rows = pad(self._by_row(operands.query), whole)
        if operands.score is not None:
            vector = align(cast(Array, operands.score.tanh_vector()), 4)  # [1, N|1, 1, F]
            vector = pad(self._by_row(vector.astype(jnp.float32)), whole)
            return dict(x=rows.astype(jnp.float32) * TWO_LOG2_E, vector=vector)
        dtype = operands.key.dtype
        arrays = dict(phi=rows.astype(dtype))
        if jnp.finfo(rows.dtype).nmant > jnp.finfo(dtype).nmant:
            arrays["phi_low"] = (rows - arrays["phi"].astype(rows.dtype)).astype(dtype)
        if operands.square is not None:
            square = self._by_row(operands.square.astype(jnp.float32))
            arrays["square"] = pad(square, {2: static.T})
        if operands.center is not None:
            center = pad(operands.center[:, :, 0].astype(jnp.float32), {2: score.width})
            arrays["center"] = center
            if dtype != jnp.float32:  # the product that `Products` leaves in the scores
                phi = arrays["phi"].astype(jnp.float32)
                phi = phi + arrays["phi_low"].astype(jnp.float32) if "phi_low" in arrays else phi
                product = (phi * center[:, :, None]).sum(-1)
                arrays["query_bias"] = product * (-self.scale * LOG2_E)
        return arrays

    def _mask(self, allowed: Allowed, T: int, S: int) -> dict[str, Array]:
        """The keys from the first to the last that some row may attend to; ranges per row where
        rows differ; and a table of all other conditions.
        """
        axes, keys = self.axes, self.axes.S
        ranges = {"start": allowed.start, "end": allowed.end}
        bounds = [jnp.zeros((1, 1, 1), jnp.int32), jnp.full((1, 1, 1), keys, jnp.int32)]
        found = {}
        for number, (name, bound) in enumerate(ranges.items()):
            if bound is None:
                continue
            bound = self._by_row(jnp.clip(bound, 0, keys))
            reduce = (jnp.min, jnp.max)[number]
            bounds[number] = reduce(bound, axis=2, keepdims=True)
            if cast(Array, ranges[name]).shape[1:] != (1, 1):  # padded rows attend to nothing
                found[name] = pad(bound, {2: T}, mode="edge")
        low, high = jnp.broadcast_arrays(*bounds)
        found["bounds"] = jnp.concatenate([low, jnp.maximum(low, high)], axis=2)
        others = replace(allowed, start=None, end=None).dense(axes)
        if others is None:
            return found
        if others.shape[1:3] == (1, 1):
            found["keys_taken"] = _whole(others[:, :, 0], keys, S)
        else:
            found["table"] = pad(_whole(self._by_row(others), keys, S), {2: T})
        return found


def _whole(array: Array, keys: int, S: int) -> Array:
    """bool [.., keys|1] -> int8 [.., S]."""
    array = jnp.broadcast_to(array, (*array.shape[:-1], keys)).astype(jnp.int8)
    return pad(array, {array.ndim - 1: S})


def pick(
    width: int, V: int, dtypes: tuple[Any, Any], *, tanh: bool, backward: bool = False
) -> Blocks:
    """Keys of a block, as many as make loads of 32 KiB (backward 16), at least 16; its queries are
    the rows.

    Not timed. No registers are spilled for widths from 64 to 512 in either direction, as compiled
    by tools/compile_kernels.py.

    Example:
        >>> half = (jnp.dtype("bfloat16"),) * 2
        >>> [pick(D, D, half, tanh=False).keys for D in (64, 128, 256)]
        [128, 64, 32]
    """
    if tanh:  # a block of keys stays in registers, in float32
        keys = (4096 if backward else 8192) // width
        return Blocks(16, min(128, max(16, keys)), warps=8, stages=2)
    of_key, of_value = (jnp.dtype(dtype).itemsize for dtype in dtypes)
    keys = (16384 if backward else 32768) // (width * of_key + V * of_value)
    keys = min(128, max(16, round_up(keys, 1, power=True)))
    wide = max(width, V) > 128
    return Blocks(16, keys, warps=8 if wide else 4, stages=2 if wide else 3)
