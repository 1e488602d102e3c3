"""A few queries per key head on a CPU, as in decoding: dense weights, keys in the caller's layout.

Such a call takes as long as reading keys and values once. `attend` gets them as [B, S, K, D]; a
batched matrix product wants [B, K, S, D], and that copy takes several times as long. For up to
MOST_IN_PLACE queries the products here read [B, S, K, D]: as one reduction over queries · keys, or,
for one query per key head (where XLA's reduction is slow), as a matrix product of [S, K·D] with the
queries on a block diagonal. That multiplies the other heads' keys by 0, so NaN or infinity in one
head's key makes another head's score NaN; where a score is NaN, the output is computed again.
"""

from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array

from regard.pool.backend import Problem
from regard.pool.merge import log_sum_exp
from regard.pool.reference import dropped_out, masked_scores
from regard.pool.score_plan import ScorePlan
from regard.score.contract import Lift, accumulation_dtype, matmul_precision, repeat_heads
from regard.score.distances import spread_distances

# Queries per key head: up to this number products read keys in place, past it they read a copy (two
# CPU cores, 8 key heads of 1,024 keys and width 64: 4 queries 2.3 ms in place, 2.7 from a copy;
# 8 queries 2.5 and 1.9; 32 queries, from where on tiles are as fast, 14 and 5.0).
MOST_IN_PLACE = 4


@jax.custom_jvp
def pool(problem: Problem) -> Any:
    """The output, [B, N, T, V]; with the log-sum-exp of each row where `problem.lse`.

    Where keys are read in place they are not zeroed first, which would copy them: only where a
    score is NaN, or the output not finite, is it computed again, from zeroed arrays. (Hard and the
    kernel regimes can make a finite output of NaN.) Derivatives are those of the pass over zeroed
    arrays by plain matrix products.
    """
    axes = problem.axes
    if axes.N // axes.K * axes.T > MOST_IN_PLACE:  # the copy zeroes at no cost
        return _from_zeroed(problem)
    found, scores = _pool(problem, in_place=True)
    finite = jnp.isfinite(found[0] if problem.lse else found).all() & ~jnp.isnan(scores).any()
    return jax.lax.cond(finite, lambda: found, lambda: _from_zeroed(problem))


@pool.defjvp
def _pool_jvp(primals: tuple[Problem], tangents: tuple[Problem]) -> tuple[Any, Any]:
    return jax.jvp(_from_zeroed, primals, tangents)


def _from_zeroed(problem: Problem) -> Any:
    return _pool(problem.zeroed(), in_place=False)[0]


def _pool(problem: Problem, in_place: bool) -> tuple[Any, Array]:
    """score -> mask -> normalize -> pool, on whole arrays. Returns what `pool` does, and the
    scores, -inf where masked.

    Args:
        in_place: whether products read keys and values in the caller's layout.
    """
    axes = problem.axes
    scores = jnp.zeros((axes.B, axes.N, axes.T, axes.S), accumulation_dtype(problem.query.dtype))
    if problem.normalize.uses_scores:
        lift = cast(Lift, ScorePlan.of(problem, tile_form=False).paths[0].lift)
        scores = _scores(lift.query, lift.key, in_place)
        if lift.key_bias is not None:
            scores = scores + repeat_heads(lift.key_bias[..., None, :], scores)
        shifts = problem.normalize.shift_invariant and problem.softcap is None and not problem.lse
        if lift.query_bias is not None and not shifts:
            scores = scores + lift.query_bias[..., :, None]
        if lift.distance_bias is not None:
            scores = scores + spread_distances(lift.distance_bias, axes.T, axes.S)
    scores, allowed = masked_scores(problem, scores)
    weights = dropped_out(problem, problem.normalize(scores, allowed))
    out = _pooled(weights, cast(Array, problem.value), in_place).astype(problem.out_dtype)
    return ((out, log_sum_exp(scores)) if problem.lse else out), scores


def _scores(query: Array, key: Array, in_place: bool) -> Array:
    """[B, N, T, F] and [B, K, S, F] -> the inner products, [B, N, T, S]."""
    (B, N, T, F), (K, S) = query.shape, key.shape[1:3]
    query, key = _wide(query.reshape(B, K, N // K * T, F), key)  # [B, K, R, F]
    if not in_place or K == 1:
        return _product("bkrf,bksf->bkrs", query, key).reshape(B, N, T, S)
    key = key.swapaxes(1, 2)  # [B, S, K, F]
    if query.shape[2] == 1:
        # The barriers keep XLA from turning a product around to save a transpose of its result;
        # it would then sum over the first axis of its left operand, which is ten times slower.
        own = jnp.eye(K, dtype=query.dtype)[None, :, None, :]  # [1, K, 1, K]
        matrix = (query[:, :, 0, :, None] * own).reshape(B, K * F, K)
        scores = _product("bsx,bxk->bsk", key.reshape(B, S, K * F), matrix)
        scores = jax.lax.optimization_barrier(scores).swapaxes(1, 2)
    else:
        scores = (query[:, None] * key[:, :, :, None]).sum(-1).transpose(0, 2, 3, 1)  # [B, K, R, S]
    return scores.reshape(B, N, T, S)


def _pooled(weights: Array, value: Array, in_place: bool) -> Array:
    """[B, N, T, S] and [B, K, S, V] -> the weighted sums, [B, N, T, V]."""
    (B, N, T, S), (K, V) = weights.shape, value.shape[1::2]
    weights, value = _wide(weights.reshape(B, K, N // K * T, S), value)  # [B, K, R, S]
    if not in_place or K == 1:
        return _product("bkrs,bksv->bkrv", weights, value).reshape(B, N, T, V)
    value = value.swapaxes(1, 2)  # [B, S, K, V]
    if weights.shape[2] == 1:
        weights = jax.lax.optimization_barrier(weights[:, :, 0].swapaxes(1, 2))  # [B, S, K]
        every = _product("bsk,bsx->bkx", weights, value.reshape(B, S, K * V))
        out = jnp.diagonal(every.reshape(B, K, K, V), axis1=1, axis2=2).swapaxes(1, 2)
    else:
        weights = weights.transpose(0, 3, 1, 2)  # [B, S, K, R]
        out = (weights[..., None] * value[:, :, :, None]).sum(1)
    return out.reshape(B, N, T, V)


def _product(subscripts: str, left: Array, right: Array) -> Array:
    return jnp.einsum(subscripts, left, right, precision=matmul_precision(left.dtype))


def _wide(*arrays: Array) -> list[Array]:
    dtype = accumulation_dtype(*(array.dtype for array in arrays))
    return [array.astype(dtype) for array in arrays]
