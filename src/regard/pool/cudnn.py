"""cuDNN's fused attention, through jax.nn: for a score that is an inner product and no more.

Valid lengths, causal order and a window to the left go into the kernel as numbers. Whatever else
would need a T×S array is refused, in words; choose.py then goes on to the next backend.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array

from regard.dropout import Seed
from regard.mask import Allowed, LengthsAndBand, MaskFacts
from regard.normalize import Softmax
from regard.placement import Device, current_platform, vary_as
from regard.pool.backend import Backend, Problem, Request, zero_for_gradient
from regard.pool.blockwise import TiledPass
from regard.pool.score_plan import Flag, Passes, Results, ScorePlan, pool_by
from regard.pool.xla_tiles import Operands
from regard.score.contract import Lift, accumulation_dtype, repeat_heads
from regard.shapes import Axes

# Unless it is given lengths, cuDNN's backward pass leaves the rest of a ragged tile unmasked, and
# where a query's log-sum-exp is below -88 its gradient is NaN (github.com/NVIDIA/cudnn-frontend,
# issues 160, 628 and 1072). Tiles are at most so long.
TILE = 128

# Seen on Hopper (an H200) with cuDNN 9.19, and assumed to hold from there on: it replaces the
# scores of masked keys, whatever these hold. For an example that is declared to have no queries it
# writes zeros, output and gradients, and zeros for the gradients of masked keys and values. So
# queries need not be zeroed, and keys only for the backward pass; test_cudnn_contract.py checks it.
IGNORES_PADDING_SINCE, IGNORES_PADDING_ON = (9, 19), 9

PACKAGES = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")  # cuDNN is packaged once for each CUDA


class MaskArguments(NamedTuple):
    """A mask as jax.nn.dot_product_attention takes it."""

    is_causal: bool = False
    local_window_size: tuple[int, int] | None = None
    query_seq_lengths: Array | None = None  # int32, [B]
    key_value_seq_lengths: Array | None = None  # int32, [B]


Tensors = tuple[Any, Any, Any, Array | None]  # query, key, value, bias
Lengths = tuple[Array | None, Array | None]  # of queries and of keys, int32 [B]


class Settings(NamedTuple):
    """The static arguments of the call of cuDNN.

    Attributes:
        scale: a number that the score only multiplies by: the kernel multiplies, and there is no
            pass over the queries. None: the score's own lift.
        ignores_padding: as `ignores_padding` found it, and no lift mixes padding into rows.
        device: of the call.
    """

    scale: float | None
    ignores_padding: bool
    device: Device


class CuDNN(Backend):
    """cuDNN's fused attention, and its backward pass. Forward mode and all higher derivatives are
    those of tiles in plain XLA.
    """

    name = "cudnn"

    def refuses(self, request: Request) -> str | None:
        lacks = tuple(_lacks(request))
        if not lacks:
            lacks = _refusal_of_jax(request.axes, jnp.dtype(request.dtype), _width(request))
        return "; ".join(lacks) or None

    def describe(self, request: Request) -> str:
        biased = " and a bias" if request.bias else ""
        how = f"{_describe(request.mask)}{biased}"
        return f"fused by cuDNN, memory linear in T and S; {how}"

    def settings(self, request: Request) -> Settings:
        scale = request.score.static_scale(request.axes.query_width)
        ignores = scale is not None and ignores_padding(request.device)  # a lift may mix rows
        return Settings(scale, ignores, request.device)

    def pool(self, problem: Problem, settings: Settings) -> tuple[Array, Array]:
        forward_only = functools.partial(_pool_forward_only, settings=settings)
        differentiable = functools.partial(_pool_differentiable, settings=settings)
        return zero_for_gradient(forward_only, differentiable, problem)


def _pool_forward_only(problem: Problem, settings: Settings) -> tuple[Array, Array]:
    ignores = settings.ignores_padding
    one, operands = _fused(problem.with_zeroed_values() if ignores else problem.zeroed(), settings)
    return one.pool(operands, problem.allowed), jnp.array(True)


def _pool_differentiable(problem: Problem, settings: Settings) -> tuple[Array, Array]:
    """The backward pass multiplies d scores of 0 by keys, and d out by values."""
    ignores = settings.ignores_padding
    problem = problem.with_keys_and_values_zeroed_forward() if ignores else problem.zeroed()
    one, operands = _fused(problem, settings)
    static = Passes((one,), settings.device, problem.out_dtype, branch=False, sharded=False)
    return pool_by(static, (operands,), problem.allowed, None, None), jnp.array(True)


def _fused(problem: Problem, settings: Settings) -> tuple["FusedPass", Tensors]:
    """The pass, and its operands."""
    query, key, value = problem.query, problem.key, cast(Array, problem.value)
    if settings.scale is None:
        query, key = _features(problem)
    value = repeat_heads(value, key)
    axes = replace(problem.axes, K=key.shape[1])
    scale = 1.0 if settings.scale is None else settings.scale
    return FusedPass(axes, scale, settings.ignores_padding), (query, key, value, problem.bias)


class FusedPass(NamedTuple):
    """One call of cuDNN forward, one backward; static.

    Operands are query [B, N, T, D], key and value [B, K, S, D], and the bias or None. The stats of
    the forward pass are what JAX's own derivative rule of the call keeps for the backward pass.

    Attributes:
        scale: the kernel multiplies by it.
        raw_queries: as in `mask_arguments`.
    """

    axes: Axes
    scale: float
    raw_queries: bool

    def pool(self, operands: Tensors, allowed: Allowed) -> Array:
        """The output, [B, N, T, V], without what a backward pass needs."""
        call, inputs = self._call(operands, allowed)
        return cast(Array, _together(call, *inputs))

    def forward(
        self, operands: Tensors, allowed: Allowed, seed: Seed, active: Flag
    ) -> tuple[Array, list[Array]]:
        call, inputs = self._call(operands, allowed)

        def with_stats(operands: Tensors, lengths: Lengths) -> tuple[Array, list[Array]]:
            out, pull = jax.vjp(lambda operands: call(operands, lengths), operands)
            return out, jax.tree.leaves(pull)

        return cast(Any, _together(with_stats, *inputs))

    def backward(
        self, operands: Tensors, allowed: Allowed, seed: Seed, active: Flag, results: Results
    ) -> Tensors:
        d_out, _, stats = results
        call, inputs = self._call(operands, allowed)

        def transposed(operands: Tensors, lengths: Lengths) -> Callable:
            return jax.vjp(lambda operands: call(operands, lengths), operands)[1]

        structure = jax.tree.structure(jax.eval_shape(transposed, *inputs))

        def pull(stats: list[Array], d_out: Array) -> Tensors:
            return cast(Tensors, jax.tree.unflatten(structure, stats)(d_out)[0])

        if operands[3] is not None:
            pull = jax.custom_batching.sequential_vmap(pull)
        return pull(stats, d_out)

    def smooth(
        self, operands: Tensors, allowed: Allowed, seed: Seed, stats: Any
    ) -> tuple[Array, None]:
        query, key, value, bias = operands
        scaled = query.astype(accumulation_dtype(query.dtype)) * self.scale
        tiles = Operands(None, None, (scaled, None), (key, None), value, bias)
        tiled = TiledPass(
            self.axes,
            Softmax(),
            dropout_rate=0.0,
            compute=query.dtype,
            width=1,
            lifted=True,
            wide_features=False,
            sizes=None,
            platform=current_platform(),
        )
        constant = jax.tree.map(jax.lax.stop_gradient, tiles)
        stats = tiled.forward(constant, allowed, None, None)[1]
        return tiled.smooth(tiles, allowed, None, stats)[0], None

    def _call(self, operands: Tensors, allowed: Allowed) -> tuple[Callable, Any]:
        """call(operands, lengths) -> [B, N, T, V], and these two."""
        mask = mask_arguments(allowed, self.axes, self.raw_queries)

        def call(operands: Tensors, lengths: Lengths) -> Array:
            # The caller's layout, (B, T, N, D): a pair of transposes that XLA cancels.
            query, key, value = (array.swapaxes(1, 2) for array in operands[:3])
            if operands[3] is None:
                query, key, value = _even(query), _even(key), _even(value)
            out = jax.nn.dot_product_attention(
                query,
                key,
                value,
                operands[3],
                is_causal=mask.is_causal,
                local_window_size=mask.local_window_size,
                query_seq_lengths=lengths[0],
                key_value_seq_lengths=lengths[1],
                scale=self.scale,
                implementation="cudnn",
            )
            return out[:, : self.axes.T].swapaxes(1, 2)

        inputs = operands, (mask.query_seq_lengths, mask.key_value_seq_lengths)
        return call, vary_as(inputs, inputs)

    def log_sum(self, stats: Any) -> Array:
        raise NotImplementedError("cudnn refuses calls that need the log-sum-exp")


def _together(call: Callable, operands: Tensors, lengths: Lengths) -> Any:
    """call(operands, lengths). Before JAX 0.11.2, cuDNN's call is mapped by vmap only where all of
    its arrays are; with a bias, whose gradient cuDNN sums over all examples of a call, it is one
    call after the other.
    """
    if operands[3] is not None:
        return jax.custom_batching.sequential_vmap(call)(operands, lengths)
    return call(*_all_mapped((operands, lengths)))


@jax.custom_batching.custom_vmap
def _all_mapped(arrays: Any) -> Any:
    """The arrays; under vmap, all of them mapped if one of them is."""
    return arrays


@_all_mapped.def_vmap
def _map_all(size: int, mapped: list, arrays: Any) -> tuple[Any, Any]:
    def widen(array: Array, is_mapped: bool) -> Array:
        return array if is_mapped else jnp.broadcast_to(array, (size, *array.shape))

    arrays = jax.tree.map(widen, arrays, mapped[0])
    return _all_mapped(arrays), jax.tree.map(lambda _: True, arrays)


def _even(rows: Array) -> Array:
    """[B, T, N, D], padded by a row of zeros where T is odd: JAX refuses the gradient of an odd
    length. Lengths are given then, so no query attends to that row.
    """
    return jnp.pad(rows, ((0, 0), (0, rows.shape[1] % 2), (0, 0), (0, 0)))


def ignores_padding(device: Device) -> bool:
    """Whether cuDNN on this device is known to ignore padding in a forward pass."""
    capability = device.capability
    on = capability is not None and capability[0] == IGNORES_PADDING_ON
    return on and _version() >= IGNORES_PADDING_SINCE


@functools.cache
def _version() -> tuple[int, ...]:
    """Of the cuDNN that was installed with JAX: the oldest, where there are several, of which one
    may be another library's. One that is not a Python package is not known, and (0,).
    """
    found = []
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(re.findall(r"\d+", metadata.version(name))[:2])
    return min((tuple(map(int, parts)) for parts in found), default=(0,))


def mask_arguments(allowed: Allowed, axes: Axes, raw_queries: bool = False) -> MaskArguments:
    """A mask that `CuDNN` does not refuse, as jax.nn takes it.

    cuDNN aligns causal order at the start, as `facts.band` is aligned. An empty example is passed
    with length 1: zeroed, its only key and value are zero, so that its output is exactly 0, and so
    are its gradients. With `raw_queries`, which are not zeroed, it is passed without queries.
    """
    lens, band = cast(LengthsAndBand, allowed.as_lengths_and_band())
    causal = band.right is not None
    window = None if band.left is None else (band.left, 0)
    if lens is None:
        if axes.T % TILE == 0 and axes.S % TILE == 0:
            return MaskArguments(causal, window)
        lens = jnp.full(1, axes.S, jnp.int32)
    lens = jnp.broadcast_to(lens, (axes.B,))
    queries = jnp.full_like(lens, axes.T)
    if raw_queries:
        queries = jnp.where(lens > 0, queries, 0)
    return MaskArguments(causal, window, queries, jnp.maximum(lens, 1))


def _features(problem: Problem) -> tuple[Array, Array]:
    """phi(q) and psi(k) in the inputs' dtype, zero in padding whatever the lift makes of zeros."""
    dtype = problem.query.dtype
    lift = cast(Lift, ScorePlan.of(problem).paths[0].lift)
    query, key = lift.query_features().astype(dtype), lift.key_features().astype(dtype)
    if problem.visible is not None:
        key = jnp.where(repeat_heads(problem.visible[..., None], key), key, 0)
    if problem.non_empty is not None:
        query = jnp.where(problem.non_empty[..., None], query, 0)
    return query, key


