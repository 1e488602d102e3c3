"""The kernels of summarize and attention_map, interpreted, against the tiles in plain XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regard
from cases import interpreted_kernels
from regard.pool.kernels.block_shapes import Blocks
from regard.score.additive import lift_anywhere

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.sampled(3)]

SMALL = Blocks(32, 16, 16, 4, 1)
HEADS = np.linspace(-1.0, 1.0, 4, dtype=np.float32)


def rows(T=37, S=45, N=4, K=2, D=8, dtype="float32"):
    rng = np.random.default_rng(T + S)
    made = (rng.standard_normal((2, *shape)) for shape in ((T, N, D), (S, K, D)))
    return tuple(jnp.asarray(array, dtype) for array in made)


def additive():
    rng = np.random.default_rng(3)
    kernels = (jnp.asarray(0.3 * rng.standard_normal((8, 16)), jnp.float32) for _ in range(2))
    return regard.Additive(*kernels, jnp.asarray(rng.standard_normal(16), jnp.float32))


def lens(T=37, S=45):
    found = np.random.default_rng(1).integers(0, S + 1, (2, T))
    found[:, 3] = 0
    return jnp.asarray(found, jnp.int32)


def bias():
    found = np.random.default_rng(2).standard_normal((4, 37, 45)).astype(np.float32)
    found[:, :, ::5] = -np.inf
    return jnp.asarray(found)


CALLS = {
    "all keys": {},
    "causal": dict(mask=regard.Mask.causal()),
    "causal window": dict(mask=regard.Mask.causal() & regard.Mask.window(9, 0)),
    "lengths per example": dict(valid_lens=jnp.array([45, 11], jnp.int32)),
    "lengths per query": dict(valid_lens=lens()),
    "a table": dict(mask=jnp.asarray(np.random.default_rng(4).random((2, 1, 37, 45)) < 0.5)),
    "keys taken": dict(mask=jnp.asarray(np.arange(45) % 3 > 0)),
    "segments": dict(
        mask=regard.Mask.segments(
            jnp.arange(37, dtype=jnp.int32) // 10, jnp.arange(45, dtype=jnp.int32) // 12
        )
    ),
    "bias of minus infinity": dict(bias=bias()),
    "soft cap": dict(softcap=1.5, valid_lens=lens()),
    "sink": dict(sink=jnp.asarray(HEADS), valid_lens=lens()),
    "gaussian": dict(score=regard.Gaussian(1.3), valid_lens=lens()),
    "gaussian and sink": dict(score=regard.Gaussian(1.3), sink=jnp.asarray(HEADS)),
    "gaussian per head": dict(score=regard.Gaussian(jnp.linspace(0.8, 2.0, 4, dtype=jnp.float32))),
    "bilinear": dict(
        score=regard.Bilinear(jnp.asarray(np.random.default_rng(5).random((8, 8)), jnp.float32)),
        mask=regard.Mask.causal(),
    ),
    "additive": dict(score=additive(), valid_lens=lens()),
    "by distance": dict(
        score=regard.Dot() + regard.RelativeBias(jnp.linspace(-2.0, 2.0, 31, dtype=jnp.float32)),
        mask=regard.Mask.causal(),
    ),
    "alibi": dict(score=regard.Dot() + regard.Alibi(), valid_lens=lens()),
    "rotary": dict(score=regard.Rotary(regard.Dot()), sink=jnp.asarray(HEADS)),
    "two-sided alibi": dict(
        score=regard.Dot() + regard.Alibi(jnp.asarray(HEADS), two_sided=True), valid_lens=lens()
    ),
}


def both(function, *arrays, **call):
    """By kernels, and in plain XLA; and whether the kernels did run."""
    with interpreted_kernels(SMALL):
        program = str(jax.make_jaxpr(lambda *x: function(*x, **call))(*arrays))
        assert "regard_look_keys" in program or "regard_look_picture" in program
        found = function(*arrays, **call)
    with lift_anywhere():
        return found, function(*arrays, **call)


def assert_same_summary(found, expected, tolerance):
    for name in ("entropy", "max_weight", "key_total"):
        got, wanted = (np.asarray(getattr(one, name)) for one in (found, expected))
        np.testing.assert_allclose(got, wanted, tolerance, tolerance, err_msg=name)
    np.testing.assert_array_equal(found.argmax, expected.argmax)


@pytest.mark.parametrize("name", CALLS)
def test_a_summary(name):
    found, expected = both(regard.summarize, *rows(), **CALLS[name])
    assert_same_summary(found, expected, 2e-5)


@pytest.mark.parametrize("resolution", [(512, 512), (7, 11), (1, 45), (37, 1)])
@pytest.mark.parametrize("name", ["all keys", "causal window", "sink", "additive"])
def test_a_map(name, resolution):
    call = dict(CALLS[name], resolution=resolution)
    found, expected = both(regard.attention_map, *rows(), **call)
    np.testing.assert_allclose(found, expected, 2e-5, 2e-6)


@pytest.mark.parametrize("name", CALLS)
def test_a_map_under_every_mask(name):
    found, expected = both(regard.attention_map, *rows(), **CALLS[name], resolution=(9, 20))
    np.testing.assert_allclose(found, expected, 2e-5, 2e-6)


def on_cpu(tree):
    cpu = jax.devices("cpu")[0]
    return jax.tree.map(lambda x: jax.device_put(x, cpu) if isinstance(x, jax.Array) else x, tree)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in CALLS if name != "additive"])
def test_on_a_gpu(name):
    """Without additive scores, which in float32 have no lift there."""
    arrays, call = rows(), CALLS[name]
    program = str(jax.make_jaxpr(lambda *x: regard.summarize(*x, **call))(*arrays))
    assert "regard_look_keys" in program
    found, image = regard.summarize(*arrays, **call), regard.attention_map(*arrays, **call)
    arrays, call = on_cpu(arrays), on_cpu(call)
    assert_same_summary(found, regard.summarize(*arrays, **call), 2e-5)
    np.testing.assert_allclose(image, regard.attention_map(*arrays, **call), 2e-5, 2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["all keys", "causal", "gaussian", "additive"])
@pytest.mark.parametrize("D", [64, 128])
def test_long_halves_on_a_gpu(name, D):
    arrays, call = rows(700, 900, D=D, dtype="bfloat16"), dict(CALLS[name])
    call.pop("valid_lens", None)
    if name == "additive":
        kernel = jnp.asarray(np.random.default_rng(7).standard_normal((D, 16)) / 16, jnp.float32)
        call["score"] = regard.Additive(kernel, kernel, jnp.ones(16, jnp.float32))
    found = regard.summarize(*arrays, **call)
    image = regard.attention_map(*arrays, **call, resolution=(50, 70))
    arrays, call = on_cpu(arrays), on_cpu(call)
    expected = regard.summarize(*arrays, **call)
    # Gaussian scores of up to 100 are differences of features that are rounded to bfloat16: on a
    # CPU, too, entropies are 0.03 from those of the definition.
    rounded = 0.1 if name == "gaussian" else 0.01
    np.testing.assert_allclose(found.entropy, expected.entropy, rounded, rounded)
    np.testing.assert_allclose(found.key_total, expected.key_total, 3 * rounded, rounded)
    expected = regard.attention_map(*arrays, **call, resolution=(50, 70))
    np.testing.assert_allclose(image, expected, 5 * rounded, 2e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["causal", "gaussian", "additive"])
def test_halves(name, dtype):
    """Features of the kernels are rounded, and weights are added up in two halves of 8 bits."""
    arrays = rows(dtype=dtype)
    score = name != "causal"
    found, expected = both(regard.summarize, *arrays, **CALLS[name])
    allowed = 3e-2 if score else 2e-5
    for field in ("entropy", "max_weight", "key_total"):
        got, wanted = (np.asarray(getattr(one, field)) for one in (found, expected))
        np.testing.assert_allclose(got, wanted, allowed, allowed, err_msg=field)
    image, wanted = both(regard.attention_map, *arrays, **CALLS[name], resolution=(12, 9))
    np.testing.assert_allclose(image, wanted, allowed, allowed)


@pytest.mark.parametrize("sizes", [(64, 64), (16, 100), (100, 1), (1, 33)])
def test_sizes(sizes):
    T, S = sizes
    found, expected = both(regard.summarize, *rows(T, S, N=2, K=1))
    assert_same_summary(found, expected, 2e-5)
    image, wanted = both(regard.attention_map, *rows(T, S, N=2, K=1), resolution=(8, 32))
    np.testing.assert_allclose(image, wanted, 2e-5, 2e-6)


def test_wide_features_in_several_products():
    arrays = rows(D=40)
    found, expected = both(regard.summarize, *arrays, mask=regard.Mask.causal())
    assert_same_summary(found, expected, 2e-5)


@pytest.mark.parametrize("score", [regard.Dot(), regard.Gaussian(1.3)], ids=["dot", "gaussian"])
def test_padding_may_hold_anything(score):
    query, key = rows()
    call = dict(valid_lens=jnp.array([20, 0], jnp.int32), score=score)
    poisoned = key.at[0, 20:].set(jnp.nan).at[1].set(jnp.inf)
    query = query.at[1].set(jnp.nan)
    found, expected = both(regard.summarize, query, poisoned, **call)
    assert_same_summary(found, expected, 2e-5)
    np.testing.assert_array_equal(found.argmax[1], -1)
    np.testing.assert_array_equal(found.key_total[1], 0)
    image, expected = both(regard.attention_map, query, poisoned, **call, resolution=(5, 7))
    np.testing.assert_allclose(image, expected, 2e-5, 2e-6)
    np.testing.assert_array_equal(image[1], 0)


def test_a_changed_key_is_seen():
    query, key = rows()
    with interpreted_kernels(SMALL):
        before = regard.summarize(query, key)
        after = regard.summarize(query, key.at[:, 44].multiply(3.0))
    assert not np.allclose(before.entropy, after.entropy, atol=1e-3)
    assert not np.allclose(before.key_total, after.key_total, atol=1e-3)


def test_another_regime_runs_by_tiles():
    def call(*arrays):
        return regard.summarize(*arrays, normalize=regard.Sparsemax())

    with interpreted_kernels(SMALL):
        assert "regard_look" not in str(jax.make_jaxpr(call)(*rows()))
