"""Sentence pairs to batches of a few fixed shapes, in an order that can be continued.

Own code rather than Grain: everything is in memory, an epoch's order is one permutation, and the
whole state is three numbers, so that reading in other processes, Grain's purpose, has no use.
`tokenizer.py` makes the token ids.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jax import Array

from regard.seq2seq.text.vocabulary import BOS, EOS, PAD

BUCKETS = (8, 12, 16, 24, 32, 48, 64, 96)
ROWS = 8  # rows of a batch are a multiple of this, to divide among 2, 4 or 8 devices

Ids = Sequence[int]
Pairs = Iterable[tuple[Ids, Ids]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Sentence pairs of similar length, padded to one shape.

    The decoder reads `target_in`, which begins with <bos>, and at each step should write the
    token of `target_out`, which ends with <eos>. The source ends with <eos> too, so that even an
    empty sentence has a token to attend to. A row of padding has lengths 0.

    Example:
        >>> from regard.seq2seq.train.batches import Batch
        >>> batch = Batch.of([([7, 8, 9], [5, 6])], rows=2, width=5)
        >>> batch.source.tolist(), batch.source_lens.tolist()
        ([[7, 8, 9, 3, 0], [0, 0, 0, 0, 0]], [4, 0])
        >>> batch.target_in[0].tolist(), batch.target_out[0].tolist(), batch.target_lens.tolist()
        ([2, 5, 6, 0, 0], [5, 6, 3, 0, 0], [3, 0])

    Attributes:
        source: int32 (B, S).
        source_lens: int32 (B,): the number of tokens in each row.
        target_in: int32 (B, T).
        target_out: int32 (B, T).
        target_lens: int32 (B,).
    """

    source: np.ndarray | Array
    source_lens: np.ndarray | Array
    target_in: np.ndarray | Array
    target_out: np.ndarray | Array
    target_lens: np.ndarray | Array

    @classmethod
    def of(
        cls,
        examples: Sequence[tuple[Ids, Ids]],
        *,
        rows: int | None = None,
        width: int | None = None,
    ) -> "Batch":
        """One batch of pairs of ids without <bos> and <eos>.

        Args:
            examples: (source ids, target ids) for each row.
            rows: the number of rows, at least that of examples; None: the same.
            width: the length that both sides are padded to; None: each side's longest.

        Raises:
            ValueError: the examples do not fit.
        """
        sources = [source for source, _ in examples]
        targets = [target for _, target in examples]
        rows = len(examples) if rows is None else rows
        source, source_lens = _ended(sources, rows, width)
        target, target_lens = _ended(targets, rows, width)
        return cls(source, source_lens, _started(target, target_lens), target, target_lens)


class TrainingData(Protocol):
    """What is trained on: `Batches`, or anything like it.

    Each iteration gives what remains of the epoch, and the one after it the next epoch.
    """

    def __iter__(self) -> Iterator[Any]: ...

    def state(self) -> dict[str, Any]:
        """The position of the iteration, as JSON values."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from there."""
        ...


