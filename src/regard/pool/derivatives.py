"""Derivatives of a tiled pass, of any order, in forward and in reverse mode.

Pooling is a `custom_jvp` function (score_plan.pool_by). Its tangent is one primitive, a linear map
from tangents of the operands to tangents of the output. Reverse mode transposes that map: the
transpose is the pass's own backward pass (a kernel, or tiles in XLA). Forward mode and higher
orders differentiate `smooth_outputs`, the same result by loops of a fixed number of iterations,
which JAX differentiates in both modes. Every tile is computed again where it is needed (remat), so
that memory stays linear in T and S for every order.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.interpreters import ad, batching, mlir

from regard.mask import Allowed
from regard.placement import vary_as
from regard.pool.layout import join, pad_rows
from regard.pool.xla_tiles import Operands, Tiles

if TYPE_CHECKING:
    from regard.pool.blockwise import TiledPass

# ---------------------------------------------------------------------------------------------
# The result of a pass by loops that JAX differentiates in both modes.


def smooth_outputs(
    tiled: "TiledPass", operands: Operands, allowed: Allowed, seed: Any, stats: Any
) -> tuple[Array, Array | None]:
    """Output [B, N, T, V] and log-sum-exp [B, N, T], equal to those of `tiled.forward`.

    The stats of the forward pass are constants here: they say in which units sums are kept, and
    which keys a regime has chosen. Nothing of the result's derivative goes through them.
    """
    plan, laid, laid_mask = tiled.lay(operands, allowed)
    normalize = plan.normalize

    def lay(stat: Array) -> Array:
        """[B, N, T] -> [groups, Z, rows]."""
        stat = pad_rows(lax.stop_gradient(stat), 2, plan.query_blocks * plan.tiling.block_q)
        return stat.reshape(plan.groups, *plan.lead, stat.shape[2])

    laid_stats = jax.tree.map(lay, stats)

    def group(index: Array) -> tuple[Array, Array | None]:
        tiles = Tiles(plan, laid, laid_mask, seed, index)
        of_group = jax.tree.map(lambda a: a[index], laid_stats)

        def query_block(iq: Array) -> tuple[Array, Array | None]:
            iq, size = _after(iq, index), plan.tiling.block_q
            rows = jax.tree.map(
                lambda a: lax.dynamic_slice_in_dim(a, iq * size, size, len(plan.lead)), of_group
            )
            spread = jax.tree.map(lambda a: a[..., None], rows)  # [Z, q, 1]

            def tile(ik: Array) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
                """Each piece of the weights: pooled, [Z, q, V], and summed over keys, [Z, q]."""
                ik = _after(ik, iq)
                scores, visible = tiles.scores_of_tile(iq, ik)
                pieces = normalize.pieces(spread, scores, visible, tiles.key_indices(ik))
                keep, value = tiles.keep_block(iq, ik), tiles.value_block(ik)
                kept = [piece if keep is None else piece * keep for piece in pieces]
                pooled = tuple(tiles.pool(piece, value) for piece in kept)
                return pooled, tuple(piece.sum(-1) for piece in pieces)

            products, totals = sum_over_blocks(tile, plan.key_blocks, (laid, laid_stats))
            factors = normalize.factors(rows, totals)
            parts = [p * f[..., None] for p, f in zip(products, factors, strict=True)]
            out = functools.reduce(jnp.add, parts) / plan.value_scale
            return out, normalize.log_sum(rows, totals)

        query_block = jax.checkpoint(query_block, prevent_cse=False)
        return lax.map(query_block, jnp.arange(plan.query_blocks, dtype=jnp.int32))

    out, lse = lax.map(group, jnp.arange(plan.groups, dtype=jnp.int32))
    axes = tiled.axes
    out = join(plan, out).reshape(axes.B, axes.N, -1, out.shape[-1])[:, :, : axes.T]
    if lse is not None:
        lse = join(plan, lse[..., None]).reshape(axes.B, axes.N, -1)[:, :, : axes.T]
    return out, lse


def _after(index: Array, outer: Any) -> Array:
    """The index of an inner loop, as if it depended on the outer one: what the body of a loop
    computes without that loop's index, JAX computes first and stores, for all tiles at once.
    """
    return lax.optimization_barrier((index, outer))[0]


def sum_over_blocks(tile: Callable[[Array], Any], count: int, like: Any) -> Any:
    """tile(0) + tile(1) + ..., differentiable in both modes; no tile's arrays are stored."""
    tile = jax.checkpoint(tile, prevent_cse=False)
    shapes = jax.eval_shape(tile, jax.ShapeDtypeStruct((), jnp.int32))
    zeros = vary_as(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes), like)

    def step(total: Any, index: Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, tile(index)), None

    return lax.scan(step, zeros, jnp.arange(count, dtype=jnp.int32))[0]


# ---------------------------------------------------------------------------------------------
# The linear map from tangents of operands to tangents of outputs, and its transpose.


