"""Where the arrays of a call lie: the device that runs it, and the mesh axes they are sharded over.

The device is found once, at the front door, and travels with the request. Code that is traced for
a call asks `current_platform`, never JAX's default backend: arrays on the CPU of a GPU host take
the CPU's path.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import jax
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

T = TypeVar("T")

# ---------------------------------------------------------------------------------------------
# The device of a call.


class Device(NamedTuple):
    """Where a call runs.

    Attributes:
        platform: "cpu", "gpu" or "tpu".
        capability: an NVIDIA GPU's compute capability, (9, 0) for Hopper; None elsewhere.
        varies: inside a shard_map in which JAX checks over which mesh axes arrays vary.
    """

    platform: str
    capability: tuple[int, int] | None = None
    varies: bool = False


_current: ContextVar[Device | None] = ContextVar("device", default=None)


def device_of(*trees: Any) -> Device:
    """The device of a call on these arrays: that of the first one that lies somewhere.

    Under a trace no array does; there it is the default device (`jax.default_device` sets it).
    """
    leaves = jax.tree.leaves(trees)
    found = next((device for device in map(_device_of_array, leaves) if device), None)
    found = found or _current.get() or _default_device()
    return found._replace(varies=bool(varying_axes(leaves)))


@contextlib.contextmanager
def with_value(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Gives a context variable this value for what is traced inside."""
    token = variable.set(value)
    held = _in_force.set((*_in_force.get(), (variable.name, value)))
    try:
        yield
    finally:
        _in_force.reset(held)
        variable.reset(token)


_in_force: ContextVar[tuple[tuple[str, Any], ...]] = ContextVar("in_force", default=())


def in_force() -> tuple[tuple[str, Any], ...]:
    """The names and values that enclosing `with_value` blocks have given, the outermost first."""
    return _in_force.get()


def on_device(device: Device) -> AbstractContextManager[None]:
    """What is traced inside is traced for this device."""
    return with_value(_current, device)


def current_platform(*arrays: Any) -> str:
    """The platform that the code being traced is for; outside of a call, that of the arrays."""
    return (_current.get() or device_of(*arrays)).platform


def _device_of_array(leaf: Any) -> Device | None:
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
        return _described(next(iter(leaf.devices())))
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None:
        devices = getattr(leaf.sharding, "device_set", None)
        return _described(next(iter(devices))) if devices else None
    return None


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


# ---------------------------------------------------------------------------------------------
# Inside jax.shard_map, JAX knows over which mesh axes an array varies. A loop's carry may not gain
# such an axis on the way, and a kernel has to state the axes of its results.


def varying_axes(tree: Any) -> frozenset[str]:
    """The mesh axes over which some leaf of the tree varies; none outside shard_map."""
    axes: frozenset[str] = frozenset()
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            continue
        kind = jax.typeof(leaf)
        manual = getattr(kind, "manual_axis_type", None)
        axes |= frozenset(getattr(kind, "vma", ()) if manual is None else manual.varying)
    return axes


def kernel_result(shape: tuple[int, ...], dtype: Any, like: Any) -> jax.ShapeDtypeStruct:
    """A kernel's result: it varies over every mesh axis that its inputs, `like`, vary over."""
    axes = varying_axes(like)
    if not axes:
        return jax.ShapeDtypeStruct(shape, dtype)
    varying = jax.sharding.ManualAxisType(varying=axes)
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)


def vary_as(tree: Any, like: Any) -> Any:
    """The tree, varying over every mesh axis that `like` varies over."""
    wanted = varying_axes(like)
    if not wanted:
        return tree

    def vary(leaf: Any) -> Any:
        missing = wanted - varying_axes(leaf)
        return lax.pcast(leaf, tuple(sorted(missing)), to="varying") if missing else leaf

    return jax.tree.map(vary, tree)


_sequence: ContextVar[str | None] = ContextVar("sequence", default=None)


def sequence_over(axis: str | None) -> AbstractContextManager[None]:
    """Lifts traced inside get one device's shard of queries and keys, over this mesh axis."""
    return with_value(_sequence, axis)


def over_shards(reduce: str, found: Array) -> Array:
    """A "sum", "min" or "max" over one device's shard of the sequence -> that over all shards."""
    axis = _sequence.get()
    if axis is None:
        return found
    return dict(sum=jax.lax.psum, min=jax.lax.pmin, max=jax.lax.pmax)[reduce](found, axis)


# ---------------------------------------------------------------------------------------------
# Arrays whose type says how they lie on a mesh (AxisType.Explicit). There JAX asks for the sharding
# of the result of every reshape. For attention one rule suffices: the output is sharded as the
# queries are, and inside the compiler decides, as on any other mesh.


def explicit_mesh(*arrays: Any) -> Any:
    """The mesh by whose axes one of the arrays is typed; None for none."""
    for array in arrays:
        mesh = jax.typeof(array).sharding.mesh if isinstance(array, jax.Array) else None
        if mesh is not None and mesh.explicit_axes:
            return mesh
    return None


def shard_as_queries(
    mesh: Any, call: Callable[..., Any], arrays: dict[str, Any], results: tuple[str, ...]
) -> Any:
    """call(**arrays), whose results lie as the queries do.

    Args:
        arrays: trees by name, "query" and "key" among them; leaves that are no JAX arrays pass
            unchanged.
        results: "out", "weights", "lse" or "flag" for each result of `call`.
    """
    key = arrays["key"]  # or a Memory of keys
    rank, spec, of_keys = (
        arrays["query"].ndim,
        spec_of(arrays["query"]),
        spec_of(getattr(key, "key", key)),
    )
    batch = (spec[0] or of_keys[0],) if rank > 2 else ()
    rows, heads = spec[rank - 2 if rank < 4 else 1], spec[2:3] if rank == 4 else ()
    specs = dict(out=(*batch, rows, *heads, None), weights=(*batch, *heads, rows, None), flag=())
    specs["lse"] = (*batch, *heads, rows)
    found = compiler_decides(mesh, call, arrays, tuple(specs[name] for name in results))
    return found if len(results) > 1 else found[0]


def compiler_decides(
    mesh: Any, call: Callable[..., Any], arrays: dict[str, Any], specs: Sequence[tuple]
) -> tuple:
    """The results of call(**arrays), one or a tuple, which lie on the mesh as `specs` say."""
    leaves, flat = jax.tree.flatten(arrays)
    structure: Any = flat
    on_mesh = [isinstance(leaf, jax.Array) for leaf in leaves]

    def whole(given: list[Array]) -> Any:
        rest = iter(given)
        every = [next(rest) if on else leaf for on, leaf in zip(on_mesh, leaves, strict=True)]
        found = call(**structure.unflatten(every))
        return found if len(specs) > 1 else (found,)

    given = [leaf for on, leaf in zip(on_mesh, leaves, strict=True) if on]
    shardings = tuple(NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs)
    return jax.sharding.auto_axes(whole, out_sharding=shardings)(given)


def spec_of(array: Array) -> tuple:
    """By axis, the mesh axes that it lies on; None where it is whole."""
    known = tuple(jax.typeof(array).sharding.spec)
    return known + (None,) * (array.ndim - len(known))
