"""Both front ends behind one face: a module as a function of its parameters.

A module joins the suite by one line in MODULES; every test of tests/modules then runs on it, in
NNX and in linen.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

import regard.linen
import regard.nnx

B, T, S = 2, 5, 7


@dataclass(frozen=True)
class Module:
    """A class of both front ends with its arguments, and the widths of its inputs."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    widths: tuple[int, int, int] = (6, 6, 4)
    params: int = 0  # how many arrays it owns

    def inputs(self, seed=0, lengths=(T, S), dtype=np.float32):
        """query, key, value."""
        rng = np.random.default_rng(seed)
        query_len, key_len = lengths
        shapes = zip((query_len, key_len, key_len), self.widths, strict=True)
        return tuple(jnp.asarray(rng.standard_normal((B, *shape)), dtype) for shape in shapes)


WIDE = dict(
    query_features=6,
    key_features=5,
    value_features=3,
    query_head_features=4,
    value_head_features=3,
    out_features=7,
)
MIXED = ("additive", "dot", "gaussian", "additive")

MODULES = {
    "dot": Module("DotProductAttention"),
    "gaussian": Module("GaussianAttention", dict(width=1.5), params=1),
    "bilinear": Module(
        "BilinearAttention", dict(query_features=6, key_features=5), (6, 5, 4), params=1
    ),
    "bilinear, bias": Module(
        "BilinearAttention",
        dict(query_features=6, key_features=5, use_bias=True),
        (6, 5, 4),
        params=2,
    ),
    "additive": Module(
        "AdditiveAttention",
        dict(hidden_features=8, query_features=6, key_features=5),
        (6, 5, 4),
        params=3,
    ),
    "additive, bias": Module(
        "AdditiveAttention",
        dict(hidden_features=8, query_features=6, key_features=5, use_bias=True),
        (6, 5, 4),
        params=4,
    ),
    "additive, no kernels": Module(
        "AdditiveAttention", dict(hidden_features=None, query_features=6), params=1
    ),
    "heads": Module("MultiHeadAttention", dict(num_heads=4, **WIDE), (6, 5, 3), params=8),
    "heads, no bias": Module(
        "MultiHeadAttention", dict(num_heads=4, use_bias=False, **WIDE), (6, 5, 3), params=4
    ),
    "normalized heads": Module(
        "MultiHeadAttention", dict(num_heads=4, normalize_qk=True, **WIDE), (6, 5, 3), params=10
    ),
    "gaussian heads": Module(
        "MultiHeadAttention", dict(num_heads=4, score="gaussian", **WIDE), (6, 5, 3), params=9
    ),
    "bilinear heads": Module(
        "MultiHeadAttention",
        dict(num_heads=4, score="bilinear", key_head_features=2, **WIDE),
        (6, 5, 3),
        params=9,
    ),
    "additive heads": Module(
        "MultiHeadAttention", dict(num_heads=4, score="additive", **WIDE), (6, 5, 3), params=9
    ),
    "additive heads, kernels": Module(
        "MultiHeadAttention",
        dict(num_heads=4, score="additive", hidden_features=8, key_head_features=2, **WIDE),
        (6, 5, 3),
        params=11,
    ),
    "grouped heads": Module(
        "MultiHeadAttention", dict(num_heads=4, key_heads=2, **WIDE), (6, 5, 3), params=8
    ),
    "mixed heads": Module(
        "MultiHeadAttention", dict(num_heads=4, score=MIXED, **WIDE), (6, 5, 3), params=10
    ),
    "mixed grouped heads": Module(
        "MultiHeadAttention",
        dict(num_heads=4, key_heads=2, score=MIXED, **WIDE),
        (6, 5, 3),
        params=10,
    ),
    "rotary heads": Module(
        "MultiHeadAttention", dict(num_heads=4, positions="rotary", **WIDE), (6, 5, 3), params=8
    ),
    "relative mixed heads": Module(
        "MultiHeadAttention",
        dict(num_heads=4, positions="relative", score=MIXED, **WIDE),
        (6, 5, 3),
        params=11,
    ),
}
FRONT_ENDS = ("nnx", "linen")


class Built(NamedTuple):
    """call(params, *inputs, **keywords), random parameters for it, and the module."""

    call: Callable[..., Any]
    params: dict[str, Any]
    module: Any


def build(front_end, module, **more) -> Built:
    """The module in one of the front ends; `more` are further arguments.

    Its parameters are drawn here, biases and widths too: none stays at the constant it starts at.
    """
    made, shapes, call = _BUILD[front_end](module, module.arguments | more)
    return Built(call, drawn(shapes), made)


def _build_linen(module, arguments):
    made = getattr(regard.linen, module.name)(**arguments)
    variables = jax.eval_shape(functools.partial(_init, made), *module.inputs())

    def apply(params, *inputs, **keywords):
        return made.apply({"params": params} if params else {}, *inputs, **keywords)

    return made, nn.meta.unbox(variables.get("params", {})), apply


def _init(made, *inputs):
    return made.init(jax.random.key(1), *inputs, deterministic=True)


def _build_nnx(module, arguments):
    cls = getattr(regard.nnx, module.name)
    made = nnx.eval_shape(lambda: cls(**arguments, rngs=nnx.Rngs(1)))
    definition, state, others = nnx.split(made, nnx.Param, ...)

    def call(params, *inputs, **keywords):
        filled = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(params))
        return nnx.merge(definition, filled, others)(*inputs, **keywords)

    return made, nnx.to_pure_dict(state), call


_BUILD = {"linen": _build_linen, "nnx": _build_nnx}


def initialized(front_end, module, **more):
    """The parameters as the module itself starts with them."""
    if front_end == "linen":
        made = getattr(regard.linen, module.name)(**module.arguments | more)
        return nn.meta.unbox(_init(made, *module.inputs()))["params"]
    made = getattr(regard.nnx, module.name)(**module.arguments | more, rngs=nnx.Rngs(1))
    return nnx.to_pure_dict(nnx.state(made, nnx.Param))


def drawn(shapes, seed=3):
    """Random parameters of these shapes."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        values = 0.5 * rng.standard_normal(leaf.shape)
        if path[-1].key == "width":
            values = 1.0 + np.abs(values)
        return jnp.asarray(values, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def assert_trees_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True
    ):
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


def assert_close(got, expected, tolerance, name=""):
    """The greatest error, relative to the greatest entry."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape
    scale = np.abs(expected).max(initial=0.0) or 1.0
    np.testing.assert_allclose(got / scale, expected / scale, rtol=0, atol=tolerance, err_msg=name)
