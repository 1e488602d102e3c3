"""What holds for every module: one set of arguments, one tree of parameters and the same bits in
NNX and in linen, Flax's conventions, and weights that can be looked at."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import regard
import regard.linen
import regard.nnx
from modules.front_ends import (
    FRONT_ENDS,
    MODULES,
    Module,
    assert_close,
    assert_trees_equal,
    build,
    initialized,
)

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.sampled(2)]

on_every_module = pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
# One of each kind, where what is tested is the same code for all of a kind.
SOME = ("gaussian", "bilinear, bias", "additive, bias", "heads", "mixed grouped heads")
on_some_modules = pytest.mark.parametrize("module", [MODULES[name] for name in SOME], ids=SOME)
in_both = pytest.mark.parametrize("front_end", FRONT_ENDS)

CLASSES = sorted({module.name for module in MODULES.values()})
LENS = jnp.asarray([7, 3], jnp.int32)


# What Flax itself has in one front end only.
ONLY_NNX = {"rngs", "keep_rngs", "qkv_promote_dtype", "out_promote_dtype", "ln_promote_dtype"}
ONLY_NNX |= {f"{name}_metadata" for name in ("kernel", "bias", "out_kernel", "out_bias")}
ONLY_NNX |= {f"{side}_ln_scale_metadata" for side in ("query", "key")}
ONLY_LINEN = {"parent", "name", "force_fp32_for_softmax"}
ONLY_LINEN |= {"qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls"}


@pytest.mark.parametrize("name", CLASSES)
def test_the_arguments_are_the_same(name):
    of_linen = {f.name: f.default for f in dataclasses.fields(getattr(regard.linen, name))}
    signature = inspect.signature(getattr(regard.nnx, name).__init__).parameters
    of_nnx = {p: signature[p].default for p in signature if p not in ONLY_NNX | {"self"}}
    missing = dataclasses.MISSING, inspect.Parameter.empty
    assert set(of_nnx) == set(of_linen) - ONLY_LINEN
    for argument, default in of_nnx.items():
        assert default == of_linen[argument] or (of_linen[argument], default) == missing


@pytest.mark.parametrize("name", CLASSES)
def test_help_shows_every_argument(name):
    for front in (regard.nnx, regard.linen):
        text = getattr(front, name).__doc__
        for field in dataclasses.fields(getattr(regard.linen, name)):
            if field.name not in ONLY_LINEN and not field.name.endswith(("dot_general", "_cls")):
                assert f"{field.name}" in text


@pytest.mark.parametrize("name", CLASSES)
def test_the_call_arguments_are_the_same(name):
    of = {
        front: list(inspect.signature(getattr(front, name).__call__).parameters)
        for front in (regard.nnx, regard.linen)
    }
    only = {"rngs", "decode", "out_sharding", "qkv_sharding", "inputs_kv"}
    of_nnx, of_linen = ([p for p in names if p not in only] for names in of.values())
    assert of_nnx == of_linen


def test_the_public_names_are_the_same():
    assert set(regard.linen.__all__) - set(regard.nnx.__all__) == {"MultiHeadDotProductAttention"}
    assert set(regard.nnx.__all__) <= set(regard.linen.__all__)


@on_every_module
def test_the_parameters_are_the_same_tree(module):
    trees = [build(front_end, module).params for front_end in FRONT_ENDS]
    shapes = [jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree) for tree in trees]
    assert shapes[0] == shapes[1]
    assert len(jax.tree.leaves(trees[0])) == module.params
    for leaf in jax.tree.leaves(trees[0]):
        assert leaf.dtype == jnp.float32


@on_every_module
def test_the_same_parameters_give_the_same_bits(module):
    """Output, weights, and every gradient."""
    query, key, value = module.inputs()
    mask = regard.Mask.window(None, 4)

    def run(front_end):
        built = build(front_end, module)

        def loss(params, query, key, value):
            out, weights = built.call(
                params, query, key, value, valid_lens=LENS, mask=mask, return_weights=True
            )
            return jnp.sum(jnp.sin(out)), (out, weights)

        return jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(params, query, key, value)

    params = build("nnx", module).params
    assert_trees_equal(run("nnx"), run("linen"))


@on_some_modules
def test_returning_the_weights_changes_nothing(module):
    built = build("linen", module)
    inputs, params = module.inputs(), built.params
    out = built.call(params, *inputs, valid_lens=LENS)
    again, weights = built.call(params, *inputs, valid_lens=LENS, return_weights=True)
    np.testing.assert_array_equal(out, again)
    lead = (2, 4) if module.name == "MultiHeadAttention" else (2,)
    assert weights.shape == (*lead, 5, 7)
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-6)
    np.testing.assert_array_equal(weights[1, ..., 3:], 0.0)


@on_some_modules
def test_an_empty_row_pools_to_the_output_bias_and_its_gradient_is_zero(module):
    built = build("linen", module)
    params = built.params
    query, key, value = module.inputs()
    poisoned = key.at[1].set(jnp.nan), value.at[1].set(jnp.inf)

    def loss(query, key, value):
        return jnp.sum(
            jnp.square(
                built.call(params, query, key, value, valid_lens=jnp.asarray([7, 0], jnp.int32))
            )
        )

    out = built.call(params, query, *poisoned, valid_lens=jnp.asarray([7, 0], jnp.int32))
    expected = params["out"]["bias"] if "out" in params and "bias" in params["out"] else 0.0
    np.testing.assert_array_equal(out[1], np.broadcast_to(expected, out[1].shape))
    for slope in jax.grad(loss, argnums=(0, 1, 2))(query, key, value):
        np.testing.assert_array_equal(slope[1], 0.0)
        assert np.isfinite(slope).all()


# ---------------------------------------------------------------------------------------------
# What the four simple classes compute: regard.attend with the score made of their parameters.


def scores_of(name, params):
    kernel = params.get("kernel")
    match name:
        case "dot":
            return regard.Dot()
        case "gaussian":
            return regard.Gaussian(params["width"])
        case "bilinear":
            return regard.Bilinear(kernel)
        case "additive":
            return regard.Additive(params["query_kernel"], params["key_kernel"], params["vector"])
        case "additive, no kernels":
            return regard.Additive(None, None, params["vector"])


@in_both
@pytest.mark.parametrize(
    "name", ["dot", "gaussian", "bilinear", "additive", "additive, no kernels"]
)
def test_simple_modules_are_attend(front_end, name):
    built = build(front_end, MODULES[name])
    inputs, params = MODULES[name].inputs(), built.params
    bias = 0.1 * jnp.arange(35, dtype=jnp.float32).reshape(5, 7)
    expected = regard.attend(*inputs, score=scores_of(name, params), valid_lens=LENS, bias=bias)
    np.testing.assert_array_equal(built.call(params, *inputs, valid_lens=LENS, bias=bias), expected)


@in_both
@pytest.mark.parametrize("name", ["bilinear, bias", "additive, bias"])
def test_biases_are_inside_the_score(front_end, name):
    built = build(front_end, MODULES[name])
    params = built.params
    query, key, _ = module_inputs = MODULES[name].inputs()
    if name.startswith("additive"):
        x = jnp.einsum("btd,dh->bth", query, params["query_kernel"], precision="highest")
        y = jnp.einsum("btd,dh->bth", key, params["key_kernel"], precision="highest")
        z = x[:, :, None] + y[:, None] + params["bias"][None, None, None]
        a = jnp.einsum("btsh,h->bts", jnp.tanh(z), params["vector"], precision="highest")
    else:
        x = jnp.einsum("btd,dh->bth", query, params["kernel"], precision="highest")
        a = jnp.einsum("bth,bsh->bts", x + params["bias"][None, None], key, precision="highest")
    _, weights = built.call(params, *module_inputs, return_weights=True)
    assert_close(weights, jax.nn.softmax(a, axis=-1), 2e-6)


@in_both
def test_normalize(front_end):
    built = build(front_end, MODULES["mixed heads"], normalize=regard.Uniform())
    _, weights = built.call(built.params, *MODULES["mixed heads"].inputs(), return_weights=True)
    np.testing.assert_allclose(weights, 1 / 7, rtol=1e-6)


@in_both
def test_implementation_is_passed_on(front_end):
    built = build(front_end, MODULES["mixed heads"])
    inputs = MODULES["mixed heads"].inputs()
    dense, tiled = (
        built.call(built.params, *inputs, implementation=name)
        for name in ("reference", "blockwise")
    )
    assert_close(tiled, dense, 2e-6)
    with pytest.raises(ValueError, match="unknown implementation 'fast'"):
        built.call(built.params, *inputs, implementation="fast")


# ---------------------------------------------------------------------------------------------
# Flax's conventions.


@pytest.mark.parametrize(
    ("front_end", "name"),
    [("linen", "gaussian"), ("nnx", "additive, bias"), ("nnx", "mixed heads")],
)
def test_dtypes(front_end, name):
    module = MODULES[name]
    half = build(front_end, module, dtype=jnp.bfloat16, param_dtype=jnp.float32)
    assert {x.dtype for x in jax.tree.leaves(half.params)} == {jnp.dtype(jnp.float32)}
    assert half.call(half.params, *module.inputs()).dtype == jnp.bfloat16

    stored = build(front_end, module, param_dtype=jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(stored.params)} == {jnp.dtype(jnp.bfloat16)}
    assert stored.call(stored.params, *module.inputs()).dtype == jnp.float32  # promoted
    assert stored.call(stored.params, *module.inputs(dtype=jnp.bfloat16)).dtype == jnp.bfloat16

    wide = build(front_end, module, dtype=jnp.float64)
    params = wide.params
    out = wide.call(params, *module.inputs())
    assert out.dtype == jnp.float64
    assert_close(half.call(params, *module.inputs()), out, 5e-2)


def test_dot_products_keep_the_values_dtype():
    query, key, value = MODULES["dot"].inputs()
    out = regard.nnx.DotProductAttention()(query, key, value.astype(jnp.bfloat16))
    assert out.dtype == jnp.bfloat16


@in_both
@pytest.mark.parametrize(
    ("precision", "shown"),
    [
        ("bfloat16", "DEFAULT"),
        (jax.lax.Precision.HIGH, "HIGH"),
        (jax.lax.DotAlgorithmPreset.F32_F32_F32, "F32_F32_F32"),
    ],
)
def test_precision_reaches_every_product(front_end, precision, shown):
    """Four projections, the kernel, scores and pooling: none is left at full float32."""
    module = MODULES["bilinear heads"]
    built = build(front_end, module, precision=precision)
    text = str(jax.make_jaxpr(built.call)(built.params, *module.inputs()))
    assert text.count("dot_general") >= 6
    assert "HIGHEST" not in text
    assert shown in text


@in_both
def test_initializers(front_end):
    """Every kernel has Flax's variance, 1/fan in, however its heads are laid out."""
    module = Module(
        "MultiHeadAttention",
        dict(
            num_heads=8,
            query_features=96,
            query_head_features=48,
            value_head_features=32,
            score=("additive",) * 4 + ("bilinear",) * 4,
            hidden_features=64,
        ),
        (96, 96, 96),
    )
    params = initialized(front_end, module)
    fan_in = {
        ("query", "kernel"): 96,
        ("value", "kernel"): 96,
        ("out", "kernel"): 8 * 32,
        ("additive", "query_kernel"): 48,
        ("additive", "vector"): 64,
        ("bilinear", "kernel"): 48 * 48,
    }
    for (group, leaf), fan in fan_in.items():
        assert float(params[group][leaf].std()) * fan**0.5 == pytest.approx(1.0, rel=0.15)
    np.testing.assert_array_equal(params["query"]["bias"], 0.0)


