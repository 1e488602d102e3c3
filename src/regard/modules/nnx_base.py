"""What every NNX module here is made of: constructor arguments, parameters, dropout, loading.

The modules themselves are in nnx.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import jax
from jax import Array

try:
    from flax import nnx
    from flax.core import spmd
except ModuleNotFoundError as _error:
    raise ImportError(
        "regard.nnx needs Flax, which is not installed.\n"
        'Install it with: pip install "regard[flax]"'
    ) from _error

from regard.modules import arguments as shared
from regard.modules.loading import fit, flatten
from regard.modules.parameters import Parameter, drops, no_rng
from regard.normalize import Normalizer

__all__ = [
    "AdditiveConstructor",
    "Attention",
    "BilinearConstructor",
    "DotConstructor",
    "GaussianConstructor",
    "Group",
    "MultiHeadConstructor",
    "dropout_stream",
    "load",
    "nnx",
    "param",
]


@dataclass(kw_only=True)
class Rngs:
    """Args:
    rngs: random numbers for the parameters and for dropout.
    """

    rngs: nnx.Rngs | None = None


@dataclass
class DotConstructor(shared.DotArguments, Rngs): ...


@dataclass
class GaussianConstructor(shared.GaussianArguments, Rngs): ...


@dataclass
class BilinearConstructor(shared.BilinearArguments, Rngs): ...


@dataclass
class AdditiveConstructor(shared.AdditiveArguments, Rngs): ...


@dataclass
class MultiHeadConstructor(shared.MultiHeadArguments):
    """What NNX adds.

    Args:
        rngs: random numbers for the parameters and for dropout.
        keep_rngs: whether the module keeps a random stream of its own for dropout.
        kernel_metadata, bias_metadata, out_kernel_metadata, out_bias_metadata,
            query_ln_scale_metadata, key_ln_scale_metadata: of the nnx.Param.
    """

    num_heads: int
    in_features: int | None = None
    qkv_features: int | None = None
    out_features: int | None = None
    num_kv_heads: int | None = None
    in_kv_features: int | None = None
    rngs: nnx.Rngs = field(kw_only=True)
    keep_rngs: bool = field(default=True, kw_only=True)
    qkv_promote_dtype: Any = field(default=None, kw_only=True)
    out_promote_dtype: Any = field(default=None, kw_only=True)
    ln_promote_dtype: Any = field(default=None, kw_only=True)
    kernel_metadata: Mapping[str, Any] | None = field(default=None, kw_only=True)
    out_kernel_metadata: Mapping[str, Any] | None = field(default=None, kw_only=True)
    bias_metadata: Mapping[str, Any] | None = field(default=None, kw_only=True)
    out_bias_metadata: Mapping[str, Any] | None = field(default=None, kw_only=True)
    query_ln_scale_metadata: Mapping[str, Any] | None = field(default=None, kw_only=True)
    key_ln_scale_metadata: Mapping[str, Any] | None = field(default=None, kw_only=True)

    def metadata(self, name: str, leaf: str) -> Mapping[str, Any]:
        """Of the parameter `leaf` of the projection `name`."""
        found = getattr(self, f"{leaf}_metadata", None)
        if name == "out":
            found = getattr(self, f"out_{leaf}_metadata", None) or found
        elif leaf == "scale":
            found = getattr(self, f"{name}_scale_metadata")
        return found or {}


class Attention(nnx.Module):
    """What every module here can do: keep its options, and decide whether to drop weights."""

    normalize: Normalizer
    dropout_rate: float
    deterministic: bool | None
    dtype: Any
    param_dtype: Any
    precision: Any

    def __init__(self, arguments: Any, keep_rngs: bool = True) -> None:
        for option in fields(shared.Options):
            setattr(self, option.name, getattr(arguments, option.name))
        stream = dropout_stream(arguments.rngs) if keep_rngs and self.dropout_rate > 0.0 else None
        self.rngs = nnx.data(None if stream is None else stream.fork())

    def set_view(self, deterministic: bool | None = None) -> None:
        """For nnx.view: the same module, training or not.

        Args:
            deterministic: True: no dropout.
        """
        if deterministic is not None:
            self.deterministic = deterministic

    def _options(
        self,
        rngs: nnx.Rngs | nnx.RngStream | None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """The options of a call, with the module's own and a decision on dropout."""
        options |= dict(normalize=self.normalize, dtype=self.dtype, precision=self.precision)
        owner = type(self).__name__
        if drops(owner, self.dropout_rate, deterministic, self.deterministic):
            if dropout_rng is None:
                stream = self.rngs if rngs is None else dropout_stream(rngs)
                if stream is None:
                    raise no_rng(owner, self.dropout_rate, "rngs=nnx.Rngs(0)")
                dropout_rng = stream()
            options |= dict(dropout_rate=self.dropout_rate, dropout_rng=dropout_rng)
        return options


