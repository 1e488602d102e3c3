"""The forward pass for Hopper GPUs against float64: each kernel that `pick` can ask for.

On a CPU in the interpreter of JAX's Mosaic GPU lowering, which is in JAX 0.11 and later
(`PJRT_NPROC=16 pytest tests/pool/test_hopper.py`); on a GPU as it is.
"""

import functools
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regard
from absent_gpu import HOPPER
from cases import DTYPES
from problem import assert_close, rounded
from regard import placement
from regard.attend import _pool
from regard.mask import Mask, resolve
from regard.placement import Device, on_device
from regard.pool.kernels.feature_pass import FeatureOperands, FeaturePass
from regard.pool.kernels.padding import KernelMask
from regard.pool.pallas import MOSAIC_SINCE
from regard.score.sine_features import SineExpansion
from regard.shapes import Axes

LOG2_E = 1.4426950408889634

# The interpreter runs every warpgroup as a thread of XLA's pool, six for a cluster of two, and one
# that waits for another keeps its place: in a pool of two, one per core, some runs never end.
THREADS = int(os.environ.get("PJRT_NPROC") or os.environ.get("NPROC") or os.cpu_count() or 1)
with_mosaic = pytest.mark.skipif(
    jax.__version_info__ < MOSAIC_SINCE, reason="hopper.py is written for JAX 0.11"
)
in_an_interpreter = pytest.mark.skipif(
    jax.__version_info__ < MOSAIC_SINCE or THREADS < 12,
    reason="the interpreter of Mosaic GPU kernels needs JAX 0.11, and PJRT_NPROC=16 on few cores",
)

# (width, value width, key bias): one for each kernel, as test_every_kernel_is_tested makes sure.
MODES = [
    (64, 64, False),  # narrow, and the output leaves through the place of the features
    (64, 64, True),
    (64, 128, False),  # one product ahead
    (128, 128, False),
    (128, 128, True),
    (192, 64, False),  # wide: a ring of chunks
    (192, 64, True),
    (192, 128, False),
    (320, 128, True),
    (64, 256, False),
    (192, 256, True),
]


def mode_id(mode):
    width, V, biased = mode
    return f"width {width}, V={V}" + (", biased" if biased else "")


