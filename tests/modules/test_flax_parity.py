"""regard's MultiHeadAttention where Flax's was: the same arguments, call, parameters and outputs,
with nothing changed but the import."""

import inspect

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
from modules.front_ends import assert_close, assert_trees_equal

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.sampled(2)]

FEATURES, LENGTH = 12, 5


@pytest.fixture(autouse=True)
def promotion():
    """Flax's own code promotes dtypes and ranks, which this suite's strict settings refuse."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def inputs(*batch, length=LENGTH, features=FEATURES, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal((*batch, length, features)), jnp.float32)


X, Y = inputs(2), inputs(2, length=7, seed=1)
Y5 = inputs(2, length=7, features=5, seed=2)
MASK = jnp.asarray(np.random.default_rng(3).random((2, 4, 5, 7)) < 0.7).at[..., 0].set(True)

# name -> constructor's arguments, NNX; arrays; the call's keywords.
CALLS = {
    "self-attention": ({}, (X,), {}),
    "cross-attention": ({}, (X, Y), {}),
    "key and value apart": ({}, (X, Y, Y + 1), {}),
    "by position": ((8, 6), (X, Y), {}),
    "qkv and out features": (dict(qkv_features=8, out_features=6), (X, Y), {}),
    "keys of another width": (dict(in_kv_features=5), (X, Y5), {}),
    "grouped keys": (dict(num_kv_heads=2), (X, Y), {}),
    "no bias": (dict(use_bias=False), (X,), {}),
    "normalized": (dict(normalize_qk=True), (X, Y), {}),
    "own initializers": (
        dict(
            kernel_init=jax.nn.initializers.normal(0.3),
            out_kernel_init=jax.nn.initializers.normal(0.5),
            bias_init=jax.nn.initializers.normal(0.1),
            out_bias_init=jax.nn.initializers.ones,
        ),
        (X,),
        {},
    ),
    "bfloat16": (dict(dtype=jnp.bfloat16), (X,), {}),
    "parameters of bfloat16": (dict(param_dtype=jnp.bfloat16), (X,), {}),
    "precision": (dict(precision=jax.lax.Precision.HIGHEST), (X,), {}),
    "no dropout": (dict(dropout_rate=0.5, deterministic=True), (X,), {}),
    "deterministic in the call": (dict(dropout_rate=0.5), (X,), dict(deterministic=True)),
    "a mask": ({}, (X, Y), dict(mask=MASK)),
    "a mask of floats": ({}, (X, Y), dict(mask=MASK.astype(jnp.float32))),
    "no batch": ({}, (X[0], Y[0]), dict(mask=MASK[0])),
    "two axes of batch": (
        {},
        (inputs(2, 3), inputs(2, 3, length=7)),
        dict(mask=jnp.broadcast_to(MASK[:, None], (2, 3, 4, 5, 7))),
    ),
    "Flax's own attention_fn": (dict(attention_fn=nnx.dot_product_attention), (X,), {}),
}
ONLY_NNX = {"in_kv_features", "num_kv_heads", "attention_fn"}


@pytest.mark.parametrize("name", CALLS)
def test_nnx(name):
    """The same seed draws the same parameters, and the outputs agree."""
    arguments, arrays, keywords = CALLS[name]
    position = arguments if isinstance(arguments, tuple) else ()
    arguments = {} if position else arguments
    theirs, ours = (
        front.MultiHeadAttention(4, FEATURES, *position, **arguments, rngs=nnx.Rngs(0, dropout=1))
        for front in (nnx, regard.nnx)
    )
    params = [nnx.to_pure_dict(nnx.state(made, nnx.Param)) for made in (theirs, ours)]
    assert_trees_equal(*params)
    wanted, got = theirs(*arrays, decode=False, **keywords), ours(*arrays, **keywords)
    assert got.dtype == wanted.dtype
    assert_close(got, wanted, 2e-2 if got.dtype == jnp.bfloat16 else 2e-6)


@pytest.mark.parametrize(
    "name", [name for name, call in CALLS.items() if not ONLY_NNX & set(call[0])]
)
def test_linen(name):
    arguments, arrays, keywords = CALLS[name]
    if isinstance(arguments, tuple):  # linen's second argument is dtype
        position, arguments = (jnp.float32, jnp.float32, *arguments), {}
    else:
        position = ()
    theirs, ours = (
        front.MultiHeadDotProductAttention(4, *position, **arguments)
        for front in (nn, regard.linen)
    )
    variables = [made.init(jax.random.key(0), *arrays, **keywords) for made in (theirs, ours)]
    assert_trees_equal(*variables)
    wanted = theirs.apply(variables[0], *arrays, **keywords)
    got = ours.apply(variables[0], *arrays, **keywords)
    assert got.dtype == wanted.dtype
    assert_close(got, wanted, 2e-2 if got.dtype == jnp.bfloat16 else 2e-6)


@pytest.mark.parametrize("front", ["nnx", "linen"])
def test_every_argument_of_flax_is_taken(front):
    """By name and, where Flax takes it so, by position."""
    theirs, ours = (nnx, regard.nnx) if front == "nnx" else (nn, regard.linen)
    ours = inspect.signature(ours.MultiHeadAttention.__init__).parameters
    theirs = inspect.signature(theirs.MultiHeadAttention.__init__).parameters
    assert set(theirs) <= set(ours)
    by_position = [p.name for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    wanted = [p.name for p in theirs.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert by_position[:7] == wanted[:7]


def test_flax_numbers_for_is_causal():
    """Aligned at the start, also where T is not S."""
    theirs, ours = (
        front.MultiHeadAttention(4, FEATURES, rngs=nnx.Rngs(0)) for front in (nnx, regard.nnx)
    )
    got = ours(X, Y, is_causal=True)
    assert_close(got, theirs(X, Y, decode=False, is_causal=True), 2e-6)
    same = ours(X, Y, mask=regard.Mask.causal(align="start"))
    np.testing.assert_array_equal(got, same)


def test_masks_of_numbers_that_are_no_masks():
    ours = regard.nnx.MultiHeadAttention(4, FEATURES, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"of zeros and ones.*Fix: bias="):
        ours(X, mask=jnp.where(jnp.eye(LENGTH, dtype=bool), 0.0, -jnp.inf))


@pytest.mark.parametrize("batch", [(2,), (2, 3), ()], ids=["batch", "two axes", "no batch"])
def test_nnx_decode(batch):
    """init_cache(shape) and one token at a time; Flax's variables after each."""
    x = inputs(*batch)
    theirs, ours = (
        front.MultiHeadAttention(4, FEATURES, num_kv_heads=2, decode=True, rngs=nnx.Rngs(0))
        for front in (nnx, regard.nnx)
    )
    for made in (theirs, ours):
        made.init_cache(x.shape)
    for t in range(LENGTH):
        token = x[..., t : t + 1, :]
        assert_close(ours(token), theirs(token), 2e-6)
        for name in ("cached_key", "cached_value", "cache_index"):
            np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), atol=1e-6)
    with pytest.raises(ValueError, match="the memory would overflow"):
        ours(x[..., :1, :])


