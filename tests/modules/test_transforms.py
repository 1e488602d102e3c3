"""jit, nnx.jit, nnx.scan, nn.scan, checkpoint, vmap and grad around the modules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import regard
import regard.linen
import regard.nnx
from modules.front_ends import MODULES, Module, assert_close, build

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.sampled(2)]

MIXED = MODULES["mixed grouped heads"]
SQUARE = dict(num_heads=2, query_features=6, score=("dot", "additive"))
LENS = jnp.asarray([7, 3], jnp.int32)


def made_nnx(**more):
    return regard.nnx.MultiHeadAttention(**SQUARE, **more, rngs=nnx.Rngs(0, dropout=1))


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal((2, 5, 6)), jnp.float32)


@pytest.mark.parametrize("front_end", ["nnx", "linen"])
def test_jit(front_end):
    built, arrays = build(front_end, MIXED), MIXED.inputs()
    plain = built.call(built.params, *arrays, valid_lens=LENS)
    assert_close(jax.jit(built.call)(built.params, *arrays, valid_lens=LENS), plain, 1e-6)


def test_nnx_jit_moves_the_dropout_stream():
    made, x = made_nnx(dropout_rate=0.5, deterministic=False), inputs()
    twin = nnx.clone(made)
    run = nnx.jit(lambda made, x: made(x))
    first, second = run(made, x), run(made, x)
    assert_close(first, twin(x), 1e-6)
    assert_close(second, twin(x), 1e-6)
    assert not np.allclose(first, second)


def test_a_module_is_a_pytree():
    made, x = made_nnx(), inputs()
    assert_close(jax.jit(lambda made, x: made(x))(made, x), made(x), 1e-6)


def test_nnx_grad_reaches_every_parameter():
    made, x = made_nnx(), inputs()
    slopes = nnx.grad(lambda made: jnp.sum(jnp.sin(made(x))))(made)
    for path, slope in nnx.to_flat_state(slopes):
        # A bias on every key moves all dot products of a query alike; softmax cannot see it, and
        # only the additive head's half of it has a gradient.
        assert np.abs(slope[...]).max() > 1e-5, path


def test_nnx_scan_over_layers():
    """Three layers, stacked: the same as one after the other."""
    x = inputs()

    @nnx.vmap(in_axes=0, out_axes=0)
    def stacked(rngs):
        return regard.nnx.MultiHeadAttention(**SQUARE, rngs=rngs)

    layers = stacked(nnx.Rngs(0).split(3))
    assert layers.query.kernel.shape == (3, 6, 2, 3)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(x, layer):
        return x + layer(x, mask=regard.Mask.causal())

    one_by_one = x
    for number in range(3):
        layer = jax.tree.map(lambda leaf: leaf[number], layers)  # noqa: B023
        one_by_one = one_by_one + layer(one_by_one, mask=regard.Mask.causal())
    assert_close(run(x, layers), one_by_one, 2e-6)


def test_nnx_scan_names_the_new_axis():
    """With a partition name for it, the stacked axis gets its place in the metadata."""

    @functools.partial(nnx.vmap, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def stacked(rngs):
        return regard.nnx.MultiHeadAttention(**SQUARE, partitioned=True, rngs=rngs)

    kernel = stacked(nnx.Rngs(0).split(3)).query.kernel
    assert kernel.get_metadata("out_sharding") == ("layers", "embed", "heads", "head_features")


def test_nnx_scan_over_tokens_with_a_cache():
    made, x = made_nnx(), inputs()

    @nnx.scan(in_axes=(None, nnx.Carry, 1), out_axes=(nnx.Carry, 1))
    def decode(made, cache, token):
        out, cache = made(token[:, None], cache=cache)
        return cache, out[:, 0]

    _, out = decode(made, made.init_cache(2, 5), x)
    assert_close(out, made(x, mask=regard.Mask.causal()), 2e-6)


class Layer(nn.Module):
    partitioned: bool

    @nn.compact
    def __call__(self, x, _):
        attention = regard.linen.MultiHeadAttention(**SQUARE, partitioned=self.partitioned)
        return x + attention(x, mask=regard.Mask.causal()), None


@pytest.mark.parametrize("partitioned", [True, False])
def test_linen_scan_over_layers(partitioned):
    x = inputs()
    layers = nn.scan(
        Layer,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=3,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )(partitioned)
    variables = layers.init(jax.random.key(0), x, None)
    params = variables["params"]["MultiHeadAttention_0"]
    if partitioned:
        names = params["query"]["kernel"].names
        assert names == ("layers", "embed", "heads", "head_features")
    expected = x
    for number in range(3):
        own = jax.tree.map(lambda leaf: leaf[number], nn.meta.unbox(params))  # noqa: B023
        expected, _ = Layer(partitioned).apply(
            {"params": {"MultiHeadAttention_0": own}}, expected, None
        )
    assert_close(layers.apply(variables, x, None)[0], expected, 2e-6)


@pytest.mark.parametrize("front_end", ["nnx", "linen"])
def test_checkpoint(front_end):
    """Rematerialized: the same gradient."""
    built, (query, key, value) = build(front_end, MIXED), MIXED.inputs()

    def loss(call, params, query):
        return jnp.sum(jnp.sin(call(params, query, key, value)))

    plain, remat = (
        jax.jit(jax.grad(functools.partial(loss, call), argnums=(0, 1)))(built.params, query)
        for call in (built.call, jax.checkpoint(built.call))
    )
    jax.tree.map(lambda a, b: assert_close(a, b, 2e-6), remat, plain)


def test_nnx_remat():
    made, x = made_nnx(), inputs()
    run = nnx.remat(lambda made, x: made(x))
    slopes, plain = (
        nnx.grad(lambda made, run=run: jnp.sum(jnp.sin(run(made, x))))(made)
        for run in (run, lambda made, x: made(x))
    )
    for (path, a), (_, b) in zip(nnx.to_flat_state(slopes), nnx.to_flat_state(plain), strict=True):
        assert_close(a[...], b[...], 2e-6, str(path))


@pytest.mark.parametrize("front_end", ["nnx", "linen"])
def test_vmap_over_examples(front_end):
    built, arrays = build(front_end, MIXED), MIXED.inputs()
    expected = built.call(built.params, *arrays, valid_lens=LENS)

    def one(query, key, value, lens):
        return built.call(built.params, query, key, value, valid_lens=lens)

    assert_close(jax.vmap(one)(*arrays, LENS), expected, 2e-6)


def test_vmap_over_parameters():
    """An ensemble: three sets of parameters on one input."""
    module = Module("AdditiveAttention", MODULES["additive"].arguments, (6, 5, 4))
    built, arrays = build("linen", module), module.inputs()
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x, -x]), built.params)
    outs = jax.vmap(lambda params: built.call(params, *arrays))(stacked)
    for number in range(3):
        own = jax.tree.map(lambda x: x[number], stacked)  # noqa: B023
        assert_close(outs[number], built.call(own, *arrays), 2e-6)


def test_vmap_over_caches():
    """Texts of different lengths: one cache each, one length each."""
    module = Module("MultiHeadAttention", SQUARE, (6, 6, 6))
    built, x = build("nnx", module), inputs()
    full = built.call(built.params, x, mask=regard.Mask.causal())
    empty = built.module.init_cache(1, 5)
    caches = [
        built.call(built.params, x[:1, :2], cache=empty)[1],
        built.call(built.params, x[1:, :4], cache=empty)[1],
    ]
    both = jax.tree.map(lambda a, b: jnp.stack([a, b]), *caches)
    tokens = jnp.stack([x[:1, 2:3], x[1:, 4:5]])
    step = jax.vmap(lambda cache, token: built.call(built.params, token, cache=cache)[0])
    out = step(both, tokens)  # [2, 1, 1, out]
    assert_close(out[0, 0], full[0, 2:3], 2e-6)
    assert_close(out[1, 0], full[1, 4:5], 2e-6)
