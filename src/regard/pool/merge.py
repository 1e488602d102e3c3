"""Parts of a softmax, put together by their log-sum-exp: `merge`, and a sink as one more part."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from regard.score.contract import accumulation_dtype
from regard.shapes import as_array


def merge(*parts: tuple[Array, Array]) -> tuple[Array, Array]:
    """Attention over several parts of the keys, as if it had been one call: exact.

    Each part is what `attend(..., return_lse=True)` returned for the same queries and other keys.
    A part without visible keys counts for nothing; where all parts are empty, so is the result. A
    sink belongs to one of the parts only.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> x = jnp.arange(8.0)[:, None]
        >>> first = regard.attend(x, x[:3], x[:3], return_lse=True)
        >>> second = regard.attend(x, x[3:], x[3:], return_lse=True)
        >>> out, lse = regard.merge(first, second)
        >>> bool(jnp.allclose(out, regard.attend(x, x, x), atol=1e-5))
        True

    Args:
        parts: pairs of an output, (T, V), (B, T, V) or (B, T, N, V), and its log-sum-exp, (T,),
            (B, T) or (B, N, T).

    Returns:
        The output and the log-sum-exp over all keys.

    Raises:
        ValueError: no part, or shapes that do not fit together.
        TypeError: a part that is no pair.
    """
    if not parts:
        raise ValueError("merge needs at least one (output, log-sum-exp). Got none.")
    if not all(
        isinstance(part, list | tuple)
        and len(part) == 2
        and not any(isinstance(array, list | tuple) for array in part)
        for part in parts
    ):
        raise TypeError(
            "merge takes each part as an argument of its own, the pair (output, log-sum-exp). Got "
            f"{', '.join(type(part).__name__ for part in parts)}. Fix: merge(*parts)."
        )
    pairs = [(as_array("output", out), as_array("log-sum-exp", lse)) for out, lse in parts]
    shapes = [(out.shape, lse.shape) for out, lse in pairs]
    shape = pairs[0][0].shape
    rows = {2: shape[:1], 3: shape[:2]}.get(len(shape), (shape[0], *shape[2:3], *shape[1:2]))
    if len(shape) not in (2, 3, 4) or any(found != (shape, rows) for found in shapes):
        listed = ", ".join(f"output {list(out)} with lse {list(lse)}" for out, lse in shapes)
        raise ValueError(
            "merge takes outputs of one shape, (T, V), (B, T, V) or (B, T, N, V), each with its "
            f"log-sum-exp, (T,), (B, T) or (B, N, T). Got {listed}. "
            "Fix: attend(..., return_lse=True) over parts of the keys."
        )
    found = [array.dtype for pair in pairs for array in pair]
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in found):
        raise TypeError(f"merge takes floating-point parts. Got {', '.join(map(str, found))}.")
    out_dtype = pairs[0][0].dtype
    wide = accumulation_dtype(*found)
    tops = jnp.stack([lse.astype(wide) for _, lse in pairs])
    lse = log_sum_exp(tops, axis=0)
    shares = jnp.exp(tops - jnp.where(lse == -jnp.inf, 0.0, lse)[None])  # of an empty row: 0
    if len(shape) == 4:
        shares = shares.swapaxes(-1, -2)  # as outputs lie: [parts, B, T, N]
    # Not of one stacked array, which would be written and read once more.
    terms = [
        out.astype(wide) * share[..., None] for (out, _), share in zip(pairs, shares, strict=True)
    ]
    return functools.reduce(jnp.add, terms).astype(out_dtype), lse


def log_sum_exp(scores: Array, axis: int = -1) -> Array:
    """log sum exp; -inf where everything is, with gradient 0 there."""
    top = jax.lax.stop_gradient(scores.max(axis, keepdims=True, initial=-jnp.inf))
    top = jnp.where(top == -jnp.inf, 0.0, top)
    total = jnp.exp(scores - top).sum(axis)
    empty = total == 0
    whole = jnp.squeeze(top, axis) + jnp.log(jnp.where(empty, 1.0, total))
    return jnp.where(empty, -jnp.inf, whole)


def with_sink(lse: Array, sink: Array) -> tuple[Array, Array]:
    """By how much the weights shrink where a sink takes part, and the log-sum-exp with it.

    A sink is one more key without a value: what it takes is missing from the weights.

    Args:
        lse: of the keys, -inf for an empty row.
        sink: broadcasts to it.
    """
    both = jnp.stack(jnp.broadcast_arrays(lse, sink.astype(lse.dtype)))
    whole = log_sum_exp(both, axis=0)
    empty = lse == -jnp.inf
    share = jnp.exp(jnp.where(empty, 0.0, lse) - jnp.where(empty, 0.0, whole))
    return jnp.where(empty, 0.0, share), whole


def sink_rows(sink: Array) -> Array:
    """() or [N] -> against [B, N, T]."""
    return sink.reshape(1, -1, 1)


def finish_with_sink(found: Any, sink: Array | None, dtype: Any) -> tuple[Array, Array]:
    """(output [B, N, T, V], log-sum-exp) without a sink -> both with it."""
    out, lse = found
    if sink is None:
        return out, lse
    share, lse = with_sink(lse, sink_rows(sink))
    return (out.astype(share.dtype) * share[..., None]).astype(dtype), lse
