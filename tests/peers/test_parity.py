"""Weights move over from the other libraries with no change in outputs or gradients.

Random weights, several keys, padding, causal order and grouped heads, in float32: the greatest
error is at most 1e-5 of the greatest entry. And a model with one weight changed must differ, so
that the comparison is known to see each of them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regard
import regard.interop
import regard.linen
from peers.libraries import FEATURES, PEERS, B, S, T

pytestmark = [
    pytest.mark.sampled(2),
    pytest.mark.peers,
    pytest.mark.usefixtures("quick_compilation"),
    pytest.mark.filterwarnings("ignore"),  # what other libraries warn of is not ours to fix
]
on_every_peer = pytest.mark.parametrize("name", PEERS)

LENS = jnp.asarray([7, 4, 1], jnp.int32)
MASKS = {
    "padding": dict(valid_lens=LENS),
    "causal": dict(mask=regard.Mask.causal()),
    "causal and padding": dict(mask=regard.Mask.causal(), valid_lens=LENS),
}


@functools.cache
def peer(name):
    return PEERS[name]()


def inputs(weights, seed=0):
    rng = np.random.default_rng(seed)
    query_features = weights.arguments["query_features"]
    key_features = weights.arguments.get("key_features", query_features)
    value_features = weights.arguments.get("value_features", FEATURES)
    return tuple(
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((B, T, query_features), (B, S, key_features), (B, S, value_features))
    )


def table(mask):
    """[B, T, S] bool of a mask of ours, for the others."""
    x = jnp.zeros((B, T, 1), jnp.float32)
    return regard.weights(x, x, **mask, normalize=regard.Uniform()) > 0


@functools.cache
def our_program(name):
    """Our output and gradients, by parameters and by inputs; compiled once for each mask."""
    layer = peer(name)
    module = getattr(regard.linen, layer.module)(**layer.read(layer.arrays).arguments)

    @jax.jit
    def run(params, arrays, mask, cotangent):
        def call(params, *arrays):
            return module.apply({"params": params}, *arrays, **mask)

        out, pull = jax.vjp(call, params, *arrays)
        slopes, *by_inputs = pull(cotangent)
        return out, slopes, tuple(by_inputs)

    return run


def cotangent_of(layer, arrays):
    weights = layer.read(layer.arrays)
    width = weights.arguments.get("out_features", arrays[2].shape[-1])
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.standard_normal((B, T, width)), jnp.float32)


def loaded(layer):
    """The parameters as a module takes them: through `load`, which checks every shape."""
    weights = layer.read(layer.arrays)
    module = getattr(regard.linen, layer.module)(**weights.arguments, partitioned=False)
    variables = jax.eval_shape(module.init, jax.random.key(0), *inputs(weights))
    return regard.linen.load(variables, weights.params)["params"]


def relative_error(got, expected):
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape
    return np.abs(got - expected).max() / np.abs(expected).max()


def assert_near(got, expected, what):
    error = relative_error(got, expected)
    assert error <= 1e-5, f"{what}: relative error {error:.1e}"


@on_every_peer
def test_outputs_and_gradients_are_the_same(name):
    layer = peer(name)
    arrays, params = inputs(layer.read(layer.arrays)), loaded(layer)
    cotangent = cotangent_of(layer, arrays)
    for label, mask in MASKS.items():
        out, slopes, by_inputs = layer.run(layer.arrays, *arrays, table(mask), cotangent)
        got, our_slopes, our_by_inputs = our_program(name)(params, arrays, mask, cotangent)
        assert_near(got, out, f"{label}: output")
        for side, a, b in zip(("query", "key", "value"), our_by_inputs, by_inputs, strict=True):
            assert_near(a, b, f"{label}: gradient by {side}")
        if jax.tree.leaves(slopes):
            assert_slopes_near(layer, our_slopes, slopes, label)


def assert_slopes_near(layer, ours, theirs, label):
    """Gradients by the parameters; theirs renamed and reshaped as their weights are."""
    expected = layer.read(theirs).params
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    for path, leaf in jax.tree_util.tree_leaves_with_path(expected):
        own = functools.reduce(lambda tree, step: tree[step.key], path, ours)
        if path_name(path) == "key.bias":
            # It moves all scores of a query alike, so its gradient is 0 and what is there is
            # rounding, on both sides.
            np.testing.assert_allclose(own, leaf, atol=1e-5 * scale)
        elif not missing_bias(layer, path):
            assert_near(own, leaf, f"{label}: gradient by {path_name(path)}")


def path_name(path):
    return ".".join(step.key for step in path)


def missing_bias(layer, path):
    """A bias that the other layer does not have, and that was filled in with zeros."""
    leaf = functools.reduce(
        lambda tree, step: tree[step.key], path, layer.read(layer.arrays).params
    )
    return path[-1].key == "bias" and not np.any(leaf)


@on_every_peer
def test_a_model_with_one_weight_changed_differs(name):
    """Each array in turn, by one entry; all but the key's bias, which softmax cannot see."""
    layer = peer(name)
    params, arrays = loaded(layer), inputs(layer.read(layer.arrays))
    mask = MASKS["causal and padding"]
    cotangent = cotangent_of(layer, arrays)
    out, _, _ = layer.run(layer.arrays, *arrays, table(mask), cotangent)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        changed = leaf.at[(0,) * leaf.ndim].add(0.3)
        twin = jax.tree_util.tree_map_with_path(
            lambda at, old: changed if at == path else old,  # noqa: B023
            params,
        )
        error = relative_error(our_program(name)(twin, arrays, mask, cotangent)[0], out)
        if path_name(path) == "key.bias":
            assert error <= 1e-5
        else:
            assert error > 1e-4, f"{path_name(path)} does not matter: {error:.1e}"


