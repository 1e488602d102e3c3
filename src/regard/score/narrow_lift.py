"""The narrow lift of wᵀ tanh(x + y): picks tables by the data, and measures the error on the data.

Each hidden unit takes the table nearest to the deviations of its x and y and to its offset.
Whatever it takes, histograms of all x and of all y then say how large the error is; see `_within`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from regard.placement import over_shards
from regard.score.contract import Lift, repeat_heads
from regard.score.narrow_features import NarrowExpansion, chebyshev, squash
from regard.score.narrow_table import (
    DEVIATIONS,
    EDGES,
    OFFSETS,
    PAIR_OF,
    NarrowTable,
    between,
    reach,
)

SAMPLE = 512  # tokens of an example by which tables are picked; all tokens measure the error

# Of the root mean square error, in tolerances: of any one tanh, and of any one query or key.
EACH_UNIT, EACH_TOKEN = 4.0, 16.0
# Of an upper bound that holds however tokens lie inside the bins of the histograms.
WHEREVER = 2.0


def narrow_lift(
    x: Float[Array, "B N T h"],
    y: Float[Array, "B K S h"],
    vector: Float[Array, "1 _ 1 h"],
    visible: Bool[Array, "B K S"] | None,
    tolerance: float,
) -> Lift | None:
    """The lift, in range where the measured error is; None where no table is fine enough.

    The root mean square over all pairs of a query and a visible key, for every example and head:

    - of each tanh's error, averaged over the hidden units by abs(w), is within the tolerance, so
      that the score's is within tolerance · ‖w‖₁;
    - the same average over the pairs of any one query, or of any one key, is within EACH_TOKEN
      tolerances: an outlier is as rare as may be, it is not scored at random;
    - of any one tanh's error is within EACH_UNIT tolerances, whatever its weight.
    """
    table = NarrowTable.of(tolerance)
    if table is None:
        return None
    # Left to itself, XLA fuses the projections or conversions that x and y come from into each of
    # the reductions below, and these with one another (one H200: 95 µs for what takes 24).
    x, y = jax.lax.optimization_barrier((x, y))
    units = _Units.of(*jax.lax.stop_gradient((x, y)), visible)
    entry, side = units.entry, units.exchanged.astype(jnp.int32)
    polynomials = jnp.asarray(table.coefficients, x.dtype)
    # [K, h, 1 + rank, terms] -> [1, K, 1 + rank, terms, h]
    of_x, of_y = (jnp.moveaxis(polynomials[entry, one], 1, -1)[None] for one in (side, 1 - side))
    expansion = NarrowExpansion(
        units.squash_of_x(),
        units.squash_of_y(),
        of_x[:, :, 1:],
        of_y[:, :, 1:],
        jnp.broadcast_to(vector * repeat_heads(units.sign, x), (1, x.shape[1], 1, x.shape[3])),
    )
    query_bias = _bias(of_x[:, :, :1], x, units.squash_of_x(), vector * repeat_heads(units.sign, x))
    key_bias = _bias(of_y[:, :, :1], y, units.squash_of_y(), vector * units.sign)
    in_range = _within(units, table, x, y, jax.lax.stop_gradient(vector), visible, tolerance)
    standing = f"the tanhs' root mean square error on this data within {tolerance:.3g}"
    return Lift(x, y, key_bias, query_bias, expansion, in_range, standing=standing)


class _Units(NamedTuple):
    """What each hidden unit of each key head takes, over all examples: [1, K, 1, h] or [K, h].

    Attributes:
        entry: of the table, [K, h].
        exchanged: whether y's deviation is the wider one, [K, h].
        sign: -1 where the table's x and y are minus ours.
        middle: of y; the table's y is centered, and its x has the whole offset.
        offset: of the entry.
        x_deviation, y_deviation: of the entry.
    """

    entry: Int[Array, "K h"]
    exchanged: Bool[Array, "K h"]
    sign: Float[Array, "1 K 1 h"]
    middle: Float[Array, "1 K 1 h"]
    offset: Float[Array, "1 K 1 h"]
    x_deviation: Float[Array, "1 K 1 h"]
    y_deviation: Float[Array, "1 K 1 h"]

    @classmethod
    def of(cls, x: Array, y: Array, visible: Array | None) -> "_Units":
        x_mean, x_deviation = _moments(x, y.shape[1], None)
        y_mean, y_deviation = _moments(y, y.shape[1], visible)
        mean = x_mean + y_mean
        of_x, of_y = (_nearest(one, DEVIATIONS) for one in (x_deviation, y_deviation))
        of_offset = _nearest(jnp.abs(mean), OFFSETS)
        entry = jnp.asarray(PAIR_OF * len(OFFSETS), jnp.int32)[of_x, of_y] + of_offset

        def per_unit(array: Array) -> Array:
            return array.astype(x.dtype)[None, :, None, :]

        return cls(
            entry,
            of_x < of_y,
            per_unit(jnp.where(mean < 0, -1, 1)),
            per_unit(y_mean),
            per_unit(jnp.asarray(OFFSETS)[of_offset]),
            per_unit(jnp.asarray(DEVIATIONS)[of_x]),
            per_unit(jnp.asarray(DEVIATIONS)[of_y]),
        )

    def squash_of_x(self) -> tuple[Array, Array]:
        """(scale, shift) of t(x)."""
        width = reach(self.x_deviation)
        return self.sign / width, (self.sign * self.middle - self.offset) / width

    def squash_of_y(self) -> tuple[Array, Array]:
        width = reach(self.y_deviation)
        return self.sign / width, -self.sign * self.middle / width


def _moments(
    rows: Float[Array, "B N T h"], key_heads: int, taken: Bool[Array, "B K T"] | None
) -> tuple[Float[Array, "K h"], Float[Array, "K h"]]:
    """Mean and standard deviation of a sample of the tokens, over examples and grouped heads."""
    step = max(1, rows.shape[2] // SAMPLE)
    B, *_, h = rows.shape
    rows = rows[:, :, ::step].reshape(B, key_heads, -1, h)
    weight = jnp.ones(rows.shape[:3], rows.dtype)
    if taken is not None:
        weight = taken[:, :, ::step].astype(rows.dtype)
        rows = jnp.where(weight[..., None] > 0, rows, 0)
    count = jnp.maximum(over_shards("sum", weight.sum((0, 2))), 1)[:, None]
    # From both sums at once: it only picks a table, and one round of a GPU's kernels is spared.
    mean, square = (
        over_shards("sum", (one * weight[..., None]).sum((0, 2))) / count for one in (rows, rows**2)
    )
    return mean, jnp.sqrt(jnp.maximum(square - mean**2, 0.0))


def _nearest(found: Array, grid: np.ndarray) -> Array:
    """The index of the nearest point of a grid."""
    edges = jnp.asarray(between(grid), found.dtype).reshape((1,) * found.ndim + (-1,))
    return jnp.sum(found[..., None] > edges, axis=-1, dtype=jnp.int32)


def _bias(
    polynomials: Array, rows: Array, both: tuple[Array, Array], amplitude: Array
) -> Float[Array, "B N T"]:
    """The part of the score that is a function of one side alone."""
    polynomials = jnp.repeat(polynomials, rows.shape[1] // polynomials.shape[1], axis=1)
    scale, shift = (repeat_heads(one, rows) for one in both)
    found = chebyshev(polynomials, squash(rows, scale, shift))[..., 0, :]
    return (found * amplitude).sum(-1)


def _within(
    units: _Units,
    table: NarrowTable,
    x: Array,
    y: Array,
    vector: Array,
    visible: Array | None,
    tolerance: float,
) -> Bool[Array, ""]:
    """Whether the error is as small as `narrow_lift` says, on the data.

    The squared error is a function of x and y alone, and the mean of it over all pairs a sum over
    pairs of bins: (how many x) · (how many y) · (its mean there), linear in T + S. The mean inside
    a pair of bins supposes that x and y lie there as normal numbers would; the same sum with the
    largest error of each pair of bins holds wherever they lie, and may be WHEREVER times as large.
    """
    K, h = units.entry.shape
    of_x, finite_x = _histogram(x, units.squash_of_x(), units.x_deviation, None)
    of_y, finite_y = _histogram(y, units.squash_of_y(), units.y_deviation, visible)
    of_x = of_x.reshape(x.shape[0], K, -1, h, of_x.shape[-1])  # [B, K, G, h, bins]
    of_y = of_y[:, :, None]

    def errors(squares: np.ndarray) -> Array:
        """[1, K, 1, h, bins of x, bins of y]"""
        found = jnp.asarray(squares, x.dtype)[units.entry]
        exchanged = units.exchanged[..., None, None]
        return jnp.where(exchanged, found.swapaxes(-1, -2), found)[None, :, None]

    mean, largest = errors(table.mean_square), errors(table.largest_square)
    each = _sum(_sum(mean, of_y[..., None, :]), of_x)  # [B, K, G, h]
    of_query = _sum(largest, of_y[..., None, :])  # [B, K, 1, h, bins of x]
    of_key = _sum(largest.swapaxes(-1, -2), of_x[..., None, :])
    worst_query = jnp.where(of_x > 0, of_query, 0).max(-1)
    worst_key = jnp.where(of_y > 0, of_key, 0).max(-1)
    weight = jnp.abs(vector)  # [1, K or 1, 1, h]

    def averages(square: Array, tolerances: float) -> Array:
        root = (jnp.sqrt(square) * weight).sum(-1)
        return jnp.all(root <= tolerances * tolerance * weight.sum(-1))

    return (
        averages(each, 1.0)
        & averages(_sum(of_query, of_x), WHEREVER)
        & averages(jnp.maximum(worst_query, worst_key), EACH_TOKEN)
        & jnp.all(each <= (EACH_UNIT * tolerance) ** 2)
        & finite_x
        & finite_y
    )


def _sum(left: Array, right: Array) -> Array:
    """Over the last axis, in float32: a product on a GPU's matrix unit would be in TF32."""
    return (left * right).sum(-1)