# (rng, B, N, T, S) -> start and end, [B|1, N|1, T].
MASKS = {
    "none": lambda rng, B, N, T, S: (None, None),
    "lengths": lambda rng, B, N, T, S: (None, _draw(rng, S + 1, B, 1, T)),
    "causal": lambda rng, B, N, T, S: (None, np.arange(S - T + 1, S + 1)[None, None]),
    "from a key on": lambda rng, B, N, T, S: (_draw(rng, S, 1, 1, T), None),
    # Sorted, so that some tiles are in no range; some of the ranges are empty.
    "windows per head": lambda rng, B, N, T, S: (
        np.sort(_draw(rng, S, B, N, T)),
        np.sort(_draw(rng, S, B, N, T)) + 64,
    ),
    "nothing": lambda rng, B, N, T, S: (None, np.zeros((1, 1, T))),
    "one length": lambda rng, B, N, T, S: (None, np.full((B, 1, T), [[[S // 2 + 3]], [[5]]])),
}


def _draw(rng, high, *shape):
    return rng.integers(0, high, shape)


def make(mode, mask, dtypes, T, S, heads=(2, 1)):
    """Arrays of a mode by the names of hopper.forward, for N query heads over K key heads."""
    (width, V, biased), (N, K), B = mode, heads, 2
    rng = np.random.default_rng((width, V, biased))
    start, end = (
        None if bound is None else np.clip(bound, 0, S).astype(np.int32)
        for bound in MASKS[mask](rng, B, N, T, S)
    )
    return dict(
        phi=rounded(rng.standard_normal((B, N, T, width)) * width**-0.5, dtypes[0]),
        psi=rounded(rng.standard_normal((B, K, S, width)), dtypes[0]),
        value=rounded(rng.standard_normal((B, K, S, V)), dtypes[1]),
        key_bias=rounded(rng.standard_normal((B, K, S)), "float32") if biased else None,
        ranges=(start, end),
    )


def expected(phi, psi, value, key_bias, ranges, scale):
    """Output and log2-sum-exp2 in float64; 0 and -inf where a query sees nothing."""
    group = phi.shape[1] // psi.shape[1]
    psi, value = (np.repeat(side, group, axis=1) for side in (psi, value))
    scores = np.einsum("bntr,bnsr->bnts", phi, psi)
    if key_bias is not None:
        scores = scores + np.repeat(key_bias, group, axis=1)[:, :, None, :]
    keys, scores = np.arange(psi.shape[2]), scores * scale
    for bound, hidden in zip(ranges, (np.less, np.greater_equal), strict=True):
        if bound is not None:
            scores = np.where(hidden(keys, bound[..., None]), -np.inf, scores)
    top = np.maximum(scores.max(-1, keepdims=True), -1e30)
    weights = np.exp2(scores - top)
    total = weights.sum(-1, keepdims=True)
    seen = total > 0
    out = np.einsum("bnts,bnsv->bntv", weights, value) / np.where(seen, total, 1)
    lse = np.where(seen, top + np.log2(np.where(seen, total, 1)), -np.inf)
    return out, lse[..., 0]


def prepare(arrays, mode, dtypes, scale, splits, interpret, tokens_first=False, hides=False):
    """The kernel, jitted, and its arguments; it gives [B, N, T, V] from both orders of axes."""
    from regard.pool.kernels import hopper

    blocks = hopper.pick(*mode)
    start, end = (None if bound is None else jnp.asarray(bound) for bound in arrays["ranges"])
    bounds, T, S = None, arrays["phi"].shape[2], arrays["psi"].shape[2]
    if start is not None or end is not None:
        tile = blocks.queries * blocks.cluster
        mask = KernelMask(start, end, (), None, None)
        more = dict(at_least_one=True, last_key=hides)
        bounds = mask.bounds((tile, blocks.keys), T, S, **more)
    bias = arrays["key_bias"]
    sides = {"phi": dtypes[0], "psi": dtypes[0], "value": dtypes[1]}
    laid = (jnp.asarray(arrays[name], dtype) for name, dtype in sides.items())
    tensors = (
        *(side.swapaxes(1, 2) if tokens_first else side for side in laid),
        None if bias is None else jnp.asarray(bias, jnp.float32),
        (start, end),
        bounds,
    )
    static = dict(scale=scale, blocks=blocks, splits=splits, interpret=interpret)

    def program(*tensors):
        out, lse = hopper.forward(*tensors, **static, tokens_first=tokens_first)
        return (out.swapaxes(1, 2) if tokens_first else out), lse

    return jax.jit(program), tensors


def assert_equals_float64(
    mode, mask, dtypes, interpret, splits=1, S=512, heads=(2, 1), tokens_first=False
):
    """Returns the output and the log-sum-exp."""
    T, scale = 512 if interpret is None else 256, 0.7 * LOG2_E
    arrays = make(mode, mask, dtypes, T, S, heads)
    program, tensors = prepare(arrays, mode, dtypes, scale, splits, interpret, tokens_first)
    out, lse = program(*tensors)
    if interpret is None:
        text = program.lower(*tensors).compile().as_text()
        assert re.search(r'custom_call_target="mosaic_gpu', text)
    expected_out, expected_lse = expected(**arrays, scale=scale)
    assert str(out.dtype) == dtypes[1]
    assert lse.dtype == jnp.float32
    assert_close(out, expected_out, DTYPES[dtypes[1]].forward, "out")
    empty = expected_lse == -np.inf
    np.testing.assert_array_equal(np.asarray(lse) == -np.inf, empty)
    np.testing.assert_array_equal(np.asarray(out)[empty], 0)
    np.testing.assert_allclose(np.asarray(lse)[~empty], expected_lse[~empty], atol=2e-5)
    return out, lse


def interpreter():
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu.InterpretGPUParams()


INTERPRETED = [(mode, "windows per head", ("bfloat16", "bfloat16")) for mode in MODES]
INTERPRETED += [(mode, "none", ("float16", "float16")) for mode in MODES[::3]]
INTERPRETED += [
    (mode, mask, ("float16", "bfloat16"))
    for mode in ((64, 64, False), (192, 64, True))
    for mask in ("lengths", "causal", "from a key on", "nothing")
]
ON_A_GPU = [
    (mode, mask, dtypes)
    for mode in MODES
    for mask, dtypes in [(mask, ("bfloat16", "bfloat16")) for mask in MASKS]
    + [("none", ("float16", "bfloat16")), ("lengths", ("float16", "float16"))]
]


def case_id(value):
    return mode_id(value) if len(value) == 3 and isinstance(value[2], bool) else str(value)


@in_an_interpreter
@pytest.mark.parametrize(("mode", "mask", "dtypes"), INTERPRETED, ids=case_id)
def test_in_an_interpreter(mode, mask, dtypes):
    assert_equals_float64(mode, mask, dtypes, interpreter())


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "mask", "dtypes"), ON_A_GPU, ids=case_id)
def test_on_a_gpu(mode, mask, dtypes):
    if jax.devices()[0].compute_capability != "9.0":
        return  # another kernel's: test_pallas_contract.py
    assert_equals_float64(mode, mask, dtypes, None)


# Keys cut into parts that are merged afterwards; three parts of four key blocks are not alike.
SPLIT = [
    ((64, 64, False), "none", 3, 512),
    ((64, 64, True), "windows per head", 3, 512),
    ((192, 64, False), "nothing", 2, 512),
    ((192, 256, True), "lengths", 4, 512),
]


@in_an_interpreter
@pytest.mark.parametrize(("mode", "mask", "splits", "S"), SPLIT)
def test_splits_in_an_interpreter(mode, mask, splits, S):
    assert_equals_float64(mode, mask, ("float16", "bfloat16"), interpreter(), splits, S)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("mode", "mask", "splits", "S"),
    SPLIT + [((1024, 64, False), mask, 4, 4096) for mask in MASKS],
)
def test_splits_on_a_gpu(mode, mask, splits, S):
    if jax.devices()[0].compute_capability == "9.0":
        assert_equals_float64(mode, mask, ("float16", "bfloat16"), None, splits, S)


# Rows in the caller's order, [B, T, N, D]: mode, (N, K), mask, splits. Both ways for the output to
# leave, features that stay and features that stream.
TOKENS_FIRST = [
    ((64, 64, False), (1, 1), "none", 1),
    ((64, 64, False), (2, 2), "windows per head", 1),
    ((64, 64, True), (4, 2), "lengths", 2),
    ((64, 128, False), (2, 1), "causal", 1),
    ((128, 128, False), (2, 1), "none", 2),
    ((128, 128, True), (1, 1), "from a key on", 1),
    ((192, 64, False), (1, 1), "lengths", 1),
    ((192, 64, True), (2, 1), "windows per head", 2),
    ((192, 128, False), (3, 1), "none", 1),
]


def assert_layouts_agree(mode, heads, mask, splits, interpret):
    """To the last bit: the order of axes changes where numbers lie, and no sum."""
    S = 512 if mode[0] > 128 else 256  # two key blocks, one for each part
    settings = (mode, mask, ("bfloat16", "bfloat16"), interpret, splits, S, heads)
    out, lse = assert_equals_float64(*settings, tokens_first=True)
    usual_out, usual_lse = assert_equals_float64(*settings)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(usual_out))
    np.testing.assert_array_equal(np.asarray(lse), np.asarray(usual_lse))


@in_an_interpreter
@pytest.mark.parametrize(("mode", "heads", "mask", "splits"), TOKENS_FIRST)
def test_tokens_first_in_an_interpreter(mode, heads, mask, splits):
    assert_layouts_agree(mode, heads, mask, splits, interpreter())


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "heads", "mask", "splits"), TOKENS_FIRST)
def test_tokens_first_on_a_gpu(mode, heads, mask, splits):
    if jax.devices()[0].compute_capability == "9.0":
        assert_layouts_agree(mode, heads, mask, splits, None)


