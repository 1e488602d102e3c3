"""Keys and values prepared once and attended to many times: a decoder's cache, an encoder's states.

A `Memory` stores keys as its score needs them (`Score.prepared`) and goes in the place of `key` in
`attend` and its relatives. front_door.py opens it: here is what it holds, how it grows, and what
masks in positions of the whole text mean for the slots it has.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from regard.memory.slots import known, own, with_heads, write, write_pages, write_ring, zero_padding
from regard.placement import (
    Device,
    compiler_decides,
    device_of,
    explicit_mesh,
    on_device,
    spec_of,
)
from regard.score.contract import Score
from regard.score.dot import Dot
from regard.score.registration import require_score


class Made(NamedTuple):
    """What is static about a memory.

    Attributes:
        rank: of the arrays it was made from, and of the queries it takes.
        key_heads, key_width, key_dtype: of the keys before they were prepared.
        device: for which keys are prepared: what is best to store depends on it.
        window: how many of the last tokens are kept, for a ring buffer; None keeps all.
        whole: every slot is known at trace time to hold a key, so that no length is masked.
    """

    rank: int
    key_heads: int
    key_width: int
    key_dtype: Any
    device: Device
    window: int | None = None
    whole: bool = False


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Memory:
    """Keys and values prepared once for a score, in arrays of a fixed shape.

    Made by `Memory.of(key, value)` from keys that are there already, by `Memory.empty` to be
    filled by `append`, by `Memory.paged` over the pages of a shared pool, or by a module's
    `init_cache` and `remember`. `attend(query, memory)` equals `attend(query, key, value,
    score=...)`, and does not prepare any key again: no projection, no exponential.

    Masks refer to positions in the whole text, whatever slots hold the tokens: a key's position
    counts the tokens of its own example, and of T queries the last one stands at the last key of
    its example, unless `query_positions=` says otherwise; bands with align="start" then put the
    first query at position 0, as in a call without a memory. So `mask=regard.Mask.causal()` means
    the same for one token, for a chunk, and for the full pass. Keys that were never written are
    never seen. Boolean masks, biases and the key side of segments span the slots; with a window,
    masks and segments are indexed by position.

    A chunk that does not fit raises ValueError wherever the lengths are known. Under jit and scan
    they are traced and nothing can be raised: there the tokens past the end are not written, no
    token that was written is lost, the outputs of the queries that would need the others are NaN,
    and `overflowed()` is true for their example.

    A memory is a pytree, so it works in jit, scan, vmap and grad, and `append` is in place where
    it is donated. It holds its own copy of the score's parameters: donating it deletes no array
    of the model. Gradients flow through a memory that is made inside of the function.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> key = jnp.array([[[1.0, 0.0], [0.0, 1.0]]])  # [B, S, D]
        >>> memory = regard.Memory.of(key, 10 * key, max_len=4)
        >>> memory = memory.append(key[:, :1], key[:, :1])
        >>> memory.length.tolist()
        [3]
        >>> regard.weights(99 * key[:, :1], memory, mask=regard.Mask.causal()).round(1).tolist()
        [[[0.5, 0.0, 0.5, 0.0]]]

    Attributes:
        key: (B, S, K, F), as the score stores them; (pages, page, K, F) where it is paged.
        value: (B, S, K, V), or (pages, page, K, V).
        length: int32 (B,): how many tokens have been appended to each example.
        score: that the keys were prepared for; None stores them as they are, for any score.
        table: int32 (B, P), the pages of each example, in order; None where it is not paged.
        made: what is static.
    """

    key: Array
    value: Array
    length: Array
    score: Score | None
    table: Array | None
    made: Made = field(metadata=dict(static=True))

    # Making one -------------------------------------------------------------------------------

    @classmethod
    def of(
        cls,
        key: Array,
        value: Array,
        *,
        score: Score | None = Dot(),
        valid_lens: Array | None = None,
        max_len: int | None = None,
        window: int | None = None,
    ) -> "Memory":
        """A memory of keys and values that are there already.

        Args:
            key: (S, Hk), (B, S, Hk) or (B, S, K, Hk).
            value: (S, V), (B, S, V) or (B, S, K, V).
            score: that will be attended with, its parameters included; None: any, and nothing
                is prepared.
            valid_lens: integers () or (B,): how many keys of each example there are.
            max_len: slots in all, for `append`; None: S.
            window: keeps the last so many keys only; see `empty`.
        """
        if score is not None:
            require_score(score)
        key, value = jnp.asarray(key), jnp.asarray(value)
        if key.ndim != value.ndim or key.ndim not in (2, 3, 4):
            raise ValueError(
                "key and value must have one rank: (S, D), (B, S, D) or (B, S, K, D). Got key "
                f"{list(key.shape)}, value {list(value.shape)}. Fix: add or drop axes."
            )
        rank, (batched_key, batched_value) = key.ndim, (with_heads(a) for a in (key, value))
        B, S, K, width = batched_key.shape
        slots = S if max_len is None and window is None else max(max_len or 0, window or 0)
        empty = cls.empty(
            B,
            0 if slots == S and window is None else slots,
            key_heads=K,
            key_width=width,
            value_width=value.shape[-1],
            score=score,
            dtype=key.dtype,
            value_dtype=value.dtype,
            window=window,
            rank=rank,
            device=device_of(key, value, score),
        )
        if slots != S or window is not None:
            return empty.append(key, value, valid_lens)
        empty._check(batched_key, batched_value)
        lens = empty.chunk_lens(valid_lens, S)
        whole = valid_lens is None
        if not whole:
            batched_key, batched_value = zero_padding(batched_key, batched_value, lens)
        stored = empty._prepare(batched_key, empty.positions(S))
        made = empty.made._replace(whole=whole)
        return replace(
            empty, key=stored, value=batched_value, length=jnp.asarray(lens, jnp.int32), made=made
        )

    @classmethod
    def empty(
        cls,
        batch: int,
        max_len: int,
        *,
        key_width: int,
        value_width: int,
        key_heads: int | None = None,
        score: Score | None = Dot(),
        window: int | None = None,
        dtype: Any = jnp.float32,
        value_dtype: Any = None,
        rank: int | None = None,
        device: Device | None = None,
    ) -> "Memory":
        """A memory of no tokens yet, with room for max_len in each example.

        Args:
            batch: B.
            max_len: slots for tokens. With a window, T queries at once need window + T - 1.
            key_heads: K, for queries (B, T, N, Hq); None: for queries (B, T, Hq).
            score: as in `of`.
            window: a ring buffer: each query attends to the last `window` keys up to its own
                position at most, and older tokens are overwritten instead of overflowing.
            dtype: of keys and values; a score may store its keys in another.
            rank: 2 for queries (T, Hq) and a batch of 1; None: 4 with key_heads, else 3.
            device: where keys will be prepared; None: JAX's default.
        """
        if score is not None:
            require_score(score)
        if any(isinstance(size, int) and size < 0 for size in (batch, max_len)):
            raise ValueError(f"sizes are not negative. Got batch {batch}, max_len {max_len}.")
        if window is not None and not 0 < window <= max_len:
            raise ValueError(
                "window must be positive and at most max_len, the slots that there are. Got "
                f"window {window}, max_len {max_len}. Fix: max_len={max(window, 1)}, or window + "
                "T - 1 for chunks of T tokens."
            )
        rank = rank or (3 if key_heads is None else 4)
        K, dtype = key_heads or 1, jnp.dtype(dtype)
        made = Made(rank, K, key_width, dtype, device or device_of(score), window)
        memory = cls(
            jnp.zeros((batch, 0, K, key_width), dtype),
            jnp.zeros((batch, max_len, K, value_width), value_dtype or dtype),
            jnp.zeros((batch,), jnp.int32),
            None if score is None else jax.tree.map(own, score),
            None,
            made._replace(device=made.device._replace(varies=False)),
        )
        key = jax.ShapeDtypeStruct((batch, max_len, K, key_width), dtype)
        try:
            stored = jax.eval_shape(memory._prepare, key, memory.positions(max_len))
        except (TypeError, ValueError) as error:
            leaves = jax.tree_util.tree_leaves_with_path(score)
            got = [f"score{jax.tree_util.keystr(at)} {list(jnp.shape(x))}" for at, x in leaves]
            raise ValueError(
                f"the score does not take keys of this width: {error} Got "
                f"{', '.join([f'key width {key_width}', *got])}. Fix: keys of the width that the "
                "score is for."
            ) from error
        return replace(memory, key=jnp.zeros(stored.shape, stored.dtype))

    @classmethod
    def paged(cls, pool: "Memory", table: Array, lens: Array) -> "Memory":
        """A memory over pages of a shared pool, as servers keep them.

        The pool is a memory with a page in the place of each example:
        `Memory.empty(pages, page_len, ...)`, or `Memory.of(key, value)` of keys (pages, page_len,
        K, D). Examples may share pages, such as those of a common prefix. `append` writes into the
        pages of the table: an example's last page must be its own, and copying a shared one before
        it is written is up to the caller. `memory.pool` is the pool after that.

        Example:
            >>> import jax.numpy as jnp, regard
            >>> pool = regard.Memory.empty(8, 2, key_width=3, value_width=1)
            >>> table = jnp.array([[5, 1, -1], [5, 7, 2]])  # both begin with page 5
            >>> memory = regard.Memory.paged(pool, table, lens=jnp.array([2, 2]))
            >>> memory.append(jnp.ones((2, 1, 3)), jnp.ones((2, 1, 1))).length.tolist()
            [3, 3]

        Args:
            table: integers (B, P): the pages of each example in order, -1 for none. Entries
                after the first -1 are not used.
            lens: integers (B,): how many tokens each example has.
        """
        table, lens = jnp.asarray(table), jnp.asarray(lens)
        if pool.table is not None or pool.made.window is not None:
            raise ValueError("a pool of pages is a memory that is neither paged nor a window.")
        if table.ndim != 2 or lens.shape != table.shape[:1]:
            raise ValueError(
                "a paged memory needs a table (B, P) of pages and lens (B,). Got table "
                f"{list(table.shape)}, lens {list(lens.shape)}."
            )
        for name, array in dict(table=table, lens=lens).items():
            if not jnp.issubdtype(array.dtype, jnp.integer):
                raise TypeError(f"{name} must be integers. Got dtype {array.dtype}.")
        made = pool.made._replace(whole=False)
        table, lens = table.astype(jnp.int32), lens.astype(jnp.int32)
        return replace(pool, table=table, length=lens, made=made)

    @property
    def pool(self) -> "Memory":
        """The pages of a paged memory, for `paged` with another table."""
        pages, page_len = self.key.shape[:2]
        full = jnp.full((pages,), page_len, jnp.int32)
        return replace(self, table=None, length=full)

    # What it holds ----------------------------------------------------------------------------

    @property
    def max_len(self) -> int:
        """The number of slots of each example."""
        if self.table is not None:
            return self.table.shape[1] * self.key.shape[1]
        return self.key.shape[1]

    def overflowed(self) -> Array:
        """bool (B,): whether more tokens came than there is room for."""
        if self.made.window is not None:
            return jnp.zeros_like(self.length, bool)
        return self.length > self.room()

    def positions(self, count: int) -> Array:
        """int32 (B, count): the positions of the next tokens of each example."""
        return self.length[:, None] + jnp.arange(count, dtype=jnp.int32)[None]

    def rows(self, which: Array) -> "Memory":
        """The memory of some of the examples, by their numbers (b,): for beams, and for batches
        from which finished examples are taken out."""
        which = jnp.asarray(which)
        length = self.length[which]
        if self.table is not None:
            return replace(self, table=self.table[which], length=length)
        return replace(self, key=self.key[which], value=self.value[which], length=length)

    def room(self) -> Array | int:
        if self.table is None:
            return self.max_len
        exists = (self.table >= 0) & (self.table < self.key.shape[0])
        leading = jnp.cumprod(exists, axis=1, dtype=jnp.int32).sum(1, dtype=jnp.int32)
        return leading * self.key.shape[1]

    # Growing ----------------------------------------------------------------------------------

    def append(self, key: Array, value: Array, lens: Array | None = None) -> "Memory":
        """The memory with one chunk more, written after each example's own end.

        Args:
            key: (T, Hk), (B, T, Hk) or (B, T, K, Hk), as the memory was made.
            value: (T, V), (B, T, V) or (B, T, K, V).
            lens: integers () or (B,): how many tokens of the chunk belong to each example,
                clipped to [0, T]; None: all.

        Raises:
            ValueError: the chunk is of other sizes, or does not fit.
            TypeError: lens are not integers.
        """
        key, value = (with_heads(jnp.asarray(a), self.made.rank) for a in (key, value))
        self._check(key, value)
        count = key.shape[1]
        lens = self.chunk_lens(lens, count)
        self._check_room(key, lens)
        if count == 0:
            return self
        arrays: dict[str, Any] = dict(self=self, key=key, value=value, lens=lens)
        mesh = explicit_mesh(self.key, key, value)
        if mesh is None:
            held = Memory._written(**arrays)
        else:
            lie, rows = spec_of(self.key), spec_of(self.length)
            if self.table is None:  # as the chunk lies, where the slots lie nowhere yet
                batch, _, heads, _ = (a or b for a, b in zip(lie, spec_of(key), strict=True))
                lie, rows = (batch, None, heads), (batch,)
            held = compiler_decides(mesh, Memory._written, arrays, (lie, lie, rows))
        stored, values, length = held
        made = self.made._replace(whole=False)
        return replace(self, key=stored, value=values, length=length, made=made)

    def _written(self, key: Array, value: Array, lens: Array) -> tuple[Array, Array, Array]:
        """Keys, values and lengths with a chunk more."""
        end = self.length + lens
        key, value = zero_padding(key, value, lens)
        key = self._prepare(key.astype(self.made.key_dtype), self.positions(key.shape[1]))
        if self.table is not None:
            into: Callable = functools.partial(write_pages, self.table)
        else:
            into = jax.vmap(write if self.made.window is None else write_ring)
        at = (self.length, jnp.asarray(lens))
        return into(self.key, key, *at), into(self.value, value, *at), end

    def chunk_lens(self, lens: Array | None, count: int) -> Array:
        """int32 (B,): how many of a chunk's `count` tokens belong to each example."""
        batch = self.length.shape[0]
        # NumPy as long as the numbers are known: within jit, JAX would turn them into tracers.
        symbolic = not (isinstance(count, int) and isinstance(batch, int))  # by jax.export
        found: Any = jnp if isinstance(lens, jax.core.Tracer) or symbolic else np
        lens = found.asarray(count if lens is None else lens)
        if not jnp.issubdtype(lens.dtype, jnp.integer):
            raise TypeError(
                "lengths must be integers: how many tokens of the chunk belong to each example. "
                f"Got dtype {lens.dtype}, shape {list(lens.shape)}. Fix: valid_lens.astype(int)."
            )
        if lens.shape not in ((), (batch,)):
            raise ValueError(
                "lens of a memory (valid_lens, of a call with cache=) say how many tokens of the "
                f"chunk belong to each example: () or (B,). Got valid_lens {list(lens.shape)}, "
                f"memory.length {list(self.length.shape)}. Fix: mask=regard.Mask.lengths(lens) for "
                "lengths per query, in positions of the whole text."
            )
        largest = jnp.iinfo(lens.dtype).max  # clipped in its own dtype: int64 would wrap
        most = min(count, largest) if isinstance(count, int) else count
        clipped = found.clip(lens, found.asarray(0, lens.dtype), found.asarray(most, lens.dtype))
        return found.broadcast_to(clipped.astype(jnp.int32), (batch,))

    def _prepare(self, key: Array, positions: Array) -> Array:
        """[B, T, K, Hk] -> what the score stores of it, [B, T, K', F]."""
        if self.score is None:
            return key
        with on_device(self.made.device):
            prepared = self.score.prepared(key.swapaxes(1, 2), positions[:, None])[1]
        return prepared.swapaxes(1, 2)

    def prepared_score(self) -> Score | None:
        """The score of raw queries and stored keys, which depends on no key."""
        if self.score is None:
            return None
        made = self.made
        no_key = jnp.zeros((1, made.key_heads, 0, made.key_width), made.key_dtype)
        with on_device(made.device):
            return self.score.prepared(no_key, jnp.zeros((1, 1, 0), jnp.int32))[0]

    def _check(self, key: Array, value: Array) -> None:
        made, batch, length = self.made, self.length.shape[0], key.shape[1]
        given = [list(key.shape), list(value.shape)]
        widths = made.key_width, self.value.shape[3]
        if given != [[batch, length, made.key_heads, width] for width in widths]:
            wanted = [[batch, "T", made.key_heads, width] for width in widths]
            axes = {2: (1, 3), 3: (0, 1, 3), 4: (0, 1, 2, 3)}[made.rank]  # the caller's
            every: list[Any] = [*given, *wanted]
            shapes = [[shape[axis] for axis in axes] for shape in every]
            got, value_got, wanted_key, wanted_value = (str(one).replace("'", "") for one in shapes)
            raise ValueError(
                "key and value must be of one length, and of the batch size, head count and widths "
                f"that the memory was made with. Got key {got}, value {value_got}, wanted key "
                f"{wanted_key}, value {wanted_value}. Fix: these sizes, or a memory made with "
                "others."
            )

    def _check_room(self, key: Array, lens: Array) -> None:
        """Raises if the chunk does not fit, as far as that is known."""
        known_length, known_lens, room = known(self.length), known(lens), known(self.room())
        if known_lens is None or room is None or self.made.window is not None:
            return
        length = np.zeros_like(known_lens) if known_length is None else known_length
        over = length + known_lens - room
        if over.max(initial=0) > 0:
            example = int(over.argmax())
            slots = int(np.broadcast_to(room, over.shape)[example])
            held_now = "" if known_length is None else f"{length[example]} tokens are in it, and "
            fix = "more pages in its row of the table" if self.table is not None else "a larger"
            fix += "" if self.table is not None else f" max_len, at least {slots + over[example]}"
            raise ValueError(
                f"the memory would overflow: it has room for {slots} tokens, {held_now}"
                f"{known_lens[example]} more were given (example {example}). Got key "
                f"{list(key.shape)}. Fix: {fix}; or window=, to keep the last tokens only."
            )
