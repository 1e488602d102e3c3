"""A few queries per key head on a CPU, as in decoding: dense weights of some heads at a time.

Such a call takes as long as it reads and writes memory. `attend` gets keys and values as
[B, S, K, D]; a batched matrix product wants float32 [B, K, S, D]. A copy of all of them takes
several times as long as the product: the operating system has to map and zero the memory that it is
written to, and then it is read again. So a loop takes the examples and heads part by part. A part's
copies, its lift and its gradients stay in the processor's cache.

A few queries of all heads together need no copy at all, see `_inner_in_place`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from regard.pool.backend import Problem
from regard.pool.merge import log_sum_exp
from regard.pool.parts import OF_ROWS, Parts, Place
from regard.pool.reference import dropped_out, masked_scores
from regard.pool.score_plan import ScorePlan
from regard.score.contract import Lift, accumulation_dtype, matmul_precision, repeat_heads
from regard.score.distances import spread_distances

# Queries of all heads together, up to which products read keys in place (two CPU cores, 16 heads of
# 4,096 keys and width 64: one query each, 1.6 ms in place, 3.3 part by part; four queries each, 3.7
# and 4.1 ms, of the processors' time 6.6 and 4.9).
MOST_IN_PLACE = 32


@jax.custom_jvp
def pool(problem: Problem) -> Any:
    """The output, [B, N, T, V]; with the log-sum-exp of each row where `problem.lse`.

    Where keys are read in place they are not zeroed first, which would copy them: only where a
    score is NaN, or the output not finite, is it computed again, from zeroed arrays. (Hard and the
    kernel regimes can make a finite output of NaN.)
    """
    lift, axes, parts = _lift(problem), problem.axes, _parts(problem)
    in_place = _is_unchanged(problem, lift) and axes.N * axes.T <= MOST_IN_PLACE
    if not in_place or parts.without_copies:
        return _results(problem, _pool_parts(parts))
    out, scores = _pool(problem, lift, PLAIN if axes.K == 1 else IN_PLACE)
    finite = jnp.isfinite(out).all() & ~jnp.isnan(scores).any()
    outs = _outs(problem, out, scores)
    # `parts` are made above, so that keys enter the branch in the caller's layout, without a copy.
    return _results(problem, lax.cond(finite, lambda: outs, lambda: _pool_parts(parts)))


@pool.defjvp
def _pool_jvp(primals: tuple[Problem], tangents: tuple[Problem]) -> tuple[Any, Any]:
    # Imported when first used: a call that is not differentiated does not need it.
    from regard.pool.derivatives import Residuals, tangents_of

    [problem] = primals
    parts = _parts(problem)
    # One part: the backward pass computes the same weights, of which XLA keeps one copy.
    found = _results(problem, _pool_parts(parts)) if parts.count == 1 else pool(problem)
    outs = found if problem.lse else (found,)
    residuals = Residuals(primals, None, None, None, outs, None)
    d_outs = tuple(tangents_of(Derivatives(), residuals, tangents))
    return found, d_outs if problem.lse else d_outs[0]


class Derivatives(NamedTuple):
    """The derivatives of `pool`, as derivatives.py asks for them; static."""

    def smooth(self, residuals: Any) -> tuple[Array, ...]:
        """The outputs by plain matrix products, which JAX differentiates in both modes."""
        [problem] = residuals.operands
        found = _results(problem, _pool_zeroed(problem, PLAIN))
        return found if problem.lse else (found,)

    def backward(self, residuals: Any, cotangents: tuple[Array, ...]) -> tuple[Problem]:
        """The cotangents of the problem, part by part."""
        return (_pull_back_parts(residuals.operands[0], cotangents),)


def _results(problem: Problem, outs: tuple[Array, ...]) -> Any:
    out = outs[0].astype(problem.out_dtype)
    return (out, outs[1]) if problem.lse else out


# ---------------------------------------------------------------------------------------------
# The pipeline on whole arrays.


def _lift(problem: Problem) -> Lift | None:
    """The score as an inner product; None for a regime that needs no scores."""
    return ScorePlan.of(problem, tile_form=False).paths[0].lift


class Products(NamedTuple):
    """How queries are multiplied by keys, and weights by values.

    Attributes:
        inner: [B, N, T, F] and [B, K, S, F] to [B, N, T, S].
        sums: [B, N, T, S] and [B, K, S, V] to [B, N, T, V].
    """

    inner: Callable[[Array, Array], Array]
    sums: Callable[[Array, Array], Array]


def _pool(problem: Problem, lift: Lift | None, products: Products) -> tuple[Array, Array]:
    """score -> mask -> normalize -> pool: the output, not rounded, and the scores, -inf where
    masked.
    """
    axes = problem.axes
    scores = jnp.zeros((axes.B, axes.N, axes.T, axes.S), accumulation_dtype(problem.query.dtype))
    if lift is not None:
        scores = products.inner(*_wide(lift.query, lift.key))
        if lift.key_bias is not None:
            scores = scores + repeat_heads(lift.key_bias[..., None, :], scores)
        shifts = problem.normalize.shift_invariant and problem.softcap is None and not problem.lse
        if lift.query_bias is not None and not shifts:
            scores = scores + lift.query_bias[..., :, None]
        if lift.distance_bias is not None:
            scores = scores + spread_distances(lift.distance_bias, axes.T, axes.S)
    scores, allowed = masked_scores(problem, scores)
    weights = dropped_out(problem, problem.normalize(scores, allowed))
    return products.sums(*_wide(weights, cast(Array, problem.value))), scores


def _outs(problem: Problem, out: Array, scores: Array) -> tuple[Array, ...]:
    return (out, log_sum_exp(scores)) if problem.lse else (out,)


def _pool_zeroed(problem: Problem, products: Products) -> tuple[Array, ...]:
    """The outputs, not rounded, from zeroed arrays."""
    zeroed = problem.zeroed()
    return _outs(problem, *_pool(zeroed, _lift(zeroed), products))


def _inner(rows: Array, key: Array) -> Array:
    """[B, K, R, F] and [B, K, S, F] -> [B, K, R, S]."""
    return _product("bkrf,bksf->bkrs", rows, key)


def _sums(weights: Array, value: Array) -> Array:
    """[B, K, R, S] and [B, K, S, V] -> [B, K, R, V]."""
    return _product("bkrs,bksv->bkrv", weights, value)


def _outer(weights: Array, rows: Array) -> Array:
    """[B, K, R, S] and [B, K, R, V] -> [B, K, S, V].

    The smaller operand is transposed first. XLA would multiply the transposed matrices instead, and
    transpose the large result; the barrier keeps it from doing so.
    """
    columns = lax.optimization_barrier(weights.swapaxes(-1, -2))
    return _product("bksr,bkrv->bksv", columns, rows)


_inner_by_rows, _sums_by_rows = jax.custom_vjp(_inner), jax.custom_vjp(_sums)
_inner_by_rows.defvjp(
    lambda rows, key: (_inner(rows, key), (rows, key)),
    lambda held, d: (_sums(d, held[1]), _outer(d, held[0])),
)
_sums_by_rows.defvjp(
    lambda weights, value: (_sums(weights, value), (weights, value)),
    lambda held, d: (_inner(d, held[1]), _outer(held[0], d)),
)


def _grouped(product: Callable[[Array, Array], Array], left: Array, right: Array) -> Array:
    """A product of [B, N, T, x], where heads that share a key head lie side by side."""
    (B, N, T, width), K = left.shape, right.shape[1]
    return product(left.reshape(B, K, N // K * T, width), right).reshape(B, N, T, -1)


def _products(*of: Callable[[Array, Array], Array]) -> Products:
    return Products(*(functools.partial(_grouped, product) for product in of))


def _is_unchanged(problem: Problem, lift: Lift | None) -> bool:
    """Whether keys and values are multiplied as they are."""
    value = cast(Array, problem.value)
    wide = accumulation_dtype(problem.query.dtype, value.dtype)
    unchanged = lift is None or (lift.key is problem.key and lift.key.dtype == wide)
    return unchanged and value.dtype == wide


def _inner_in_place(query: Array, key: Array) -> Array:
    """As `_inner`, a matrix product of [S, K·F] with the queries on a block diagonal.

    It multiplies the other heads' keys by 0, so NaN or infinity in one head's key makes another
    head's score NaN.
    """
    (B, N, T, F), (K, S) = query.shape, key.shape[1:3]
    own = jnp.eye(K, dtype=query.dtype)[None, :, None, :, None]
    diagonal = query.reshape(B, K, N // K * T, 1, F) * own  # [B, K, R, K, F]
    columns = diagonal.reshape(B, N * T, K * F).swapaxes(1, 2)
    scores = _product("bsx,bxn->bsn", key.swapaxes(1, 2).reshape(B, S, K * F), columns)
    # Without the barrier XLA would turn the product around, which is slower.
    return lax.optimization_barrier(scores).swapaxes(1, 2).reshape(B, N, T, S)


def _sums_in_place(weights: Array, value: Array) -> Array:
    """As `_sums`: the values of all heads by the weights of each, of which its own are taken."""
    (B, N, T, S), (K, V) = weights.shape, value.shape[1::2]
    values = value.swapaxes(1, 2).reshape(B, S, K * V)
    every = _product("bns,bsx->bnx", weights.reshape(B, N * T, S), values)
    own = jnp.diagonal(every.reshape(B, K, N // K * T, K, V), axis1=1, axis2=3)  # [B, R, V, K]
    return jnp.moveaxis(own, -1, 1).reshape(B, N, T, V)


PLAIN = _products(_inner, _sums)
PULLED_BACK = _products(_inner_by_rows, _sums_by_rows)  # in reverse mode only
IN_PLACE = Products(_inner_in_place, _sums_in_place)


def _product(subscripts: str, left: Array, right: Array) -> Array:
    return jnp.einsum(subscripts, left, right, precision=matmul_precision(left.dtype))


def _wide(*arrays: Array) -> list[Array]:
    dtype = accumulation_dtype(*(array.dtype for array in arrays))
    return [array.astype(dtype) for array in arrays]


# ---------------------------------------------------------------------------------------------
# The same part by part.


def _parts(problem: Problem) -> Parts:
    return Parts(problem, _is_unchanged(problem, _lift(problem)))


def _pool_parts(parts: Parts) -> tuple[Array, ...]:
    """The outputs, not rounded, part by part."""

    def pool_part(place: Place, totals: list[Array]) -> list[Array]:
        found = _pool_zeroed(parts.problem(parts.cut_leaves(place), place), PLAIN)
        return [parts.put(*each, OF_ROWS, place) for each in zip(totals, found, strict=True)]

    shapes = jax.eval_shape(lambda problem: _pool_zeroed(problem, PLAIN), parts.whole)
    return tuple(parts.loop(pool_part, [jnp.zeros(one.shape, one.dtype) for one in shapes]))


def _pull_back_parts(problem: Problem, cotangents: tuple[Array, ...]) -> Problem:
    """The cotangents of the problem; None for what has none."""
    parts = _parts(problem)
    moved = [at for at, leaf in enumerate(parts.leaves) if jnp.issubdtype(leaf.dtype, np.inexact)]
    kinds = [parts.kinds[at] for at in moved]

    def pull_back(place: Place, totals: list[Array]) -> list[Array]:
        leaves = parts.cut_leaves(place)

        def outs(values: list[Array]) -> tuple[Array, ...]:
            given = list(leaves)
            for at, value in zip(moved, values, strict=True):
                given[at] = value
            return _pool_zeroed(parts.problem(given, place), PULLED_BACK)

        primals, pull = jax.vjp(outs, [leaves[at] for at in moved])
        rows = [parts.cut(one, OF_ROWS, place) for one in cotangents]
        found = pull(
            tuple(place.once(d).astype(x.dtype) for d, x in zip(rows, primals, strict=True))
        )
        return [parts.put(*each, place) for each in zip(totals, found[0], kinds, strict=True)]

    wide = accumulation_dtype(problem.query.dtype)
    like = [parts.leaves[at] for at in moved]
    zeros = [
        jnp.zeros_like(leaf, None if parts.divide(kind) else wide)
        for leaf, kind in zip(like, kinds, strict=True)
    ]
    found: list[Any] = [None] * len(parts.leaves)
    for at, leaf, total in zip(moved, like, parts.loop(pull_back, zeros), strict=True):
        found[at] = total.astype(leaf.dtype)
    return parts.cotangents(found)