@with_mosaic
@pytest.mark.parametrize(("mode", "heads", "mask", "splits"), TOKENS_FIRST)
def test_tokens_first_lowers_for_a_gpu(mode, heads, mask, splits):
    """Mosaic takes the strided slices, as far as a machine without a GPU can check."""
    dtypes = ("bfloat16", "bfloat16")
    arrays = make(mode, mask, dtypes, 512, 512, heads)
    program, tensors = prepare(arrays, mode, dtypes, LOG2_E, splits, None, tokens_first=True)
    text = program.trace(*tensors).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


# Padding that may be NaN, the values too: mode, mask, splits.
RAW = [
    ((64, 64, False), "lengths", 1),
    ((64, 64, True), "nothing", 1),
    ((64, 128, False), "one length", 2),
    ((128, 128, True), "one length", 1),
    ((192, 64, False), "one length", 2),
    ((192, 64, True), "lengths", 1),
    ((192, 256, True), "one length", 1),
    ((64, 256, False), "one length", 1),
]


def assert_zeroes_values(mode, mask, splits, interpret):
    """The same bits, whatever masked places hold."""
    dtypes, T, S = ("bfloat16", "bfloat16"), 256, 512
    arrays = make(mode, mask, dtypes, T, S)
    end = np.broadcast_to(arrays["ranges"][1], (2, 2, T)).max((1, 2))  # one key head
    unseen = np.arange(S) >= end[:, None]  # [B, S]
    assert unseen.any(), f"{mask} leaves every key visible"
    outs = []
    for padding in (0, np.nan, np.inf):
        raw = dict(arrays)
        for name in ("psi", "value"):
            raw[name] = np.where(unseen[:, None, :, None], padding, arrays[name])
        if mode[2]:
            raw["key_bias"] = np.where(unseen[:, None], padding, arrays["key_bias"])
        program, tensors = prepare(raw, mode, dtypes, LOG2_E, splits, interpret, hides=True)
        outs.append([np.asarray(found) for found in program(*tensors)])
    for out in outs[1:]:
        np.testing.assert_array_equal(out[0], outs[0][0])
        np.testing.assert_array_equal(out[1], outs[0][1])
    expected_out, _ = expected(**arrays, scale=LOG2_E)
    assert_close(outs[0][0], expected_out, DTYPES["bfloat16"].forward, "out")