# ---------------------------------------------------------------------------------------------
# What cuDNN lacks; each line completes a sentence that begins with "cudnn".


def _lacks(request: Request) -> Iterator[str]:
    axes, (platform, capability, _) = request.axes, request.device
    if capability is None:
        yield f"needs an NVIDIA GPU (running on {platform})"
    elif capability < (8, 0):
        yield f"needs compute capability 8.0 or newer (this GPU has {_dotted(capability)})"
    dtypes = {jnp.dtype(request.dtype).name, jnp.dtype(request.value_dtype or request.dtype).name}
    if len(dtypes) > 1 or not dtypes <= {"float16", "bfloat16"}:
        yield f"needs query, key and value all float16 or all bfloat16 (got {_dtypes(request)})"
    if type(request.normalize) is not Softmax:
        yield f"has no regime but Softmax (got {type(request.normalize).__name__})"
    if request.dropout:
        yield "draws its own random numbers for dropout, not the ones every other backend draws"
    yield from _bias_lacks(request)
    if request.softcap:
        yield "has no softcap="
    if request.lse:
        what = "sink=" if request.sink else "return_lse="
        yield f"gives no log-sum-exp that can be differentiated, which {what} needs"
    yield from _mask_lacks(request.mask, axes)
    if axes.empty():
        return
    if axes.T == axes.S == 1:
        yield "has no gradient for one query and one key"
    if type(request.normalize) is Softmax:
        yield from _score_lacks(request)


