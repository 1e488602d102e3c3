"""cuDNN's fused attention, through jax.nn: for a score that is an inner product and no more.

Valid lengths, causal order and a window to the left go into the kernel as numbers. Whatever else
would need a T×S array is refused, in words; choose.py then goes on to the next backend.
"""

import contextlib
import functools
import math
import re
from collections.abc import Iterator
from importlib import metadata
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array

from regard.mask import Allowed, LengthsAndBand, MaskFacts
from regard.normalize import Softmax
from regard.pool.problem import Problem, hide_late
from regard.pool.request import Device, LiftFacts, Request
from regard.pool.ways import find_ways
from regard.score.contract import Lift, Score, repeat_heads
from regard.score.dot import Dot
from regard.shapes import Axes
from regard.varying import vary_as

# Unless it is given lengths, cuDNN's backward pass leaves the rest of a ragged tile unmasked, and
# where a query's log-sum-exp is below -88 its gradient is NaN (github.com/NVIDIA/cudnn-frontend,
# issues 160, 628 and 1072). Tiles are at most so long.
TILE = 128

# Where this was seen, and is taken to hold: cuDNN 9.19 on Hopper (an H200) replaces the scores of
# masked keys, whatever these hold. For an example that is said to have no queries it writes zeros,
# output and gradients, and zeros for the gradients of masked keys and values. So queries need never
# be hidden from it, keys on the way back only; tests/pool/test_cudnn_contract.py looks.
SKIPS_PADDING_SINCE, SKIPS_PADDING_ON = (9, 19), 9

PACKAGES = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")  # cuDNN is packaged once for each CUDA


class MaskArguments(NamedTuple):
    """A mask as jax.nn.dot_product_attention takes it."""

    is_causal: bool = False
    local_window_size: tuple[int, int] | None = None
    query_seq_lengths: Array | None = None  # int32, [B]
    key_value_seq_lengths: Array | None = None  # int32, [B]


def accepts(request: Request) -> str:
    """What cuDNN would do for this request, in words.

    Raises:
        NotImplementedError: with everything that cuDNN lacks for it.
    """
    lacks = tuple(_lacks(request))
    if not lacks:
        lacks = _refusal_of_jax(request.axes, jnp.dtype(request.dtype), _width(request))
    if lacks:
        raise NotImplementedError("; ".join(lacks))
    return f"fused by cuDNN, memory linear in T and S; {_describe(request.mask)}"


def cudnn(problem: Problem, scale: float | None = None, skips: bool = False) -> tuple[Array, Array]:
    """The output, [B, N, T, V], in the value's dtype, and that the lift ran (bool scalar).

    First derivatives only, by JAX's own rule; for more, implementation="reference".

    Args:
        problem: one that `accepts` has accepted.
        scale: as `static_scale` found it: the kernel multiplies by it, and there is no pass over
            the queries. None: the score's own lift.
        skips: as `skips_padding` found it.
    """
    if scale is None or not skips:  # a lift may mix rows, padding with the rest
        return _call(problem.hidden(), scale)
    ways = (functools.partial(way, scale=scale) for way in (_call_alone, _call_and_back))
    return hide_late(*ways, problem)


def _call_alone(problem: Problem, scale: float) -> tuple[Array, Array]:
    """A forward pass without a way back."""
    return _call(problem.with_hidden_values(), scale, skips=True)


def _call_and_back(problem: Problem, scale: float) -> tuple[Array, Array]:
    """With one: d scores of 0 are multiplied by keys, and d out by values."""
    return _call(problem.with_hidden_keys_and_values(), scale, skips=True)


def _call(problem: Problem, scale: float | None, skips: bool = False) -> tuple[Array, Array]:
    query, key, value = problem.query, problem.key, cast(Array, problem.value)
    if scale is None:
        query, key = _features(problem)
    value = repeat_heads(value, key)
    mask = mask_arguments(problem.allowed, problem.axes, skips)
    operands = (query, key, value, mask.query_seq_lengths, mask.key_value_seq_lengths)
    operands = _mapped_together(vary_as(operands, operands))
    # The caller's (B, T, N, D) again: a pair of transposes that XLA cancels.
    query, key, value = (_even(array.swapaxes(1, 2)) for array in operands[:3])
    out = jax.nn.dot_product_attention(
        query,
        key,
        value,
        scale=1.0 if scale is None else scale,
        is_causal=mask.is_causal,
        local_window_size=mask.local_window_size,
        query_seq_lengths=operands[3],
        key_value_seq_lengths=operands[4],
        implementation="cudnn",
    )
    out = _pulled_back_with(out, query)[:, : problem.axes.T]
    return out.swapaxes(1, 2), jnp.array(True)


