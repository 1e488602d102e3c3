"""Weights of other libraries' attention layers, read from plain arrays, and two written back.

Each reader returns what a regard module is made with and what it is loaded with, in the names of
parameters.py. No other framework is imported: a state dict, a list of arrays, or an object with
the right attributes is enough.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from regard.modules.loading import flatten, unflatten

__all__ = [
    "Weights",
    "from_torch",
    "to_torch",
    "from_flax",
    "to_flax",
    "from_keras",
    "from_keras_additive",
    "from_equinox",
]

SIDES = ("query", "key", "value")
LAYER_NORMS = ("query_ln.scale", "key_ln.scale")


class Weights(NamedTuple):
    """A layer from elsewhere, in regard's terms.

    Example:
        >>> import numpy as np, regard.nnx, regard.interop
        >>> from flax import nnx
        >>> kernel = np.ones((8, 2, 4), np.float32)  # (features, heads, width)
        >>> sides = {side: {"kernel": kernel} for side in ("query", "key", "value")}
        >>> found = regard.interop.from_flax(sides | {"out": {"kernel": kernel.reshape(2, 4, 8)}})
        >>> attention = regard.nnx.MultiHeadAttention(**found.arguments, rngs=nnx.Rngs(0))
        >>> regard.nnx.load(attention, found.params)
        >>> float(attention.query.kernel[0, 0, 0])
        1.0

    Attributes:
        arguments: for MultiHeadAttention(**arguments), of `regard.nnx` and of `regard.linen`.
        params: for `regard.nnx.load(module, params)` and `regard.linen.load(variables, params)`.
    """

    arguments: dict[str, Any]
    params: dict[str, Any]


def from_torch(state: Mapping[str, Any], num_heads: int, prefix: str = "") -> Weights:
    """Reads torch.nn.MultiheadAttention.

    Example:
        >>> import numpy as np, regard.interop
        >>> state = {"in_proj_weight": np.ones((24, 8)), "out_proj.weight": np.ones((8, 8))}
        >>> regard.interop.from_torch(state, num_heads=2).params["query"]["kernel"].shape
        (8, 2, 4)

    Args:
        state: `layer.state_dict()`, or arrays under its names: in_proj_weight, or q_proj_weight,
            k_proj_weight and v_proj_weight; in_proj_bias; out_proj.weight; out_proj.bias.
        num_heads: torch does not store it.
        prefix: what the names begin with in a larger model's state dict.

    Raises:
        ValueError: names what is missing, or what regard has no place for (bias_k, bias_v).
    """
    found = _arrays(state, prefix, "torch.nn.MultiheadAttention")
    packed = "in_proj_weight" in found
    separate = tuple(f"{side[0]}_proj_weight" for side in SIDES)
    weights = ("in_proj_weight",) if packed else separate
    _check_names(
        found,
        (*weights, "out_proj.weight"),
        ("in_proj_bias", "out_proj.bias"),
        "torch.nn.MultiheadAttention (without add_bias_kv)",
    )
    if packed:
        _check_rows("in_proj_weight", found["in_proj_weight"], 3)
        matrices = np.split(found["in_proj_weight"], 3)
    else:
        matrices = [found[name] for name in separate]
    width = matrices[0].shape[0]
    biases = np.split(found["in_proj_bias"], 3) if "in_proj_bias" in found else [None] * 3
    sides = [
        (matrix.T, bias, num_heads, name)
        for matrix, bias, name in zip(matrices, biases, weights * (3 if packed else 1), strict=True)
    ]
    return _dot_weights(sides, found["out_proj.weight"].T, found.get("out_proj.bias"), width)


def to_torch(params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Writes the arrays of torch.nn.MultiheadAttention, for `load_state_dict`.

    Example:
        >>> import numpy as np, regard.interop
        >>> state = {"in_proj_weight": np.ones((24, 8)), "out_proj.weight": np.ones((8, 8))}
        >>> there = regard.interop.from_torch(state, num_heads=2)
        >>> {name: x.shape for name, x in regard.interop.to_torch(there.params).items()}
        {'in_proj_weight': (24, 8), 'out_proj.weight': (8, 8)}

    Args:
        params: of a MultiHeadAttention with dot-product heads, all of one width, not grouped.

    Raises:
        ValueError: names what torch's layer cannot hold.
    """
    flat = _dot_only(params, "what torch.nn.MultiheadAttention can hold: dot-product heads")
    kernels = [flat[f"{side}.kernel"] for side in SIDES]
    shapes = {kernel.shape[1:] for kernel in kernels} | {flat["out.kernel"].shape[:2]}
    embed, width = kernels[0].shape[0], int(np.prod(kernels[0].shape[1:]))
    if len(shapes) != 1 or embed != width or flat["out.kernel"].shape[2] != embed:
        listed = ", ".join(f"{name} {list(x.shape)}" for name, x in flat.items() if x.ndim == 3)
        raise ValueError(
            "torch.nn.MultiheadAttention has as many key heads as query heads, one head width, and "
            f"in_features = num_heads × head width = out_features. Got {listed}."
        )
    rows = [kernel.reshape(kernel.shape[0], width).T for kernel in kernels]  # [width, features]
    state: dict[str, np.ndarray] = {}
    if len({row.shape for row in rows}) == 1:
        state["in_proj_weight"] = np.concatenate(rows)
    else:
        state |= {f"{side[0]}_proj_weight": row for side, row in zip(SIDES, rows, strict=True)}
    if "query.bias" in flat:
        biases = [flat[f"{side}.bias"].reshape(width) for side in SIDES]
        state["in_proj_bias"] = np.concatenate(biases)
    state["out_proj.weight"] = flat["out.kernel"].reshape(width, embed).T
    if "out.bias" in flat:
        state["out_proj.bias"] = flat["out.bias"]
    return state