@pytest.mark.parametrize("name", [name for name in PEERS if name.startswith("torch")])
def test_torch_is_written_back(name):
    layer = peer(name)
    back = regard.interop.to_torch(layer.read(layer.arrays).params)
    assert set(back) == set(layer.arrays)
    for key, array in layer.arrays.items():
        np.testing.assert_array_equal(back[key], array, err_msg=key)


@pytest.mark.parametrize("name", ["flax.linen", "flax.nnx, grouped"])
def test_flax_is_written_back(name):
    layer = peer(name)
    back = regard.interop.to_flax(layer.read(layer.arrays).params)
    assert jax.tree.structure(back) == jax.tree.structure(layer.arrays)
    jax.tree.map(np.testing.assert_array_equal, back, layer.arrays)


def test_from_torch_to_flax():
    """A model goes from one to the other through regard."""
    torch, flax = peer("torch"), peer("flax.linen")
    weights = torch.read(torch.arrays)
    arrays, mask = inputs(weights), MASKS["padding"]
    cotangent = cotangent_of(torch, arrays)
    there, _, _ = torch.run(torch.arrays, *arrays, table(mask), cotangent)
    params = jax.tree.map(jnp.asarray, regard.interop.to_flax(weights.params))
    here, _, _ = flax.run(params, *arrays, table(mask), cotangent)
    assert_near(here, there, "output")


def test_a_layer_inside_a_larger_state_dict():
    layer = peer("torch")
    state = {f"encoder.0.attn.{name}": x for name, x in layer.arrays.items()} | {"head": np.ones(1)}
    found = regard.interop.from_torch(state, num_heads=4, prefix="encoder.0.attn.")
    jax.tree.map(np.testing.assert_array_equal, found.params, layer.read(layer.arrays).params)


def test_a_torch_state_dict_as_it_is():
    torch = pytest.importorskip("torch")
    theirs = torch.nn.MultiheadAttention(8, 2)
    found = regard.interop.from_torch(theirs.state_dict(), num_heads=2)
    assert found.params["query"]["kernel"].shape == (8, 2, 4)
