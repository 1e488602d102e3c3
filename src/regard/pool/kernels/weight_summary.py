"""Summaries and pictures of the weights, for summary.py, in two kernel passes over tiles of scores.

The first pass is softmax, with every number per query; for a picture it is forward.py's. From its
log-sum-exp the second recomputes the weights: their sums per key, or their block averages. No
kernel adds to what another program writes, so that results are the same in every run.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from regard.mask import Allowed
from regard.pool.kernels.feature_pass import FeatureOperands, FeaturePass
from regard.pool.kernels.forward import LOWEST, forward, visit_all, visits
from regard.pool.kernels.padding import KernelMask, round_up
from regard.pool.kernels.tile import (
    LOG2_E,
    FeatureScore,
    KernelPlan,
    allowed_tile,
    dot,
    finish_scores,
    recomputed_weights,
    run_kernel,
)
from regard.pool.merge import with_sink
from regard.pool.tile import bins_of, query_visits
from regard.shapes import Axes

COLUMNS = 16  # of a picture that are summed at a time: the fewest that tensor cores multiply


@dataclass(frozen=True)
class WeightSummary:
    """Of softmax over features: numbers per query and per key, or a picture.

    Attributes:
        features: how scores are made; its values have no columns.
        picture: rows and columns; None asks for the numbers.
    """

    features: FeaturePass
    picture: tuple[int, int] | None

    @property
    def axes(self) -> Axes:
        return self.features.axes

    def resized(self, axes: Axes) -> "WeightSummary":
        return replace(self, features=self.features.resized(axes))

    def forward(
        self,
        operands: tuple[FeatureOperands, Array | None],
        allowed: Allowed,
        seed: None,
        active: None,
    ) -> tuple[Array, ...]:
        """
        Args:
            operands: of the features; and the sink [B|1, N|1, T|1], None for none.

        Returns:
            Entropy and largest weight [B, N, T] float32, its key [B, N, T] int32, and the weight
            per key [B, N, S] float32; or the picture [B, N, rows, columns] float32, alone.
        """
        (features, sink), T, S = operands, self.axes.T, self.axes.S
        static, arrays, mask = self.features.prepared(features, allowed, None, "summary")
        arrays["bounds"] = mask.bounds(static.tile, static.T, static.S)
        value = arrays.pop("value")
        if self.picture is None:
            lse, entropy, largest, place = (one[..., :T] for one in _per_query(static, arrays))
        else:
            lse = forward(static, arrays | {"value": value})[1][..., :T]
        share = jnp.ones_like(lse)
        if sink is not None:
            share, lse = with_sink(lse / LOG2_E, sink)
            lse = lse * LOG2_E
        padding = ((0, 0), (0, 0), (0, static.T - T))
        arrays["lse"] = jnp.pad(lse, padding, constant_values=jnp.inf)  # no weight
        if self.picture is not None:
            return (_picture(static, arrays, self.axes, self.picture),)
        entropy = share * (entropy - jnp.log(jnp.where(share > 0, share, 1.0)))
        return entropy, largest * share, place, _per_key(static, arrays, mask)[..., :S]


def _per_query(static: KernelPlan, arrays: dict[str, Array]) -> list[Array]:
    """Log2-sum-exp2, entropy, the largest weight and its key (-1: none), each [B, N, T].

    With the scores t, in units of log2, relative to the largest: the sum of 2^t, that of t · 2^t,
    and where t is 0 first.
    """
    blocks, programs = static.blocks, static.T // static.blocks.queries

    def kernel(named: dict[str, Any], *outs: Any) -> None:
        block = programs - 1 - pl.program_id(0)  # under a causal mask the last have the most to do
        rows = pl.ds(block * blocks.queries, blocks.queries)
        scores_of = _scores(static, named, rows, flipped=False)
        index = jnp.arange(blocks.keys, dtype=jnp.int32)[None, :]

        def visit(ik: Array, carry: Any, masked: bool) -> Any:
            top, total, spread, place = carry
            keys = pl.ds(ik * blocks.keys, blocks.keys)
            scores = scores_of(keys)
            scores, _ = finish_scores(static, named, scores, rows, keys, flipped=False)
            allowed = allowed_tile(named, rows, keys, flipped=False) if masked else None
            if allowed is not None:
                scores = jnp.where(allowed, scores, -jnp.inf)
            largest = scores.max(axis=1)
            first = jnp.where(scores == largest[:, None], index, blocks.keys).min(axis=1)
            place = jnp.where(largest > top, keys.start + first, place)
            new_top = jnp.maximum(top, largest)
            below = scores - new_top[:, None]
            weights = jnp.exp2(below)
            if masked or "bias" in named:  # 0 times -inf is NaN
                below = jnp.maximum(below, LOWEST)
            step = top - new_top
            rescale = jnp.exp2(step)
            spread = rescale * (spread + step * total) + (weights * below).sum(axis=1)
            return new_top, rescale * total + weights.sum(axis=1), spread, place

        zeros = jnp.zeros((blocks.queries,), jnp.float32)
        nowhere = jnp.full((blocks.queries,), -1, jnp.int32)
        carry = (jnp.full_like(zeros, LOWEST), zeros, zeros, nowhere)
        top, total, spread, place = visit_all(named, visits(named, block), visit, carry)
        some = total > 0.0
        total = jnp.where(some, total, 1.0)
        entropy = (jnp.log2(total) - spread / total) * (1.0 / LOG2_E)
        lse = jnp.where(some, top + jnp.log2(total), -jnp.inf)
        found = (lse, entropy, jnp.where(some, 1.0 / total, 0.0), place)
        for out, one in zip(outs, found, strict=True):
            plt.store(out.at[rows], one)

    results = [((static.T,), dtype) for dtype in (*(jnp.float32,) * 3, jnp.int32)]
    return run_kernel(static, kernel, arrays, programs, results, "regard_look")


def _per_key(static: KernelPlan, arrays: dict[str, Array], mask: KernelMask) -> Array:
    """The sum over queries of each key's weights, [B, N, S]: a program keeps a block of keys.

    Args:
        arrays: `lse` among them.
    """
    queries, keys = static.tile  # the block that a program keeps is the larger one, as per query
    blocks = replace(
        static.blocks, queries=math.gcd(keys, static.T), keys=math.gcd(queries, static.S)
    )
    static, programs = replace(static, blocks=blocks), static.S // blocks.keys

    def kernel(named: dict[str, Any], out: Any) -> None:
        block = pl.program_id(0)
        keys = pl.ds(block * blocks.keys, blocks.keys)
        scores_of = _scores(static, named, keys, flipped=True)

        def visit(iq: Array, total: Array, masked: bool) -> Array:
            rows = pl.ds(iq * blocks.queries, blocks.queries)
            found = recomputed_weights(
                static, named, scores_of(rows), rows, keys, flipped=True, masked=masked
            )
            return total + found.weights.sum(axis=1)

        zeros = jnp.zeros((blocks.keys,), jnp.float32)
        plt.store(out.at[keys], visit_all(named, visits(named, block), visit, zeros))

    bounds = mask.bounds(static.tile, static.T, static.S)
    arrays = arrays | {"bounds": query_visits(bounds, programs)}
    result = [((static.S,), jnp.float32)]
    return run_kernel(static, kernel, arrays, programs, result, "regard_look_keys")[0]


def _picture(
    static: KernelPlan, arrays: dict[str, Array], axes: Axes, picture: tuple[int, int]
) -> Array:
    """Block averages of the weights, [B, N, rows, columns].

    A program sums its block of queries into the rows that these touch, some columns at a time; rows
    that two blocks touch are added up at the end.

    Args:
        arrays: `lse` among them.
    """
    (height, width), blocks = picture, static.blocks
    programs = static.T // blocks.queries
    first_row = np.arange(programs) * blocks.queries * height // axes.T  # of each program
    touched = min(height, ((blocks.queries - 1) * height) // axes.T + 2)
    if blocks.queries * height % axes.T == 0:
        touched = blocks.queries * height // axes.T
    local = round_up(touched, 16, power=True)
    columns = min(blocks.keys, round_up(blocks.keys * width // axes.S, COLUMNS, power=True))
    chunks = -(-width // columns)
    edges = _edges(axes.S, width)
    ends = np.minimum(np.arange(1, chunks + 1) * columns, width)
    parts = 2 if arrays["query"].dtype.itemsize == 2 else 3
    arrays = arrays | dict(
        row_bins=_padded_bins(axes.T, height, static.T),
        column_bins=_padded_bins(axes.S, width, static.S),
        first_rows=jnp.asarray(first_row, jnp.int32),
        first_blocks=jnp.asarray(edges[np.arange(chunks) * columns] // blocks.keys, jnp.int32),
        last_blocks=jnp.asarray(-(-edges[ends] // blocks.keys), jnp.int32),
    )

    def kernel(named: dict[str, Any], out: Any) -> None:
        block = programs - 1 - pl.program_id(0)  # as in `_per_query`
        rows = pl.ds(block * blocks.queries, blocks.queries)
        scores_of = _scores(static, named, rows, flipped=False)
        row = plt.load(named["row_bins"].at[rows]) - named["first_rows"][block]
        down = jnp.arange(local, dtype=jnp.int32)[:, None] == row[None, :]
        down, bounds = down.astype(jnp.bfloat16), visits(named, block)

        def sum_columns(chunk: Array, nothing: Any) -> Any:
            first = chunk * columns
            at = first + jnp.arange(columns, dtype=jnp.int32)[None, :]
            low, high = named["first_blocks"][chunk], named["last_blocks"][chunk]

            def visit(ik: Array, total: Array, masked: bool) -> Array:
                keys = pl.ds(ik * blocks.keys, blocks.keys)
                found = recomputed_weights(
                    static, named, scores_of(keys), rows, keys, flipped=False, masked=masked
                )
                across = plt.load(named["column_bins"].at[keys])[:, None] == at
                for part in _bfloat16_parts(found.weights, parts):
                    total = total + dot(part, across.astype(jnp.bfloat16), (1, 0), None)
                return total

            own = tuple(jnp.clip(bound, low, high) for bound in bounds)
            zeros = jnp.zeros((blocks.queries, columns), jnp.float32)
            total = visit_all(named, own, visit, zeros)
            patch = jnp.zeros((local, columns), jnp.float32)
            for part in _bfloat16_parts(total, parts):
                patch = patch + dot(down, part, (1, 0), None)
            at_patch = block, pl.ds(jnp.int32(0), local), pl.ds(first, columns)
            plt.store(out.at[at_patch], patch)
            return nothing

        lax.fori_loop(jnp.int32(0), jnp.int32(chunks), sum_columns, jnp.int32(0))

    result = [((programs, local, chunks * columns), jnp.float32)]
    (patches,) = run_kernel(static, kernel, arrays, programs, result, "regard_look_picture")

    top = _edges(axes.T, height)
    first_block, last_block = top[:-1] // blocks.queries, (top[1:] - 1) // blocks.queries

    def add(i: Array, image: Array) -> Array:
        """The part of each row from the i-th block that touches it."""
        block = jnp.asarray(first_block, jnp.int32) + i
        inside = block <= jnp.asarray(last_block, jnp.int32)
        block = jnp.minimum(block, programs - 1)
        row = jnp.arange(height, dtype=jnp.int32) - arrays["first_rows"][block]
        part = patches[:, :, block, jnp.clip(row, 0, local - 1), :width]
        return image + jnp.where(inside[:, None], part, 0.0)

    image = jnp.zeros((static.B, static.N, height, width), jnp.float32)
    most = (last_block - first_block).max() + 1
    image = lax.fori_loop(jnp.int32(0), jnp.int32(most), add, image)
    sizes = np.diff(top)[:, None] * np.diff(edges)[None, :]
    return image * jnp.asarray(1.0 / sizes[None, None], jnp.float32)


def _scores(
    static: KernelPlan, named: dict[str, Any], own: Any, *, flipped: bool
) -> Callable[[Any], Array]:
    """The scores of a program's own queries, flipped keys, with any block of the others, as in
    `TileScore.tile`. Features of one product are loaded once.
    """
    score = static.score
    assert isinstance(score, FeatureScore)
    if score.width > score.chunk:
        return lambda other: score.tile(
            named, *((other, own) if flipped else (own, other)), flipped=flipped
        )
    mine, theirs = ("key", "query") if flipped else ("query", "key")
    features = plt.load(named[mine].at[own, :])
    return lambda other: score.of(features, plt.load(named[theirs].at[other, :]))


def _bfloat16_parts(values: Array, count: int) -> list[Array]:
    """Numbers that add up to the float32 values, within 2^-16 of them for two parts and 2^-23 for
    three: tensor cores multiply them by ones and zeros without another rounding.
    """
    found = []
    for _ in range(count - 1):
        bits = lax.bitcast_convert_type(values, jnp.uint32) & jnp.uint32(0xFFFF0000)
        part = lax.bitcast_convert_type(bits, jnp.float32)
        found.append(part.astype(jnp.bfloat16))
        values = values - part
    return [*found, values.astype(jnp.bfloat16)]


def _edges(length: int, bins: int) -> np.ndarray:
    """Where each bin of `bins_of` begins, and the end."""
    return -(-np.arange(bins + 1) * length // bins)


def _padded_bins(length: int, bins: int, size: int) -> Array:
    return jnp.pad(bins_of(length, bins), (0, size - length), constant_values=-1)