def _histogram(
    rows: Float[Array, "B N T h"],
    both: tuple[Array, Array],
    deviation: Float[Array, "1 K 1 h"],
    taken: Bool[Array, "B K T"] | None,
) -> tuple[Float[Array, "B N h bins"], Bool[Array, ""]]:
    """The part of the tokens in each bin of the table, and whether all are finite."""
    scale, shift = (repeat_heads(one, rows) for one in both)
    wide = repeat_heads(deviation / reach(deviation), rows)
    z = (rows * scale + shift) / wide
    finite = jnp.abs(z) < jnp.inf
    if taken is not None:
        z = jnp.where(taken[..., None], z, -jnp.inf)
        finite = finite | ~taken[..., None]
    T = rows.shape[2]
    counts = _counts_above(z, ~finite)  # [edges + 1, B, N, h], the last of what is not finite
    size = jnp.full(counts.shape[1:], T, jnp.float32)
    if taken is not None:
        size = jnp.broadcast_to(taken.sum(2, dtype=jnp.float32)[..., None], size.shape)
    above = jnp.concatenate([size[None], counts[:-1], jnp.zeros_like(size)[None]])
    in_bins = jnp.moveaxis(over_shards("sum", above[:-1] - above[1:]), 0, -1)
    total = jnp.maximum(in_bins.sum(-1, keepdims=True), 1)
    return (in_bins / total).astype(rows.dtype), jnp.all(counts[-1] == 0)


