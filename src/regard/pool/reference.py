"""The specification: score, mask, normalize, pool, each on whole [B, N, T, S] arrays.

Scores by their definition, never by a lift. Every other backend is tested to equal this one.
"""

from typing import Any, cast

import jax.numpy as jnp
from jax import Array

from regard.dropout import Draw, first_rows, keep_scale
from regard.pool.backend import Backend, Problem, Request
from regard.pool.merge import log_sum_exp, sink_rows, with_sink
from regard.pool.tile import soft_cap
from regard.score.contract import accumulation_dtype, matmul_precision, repeat_heads


class Reference(Backend):
    """Dense arrays; on request for any size."""

    name = "reference"
    takes_symbolic_sizes = True

    def refuses(self, request: Request) -> str | None:
        return None

    def describe(self, request: Request) -> str:
        if request.axes.symbolic():
            return (
                f"dense, for sizes known only when the program is called ({request.pairs} weights)"
            )
        return f"dense, {request.pairs:,} weights at once; scores by definition"

    def pool(self, problem: Problem, settings: Any) -> tuple[Any, Array]:
        problem = problem.zeroed()
        scores, allowed = masked_scores(problem, self.scores(problem, settings))
        out = pool_dense(problem, problem.normalize(scores, allowed)).astype(problem.out_dtype)
        found = (out, log_sum_exp(scores)) if problem.lse else out
        return found, jnp.array(False)

    def scores(self, problem: Problem, settings: Any) -> Array:
        return problem.score.scores(problem.query, repeat_heads(problem.key, problem.query))


def dense_weights(problem: Problem, scores: Array) -> Array:
    """Scores, bias, mask, regime and sink -> weights, [B, N, T, S], before dropout."""
    scores, allowed = masked_scores(problem, scores)
    weights = problem.normalize(scores, allowed)
    if problem.sink is None:
        return weights
    return weights * with_sink(log_sum_exp(scores), sink_rows(problem.sink))[0][..., None]


def masked_scores(problem: Problem, scores: Array) -> tuple[Array, Array | None]:
    """Scores capped, with the bias, and -inf where masked; and the mask."""
    scores = soft_cap(scores, problem.softcap)
    if problem.bias is not None:
        scores = scores + problem.bias.astype(scores.dtype)
    allowed = problem.allowed.dense(problem.axes)
    if allowed is not None:
        allowed = jnp.broadcast_to(allowed, scores.shape)
        scores = jnp.where(allowed, scores, -jnp.inf)
    return scores, allowed


def dropped_out(problem: Problem, weights: Array) -> Array:
    """The weights after dropout; as they are without it."""
    if problem.seed is None:
        return weights
    axes, seed = problem.axes, problem.seed
    words = seed.words if isinstance(seed, Draw) else seed
    first = first_rows(seed, axes.B, axes.N, axes.T)  # [B, N, 1]
    row = (first + jnp.arange(axes.T, dtype=jnp.int32)[None, None])[..., None]  # [B, N, T, 1]
    key = jnp.arange(axes.S, dtype=jnp.int32).reshape(1, 1, 1, axes.S)
    return weights * keep_scale(words, row, key, problem.dropout_rate, weights.dtype)


def pool_dense(problem: Problem, weights: Array) -> Array:
    """sum_s weights_s value_s, after dropout."""
    value = repeat_heads(cast(Array, problem.value), problem.query)
    weights = dropped_out(problem, weights)
    wide = accumulation_dtype(weights.dtype, value.dtype)
    return jnp.einsum(
        "bnts,bnsv->bntv",
        weights.astype(wide),
        value.astype(wide),
        precision=matmul_precision(wide),
    )