def from_flax(params: Mapping[str, Any]) -> Weights:
    """Reads flax.linen.MultiHeadDotProductAttention and flax.nnx.MultiHeadAttention.

    Example:
        >>> import jax, jax.numpy as jnp, regard.interop
        >>> from flax import linen as nn
        >>> x = jnp.ones((1, 3, 8))
        >>> theirs = nn.MultiHeadDotProductAttention(num_heads=2)
        >>> variables = theirs.init(jax.random.key(0), x, x)
        >>> found = regard.interop.from_flax(variables["params"])
        >>> found.arguments["num_heads"], found.arguments["query_features"]
        (2, 8)

    Args:
        params: `variables["params"]`, or `nnx.to_pure_dict(nnx.state(module, nnx.Param))`.

    Raises:
        ValueError: names what is missing, or what regard has no place for.
    """
    return _weights_of(unflatten(_dot_only(params, "Flax's MultiHeadAttention", LAYER_NORMS)))


def to_flax(params: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the parameters of Flax's multi-head attention: `query`, `key`, `value`, `out`.

    regard's tree is Flax's, so this checks that Flax has a place for each array, and copies.

    Example:
        >>> import numpy as np, regard.interop
        >>> state = {"in_proj_weight": np.ones((24, 8)), "out_proj.weight": np.ones((8, 8))}
        >>> moved = regard.interop.to_flax(regard.interop.from_torch(state, num_heads=2).params)
        >>> moved["out"]["kernel"].shape
        (2, 4, 8)

    Raises:
        ValueError: names what Flax's layer cannot hold.
    """
    target = "what Flax's MultiHeadAttention can hold: dot-product heads"
    return unflatten(_dot_only(params, target, LAYER_NORMS))


def from_keras(weights: Sequence[Any]) -> Weights:
    """Reads keras.layers.MultiHeadAttention, and GroupQueryAttention.

    Keras calls its layer as (query, value, key); regard's modules are called (query, key, value).

    Example:
        >>> import numpy as np, regard.interop
        >>> kernel, out = np.ones((8, 2, 4)), np.ones((2, 4, 8))
        >>> regard.interop.from_keras([kernel, kernel, kernel, out]).arguments["num_heads"]
        2

    Args:
        weights: `layer.get_weights()`: query kernel, query bias, key's, value's and the
            output's, in this order; without biases, the four kernels.

    Raises:
        ValueError: not 4 or 8 arrays (a gated layer has more), or shapes that do not fit.
    """
    arrays = [np.asarray(array) for array in weights]
    if len(arrays) not in (4, 8):
        raise ValueError(
            "keras.layers.MultiHeadAttention has 4 weights, or 8 with biases; a gated one is not "
            f"supported. Got {len(arrays)}: {[list(array.shape) for array in arrays]}."
        )
    parts = ("kernel", "bias") if len(arrays) == 8 else ("kernel",)
    names = [f"{side}.{part}" for side in (*SIDES, "out") for part in parts]
    return _weights_of(unflatten(dict(zip(names, arrays, strict=True))))


def from_keras_additive(weights: Sequence[Any], features: int | None = None) -> Weights:
    """Reads keras.layers.AdditiveAttention: wᵀ tanh(q + k), for `AdditiveAttention`.

    Keras calls its layer as [query, value, key]; regard's modules are called (query, key, value).

    Example:
        >>> import numpy as np, regard.interop
        >>> regard.interop.from_keras_additive([np.ones(8)]).arguments
        {'hidden_features': None, 'query_features': 8, 'key_features': 8}

    Args:
        weights: `layer.get_weights()`: the scale (D,); nothing where use_scale=False.
        features: D, needed only where there are no weights.
    """
    arrays = [np.asarray(array) for array in weights]
    if not arrays and features is not None:
        arrays = [np.ones(features, np.float32)]
    if len(arrays) != 1 or arrays[0].ndim != 1:
        raise ValueError(
            "keras.layers.AdditiveAttention has one weight, scale (D,), or none with "
            f"use_scale=False. Got {[list(array.shape) for array in arrays]}. "
            "Fix: features=D for a layer without weights."
        )
    width = arrays[0].shape[0]
    arguments = dict(hidden_features=None, query_features=width, key_features=width)
    return Weights(arguments, {"vector": arrays[0]})


def from_equinox(module: Any, num_heads: int | None = None) -> Weights:
    """Reads equinox.nn.MultiheadAttention.

    Example:
        >>> import equinox, jax, regard.interop
        >>> theirs = equinox.nn.MultiheadAttention(2, 8, key=jax.random.key(0))
        >>> regard.interop.from_equinox(theirs).params["query"]["kernel"].shape
        (8, 2, 4)

    Args:
        module: the module, or a mapping of arrays under the names of its attributes:
            query_proj.weight, query_proj.bias, key_proj, value_proj and output_proj likewise.
        num_heads: needed for a mapping; None: the module's own.

    Raises:
        ValueError: names what is missing.
    """
    projections = ("query_proj", "key_proj", "value_proj", "output_proj")
    if not isinstance(module, Mapping):
        num_heads = module.num_heads if num_heads is None else num_heads
        module = {
            f"{name}.{part}": getattr(getattr(module, name), part)
            for name in projections
            for part in ("weight", "bias")
            if getattr(getattr(module, name), part) is not None
        }
    if num_heads is None:
        raise ValueError("from_equinox needs num_heads when it is given a mapping of arrays.")
    found = _arrays(module, "", "equinox.nn.MultiheadAttention")
    weights = [f"{name}.weight" for name in projections]
    biases = [f"{name}.bias" for name in projections]
    _check_names(found, weights, biases, "equinox.nn.MultiheadAttention")
    sides = [
        (found[weight].T, found.get(bias), num_heads, weight)
        for weight, bias in zip(weights[:3], biases[:3], strict=True)
    ]
    width = found["value_proj.weight"].shape[0]
    return _dot_weights(sides, found[weights[3]].T, found.get(biases[3]), width)


def _dot_weights(
    sides: Sequence[tuple[np.ndarray, np.ndarray | None, int, str]],
    out: np.ndarray,
    out_bias: np.ndarray | None,
    width: int,
) -> Weights:
    """From matrices (features, heads · width) to kernels with heads.

    Where only some of the projections have a bias, the others get zeros.
    """
    biased = out_bias is not None or any(bias is not None for _, bias, _, _ in sides)
    params: dict[str, Any] = {}
    for side, (matrix, bias, heads, name) in zip(SIDES, sides, strict=True):
        features, columns = matrix.shape
        if heads < 1 or columns % heads:
            raise ValueError(
                f"num_heads must divide the width that the heads share. Got num_heads {heads}, "
                f"{name} {list(matrix.T.shape)}."
            )
        params[side] = {"kernel": matrix.reshape(features, heads, columns // heads)}
        if biased:
            bias = np.zeros(columns, matrix.dtype) if bias is None else bias
            params[side]["bias"] = bias.reshape(heads, columns // heads)
    heads = sides[0][2]
    params["out"] = {"kernel": out.reshape(heads, width // heads, out.shape[1])}
    if biased:
        params["out"]["bias"] = np.zeros(out.shape[1], out.dtype) if out_bias is None else out_bias
    return _weights_of(params)


def _weights_of(params: dict[str, Any]) -> Weights:
    """The arguments that these parameters are the parameters for."""
    query, key, value, out = (params[side]["kernel"] for side in (*SIDES, "out"))
    if {query.ndim, key.ndim, value.ndim, out.ndim} != {3}:
        shapes = {name: list(np.shape(array)) for name, array in flatten(params).items()}
        raise ValueError(
            "kernels must be (features, heads, width), and the output's (heads, width, features). "
            f"Got {shapes}."
        )
    arguments = dict(
        num_heads=query.shape[1],
        query_features=query.shape[0],
        key_features=key.shape[0],
        value_features=value.shape[0],
        query_head_features=query.shape[2],
        key_head_features=key.shape[2],
        value_head_features=value.shape[2],
        out_features=out.shape[2],
        key_heads=key.shape[1],
        use_bias="bias" in params["query"],
        normalize_qk="query_ln" in params,
    )
    return Weights(arguments, params)


def _dot_only(
    params: Mapping[str, Any], layer: str, allowed: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """The four projections, flat, and nothing else but what is allowed."""
    flat = {name: np.asarray(array) for name, array in flatten(params).items()}
    kernels = [f"{side}.kernel" for side in (*SIDES, "out")]
    biases = [f"{side}.bias" for side in (*SIDES, "out")]
    _check_names(flat, kernels, [*biases, *allowed], layer)
    return flat


def _arrays(state: Mapping[str, Any], prefix: str, layer: str) -> dict[str, np.ndarray]:
    found = {
        name.removeprefix(prefix): np.asarray(array)
        for name, array in state.items()
        if name.startswith(prefix)
    }
    if not found:
        raise ValueError(f"no array of {layer} begins with {prefix!r}. Got {sorted(state)}.")
    return found


def _check_names(
    found: Mapping[str, np.ndarray], needed: Sequence[str], allowed: Sequence[str], layer: str
) -> None:
    missing = [name for name in needed if name not in found]
    extra = [name for name in found if name not in (*needed, *allowed)]
    if missing or extra:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in found.items())
        raise ValueError(
            f"these are not the arrays of {layer}: missing {missing or 'none'}, not known "
            f"{extra or 'none'}. Got {shapes}."
        )


def _check_rows(name: str, array: np.ndarray, parts: int) -> None:
    if array.ndim != 2 or array.shape[0] % parts:
        raise ValueError(
            f"{name} must have shape (3 × width, features): query, key and value below each other. "
            f"Got {name} {list(array.shape)}."
        )
