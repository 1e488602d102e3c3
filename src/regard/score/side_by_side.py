"""Arrays and lifts of several scores, side by side: what algebra.py makes a sum from."""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from regard.score.contract import Expansion, Lift, promote, repeat_heads

Span = tuple[int, int] | None  # columns of an array; None: all of them


def pack(arrays: Sequence[Array]) -> tuple[Array, list[Span]]:
    """[..., F] each -> one array of their columns, and where each is in it."""
    distinct = {id(array): array for array in arrays}
    if len(distinct) == 1:
        return arrays[0], [None] * len(arrays)
    spans: dict[int, Span] = {}
    end = 0
    for name, array in distinct.items():
        spans[name] = (end, end + array.shape[-1])
        end += array.shape[-1]
    return concatenated(list(distinct.values())), [spans[id(array)] for array in arrays]


def concatenated(arrays: Sequence[Array]) -> Array:
    """Columns side by side, in a common dtype, for as many heads as one of them has."""
    dtype = promote(*(array.dtype for array in arrays))
    most = max(arrays, key=lambda array: array.shape[-3] if array.ndim > 2 else 0)
    return jnp.concatenate([repeat_heads(a.astype(dtype), most) for a in arrays], axis=-1)


def columns(array: Array, span: Span) -> Array:
    return array if span is None else array[..., slice(*span)]


def width_of(span: Span, width: int) -> int:
    return width if span is None else span[1] - span[0]


def side_by_side(named: Sequence[tuple[str, Lift]]) -> Lift:
    """The lift of a sum from the lifts of its terms, each with the term's name."""
    lifts = [lift for _, lift in named]
    if len(lifts) == 1:
        return lifts[0]
    expansion = None
    if any(lift.expansion is not None for lift in lifts):
        expansion = SideBySide(
            tuple(lift.expansion for lift in lifts),
            tuple((lift.query.shape[-1], lift.key.shape[-1]) for lift in lifts),
        )
    ranges = [lift.in_range for lift in lifts if lift.in_range is not None]
    standing = "exact"
    if any(lift.standing != standing for lift in lifts):
        standing = "; ".join(f"{name} {lift.standing}" for name, lift in named)
    after = None
    if any(lift.otherwise is not None for lift in lifts):
        after = side_by_side([(name, lift.otherwise or lift) for name, lift in named])
    return Lift(
        concatenated([lift.query for lift in lifts]),
        concatenated([lift.key for lift in lifts]),
        _sum_of([lift.key_bias for lift in lifts]),
        _sum_of([lift.query_bias for lift in lifts]),
        expansion,
        functools.reduce(jnp.logical_and, ranges) if ranges else None,
        after,
        distance_bias=_sum_of([lift.distance_bias for lift in lifts]),
        bends=max(lift.bends for lift in lifts),
        standing=standing,
    )


def _sum_of(biases: Sequence[Array | None]) -> Array | None:
    given = [bias for bias in biases if bias is not None]
    return functools.reduce(operator.add, given) if given else None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SideBySide:
    """The features of several lifts; None for one whose rows are its features.

    Attributes:
        widths: of each lift's compact query and key.
    """

    parts: tuple[Expansion | None, ...]
    widths: tuple[tuple[int, int], ...] = field(metadata=dict(static=True))

    def query(self, compact: Array) -> Array:
        return self._features(compact, 0, "query")

    def key(self, compact: Array) -> Array:
        return self._features(compact, 1, "key")

    def _features(self, compact: Array, side: int, method: str) -> Array:
        ends = np.cumsum([widths[side] for widths in self.widths])[:-1]
        columns = jnp.split(compact, [int(end) for end in ends], axis=-1)
        features = [
            rows if part is None else getattr(part, method)(rows)
            for part, rows in zip(self.parts, columns, strict=True)
        ]
        return jnp.concatenate(features, axis=-1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScaledExpansion:
    """The features of a lift whose queries are multiplied by a factor, [B, N, 1, 1]."""

    expansion: Expansion
    factor: Array

    def query(self, compact: Array) -> Array:
        return self.expansion.query(compact) * self.factor

    def key(self, compact: Array) -> Array:
        return self.expansion.key(compact)
