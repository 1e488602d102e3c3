"""Batches: every pair once an epoch, few shapes, and an order that can be taken up again."""

import json
from collections import Counter

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.seq2seq.train.batches import BUCKETS, Batch, Batches

LENGTHS = st.tuples(st.integers(0, 40), st.integers(0, 40))


def pairs_of(lengths):
    """Pairs whose tokens say which pair they are of, and which side."""
    return [
        ([10 + 2 * i] * source, [11 + 2 * i] * target) for i, (source, target) in enumerate(lengths)
    ]


def fields(batch):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(batch)]


def assert_same(first, second):
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        for x, y in zip(fields(a), fields(b), strict=True):
            np.testing.assert_array_equal(x, y)


@given(st.lists(LENGTHS, min_size=1, max_size=60), st.integers(1, 400), st.booleans())
def test_an_epoch_has_every_pair_once(lengths, tokens, shuffle):
    pairs = pairs_of(lengths)
    batches = Batches(pairs, tokens=tokens, buckets=(4, 8, 16, 32, 64), shuffle=shuffle)
    seen = Counter()
    count = 0
    for indices, batch in batches.with_indices():
        count += 1
        assert batch.source.shape == batch.target_in.shape == batch.target_out.shape
        assert batch.source.shape in batches.shapes
        rows, width = batch.source.shape
        assert rows % 8 == 0
        assert rows * width <= max(tokens, 8 * width)
        for row, index in enumerate(indices):
            check_row(batch, row, pairs[index] if index >= 0 else None)
            if index >= 0:
                seen[int(index)] += 1
    assert count == len(batches)
    assert seen == Counter(range(len(pairs)))
    assert batches.too_long == []


def check_row(batch, row, pair):
    source_len, target_len = int(batch.source_lens[row]), int(batch.target_lens[row])
    assert not batch.source[row, source_len:].any()
    assert not batch.target_in[row, target_len:].any()
    assert not batch.target_out[row, target_len:].any()
    if pair is None:
        assert source_len == target_len == 0
        return
    source, target = pair
    assert batch.source[row, :source_len].tolist() == [*source, 3]
    assert batch.target_in[row, :target_len].tolist() == [2, *target]
    assert batch.target_out[row, :target_len].tolist() == [*target, 3]


@given(st.integers(0, 60), st.integers(0, 2**31))
def test_a_restored_state_goes_on_with_the_same_batches(stop, seed):
    """Killed anywhere, in the middle of any epoch: the state has been through JSON meanwhile."""
    pairs = pairs_of([(n % 30, (7 * n) % 30) for n in range(150)])
    whole = Batches(pairs, tokens=256, seed=seed)
    epochs = 3
    expected = [batch for _ in range(epochs) for batch in whole]
    assert len(expected) == epochs * len(whole)
    stop = stop % len(expected)

    killed = Batches(pairs, tokens=256, seed=seed)
    before = []
    while len(before) < stop:
        for batch in killed:
            before.append(batch)
            if len(before) == stop:
                break
    state = json.loads(json.dumps(killed.state()))
    again = Batches(pairs, tokens=256, seed=seed)
    again.restore(state)
    after = []
    while again.epoch < epochs:
        after += list(again)
    assert_same(before + after, expected)


def test_epochs_differ_and_seeds_differ():
    pairs = pairs_of([(5, 5)] * 64)
    batches = Batches(pairs, tokens=64)
    orders = [np.concatenate([i for i, _ in batches.with_indices()]).tolist() for _ in range(2)]
    other = Batches(pairs, tokens=64, seed=1)
    orders.append(np.concatenate([i for i, _ in other.with_indices()]).tolist())
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(64)) for order in orders)


def test_without_shuffling_the_order_is_that_of_the_pairs():
    batches = Batches(pairs_of([(3, 3)] * 20 + [(10, 10)] * 5), tokens=64, shuffle=False)
    for _ in range(2):
        order = [i for indices, _ in batches.with_indices() for i in indices.tolist() if i >= 0]
        assert order == list(range(25))


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_the_shards_of_all_processes_are_the_batch(processes):
    pairs = pairs_of([(n % 20, n % 17) for n in range(100)])
    whole = list(Batches(pairs, tokens=512))
    shares = [
        list(Batches(pairs, tokens=512, process=i, processes=processes)) for i in range(processes)
    ]
    together = [
        jax.tree.map(lambda *parts: np.concatenate(parts), *parts)
        for parts in zip(*shares, strict=True)
    ]
    assert_same(together, whole)


def test_what_is_too_long_is_said():
    batches = Batches(pairs_of([(3, 3), (95, 3), (96, 3), (3, 200)]), tokens=64)
    assert batches.too_long == [2, 3]
    assert max(width for _, width in batches.shapes) == max(BUCKETS)


def test_few_shapes_for_many_lengths():
    lengths = [(a, b) for a in range(0, 95, 3) for b in range(0, 95, 5)]
    batches = Batches(pairs_of(lengths), tokens=1024)
    shapes = {batch.source.shape for batch in batches}
    assert shapes == set(batches.shapes)
    assert len(shapes) <= len(BUCKETS)


def test_a_batch_is_a_pytree():
    batch = Batch.of([([4, 5], [6])])
    doubled = jax.tree.map(lambda leaf: 2 * leaf, batch)
    assert isinstance(doubled, Batch)
    assert doubled.source_lens.tolist() == [6]
    assert all(leaf.dtype == np.int32 for leaf in fields(batch))
    total = jax.jit(lambda given: given.source.sum() + given.target_lens.sum())(batch)
    assert int(total) == 4 + 5 + 3 + 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(buckets=()), "buckets must be different widths, each at least 2"),
        (dict(buckets=(8, 8)), "buckets must be different widths, each at least 2"),
        (dict(tokens=0), "tokens and rows must be positive. Got tokens=0, rows=8."),
        (dict(process=2, processes=2), "process must be below processes"),
        (dict(processes=3), "rows=8, processes=3. Fix: rows=24."),
        (dict(buckets=(2, 3)), r"the longest bucket, which has 3 tokens\. Got 1 longer"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        Batches(pairs_of([(4, 4)]), **options)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (dict(seed=1), "seed"),
        (dict(tokens=128), "shapes"),
        (dict(shuffle=False), "shuffle"),
        (dict(pairs=pairs_of([(3, 3)] * 19 + [(3, 4)])), "data"),
    ],
)
def test_a_state_of_something_else_is_refused(other, named):
    options = dict(pairs=pairs_of([(3, 3)] * 20), tokens=64)
    state = Batches(**options).state()
    with pytest.raises(ValueError, match=f"only with the pairs and settings .* Got {named}"):
        Batches(**{**options, **other}).restore(state)


def test_a_state_outside_the_epoch_is_refused():
    batches = Batches(pairs_of([(3, 3)]))
    with pytest.raises(ValueError, match=r"an epoch has 1 batches\. Got position 1"):
        batches.restore({**batches.state(), "position": 1})


def test_a_batch_too_small_is_refused():
    with pytest.raises(ValueError, match=r"Got 1 lines of up to 4 tokens for shape \[1, 3\]"):
        Batch.of([([4, 5, 6], [7])], width=3)
