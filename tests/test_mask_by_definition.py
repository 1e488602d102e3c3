"""Masks by their definition, asked directly: who may look at whom, without any attention.

Every kind of mask and many of their combinations on a few shapes; the pairs, the keys that are
seen, the queries that see, and what is known of a mask before any data are all held to the
oracle's loop over pairs.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import oracle
import regard
from problem import as_arguments
from regard.mask import Band, MaskFacts, resolve
from regard.shapes import Axes

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.sampled(2)]

SHAPES = {
    "more keys": (2, 2, 4, 7),
    "more queries": (2, 2, 7, 4),
    "square": (1, 1, 5, 5),
    "one query": (2, 1, 1, 6),
    "one key": (2, 1, 6, 1),
}


def axes_of(shape):
    B, N, T, S = shape
    return Axes(rank=4, B=B, T=T, S=S, N=N, K=N, query_width=1, key_width=1, V=1)


def kinds(shape, rng):
    """name -> a mask as the oracle takes it, drawn for a shape."""
    B, N, T, S = shape

    def ids(*sizes):
        return np.sort(rng.integers(0, 3, sizes), axis=-1).astype(np.int32)

    found = {
        "one length": {"valid_lens": np.int32(S // 2)},
        "per example": {"valid_lens": rng.integers(0, S + 1, B).astype(np.int32)},
        "per query": {"valid_lens": rng.integers(-1, S + 2, (B, T)).astype(np.int64)},
        "per head": {"valid_lens": rng.integers(0, S + 1, (B, N, T)).astype(np.uint8)},
        "segments": {"segments": (ids(B, T), ids(B, S))},
        "shared segments": {"segments": (ids(T), ids(S) + 1)},
        "boolean": {"boolean": rng.random((B, N, T, S)) < 0.4},
        "one row": {"boolean": rng.random((1, S)) < 0.5},
        "one column": {"boolean": rng.random((B, 1, T, 1)) < 0.5},
    }
    for align in ("end", "start"):
        found[f"causal, {align}"] = {"causal": align}
        for left, right in [(1, 2), (2, None), (-1, 1), (1, -2), (S + T, -1)]:
            found[f"window {left} {right}, {align}"] = {"window": (left, right, align)}
    return found


def as_mask(facts):
    return as_arguments({**facts, "as_mask": "valid_lens" in facts})["mask"]


def check(facts, shape):
    """All that a mask says of itself is what the loop over pairs says."""
    axes, may = axes_of(shape), oracle.allowed(shape, **facts)
    allowed = resolve(as_mask(facts), None, axes)
    said = [
        (allowed.dense(axes), may),
        (allowed.visible_keys(axes), may.any(2)),
        (allowed.non_empty_rows(axes), may.any(3)),
    ]
    for got, expected in said:
        got = True if got is None else np.asarray(got)
        np.testing.assert_array_equal(np.broadcast_to(got, expected.shape), expected, str(facts))
    for bound in (allowed.start, allowed.end):  # kernels count on it
        assert bound is None or (int(bound.min()) >= 0 and int(bound.max()) <= axes.S)
    assert allowed.everything() == (allowed.dense(axes) is None)
    known = allowed.as_lengths_and_band()
    more = "segments" in facts or "boolean" in facts or allowed.facts.lens == "per query"
    assert (known is None) == more
    if known is not None:
        again = {} if known.lens is None else {"valid_lens": np.asarray(known.lens)}
        left, right, align = known.band
        again["window"] = (left, right, align)
        if known.lens is not None and np.shape(known.lens) == (1,):
            again["valid_lens"] = np.asarray(known.lens)[0]
        np.testing.assert_array_equal(oracle.allowed(shape, **again), may)
    return allowed


@pytest.mark.parametrize("name", SHAPES)
def test_every_kind_alone(name):
    shape = SHAPES[name]
    for facts in kinds(shape, np.random.default_rng(1)).values():
        check(facts, shape)


@pytest.mark.parametrize("name", ["more keys", "more queries"])
def test_two_kinds_together(name):
    shape = SHAPES[name]
    drawn = kinds(shape, np.random.default_rng(2))
    pairs = [
        (one, other)
        for one, other in itertools.combinations(drawn, 2)
        if not drawn[one].keys() & drawn[other].keys()
    ]
    chosen = np.random.default_rng(3).choice(len(pairs), 8, replace=False)
    for index in sorted(chosen):
        one, other = pairs[index]
        check({**drawn[one], **drawn[other]}, shape)


def test_two_of_one_kind():
    """Lengths and lengths, table and table: both must hold."""
    shape = (2, 1, 4, 7)
    rng = np.random.default_rng(4)
    lens, more = (rng.integers(0, 8, (2, 4)).astype(np.int32) for _ in range(2))
    tables = [rng.random(shape) < 0.6 for _ in range(2)]
    mask = as_mask({"valid_lens": lens, "boolean": tables[0]})
    mask = mask & as_mask({"valid_lens": more, "boolean": tables[1]})
    axes = axes_of(shape)
    expected = oracle.allowed(shape, valid_lens=np.minimum(lens, more), boolean=tables[0])
    expected &= tables[1]
    allowed = resolve(mask, None, axes)
    np.testing.assert_array_equal(allowed.dense(axes), expected)
    np.testing.assert_array_equal(allowed.visible_keys(axes), expected.any(2))
    np.testing.assert_array_equal(allowed.non_empty_rows(axes), expected.any(3))


@pytest.mark.parametrize("T", [128, 259])
def test_combined_masks_are_checked_in_blocks(T):
    """More queries than a block has, with a ragged end: the last block begins before its place."""
    shape = (1, 1, T, 3)
    table = np.zeros(shape, bool)
    table[0, 0, [0, 127, T - 1], [0, 1, 2]] = True
    for last in (T - 1, T - 2):
        lens = np.full((1, T), 3, np.int32)
        lens[0, last] = 0
        check({"boolean": table, "valid_lens": lens}, shape)
    ids = np.zeros((1, T), np.int32)
    ids[0, -1] = 1
    check({"boolean": table, "segments": (ids, np.array([[0, 0, 1]], np.int32))}, shape)


def test_what_is_known_before_any_data():
    axes = axes_of((2, 2, 4, 7))
    lens = jnp.array([3, 5], jnp.int32)
    facts = {
        "nothing": (None, MaskFacts()),
        "lengths": (regard.Mask.lengths(lens), MaskFacts("per example")),
        "per query": (regard.Mask.lengths(jnp.ones((2, 4), jnp.int32)), MaskFacts("per query")),
        # From the start, the band of a causal mask aligned at the end leans over by 3.
        "causal": (regard.Mask.causal(), MaskFacts(band=Band(None, 3, "start"))),
        "from the start": (
            regard.Mask.causal(align="start"),
            MaskFacts(band=Band(None, 0, "start")),
        ),
        "two bands": (
            regard.Mask.causal() & regard.Mask.window(2, 1, align="start"),
            MaskFacts(band=Band(2, 1, "start")),
        ),
        # Bounds that hide nothing are none: here every query sees the first and the last key.
        "wide": (regard.Mask.window(3, 6, align="start"), MaskFacts()),
        "just not": (
            regard.Mask.window(2, 5, align="start"),
            MaskFacts(band=Band(2, 5, "start")),
        ),
        "boolean": (regard.Mask.boolean(jnp.ones((4, 7), bool)), MaskFacts(boolean=True)),
        "segments": (
            regard.Mask.segments(jnp.zeros(4, jnp.int32), jnp.zeros(7, jnp.int32)),
            MaskFacts(segments=True),
        ),
    }
    for name, (mask, expected) in facts.items():
        assert resolve(mask, None, axes).facts == expected, name
    one = axes_of((2, 1, 1, 7))  # for one query, the end of a band is a length
    assert resolve(regard.Mask.causal(), None, one).facts == MaskFacts()
    shorter = resolve(regard.Mask.causal(align="start"), None, one).facts
    assert shorter == MaskFacts("per example")
    mixed = regard.Mask.causal(align="start") & regard.Mask.lengths(jnp.ones((2, 1), jnp.int32))
    assert resolve(mixed, None, one).facts.lens == "per example"


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint64])
def test_lengths_are_clipped_before_they_are_narrowed(dtype):
    axes = axes_of((2, 1, 1, 300))
    lens = np.array([0, np.iinfo(dtype).max], dtype)
    allowed = resolve(None, jnp.asarray(lens), axes)
    assert allowed.end.dtype == jnp.int32
    expected = [0, min(300, np.iinfo(dtype).max)]
    np.testing.assert_array_equal(allowed.end.ravel(), expected)


def test_only_causal_order_is_known_to_hide_nothing():
    """None, where it is known beforehand: a pass over keys and values saved."""
    axes = axes_of((2, 2, 4, 7))
    causal = resolve(regard.Mask.causal(), None, axes)
    assert causal.visible_keys(axes) is None
    assert causal.non_empty_rows(axes) is None
    both = resolve(regard.Mask.causal(), jnp.array([3, 7], jnp.int32), axes)
    assert both.visible_keys(axes) is not None
    assert both.non_empty_rows(axes) is not None
    assert resolve(None, None, axes).visible_keys(axes) is None
    assert resolve(None, None, axes).non_empty_rows(axes) is None


def test_a_mask_goes_with_a_mask_only():
    with pytest.raises(TypeError):
        regard.Mask.causal() & 3
