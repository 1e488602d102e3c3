"""The parts of the feature kernels that are not kernels, and the one that computes features.

Which tiles are visited and which need a mask, against brute force; masks as kernels read them;
stripes; and features against those of the score itself. The kernels are in test_pallas_contract.py.
"""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from intermediates import kernels
from problem import assert_close, rounded
from regard.mask import Mask, resolve
from regard.placement import Device
from regard.pool.kernels import feature_pass, padding, pool_features
from regard.pool.kernels.block_shapes import DEFAULT, TABLE, Blocks, forced_blocks, pick_blocks
from regard.pool.kernels.features import make_features
from regard.pool.kernels.padding import KernelMask, pad_mask, round_up, stripe_rows
from regard.pool.score_plan import Passes, pool_by
from regard.pool.tile import query_bounds, query_visits
from regard.score.sine_features import SineExpansion
from regard.shapes import Axes

pytestmark = [
    pytest.mark.sampled(2),
    pytest.mark.usefixtures("quick_compilation"),
]

QUERIES, KEYS = 4, 8  # of a block, here

NAMES = ("start", "end", "ids", "keys", "table")
PARTS = [parts for n in range(len(NAMES) + 1) for parts in itertools.combinations(NAMES, n)]

# ---------------------------------------------------------------------------------------------
# tile.py