def test_nnx_decode_in_chunks_and_in_jit():
    ours = regard.nnx.MultiHeadAttention(4, FEATURES, rngs=nnx.Rngs(0))
    full = ours(X, mask=regard.Mask.causal())
    decoding = nnx.view(ours, decode=True, batch_size=2, max_length=LENGTH)
    step = nnx.jit(lambda module, x: module(x))
    parts = [step(decoding, chunk) for chunk in (X[:, :3], X[:, 3:])]
    assert_close(jnp.concatenate(parts, 1), full, 2e-6)
    assert ours.cached_key is None or ours.decode is None


@pytest.mark.parametrize("batch", [(2,), (2, 3), ()], ids=["batch", "two axes", "no batch"])
def test_linen_decode(batch):
    x = inputs(*batch)
    theirs, ours = (
        front.MultiHeadDotProductAttention(4, decode=True) for front in (nn, regard.linen)
    )
    variables = [made.init(jax.random.key(0), x) for made in (theirs, ours)]
    shapes = [jax.tree.map(lambda a: (a.shape, str(a.dtype)), tree) for tree in variables]
    assert shapes[0] == shapes[1]
    for t in range(LENGTH):
        token = x[..., t : t + 1, :]
        outs = []
        for i, made in enumerate((theirs, ours)):
            out, cache = made.apply(variables[i], token, mutable=["cache"])
            variables[i] = {**variables[i], **cache}
            outs.append(out)
        assert_close(outs[1], outs[0], 2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *variables)


def test_decode_without_a_cache_and_with_lengths():
    ours = regard.nnx.MultiHeadAttention(4, FEATURES, decode=True, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"decode=True needs a cache. Fix: init_cache\(input_sha"):
        ours(X[:, :1])
    ours.init_cache(X.shape)
    message = r"one index for the whole batch, as Flax does. Got {} as well. Fix: decode=False"
    with pytest.raises(ValueError, match=message.format("valid_lens")):
        ours(X[:, :2], valid_lens=jnp.asarray([2, 1], jnp.int32))
    with pytest.raises(ValueError, match=message.format("cache")):
        ours(X[:, :2], cache=ours.init_cache(2, LENGTH))


