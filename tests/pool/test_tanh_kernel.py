"""The exact additive kernels against float64 NumPy, in interpret mode, and lowered for a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from absent_gpu import lowered
from regard.pool.kernels.tanh_backward import d_projected
from regard.pool.kernels.tanh_operands import BOUND, SHIFT, TWO_LOG2_E, TanhArrays, tanh_operands
from regard.pool.kernels.tanh_sums import SumBlocks
from regard.pool.kernels.tanh_tile import Float32, TanhScore

# JAX 0.11 says so of every kernel that it lowers through Triton.
pytestmark = [
    pytest.mark.sampled(2),
    pytest.mark.usefixtures("quick_compilation"),
]

SMALL = SumBlocks(kept=16, streamed=2, units=2)

prepared = jax.jit(tanh_operands, static_argnames=("blocks", "group"))
pulled = jax.jit(d_projected, static_argnames=("keys_first", "blocks", "interpret"))


@functools.partial(jax.jit, static_argnames=("blocks", "group", "flipped", "interpret"))
def score_tiles(parts: TanhArrays, *, blocks, group=3, flipped=False, interpret=True):
    """All scores [B, N, T, S], tile by tile, padding included; flipped [B, N, S, T]."""
    lead, counts = parts.query.shape[:2], (parts.query.shape[2], parts.key.shape[2])
    shape = (*lead, *(count * size for count, size in zip(counts, blocks, strict=True)))
    shape = shape[:2] + shape[:1:-1] if flipped else shape
    score = TanhScore(group, interpret)

    def kernel(*refs):
        rows, columns = (pl.ds(pl.program_id(i) * size, size) for i, size in enumerate(blocks))
        named = dict(zip(("query", "key", "terms"), refs, strict=False))
        tile = score.tile(named, rows, columns, flipped)
        where = (columns, rows) if flipped else (rows, columns)
        plt.store(refs[-1].at[where], tile)

    def whole(array):
        def index(i, j, z):
            head = z % lead[1] * array.shape[1] // lead[1]  # a group of heads shares its keys
            return (z // lead[1], head) + (0,) * (len(array.shape) - 2)

        return pl.BlockSpec((None, None, *array.shape[2:]), index)

    out = jax.ShapeDtypeStruct(shape, jnp.float32)
    return pl.pallas_call(
        kernel,
        grid=(*counts, lead[0] * lead[1]),
        in_specs=[whole(part) for part in parts],
        out_specs=whole(out),
        out_shape=out,
        compiler_params=plt.CompilerParams(num_warps=4 * blocks[0] // 64 or 1, num_stages=2),
        interpret=interpret,
    )(*parts)


def draw(*shape, seed=0, scale=1.0):
    return np.random.default_rng((seed, *shape)).normal(size=shape, scale=scale)


def single(*arrays):
    return [jnp.asarray(array, jnp.float32) for array in arrays]


def error(found, expected):
    found, expected = np.asarray(found, np.float64), np.asarray(expected)
    assert found.shape == expected.shape
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def expected_scores(x, y, w):
    """x [B, N, T, h], y [B, N, S, h], w [N, h]."""
    return np.einsum("bntsh,nh->bnts", np.tanh(x[:, :, :, None] + y[:, :, None]), w)


def expected_pull(g, x, y, w):
    tanh = np.tanh(x[:, :, None] + y[:, None])  # [E, q, S, h]
    slope = (1.0 - tanh * tanh) * w[:, None, None]
    d_x, d_y = np.einsum("eqs,eqsh->eqh", g, slope), np.einsum("eqs,eqsh->esh", g, slope)
    return d_x, d_y, np.einsum("eqs,eqsh->eh", g, tanh)


def in_reach(parts):
    return np.asarray(parts.terms[..., parts.query.shape[3] + 2] > 0.0)


@pytest.mark.parametrize("group", [1, 2, 3, 4])
@pytest.mark.parametrize(("scale", "near"), [(1.5, True), (40.0, False)])
def test_scores(group, scale, near):
    """Odd sizes, heads that share keys, a weight of zero and a large one; far data too."""
    x, y = draw(2, 2, 19, 11, scale=scale), draw(2, 1, 37, 11, scale=scale)
    w = draw(2, 11)
    w[0, 3], w[1, 5] = 0.0, 300.0
    parts = prepared(*single(x, y, w), blocks=(16, 16), group=group)
    np.testing.assert_array_equal(in_reach(parts), near)
    found = score_tiles(parts, blocks=(16, 16), group=group)[:, :, :19, :37]
    expected = expected_scores(x, np.repeat(y, 2, axis=1), w)
    for head in range(2):
        assert error(found[:, head], expected[:, head]) < 1e-5


def test_scores_flipped():
    x, y, w = draw(1, 1, 16, 5), draw(1, 1, 32, 5), draw(1, 5)
    parts = prepared(*single(x, y, w), blocks=(16, 32))
    found = score_tiles(parts, blocks=(16, 32), flipped=True)
    assert error(found, np.swapaxes(expected_scores(x, y, w), 2, 3)) < 1e-5


@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_reach_is_safe(group):
    """Just inside the reach, all units saturated or none: products neither overflow nor vanish."""
    x, y = np.zeros((1, 1, 16, 8)), np.zeros((1, 1, 16, 8))
    w = np.ones((1, 8))
    w[0, 1::2] = -0.25  # two powers of two
    reach = (BOUND[group] + SHIFT[group] - 1 - 2.01) / TWO_LOG2_E
    x[..., :8, :], y[..., ::2, :] = reach, -reach / 2
    parts = prepared(*single(x, y, w), blocks=(16, 16), group=group)
    assert in_reach(parts).all()
    found = score_tiles(parts, blocks=(16, 16), group=group)
    np.testing.assert_allclose(found, expected_scores(x, y, w), atol=1e-5)
    outside = prepared(*single(1.01 * x, y, w), blocks=(16, 16), group=group)
    assert not in_reach(outside).any()


def test_one_example_out_of_reach():
    """Far data in one example leave the other on the fast path; NaN is never in reach."""
    x, y, w = draw(3, 1, 16, 8), draw(3, 1, 16, 8), draw(1, 8)
    x[1, 0, 3, 2], x[2, 0, 0, 0] = 90.0, np.nan
    parts = prepared(*single(x, y, w), blocks=(16, 16))
    np.testing.assert_array_equal(in_reach(parts)[:, 0], [True, False, False])
    found = score_tiles(parts, blocks=(16, 16))
    assert error(found[:2], expected_scores(x, y, w)[:2]) < 1e-5


@pytest.mark.parametrize("scale", [1.0, 25.0])
@pytest.mark.parametrize("keys_first", [False, True])
def test_pull(scale, keys_first):
    x, y, w = draw(2, 37, 5, scale=scale), draw(2, 21, 5, scale=scale), draw(2, 5)
    g = draw(2, 37, 21)
    expected = expected_pull(g, x, y, w)
    g, x, y, w = single(g, x, y, w)
    g = jnp.swapaxes(g, 1, 2) if keys_first else g
    found = pulled(g, x, y, w, keys_first=keys_first, blocks=SMALL, interpret=True)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == jnp.float32
        assert error(one, other) < 1e-5


def test_pull_of_bfloat16_in_whole_blocks():
    x, y, w = draw(1, 128, 8), draw(1, 128, 8), draw(8)
    g = jnp.asarray(draw(1, 128, 128), jnp.bfloat16)
    expected = expected_pull(np.asarray(g, np.float64), x, y, w[None])
    found = pulled(g, *single(x, y, w), interpret=True)
    for one, other in zip(found, expected, strict=True):
        assert error(one, other) < 1e-5


def test_pull_visits_only_what_it_must():
    """Outside of the visits g is not read: NaN there changes nothing."""
    x, y, w = draw(2, 24, 3), draw(2, 40, 3), draw(2, 3)
    g = draw(2, 24, 40)
    visits = np.array([[[0, 20], [12, 40], [0, 0]], [[36, 40], [0, 4], [4, 8]]], np.int32)
    key = np.arange(40)
    seen = (visits[:, :, :1] <= key) & (key < visits[:, :, 1:])  # [E, query blocks, S]
    g = np.where(np.repeat(seen, 8, axis=1), g, 0.0)
    expected = expected_pull(g, x, y, w)
    blocks = SumBlocks(kept=8, streamed=2, units=1)
    # Blocks of 8 keys by 8 queries that no visit touches, in both orders of the loop.
    touched = np.repeat(np.repeat(seen.reshape(2, 3, 5, 8).any(3), 8, axis=1), 8, axis=2)
    hull = np.maximum.accumulate(touched, 1) & np.maximum.accumulate(touched[:, ::-1], 1)[:, ::-1]
    poisoned = np.where(touched | hull, g, np.nan)
    assert np.isnan(poisoned).any()
    pull = functools.partial(pulled, visits=jnp.asarray(visits), blocks=blocks, interpret=True)
    found = pull(*single(poisoned, x, y, w))
    for one, other in zip(found[:2], expected[:2], strict=True):
        assert error(one, other) < 1e-5
    assert error(pull(*single(g, x, y, w))[2], expected[2]) < 1e-5


@pytest.mark.parametrize(("q", "S"), [(0, 3), (3, 0)])
def test_pull_of_nothing(q, S):
    found = pulled(*single(draw(2, q, S), draw(2, q, 4), draw(2, S, 4), draw(4)))
    for array, shape in zip(found, [(2, q, 4), (2, S, 4), (2, 4)], strict=True):
        np.testing.assert_array_equal(array, np.zeros(shape, np.float32))


def absent(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("hidden", [64, 256])
@pytest.mark.parametrize("blocks", [(64, 64), (64, 128), (128, 64)])
def test_scores_lower_for_a_gpu(blocks, hidden):
    def scores(x, y, w):
        parts = tanh_operands(x, y, w, blocks=blocks)
        return score_tiles(parts, blocks=blocks, interpret=False)

    arrays = absent(1, 2, 256, hidden), absent(1, 1, 256, hidden), absent(2, hidden)
    assert "xla.gpu.triton" in lowered(scores, *arrays)


@pytest.mark.parametrize("group", [1, 2, 4])
def test_groups_lower_for_a_gpu(group):
    def scores(x, y, w):
        parts = tanh_operands(x, y, w, blocks=(64, 64), group=group)
        return score_tiles(parts, blocks=(64, 64), group=group, flipped=True, interpret=False)

    arrays = absent(1, 2, 100, 24), absent(1, 1, 77, 24), absent(2, 24)
    assert "xla.gpu.triton" in lowered(scores, *arrays)


@pytest.mark.parametrize("hidden", [64, 256])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_pull_lowers_for_a_gpu(hidden, dtype):
    g = absent(2, 256, 384, dtype=dtype)
    arrays = g, absent(2, 256, hidden), absent(2, 384, hidden), absent(hidden)
    assert lowered(d_projected, *arrays).count("xla.gpu.triton") == 2


@pytest.mark.parametrize("x64", [True, False])
def test_numbers_in_the_code_reach_instructions_as_float32(x64):
    """A float64 1.0 would fill two registers, and the instruction read one of them: 0."""
    unit = Float32(interpret=False)

    def all_of_them(a):
        return unit.fma(a, a, 1.0), unit.take(a, 2.0, 1.0), unit.reciprocal(a), unit.exp2(a)

    with jax.enable_x64(x64):
        traced = jax.make_jaxpr(all_of_them)(jnp.ones(8, jnp.float32))
    instructions = [e for e in traced.eqns if "inline_asm" in e.primitive.name]
    assert len(instructions) == 4
    kinds = {v.aval.dtype for e in instructions for v in (*e.invars, *e.outvars)}
    assert kinds == {jnp.dtype("float32")}