@st.composite
def ranges_and_pairs(draw, parts=PARTS, empty=True):
    """Ranges over whole blocks, any parts of them, and the pairs that they allow; without `empty`,
    starts in the first half of the keys and ends in the second.
    """
    T, S = draw(st.sampled_from([1, 3])) * QUERIES, draw(st.sampled_from([1, 4])) * KEYS
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    parts = draw(st.sampled_from(parts))
    B, N = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3]))
    t, s, may = np.arange(T), np.arange(S), np.ones((B, N, T, S), bool)
    found = dict.fromkeys(("start", "end", "keys", "table"))
    # Sorted or not: a causal order is, lengths are not; in both, some ranges are empty.
    order = np.sort if draw(st.booleans()) else np.asarray
    if "start" in parts:
        found["start"] = start = order(rng.integers(0, S + 1 if empty else S // 2, (B, 1, T)))
        may &= s >= start[..., None]
    if "end" in parts:
        found["end"] = end = order(rng.integers(0 if empty else S // 2, S + 1, (1, N, T)))
        may &= s < end[..., None]
    ids = ()
    if "ids" in parts:
        mine, theirs = (order(rng.integers(0, 4, (B, 1, n.size))) for n in (t, s))
        may &= mine[..., :, None] == theirs[..., None, :]
        ids = ((jnp.asarray(mine, jnp.int32), jnp.asarray(theirs, jnp.int32)),)
    if "keys" in parts:
        found["keys"] = keys = rng.integers(0, 2, (B, N, S))
        may &= keys[..., None, :] > 0
    if "table" in parts:
        found["table"] = table = rng.integers(0, 2, (B, 1, T, S))
        may &= table > 0
    dtypes = dict(start=jnp.int32, end=jnp.int32, keys=jnp.int8, table=jnp.int8)
    given = {
        name: None if array is None else jnp.asarray(array, dtypes[name])
        for name, array in found.items()
    }
    return KernelMask(ids=ids, **given), may


def in_blocks(may):
    """[B, N, T, S] -> [B, N, query blocks, key blocks, QUERIES · KEYS]."""
    B, N, T, S = may.shape
    tiles = may.reshape(B, N, T // QUERIES, QUERIES, S // KEYS, KEYS).swapaxes(3, 4)
    return tiles.reshape(*tiles.shape[:4], -1)


def visits_of(ranges, may, **keywords):
    T, S = may.shape[2:]
    visits = np.asarray(ranges.bounds((QUERIES, KEYS), T, S, **keywords))
    assert visits.dtype == np.int32
    return np.broadcast_to(visits, (*may.shape[:2], *visits.shape[2:]))


@hypothesis.settings(max_examples=max(100, hypothesis.settings.default.max_examples))
@hypothesis.given(ranges_and_pairs(), st.booleans())
def test_no_pair_is_overlooked_and_no_mask_is_left_out(drawn, at_least_one):
    ranges, may = drawn
    visits = visits_of(ranges, may, at_least_one=at_least_one)
    tiles, block = in_blocks(may), np.arange(may.shape[3] // KEYS)
    low, full_low, full_high, high = (visits[..., i, None] for i in range(4))
    assert (low <= full_low).all()
    assert (full_low <= full_high).all()
    assert (full_high <= high).all()
    assert (high >= low + at_least_one).all()
    visited = (low <= block) & (block < high)
    assert (visited | ~tiles.any(-1)).all(), "a tile with a pair that no visit covers"
    if at_least_one:
        assert visited.any(-1).all()
    unmasked = (full_low <= block) & (block < full_high)
    assert (tiles.all(-1) | ~unmasked).all(), "a tile that needs a mask and gets none"


@hypothesis.given(ranges_and_pairs([(), ("start",), ("end",), ("start", "end")], empty=False))
def test_ranges_alone_visit_no_more_than_they_must(drawn):
    """Where every query sees something: from the first tile with a pair to the last, and all but
    those that are cut by a range are free of masks.
    """
    ranges, may = drawn
    visits, tiles = visits_of(ranges, may), in_blocks(may)
    some, whole = tiles.any(-1), tiles.all(-1)
    low, full_low, full_high, high = (visits[..., i] for i in range(4))
    np.testing.assert_array_equal(low, some.argmax(-1))
    np.testing.assert_array_equal(high, some.shape[-1] - some[..., ::-1].argmax(-1))
    np.testing.assert_array_equal(full_high - full_low, whole.sum(-1))


def test_a_triangle_by_hand():
    """Causal order of 8 queries over 16 keys, aligned at the end, in blocks of 4 by 8: the first
    queries see 9 to 12 keys, the last 13 to 16.
    """
    end = jnp.arange(9, 17, dtype=jnp.int32)[None, None, :]
    visits = KernelMask(None, end, (), None, None).bounds((QUERIES, KEYS), 8, 16)
    np.testing.assert_array_equal(visits, [[[[0, 0, 1, 2], [0, 0, 1, 2]]]])


@hypothesis.given(ranges_and_pairs())
def test_query_bounds_are_the_visits_the_other_way_round(drawn):
    ranges, may = drawn
    visits, columns = visits_of(ranges, may), may.shape[3] // KEYS
    bounds = np.asarray(query_bounds(jnp.asarray(visits), columns))
    block = np.arange(columns)
    visited = (visits[..., 0, None] <= block) & (
        block < visits[..., 3, None]
    )  # [.., rows, columns]
    for where in np.ndindex(*visited.shape[:2], columns):
        row = np.flatnonzero(visited[(*where[:2], slice(None), where[2])])
        first, last = bounds[where]
        assert (first, last) == ((row[0], row[-1] + 1) if row.size else (0, 0))


@hypothesis.settings(max_examples=max(100, hypothesis.settings.default.max_examples))
@hypothesis.given(ranges_and_pairs())
def test_query_visits_mark_tiles_that_need_no_mask(drawn):
    """From first to last as query bounds say; between them the longest run without a mask."""
    ranges, may = drawn
    visits = visits_of(ranges, may)
    rows, columns = may.shape[2] // QUERIES, may.shape[3] // KEYS
    found = np.asarray(query_visits(jnp.asarray(visits), columns))
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found[..., ::3], query_bounds(jnp.asarray(visits), columns))
    for b, n, column in np.ndindex(*may.shape[:2], columns):
        first, full_first, full_last, last = found[b, n, column]
        assert 0 <= first <= full_first <= full_last <= last <= rows
        low, high = visits[b, n, :, 1], visits[b, n, :, 2]
        whole = "".join("10"[not inside] for inside in (low <= column) & (column < high))
        assert "0" not in whole[full_first:full_last]
        assert full_last - full_first == max(map(len, whole.split("0")))


# ---------------------------------------------------------------------------------------------
# padding.py


def pairs_of(ranges, T, S):
    """The pairs that padded ranges allow, [B|1, N|1, T, S], as a kernel reads them."""
    keys, may = np.arange(S), np.ones((1, 1, T, S), bool)
    if ranges.start is not None:
        may = may & (keys >= np.asarray(ranges.start)[..., None])
    if ranges.end is not None:
        may = may & (keys < np.asarray(ranges.end)[..., None])
    for mine, theirs in ranges.ids:
        may = may & (np.asarray(mine)[..., :, None] == np.asarray(theirs)[..., None, :])
    if ranges.keys is not None:
        may = may & (np.asarray(ranges.keys) > 0)[..., None, :]
    if ranges.table is not None:
        may = may & (np.asarray(ranges.table) > 0)
    return may


B, N, T, S = 2, 3, 7, 13
TABLE_OF_PAIRS = np.random.default_rng(0).random((B, N, T, S)) < 0.5
LAID = {
    "nothing": None,
    "causal": Mask.causal(),
    "window": Mask.window(2, 1, align="start"),
    "from a key on": Mask.window(1, None),
    "lengths": Mask.lengths(np.array([0, 5])),
    "lengths per head": Mask.lengths(np.arange(B * N * T).reshape(B, N, T) % (S + 1)),
    "segments": Mask.segments(np.arange(T) // 2, np.arange(S) // 3),
    "segments per example": Mask.segments(
        np.arange(B * T).reshape(B, T) // 4, np.arange(B * S).reshape(B, S) // 7
    ),
    "pairs": Mask.boolean(TABLE_OF_PAIRS),
    "shared pairs": Mask.boolean(TABLE_OF_PAIRS[0, 0]),
    "keys": Mask.boolean(TABLE_OF_PAIRS[:, :, :1]),
    "queries": Mask.boolean(TABLE_OF_PAIRS[..., :1]),
    "heads": Mask.boolean(TABLE_OF_PAIRS[..., :1, :1]),
    "tables of all kinds": Mask.boolean(TABLE_OF_PAIRS)
    & Mask.boolean(TABLE_OF_PAIRS[:, :, :1])
    & Mask.boolean(TABLE_OF_PAIRS[:, :1, ::-1])
    & Mask.boolean(TABLE_OF_PAIRS[..., 2:3]),
    "everything": Mask.causal()
    & Mask.lengths(np.array([11, 4]))
    & Mask.segments(np.arange(T) // 4, np.arange(S) // 5)
    & Mask.boolean(TABLE_OF_PAIRS[:1]),
}


@pytest.mark.parametrize("sizes", [(T, S), (8, 16), (32, 13), (7, 64)], ids=str)
@pytest.mark.parametrize("name", LAID)
def test_laid_out_a_mask_is_the_same_mask(name, sizes):
    """And padded keys are masked for every query."""
    axes = Axes(4, B, T, S, N, N, 1, 1, 1)
    mask = jax.tree.map(jnp.asarray, LAID[name])
    allowed = resolve(mask, None, axes)
    laid = pad_mask(allowed, axes, *sizes)
    for array_name, array in laid.arrays().items():
        assert array.dtype == (jnp.int8 if array_name in ("keys_taken", "table") else jnp.int32)
    found = np.broadcast_to(pairs_of(laid, *sizes), (B, N, *sizes))
    dense = allowed.dense(axes)
    expected = np.ones((B, N, T, S), bool) if dense is None else np.asarray(dense)
    np.testing.assert_array_equal(found[:, :, :T, :S], np.broadcast_to(expected, (B, N, T, S)))
    assert not found[..., S:].any()


@hypothesis.given(
    st.integers(1, 5000),
    st.integers(1, 64),
    st.sampled_from([16, 64, 128]),
    st.integers(0, 1 << 22),
)
def test_stripes_are_whole_blocks_that_fit(queries, heads, block, limit):
    axes, keys = Axes(4, 2, queries, 100, heads, heads, 1, 1, 1), 128
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(padding, "STRIPE_BYTES", limit)
        striped = stripe_rows(axes, block, keys, jnp.bfloat16)
    per_row = 2 * heads * keys * 2
    assert striped % block == 0
    assert striped <= round_up(queries, block)
    assert striped == block or striped * per_row <= limit
    # As few stripes as fit, and no stripe without a query of its own.
    fitting = max(block, limit // per_row // block * block)
    stripes = -(-queries // striped)
    assert stripes == -(-queries // fitting)
    assert (stripes - 1) * striped < queries


@pytest.mark.parametrize(
    ("size", "block", "power", "expected"),
    [(0, 16, False, 0), (1, 16, False, 16), (16, 16, False, 16), (17, 16, False, 32)]
    + [(1, 16, True, 16), (16, 16, True, 16), (17, 16, True, 32), (129, 16, True, 256)],
)
def test_round_up(size, block, power, expected):
    assert round_up(size, block, power) == expected


# ---------------------------------------------------------------------------------------------
# features.py


def expansion_and_rows(h, terms):
    """Two query heads over each of two key heads."""
    rng = np.random.default_rng(h)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    frequency = jnp.asarray(rng.uniform(0.2, 0.7, (2, 2, 1, h)), jnp.float32)
    expansion = SineExpansion(frequency, 0.3 * normal(2, 2, 1, h), normal(2, 4, terms, h))
    return expansion, normal(2, 4, 32, h), normal(2, 2, 48, h)


def by_kernel(dtype):
    return functools.partial(make_features, dtype=jnp.dtype(dtype), interpret=True)


def by_expansion(expansion, query, key):
    return expansion.query(query), expansion.key(key)


def has_kernel(function, *args):
    return "regard_features" in str(jax.make_jaxpr(function)(*args))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("h", "terms"), [(16, 1), (48, 5), (128, 3)])
def test_features_and_gradients_are_the_expansions(h, terms, dtype):
    arrays = expansion_and_rows(h, terms)
    assert has_kernel(by_kernel(dtype), *arrays)

    @functools.partial(jax.jit, static_argnums=0)
    def run(function, arrays, cotangents):
        features, pull = jax.vjp(function, *arrays)
        return features, pull(tuple(cotangents))

    expected = jax.eval_shape(by_expansion, *arrays)
    rng = np.random.default_rng(1)
    cotangents = [rounded(rng.standard_normal(side.shape), dtype) for side in expected]
    features, found = run(by_kernel(dtype), arrays, [jnp.asarray(c, dtype) for c in cotangents])
    expected, slopes = run(by_expansion, arrays, [jnp.asarray(c, jnp.float32) for c in cotangents])
    for one, other in zip(features, expected, strict=True):
        assert str(one.dtype) == dtype
        # The same float32 number to some 1e-6; now and then it rounds to the other side.
        assert_close(one, rounded(other, dtype), 0.1 * float(jnp.finfo(dtype).eps), "features")
    for name, one, other in zip(("query", "key"), found[1:], slopes[1:], strict=True):
        assert_close(one, other, 4e-6, f"gradient of {name}")
    assert_close(found[0].amplitude, slopes[0].amplitude, 4e-6, "gradient of amplitude")
    np.testing.assert_array_equal(found[0].frequency, 0)  # it is looked up: none is forced


@pytest.mark.parametrize(
    ("h", "tokens", "dtype"),
    [(24, 32, "bfloat16"), (16, 31, "bfloat16"), (16, 32, "float32")],
    ids=["units in odd numbers", "rows in odd numbers", "float32"],
)
def test_features_without_a_kernel(h, tokens, dtype):
    expansion, x, y = expansion_and_rows(h, 2)
    arrays = expansion, x[:, :, :tokens], y
    assert not has_kernel(by_kernel(dtype), *arrays)
    for one, other in zip(by_kernel(dtype)(*arrays), by_expansion(*arrays), strict=True):
        np.testing.assert_array_equal(one, other.astype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_without_an_expansion_are_the_features(dtype):
    _, x, y = expansion_and_rows(16, 1)
    for one, other in zip(by_kernel(dtype)(None, x, y), (x, y), strict=True):
        np.testing.assert_array_equal(one, other.astype(dtype))


# ---------------------------------------------------------------------------------------------
# block_shapes.py, and all kernels without masks.


@pytest.mark.parametrize("direction", ["forward", "backward", "d keys", "d queries"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_width_has_blocks(direction, dtype):
    """Powers of two, as Triton asks."""
    for width, V in itertools.product((1, 64, 65, 128, 129, 4000), (1, 64, 65, 128, 129, 256)):
        blocks = pick_blocks(direction, width, V, dtype)
        assert blocks in {*TABLE.values(), *DEFAULT.values()}
        for size in (blocks.queries, blocks.keys, blocks.chunk, blocks.warps):
            assert size & (size - 1) == 0
            assert size >= 4


def test_pool_features_is_softmax_pooling():
    """What the benchmark times: two query heads over one key head, in sizes that fit no block."""
    rng = np.random.default_rng(0)
    shapes = (2, 2, 40, 24), (2, 50, 24), (2, 50, 5)
    phi, psi, value = (rounded(rng.standard_normal(shape), "float32") for shape in shapes)
    scores = np.einsum("egtr,esr->egts", phi, psi)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    arrays = [jnp.asarray(x, jnp.float32) for x in (phi, psi, value)]
    pool = jax.jit(functools.partial(pool_features, device="interpret"))
    with jax.enable_x64(False), forced_blocks(Blocks(queries=16, keys=32, chunk=16)):
        out = pool(*arrays)
    assert_close(out, np.einsum("egts,esv->egtv", weights, value), 2e-6, "out")


# ---------------------------------------------------------------------------------------------
# backward_narrow.py, against d scores in memory and matrix products; the oracle is asked in
# test_pallas_contract.py, where rows are features already.


def cotangents(monkeypatch, narrow, operands, masks, cotangent):
    """d operands, and the names of the kernels."""
    monkeypatch.setattr(feature_pass, "NARROW", 128 if narrow else 0)
    (B, N, T, _), (_, K, S, V) = operands.query.shape, operands.value.shape
    width = operands.width()
    axes = Axes(4, B, T, S, N, K, width, width, V)
    allowed = resolve(masks, None, axes)
    dtype = operands.value.dtype
    blocks = Blocks(queries=16, keys=32, chunk=16)
    one = feature_pass.FeaturePass(axes, dtype, 0.5, 0.0, "interpret", blocks)

    static = Passes((one,), Device("cpu"), dtype, branch=True, sharded=False)

    def pool(operands):
        return pool_by(static, (operands,), allowed, None, None)

    def pull(operands, cotangent):
        return jax.vjp(pool, operands)[1](cotangent)[0]

    with jax.enable_x64(False):
        program = jax.make_jaxpr(pull)(operands, cotangent).jaxpr
        return jax.jit(pull)(operands, cotangent), set(kernels(program))


@pytest.mark.parametrize(
    ("features", "mask"),
    [
        ("expanded", Mask.window(20, 5)),
        ("expanded", Mask.lengths(np.array([0, 41]))),
        ("rows", None),
    ],
    ids=["expanded, window", "expanded, lengths", "rows"],
)
def test_narrow_and_wide_backward_passes_agree(features, mask, monkeypatch):
    narrow_and_wide_agree(features, mask, monkeypatch, jnp.bfloat16, 0.01)


@pytest.mark.parametrize("mask", [None, Mask.window(20, 5)], ids=["none", "window"])
def test_in_tf32_narrow_and_wide_backward_passes_agree(mask, monkeypatch):
    """A CPU computes what a GPU would in TF32 in float32."""
    with jax.default_matmul_precision("tensorfloat32"):
        narrow_and_wide_agree("rows", mask, monkeypatch, jnp.float32, 2e-6)


def narrow_and_wide_agree(features, mask, monkeypatch, dtype, tolerance):
    expansion, query, key = expansion_and_rows(16, 3)
    rng = np.random.default_rng(2)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    if features == "rows":
        expansion, query, key = None, normal(2, 4, 32, 24), normal(2, 2, 48, 24)
    bias = normal(2, 2, 48).astype(jnp.float32)
    operands = feature_pass.FeatureOperands(expansion, query, key, bias, normal(2, 2, 48, 5))
    mask = jax.tree.map(jnp.asarray, mask)
    cotangent = normal(2, 4, 32, 5)
    found, names = cotangents(monkeypatch, True, operands, mask, cotangent)
    expected, other_names = cotangents(monkeypatch, False, operands, mask, cotangent)
    for kernel, narrow in (("d_keys", True), ("d_queries", True), ("d_scores", False)):
        assert (f"regard_{kernel}" in names) == narrow
        assert (f"regard_{kernel}" in other_names) != narrow
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        assert one.dtype == other.dtype
        assert_close(one, other, tolerance, jax.tree_util.keystr(path))


@pytest.mark.parametrize(
    ("width", "V", "dtype"),
    [(129, 5, "bfloat16"), (24, 129, "bfloat16"), (24, 5, "float32")],
    ids=["wide features", "wide values", "float32"],
)
def test_what_the_narrow_backward_pass_does_not_take(width, V, dtype, monkeypatch):
    rng = np.random.default_rng(0)
    shapes = (1, 1, 16, width), (1, 1, 32, width), (1, 1, 32, V), (1, 1, 16, V)
    query, key, value, cotangent = (jnp.asarray(rng.standard_normal(s), dtype) for s in shapes)
    operands = feature_pass.FeatureOperands(None, query, key, None, value)
    _, text = cotangents(monkeypatch, True, operands, None, cotangent)
    assert "regard_d_scores" in text
    assert "regard_d_keys" not in text
