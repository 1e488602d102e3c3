"""Where queries and keys stand in their text, and the scores that depend on it.

`attend` calls `Score.placed` once, with the positions of every query and key. A rotary score
rotates its inputs by them and is its inner score from there on; the others get them as columns
beside the features, so that every tile of every backend has the positions of its own rows.
"""

import functools
import numbers
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from regard.placement import current_platform, over_shards
from regard.score.contract import (
    Lift,
    Score,
    accumulation_dtype,
    over_heads,
    with_heads,
)
from regard.score.dot import Dot
from regard.score.registration import register_score
from regard.shapes import as_array, require_one_width


@dataclass(frozen=True)
class Placement:
    """The queries and keys of a call, [B, N, T, Hq] and [B, K, S, Hk], and where they stand.

    Attributes:
        at, held: int32 [B|1, 1, T] and [B|1, 1, S], the positions of queries and of keys.
        by_default: whether they are known to be `default_positions`.
    """

    query: Array
    key: Array
    at: Array
    held: Array
    by_default: bool = False

    @functools.cached_property
    def query_columns(self) -> Array:
        """The queries' positions `as_columns`, [B, N, T, C]."""
        return as_columns(self.at, self.query)

    @functools.cached_property
    def key_columns(self) -> Array:
        """The keys' positions `as_columns`, [B, K, S, C]."""
        return as_columns(self.held, self.key)


def default_positions(query_len: int, key_len: int) -> tuple[Array, Array]:
    """int32 [T] and [S]: keys from 0 on; the last query stands where the last key does."""
    at = jnp.arange(query_len, dtype=jnp.int32) + (key_len - query_len)
    return at, jnp.arange(key_len, dtype=jnp.int32)


def as_int32(name: str, given: Any) -> Array:
    """Integers as int32, which holds them wherever they are known."""
    if not isinstance(given, jax.Array):
        given = as_array(name, given, np.asarray)
    wide = given.dtype.kind in "iu" and not np.can_cast(given.dtype, np.int32)
    if wide and given.size and not isinstance(given, jax.core.Tracer):
        low, high = int(given.min()), int(given.max())
        if low < -(2**31) or high >= 2**31:
            raise ValueError(
                f"{name} must fit int32, from -2³¹ to 2³¹ - 1. Got {list(given.shape)} of dtype "
                f"{given.dtype} from {low} to {high}. Fix: count from a nearer position: only "
                "distances matter."
            )
    return as_array(name, given, lambda given: jnp.asarray(given, jnp.int32 if wide else None))


@jax.jit
def as_columns(positions: Array, like: Array) -> Array:
    """int32 [B|1, 1, T] -> [B, N, T, C] beside [B, N, T, D], in its dtype, exact.

    float64 has a column; float32, which rounds integers above 2²⁴, two digits of 16 bits, and
    dtypes of 16 bits four digits of 8.
    """
    shifts = {16: (24, 16, 8, 0), 32: (16, 0), 64: (0,)}[jnp.finfo(like.dtype).bits]
    digits = [positions >> shifts[0]]
    digits += [(positions >> shift) & ((1 << shifts[-2]) - 1) for shift in shifts[1:]]
    columns = jnp.stack(digits, axis=-1).astype(like.dtype)
    return jnp.broadcast_to(columns, (*like.shape[:3], columns.shape[-1]))