@in_an_interpreter
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # its NumPy's
@pytest.mark.parametrize(("mode", "mask", "splits"), RAW)
def test_zeroes_values_in_an_interpreter(mode, mask, splits):
    assert_zeroes_values(mode, mask, splits, interpreter())


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "mask", "splits"), RAW)
def test_zeroes_values_on_a_gpu(mode, mask, splits):
    if jax.devices()[0].compute_capability == "9.0":
        assert_zeroes_values(mode, mask, splits, None)


@with_mosaic
@pytest.mark.parametrize(("mode", "mask", "splits"), RAW)
def test_hiding_values_lowers_for_a_gpu(mode, mask, splits):
    dtypes = ("bfloat16", "bfloat16")
    arrays = make(mode, mask, dtypes, 512, 512)
    program, tensors = prepare(arrays, mode, dtypes, LOG2_E, splits, None, hides=True)
    text = program.trace(*tensors).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@with_mosaic
@pytest.mark.parametrize(
    ("shape", "key_blocks", "expected"),
    [
        ((8, 1, 4096, 768), 16, 1),  # as many programs as there is room for, their features too
        ((8, 1, 4096, 3072), 32, 4),  # 132 blocks of 128 queries: 99 MiB of features
        ((1, 1, 256, 64), 64, 8),  # two programs: at most 8 parts
        ((1, 1, 256, 64), 8, 2),  # at least 4 key blocks to a part
        ((1, 1, 256, 64), 3, 1),
    ],
)
def test_picks_splits(shape, key_blocks, expected):
    from regard.pool.kernels.hopper import pick, pick_splits

    assert pick_splits(pick(shape[-1], 64, False), shape, key_blocks) == expected


@with_mosaic
def test_every_kernel_is_tested():
    from regard.pool.kernels.hopper import pick

    widths, value_widths = (64, 128, 192, 1024), (64, 128, 192, 256)
    picked = {pick(R, V, biased) for R in widths for V in value_widths for biased in (False, True)}
    assert picked == {pick(*mode) for mode in MODES}


# ---------------------------------------------------------------------------------------------
# How FeaturePass calls it: padding, ranges, bias and scale, in sizes that fit no block.


def pooled_by_feature_pass(monkeypatch, operands, mask, axes, scale):
    """FeaturePass on Hopper, its kernel interpreted."""
    from regard.pool.kernels import hopper

    interpreted = functools.partial(hopper.forward, interpret=interpreter())
    monkeypatch.setattr(hopper, "forward", interpreted)
    wide = FeaturePass(axes, jnp.dtype("bfloat16"), scale, 0.0, "hopper", None)
    return wide.forward(operands, resolve(mask, None, axes), None, None)


LENGTHS = Mask.lengths(np.resize([0, 40, 77, 13], (2, 4, 150)).astype(np.int32))


