"""Arrays whose type says how they lie on a mesh (AxisType.Explicit).

There JAX wants to be told the sharding of the result of every reshape. Attention knows it once: the
output lies as the queries do. Inside, the compiler decides, as on any other mesh.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec


def explicit_mesh(*arrays: Any) -> Any:
    """The mesh by whose axes one of the arrays is typed; None for none."""
    for array in arrays:
        mesh = jax.typeof(array).sharding.mesh if isinstance(array, jax.Array) else None
        if mesh is not None and mesh.explicit_axes:
            return mesh
    return None


def lie_as_queries(
    mesh: Any, query: Array, key: Array, call: Callable[..., Any], arrays: Any, shapes: tuple
) -> Any:
    """call(**arrays), whose results lie as the queries do.

    Args:
        arrays: a dict of trees; leaves that are no JAX arrays are left as they are.
        shapes: "out", "weights" or "flag" for each result of `call`.
    """
    spec, of_keys = _spec(query), _spec(key)
    lead = (spec[0] or of_keys[0],) if query.ndim > 2 else ()  # the batch, where there is one
    rows, heads = (
        spec[query.ndim - 2 if query.ndim < 4 else 1],
        spec[2:3] if query.ndim == 4 else (),
    )
    specs = {
        "out": (*lead, rows, *heads, None),
        "weights": (*lead, *heads, rows, None),
        "flag": (),
    }
    places = tuple(NamedSharding(mesh, PartitionSpec(*specs[shape])) for shape in shapes)
    leaves, flat = jax.tree.flatten(arrays)
    structure: Any = flat
    on_mesh = [isinstance(leaf, jax.Array) for leaf in leaves]

    def decided_by_the_compiler(given: list[Array]) -> Any:
        rest = iter(given)
        whole = [next(rest) if on else leaf for on, leaf in zip(on_mesh, leaves, strict=True)]
        results = call(**structure.unflatten(whole))
        return results if len(shapes) > 1 else (results,)

    given = [leaf for on, leaf in zip(on_mesh, leaves, strict=True) if on]
    results = jax.sharding.auto_axes(decided_by_the_compiler, out_sharding=places)(given)
    return results if len(shapes) > 1 else results[0]


def _spec(array: Array) -> tuple:
    """By axis, the mesh axes that it lies on; None where it is whole."""
    known = tuple(jax.typeof(array).sharding.spec)
    return known + (None,) * (array.ndim - len(known))