def from_columns(columns: Array) -> Array:
    """The positions that `as_columns` wrote."""
    digits = columns.astype(jnp.int32)
    count = columns.shape[-1]
    found = digits[..., 0]
    for place in range(1, count):
        found = (found << (32 // count)) + digits[..., place]
    return found


class Positional(Score):
    """A score that is defined by positions: without any, those of `default_positions`."""

    sums_over_shards = True

    def uses_positions(self) -> bool:
        return True

    def scores(self, query: Array, key: Array) -> Array:
        at, held = (one[None, None] for one in default_positions(query.shape[-2], key.shape[-2]))
        shape = (1,) * (4 - query.ndim)  # placed on four axes: [B, N, T, Hq]
        four = (query.reshape(shape + query.shape), key.reshape(shape + key.shape))
        score, *placed = self.placed(*four, Placement(*four, at, held, by_default=True))
        found = score.scores(*placed)
        return found.reshape(*found.shape[4 - query.ndim :])


# ---------------------------------------------------------------------------------------------
# Rotary.


@register_score
@dataclass(frozen=True)
class Rotary(Positional):
    """Rotary positions: the inner score of queries and keys rotated by their positions.

    Pairs of numbers of q and k are rotated by the angle p·θ_i, with p the position and
    θ_i = base^(-2i/R), i = 0 … R/2 - 1. A dot product of rotated vectors depends on the distance of
    their positions only (Su et al. 2021, section 3.4.2). Queries and keys are rotated once, before
    any kernel, so that `Rotary(Dot())` runs wherever `Dot()` does; a `Memory` stores rotated keys.

    Lift: that of the inner score (tests/score/test_positions.py).

    Example:
        >>> import jax.numpy as jnp, regard
        >>> x = jnp.ones((3, 2))
        >>> a = regard.scores(x, x, score=regard.Rotary(regard.Dot(1.0)))
        >>> a[0].round(1).tolist()  # 2 cos(distance)
        [2.0, 1.1..., -0.8...]

    Args:
        inner: any score of queries and keys of one width D.
        base: of the angles' geometric series.
        fraction: of the D numbers that is rotated, R = fraction · D, an even number; the others
            are left alone.
        interleaved: pairs are neighbors, (0, 1), (2, 3), …, as in the paper and GPT-J; False:
            (0, R/2), (1, R/2 + 1), …, as in GPT-NeoX, Llama and Gemma.
    """

    inner: Score = Dot()  # noqa: RUF009 (frozen)
    base: float = field(default=10_000.0, metadata=dict(static=True))
    fraction: float = field(default=1.0, metadata=dict(static=True))
    interleaved: bool = field(default=False, metadata=dict(static=True))
    keys_turned: bool = field(default=False, metadata=dict(static=True))  # in a Memory

    def label(self) -> str:
        return f"Rotary({self.inner.label()})"

    def placed(self, query: Array, key: Array, at: Placement) -> tuple[Score, Array, Array]:
        query = self.turned(query, at.at)
        key = key if self.keys_turned else self.turned(key, at.held)
        return self.inner.placed(query, key, at)

    def prepared(self, key: Array, positions: Array) -> tuple[Score, Array]:
        """Keys rotated by their positions, for the inner score."""
        inner, stored = self.inner.prepared(self.turned(key, positions), positions)
        return replace(self, inner=inner, keys_turned=True), stored

    def turned(self, rows: Array, positions: Array) -> Array:
        """[B, N, T, D] and int32 [B|1, 1, T] -> [B, N, T, D], in the rows' dtype."""
        width = self._turned_width(rows.shape[-1])
        return _turned(rows, positions, width, self.base, self.interleaved)

    def check(self, query_width: int, key_width: int) -> None:
        if not isinstance(self.inner, Score):
            raise TypeError(
                "Rotary's first argument is the score of the rotated queries and keys. Got "
                f"{self.inner!r}. Fix: Rotary(Dot(), base=...)."
            )
        self._turned_width(query_width)
        if not self.keys_turned:
            require_one_width("Rotary", query_width, key_width)
        self.inner.check(query_width, key_width)

    def __post_init__(self) -> None:
        for name in ("base", "fraction"):
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, numbers.Real):
                raise TypeError(
                    f"Rotary's {name} is a number that is known before the call is traced. Got "
                    f"{given!r}. Fix: a Python float, Rotary(inner, base=10_000.0, fraction=0.5)."
                )
        if not (0 < self.fraction <= 1 and 0 < self.base < np.inf):
            raise ValueError(
                "Rotary needs 0 < fraction <= 1 and 0 < base < inf. Got "
                f"fraction={self.fraction!r}, base={self.base!r}."
            )

    def head_axes(self) -> dict[str, tuple[int, ...]]:
        return {f"inner.{name}": shape for name, shape in self.inner.head_axes().items()}

    def tile_width(self, query_width: int) -> int:
        return self.inner.tile_width(query_width)

    def _turned_width(self, width: int) -> int:
        turned = self.fraction * width
        if turned != round(turned) or round(turned) % 2:
            fix = "an even width" if self.fraction == 1 else "another fraction"
            raise ValueError(
                "Rotary rotates pairs of numbers: fraction times the width must be an even number. "
                f"Got fraction {self.fraction} of width {width}. Fix: {fix}."
            )
        return round(turned)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _turned(rows: Array, positions: Array, width: int, base: float, interleaved: bool) -> Array:
    """The first `width` numbers of each row rotated in pairs."""
    wide = accumulation_dtype(rows.dtype)
    angle = _angles(positions, width, base, wide)  # [B|1, 1, T, R/2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    part, rest = rows[..., :width].astype(wide), rows[..., width:]
    if interleaved:
        first, second = part[..., ::2], part[..., 1::2]
    else:
        first, second = part[..., : width // 2], part[..., width // 2 :]
    turned = [first * cos - second * sin, first * sin + second * cos]
    if interleaved:
        both = jnp.stack(turned, axis=-1).reshape(part.shape)
    else:
        both = jnp.concatenate(turned, axis=-1)
    return jnp.concatenate([both.astype(rows.dtype), rest], axis=-1)


def _angles(positions: Array, width: int, base: float, dtype: jnp.dtype) -> Array:
    """p · base^(-2i / R), [..., R/2], less whole turns.

    A float32 product of a position near 10⁵ is off by 0.01. So the position is split into three
    parts, from -512 to 511 but for the first, and the angles of 1,024 and of 1,024² positions are
    known less whole turns: off by 5·10⁻⁴ at most, at any position.
    """
    step = base ** (-2.0 * np.arange(width // 2) / max(width, 1))
    angles: Any = 0.0
    for place in range(3):
        rest = positions & 1023
        upper = rest >= 512
        part = jnp.where(upper, rest - 1024, rest) if place < 2 else positions
        positions = (positions >> 10) + upper.astype(positions.dtype)
        turned = np.remainder(1024.0**place * step + np.pi, 2 * np.pi) - np.pi if place else step
        rate = jnp.asarray(turned, dtype).reshape(*(1,) * part.ndim, -1)
        angles = angles + part[..., None].astype(dtype) * rate
    return angles


# ---------------------------------------------------------------------------------------------
# ALiBi.

# One rounding of float32; what the constant of a lift may move a score by, see `AlibiAt.lift`.
_ROUNDING = 2.0**-25
_LIFT_LIMITS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-13}
_ON_CPU = 1e-6  # there, exact tiles are as fast


def alibi_slopes(heads: int) -> np.ndarray:
    """The paper's slopes, (N,): 2^(-8i/N) for i = 1 … N, where N is a power of two; else those of
    the power of two below, and every second one of the power above.

    Example:
        >>> alibi_slopes(4).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
    """
    below = 1 << (max(heads, 1).bit_length() - 1)
    slopes = 2.0 ** (-8.0 * np.arange(1, below + 1) / below)
    if below < heads:
        between = 2.0 ** (-4.0 * np.arange(1, 2 * below + 1, 2) / below)
        slopes = np.concatenate([slopes, between[: heads - below]])
    return slopes


@register_score
@dataclass(frozen=True)
class Alibi(Positional):
    """Attention with linear biases: a = -m (i - j), of a query at i, a key at j and a head's m.

    Press et al. 2022, section 3. Added to another score, `Dot() + Alibi()`, under causal order: a
    key after its query would be favored. `two_sided=True`, a = -m |i - j|, is for the others.

    Lift: exact (tests/score/test_positions.py): a constant per query and m (j - i_last) per key,
    in float32, which rounds scores by up to m T 2⁻²⁵; taken where that is below the rounding of the
    dtype. Else, and two-sided, a number per distance; none where positions are given.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> x = jnp.zeros((3, 4))
        >>> score = regard.Dot() + regard.Alibi(0.5, two_sided=True)
        >>> regard.scores(x, x, score=score).tolist()
        [[0.0, -0.5, -1.0], [-0.5, 0.0, -0.5], [-1.0, -0.5, 0.0]]

    Args:
        slopes: m, a number, a scalar array (it may be learned), or (N,), one per head; None: the
            paper's, `alibi_slopes(N)`.
        two_sided: -m |i - j|, which also lowers keys after the query.
    """

    slopes: float | Array | None = None
    two_sided: bool = field(default=False, metadata=dict(static=True))

    def placed(self, query: Array, key: Array, at: Placement) -> tuple[Score, Array, Array]:
        slopes = self.slopes
        if slopes is None:
            slopes = jnp.asarray(alibi_slopes(query.shape[1]), accumulation_dtype(query.dtype))
        score = AlibiAt(slopes, self.two_sided, at.by_default)
        return score, at.query_columns, at.key_columns

    def prepared(self, key: Array, positions: Array) -> tuple[Score, Array]:
        return self, key[..., :0]  # a memory stores the positions of its keys

    def head_axes(self) -> dict[str, tuple[int, ...]]:
        return with_heads(0, slopes=self.slopes)


@register_score
@dataclass(frozen=True)
class AlibiAt(Score):
    """`Alibi` of columns of positions."""

    sums_over_shards = True

    slopes: float | Array
    two_sided: bool = field(default=False, metadata=dict(static=True))
    by_default: bool = field(default=False, metadata=dict(static=True))

    def label(self) -> str:
        return "Alibi(two_sided=True)" if self.two_sided else "Alibi"

    def scores(self, query: Array, key: Array) -> Array:
        distance = from_columns(key)[..., None, :] - from_columns(query)[..., :, None]
        return self._of(distance, over_heads(self.slopes, query))

    def _of(self, distance: Array, slopes: Array) -> Array:
        distance = -jnp.abs(distance) if self.two_sided else distance
        return slopes * distance.astype(slopes.dtype)

    def lift(self, query: Array, key: Array, *, visible: Array | None = None) -> Lift | None:
        limit = _LIFT_LIMITS.get(query.dtype.name, 1.0)
        if query.dtype == jnp.float32 and current_platform(query, key) == "cpu":
            limit = _ON_CPU
        slopes = over_heads(self.slopes, query)[..., 0]  # [..., N|1, 1]
        if self.two_sided or query.shape[-2] * _ROUNDING > limit:
            if not self.by_default:
                return None
            distance = jnp.arange(1 - key.shape[-2], query.shape[-2])
            numbers = self._of(distance.reshape(*(1,) * (slopes.ndim - 1), -1), slopes)
            return Lift(query[..., :0], key[..., :0], distance_bias=numbers)
        at, held = from_columns(query), from_columns(key)  # [..., N, T], [..., K, S]
        last = over_shards("max", at.max((-2, -1), keepdims=True))
        return Lift(
            query[..., :0],
            key[..., :0],
            key_bias=slopes * (held - last).astype(slopes.dtype),
            query_bias=slopes * (last - at).astype(slopes.dtype),
        )

    def head_axes(self) -> dict[str, tuple[int, ...]]:
        return with_heads(0, slopes=self.slopes)