def _counts_above(z: Float[Array, "B N T h"], last: Bool[Array, "B N T h"]) -> Array:
    """How many of the T numbers are above each edge; and how many are True in `last`.

    Four counts of up to 255 numbers lie in one 32-bit word, and all words are sums of one reduction
    with several results: a GPU reads z once. One sum for each edge would read it 27 times.
    """
    (B, N, T, h), most = z.shape, 128
    chunks = -(-T // most)
    rest = chunks * most - T
    z = jnp.pad(z, ((0, 0), (0, 0), (0, rest), (0, 0)), constant_values=-jnp.inf)
    last = jnp.pad(last, ((0, 0), (0, 0), (0, rest), (0, 0)))
    found = [z > edge for edge in EDGES.tolist()] + [last]
    ones = [
        jnp.where(one, jnp.uint32(1 << 8 * (i % 4)), jnp.uint32(0)) for i, one in enumerate(found)
    ]
    words = [sum(ones[i + 1 : i + 4], ones[i]) for i in range(0, len(ones), 4)]
    words = [word.reshape(B, N, chunks, most, h) for word in words]
    sums = jax.lax.reduce(
        words,
        [jnp.uint32(0)] * len(words),
        lambda left, right: [one + other for one, other in zip(left, right, strict=True)],
        (3,),
    )
    shifts = jnp.arange(0, 32, 8, dtype=jnp.uint32).reshape(1, 4, 1, 1, 1, 1)
    each = (jnp.stack(sums)[:, None] >> shifts) & jnp.uint32(255)  # [words, 4, B, N, chunks, h]
    return each.astype(jnp.float32).sum(4).reshape(-1, B, N, h)[: len(found)]
