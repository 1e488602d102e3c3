"""What each axis of a call's arrays counts: where examples and heads can be divided."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from regard.score.contract import Score
from regard.shapes import Axes

BATCH, HEADS, KEY_HEADS = "batch", "heads", "key heads"


class Kinds(tuple[str | None, ...]):
    """What each axis of an array counts: BATCH, HEADS (N), KEY_HEADS (K); None: anything else."""

    @classmethod
    def of(cls, first: Sequence[str | None], rank: int) -> "Kinds":
        return cls((*first[:rank], *(None,) * (rank - len(first))))


def kinds_of(axes: Axes, inputs: tuple[Any, ...]) -> list[Any]:
    """The kinds of every leaf of (operands, allowed, seed, active[, results])."""
    operands, allowed, seed, active, *results = inputs
    nodes = jax.tree.leaves(operands, is_leaf=_is_score)
    by_head, found = _parameters_by_head([node for node in nodes if _is_score(node)])
    heads = {axes.K: KEY_HEADS, axes.N: HEADS} if found else {}

    def by_shape(array: Array) -> Kinds:
        """[B|1, N|K|1, ...]; an axis of 1 that broadcasts is on every device."""
        shape = jnp.shape(array)
        first = BATCH if shape[:1] == (axes.B,) else None
        return Kinds.of((first, *map(heads.get, shape[1:2])), len(shape))

    def of_operand(node: Any) -> Any:
        if not _is_score(node):
            return by_shape(node)
        return [
            Kinds.of((HEADS,) if path[:1] in by_head else (), jnp.ndim(leaf))
            for path, leaf in jax.tree_util.tree_leaves_with_path(node)
        ]

    return [
        jax.tree.map(of_operand, operands, is_leaf=_is_score),
        jax.tree.map(by_shape, (allowed.start, allowed.end)),
        jax.tree.map(lambda ids: Kinds.of(by_shape(ids)[:1], 2), allowed.segment_ids),
        jax.tree.map(by_shape, allowed.arrays),
        jax.tree.map(lambda array: Kinds.of((), jnp.ndim(array)), (seed, active)),
        jax.tree.map(by_shape, results),
    ]


def _is_score(node: Any) -> bool:
    return isinstance(node, Score)


def _parameters_by_head(scores: Sequence[Score]) -> tuple[set, bool]:
    """Where scores keep parameters with an axis of heads, and whether all of these were found.

    Heads cannot be divided where a user's own pytree registration conceals such a parameter.
    """
    names = {name for score in scores for name in score.head_axes()}
    paths = {(jax.tree_util.GetAttrKey(name),) for name in names}
    leaves = [leaf for score in scores for leaf in jax.tree_util.tree_leaves_with_path(score)]
    return paths, paths <= {path[:1] for path, _ in leaves}
