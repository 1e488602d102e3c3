"""What a backend is chosen by: everything about a call that is known before any data.

The rules are in choose.py, and each backend says what it accepts; nothing is decided here.
"""

import functools
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from regard.mask import Allowed, MaskFacts
from regard.normalize import Normalizer
from regard.pool.problem import Problem
from regard.pool.ways import find_ways
from regard.score.additive import LiftPolicy, lift_policy
from regard.score.contract import Lift, Score
from regard.shapes import Axes
from regard.varying import varying_axes


class Device(NamedTuple):
    """Where a call will run.

    Attributes:
        platform: "cpu", "gpu" or "tpu".
        capability: an NVIDIA GPU's compute capability, (9, 0) for Hopper; None elsewhere.
        varies: inside a shard_map in which JAX checks over which mesh axes arrays vary.
    """

    platform: str
    capability: tuple[int, int] | None = None
    varies: bool = False


class LiftFacts(NamedTuple):
    """The kind of lift that a score has for a call; what `Lift` holds, without the arrays.

    Attributes:
        compact: width of the arrays that the lift stores.
        width: width of the features in the inner product; more than `compact` where an
            expansion makes them.
        key_heads: K, or N for a score with parameters per head.
        key_bias, query_bias, expansion: whether there is one.
        guarded: whether the lift holds only for some data.
        standing: "exact", "exact up to a per-query constant" or "within ...".
    """

    compact: int
    width: int
    key_heads: int
    key_bias: bool
    query_bias: bool
    expansion: bool
    guarded: bool
    standing: str


@dataclass(frozen=True)
class Ring:
    """The devices along one axis of a mesh, which share a sequence in their order."""

    mesh: Any
    axis: str

    def __post_init__(self) -> None:
        if self.mesh.empty:
            raise ValueError(
                f"sequence_axis={self.axis!r} names an axis of a mesh, and there is none. Fix: "
                f"mesh=, or jax.set_mesh(mesh), or call inside a shard_map over {self.axis!r}."
            )
        if self.axis not in self.mesh.shape:
            raise ValueError(
                f"sequence_axis must name an axis of the mesh. Got {self.axis!r}, mesh "
                f"{dict(self.mesh.shape)}."
            )

    @property
    def has_company(self) -> bool:
        """Whether the mesh has other axes, by which the compiler may divide the batch."""
        return not self.inside and any(
            size > 1 for name, size in self.mesh.shape.items() if name != self.axis
        )

    @property
    def inside(self) -> bool:
        """Whether the call is made inside a shard_map over this axis, on one device's share."""
        return self.axis in getattr(self.mesh, "manual_axes", ())

    @property
    def size(self) -> int:
        return self.mesh.shape[self.axis]


@dataclass(frozen=True)
class Request:
    """One call of attend, without its data.

    Attributes:
        dtype: of query and key, after promotion.
        value_dtype: None where only the weights are asked for.
        over: the devices that share the sequence; None: it is whole.
    """

    axes: Axes
    score: Score
    normalize: Normalizer
    dtype: jnp.dtype
    dropout: bool = False
    value_dtype: jnp.dtype | None = None
    bias: bool = False
    mask: MaskFacts = field(default_factory=MaskFacts)
    device: Device = field(default_factory=lambda: device_of(None))
    over: Ring | None = None

    @property
    def pairs(self) -> int:
        """Weights in the whole [B, N, T, S] array."""
        axes = self.axes
        return axes.B * axes.N * axes.T * axes.S

    @functools.cached_property
    def lift(self) -> LiftFacts | None:
        """The lift that this call's scores would take, or None for none."""
        leaves, structure = jax.tree.flatten(self.score)
        kinds = [jax.typeof(leaf) for leaf in leaves]
        return _lift_facts(
            structure,
            tuple((kind.shape, kind.dtype, getattr(kind, "weak_type", False)) for kind in kinds),
            self.axes,
            self.normalize,
            jnp.dtype(self.dtype),
            self.mask != MaskFacts(),
            lift_policy(),
            jax.default_backend(),
        )


def device_of(array: Array | None, *others: Any) -> Device:
    """Where a call on this array and `others` will run: where it is, or under a trace the default
    device.
    """
    if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
        found = _described(next(iter(array.devices())))
    else:
        found = _default_device()
    return found._replace(varies=bool(varying_axes((array, *others))))


def _default_device() -> Device:
    chosen = getattr(jax.config, "jax_default_device", None)
    if chosen is None or isinstance(chosen, str):
        return _described(jax.devices(chosen)[0])
    return _described(chosen)


@functools.cache
def _described(device: jax.Device) -> Device:
    capability = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    if device.platform != "gpu" or capability is None:  # an AMD GPU's reads gfx942
        return Device(device.platform)
    return Device("gpu", (int(capability[1]), int(capability[2])))


@functools.lru_cache(maxsize=512)
def _lift_facts(
    structure: Any,
    leaves: tuple[tuple[tuple[int, ...], jnp.dtype, bool], ...],
    axes: Axes,
    normalize: Normalizer,
    dtype: jnp.dtype,
    masked: bool,
    policy: LiftPolicy,
    platform: str,
) -> LiftFacts | None:
    """Traces the lift on shapes alone, once per kind of call; the last two are what a lift may
    depend on besides.
    """
    if axes.empty():
        return None
    shapes = [jax.ShapeDtypeStruct(shape, kind, weak_type=weak) for shape, kind, weak in leaves]
    query = jax.ShapeDtypeStruct((axes.B, axes.N, axes.T, axes.query_width), dtype)
    key = jax.ShapeDtypeStruct((axes.B, axes.K, axes.S, axes.key_width), dtype)
    seen = jax.ShapeDtypeStruct((axes.B, axes.K, axes.S), jnp.bool_) if masked else None

    def lifted(parameters: list, query: Array, key: Array, seen: Array | None) -> Any:
        score = jax.tree.unflatten(structure, parameters)
        allowed = Allowed(None, None, (), ())
        ways, _ = find_ways(
            Problem(query, key, None, score, allowed, seen, *(None,) * 3, normalize, 0.0, axes)
        )
        lift = ways[0].lift
        return None if lift is None else (lift, lift.query_features())

    traced = jax.eval_shape(lifted, shapes, query, key, seen)
    if traced is None:
        return None
    lift: Lift = traced[0]
    return LiftFacts(
        compact=lift.query.shape[-1],
        width=traced[1].shape[-1],
        key_heads=lift.key.shape[-3],
        key_bias=lift.key_bias is not None,
        query_bias=lift.query_bias is not None,
        expansion=lift.expansion is not None,
        guarded=lift.in_range is not None,
        standing=lift.standing,
    )
