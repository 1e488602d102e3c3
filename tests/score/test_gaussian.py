"""What is special about the Gaussian: the centered lift, its float32 norms, the constant per
query.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
import regard
from absent_gpu import HOPPER
from cases import BACKENDS
from problem import assert_close, rounded
from regard.placement import on_device
from regard.score.gaussian import SAMPLE

pytestmark = pytest.mark.sampled(2)

B, T, S, D, V = 2, 29, 41, 4, 3
LENS = np.array([S - 7, 13], np.int32)


def drawn(offset=0.0, dtype="float32", width=1.3, seed=0):
    rng = np.random.default_rng(seed)
    query = rounded(rng.standard_normal((B, T, D)) + offset, dtype)
    key = rounded(rng.standard_normal((B, S, D)) + offset, dtype)
    value = rounded(rng.standard_normal((B, S, V)), dtype)
    return query, key, value, oracle.Gaussian({"width": np.float64(width)})


def run(backend, query, key, value, normalize=None, dtype="float32", width=1.3, weights=False):
    chosen = BACKENDS[backend]
    function = regard.weights if weights else regard.attend
    arrays = [jnp.asarray(x, dtype) for x in ((query, key) if weights else (query, key, value))]
    with chosen.tiling():
        return jax.jit(
            partial(
                function,
                score=regard.Gaussian(width),
                normalize=normalize or regard.Softmax(),
                implementation=chosen.implementation,
            )
        )(*arrays, valid_lens=jnp.asarray(LENS))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_far_from_the_origin(offset, backend):
    """Offset 1000: without the center float32 loses the weights (off by 0.6); with it, 2e-6 at
    most.
    """
    query, key, value, score = drawn(offset)
    may = oracle.allowed((B, T, S), valid_lens=LENS)
    expected = oracle.attend(query, key, value, score=score, may=may)
    got = run(backend, query, key, value, weights=True)
    np.testing.assert_array_less(np.abs(np.asarray(got) - expected.weights).max(), 2e-6)
    assert_close(run(backend, query, key, value), expected.out, 2e-6, "out")


@pytest.mark.parametrize("backend", BACKENDS)
def test_some_of_many_keys_say_where_all_are(backend):
    """Unmasked, and so many keys that the center is the mean of a third of them; at offset 1000."""
    rng, many = np.random.default_rng(1), 250
    assert many // SAMPLE == 3
    query, key, value = (
        rounded(rng.standard_normal(shape) + 1000.0, "float32")
        for shape in ((B, T, D), (B, many, D), (B, many, V))
    )
    value -= 1000.0
    chosen = BACKENDS[backend]
    pool = partial(regard.attend, score=regard.Gaussian(1.3), implementation=chosen.implementation)
    with chosen.tiling():
        got = jax.jit(pool)(*(jnp.asarray(x, "float32") for x in (query, key, value)))
    score = oracle.Gaussian({"width": np.float64(1.3)})
    may = np.ones((B, T, many), bool)
    expected = oracle.attend(query, key, value, score=score, may=may).out
    assert_close(got, expected, 2e-6, "out")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_center_is_the_valid_keys_own(backend):
    """Padding far away must not move the center: the valid keys at 1000, the padding at -1e6."""
    query, key, value, score = drawn(1000.0)
    for b, length in enumerate(LENS):
        key[b, length:] = -1e6
    may = oracle.allowed((B, T, S), valid_lens=LENS)
    expected = oracle.attend(query, key, value, score=score, may=may)
    assert_close(run(backend, query, key, value), expected.out, 2e-6, "out")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_keeps_its_norms_in_float32(dtype, backend):
    """The definition is exact on its inputs. A lift may round the centered key once, k - c, and is
    then a Gaussian about a key moved by that much; rounded norms, which no key has, are far worse.
    """
    query, key, value, score = drawn(4.0, dtype, width=0.5)
    may = oracle.allowed((B, T, S), valid_lens=LENS)
    expected = oracle.attend(query, key, value, score=score, may=may).weights
    got = run(backend, query, key, value, dtype=dtype, width=0.5, weights=True)
    assert got.dtype == jnp.float32
    off = np.abs(np.asarray(got) - expected).max()
    if backend == "reference":
        assert off <= 1e-5
        return
    center = np.stack([key[b, :length].mean(axis=0) for b, length in enumerate(LENS)])[:, None]
    moved = center + rounded(key - center, dtype)
    by_one_rounding = oracle.attend(query, moved, value, score=score, may=may).weights
    assert off <= 2 * np.abs(by_one_rounding - expected).max() + 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_keys_about_the_origin_are_not_rounded(dtype, backend):
    """There the center is 0, and with 1 / width² a power of two no number needs more digits."""
    query, key, value, score = drawn(0.0, dtype, width=0.5)
    may = oracle.allowed((B, T, S), valid_lens=LENS)
    expected = oracle.attend(query, key, value, score=score, may=may).weights
    got = run(backend, query, key, value, dtype=dtype, width=0.5, weights=True)
    assert np.abs(np.asarray(got) - expected).max() <= 1e-5


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
@pytest.mark.parametrize(("offset", "width"), [(0.0, 2.0**-8), (3.0, 2.0**-8), (0.0, 2.0**8)])
def test_a_narrow_range_of_numbers_does_not_limit_the_width(offset, width, backend):
    """1 / width² is 65,536, past float16's largest number, or so small that it has few digits."""
    query, key, value, score = drawn(offset, "float16", width=width)
    key[:, 0], value = query[:, 0], 100.0 * value  # somebody is near somebody
    may = oracle.allowed((B, T, S), valid_lens=LENS)
    expected = oracle.attend(query, key, value, score=score, may=may)
    got = run(backend, query, key, value, dtype="float16", width=width)
    assert_close(got, expected.out, 2e-3, "out")