@in_an_interpreter
@pytest.mark.parametrize(
    ("mask", "biased"),
    [
        (None, False),
        (None, True),
        (Mask.window(9, 3), True),
        (LENGTHS, False),
    ],
    ids=["none", "bias", "window and bias", "lengths"],
)
def test_any_size_through_feature_pass(mask, biased, monkeypatch):
    B, T, S, N, K, R, V, scale = 2, 150, 77, 4, 2, 13, 5, 0.3
    axes = Axes(4, B, T, S, N, K, R, R, V)
    rng = np.random.default_rng(0)
    phi, psi, value = (
        rounded(rng.standard_normal(shape), "bfloat16")
        for shape in ((B, N, T, R), (B, K, S, R), (B, K, S, V))
    )
    bias = rounded(rng.standard_normal((B, K, S)), "float32") if biased else None
    out, lse = pooled_by_feature_pass(
        monkeypatch,
        FeatureOperands(
            None,
            *(jnp.asarray(side, jnp.bfloat16) for side in (phi, psi)),
            None if bias is None else jnp.asarray(bias, jnp.float32),
            jnp.asarray(value, jnp.bfloat16),
        ),
        mask,
        axes,
        scale,
    )
    allowed = resolve(mask, None, axes)
    ranges = tuple(None if b is None else np.asarray(b) for b in (allowed.start, allowed.end))
    over_scale = None if bias is None else bias / scale  # the bias is of the scaled scores
    expected_out, expected_lse = expected(phi, psi, value, over_scale, ranges, scale * LOG2_E)
    assert_close(out, expected_out, DTYPES["bfloat16"].forward, "out")
    seen = expected_lse > -np.inf
    np.testing.assert_array_equal(np.asarray(lse) > -np.inf, seen)
    np.testing.assert_array_equal(np.asarray(out)[~seen], 0)
    np.testing.assert_allclose(np.asarray(lse)[seen], expected_lse[seen], atol=2e-5)


@in_an_interpreter
@pytest.mark.parametrize("offset", [0.0, 4.0])
def test_a_gaussian_takes_raw_queries(offset, monkeypatch):
    """Those of the lift, which it does not need, are NaN here."""
    B, T, S, N, K, D, V = 2, 70, 130, 4, 2, 72, 96
    axes = Axes(4, B, T, S, N, K, D, D, V)
    rng = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(rng.standard_normal(shape) + shift, jnp.bfloat16)
        for shape, shift in (((B, N, T, D), offset), ((B, K, S, D), offset), ((B, K, S, V), 0.0))
    )
    with on_device(HOPPER):
        lift = regard.Gaussian(4.0).lift(query, key)
    nowhere = jnp.full_like(lift.query, jnp.nan)
    operands = FeatureOperands(None, nowhere, lift.key, lift.key_bias, value, lift.raw_queries)
    out, _ = pooled_by_feature_pass(monkeypatch, operands, None, axes, 1.0)
    sides = (np.asarray(side.astype(jnp.float32), np.float64) for side in (query, key, value))
    query, key, value = sides
    center = query[0, 0, 0] - np.asarray(lift.query[0, 0, 0])
    assert np.abs(center).max() < 1e-6 if offset == 0.0 else np.abs(center).min() > 3.5
    key = key.repeat(N // K, axis=1)
    scores = -((query[:, :, :, None] - key[:, :, None]) ** 2).sum(-1) / 32.0
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected_out = weights @ value.repeat(N // K, axis=1) / weights.sum(-1, keepdims=True)
    assert_close(out, expected_out, DTYPES["bfloat16"].forward, "out")


@with_mosaic
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="counts what a CPU's compiler makes")
def test_nothing_is_copied_around_the_kernel(monkeypatch):
    """From the caller's arrays to the kernel and back, compiled around an opaque call."""
    from regard.pool.kernels import hopper

    B, T, N, D = 2, 256, 4, 64

    def opaque(phi, psi, value, *others, tokens_first, **static):
        results = (
            jax.ShapeDtypeStruct(phi.shape, value.dtype),
            jax.ShapeDtypeStruct((B, N, T), jnp.float32),
        )
        return jax.pure_callback(lambda *arrays: None, results, phi, psi, value)

    monkeypatch.setattr(hopper, "forward", opaque)
    axes = Axes(4, B, T, T, N, N, D, D, D)
    wide = FeaturePass(axes, jnp.dtype("bfloat16"), 1.0, 0.0, "hopper", None)

    def pool(*callers):
        query, key, value = (axes.canonical(array) for array in callers)
        operands = FeatureOperands(None, query, key, None, value)
        return axes.callers(wide.forward(operands, resolve(None, None, axes), None, None)[0])

    x = jax.ShapeDtypeStruct((B, T, N, D), jnp.bfloat16)
    text = jax.jit(pool).lower(x, x, x).compile().as_text()
    entry = text[text.index("ENTRY ") :]
    made = re.findall(r" = bf16\[[\d,]+\]\S* (?:fusion|copy|transpose)\(", entry)
    assert made == [], entry


@in_an_interpreter
def test_sines_are_float16_beside_values_of_bfloat16(monkeypatch):
    """Features as wide as the values, of another dtype: the output cannot take their place."""
    B, T, S, N, K, h, V, terms = 1, 40, 50, 2, 1, 6, 128, 8  # width 2Rh = 96
    axes = Axes(4, B, T, S, N, K, h, h, V)
    rng = np.random.default_rng(0)
    x, y, value, amplitude = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((B, N, T, h), (B, K, S, h), (B, K, S, V), (B, N, terms, h))
    )
    frequency, shift = (jnp.full((B, K, 1, h), one, jnp.float32) for one in (0.4, 0.1))
    expansion = SineExpansion(frequency, shift, amplitude * 0.3)
    value = value.astype(jnp.bfloat16)
    operands = FeatureOperands(expansion, x, y, None, value)
    out, _ = pooled_by_feature_pass(monkeypatch, operands, None, axes, 1.0)
    assert out.dtype == jnp.bfloat16
    features = (expansion.query(x), expansion.key(y), value)
    phi, psi, value = (np.asarray(side.astype(jnp.float32), np.float64) for side in features)
    expected_out, _ = expected(phi, psi, value, None, (None, None), LOG2_E)
    assert_close(out, expected_out, DTYPES["bfloat16"].forward, "out")


