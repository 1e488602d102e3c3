"""A problem in parts of some examples and some heads, of which each fits in the processor's cache.

A loop cuts a part out of arrays in the caller's layout and puts its results, outputs or cotangents,
in their place.
"""

from dataclasses import replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from regard.dropout import Draw
from regard.mask import Allowed
from regard.placement import vary_as
from regard.pool.axis_kinds import BATCH, HEADS, KEY_HEADS, Kinds, kinds_of
from regard.pool.backend import Problem

# Numbers of keys, values and weights in a part, 4 MiB of float32: smaller parts are more
# iterations, and leave less work to divide among many cores.
PART = 1 << 20
# Parts that stay one where keys and values are multiplied as they are: a call with gradients then
# computes its weights once (two CPU cores, B=2, T=16, S=2,000, N=8, D=64: 8.2 ms of processor time,
# in parts 13; B=15, T=4, S=313, N=16: 27 and 19). Temporaries of some 20 MiB are memory that is
# mapped anew at each call; where keys are changed first, those take several times as much.
WHOLE = 5

OF_ROWS = Kinds((BATCH, HEADS))  # of an output, [B, N, T, ...]


class Place(NamedTuple):
    """Where a part lies: its first example and key head, and how many of its examples the part
    before it has too.
    """

    example: Any
    key_head: Any
    repeated: Any

    def once(self, rows: Array) -> Array:
        """Cotangents of a part's rows, zeroed for examples that are in another part too."""
        if isinstance(self.repeated, int):
            return rows
        own = jnp.arange(rows.shape[0], dtype=jnp.int32) >= self.repeated
        return jnp.where(own.reshape(-1, *(1,) * (rows.ndim - 1)), rows, 0)