def test_keys_may_be_as_large_as_float32_has_them():
    """Sums of them, and no squares, say where they are."""
    query, key, value, score = drawn(width=1e16)
    query, key = (rounded(1e20 + 1e15 * side, "float32") for side in (query, key))
    may = oracle.allowed((B, T, S), valid_lens=LENS)
    expected = oracle.attend(query, key, value, score=score, may=may)
    assert_close(run("blockwise", query, key, value, width=1e16), expected.out, 2e-5, "out")


@pytest.mark.parametrize("offset", [0.0, 3.0, -50.0])
def test_raw_queries_have_the_same_scores(offset):
    """Also where a coordinate of the keys is about 0 and the others are not."""
    offsets = np.array([offset, 0.0, offset, -offset])
    query, key, _value, _score = drawn(offsets, "float64")
    query, key = jnp.asarray(query), jnp.asarray(key)
    visible = np.arange(S) < LENS[:, None]
    with on_device(HOPPER):  # a CPU has no use for them
        lift = regard.Gaussian(1.3).lift(query, key, visible=jnp.asarray(visible))
    plain = lift.raw_queries
    assert plain.query is query
    got = jnp.einsum("btd,bsd->bts", query, lift.key) + plain.key_bias[:, None]
    difference = np.asarray(got + lift.query_bias[..., None] - lift.scores())
    assert np.abs(np.where(visible[:, None], difference, 0)).max() <= 1e-10


@pytest.mark.parametrize("width", [0.5, jnp.inf])
def test_the_widths_gradient_is_that_of_the_definition(width):
    """Keys at an infinite distance in float32, on both sides, have weight 0 and no gradient."""
    query, key, value, _score = drawn()
    key[:, 5], key[:, 6] = 3e20, -3e20

    def total(width, implementation, key):
        options = dict(score=regard.Gaussian(width), implementation=implementation)
        return jnp.sin(regard.attend(query, key, value, **options)).sum()

    key = key if width < 1 else np.clip(key, -10, 10)
    gradients = [jax.grad(total)(width, name, key) for name in ("blockwise", "reference")]
    np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_kernel_of_exp_is_softmax(backend):
    """Nadaraya-Watson with a Gaussian kernel: exp(a) / sum exp(a), the constant per query
    included.
    """
    query, key, value, score = drawn(3.0)
    kernel = run(backend, query, key, value, regard.Kernel(jnp.exp))
    softmax = run(backend, query, key, value, regard.Softmax())
    assert_close(kernel, softmax, 4e-6, "out")
    may = oracle.allowed((B, T, S), valid_lens=LENS)
    regime = oracle.Kernel(np.exp, np.exp)
    assert_close(
        kernel,
        oracle.attend(query, key, value, score=score, may=may, regime=regime).out,
        2e-6,
        "out",
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_cone_of_exp_is_the_gaussian_itself(backend):
    """Unnormalized weights see the constant per query that softmax cannot: exp(-|q-k|^2 / 2
    width^2), no less.
    """
    query, key, value, _score = drawn(3.0)
    got = run(backend, query, key, value, regard.Cone(jnp.exp), weights=True)
    squares = np.sum((query[:, :, None] - key[:, None]) ** 2, axis=-1)
    visible = np.arange(S) < LENS[:, None, None]
    expected = np.where(visible, np.exp(-squares / (2 * 1.3**2)), 0.0)
    assert_close(got, expected, 2e-6, "weights")
    out = run(backend, query, key, value, regard.Cone(jnp.exp))
    assert_close(out, np.einsum("bts,bsv->btv", expected, value), 2e-6, "out")


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_width_is_another_answer(backend):
    """Negative control: a width off by a tenth must show."""
    query, key, value, _score = drawn()
    right, wrong = (run(backend, query, key, value, width=width) for width in (1.3, 1.43))
    assert np.abs(np.asarray(right) - np.asarray(wrong)).max() > 1e-3
