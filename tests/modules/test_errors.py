"""Bad input to the modules: each message says the rule, what arrived, and the fix."""

import inspect
import re
import subprocess
import sys

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import regard
import regard.interop
import regard.linen
import regard.nnx
from modules.front_ends import MODULES, WIDE, Module, assert_trees_equal, build

in_both = pytest.mark.parametrize("front_end", ["nnx", "linen"])

X = jnp.zeros((2, 3, 10), jnp.float32)


def heads(front_end, **arguments):
    """A MultiHeadAttention on X; linen checks at its first call."""
    arguments = dict(num_heads=4, query_features=10) | arguments
    if front_end == "nnx":
        return regard.nnx.MultiHeadAttention(**arguments, rngs=nnx.Rngs(0))
    made = regard.linen.MultiHeadAttention(**arguments)
    return jax.eval_shape(made.init, jax.random.key(0), X)


WRONG = {
    "heads do not divide the features": (
        {},
        "num_heads must divide in_features, which the heads share. Got num_heads 4, "
        "in_features 10. Fix: another head count, or query_head_features and "
        "value_head_features, which are free.",
    ),
    "heads do not divide qkv_features": (
        dict(qkv_features=14),
        "num_heads must divide qkv_features, which the heads share. Got num_heads 4, "
        "qkv_features 14.",
    ),
    "key heads do not divide": (
        dict(key_heads=3, qkv_features=8),
        "num_kv_heads must divide num_heads. Got num_heads 4, num_kv_heads 3.",
    ),
    "no heads": (
        dict(num_heads=0),
        "num_kv_heads must divide num_heads. Got num_heads 0, num_kv_heads 0.",
    ),
    "unknown score": (
        dict(qkv_features=8, score="cosine"),
        "unknown score 'cosine': known are 'dot', 'gaussian', 'bilinear', 'additive', or a "
        "regard.Score.",
    ),
    "unknown score of one head": (
        dict(qkv_features=8, score=("dot", "dot", "dott", "dot")),
        "unknown score 'dott': known are 'dot', 'gaussian', 'bilinear', 'additive'",
    ),
    "not a score": (
        dict(qkv_features=8, score=(1, 2, 3, 4)),
        "unknown score 1: known are 'dot'",
    ),
    "too few scores": (
        dict(qkv_features=8, score=("dot", "additive")),
        "score must be one for all heads, or one per head. Got 2 for num_heads 4: "
        "('dot', 'additive').",
    ),
    "a score with integers to learn": (
        dict(qkv_features=8, score=regard.Bilinear(jnp.ones((2, 2), jnp.int32))),
        "the arrays of a score are learned, so they must be floating point. Got Bilinear.kernel of "
        "dtype int32. Fix: a static field",
    ),
    "a function that returns no score": (
        dict(qkv_features=8, score=lambda rng: rng),
        "a function given as score takes a JAX key and returns a regard.Score. Got",
    ),
    "two names that disagree": (
        dict(qkv_features=8, in_features=10, query_features=12),
        "in_features and query_features are two names of one number. Got in_features 10, "
        "query_features 12. Fix: one of the two.",
    ),
    "attention_fn": (
        dict(qkv_features=8, attention_fn=jax.nn.dot_product_attention),
        "regard has no attention_fn: score=, normalize= and implementation= choose what is",
    ),
    "a dot_general": (
        dict(qkv_features=8, qkv_dot_general=jax.lax.dot_general),
        "regard has no qkv_dot_general: precision= and dtype= choose the products",
    ),
    "broadcast_dropout": (
        dict(qkv_features=8, broadcast_dropout=True, dropout_rate=0.5),
        "regard drops each weight independently of the other examples and heads. Got "
        "broadcast_dropout=True, dropout_rate=0.5. Fix: broadcast_dropout=False.",
    ),
    "two widths for dot products": (
        dict(qkv_features=8, key_head_features=3),
        'score "dot" compares queries and keys of one width. Got query_head_features 2, '
        'key_head_features 3. Fix: equal widths, or score="bilinear" or "additive".',
    ),
    "two widths for additive heads without kernels": (
        dict(qkv_features=8, key_head_features=3, score="additive"),
        'score "additive" compares queries and keys of one width. Got query_head_features 2, '
        "key_head_features 3. Fix: equal widths, or hidden_features=h.",
    ),
    "two widths for a fixed score": (
        dict(qkv_features=8, key_head_features=3, score=regard.Gaussian(1.0)),
        "Gaussian needs queries and keys of one width. Got query width 2, key width 3.",
    ),
}


