"""Pooling of short sequences with exact additive scores: their scores at once, the rest in XLA.

A sentence of 50 words is one block of queries: programs that pool would be few, leave most of a GPU
idle, and compute every score again for each part of wide values. Here a kernel computes the scores
alone, hidden units divided among programs; softmax and matrix products of [B, N, T, S] are XLA's,
and d x, d y and d w are tanh_backward.py's.
"""

from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from regard.dropout import Seed, is_kept
from regard.mask import Allowed
from regard.placement import kernel_result, vary_as
from regard.pool.kernels.padding import pad_dropout, round_up
from regard.pool.kernels.tanh_backward import d_projected
from regard.pool.kernels.tanh_operands import STEP, tanh_operands
from regard.pool.kernels.tanh_pass import TanhOperands, TanhPass, _centered, _heads_as_examples
from regard.pool.kernels.tanh_sums import SumBlocks
from regard.pool.kernels.tanh_tile import tanh_scores
from regard.pool.kernels.tile import LOG2_E
from regard.pool.score_plan import Flag, Results, row_delta
from regard.score.contract import matmul_precision, repeat_heads
from regard.shapes import Axes

MOST_PAIRS = 1 << 22  # scores held at once, 16 MiB
ROWS, KEYS = 16, 64  # of a program, one warp
PROGRAMS = 1024  # two for each scheduler of an H200: with fewer, hidden units are divided too


def is_short(axes: Axes) -> bool:
    """Whether all scores of a call are few enough to be held."""
    return axes.B * axes.N * axes.T * axes.S <= MOST_PAIRS


