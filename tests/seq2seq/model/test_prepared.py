"""Models prepared for search: once, until a parameter is replaced, and without keeping models."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from regard.seq2seq.decode.search import SearchOptions, greedy
from regard.seq2seq.model.config import Config, TransformerConfig
from regard.seq2seq.model.prepared import prepared
from regard.seq2seq.model.translation_model import Model

SIZES = dict(source_vocab=20, target_vocab=30, embedding=8)
SOURCE, LENS = jnp.array([[5, 6, 3], [7, 3, 0]]), jnp.array([3, 2])


def small(architecture="recurrent"):
    if architecture == "transformer":
        config = TransformerConfig(**SIZES, heads=2, feed_forward=16)
    else:
        config = Config(**SIZES, encoder=8, decoder=16)
    return Model(config, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("architecture", ["recurrent", "transformer"])
def test_kernels_are_prepared_once_in_the_dtype_of_the_products(architecture):
    model = small(architecture)
    found = prepared(model, "bfloat16")
    assert prepared(model, "bfloat16") is found
    assert prepared(model, "float32") is not found
    assert found.output.kernel.dtype == jnp.bfloat16
    for path, leaf in jax.tree_util.tree_leaves_with_path(found.params):
        kernel = leaf.ndim > 1 and "embedding" not in str(path[0])
        assert leaf.dtype == (jnp.bfloat16 if kernel else jnp.float32), path
    own = jax.tree.leaves(nnx.state(model))
    assert {leaf.dtype for leaf in own} == {jnp.dtype("float32")}
    for given, same in zip(own, jax.tree.leaves(prepared(model, "float32").params), strict=True):
        assert same is given, "a parameter was copied"


def test_a_replaced_parameter_is_prepared_again():
    model, options = small(), SearchOptions(beam=1, dtype="float32")
    before = greedy(model, SOURCE, LENS, options)
    model.output_bias[...] = model.output_bias[...].at[9].add(100.0)
    after = greedy(model, SOURCE, LENS, options)
    assert not (before.tokens == 9).any()
    np.testing.assert_array_equal(after.tokens[:, 0, 0], 9)


def test_a_model_that_is_not_used_any_more_is_not_kept():
    model = small()
    arrays = weakref.ref(prepared(model, "float32").output.kernel)
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None
    assert arrays() is None