# ---------------------------------------------------------------------------------------------
# From the front door to the output: without a gradient, only values are zeroed.

PADDED = {
    "lengths": dict(valid_lens=np.array([150, 0], np.int32)),
    "lengths per query": dict(valid_lens=np.resize([0, 40, 0, 200, 13], (2, 150)).astype(np.int32)),
    "nothing": dict(valid_lens=np.array([0, 0], np.int32)),
    "window": dict(mask=Mask.window(9, -2, align="start")),
    "lengths and causal": dict(mask=Mask.causal("start"), valid_lens=np.array([99, 1], np.int32)),
}


@in_an_interpreter
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # by its NumPy
@pytest.mark.parametrize("name", PADDED)
def test_nan_in_the_padding_changes_no_bit(name, monkeypatch):
    from regard.pool.kernels import hopper

    masks, B, T, S, N, K, D = PADDED[name], 2, 150, 280, 4, 2, 64
    rng = np.random.default_rng(0)
    clean = [
        rounded(rng.standard_normal(shape), "bfloat16").astype(np.float32)
        for shape in ((B, T, N, D), (B, S, K, D), (B, S, K, D))
    ]
    ones = np.ones((B, T, N, 1), np.float32), np.ones((B, S, N, 1), np.float32)
    weights = np.asarray(regard.weights(*ones, **masks))  # [B, N, T, S]: the pairs that take part
    empty, unseen = (weights == 0).all(3).swapaxes(1, 2), (weights == 0).all((1, 2))
    assert unseen.any()
    dirty = [array.copy() for array in clean]
    for array, where in zip(dirty, (empty, unseen, unseen), strict=True):
        array[where] = np.resize([np.nan, np.inf, -np.inf], array[where].shape)

    forward, asked = hopper.forward, []

    def interpreted(*arrays, **static):
        asked.append(static)
        return forward(*arrays, **static, interpret=interpreter())

    monkeypatch.setattr(hopper, "forward", interpreted)
    monkeypatch.setattr(placement, "_described", lambda _: Device("gpu", (9, 0)))

    def pool(tensors):
        arrays = (jnp.asarray(array, jnp.bfloat16) for array in tensors)
        out = regard.attend(*arrays, **masks, implementation="pallas")
        return np.asarray(out.astype(jnp.float32))

    _pool.clear_cache()
    out, same = pool(clean), pool(dirty)
    _pool.clear_cache()
    assert asked, "another kernel ran"
    np.testing.assert_array_equal(same, out)
    np.testing.assert_array_equal(out[empty], 0)
    expected_out = regard.attend(*clean, **masks, implementation="reference")
    assert_close(out, np.asarray(expected_out), DTYPES["bfloat16"].forward * 2, "out")