class Parts:
    """A problem in parts of about PART numbers, each of some examples and some heads.

    Attributes:
        leaves: the arrays of the problem, queries, keys and values in the caller's layout: a part
            is cut out of [B, S, K, D] before it is transposed.
        kinds: of the leaves.
        batch, key_heads: examples and key heads of a part.
        count: of parts.
        without_copies: whether the whole is multiplied in the caller's layout.

    Args:
        unchanged: whether keys and values are multiplied as they are.
    """

    def __init__(self, problem: Problem, unchanged: bool):
        self.whole, axes = problem, problem.axes
        unused: dict[str, Any] = dict(seed=None, lost=None, sink=None, pages=None)
        rest = replace(problem, allowed=Allowed(None, None, (), ()), **unused)
        self.kinds = jax.tree.leaves(kinds_of(axes, (rest, problem.allowed, None, None)))
        leaves, structure = jax.tree.flatten((rest, problem.allowed))
        self.structure: Any = structure
        self.leaves = _turned(leaves)
        by_head = self.kinds[0][1] is not None
        for at in range(3):
            self.kinds[at] = Kinds((self.kinds[at][0], None, self.kinds[at][1], None))
        self.group = axes.N // axes.K
        self.without_copies = unchanged and axes.K == 1 and problem.visible is None
        copied = 0 if self.without_copies else axes.key_width + axes.V
        head = axes.S * (copied + self.group * axes.T)
        fit = max(1, PART // head)  # key heads
        if axes.B * axes.K * head <= (WHOLE * PART if unchanged else PART):
            self.batch, self.key_heads = axes.B, axes.K
        elif fit >= axes.K or not by_head:
            count = -(-axes.B // max(1, fit // axes.K))
            self.batch, self.key_heads = -(-axes.B // count), axes.K
        else:
            self.batch = 1
            self.key_heads = max(k for k in range(1, fit + 1) if axes.K % k == 0)
        self.count = -(-axes.B // self.batch) * (axes.K // self.key_heads)
        self.sizes = {
            BATCH: self.batch,
            KEY_HEADS: self.key_heads,
            HEADS: self.key_heads * self.group,
        }

    def loop(self, body: Any, totals: list[Array]) -> list[Array]:
        """body(place, totals), part after part; the last part first, see `Place.once`."""
        axes, across, count = self.whole.axes, self.whole.axes.K // self.key_heads, self.count
        if count == 1:
            return body(Place(0, 0, 0), totals)

        def step(index: Array, totals: list[Array]) -> list[Array]:
            index = count - 1 - index
            first = index // across * self.batch
            example = jnp.minimum(first, axes.B - self.batch)
            repeated = first - example if axes.B % self.batch else 0
            return body(Place(example, index % across * self.key_heads, repeated), totals)

        return lax.fori_loop(0, count, step, vary_as(totals, self.leaves))

    def cut_leaves(self, place: Place) -> list[Array]:
        """The leaves of one part."""
        return [self.cut(*each, place) for each in zip(self.leaves, self.kinds, strict=True)]

    def cut(self, array: Array, kinds: Kinds, place: Place) -> Array:
        starts, shape = self._box(array, kinds, place)
        if shape == array.shape:
            return array
        # XLA slices no bfloat16: without the barrier it widens the whole array before the loop.
        array, _ = lax.optimization_barrier((array, place))
        return lax.dynamic_slice(array, starts, shape)

    def put(self, total: Array, part: Array, kinds: Kinds, place: Place) -> Array:
        """The total with a part in its place; added where several parts have that place."""
        starts, shape = self._box(total, kinds, place)
        if not self.divide(kinds):
            part = part.astype(total.dtype) + self.cut(total, kinds, place)
        part = part.astype(total.dtype)
        if shape == total.shape:
            return part
        found = lax.dynamic_update_slice(_as_bits(total), _as_bits(part), starts)
        return _as_floats(found, total.dtype)

    def divide(self, kinds: Kinds) -> bool:
        """Whether each part has numbers of its own."""
        axes = self.whole.axes
        by_head = HEADS in kinds or KEY_HEADS in kinds
        return (self.batch == axes.B or BATCH in kinds) and (self.key_heads == axes.K or by_head)

    def _box(
        self, array: Array, kinds: Kinds, place: Place
    ) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """Where a part of an array starts, and its shape."""
        at = {BATCH: place.example, KEY_HEADS: place.key_head, HEADS: place.key_head * self.group}
        kinds = Kinds.of(kinds, array.ndim)
        shape = tuple(
            size if kind is None else self.sizes[kind]
            for kind, size in zip(kinds, array.shape, strict=True)
        )
        return tuple(0 if kind is None else at[kind] for kind in kinds), shape

    def problem(self, leaves: list[Array], place: Place) -> Problem:
        """The problem of one part."""
        rest, allowed = self.structure.unflatten(_turned(leaves))
        whole, B, N = self.whole.axes, self.batch, self.sizes[HEADS]
        seed = self.whole.seed
        if seed is not None:
            example = place.example + jnp.arange(B, dtype=jnp.int32)
            head = place.key_head * self.group + jnp.arange(N, dtype=jnp.int32)
            seed = Draw(
                cast(Array, seed), example[:, None] * whole.N + head[None, :], None, 0, whole.T
            )
        axes = replace(whole, B=B, N=N, K=self.key_heads)
        return replace(rest, allowed=allowed, seed=seed, axes=axes)

    def cotangents(self, leaves: list[Any]) -> Problem:
        """Cotangents of the leaves, as those of the problem."""
        rest, allowed = self.structure.unflatten(_turned(leaves))
        return replace(rest, allowed=allowed)


def _as_bits(array: Array) -> Array:
    """Floating point numbers of 16 bits as integers: XLA updates no slice of bfloat16 in place."""
    is_short = array.dtype.itemsize == 2 and jnp.issubdtype(array.dtype, jnp.floating)
    return lax.bitcast_convert_type(array, jnp.uint16) if is_short else array


def _as_floats(array: Array, dtype: Any) -> Array:
    return lax.bitcast_convert_type(array, dtype) if array.dtype == jnp.uint16 else array


def _turned(leaves: list[Array]) -> list[Array]:
    """The leaves of a problem, of which the first three are its queries, keys and values, from
    [B, N, T, D] to the caller's layout, [B, T, N, D], or back.
    """
    return [*(leaf.swapaxes(1, 2) for leaf in leaves[:3]), *leaves[3:]]