class Differentiated(Protocol):
    """What has derivatives here; static. `score_plan.Passes` and few queries."""

    def smooth(self, residuals: "Residuals") -> tuple[Array, ...]:
        """The outputs by code that JAX differentiates in both modes."""
        ...

    def backward(self, residuals: Any, cotangents: tuple[Array, ...]) -> tuple[Any, ...]:
        """Cotangents of the operands."""
        ...


class Residuals(NamedTuple):
    """Everything the map depends on, except its linear input.

    Attributes:
        outs: the outputs of the forward pass, of which tangents have the shapes.
        saved: the output before it is rounded, and what the backward pass needs per query.
    """

    operands: tuple[Any, ...]
    allowed: Allowed | None
    seed: Any
    taken: Array | None
    outs: tuple[Array, ...]
    saved: Any


class Mapped(NamedTuple):
    """One jax.vmap around the map: the axis of each residual, 0 or None; linear inputs' is 0."""

    size: Any
    spmd_name: Any
    axes: tuple[int | None, ...]


class LinearMap(NamedTuple):
    """The derivative of a pass, or its transpose; static.

    Attributes:
        structure: of `Residuals`.
        transposed: from cotangents of outputs to cotangents of operands.
        mapped: the vmaps around it, the innermost first.
    """

    static: Differentiated
    structure: Any
    transposed: bool = False
    mapped: tuple[Mapped, ...] = ()

    def places(self) -> tuple[list[int], list[int]]:
        """Where in the residuals' leaves the linear inputs' like lie: operands, and outputs."""
        numbered = self.structure.unflatten(range(self.structure.num_leaves))
        return jax.tree.leaves(numbered.operands), jax.tree.leaves(numbered.outs)

    def split(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Residuals and linear inputs."""
        count = self.structure.num_leaves
        return list(leaves[:count]), list(leaves[count:])

    def linear_places(self, leaves: Sequence[Any]) -> tuple[list[int], list[int]]:
        """As `places`, of what has a derivative."""
        operands, outs = self.places()
        return [at for at in operands if _has_tangent(leaves[at])], outs

    def apply(self, *leaves: Array) -> list[Array]:
        """The map as it runs: forward by `smooth_outputs`, transposed by the pass's backward."""
        return self._with_vmaps(self._transposed if self.transposed else self._forward)(*leaves)

    def apply_smooth(self, *leaves: Array) -> list[Array]:
        """The same map by code that JAX differentiates with respect to every input."""
        smooth = self._smooth_transposed if self.transposed else self._forward
        return self._with_vmaps(smooth)(*leaves)

    def _with_vmaps(self, function: Callable) -> Callable:
        for one in self.mapped:
            function = _vmapped(function, one)
        return function

    def _outputs(self, leaves: list[Array]) -> tuple[Callable, list[Array]]:
        """The outputs as a function of the differentiable leaves of the operands; these."""
        at = self.linear_places(leaves)[0]

        def outputs(values: list[Array]) -> tuple[Array, ...]:
            given = list(leaves)
            for place, value in zip(at, values, strict=True):
                given[place] = value
            return self.static.smooth(self.structure.unflatten(given))

        return outputs, [leaves[place] for place in at]

    def _forward(self, *leaves: Array) -> list[Array]:
        residuals, tangents = self.split(leaves)
        outputs, values = self._outputs(residuals)
        return list(jax.jvp(outputs, (values,), (tangents,))[1])

    def _smooth_transposed(self, *leaves: Array) -> list[Array]:
        residuals, cotangents = self.split(leaves)
        outputs, values = self._outputs(residuals)
        return jax.vjp(outputs, values)[1](tuple(cotangents))[0]

    def _transposed(self, *leaves: Array) -> list[Array]:
        residuals, cotangents = self.split(leaves)
        given = self.structure.unflatten(residuals)
        found = self.static.backward(given, tuple(cotangents))
        every = jax.tree.leaves(_with_zeros(found, given.operands))
        wanted, first = self.linear_places(residuals)[0], self.places()[0]
        return [every[first.index(place)] for place in wanted]


def _vmapped(function: Callable, one: Mapped) -> Callable:
    def mapped(*leaves: Array) -> list[Array]:
        in_axes = one.axes + (0,) * (len(leaves) - len(one.axes))
        return jax.vmap(
            function, in_axes=in_axes, axis_size=one.size, spmd_axis_name=one.spmd_name
        )(*leaves)

    return mapped


def _with_zeros(found: Any, operands: Any) -> Any:
    """Cotangents with zeros where a backward pass left None, in place of a leaf or several."""

    def filled(one: Any, operand: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, operand) if one is None else one

    return jax.tree.map(filled, found, operands, is_leaf=lambda one: one is None)


def _has_tangent(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


linear_map = jax.extend.core.Primitive("regard_linear_map")
linear_map.multiple_results = True


def _bind(*leaves: Array, map: LinearMap) -> list[Array]:
    """A backward pass is traced here, so that JAX can see what is in it; a forward one only where
    it is not transposed.
    """
    jaxpr = jax.make_jaxpr(map.apply)(*leaves) if map.transposed else None
    return linear_map.bind(*leaves, map=map, jaxpr=jaxpr)


def tangents_of(static: Differentiated, residuals: Residuals, tangents: Any) -> list[Array]:
    """Tangents of the outputs, given those of the operands."""
    leaves, structure = jax.tree.flatten(residuals)
    one = LinearMap(static, structure)
    places = one.linear_places(leaves)[0]
    given = jax.tree.leaves(tangents)
    return _bind(*leaves, *(given[one.places()[0].index(at)] for at in places), map=one)


def zero_tangents(tree: Any) -> Any:
    """Zeros in the tangents' types."""

    def zero(leaf: Array) -> Any:
        if _has_tangent(leaf):
            return jnp.zeros_like(leaf)
        return np.zeros(jnp.shape(leaf), jax.dtypes.float0)

    return jax.tree.map(zero, tree)


@linear_map.def_impl
def _run(*leaves: Array, map: LinearMap, jaxpr: Any) -> list[Array]:
    if jaxpr is None:
        return map.apply(*leaves)
    return jax.extend.core.jaxpr_as_fun(jaxpr)(*leaves)


@linear_map.def_abstract_eval
def _abstract(*leaves: Any, map: LinearMap, jaxpr: Any) -> list[Any]:
    residuals, _ = map.split(leaves)
    operands, outs = map.linear_places(residuals)
    return [residuals[place] for place in (operands if map.transposed else outs)]


mlir.register_lowering(linear_map, mlir.lower_fun(_run, multiple_results=True))


def _differentiate(primals: Any, tangents: Any, *, map: LinearMap, jaxpr: Any) -> tuple[list, list]:
    """Linear in its linear input; the derivative with respect to the residuals is smooth code."""
    out = _bind(*primals, map=map)
    residuals, linear = map.split(primals)
    d_residuals, d_linear = map.split(tangents)
    parts = []
    if not all(type(d) is ad.Zero for d in d_linear):
        filled = [ad.instantiate_zeros(d) for d in d_linear]
        parts.append(_bind(*residuals, *filled, map=map))
    moved = [at for at in map.linear_places(residuals)[0] if type(d_residuals[at]) is not ad.Zero]
    if moved:

        def of_moved(values: list[Array]) -> list[Array]:
            given = list(residuals)
            for place, value in zip(moved, values, strict=True):
                given[place] = value
            return map.apply_smooth(*given, *linear)

        values = [residuals[at] for at in moved], [d_residuals[at] for at in moved]
        parts.append(jax.jvp(of_moved, (values[0],), (values[1],))[1])
    if not parts:
        return out, [cast(Any, ad.Zero).from_primal_value(one) for one in out]
    return out, [functools.reduce(jnp.add, each) for each in zip(*parts, strict=True)]


ad.primitive_jvps[linear_map] = _differentiate


def _transpose(cotangents: Any, *leaves: Any, map: LinearMap, jaxpr: Any) -> list[Any]:
    residuals, linear = map.split(leaves)
    filled = [ad.instantiate_zeros(one) for one in cotangents]
    found = _bind(*residuals, *filled, map=map._replace(transposed=not map.transposed))
    nothing = [None] * len(residuals)
    return nothing + [
        d if ad.is_undefined_primal(x) else None for d, x in zip(found, linear, strict=True)
    ]


ad.primitive_transposes[linear_map] = _transpose


def _batch(axis: Any, leaves: Any, at: Any, *, map: LinearMap, jaxpr: Any) -> tuple[list, list]:
    """Linear inputs, operands and outputs are all mapped, the other residuals where they were."""
    if all(dim is None for dim in at):
        found = _bind(*leaves, map=map)
        return found, [None] * len(found)

    def first(leaf: Array, dim: int | None, needed: bool) -> tuple[Array, int | None]:
        if dim is not None:
            return jnp.moveaxis(leaf, dim, 0), 0
        if needed:
            return jnp.broadcast_to(leaf[None], (axis.size, *leaf.shape)), 0
        return leaf, None

    operands, outs = map.places()
    needed = {*operands, *outs, *range(map.structure.num_leaves, len(leaves))}
    moved = [
        first(leaf, dim, place in needed)
        for place, (leaf, dim) in enumerate(zip(leaves, at, strict=True))
    ]
    given = tuple(leaf for leaf, _ in moved)
    where = tuple(dim for _, dim in moved[: map.structure.num_leaves])
    one = Mapped(axis.size, axis.spmd_name, where)
    found = _bind(*given, map=map._replace(mapped=(*map.mapped, one)))
    return found, [0] * len(found)


batching.fancy_primitive_batchers[linear_map] = _batch