class Batches:
    """Batches of token pairs by length and token count, in an order that can be continued.

    A pair goes to the first bucket that both its sides fit into, <eos> included. Every batch of a
    bucket of width W is W wide on both sides and has `tokens // W` rows, rounded down to a
    multiple of 8; the last batch of a bucket is filled up with empty rows. So there are only as
    many shapes to compile as buckets in use.

    Each iteration gives what remains of the epoch; the next iteration is the next epoch, in
    another order. After `restore(state())`, even in another process, exactly those batches follow
    that would have followed.

    Example:
        >>> from regard.seq2seq.train.batches import Batches
        >>> pairs = [([5] * n, [6] * n) for n in (3, 5, 9, 30)] * 20
        >>> batches = Batches(pairs, tokens=128, seed=1)
        >>> batches.shapes, len(batches)
        ([(16, 8), (8, 12), (8, 32)], 9)
        >>> order = iter(batches)
        >>> batch = next(order)
        >>> saved = batches.state()
        >>> saved["epoch"], saved["position"]
        (0, 1)
        >>> again = Batches(pairs, tokens=128, seed=1)
        >>> again.restore(saved)
        >>> all((a.source == b.source).all() for a, b in zip(order, again, strict=True))
        True

    Args:
        pairs: (source ids, target ids) without <bos> and <eos>; or a function from the epoch,
            counted from 0, to such pairs, where the same text has other ids in each epoch
            (subword_dropout.py). For the same epoch it must return the same ids.
        tokens: the target positions of a batch, padding included; a bucket wider than
            `tokens / 8` still has 8 rows.
        buckets: the widths.
        seed: of the order.
        shuffle: a new order for each epoch; False: always the same, shortest first.
        rows: the rows of a batch are a multiple of this.
        process: the index of this process, which gets its shard of the rows of every batch.
        processes: the number of processes; together their shards are the batch.

    Attributes:
        shapes: (rows, width) of the buckets in use, or of all if epochs differ; the rows are this
            process's.
        too_long: the positions of the pairs that fit no bucket and are left out, in the latest
            epoch.
        epoch: completed epochs.
        position: batches given in this epoch.

    Raises:
        ValueError: no pairs are left, the rows do not divide among the processes, or an argument
            is out of range.
    """

    def __init__(
        self,
        pairs: Pairs | Callable[[int], Pairs],
        *,
        tokens: int = 4096,
        buckets: Sequence[int] = BUCKETS,
        seed: int = 0,
        shuffle: bool = True,
        rows: int = ROWS,
        process: int = 0,
        processes: int = 1,
    ) -> None:
        _check(tokens, buckets, rows, process, processes)
        self.seed, self.shuffle = seed, shuffle
        self.process, self.processes = process, processes
        self.epoch = self.position = 0
        widths = sorted(buckets)
        self._rows = {width: max(tokens // width // rows, 1) * rows for width in widths}
        self._pairs_of = pairs if callable(pairs) else None
        self._filled = 0  # the epoch that the buckets hold
        self._fill(pairs(0) if callable(pairs) else pairs)
        if self._pairs_of is None:
            widths = [bucket.width for bucket in self._buckets]
        self.shapes = [(self._rows[width] // processes, width) for width in widths]
        self._checksum = self._checked()

    def _fill(self, pairs: Pairs) -> None:
        members: dict[int, list[tuple[int, Ids, Ids]]] = {width: [] for width in self._rows}
        self.too_long: list[int] = []
        for index, (source, target) in enumerate(pairs):
            need = max(len(source), len(target)) + 1
            width = next((width for width in members if need <= width), None)
            if width is None:
                self.too_long.append(index)
            else:
                members[width].append((index, source, target))
        self._buckets = [_Bucket.of(width, found) for width, found in members.items() if found]
        if not self._buckets:
            raise ValueError(
                "at least one pair must fit into the longest bucket, which has "
                f"{max(self._rows)} tokens. Got {len(self.too_long)} longer. "
                "Fix: shorter sentences, or wider buckets."
            )

    def _of_epoch(self) -> list["_Bucket"]:
        """The buckets of the current epoch."""
        if self._pairs_of is not None and self._filled != self.epoch:
            self._fill(self._pairs_of(self.epoch))
            self._filled = self.epoch
        return self._buckets

    def __len__(self) -> int:
        """The number of batches in the epoch; where epochs differ, the next may have a few more."""
        buckets = self._of_epoch()
        return sum(math.ceil(len(bucket.index) / self._rows[bucket.width]) for bucket in buckets)

    @property
    def target_tokens(self) -> int:
        """The number of tokens in the epoch's targets, <eos> included."""
        return sum(int(bucket.target_lens.sum()) for bucket in self._of_epoch())

    def __iter__(self) -> Iterator[Batch]:
        for _, batch in self.with_indices():
            yield batch

    def with_indices(self) -> Iterator[tuple[np.ndarray, Batch]]:
        """Like iterating, with each row's position among the pairs; -1 for rows of padding."""
        plan = self._plan()
        for bucket, members in plan[self.position :]:
            # Counted before the yield: the state seen with a batch is the one after it.
            self.position += 1
            if self.position == len(plan):
                self.epoch, self.position = self.epoch + 1, 0
            yield bucket.index_of(members), bucket.batch(members)

    def state(self) -> dict[str, Any]:
        """The position of the iteration, as JSON values."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "shapes": [[rows * self.processes, width] for rows, width in self.shapes],
            "data": self._checksum,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from a state; start a new iteration after it.

        Raises:
            ValueError: the state is of other pairs, or of other batches.
        """
        mine = self.state()
        for name in ("seed", "shuffle", "shapes", "data"):
            if state.get(name) != mine[name]:
                raise ValueError(
                    "a state can be restored only with the pairs and settings that it was saved "
                    f"with. Got {name} {state.get(name)}, here it is {mine[name]}. Fix: the "
                    "corpus, tokenizer, subword dropout, tokens, buckets and seed of the run."
                )
        before, self.epoch = self.epoch, int(state["epoch"])
        count = len(self)
        if not 0 <= state["position"] < count:
            self.epoch = before
            raise ValueError(f"an epoch has {count} batches. Got position {state['position']}.")
        self.position = int(state["position"])

    def _checked(self) -> int:
        """A checksum of the first epoch, by which another corpus or tokenizer is noticed."""
        checksum = 0
        for bucket in self._buckets:
            for array in (bucket.index, bucket.source, bucket.target):
                checksum = zlib.crc32(array.tobytes(), checksum)
        return checksum

    def _plan(self) -> list[tuple["_Bucket", np.ndarray]]:
        """The epoch's batches: a bucket, and this process's rows of it, -1 for padding."""
        rng = np.random.default_rng([self.seed, self.epoch])
        plan = []
        for bucket in self._of_epoch():
            rows = self._rows[bucket.width]
            order = np.arange(len(bucket.index))
            if self.shuffle:
                order = rng.permutation(order)
            order = np.pad(order, (0, -len(order) % rows), constant_values=-1)
            of_process = order.reshape(-1, self.processes, rows // self.processes)
            plan += [(bucket, members) for members in of_process[:, self.process]]
        if self.shuffle:
            plan = [plan[i] for i in rng.permutation(len(plan))]
        return plan


@dataclass(frozen=True)
class _Bucket:
    """The pairs of one width, as arrays with one row of padding at the end, at index -1."""

    width: int
    index: np.ndarray  # int64 (n,)
    source: np.ndarray  # int32 (n + 1, width)
    source_lens: np.ndarray  # int32 (n + 1,)
    target: np.ndarray
    target_lens: np.ndarray

    @classmethod
    def of(cls, width: int, members: list[tuple[int, Ids, Ids]]) -> "_Bucket":
        rows = len(members) + 1
        index = np.array([index for index, _, _ in members], np.int64)
        source = _ended([source for _, source, _ in members], rows, width)
        target = _ended([target for _, _, target in members], rows, width)
        return cls(width, index, *source, *target)

    def index_of(self, members: np.ndarray) -> np.ndarray:
        return np.where(members < 0, -1, self.index[members])

    def batch(self, members: np.ndarray) -> Batch:
        target, target_lens = self.target[members], self.target_lens[members]
        return Batch(
            self.source[members],
            self.source_lens[members],
            _started(target, target_lens),
            target,
            target_lens,
        )


def _ended(lines: Sequence[Ids], rows: int, width: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Lines with <eos>, padded to (rows, width), and their lengths; other rows are empty."""
    longest = max((len(line) + 1 for line in lines), default=1)
    width = longest if width is None else width
    if len(lines) > rows or longest > width:
        raise ValueError(
            "a batch must be large enough for every line and its <eos>. Got "
            f"{len(lines)} lines of up to {longest} tokens for shape [{rows}, {width}]."
        )
    ids = np.full((rows, width), PAD, np.int32)
    lens = np.zeros(rows, np.int32)
    for row, line in enumerate(lines):
        ids[row, : len(line)] = line
        ids[row, len(line)] = EOS
        lens[row] = len(line) + 1
    return ids, lens


def _started(target: np.ndarray, lens: np.ndarray) -> np.ndarray:
    """Lines that end with <eos> as lines that begin with <bos>, of the same lengths."""
    shifted = np.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=BOS)
    return np.where(np.arange(target.shape[1]) < lens[:, None], shifted, np.int32(PAD))


def _check(tokens: int, buckets: Sequence[int], rows: int, process: int, processes: int) -> None:
    if not buckets or min(buckets) < 2 or len(set(buckets)) != len(buckets):
        raise ValueError(
            f"buckets must be different widths, each at least 2 tokens. Got {list(buckets)}."
        )
    if tokens < 1 or rows < 1:
        raise ValueError(f"tokens and rows must be positive. Got tokens={tokens}, rows={rows}.")
    if not 0 <= process < processes:
        raise ValueError(
            f"process must be below processes. Got process={process}, processes={processes}."
        )
    if rows % processes:
        raise ValueError(
            f"the rows of a batch must divide among the processes. Got rows={rows}, "
            f"processes={processes}. Fix: rows={math.lcm(rows, processes)}."
        )