def _even(rows: Array) -> Array:
    """[B, T, N, D] with a row of zeros more where T is odd: JAX refuses the gradient of an odd
    number, once it is asked for. Lengths are given then, so nobody looks at it.
    """
    return jnp.pad(rows, ((0, 0), (0, rows.shape[1] % 2), (0, 0), (0, 0)))


def skips_padding(device: Device) -> bool:
    """Whether cuDNN on this device is known to look at no padding in a forward pass."""
    capability = device.capability
    on = capability is not None and capability[0] == SKIPS_PADDING_ON
    return on and _version() >= SKIPS_PADDING_SINCE


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


def static_scale(score: Score, width: int) -> float | None:
    """A dot product's scale where it is a number and not an array; None for every other score.

    A number is part of the compiled program. One that is not positive goes by the lift: kernels
    find a row's maximum before they scale it.
    """
    if type(score) is not Dot:
        return None
    if score.scale is None:
        return 1.0 / math.sqrt(max(width, 1))
    plain = isinstance(score.scale, (int, float)) and 0 < score.scale < math.inf
    return float(cast(float, score.scale)) if plain else None


def mask_arguments(allowed: Allowed, axes: Axes, skips: bool = False) -> MaskArguments:
    """A mask that `accepts` has accepted, as jax.nn takes it.

    cuDNN aligns causal order at the start, as `facts.band` is aligned. An empty example passes
    for one of length 1. Hidden, its only key and value are zero, so that its output is exactly 0,
    and no gradient gets past the zeros. With `skips`, where it is not hidden, it has no queries
    either. What cuDNN makes of no keys never matters.
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
    if skips:
        queries = jnp.where(lens > 0, queries, 0)
    return MaskArguments(causal, window, queries, jnp.maximum(lens, 1))


def _features(problem: Problem) -> tuple[Array, Array]:
    """phi(q) and psi(k) in the inputs' dtype, zero in padding whatever the lift makes of zeros."""
    dtype = problem.query.dtype
    lift = cast(Lift, find_ways(problem)[0][0].lift)
    query, key = lift.query_features().astype(dtype), lift.key_features().astype(dtype)
    if problem.visible is not None:
        key = jnp.where(repeat_heads(problem.visible[..., None], key), key, 0)
    if problem.seeing is not None:
        query = jnp.where(problem.seeing[..., None], query, 0)
    return query, key


# ---------------------------------------------------------------------------------------------
# What cuDNN lacks. Every line reads on after "cudnn".


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
    if request.bias:
        yield "takes a bias only as a T×S array"
    yield from _mask_lacks(request.mask, axes)
    if axes.empty():
        return
    if axes.T == axes.S == 1:
        yield "has no gradient for one query and one key"
    if type(request.normalize) is Softmax:
        yield from _score_lacks(request)


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
        yield f"has no window in which some queries see no key (T = {axes.T}, S = {axes.S})"
    elif mask.lens != "none":
        yield "has no window together with valid lengths"


def _score_lacks(request: Request) -> Iterator[str]:
    name, lift = type(request.score).__name__, request.lift
    if lift is None:
        yield f"runs inner products only, and {name} has no lift to one here"
        return
    if lift.key_bias:
        yield f"cannot add the number per key that {name}'s lift comes with"
    if lift.expansion or lift.guarded or not lift.standing.startswith("exact"):
        yield f"runs exact lifts that are stored whole, and {name}'s is not one"
        return
    width, value_width = lift.width, request.axes.V
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
    """What JAX itself has against the call: a missing or too old cuDNN, say."""
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
    return request.axes.key_width if request.axes.empty() else cast(LiftFacts, request.lift).width


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
# backward. These two see to that; without a vmap they are the identity.


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