def _bias_lacks(request: Request) -> Iterator[str]:
    if request.bias is None:
        return
    axes, (shape, dtype) = request.axes, request.bias
    whole = (1, axes.N, axes.T, axes.S)
    if shape != whole:  # before JAX 0.11, the gradient of others is silently zero
        yield f"takes a bias of shape {list(whole)} only (got {list(shape)})"
    if jnp.dtype(dtype) != jnp.dtype(request.dtype):
        yield f"takes a bias in the dtype of the query only (got {jnp.dtype(dtype).name})"
    if request.mask.lens != "none":  # not known: what it writes for masked pairs
        yield "has no bias together with valid lengths"
    if axes.T % 2 or axes.S % 2:
        yield f"has no gradient of a bias for odd lengths (T = {axes.T}, S = {axes.S})"
    if axes.K != axes.N:
        yield f"takes a bias only where every head has its own keys (N = {axes.N}, K = {axes.K})"


def _mask_lacks(mask: MaskFacts, axes: Axes) -> Iterator[str]:
    if mask.lens == "per query":
        yield "takes valid lengths per example, not per query"
    if mask.segments:
        yield "takes no segments"
    if mask.boolean:
        yield "takes a boolean mask only as a T×S array of numbers"
    left, right, _ = mask.band
    if right is not None and right != 0:
        yield (
            f"has no band of keys that ends at s = t{right:+d}, only at s = t: causal order with "
            f'T = S, or with align="start" (here T = {axes.T}, S = {axes.S})'
        )
    if left is None:
        return
    if right is None:
        yield "has a window to the left only together with causal order"
    elif left < 0 or axes.T > axes.S:
        yield f"has no window that leaves some rows empty (T = {axes.T}, S = {axes.S})"
    elif mask.lens != "none":
        yield "has no window together with valid lengths"