@dataclass(frozen=True)
class DenseTanhPass(TanhPass):
    """`TanhPass` for short sequences and softmax."""

    def forward(
        self, operands: TanhOperands, allowed: Allowed, seed: Seed, active: Flag
    ) -> tuple[Array, Any]:
        scores, _ = self._scores(operands, allowed)
        top = scores.max(-1)
        top = jnp.where(top == -jnp.inf, 0.0, top)
        weights = jnp.exp(scores - top[..., None])
        total = weights.sum(-1)
        some = total > 0.0
        total = jnp.where(some, total, 1.0)
        lse = jnp.where(some, LOG2_E * (top + jnp.log(total)), -jnp.inf)
        out = self._product("bnts,bnsv->bntv", self._kept(weights, seed), self._values(operands))
        return (out / total[..., None]).astype(operands.value.dtype), lse

    def backward(
        self, operands: TanhOperands, allowed: Allowed, seed: Seed, active: Flag, results: Results
    ) -> TanhOperands:
        (d_out, _, stats), delta = results, row_delta(results, jnp.float32)
        scores, slope = self._scores(operands, allowed)
        lse = jnp.where(stats == -jnp.inf, jnp.inf, self.log_sum(stats))  # an empty row: no weight
        weights = jnp.exp(scores - lse[..., None])
        value = self._values(operands)
        d_out = d_out.astype(value.dtype)
        d_weights = self._kept(self._product("bntv,bnsv->bnts", d_out, value), seed)
        d_scores = weights * (d_weights - delta[..., None])
        d_value = self._product("bnts,bntv->bnsv", self._kept(weights, seed), d_out)
        d_bias = None
        if operands.bias is not None:
            of_one = [i for i, size in enumerate(operands.bias.shape) if size == 1]
            d_bias = d_scores.sum(of_one, keepdims=True).astype(operands.bias.dtype)
        d_scores = d_scores if slope is None else d_scores * slope
        return self._to_operands(operands, d_scores.astype(self.dtype), d_value, d_bias)

    def _to_operands(
        self, operands: TanhOperands, d_scores: Array, d_value: Array, d_bias: Array | None
    ) -> TanhOperands:
        axes, rows = self.axes, _centered(operands)
        hidden = rows.vector.shape[-1]
        vector = jnp.broadcast_to(rows.vector, (axes.B, axes.N, hidden)).reshape(-1, hidden)
        kept = min(SumBlocks.kept, round_up(max(axes.T, axes.S), 32, power=True))
        d_x, d_y, d_vector = d_projected(
            _heads_as_examples(d_scores),
            _heads_as_examples(rows.x),
            _heads_as_examples(repeat_heads(rows.y, rows.x)),
            vector,
            blocks=SumBlocks(kept=kept),
            interpret=self.interpret,
        )

        def of_keys(array: Array) -> Array:
            """[BN, S, ...] -> [B, K, S, ...], summed over the query heads of a group."""
            groups = (axes.B, axes.K, axes.N // axes.K, *array.shape[-2:])
            return array.reshape(groups).sum(2)

        d_vector = d_vector.reshape(axes.B, axes.N, hidden).sum(0)
        d_vector = d_vector if rows.vector.ndim == 2 else d_vector.sum(0)
        d_vector = d_vector.astype(rows.vector.dtype)
        return TanhOperands(
            d_x.reshape(rows.x.shape),
            of_keys(d_y),
            jax.vjp(lambda score: score.tanh_vector(), rows.score)[1](d_vector)[0],
            of_keys(d_value).astype(rows.value.dtype),
            d_bias,
        )

    def _scores(self, operands: TanhOperands, allowed: Allowed) -> tuple[Array, Array | None]:
        """[B, N, T, S] float32, -inf where masked; and the slope of the soft cap."""
        rows, slope = _centered(operands), None
        scores = dense_scores(rows.x, rows.y, rows.vector, self.interpret)
        if self.softcap is not None:
            part = jnp.tanh(scores / self.softcap)
            scores, slope = self.softcap * part, 1.0 - part * part
        if operands.bias is not None:
            scores = scores + operands.bias.astype(jnp.float32)
        taken = allowed.dense(self.axes)
        return (scores if taken is None else jnp.where(taken, scores, -jnp.inf)), slope

    def _kept(self, weights: Array, seed: Seed) -> Array:
        """After dropout."""
        if seed is None:
            return weights
        axes = self.axes
        words = pad_dropout(seed, axes, axes.T, axes.S)
        rows = words["row0"][..., :, None], words["row1"][..., :, None]
        keys = words["key0"][..., None, :], words["key1"][..., None, :]
        kept = is_kept(rows, keys, self.dropout_rate)
        return jnp.where(kept, weights / (1.0 - self.dropout_rate), 0.0)

    def _values(self, operands: TanhOperands) -> Array:
        """[B, N, S, V]"""
        return jnp.repeat(operands.value, self.axes.N // self.axes.K, axis=1)

    def _product(self, subscripts: str, left: Array, right: Array) -> Array:
        """In the values' dtype, accumulated in float32."""
        dtype = jnp.float32 if self.interpret else right.dtype
        return jnp.einsum(
            subscripts,
            left.astype(dtype),
            right.astype(dtype),
            precision=matmul_precision(right.dtype),
            preferred_element_type=jnp.float32,
        )


def dense_scores(x: Array, y: Array, vector: Array, interpret: bool) -> Array:
    """sum_h w_h tanh(x_h + y_h), [B, N, T, S] float32.

    Args:
        x: [B, N, T, h]; y: [B, K, S, h]; vector: (h,) or (N, h).
        interpret: run the kernel on a CPU.
    """
    (B, N, T, hidden), S = x.shape, y.shape[2]
    vector = jnp.broadcast_to(vector.astype(jnp.float32), (N, hidden))
    y = repeat_heads(y, x)
    blocks = B * N * -(-T // ROWS) * -(-S // KEYS)
    parts = 1
    while parts * blocks < PROGRAMS and hidden % (2 * STEP * parts) == 0 and parts < 8:
        parts *= 2

    def divided(side: Array) -> Array:
        """[B, N, T, h] -> [B, N parts, T, h / parts]: each part is a head."""
        side = side.reshape(*side.shape[:3], parts, hidden // parts)
        return jnp.moveaxis(side, 3, 2).reshape(B, N * parts, side.shape[2], hidden // parts)

    given = tanh_operands(
        divided(x), divided(y), vector.reshape(N * parts, -1), blocks=(ROWS, KEYS)
    )

    def kernel(query: Any, key: Any, terms: Any, out: Any) -> None:
        rows, keys = pl.ds(pl.program_id(0) * ROWS, ROWS), pl.ds(pl.program_id(1) * KEYS, KEYS)
        plt.store(
            out.at[rows, keys], tanh_scores(query, key, terms, rows, keys, interpret=interpret)
        )

    arrays = vary_as(tuple(given), tuple(given))
    high, wide = round_up(T, ROWS), round_up(S, KEYS)

    def of_head(array: Any) -> pl.BlockSpec:
        zeros = (0,) * (array.ndim - 2)
        return pl.BlockSpec(
            (None, None, *array.shape[2:]),
            lambda i, j, k: (k // (N * parts), k % (N * parts), *zeros),
        )

    out = kernel_result((B, N * parts, high, wide), jnp.float32, arrays)
    found = pl.pallas_call(
        kernel,
        grid=(high // ROWS, wide // KEYS, B * N * parts),
        in_specs=[of_head(array) for array in arrays],
        out_specs=of_head(out),
        out_shape=out,
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=2),
        interpret=interpret,
        name="regard_tanh_scores",
    )(*arrays)
    return cast(Array, found).reshape(B, N, parts, high, wide).sum(2)[:, :, :T, :S]
