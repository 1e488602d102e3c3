"""The other libraries' layers behind one face: arrays in, outputs and gradients out.

A library joins the parity suite by one line in PEERS.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regard.interop

B, T, S = 3, 7, 7
FEATURES, KEY_FEATURES, VALUE_FEATURES = 12, 12, 12


@contextlib.contextmanager
def as_users_run_it():
    """Without the strict flags of conftest.py, which these libraries were not written for."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@dataclass
class Layer:
    """One layer of another library.

    Attributes:
        arrays: its weights, drawn at random, under the names its reader knows.
        run: (arrays, query, key, value, may [B, T, S], cotangent) -> out, and the gradients of
            sum(cotangent * out) by the arrays and by query, key and value.
        read: arrays -> regard.interop.Weights.
        module: which of regard's classes the weights are for.
    """

    arrays: Any
    run: Callable[..., Any]
    read: Callable[[Any], regard.interop.Weights]
    module: str = "MultiHeadAttention"


def redrawn(arrays, seed=5):
    """Random numbers of the same shapes: biases, too, which the libraries start at zero."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(0.4 * rng.standard_normal(np.shape(x)), jnp.float32), arrays
    )


def by_jax(call):
    """`run` for a library that is differentiated by JAX."""

    def run(arrays, query, key, value, may, cotangent):
        with as_users_run_it():
            out, pull = jax.vjp(
                lambda arrays, *inputs: call(arrays, *inputs, may), arrays, query, key, value
            )
            slopes, *by_inputs = pull(cotangent)
        return out, slopes, tuple(by_inputs)

    return jax.jit(run)


def flax_linen(use_bias=True):
    nn = pytest.importorskip("flax.linen")
    layer = nn.MultiHeadDotProductAttention(num_heads=4, use_bias=use_bias)
    x = jnp.ones((1, 2, FEATURES), jnp.float32)
    with as_users_run_it():
        shapes = jax.eval_shape(layer.init, jax.random.key(0), x, x)["params"]

    def call(params, query, key, value, may):
        return layer.apply({"params": params}, query, key, value, mask=may[:, None])

    return Layer(redrawn(shapes), by_jax(call), regard.interop.from_flax)


def flax_nnx(num_kv_heads=None):
    nnx = pytest.importorskip("flax.nnx")
    with as_users_run_it():
        layer = nnx.MultiHeadAttention(
            4, FEATURES, num_kv_heads=num_kv_heads, decode=False, rngs=nnx.Rngs(0)
        )
    definition, state = nnx.split(layer)

    def call(params, query, key, value, may):
        filled = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(params))
        return nnx.merge(definition, filled)(query, key, value, mask=may[:, None])

    return Layer(redrawn(nnx.to_pure_dict(state)), by_jax(call), regard.interop.from_flax)


def keras_heads(use_bias=True, groups=None):
    keras = pytest.importorskip("keras")
    if groups is None:
        layer = keras.layers.MultiHeadAttention(
            num_heads=4, key_dim=5, value_dim=3, output_shape=9, use_bias=use_bias
        )
    else:
        layer = keras.layers.GroupQueryAttention(
            head_dim=5, num_query_heads=4, num_key_value_heads=groups, use_bias=use_bias
        )
    with as_users_run_it():
        layer.build((B, T, FEATURES), (B, S, FEATURES), (B, S, FEATURES))

    def call(weights, query, key, value, may):
        # Asked for its weights, Keras leaves jax.nn's path, which refuses its own value_dim.
        (out, _), _ = layer.stateless_call(
            weights, [], query, value, key, attention_mask=may, return_attention_scores=True
        )
        return out

    shapes = [np.zeros(weight.shape) for weight in layer.trainable_variables]
    assert [w.shape for w in layer.get_weights()] == [x.shape for x in shapes]
    return Layer(redrawn(shapes), by_jax(call), regard.interop.from_keras)


def keras_additive(use_scale=True):
    keras = pytest.importorskip("keras")
    layer = keras.layers.AdditiveAttention(use_scale=use_scale)
    with as_users_run_it():
        layer.build([(B, T, FEATURES), (B, S, FEATURES), (B, S, FEATURES)])

    def call(weights, query, key, value, may):
        # Its masks are of keys and causal; any other table goes in through the scores.
        with keras.StatelessScope(zip(layer.trainable_variables, weights, strict=True)):
            scores = layer._calculate_scores(query, key)
            return layer._apply_scores(scores, value, may)[0]

    shapes = [np.zeros(weight.shape) for weight in layer.trainable_variables]
    return Layer(
        redrawn(shapes),
        by_jax(call),
        lambda weights: regard.interop.from_keras_additive(weights, FEATURES),
        "AdditiveAttention",
    )


def equinox_heads(**biases):
    eqx = pytest.importorskip("equinox")
    layer = eqx.nn.MultiheadAttention(
        4, FEATURES, qk_size=5, vo_size=3, output_size=9, key=jax.random.key(0), **biases
    )
    arrays, rest = eqx.partition(layer, eqx.is_array)

    def call(arrays, query, key, value, may):
        return jax.vmap(eqx.combine(arrays, rest))(query, key, value, may)

    return Layer(
        redrawn(arrays),
        by_jax(call),
        lambda arrays: regard.interop.from_equinox(eqx.combine(arrays, rest)),
    )


def torch_heads(bias=True, kdim=None, vdim=None):
    torch = pytest.importorskip("torch")
    layer = torch.nn.MultiheadAttention(
        FEATURES, 4, bias=bias, kdim=kdim, vdim=vdim, batch_first=True
    )
    arrays = redrawn({name: np.zeros(x.shape) for name, x in layer.state_dict().items()})

    def run(arrays, query, key, value, may, cotangent):
        state = {name: torch.tensor(np.asarray(x)) for name, x in arrays.items()}
        layer.load_state_dict(state)
        layer.zero_grad()
        inputs = [torch.tensor(np.asarray(x), requires_grad=True) for x in (query, key, value)]
        # torch's mask says True where nothing may be seen, and is (B·N, T, S).
        hidden = torch.tensor(np.repeat(~np.asarray(may), 4, axis=0))
        out, _ = layer(*inputs, attn_mask=hidden)
        out.backward(torch.tensor(np.asarray(cotangent)))
        slopes = {name: x.grad.numpy() for name, x in layer.named_parameters()}
        return out.detach().numpy(), slopes, tuple(x.grad.numpy() for x in inputs)

    return Layer(arrays, run, lambda arrays: regard.interop.from_torch(arrays, num_heads=4))


PEERS = {
    "flax.linen": flax_linen,
    "flax.linen, no bias": lambda: flax_linen(use_bias=False),
    "flax.nnx": flax_nnx,
    "flax.nnx, grouped": lambda: flax_nnx(num_kv_heads=2),
    "keras": keras_heads,
    "keras, no bias": lambda: keras_heads(use_bias=False),
    "keras, grouped": lambda: keras_heads(groups=2),
    "keras additive": keras_additive,
    "keras additive, no scale": lambda: keras_additive(use_scale=False),
    "equinox": equinox_heads,
    "equinox, biases": lambda: equinox_heads(
        use_query_bias=True, use_key_bias=True, use_value_bias=True, use_output_bias=True
    ),
    "equinox, one bias": lambda: equinox_heads(use_value_bias=True),
    "torch": torch_heads,
    "torch, no bias": lambda: torch_heads(bias=False),
    "torch, other widths": lambda: torch_heads(kdim=10, vdim=8),
}
