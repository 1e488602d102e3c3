"""Pooling with exact additive scores, forward and backward.

tanh(x + y) = 1 - 2 / (1 + e^2x e^2y) is computed in registers and never stored. tanh_operands.py
computes the exponentials, one per token; tanh_tile.py the scores of a tile; tanh_backward.py d x,
d y and d w. Softmax, masks and dropout are those of every kernel (forward.py, backward_wide.py).
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array

from regard.dropout import Seed
from regard.mask import Allowed
from regard.normalize.contract import Normalizer
from regard.pool.kernels.backward_wide import d_scores
from regard.pool.kernels.bias_gradient import bias_gradient
from regard.pool.kernels.block_shapes import Blocks, pick_parts
from regard.pool.kernels.forward import forward
from regard.pool.kernels.padding import (
    KernelDerivatives,
    pad,
    pad_bias,
    pad_dropout,
    pad_mask,
    pad_results,
    round_up,
    run_stripes,
    stripe_rows,
    with_delta,
)
from regard.pool.kernels.tanh_backward import d_projected
from regard.pool.kernels.tanh_operands import tanh_operands
from regard.pool.kernels.tanh_tile import TanhScore
from regard.pool.kernels.tile import LOG2_E, KernelPlan
from regard.pool.score_plan import Flag, Results
from regard.pool.xla_tiles import Operands
from regard.score.contract import Score, matmul_precision, repeat_heads
from regard.shapes import Axes

SHARE = 4  # of a stripe's bytes: tanh_backward.py transposes d scores, and keeps both
BLOCKS = Blocks(64, 64, warps=4, stages=2)  # the layout of a tile in tanh_tile.py asks for these
# For float32 values wider than 128, which would fill the shared memory of an A100 (163 KiB).
WIDE = Blocks(32, 64, warps=8, stages=1)
MANY = Blocks(128, 64, warps=8, stages=2)  # forward, a tenth faster where programs are many


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TanhOperands:
    """Projected queries and keys, the weights of their hidden units, and the values.

    Attributes:
        x: [B, N, T, h] float32.
        y: [B, K, S, h] float32.
        score: of projected rows; its `tanh_vector` is w, (h,) or (N, h).
        value: [B, K, S, V].
        bias: [B|1, N|1, T|1, S|1]; None is zero.
    """

    x: Array
    y: Array
    score: Score
    value: Array
    bias: Array | None = None

    @property
    def vector(self) -> Array:
        return cast(Array, self.score.tanh_vector())


@dataclass(frozen=True)
class TanhPass(KernelDerivatives):
    """Pooling with the scores wᵀ tanh(x + y).

    Attributes:
        dtype: of the caller's queries; d scores are kept in it between two kernels.
        interpret: run the kernels on a CPU.
        forced: block shapes, for tests.
        softcap: see `attend`; regime: how scores become weights, None is softmax.
    """

    axes: Axes
    dtype: Any
    dropout_rate: float
    interpret: bool
    forced: Blocks | None
    softcap: float | None = None
    regime: Normalizer | None = None

    def resized(self, axes: Axes) -> "TanhPass":
        return replace(self, axes=axes)

    def as_tiles(self, operands: TanhOperands) -> Operands:
        rows, keys = (operands.x, None), (operands.y, None)
        return Operands(operands.score, None, rows, keys, operands.value, operands.bias)

    def forward(
        self, operands: TanhOperands, allowed: Allowed, seed: Seed, active: Flag
    ) -> tuple[Array, Any]:
        static = self._static(operands, backward=False)
        arrays = self._arrays(static, _centered(operands), allowed, seed)
        out, stats = forward(static, arrays)
        T, V = self.axes.T, self.axes.V
        return out[:, :, :T, :V], jax.tree.map(lambda stat: stat[:, :, :T], stats)

    def backward(
        self, operands: TanhOperands, allowed: Allowed, seed: Seed, active: Flag, results: Results
    ) -> TanhOperands:
        rows, axes = operands, self.axes
        static, centered = self._static(rows, backward=True), _centered(rows)
        arrays = self._arrays(static, centered, allowed, seed)
        arrays |= pad_results(static, results, rows.value.dtype)
        arrays = with_delta(static, arrays, pad_mask(allowed, axes, static.T, static.S))
        d_bias = None
        if rows.bias is not None:
            d_bias = bias_gradient(static, arrays, arrays["bias"].shape).astype(rows.bias.dtype)
            d_bias = d_bias[tuple(slice(size) for size in rows.bias.shape)]
        arrays["x"] = pad(centered.x, {2: static.T})
        vector = jnp.broadcast_to(rows.vector, (axes.B, axes.N, rows.vector.shape[-1]))
        vector = vector.reshape(axes.B * axes.N, -1)
        y = _heads_as_examples(repeat_heads(pad(centered.y, {2: static.S}), arrays["x"]))

        def stripe(part: KernelPlan, arrays: dict[str, Array]) -> tuple[Array, Any]:
            x = arrays.pop("x")
            visits = arrays.pop("visits")[..., ::3] * part.blocks.keys  # of keys: low and high
            visits = jnp.broadcast_to(visits, (part.B, part.N, *visits.shape[2:]))
            programs = part.B * part.N * (part.S // part.blocks.keys)
            steps = part.T // part.blocks.queries
            parts = pick_parts(programs, part.blocks.warps, steps)
            found = d_scores(part, arrays, self.dtype, parts)
            d_x, d_y, d_vector = d_projected(
                _heads_as_examples(found.scores),
                _heads_as_examples(x),
                y,
                vector,
                visits=_heads_as_examples(visits),
                keys_first=True,
                interpret=self.interpret,
            )
            d_y = static.over_groups(d_y.reshape(axes.B, axes.N, *d_y.shape[1:]))
            return d_x.reshape(*x.shape), (d_y, d_vector, static.over_groups(found.value))

        rows_at_a_time = stripe_rows(axes, static.blocks.queries, static.S, self.dtype, SHARE)
        d_x, (d_y, d_vector, d_value) = run_stripes(static, arrays, rows_at_a_time, stripe)
        d_vector = d_vector.reshape(axes.B, axes.N, -1).sum(0)
        d_vector = (d_vector if rows.vector.ndim == 2 else d_vector.sum(0)).astype(
            rows.vector.dtype
        )
        return TanhOperands(
            d_x[:, :, : axes.T],
            d_y[:, :, : axes.S],
            jax.vjp(lambda score: score.tanh_vector(), rows.score)[1](d_vector)[0],
            d_value[:, :, : axes.S, : axes.V].astype(rows.value.dtype),
            d_bias,
        )

    def _static(self, rows: TanhOperands, backward: bool) -> KernelPlan:
        axes = self.axes
        programs = axes.B * axes.N * (axes.T // MANY.queries)
        many = programs >= 256  # an H200 runs half of them at a time
        blocks = MANY if many and not backward else BLOCKS
        if rows.value.dtype == jnp.float32 and axes.V > 128:
            blocks = WIDE
        blocks = self.forced or blocks
        T, S = round_up(axes.T, blocks.queries), round_up(axes.S, blocks.keys)
        if backward:
            T = round_up(axes.T, stripe_rows(axes, blocks.queries, S, self.dtype, SHARE))
        return KernelPlan(
            TanhScore(interpret=self.interpret),
            blocks,
            axes.B,
            axes.N,
            axes.K,
            T,
            S,
            round_up(axes.V, 16, power=True),
            dropout_rate=self.dropout_rate,
            precision=matmul_precision(rows.value.dtype),
            interpret=self.interpret,
            softcap=self.softcap,
            regime=self.regime,
        )

    def _arrays(
        self, static: KernelPlan, rows: TanhOperands, allowed: Allowed, seed: Seed
    ) -> dict[str, Array]:
        """What kernels read, by name."""
        T, S, blocks = static.T, static.S, static.blocks
        mask = pad_mask(allowed, self.axes, T, S)
        prepared = tanh_operands(
            pad(rows.x, {2: T}),
            pad(rows.y, {2: S}),
            rows.vector * LOG2_E,
            blocks=(blocks.queries, blocks.keys),
        )
        arrays = dict(
            **prepared._asdict(),
            value=pad(rows.value, {2: S, 3: static.V}),
            bounds=mask.bounds(static.tile, T, S),
            **mask.arrays(),
            **pad_bias(rows.bias, T, S),
        )
        return arrays | pad_dropout(seed, self.axes, T, S)


def _centered(rows: TanhOperands) -> TanhOperands:
    """y about 0, per hidden unit, for the range of its exponentials; x takes the shift."""
    y = jax.lax.stop_gradient(rows.y)
    shift = 0.5 * (y.min(-2, keepdims=True) + y.max(-2, keepdims=True))
    x = rows.x + repeat_heads(shift, rows.x)
    return replace(rows, x=x, y=rows.y - shift)


def _heads_as_examples(array: Array) -> Array:
    """[B, N, ...] -> [BN, ...]."""
    return array.reshape(-1, *array.shape[2:])
