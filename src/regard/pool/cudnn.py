"""cuDNN's fused attention, through jax.nn: for a score that is an inner product and no more.

Valid lengths, causal order and a window to the left go into the kernel as numbers. Whatever else
would need a T×S array is refused, in words; choose.py then goes on to the next backend.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array

from regard.mask import Allowed, LengthsAndBand, MaskFacts
from regard.normalize import Softmax
from regard.placement import Device, vary_as
from regard.pool.backend import Backend, Problem, Request, zero_for_gradient
from regard.pool.score_plan import ScorePlan
from regard.score.contract import Lift, repeat_heads
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


class Settings(NamedTuple):
    """The static arguments of the call of cuDNN.

    Attributes:
        scale: a number that the score only multiplies by: the kernel multiplies, and there is no
            pass over the queries. None: the score's own lift.
        ignores_padding: as `ignores_padding` found it.
    """

    scale: float | None
    ignores_padding: bool


class CuDNN(Backend):
    """cuDNN's fused attention; first derivatives only, by JAX's own rule."""

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
        return Settings(scale, ignores_padding(request.device))

    def pool(self, problem: Problem, settings: Settings) -> tuple[Array, Array]:
        scale = settings.scale
        if scale is None or not settings.ignores_padding:  # a lift may mix rows, padding too
            return _call(problem.zeroed(), scale)
        forward_only = functools.partial(_call_forward_only, scale=scale)
        differentiable = functools.partial(_call_differentiable, scale=scale)
        return zero_for_gradient(forward_only, differentiable, problem)


def _call_forward_only(problem: Problem, scale: float) -> tuple[Array, Array]:
    return _call(problem.with_zeroed_values(), scale, raw_queries=True)


def _call_differentiable(problem: Problem, scale: float) -> tuple[Array, Array]:
    """The backward pass multiplies d scores of 0 by keys, and d out by values."""
    return _call(problem.with_keys_and_values_zeroed_forward(), scale, raw_queries=True)


def _call(problem: Problem, scale: float | None, raw_queries: bool = False) -> tuple[Array, Array]:
    query, key, value = problem.query, problem.key, cast(Array, problem.value)
    if scale is None:
        query, key = _features(problem)
    value = repeat_heads(value, key)
    mask = mask_arguments(problem.allowed, problem.axes, raw_queries)
    lengths = (mask.query_seq_lengths, mask.key_value_seq_lengths)
    pool = functools.partial(
        _dot_product_attention,
        is_causal=mask.is_causal,
        local_window_size=mask.local_window_size,
        scale=1.0 if scale is None else scale,
    )
    if problem.bias is not None:
        given = (query, key, value, problem.bias, *lengths)
        out = _pool_biased(pool, *vary_as(given, given))
        return out.swapaxes(1, 2), jnp.array(True)
    operands = (query, key, value, *lengths)
    operands = _mapped_together(vary_as(operands, operands))
    # The caller's layout, (B, T, N, D): a pair of transposes that XLA cancels.
    query, key, value = (_even(array.swapaxes(1, 2)) for array in operands[:3])
    out = pool(query, key, value, None, *operands[3:])
    out = _pulled_back_with(out, query)[:, : problem.axes.T]
    return out.swapaxes(1, 2), jnp.array(True)


def _dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    query_lengths: Array | None,
    key_lengths: Array | None,
    **options: Any,
) -> Array:
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        bias,
        query_seq_lengths=query_lengths,
        key_value_seq_lengths=key_lengths,
        implementation="cudnn",
        **options,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pool_biased(pool: Callable[..., Array], *operands: Array | None) -> Array:
    """[B, T, N, V]. Under vmap one call after the other: cuDNN sums the gradient of a bias over all
    examples of a call.
    """

    def one(*operands: Array | None) -> Array:
        return pool(*_callers(operands))

    return jax.custom_batching.sequential_vmap(one)(*operands)


def _callers(operands: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
    """Query, key and value [B, N, T, D] in the caller's layout, as in `_call`."""
    return (*(cast(Array, x).swapaxes(1, 2) for x in operands[:3]), *operands[3:])


def _biased_forward(
    pool: Callable[..., Array], *operands: Array | None
) -> tuple[Array, tuple[Any, Any]]:
    def one(*operands: Any) -> Any:
        return jax.vjp(lambda *tensors: pool(*_callers((*tensors, *operands[4:]))), *operands[:4])

    out, pull = jax.custom_batching.sequential_vmap(one)(*operands)
    return out, (pull, operands[4:])


def _biased_backward(
    pool: Callable[..., Array], residuals: tuple[Any, Any], d_out: Array
) -> tuple[Any, ...]:
    pull, lengths = residuals
    found = jax.custom_batching.sequential_vmap(lambda pull, d_out: pull(d_out))(pull, d_out)
    return (*found, *(None for _ in lengths))


_pool_biased.defvjp(_biased_forward, _biased_backward)


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


# ---------------------------------------------------------------------------------------------
# vmap: before JAX 0.11.2, cuDNN's call is mapped only where all of its arrays are, forward and
# backward. The next two functions ensure that; without a vmap they are the identity.


@jax.custom_batching.custom_vmap
def _all_mapped(arrays: Any) -> Any:
    return arrays


@_all_mapped.def_vmap
def _map_all(size: int, mapped: list, arrays: Any) -> tuple[Any, Any]:
    def widen(array: Array, is_mapped: bool) -> Array:
        return array if is_mapped else jnp.broadcast_to(array, (size, *array.shape))

    arrays = jax.tree.map(widen, arrays, mapped[0])
    return _all_mapped(arrays), jax.tree.map(lambda _: True, arrays)


@jax.custom_vjp
def _mapped_together(arrays: Any) -> Any:
    """The arrays; under vmap, all of them mapped if one of them is."""
    return _all_mapped(arrays)


_mapped_together.defvjp(lambda arrays: (_all_mapped(arrays), None), lambda _, back: (back,))


@jax.custom_vjp
def _pulled_back_with(out: Array, like: Array) -> Array:
    """`out`; under vmap, its cotangent is mapped if `like` is."""
    return out


_pulled_back_with.defvjp(
    lambda out, like: (out, like),
    lambda like, back: (_all_mapped((back, like))[0], None),
)