class Group(nnx.Module):
    """The parameters under one name: MultiHeadAttention's query, key, value, out, additive, …"""


def load(module: nnx.Module, params: Mapping[str, Any]) -> None:
    """Replaces all parameters of a module by `params`, in place, all or none.

    Example:
        >>> import jax.numpy as jnp, regard.nnx
        >>> from flax import nnx
        >>> attention = regard.nnx.GaussianAttention(rngs=nnx.Rngs(0))
        >>> regard.nnx.load(attention, {"width": jnp.array(2.0)})
        >>> float(attention.width[...])
        2.0

    Args:
        module: any nnx.Module; its nnx.Param are replaced.
        params: nested mappings of arrays, as `regard.interop` gives them.

    Raises:
        ValueError: lists every array that is missing, unexpected or of another shape.
    """
    state = dict(nnx.to_flat_state(nnx.state(module, nnx.Param)))
    names = {path: ".".join(map(str, path)) for path in state}
    fitted = flatten(fit({names[path]: param for path, param in state.items()}, params))
    loaded = [(path, param.replace(fitted[names[path]])) for path, param in state.items()]
    nnx.update(module, nnx.from_flat_state(loaded))


def param(
    parameter: Parameter, arguments: Any, metadata: Mapping[str, Any] | None = None
) -> nnx.Param:
    """The parameter with its logical axes, unless the caller's initializer says others."""
    drawn = parameter.create(arguments.rngs.params(), arguments.param_dtype)
    if isinstance(drawn, nnx.VariableMetadata):
        drawn.raw_value = parameter.arrange(drawn.raw_value)
        return nnx.Param(drawn, **metadata or {})
    value = parameter.arrange(drawn)
    if not arguments.partitioned or metadata:
        return nnx.Param(value, **metadata or {})
    # Flax's eager sharding insists on a mesh and on a rule for every name. A name without one
    # means "not sharded", as in linen, and no mesh means one device.
    value = _sharded(value, parameter.axes)
    return nnx.Param(value, out_sharding=parameter.axes, eager_sharding=False)


def _sharded(value: Array, axes: tuple[str | None, ...]) -> Array:
    """Laid out over the mesh in force, where there is one."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not nnx.using_eager_sharding():
        return value
    rules: dict[Any, Any] = dict(spmd.get_logical_axis_rules())
    known = set(mesh.axis_names)

    def on_mesh(axis: str | None) -> Any:
        found = rules.get(axis, axis)
        names = found if isinstance(found, tuple) else (found,)
        return found if set(names) <= known else None

    return nnx.Param(value, out_sharding=tuple(on_mesh(axis) for axis in axes))[...]


def dropout_stream(rngs: Any) -> Any:
    """The stream named "dropout", or the default one; None where there is neither."""
    if not isinstance(rngs, nnx.Rngs):
        return rngs
    return rngs.dropout if "dropout" in rngs or "default" in rngs else None
