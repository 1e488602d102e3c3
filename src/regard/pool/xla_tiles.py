"""One tile in plain XLA: slicing, scoring, masking, and its backward pass.

blockwise.py loops over tiles, summary.py reads their weights; neither depends on how a tile's
scores are computed. A tile is [Z, q, s]: Z = b·N a few examples with all their heads, a block of
queries, a block of keys. Where Z is 1 there is no such axis: XLA's CPU loops lose a quarter of
their speed to a leading axis of 1.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from regard.dropout import Draw, Seed, keep_scale
from regard.mask import Allowed
from regard.normalize import Normalizer
from regard.pool.backend import Problem
from regard.pool.score_plan import ScorePath
from regard.pool.tile import soft_cap, visible_pairs
from regard.score.contract import (
    Expansion,
    Score,
    matmul_precision,
    repeat_heads,
)
from regard.score.distances import spread_distances
from regard.shapes import Axes


@dataclass(frozen=True)
class Tiling:
    """Sizes of a tile: examples, queries, keys."""

    block_b: int
    block_q: int
    block_k: int


@dataclass(frozen=True)
class TilePlan:
    """What is static about a tiled pass."""

    axes: Axes
    tiling: Tiling
    normalize: Normalizer
    dropout_rate: float
    softcap: float | None
    lifted: bool
    wide: np.dtype  # of scores, softmax and sums
    product: np.dtype  # of the operands of matrix products

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading axis of a tile, (Z,) or ()."""
        heads = self.tiling.block_b * self.axes.N
        return (heads,) if heads > 1 else ()

    @property
    def flipped_lead(self) -> tuple[int, ...]:
        """The leading axis of a flipped tile: heads that share keys lie side by side in it."""
        heads = self.tiling.block_b * self.axes.K
        return (heads,) if heads > 1 else ()

    @property
    def groups(self) -> int:
        return self.axes.B // self.tiling.block_b

    @property
    def query_blocks(self) -> int:
        return -(-self.axes.T // self.tiling.block_q)

    @property
    def key_blocks(self) -> int:
        return -(-self.axes.S // self.tiling.block_k)

    @property
    def value_scale(self) -> float:
        """A power of two by which values are multiplied while they are summed: weights up to 1 are
        divided by their total last, and S large values may not overflow before. 1 for values that
        are multiplied as float16, which has no room for it and no need.
        """
        if self.product == np.float16:
            return 1.0
        return 2.0 ** -math.ceil(math.log2(max(self.axes.S, 1)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Operands:
    """The differentiable inputs. Rows of `query` are axis -2 of every leaf; so for `key`.

    Attributes:
        score: a Score whose definition scores a tile, or None where the tile is lifted.
        expansion: the lift's expansion (leaves [B, ...]), or None.
        query: (query, query_bias or None), [B, N, T, F] and [B, N, T, 1]; () without scores.
        key: (key, key_bias or None), [B, K, S, F] and [B, K, S, 1]; () without scores.
        value: [B, K, S, V].
        bias: [B|1, N|1, T|1, S|1].
        distance_bias: [1, N|1, T + S - 1], the lift's.
    """

    score: Score | None
    expansion: Expansion | None
    query: Any
    key: Any
    value: Array | None
    bias: Array | None
    distance_bias: Array | None = None


def make_operands(problem: Problem, path: ScorePath) -> Operands:
    """The operands of one path of a score plan."""
    lift = path.lift
    if lift is not None:
        # A constant per query changes nothing where only differences of scores count.
        unseen = problem.normalize.shift_invariant and problem.softcap is None
        constant = None if unseen else lift.query_bias
        query = (lift.query, None if constant is None else constant[..., None])
        key = (lift.key, None if lift.key_bias is None else lift.key_bias[..., None])
        biases = problem.bias, lift.distance_bias
        return Operands(None, lift.expansion, query, key, problem.value, *biases)
    if path.scored is not None:
        score, rows, keys = path.scored
        return Operands(score, None, (rows, None), (keys, None), problem.value, problem.bias)
    return Operands(None, None, (), (), problem.value, None)


class Tiles:
    """The tiles of one group of examples."""

    def __init__(
        self, plan: TilePlan, operands: Operands, allowed: Allowed, seed: Seed, group: Array
    ):
        self.plan, self.seed, self.group = plan, seed, group
        size = plan.tiling.block_b

        def take(array: Array) -> Array:
            return _block(array, 0, group, size)

        self.score = operands.score
        self.expansion = jax.tree.map(take, operands.expansion)
        self.query = jax.tree.map(take, operands.query)
        self.key = jax.tree.map(take, operands.key)
        self.value = jax.tree.map(take, operands.value)
        self.bias, self.distance_bias = jax.tree.map(take, (operands.bias, operands.distance_bias))
        self.allowed = jax.tree.map(take, allowed)

    def everything(self) -> Any:
        """All arrays: a tile varies over the mesh axes that any of them varies over."""
        biases = self.bias, self.distance_bias
        return self.query, self.key, self.value, biases, self.allowed, self.seed

    # -- scores of a tile, and their gradients --------------------------------------------------

    def query_block(self, iq: Array) -> Any:
        return jax.tree.map(lambda a: _block(a, -2, iq, self.plan.tiling.block_q), self.query)

    def key_block(self, ik: Array) -> Any:
        key = jax.tree.map(lambda a: _block(a, -2, ik, self.plan.tiling.block_k), self.key)
        expensive = self.expansion is not None or self.score is not None
        if self.plan.key_blocks == 1 and expensive:
            # Nothing in the loop's body depends on its index then, and XLA would move the tile out
            # of the loop, and compute it even where the loop has no iterations.
            key, _ = jax.lax.optimization_barrier((key, ik))
        return key

    def open_query(self, expansion: Expansion | None, query: Any) -> Any:
        """Compact rows -> what `pair` takes: features, or the rows themselves."""
        if not query or not self.plan.lifted:
            return query
        rows = query[0] if expansion is None else expansion.query(query[0])
        return rows.astype(self.plan.product), query[1]

    def open_key(self, expansion: Expansion | None, key: Any) -> Any:
        if not key or not self.plan.lifted:
            return key
        rows = key[0] if expansion is None else expansion.key(key[0])
        return rows.astype(self.plan.product), key[1]

    def pair(self, score: Score | None, query: Any, key: Any) -> Array:
        """Opened query and key rows -> scores [Z, q, s], without bias and mask."""
        plan = self.plan
        if not query:
            return jnp.zeros((*plan.lead, plan.tiling.block_q, plan.tiling.block_k), plan.wide)
        if score is not None:
            return self._definition(score, query[0], key[0])
        scores = self._tile(self._product("bkqf,bksf->bkqs", self._together(query[0]), key[0]))
        if key[1] is not None:
            scores = scores + self._tile(repeat_heads(key[1], query[0]).swapaxes(-1, -2))
        return scores if query[1] is None else scores + self._tile(query[1])

    def pair_flipped(self, score: Score | None, query: Any, key: Any) -> Array:
        """The same scores with keys before queries, [Z, s, r]."""
        plan = self.plan
        if not query or score is not None:
            return self._flip(self._apart(self.pair(score, query, key)))
        scores = self._product("bksf,bkrf->bksr", key[0], self._together(query[0]))
        if key[1] is not None:
            scores = scores + key[1]
        if query[1] is not None:
            scores = scores + self._together(query[1]).swapaxes(-1, -2)
        return scores.reshape(*plan.flipped_lead, *scores.shape[-2:])

    def pair_back(
        self, score: Score | None, query: Any, key: Any, d_scores: Array
    ) -> tuple[Score | None, Any, Any]:
        """Flipped d scores -> cotangents of score, opened query and opened key, in `wide`."""
        if score is not None:
            d_tile = self._tile(self.unflip(d_scores))
            parts = self._definition_back(score, query[0], key[0], d_tile)
            d_score, d_query, d_key = jax.tree.map(lambda a: a.astype(self.plan.wide), parts)
            return d_score, (d_query, None), (d_key, None)
        d_pairs = d_scores.reshape(self.plan.tiling.block_b, self.plan.axes.K, *d_scores.shape[-2:])
        rows = d_pairs.astype(self.plan.product)  # [b, K, s, r]
        d_key = self._product("bksr,bkrf->bksf", rows, self._together(query[0]))
        if self.expansion is None and self.plan.product == self.plan.wide:
            # Narrow rows on a CPU: a product that sums over the first axis of a tile is slow unless
            # its small operand is transposed first; the barrier keeps XLA from undoing that.
            transposed = jax.lax.optimization_barrier(key[0].swapaxes(-1, -2))
            d_rows = self._product("bkfs,bksr->bkfr", transposed, rows).swapaxes(-1, -2)
        else:
            d_rows = self._product("bksr,bksf->bkrf", rows, key[0])
        d_key_bias = None if key[1] is None else d_pairs.sum(-1, keepdims=True)
        d_query_bias = None
        if query[1] is not None:
            d_query_bias = self._apart(d_pairs.sum(-2)[..., None])
        return None, (self._apart(d_rows), d_query_bias), (d_key, d_key_bias)

    def _definition(self, score: Score, query: Array, key: Array) -> Array:
        key = repeat_heads(key, query)
        if not score.per_head():
            query, key = self._tile(query), self._tile(key)
        return self._tile(score.scores(query, key).astype(self.plan.wide))

    def _definition_back(
        self, score: Score, query: Array, key: Array, d_scores: Array
    ) -> tuple[Score, Array, Array]:
        repeated = repeat_heads(key, query)
        if score.per_head():
            inputs = query, repeated, self._apart(d_scores)
        else:
            inputs = self._tile(query), self._tile(repeated), d_scores
        d_score, d_query, d_key = score.scores_back(*inputs)
        group = query.shape[1] // key.shape[1]
        d_key = d_key.reshape(*key.shape[:2], group, *key.shape[2:]).sum(2)  # over a group's heads
        return d_score, d_query.reshape(query.shape), d_key

    def scores_of_tile(self, iq: Array, ik: Array, query: Any = None) -> tuple[Array, Array | None]:
        """Scores [Z, q, s], -inf where masked, and the tile's mask; `query` is the opened block."""
        if query is None:
            query = self.open_query(self.expansion, self.query_block(iq))
        key = self.open_key(self.expansion, self.key_block(ik))
        scores = self.add_by_distance(self.pair(self.score, query, key), iq, ik)
        return self.finish_scores(scores, iq, ik)

    def first_distance(self, iq: Array, ik: Array) -> Array:
        """Where a tile's numbers begin, [.., q + s - 1], among those of all distances."""
        plan = self.plan
        rows = plan.query_blocks * plan.tiling.block_q
        return ik * plan.tiling.block_k + rows - (iq + 1) * plan.tiling.block_q

    def add_by_distance(self, scores: Array, iq: Array, ik: Array, flipped: bool = False) -> Array:
        """Adds the lift's number per distance to [Z, q, s], or to a flipped tile."""
        if self.distance_bias is None:
            return scores
        q, s = self.plan.tiling.block_q, self.plan.tiling.block_k
        first = self.first_distance(iq, ik)
        numbers = jax.lax.dynamic_slice_in_dim(self.distance_bias, first, q + s - 1, 2)
        pairs = spread_distances(numbers.astype(scores.dtype), q, s)  # [b|1, N|1, q, s]
        return scores + (self._flip if flipped else self._spread)(pairs)

    # -- bias, mask, dropout --------------------------------------------------------------------

    def finish_scores(
        self, scores: Array, iq: Array, ik: Array, flipped: bool = False
    ) -> tuple[Array, Array | None]:
        """Caps scores and adds the bias; -inf where masked. Returns scores and the tile's mask."""
        tiling, fit = self.plan.tiling, self._flip if flipped else self._spread
        scores = soft_cap(scores, self.plan.softcap)
        if self.bias is not None:
            bias = _block(_block(self.bias, 2, iq, tiling.block_q), 3, ik, tiling.block_k)
            scores = scores + fit(bias.astype(scores.dtype))
        allowed = self.allowed_block(iq, ik)
        if allowed is None:
            return scores, None
        allowed = fit(allowed)
        return jnp.where(allowed, scores, -jnp.inf), allowed

    def allowed_block(self, iq: Array, ik: Array) -> Array | None:
        """[b|1, N|1, q|1, s|1] bool."""
        tiling = self.plan.tiling
        keys = ik * tiling.block_k + jnp.arange(tiling.block_k, dtype=jnp.int32)
        keys = keys[None, None, None, :]
        start, end = (
            None if bound is None else _block(bound, 2, iq, tiling.block_q)[..., None]
            for bound in (self.allowed.start, self.allowed.end)
        )
        ids = [
            (
                _block(query_ids, 1, iq, tiling.block_q)[:, None, :, None],
                _block(key_ids, 1, ik, tiling.block_k)[:, None, None, :],
            )
            for query_ids, key_ids in self.allowed.segment_ids
        ]
        tables = [
            _block(_block(array, 2, iq, tiling.block_q), 3, ik, tiling.block_k)
            for array in self.allowed.arrays
        ]
        return visible_pairs(keys, start, end, ids, tables)

    def keep_block(self, iq: Array, ik: Array, flipped: bool = False) -> Array | None:
        """Dropout's factors for a tile; None without dropout."""
        if self.seed is None:
            return None
        tiling, axes = self.plan.tiling, self.plan.axes
        example = self.group * tiling.block_b + jnp.arange(tiling.block_b, dtype=jnp.int32)
        head = jnp.arange(axes.N, dtype=jnp.int32)
        query = iq * tiling.block_q + jnp.arange(tiling.block_q, dtype=jnp.int32)
        keys, words, T = self.key_indices(ik), self.seed, axes.T
        heads = example[:, None] * axes.N + head[None, :]  # [b, N]
        if isinstance(words, Draw):
            draw = words
            if draw.heads is not None:
                heads = draw.heads.reshape(-1)[heads]
            if draw.queries is not None:
                query = draw.queries.at[query].get(mode="clip")
            words, T, keys = draw.words, draw.T, keys + draw.first_key
        row = heads[..., None] * T + query[None, None]
        rows = row.reshape(*self.plan.lead, tiling.block_q, 1)  # [b, N, q] -> [Z, q, 1]
        keep = keep_scale(words, rows, keys, self.plan.dropout_rate, self.plan.wide)
        return self._flip(self._apart(keep)) if flipped else keep

    def key_indices(self, ik: Array, flipped: bool = False) -> Array:
        """Which keys a block holds: [1, 1, s] against a tile, [1, s, 1] against a flipped one."""
        size = self.plan.tiling.block_k
        keys = ik * size + jnp.arange(size, dtype=jnp.int32)
        if flipped:
            return keys.reshape(*(1 for _ in self.plan.flipped_lead), -1, 1)
        return keys.reshape(*(1 for _ in self.plan.lead), 1, -1)

    # -- values ---------------------------------------------------------------------------------

    def value_block(self, ik: Array) -> Array:
        return self._value_operand(_block(self.value, 2, ik, self.plan.tiling.block_k))

    def pool(self, weights: Array, value: Array) -> Array:
        """[Z, q, s] and [b, K, s, V] -> [Z, q, V], times `value_scale`."""
        rows = self._together(self._value_operand(weights))
        value = value * self.plan.value_scale
        return self._tile(self._product("bkqs,bksv->bkqv", rows, value))

    def out_operand(self, d_out: Array) -> Array:
        """d out, [Z, q, V] -> [b, K, r, V], as matrix products take it."""
        return self._together(self._value_operand(d_out))

    def d_weights(self, value: Array, d_out: Array) -> Array:
        """[Z, q, s]."""
        return self._tile(self._product("bkrv,bksv->bkrs", self.out_operand(d_out), value))

    def d_weights_flipped(self, value: Array, d_rows: Array) -> Array:
        """[Z, s, r]."""
        pairs = self._product("bksv,bkrv->bksr", value, d_rows)
        return pairs.reshape(*self.plan.flipped_lead, *pairs.shape[-2:])

    def d_value(self, weights: Array, d_rows: Array) -> Array:
        """Flipped weights, [Z, s, r], and [b, K, r, V] -> [b, K, s, V]."""
        plan = self.plan
        weights = self._value_operand(weights)
        weights = weights.reshape(plan.tiling.block_b, plan.axes.K, *weights.shape[-2:])
        return self._product("bksr,bkrv->bksv", weights, d_rows)

    def _value_operand(self, array: Array) -> Array:
        """In the product's dtype, unless weights may be too large for 16 bits."""
        plan = self.plan
        return array.astype(plan.product if plan.normalize.bounded else plan.wide)

    def _product(self, subscripts: str, left: Array, right: Array) -> Array:
        return jnp.einsum(
            subscripts,
            left,
            right,
            precision=matmul_precision(left.dtype, exact=self.expansion is not None),
            preferred_element_type=self.plan.wide,
        )

    # -- axes -----------------------------------------------------------------------------------

    def _together(self, rows: Array) -> Array:
        """[Z, q, x] or [b, N, q, x] -> [b, K, Gq, x]: heads that share a key head, as rows."""
        plan = self.plan
        count = plan.axes.N // plan.axes.K * rows.shape[-2]
        return rows.reshape(plan.tiling.block_b, plan.axes.K, count, rows.shape[-1])

    def _apart(self, rows: Array) -> Array:
        """[Z, q, x] or [b, K, Gq, x] -> [b, N, q, x]."""
        count = math.prod(rows.shape[:-1]) // (self.plan.tiling.block_b * self.plan.axes.N)
        return rows.reshape(self.plan.tiling.block_b, self.plan.axes.N, count, rows.shape[-1])

    def _tile(self, rows: Array) -> Array:
        """[b, N, q, x] or [b, K, Gq, x] -> [Z, q, x]."""
        lead = self.plan.lead
        return rows.reshape(*lead, math.prod(rows.shape[:-1]) // math.prod(lead), rows.shape[-1])

    def _flip(self, pairs: Array) -> Array:
        """[b|1, N|1, q|1, s|1] -> flipped, [Z, s, r]: r counts the queries of a group of heads."""
        plan, tiling = self.plan, self.plan.tiling
        shape = (tiling.block_b, plan.axes.K, -1, tiling.block_q, tiling.block_k)
        whole = (tiling.block_b, plan.axes.N, tiling.block_q, tiling.block_k)
        turned = jnp.broadcast_to(pairs, whole).reshape(shape).transpose(0, 1, 4, 2, 3)
        return turned.reshape(*plan.flipped_lead, tiling.block_k, -1)

    def unflip(self, pairs: Array) -> Array:
        """[Z, s, r] -> [b, N, q, s]."""
        plan, tiling = self.plan, self.plan.tiling
        pairs = pairs.reshape(tiling.block_b, plan.axes.K, tiling.block_k, -1, tiling.block_q)
        whole = (tiling.block_b, plan.axes.N, tiling.block_q, tiling.block_k)
        return pairs.transpose(0, 1, 3, 4, 2).reshape(whole)

    def flip_rows(self, rows: Array) -> Array:
        """Numbers per query, [Z, q] -> [Z, 1, r]."""
        return rows.reshape(*self.plan.flipped_lead, 1, -1)

    def _spread(self, pairs: Array) -> Array:
        """[b|1, N|1, q|1, s|1] -> [Z, q, s]."""
        tiling = self.plan.tiling
        shape = (tiling.block_b, self.plan.axes.N, tiling.block_q, tiling.block_k)
        return jnp.broadcast_to(pairs, shape).reshape(*self.plan.lead, *shape[2:])


def _block(array: Array, axis: int, index: Array, size: int) -> Array:
    """Block `index` of an axis; an axis of 1 broadcasts over all blocks."""
    if array.shape[axis] in (1, size):
        return array
    return jax.lax.dynamic_slice_in_dim(array, index * size, size, axis % array.ndim)