@in_both
def test_own_initializers(front_end):
    ones = jax.nn.initializers.ones
    params = initialized(front_end, MODULES["heads"], kernel_init=ones, bias_init=ones)
    for leaf in jax.tree.leaves(params):
        np.testing.assert_array_equal(leaf, 1.0)


@pytest.mark.parametrize("name", ["dot", "additive", "mixed grouped heads"])
def test_dropout(name):
    """On the weights, the same numbers in both front ends, off where it is said."""
    module = MODULES[name]
    inputs, rng = module.inputs(), jax.random.key(5)
    built = {f: build(f, module, dropout_rate=0.5) for f in FRONT_ENDS}
    plain = build("nnx", module)
    params = plain.params
    noisy = [b.call(params, *inputs, deterministic=False, dropout_rng=rng) for b in built.values()]
    np.testing.assert_array_equal(*noisy)
    quiet = plain.call(params, *inputs)
    assert not np.allclose(noisy[0], quiet)
    for b in built.values():
        np.testing.assert_array_equal(b.call(params, *inputs, deterministic=True), quiet)


@in_both
def test_deterministic_in_the_call_wins(front_end):
    module, rng = MODULES["mixed heads"], jax.random.key(5)
    built = build(front_end, module, dropout_rate=0.5, deterministic=True)
    quiet = built.call(built.params, *module.inputs())
    noisy = built.call(built.params, *module.inputs(), deterministic=False, dropout_rng=rng)
    assert not np.allclose(noisy, quiet)