def test_sown_weights():
    theirs, ours = (
        front.MultiHeadAttention(4, FEATURES, rngs=nnx.Rngs(0)) for front in (nnx, regard.nnx)
    )
    run = nnx.capture(
        lambda made, **keywords: made(X, sow_weights=True, **keywords), nnx.Intermediate
    )
    (_, found), (_, wanted) = run(ours), run(theirs, decode=False)
    wanted = wanted["attention_weights"][0]
    assert_close(found["attention_weights"][0], wanted, 2e-6)
    theirs, ours = nn.MultiHeadAttention(4), regard.linen.MultiHeadAttention(4)
    variables = theirs.init(jax.random.key(0), X)
    trees = [
        made.apply(variables, X, sow_weights=True, mutable=["intermediates"])[1]
        for made in (ours, theirs)
    ]
    jax.tree.map(lambda a, b: assert_close(a, b, 2e-6), *trees)


def test_metadata_and_rngs_of_nnx():
    made = regard.nnx.MultiHeadAttention(
        4,
        FEATURES,
        dropout_rate=0.5,
        deterministic=False,
        keep_rngs=False,
        normalize_qk=True,
        kernel_metadata={"group": "qkv"},
        out_kernel_metadata={"group": "out"},
        query_ln_scale_metadata={"group": "norm"},
        rngs=nnx.Rngs(0),
    )
    assert made.query.kernel.get_metadata("group") == "qkv"
    assert made.out.kernel.get_metadata("group") == "out"
    assert made.query_ln.scale.get_metadata("group") == "norm"
    assert made.rngs is None
    assert made(X, rngs=nnx.Rngs(dropout=0)).shape == X.shape


def test_the_old_inputs_kv_of_linen():
    made = regard.linen.MultiHeadDotProductAttention(4)
    variables = made.init(jax.random.key(0), X, Y)
    with pytest.warns(DeprecationWarning, match="inputs_kv arg will be deprecated"):
        got = made.apply(variables, X, inputs_kv=Y)
    np.testing.assert_array_equal(got, made.apply(variables, X, Y))
    with pytest.raises(ValueError, match="`inputs_kv` must be None"):
        made.apply(variables, X, Y, inputs_kv=Y)


@pytest.mark.parametrize("name", ["out_sharding", "qkv_sharding"])
def test_shardings_of_the_call_name_ours(name):
    made = regard.nnx.MultiHeadAttention(4, FEATURES, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=f"regard has no {name}"):
        made(X, **{name: jax.sharding.PartitionSpec()})


def test_normalized_weights_move_both_ways():
    theirs = nnx.MultiHeadAttention(4, FEATURES, normalize_qk=True, rngs=nnx.Rngs(0))
    theirs.query_ln.scale[...] = jnp.asarray([0.5, 1.0, 2.0], jnp.float32)
    found = regard.interop.from_flax(nnx.to_pure_dict(nnx.state(theirs, nnx.Param)))
    ours = regard.nnx.MultiHeadAttention(**found.arguments, rngs=nnx.Rngs(1))
    regard.nnx.load(ours, found.params)
    assert_close(ours(X), theirs(X, decode=False), 2e-6)
    back = regard.interop.to_flax(nnx.to_pure_dict(nnx.state(ours, nnx.Param)))
    assert_trees_equal(back, found.params)


def test_a_padding_row_is_zero_and_not_an_average():
    """The one answer that differs on purpose: a query that every key is masked for."""
    theirs, ours = (
        front.MultiHeadAttention(4, FEATURES, use_bias=False, rngs=nnx.Rngs(0))
        for front in (nnx, regard.nnx)
    )
    mask = jnp.zeros((LENGTH, LENGTH), bool).at[1:].set(True)
    got, wanted = ours(X, mask=mask), theirs(X, mask=mask, decode=False)
    np.testing.assert_array_equal(got[:, 0], 0.0)
    assert_close(got[:, 1:], wanted[:, 1:], 2e-6)


def test_a_mask_of_another_batch_names_its_shape():
    ours = regard.nnx.MultiHeadAttention(4, FEATURES, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"mask and bias must broadcast to.*Got \[5, 1, 5, 5\]"):
        ours(inputs(2, 3), mask=jnp.ones((5, 1, 5, 5), bool))
