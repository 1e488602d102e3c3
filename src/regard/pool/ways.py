"""Which way a problem's scores are made, tile by tile: by a lift, by a quicker form, by definition.

A lift or quicker form may hold only for some data. Then there are two ways, and which of them is
taken is decided on the data, at run time: the first where it is in range, else the definition.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from regard.pool.problem import Problem
from regard.pool.reference import dense_weights
from regard.score.contract import Lift, Score, accumulation_dtype, repeat_heads


class Way(NamedTuple):
    """One way to score tiles: a projected score and its inputs, or a lift; neither: no scores."""

    scored: tuple[Score, Array, Array] | None
    lift: Lift | None


def blockwise_weights(problem: Problem) -> Array:
    """The weights that `blockwise` pools with, [B, N, T, S], dense: lifted where it lifts."""
    axes = problem.axes

    def run(way: Way) -> Array:
        if way.lift is not None:
            return dense_weights(problem, way.lift.scores())
        if way.scored is None:
            wide = accumulation_dtype(problem.query.dtype)
            return dense_weights(problem, jnp.zeros((axes.B, axes.N, axes.T, axes.S), wide))
        score, query, key = way.scored
        return dense_weights(problem, score.scores(query, repeat_heads(key, query)))

    return take_way(*find_ways(problem), run)


def find_ways(
    problem: Problem, tiled: bool = True, lifted: bool = True
) -> tuple[list[Way], Array | None]:
    """The quickest way to score this problem's tiles; with a second one, for data out of range.

    `tiled=False`: for kernels, which know no quicker forms than a lift and the definition.
    `lifted=False`: only the definition.
    """
    if not problem.normalize.uses_scores:
        return [Way(None, None)], None
    query, key = problem.query, problem.key
    if problem.score.per_head():
        key = repeat_heads(key, query)
    score, query, key = problem.score.projected(query, key)
    visible = problem.visible
    if visible is not None and visible.shape[1] != key.shape[1]:
        visible = jnp.repeat(visible, key.shape[1] // visible.shape[1], axis=1)
    definition = Way((score, query, key), None)
    if not lifted:
        return [definition], None
    lift = score.lift(query, key, visible=visible)
    if lift is not None:
        first, in_range = Way(None, lift), lift.in_range
    else:
        form = score.tiled(query, key, visible=visible) if tiled else None
        if form is None:
            return [definition], None
        first, in_range = Way((form.score, form.query, form.key), None), form.in_range
    return ([first] if in_range is None else [first, definition]), in_range


def lift_ran(ways: list[Way], in_range: Array | None) -> Array:
    """A bool scalar: whether the way that was taken is a lift."""
    if ways[0].lift is None or in_range is None:
        return jnp.array(ways[0].lift is not None)
    return in_range


def take_way(ways: list[Way], in_range: Array | None, run: Callable[[Way], Any]) -> Any:
    """run(the first way), or the second where the data is out of the first one's range."""
    if in_range is None:
        return run(ways[0])
    return lax.cond(in_range, lambda: run(ways[0]), lambda: run(ways[1]))
