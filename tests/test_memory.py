"""Memory of the compiled program: linear in T and S, forward and backward. Compiled, never run."""

import functools

import jax
import jax.numpy as jnp
import pytest

import regard

pytestmark = pytest.mark.sampled(2)

GIB = 2**30


@functools.cache
def temporaries(length, score="additive", hidden=64, V=64):
    """Bytes of temporaries, forward and backward, B=1, T=S=length, float32, valid lengths given."""

    def loss(arrays, lens):
        if score == "additive":
            chosen = regard.Additive(arrays["query_kernel"], arrays["key_kernel"], arrays["vector"])
        else:
            chosen = regard.Dot()
        out = regard.attend(
            arrays["query"], arrays["key"], arrays["value"], score=chosen, valid_lens=lens
        )
        return jnp.sum(out * out)

    shapes = {
        "query": (1, length, hidden),
        "key": (1, length, hidden),
        "value": (1, length, V),
        "query_kernel": (hidden, hidden),
        "key_kernel": (hidden, hidden),
        "vector": (hidden,),
    }
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    lens = jax.ShapeDtypeStruct((1,), jnp.int32)
    compiled = jax.jit(jax.value_and_grad(loss)).lower(arrays, lens).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_additive_over_16k_fits_a_gibibyte():
    assert temporaries(16384) <= 1 * GIB


@pytest.mark.parametrize("score", ["additive", "dot"])
def test_twice_the_length_is_twice_the_memory(score):
    """Linear, +-15 %; the quadratic form would be 4 times."""
    assert temporaries(16384, score) <= 2.3 * temporaries(8192, score)


def test_the_reference_is_what_it_is_measured_against():
    """Negative control: the weights alone of the dense form, which this test would detect."""
    x = jax.ShapeDtypeStruct((1, 4096, 8), jnp.float32)

    def loss(q, k, v):
        return jnp.sum(jnp.square(regard.attend(q, k, v, implementation="reference")))

    compiled = jax.jit(jax.grad(loss)).lower(x, x, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes >= 4096 * 4096 * 4
