"""Masks combined with `&`, `|` and `~`, and with plain arrays; and every way of writing one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import regard
from cases import BACKENDS
from intermediates import largest
from regard import Mask
from regard.mask import Allowed, Band, MaskFacts, resolve
from regard.shapes import Axes

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.sampled(2)]

SHAPES = [(2, 1, 4, 7), (1, 2, 7, 4), (2, 2, 5, 5), (1, 1, 1, 6), (2, 1, 6, 1)]
EMPTY_SHAPES = [(2, 2, 0, 5), (2, 2, 5, 0), (0, 2, 3, 4), (1, 2, 0, 0)]


def axes_of(shape):
    B, N, T, S = shape
    return Axes(rank=4, B=B, T=T, S=S, N=N, K=N, query_width=1, key_width=1, V=1)


def drawn(shape, rng):
    """A mask of one condition, and the pairs that it allows by the oracle."""
    B, N, T, S = shape
    kind = rng.integers(6)
    if kind == 0:
        lens = rng.integers(-1, S + 2, [(), (B,), (B, T), (B, N, T)][rng.integers(4)])
        return Mask.lengths(jnp.asarray(lens, jnp.int32)), {"valid_lens": np.asarray(lens)}
    align = ("end", "start")[rng.integers(2)]
    if kind == 1:
        return Mask.causal(align), {"causal": align}
    if kind == 2:
        reach = [None if rng.random() < 0.3 else int(rng.integers(-2, 5)) for _ in range(2)]
        return Mask.window(*reach, align), {"window": (*reach, align)}
    if kind == 3:
        ids = [np.sort(rng.integers(0, 3, (B, n)), axis=-1) for n in (T, S)]
        return Mask.segments(*(jnp.asarray(i) for i in ids)), {"segments": ids}
    if kind == 4:
        table = rng.random((1, S) if rng.random() < 0.5 else shape) < 0.5
        return Mask.boolean(jnp.asarray(table)), {"boolean": table}
    return Mask(), {}


def expression(shape, rng, depth):
    """A mask of random operators, and its pairs by the same operators on NumPy arrays."""
    kind = rng.integers(4) if depth else 0
    if kind == 0:
        mask, facts = drawn(shape, rng)
        return mask, oracle.allowed(shape, **facts)
    one, pairs = expression(shape, rng, depth - 1)
    if kind == 1:
        return ~one, ~pairs
    other, others = expression(shape, rng, depth - 1)
    return (one & other, pairs & others) if kind == 2 else (one | other, pairs | others)


def check(mask, may):
    """Pairs, visible keys and non-empty rows of a mask, and what is known of it at trace time."""
    axes = axes_of(may.shape)
    allowed = resolve(mask, None, axes)
    for got, expected in (
        (allowed.dense(axes), may),
        (allowed.visible_keys(axes), may.any(2)),
        (allowed.non_empty_rows(axes), may.any(3)),
    ):
        got = True if got is None else np.asarray(got)
        if 0 not in may.shape[:2]:
            np.testing.assert_array_equal(np.broadcast_to(got, expected.shape), expected)
    lone = allowed.as_lengths_and_band() if 0 not in may.shape else None
    if lone is not None:
        left, right, align = lone.band
        again = oracle.allowed(may.shape, window=(left, right, align))
        if lone.lens is not None:
            again &= np.arange(may.shape[3]) < np.asarray(lone.lens)[:, None, None, None]
        np.testing.assert_array_equal(again, may)
    for bound in (allowed.start, allowed.end):  # kernels rely on it
        assert bound is None or ((bound >= 0) & (bound <= axes.S)).all()
    return allowed


@settings(max_examples=150)
@given(st.sampled_from(SHAPES), st.integers(0, 2**20), st.integers(1, 3))
def test_any_expression_is_the_same_expression_of_arrays(shape, seed, depth):
    check(*expression(shape, np.random.default_rng(seed), depth))


@settings(max_examples=60)
@given(st.sampled_from(EMPTY_SHAPES), st.integers(0, 2**20), st.integers(0, 2))
def test_any_expression_of_no_queries_or_keys(shape, seed, depth):
    check(*expression(shape, np.random.default_rng(seed), depth))


LENS, MORE = np.array([3, 6], np.int32), np.array([5, 2], np.int32)
PER_QUERY = np.arange(8, dtype=np.int32).reshape(2, 4)

# name: (a mask, the facts of the range that it is). Shape (2, 1, 4, 7).
RANGES = {
    "prefix": (
        Mask.causal("start") | Mask.lengths(LENS),
        oracle.allowed((2, 1, 4, 7), causal="start")
        | oracle.allowed((2, 1, 4, 7), valid_lens=LENS),
        MaskFacts("per query"),
    ),
    "the longer of two lengths": (
        Mask.lengths(LENS) | Mask.lengths(MORE),
        oracle.allowed((2, 1, 4, 7), valid_lens=np.maximum(LENS, MORE)),
        MaskFacts("per example"),
    ),
    "lengths per example or per query": (
        Mask.lengths(LENS) | Mask.lengths(PER_QUERY),
        oracle.allowed((2, 1, 4, 7), valid_lens=np.maximum(LENS[:, None], PER_QUERY)),
        MaskFacts("per query"),
    ),
    "three lengths": (
        Mask.lengths(LENS) | Mask.lengths(MORE) | Mask.lengths(np.int32(4)),
        oracle.allowed((2, 1, 4, 7), valid_lens=np.maximum(np.maximum(LENS, MORE), 4)),
        MaskFacts("per example"),
    ),
    "past the end": (
        ~Mask.lengths(LENS),
        ~oracle.allowed((2, 1, 4, 7), valid_lens=LENS),
        MaskFacts("per query"),
    ),
    "neither of two lengths": (
        ~(Mask.lengths(LENS) | Mask.lengths(MORE)),
        ~oracle.allowed((2, 1, 4, 7), valid_lens=np.maximum(LENS, MORE)),
        MaskFacts("per query"),
    ),
    "not causal": (
        ~Mask.causal("start"),
        ~oracle.allowed((2, 1, 4, 7), causal="start"),
        MaskFacts(band=Band(-1, None, "start")),
    ),
    "windows that touch": (
        Mask.window(2, -1, "start") | Mask.window(0, 1, "start"),
        oracle.allowed((2, 1, 4, 7), window=(2, 1, "start")),
        MaskFacts(band=Band(2, 1, "start")),
    ),
    "everything": (
        Mask.causal() | Mask(),
        np.ones((2, 1, 4, 7), bool),
        MaskFacts(),
    ),
    "nothing": (~Mask(), np.zeros((2, 1, 4, 7), bool), MaskFacts("per example")),
}


@pytest.mark.parametrize("name", RANGES)
def test_one_range_per_query_stays_one(name):
    mask, may, facts = RANGES[name]
    allowed = check(mask, may)
    assert not allowed.arrays
    assert allowed.facts == facts


@pytest.mark.parametrize(
    "mask",
    [
        Mask.window(1, 1) | Mask.lengths(np.int32(2)),  # nearby and global tokens
        ~Mask.window(1, 1),
        Mask.window(3, -2, "start") | Mask.window(0, 1, "start"),  # with a gap
        Mask.segments(np.zeros(4, np.int32), np.zeros(7, np.int32)) | Mask.causal(),
    ],
    ids=["window and global", "around a window", "gap", "segments"],
)
def test_two_ranges_become_an_array(mask):
    assert len(resolve(mask, None, axes_of((2, 1, 4, 7))).arrays) == 1


def test_a_mask_over_keys_alone_stays_as_small():
    """~ and | of arrays broadcast as the arrays do."""
    keys = jnp.array([[True, False, True]])
    for mask in (~Mask.boolean(keys), Mask.boolean(keys) | ~keys):
        (array,) = resolve(mask, None, axes_of((2, 2, 5, 3))).arrays
        assert array.shape == (1, 1, 1, 3)


def test_twice_not_is_nothing_changed():
    for mask in (Mask.causal(), Mask.causal() | Mask.lengths(LENS), Mask()):
        assert ~~mask == mask or (~~mask) is mask


@pytest.mark.parametrize("xp", [np, jnp])
def test_a_plain_array_is_a_mask(xp):
    """On either side, of NumPy or JAX, with either operator."""
    table = np.random.default_rng(0).random((4, 7)) < 0.5
    causal, array = oracle.allowed((1, 1, 4, 7), causal="end"), xp.asarray(table)
    for mask, may in (
        (Mask.causal() & array, causal & table),
        (array & Mask.causal(), causal & table),
        (Mask.causal() | array, causal | table),
        (array | Mask.causal(), causal | table),
        (Mask.causal() & xp.asarray(False)[()], causal & False),
    ):
        assert isinstance(mask, Mask)
        check(mask, may)


def test_numbers_beside_a_mask_are_an_error_of_ours():
    for operator in (lambda a, b: a & b, lambda a, b: b | a):
        for array in (jnp.array([3, 1]), np.array([3.0])):
            with pytest.raises(TypeError, match=r"dtype .*Fix: regard.Mask.lengths"):
                operator(Mask.causal(), array)
    for other in (3, "causal", None, [True]):
        with pytest.raises(TypeError, match="unsupported operand"):
            Mask.causal() | other


def test_and_or_not_in_words_is_an_error_of_ours():
    """`a and b` would be b alone."""
    for wrong in (
        lambda: Mask.causal() and Mask.lengths(3),
        lambda: Mask.causal() or Mask.lengths(3),
        lambda: not Mask.causal(),
    ):
        with pytest.raises(TypeError, match=r"no truth value.*mask & other, mask \| other, ~mask"):
            wrong()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("mask", "pairs"),
    [
        (lambda c, n: c | n, lambda c, n: c | n),
        (lambda c, n: ~c & n, lambda c, n: ~c & n),
        (lambda c, n: ~(c & n), lambda c, n: ~(c & n)),
    ],
    ids=["prefix", "later", "not both"],
)
def test_a_combined_mask_pools_as_its_pairs(mask, pairs, backend):
    """Output and gradients on every backend; masked keys of NaN reach nothing."""
    rng, (T, S), lens = np.random.default_rng(0), (19, 37), np.array([5, 0], np.int32)
    may = pairs(oracle.allowed((2, T, S), causal="end"), oracle.allowed((2, T, S), valid_lens=lens))
    given = mask(Mask.causal(), Mask.lengths(jnp.asarray(lens)))
    q, k, v = (rng.standard_normal((2, n, 4)).astype(np.float32) for n in (T, S, S))
    exact = oracle.attend(q, k, v, score=oracle.Dot(), may=may)
    slopes = oracle.gradients(2 * exact.out, q, k, v, score=oracle.Dot(), may=may)
    k, v = (np.where(may.any(1)[..., None], x, np.nan).astype(np.float32) for x in (k, v))
    chosen = BACKENDS[backend]

    def loss(q, k, v):
        out = regard.attend(q, k, v, mask=given, implementation=chosen.implementation)
        return jnp.sum(out * out), out

    with chosen.tiling():
        (_, out), got = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(
            *map(jnp.asarray, (q, k, v))
        )
    np.testing.assert_allclose(out, exact.out, atol=3e-6)
    for name, slope in zip(("query", "key", "value"), got, strict=True):
        np.testing.assert_allclose(slope, slopes[name], atol=3e-5, err_msg=name)


def test_a_prefix_mask_never_makes_a_queries_by_keys_array():
    x = jax.ShapeDtypeStruct((2, 2048, 4), jnp.float32)
    mask = Mask.causal() | Mask.lengths(np.array([700, 9], np.int32))

    def loss(q, k, v, mask):
        return regard.attend(q, k, v, mask=mask, implementation="blockwise").sum()

    name, shape = largest(jax.value_and_grad(loss, argnums=(0, 1, 2)), x, x, x, mask)
    assert np.prod(shape) < 2048 * 2048, f"{name} makes {shape}"


def test_combined_masks_are_pytrees():
    """Through jit, vmap and flatten; equal structure for equal masks, so that nothing retraces."""
    traces = []

    @jax.jit
    def weights(x, mask):
        traces.append(None)
        return regard.weights(x, x, mask=mask, normalize=regard.Uniform())

    x = jnp.zeros((2, 5, 1), jnp.float32)
    for lens in ([1, 2], [3, 5]):
        got = weights(x, ~(Mask.causal() & Mask.lengths(jnp.asarray(lens, jnp.int32))))
        may = ~(oracle.allowed((2, 5, 5), causal="end", valid_lens=lens))
        np.testing.assert_array_equal(np.asarray(got) > 0, may)
    assert len(traces) == 1
    each = jax.vmap(lambda x, n: weights(x, Mask.causal() | Mask.lengths(n)))
    got = each(x, jnp.asarray([4, 0], jnp.int32))
    may = oracle.allowed((2, 5, 5), causal="end") | oracle.allowed((2, 5, 5), valid_lens=[4, 0])
    np.testing.assert_array_equal(np.asarray(got) > 0, may)


# ---------------------------------------------------------------------------------------------
# Every way of writing a width, ids or lengths.


@pytest.mark.parametrize(
    "two", [2, np.int64(2), np.uint8(2), np.array(2), jnp.array(2, jnp.int32)], ids=repr
)
def test_a_window_takes_integers_of_every_kind(two):
    assert Mask.window(two, None) == Mask.window(2, None)
    assert Mask.window(None, two) == Mask.window(None, 2)
    hash(jax.tree.structure(Mask.window(two, two)))


def test_a_window_of_other_widths_is_an_error_of_ours():
    for width in (2.0, np.float32(2), np.array([2]), "2"):
        with pytest.raises(
            TypeError, match="window's left must be an integer or None, known at trace time"
        ):
            Mask.window(width, 0)
    with pytest.raises(TypeError, match=r"window's right .*static argument .*Mask.lengths"):
        jax.jit(lambda width: jnp.zeros(Mask.window(None, width).bands[0].right))(2)


def test_one_array_of_segments_is_enough_for_self_attention():
    ids = jnp.array([[0, 0, 1, 2], [0, 1, 1, 1]])
    axes = axes_of((2, 3, 4, 4))
    one, two = (resolve(mask, None, axes) for mask in (Mask.segments(ids), Mask.segments(ids, ids)))
    np.testing.assert_array_equal(one.dense(axes), two.dense(axes))
    with pytest.raises(ValueError, match=r"one id per query and one per key; .*T = S"):
        resolve(Mask.segments(ids), None, axes_of((2, 3, 4, 5)))


HUGE = {
    "int64": np.array([2**40 + 1, -(2**40)]),
    "uint64": np.array([2**63 + 5, 0], np.uint64),
    "uint32": np.array([2**32 - 1, 0], np.uint32),
    "list": [2**40, -(2**35)],
}


@pytest.mark.parametrize("kind", [np.int64, np.uint64, list])
def test_segment_ids_past_int32_are_told_apart(kind):
    ids = np.array([0, 2**32, 5, 2**40], np.int64)  # alike in their lowest 32 bits: 0 and 2**32
    large = ids.tolist() if kind is list else ids.astype(kind)
    x = jnp.ones((4, 2), jnp.float32)
    with jax.enable_x64(False):
        for mask in (Mask.segments(large), Mask.segments(large, large[::-1])):
            found = regard.weights(x, x, mask=mask)
            keys = ids if mask.shared_ids[0] else ids[::-1]
            np.testing.assert_array_equal(found, ids[:, None] == keys[None])


@pytest.mark.parametrize("name", HUGE)
def test_lengths_past_int32_are_clipped_where_jax_has_no_int64(name):
    """JAX without 64 bits would wrap 2^40 + 1 around to 1."""
    with jax.enable_x64(False):
        x = jnp.zeros((2, 3, 1))
        for call in (
            lambda: regard.weights(x, x, valid_lens=HUGE[name]),
            lambda: regard.weights(x, x, mask=Mask.lengths(HUGE[name])),
            lambda: jax.jit(functools.partial(regard.weights, x, x))(mask=Mask.lengths(HUGE[name])),
            lambda: regard.masked_softmax(jnp.zeros((2, 3, 3)), HUGE[name]),
        ):
            np.testing.assert_allclose(call()[:, 0], [[1 / 3] * 3, [0] * 3], rtol=1e-6)
        one = regard.weights(x[0], x[0], valid_lens=2**40)
        np.testing.assert_allclose(one[0], [1 / 3] * 3, rtol=1e-6)


def test_allowed_is_open_to_construction():
    """Backends build one of their own, without facts."""
    allowed = Allowed(None, jnp.full((1, 1, 1), 2, jnp.int32), (), ())
    assert allowed.as_lengths_and_band() is None
    np.testing.assert_array_equal(allowed.visible_keys(axes_of((1, 1, 3, 4)))[0, 0], [1, 1, 0, 0])