@in_both
def test_the_heads_of_every_score_drop_weights_of_their_own(front_end):
    """Two groups of one head each, both uniform: the same random numbers would drop alike."""
    module = Module(
        "MultiHeadAttention",
        dict(
            num_heads=2,
            query_features=2,
            value_head_features=64,
            score=("dot", "gaussian"),
            out_features=128,
            use_bias=False,
        ),
        (2, 2, 2),
    )
    built = build(front_end, module, dropout_rate=0.5, normalize=regard.Uniform())
    eye = jnp.eye(64, dtype=jnp.float32)
    params = jax.tree.map(jnp.ones_like, built.params)
    zero = jnp.zeros_like(eye)
    params["out"]["kernel"] = jnp.stack([jnp.hstack([eye, zero]), jnp.hstack([zero, eye])])
    x = jnp.ones((2, 64, 2), jnp.float32)
    out = built.call(params, x, deterministic=False, dropout_rng=jax.random.key(0))
    assert not np.allclose(out[..., :64], out[..., 64:])


def test_nnx_rngs_from_the_constructor_and_from_the_call():
    module = MODULES["additive"]
    inputs = module.inputs()
    made = regard.nnx.AdditiveAttention(
        **module.arguments, dropout_rate=0.5, deterministic=False, rngs=nnx.Rngs(0, dropout=1)
    )
    first, second = made(*inputs), made(*inputs)
    assert not np.allclose(first, second)  # the stream moves on
    again = [made(*inputs, rngs=nnx.Rngs(dropout=7)) for _ in range(2)]
    np.testing.assert_array_equal(*again)
    made.eval()
    quiet = made(*inputs)
    np.testing.assert_array_equal(quiet, made(*inputs))
    assert not np.allclose(nnx.view(made, deterministic=False)(*inputs), quiet)


