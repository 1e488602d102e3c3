"""How a ring shards a sequence: which device has which rows, and how it cuts its shard.

Inside the ring a device holds one chunk of rows, or two under causal order ("zigzag"): one from the
front of the sequence and its mirror image from the back.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from regard.mask import Allowed
from regard.pool.sequence_axis import SequenceAxis
from regard.shapes import Axes

ROWS = 2  # the axis of queries and keys in [B, N, T, ...]
PARTS = 16  # of a device's queries and keys: a sixteenth of its keys is in transit
LEAST = {"cpu": 256, "gpu": 2048}  # rows of a part; shorter ones would not fill a device


@dataclass(frozen=True)
class Shards:
    """Which device has which part of the sequence, and how it cuts its part.

    Attributes:
        over: the ring.
        chunks: how many pieces of the sequence each device has, 1 or 2.
        rows, keys: of one chunk; the last ones may be padding.
        row_blocks: blocks of a device's queries, pooled one after the other.
        key_pieces: pieces of a device's keys, which travel one by one, so that a device holds one
            piece in addition to its shard, and not a second shard.
    """

    over: SequenceAxis
    chunks: int
    rows: int
    keys: int
    row_blocks: int
    key_pieces: int

    @classmethod
    def of(cls, axes: Axes, over: SequenceAxis, chunks: int, platform: str) -> "Shards":
        def cut(length: int) -> tuple[int, int]:
            """The length of a chunk, and in how many equal parts it is cut."""
            shards = over.size * chunks
            parts = max(1, min(PARTS // chunks, length // shards // least))
            while over.inside and length // shards % parts:
                parts -= 1
            return -(-length // (shards * parts)) * parts, parts

        least = LEAST.get(platform, LEAST["gpu"])
        (rows, row_blocks), (keys, key_pieces) = cut(axes.T), cut(axes.S)
        return cls(over, chunks, rows, keys, chunks * row_blocks, chunks * key_pieces)

    @property
    def all_rows(self) -> int:
        return self.over.size * self.chunks * self.rows

    @property
    def all_keys(self) -> int:
        return self.over.size * self.chunks * self.keys

    @property
    def block_rows(self) -> int:
        return self.chunks * self.rows // self.row_blocks

    @property
    def piece_keys(self) -> int:
        return self.chunks * self.keys // self.key_pieces

    def local_axes(self, axes: Axes) -> Axes:
        """One block of a device's queries, and one piece of keys."""
        return replace(axes, T=self.block_rows, S=self.piece_keys)

    def ranges(self, allowed: Allowed, axes: Axes) -> Allowed:
        """A mask as ranges and segments; padding is past every end."""
        end = jnp.full((1, 1, 1), axes.S, jnp.int32) if allowed.end is None else allowed.end
        return Allowed(allowed.start, end, allowed.segment_ids, ())

    def queries(self) -> Array:
        """Inside the ring: the index in the whole of each of this device's queries."""
        me, own = lax.axis_index(self.over.axis), jnp.arange(self.rows, dtype=jnp.int32)
        return jnp.concatenate([self._chunk(me, c) * self.rows + own for c in range(self.chunks)])

    def first_key(self, step: Array, piece: Array) -> Array:
        """Inside the ring: the index in the whole of the first key of a piece that is here now."""
        owner = (lax.axis_index(self.over.axis) - step) % self.over.size
        in_chunk = self.key_pieces // self.chunks
        chunk = self._chunk(owner, piece // in_chunk)
        return jnp.asarray(chunk * self.keys + piece % in_chunk * self.piece_keys, jnp.int32)

    def _chunk(self, device: Array, chunk: Array | int) -> Array:
        """The number of a device's chunk along the sequence: the second one is a mirror image."""
        return jnp.where(jnp.asarray(chunk) == 0, device, 2 * self.over.size - 1 - device)

    def block(self, tree: Any, index: Array) -> Any:
        """One block of rows of each leaf; an axis of 1 that broadcasts is left alone."""
        size = self.block_rows

        def take(array: Array) -> Array:
            if array.shape[ROWS] == 1 or self.row_blocks == 1:
                return array
            return lax.dynamic_slice_in_dim(array, index * size, size, ROWS)

        return jax.tree.map(take, tree)

    def with_block(self, tree: Any, block: Any, index: Array) -> Any:
        """The tree with one block of rows replaced; in place inside a loop."""
        at = index * self.block_rows
        return jax.tree.map(
            lambda a, new: lax.dynamic_update_slice_in_dim(a, new.astype(a.dtype), at, ROWS),
            tree,
            block,
        )

    def cut(self, tree: Any) -> Any:
        """[B, K, keys of a device, ...] -> [pieces, B, K, keys of a piece, ...]."""

        def apart(a: Array) -> Array:
            pieces = a.reshape(*a.shape[:ROWS], self.key_pieces, -1, *a.shape[ROWS + 1 :])
            return jnp.moveaxis(pieces, ROWS, 0)

        return jax.tree.map(apart, tree)

    def join(self, tree: Any) -> Any:
        """The inverse of `cut`."""

        def together(a: Array) -> Array:
            return jnp.moveaxis(a, 0, ROWS).reshape(*a.shape[1 : ROWS + 1], -1, *a.shape[4:])

        return jax.tree.map(together, tree)

    def spread(self, tree: Any) -> Any:
        """Inside the ring: from neighboring rows to the two pieces of the zigzag."""
        return self._exchange(tree, back=False)

    def gather(self, tree: Any) -> Any:
        """The inverse of `spread`."""
        return self._exchange(tree, back=True)

    def _exchange(self, tree: Any, back: bool) -> Any:
        """Each device has the pieces 2i and 2i+1; piece p belongs to device p or its mirror."""
        if self.chunks == 1:
            return tree
        size = self.over.size
        home = [p if p < size else 2 * size - 1 - p for p in range(2 * size)]
        me = lax.axis_index(self.over.axis)
        # A device gets one even and one odd piece; the front one is the even one on even devices.
        gets_even_front = me % 2 == 0

        def exchange(array: Array) -> Array:
            if array.shape[ROWS] == 1:
                return array
            first, second = jnp.split(array, 2, ROWS)
            if back:  # what is held: front, back; sent home by parity
                even = jnp.where(gets_even_front, first, second)
                odd = jnp.where(gets_even_front, second, first)
                pairs = [[(home[2 * i + odd_], i) for i in range(size)] for odd_ in (0, 1)]
            else:
                even, odd = first, second
                pairs = [[(i, home[2 * i + odd_]) for i in range(size)] for odd_ in (0, 1)]
            even = lax.ppermute(even, self.over.axis, pairs[0])
            odd = lax.ppermute(odd, self.over.axis, pairs[1])
            if back:
                return jnp.concatenate([even, odd], ROWS)
            front = jnp.where(gets_even_front, even, odd)
            rear = jnp.where(gets_even_front, odd, even)
            return jnp.concatenate([front, rear], ROWS)

        return jax.tree.map(exchange, tree)