def _score_lacks(request: Request) -> Iterator[str]:
    name, lift = request.score.label(), request.lift
    if lift is None:
        yield f"runs inner products only, and {name} has no lift to one here"
        return
    if (
        lift.expansion is not None
        or lift.in_range is not None
        or not lift.standing.startswith("exact")
    ):
        yield f"runs exact lifts that are stored whole, and {name}'s is not one"
        return
    if lift.key_bias is not None:
        yield f"cannot add the number per key that {name}'s lift comes with"
    if lift.distance_bias is not None:
        yield f"cannot add the number per distance that {name}'s lift comes with"
    width, value_width = lift.width(), request.axes.V
    if request.value_dtype is not None and width != value_width:
        yield (
            f"needs values as wide as the keys (V = {value_width}, keys {width}"
            f"{'' if width == request.axes.key_width else ' after the lift'})"
        )
    if width % 8 or width == 0:
        yield f"needs a width that is a multiple of 8 (got {width})"
    capability = request.device.capability
    # JAX allows 256 on Blackwell too, but there cuDNN has no backward pass for it.
    limit = 256 if capability is not None and capability[0] == 9 else 128
    if width > limit:
        yield f"takes widths up to {limit}{' here' if capability else ''} (got {width})"


@functools.lru_cache(maxsize=512)
def _refusal_of_jax(axes: Axes, dtype: jnp.dtype, width: int) -> tuple[str, ...]:
    """Why JAX itself refuses the call: a missing or too old cuDNN, for example."""
    if axes.empty():
        return ()
    query = jax.ShapeDtypeStruct((axes.B, axes.T, axes.N, width), dtype)
    key = jax.ShapeDtypeStruct((axes.B, axes.S, axes.K, width), dtype)
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    try:
        jax.eval_shape(attend, query, key, key)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return (f"is refused by JAX: {error}",)
    return ()


def _width(request: Request) -> int:
    return request.axes.key_width if request.axes.empty() else cast(Lift, request.lift).width()


def _describe(mask: MaskFacts) -> str:
    parts = [] if mask.lens == "none" else ["valid lengths"]
    parts += [] if mask.band.right is None else ["causal order"]
    parts += [] if mask.band.left is None else ["window"]
    return f"{' and '.join(parts)} inside the kernel" if parts else "no mask"


def _dtypes(request: Request) -> str:
    names = f"query and key {jnp.dtype(request.dtype).name}"
    if request.value_dtype is None:
        return names
    return f"{names}, value {jnp.dtype(request.value_dtype).name}"


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