@in_both
@pytest.mark.parametrize("name", WRONG)
def test_constructor(front_end, name):
    arguments, message = WRONG[name]
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        heads(front_end, **arguments)


@in_both
@pytest.mark.parametrize("name", ["dot", "heads"])
def test_a_precision_that_is_none(front_end, name):
    module = MODULES[name]
    message = "precision must be None, a string as of jax.default_matmul_precision, or a "
    with pytest.raises(TypeError, match=re.escape(message + "jax.lax.Precision. Got 3.")):
        _call_with(front_end, module, precision=3)


def _call_with(front_end, module, **arguments):
    built = build(front_end, module, **arguments)
    return built.call(built.params, *module.inputs())


@in_both
@pytest.mark.parametrize("name", ["dot", "additive", "heads"])
def test_dropout_without_deterministic(front_end, name):
    module = MODULES[name]
    message = (
        f"{module.name} with dropout_rate 0.1 needs deterministic, in the constructor or in the "
        "call: False drops weights (training), True does not. Got None in both."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        _call_with(front_end, module, dropout_rate=0.1)


@pytest.mark.parametrize("name", ["dot", "additive", "heads"])
def test_dropout_without_rngs_in_linen(name):
    module = MODULES[name]
    built = build("linen", module, dropout_rate=0.1, deterministic=False)
    message = (
        f"{module.name} with dropout_rate 0.1 and deterministic=False needs random numbers. Got no "
        'rngs and no dropout_rng. Fix: module.apply(..., rngs={"dropout": jax.random.key(0)}), '
        "dropout_rng=jax.random.key(0), or deterministic=True."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        built.call(built.params, *module.inputs())


@pytest.mark.parametrize("rngs", [None, nnx.Rngs(params=0)], ids=["none", "params only"])
def test_dropout_without_rngs_in_nnx(rngs):
    made = regard.nnx.DotProductAttention(dropout_rate=0.1, deterministic=False, rngs=rngs)
    message = (
        "DotProductAttention with dropout_rate 0.1 and deterministic=False needs random numbers. "
        "Got no rngs and no dropout_rng. Fix: rngs=nnx.Rngs(0), dropout_rng=jax.random.key(0), or "
        "deterministic=True."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        made(X, X, X)
    assert made(X, X, X, rngs=nnx.Rngs(dropout=0)).shape == X.shape


@in_both
def test_inputs_of_other_widths(front_end):
    module = MODULES["heads"]
    built, (query, key, value) = build(front_end, module), module.inputs()
    message = (
        "MultiHeadAttention takes (batch..., length, features), with one batch for all and here of "
        "query width 6, key width 5 and value width 3. Got query [2, 5, 6], key [2, 7, 3], value "
        "[2, 7, 5]. Fix: in_features, key_features and value_features as the arrays have them; a "
        "mask is passed as mask=."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        built.call(built.params, query, value, key)
    with pytest.raises(ValueError, match=re.escape("Got query [2, 5, 1, 6], key [1, 2, 7, 5]")):
        built.call(built.params, query[:, :, None], key[None], value[None])
    with pytest.raises(ValueError, match="`inputs_k` cannot be None if `inputs_v` is not None"):
        built.call(built.params, query, None, value)


@in_both
@pytest.mark.parametrize("name", ["additive", "bilinear"])
def test_inputs_of_other_widths_to_one_score(front_end, name):
    module = MODULES[name]
    built, (query, _, value) = build(front_end, module), module.inputs()
    message = (
        f"this {module.name} is for queries of width 6 and keys of width 5. Got query [2, 5, 6], "
        "key [2, 7, 4]. Fix: query_features and key_features as the arrays have them."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        built.call(built.params, query, value, value)


def broken(params):
    """One array of another shape, one missing, one that nobody asked for."""
    return {
        "query": {"kernel": params["query"]["kernel"][:, :2], "bias": params["query"]["bias"]},
        "key": {"kernel": params["key"]["kernel"]},
        "value": params["value"],
        "out": params["out"],
        "gaussian": {"width": jnp.ones(4, jnp.float32)},
    }


MISFITS = """\
the arrays do not fit this module, and none was loaded:
  gaussian.width: expected nothing, got [4]
  key.bias: expected [4, 4], got nothing
  query.kernel: expected [6, 4, 4], got [6, 2, 4]
Fix: a module made with the checkpoint's widths, head counts, score and use_bias."""


def test_a_checkpoint_that_does_not_fit_loads_nothing_in_nnx():
    module = Module("MultiHeadAttention", dict(num_heads=4, **WIDE), (6, 5, 3))
    made = regard.nnx.MultiHeadAttention(**module.arguments, rngs=nnx.Rngs(0))
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(made)))
    with pytest.raises(ValueError, match="^" + re.escape(MISFITS) + "$"):
        regard.nnx.load(made, broken(jax.tree.map(lambda x: x + 1, before)))
    assert_trees_equal(jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(made))), before)


def test_a_checkpoint_that_does_not_fit_loads_nothing_in_linen():
    module = MODULES["heads"]
    params = build("linen", module).params
    with pytest.raises(ValueError, match="^" + re.escape(MISFITS) + "$"):
        regard.linen.load({"params": params}, broken(params))


@pytest.mark.parametrize("front_end", ["nnx", "linen"])
def test_without_flax_the_pip_command_is_the_answer(front_end):
    code = f"""
        import sys
        sys.modules["flax"] = None
        try:
            import regard.{front_end}
        except ImportError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", inspect.cleandoc(code)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == [
        f"regard.{front_end} needs Flax, which is not installed.",
        'Install it with: pip install "regard[flax]"',
    ], done.stderr


def test_interop_needs_none_of_the_libraries():
    code = """
        import sys
        for library in ("flax", "keras", "equinox", "torch"):
            sys.modules[library] = None
        import numpy as np, regard.interop
        state = {"in_proj_weight": np.ones((24, 8)), "out_proj.weight": np.ones((8, 8))}
        print(regard.interop.from_torch(state, num_heads=2).params["query"]["kernel"].shape)
    """
    done = subprocess.run(
        [sys.executable, "-c", inspect.cleandoc(code)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "(8, 2, 4)\n", done.stderr


# ---------------------------------------------------------------------------------------------
# Weights of other libraries that are not what they should be.

SQUARE = np.ones((8, 8), np.float32)
KERNEL = np.ones((8, 2, 4), np.float32)
SIDES = {side: {"kernel": KERNEL} for side in ("query", "key", "value")}
FLAX = SIDES | {"out": {"kernel": KERNEL.reshape(2, 4, 8)}}

FOREIGN = {
    "torch, heads do not divide": (
        lambda: regard.interop.from_torch(
            {"in_proj_weight": np.ones((24, 8)), "out_proj.weight": SQUARE}, num_heads=3
        ),
        "num_heads must divide the width that the heads share. Got num_heads 3, in_proj_weight "
        "[8, 8].",
    ),
    "torch, added keys": (
        lambda: regard.interop.from_torch(
            {"in_proj_weight": SQUARE, "out_proj.weight": SQUARE, "bias_k": SQUARE}, num_heads=2
        ),
        "these are not the arrays of torch.nn.MultiheadAttention (without add_bias_kv): missing "
        "none, not known ['bias_k']. Got in_proj_weight [8, 8], out_proj.weight [8, 8], bias_k "
        "[8, 8].",
    ),
    "torch, not three": (
        lambda: regard.interop.from_torch(
            {"in_proj_weight": SQUARE, "out_proj.weight": SQUARE}, num_heads=2
        ),
        "in_proj_weight must have shape (3 × width, features): query, key and value below each "
        "other. Got in_proj_weight [8, 8].",
    ),
    "torch, another prefix": (
        lambda: regard.interop.from_torch({"layer.in_proj_weight": SQUARE}, 2, prefix="attn."),
        "no array of torch.nn.MultiheadAttention begins with 'attn.'. Got "
        "['layer.in_proj_weight'].",
    ),
    "torch cannot hold grouped heads": (
        lambda: regard.interop.to_torch(FLAX | {"key": {"kernel": KERNEL[:, :1]}}),
        "torch.nn.MultiheadAttention has as many key heads as query heads, one head width, and "
        "in_features = num_heads × head width = out_features. Got query.kernel [8, 2, 4], "
        "key.kernel [8, 1, 4], value.kernel [8, 2, 4], out.kernel [2, 4, 8].",
    ),
    "flax cannot hold a width": (
        lambda: regard.interop.to_flax(FLAX | {"gaussian": {"width": np.ones(2)}}),
        "these are not the arrays of what Flax's MultiHeadAttention can hold: dot-product heads: "
        "missing none, not known ['gaussian.width'].",
    ),
    "flax, another norm": (
        lambda: regard.interop.from_flax(FLAX | {"query_norm": {"scale": np.ones(4)}}),
        "these are not the arrays of Flax's MultiHeadAttention: missing none, not known "
        "['query_norm.scale'].",
    ),
    "flax, no output": (
        lambda: regard.interop.from_flax(SIDES),
        "missing ['out.kernel'], not known none. Got query.kernel [8, 2, 4]",
    ),
    "keras, gated": (
        lambda: regard.interop.from_keras([KERNEL] * 5),
        "keras.layers.MultiHeadAttention has 4 weights, or 8 with biases; a gated one is not "
        "supported. Got 5: [[8, 2, 4], [8, 2, 4], [8, 2, 4], [8, 2, 4], [8, 2, 4]].",
    ),
    "keras, matrices": (
        lambda: regard.interop.from_keras([SQUARE] * 4),
        "kernels must be (features, heads, width), and the output's (heads, width, features). Got",
    ),
    "keras additive, no weights": (
        lambda: regard.interop.from_keras_additive([]),
        "keras.layers.AdditiveAttention has one weight, scale (D,), or none with use_scale=False. "
        "Got []. Fix: features=D for a layer without weights.",
    ),
    "equinox, no head count": (
        lambda: regard.interop.from_equinox({"query_proj.weight": SQUARE}),
        "from_equinox needs num_heads when it is given a mapping of arrays.",
    ),
    "equinox, arrays missing": (
        lambda: regard.interop.from_equinox({"query_proj.weight": SQUARE}, num_heads=2),
        "these are not the arrays of equinox.nn.MultiheadAttention: missing ['key_proj.weight', "
        "'value_proj.weight', 'output_proj.weight'], not known none. Got query_proj.weight [8, 8].",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_weights(name):
    read, message = FOREIGN[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        read()


def test_flax_says_so_when_boxed_layers_are_stacked_without_a_name():
    """Flax's own rule, with its own message, for partitioned modules only."""

    def stacked(**arguments):
        return nn.vmap(
            regard.linen.MultiHeadAttention,
            variable_axes={"params": 0},
            split_rngs={"params": True},
        )(num_heads=2, **arguments)

    x = jnp.zeros((3, 2, 4, 10), jnp.float32)
    with pytest.raises(flax.errors.PartitioningUnspecifiedError):
        stacked(partitioned=True).init(jax.random.key(0), x)
    variables = stacked().init(jax.random.key(0), x)
    assert variables["params"]["query"]["kernel"].shape == (3, 10, 2, 5)