def test_linen_rngs_from_apply():
    module = MODULES["additive"]
    inputs = module.inputs()
    made = regard.linen.AdditiveAttention(**module.arguments, dropout_rate=0.5, deterministic=False)
    variables = made.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, *inputs)
    first, second = (
        made.apply(variables, *inputs, rngs={"dropout": jax.random.key(seed)}) for seed in (1, 2)
    )
    assert not np.allclose(first, second)


# ---------------------------------------------------------------------------------------------
# Partitioning metadata.


@on_every_module
def test_every_parameter_has_logical_axes_the_same_in_both(module):
    made = build("nnx", module, partitioned=True).module
    ours = {
        ".".join(path): param.get_metadata("out_sharding")
        for path, param in nnx.to_flat_state(nnx.state(made, nnx.Param))
    }
    linen_module = build("linen", module, partitioned=True).module
    variables = jax.eval_shape(linen_module.init, jax.random.key(0), *module.inputs())
    boxed = variables.get("params", {})
    theirs = {
        ".".join(step.key for step in path): box.names
        for path, box in jax.tree_util.tree_leaves_with_path(
            boxed, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned)
        )
    }
    assert ours == theirs
    shapes = {
        ".".join(path): param.shape for path, param in nnx.to_flat_state(nnx.state(made, nnx.Param))
    }
    for name, axes in ours.items():
        assert len(axes) == len(shapes[name])
        assert set(axes) - {None} <= set(regard.nnx.LOGICAL_AXES)


def test_metadata_on_request_only():
    module = MODULES["mixed heads"]
    made = build("nnx", module).module
    for _, param in nnx.to_flat_state(nnx.state(made, nnx.Param)):
        assert not param.has_metadata("out_sharding")
    plain = build("linen", module).module
    for leaf in jax.tree.leaves(plain.init(jax.random.key(0), *module.inputs())):
        assert isinstance(leaf, jax.Array)


def test_boxed_and_plain_parameters_both_apply():
    module = MODULES["mixed heads"]
    made, inputs = build("linen", module, partitioned=True).module, module.inputs()
    boxed = made.init(jax.random.key(0), *inputs)
    assert isinstance(boxed["params"]["out"]["kernel"], nn.LogicallyPartitioned)
    np.testing.assert_array_equal(
        made.apply(boxed, *inputs), made.apply(nn.meta.unbox(boxed), *inputs)
    )


def test_a_partitioned_initializer_wins():
    kernel_init = jax.nn.initializers.lecun_normal()
    mine = ("rows", "columns")
    made = regard.linen.BilinearAttention(kernel_init=nn.with_partitioning(kernel_init, mine))
    boxed = made.init(jax.random.key(0), *MODULES["bilinear"].inputs())["params"]["kernel"]
    assert boxed.names == mine
    assert boxed.value.shape == (6, 5)
    with nnx.use_eager_sharding(False):
        theirs = regard.nnx.BilinearAttention(
            6, 5, kernel_init=nnx.with_partitioning(kernel_init, mine), rngs=nnx.Rngs(0)
        )
    assert theirs.kernel.get_metadata("out_sharding") == mine
    assert theirs.kernel.shape == (6, 5)


# ---------------------------------------------------------------------------------------------
# Loading.


@pytest.mark.parametrize("name", ["gaussian", "mixed heads"])
def test_load_keeps_boxes_and_dtypes(name):
    module = MODULES[name]
    built = build("linen", module, partitioned=True)
    boxed = built.module.init(jax.random.key(0), *module.inputs())
    params = built.params
    loaded = regard.linen.load(boxed, jax.tree.map(lambda x: np.asarray(x, np.float64), params))
    assert jax.tree.structure(loaded) == jax.tree.structure(boxed)
    assert_trees_equal(nn.meta.unbox(loaded)["params"], params)
    made = getattr(regard.nnx, module.name)(**module.arguments, rngs=nnx.Rngs(0))
    regard.nnx.load(made, params)
    assert_trees_equal(nnx.to_pure_dict(nnx.state(made, nnx.Param)), params)
