"""Axes by rank: checks the shapes of a call once, at the front door, and names its sizes.

The checks that scores make of their own arguments are here too.

(T, D) one example, (B, T, D) a batch, (B, T, N, D) a batch with heads. Inside, everything is
[B, N, T, D] with key heads K dividing N; the legend is B batch, T queries, S keys, N heads,
K key heads, Hq and Hk query and key widths, V value width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

RANKS = "(T, D), (B, T, D) or (B, T, N, D)"


@dataclass(frozen=True)
class Axes:
    """The sizes of one call. V is 0 where there is no value."""

    rank: int
    B: int
    T: int
    S: int
    N: int
    K: int
    query_width: int
    key_width: int
    V: int

    def empty(self) -> bool:
        """Whether there is no pair of query and key at all."""
        return 0 in (self.B, self.T, self.S, self.N)

    def symbolic(self) -> bool:
        """Whether B, T or S is a symbol, as jax.export allows; known when the program is called."""
        return not all(isinstance(size, int) for size in (self.B, self.T, self.S))

    def weights_shape(self) -> tuple[int, ...]:
        """(T, S), (B, T, S) or (B, N, T, S)."""
        return {2: (), 3: (self.B,), 4: (self.B, self.N)}[self.rank] + (self.T, self.S)

    def query_shape(self) -> tuple[int, ...]:
        """In the caller's layout: (T, Hq), (B, T, Hq) or (B, T, N, Hq)."""
        lead = () if self.rank == 2 else (self.B,)
        return (*lead, self.T, *([self.N] if self.rank == 4 else []), self.query_width)

    def key_shape(self) -> tuple[int, ...]:
        """In the caller's layout: (S, Hk), (B, S, Hk) or (B, S, K, Hk)."""
        lead = () if self.rank == 2 else (self.B,)
        return (*lead, self.S, *([self.K] if self.rank == 4 else []), self.key_width)

    def canonical(self, array: Array) -> Array:
        """A caller's query, key or value -> [B, N, T, D]."""
        if self.rank == 4:
            return array.swapaxes(1, 2)
        return array[None, None] if self.rank == 2 else array[:, None]

    def callers(self, array: Array) -> Array:
        """[B, N, T, V] -> the caller's layout."""
        if self.rank == 4:
            return array.swapaxes(1, 2)
        return array[0, 0] if self.rank == 2 else array[:, 0]

    def callers_pairs(self, array: Array) -> Array:
        """[B, N, ...] -> the caller's leading axes: (), (B,) or (B, N)."""
        if self.rank == 4:
            return array
        return array[0, 0] if self.rank == 2 else array[:, 0]

    def canonical_pairs(self, name: str, array: Array) -> Array:
        """A mask or bias that broadcasts to the weights -> [B|1, N|1, T|1, S|1]."""
        wanted = self.weights_shape()
        try:
            fits = jnp.broadcast_shapes(array.shape, wanted) == wanted
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(
                f"{name} must broadcast to the weights {list(wanted)}. Got {name} "
                f"{list(array.shape)}. Fix: size-1 axes where it is shared, e.g. "
                f"[{', '.join(['1'] * (len(wanted) - 2) + [str(n) for n in wanted[-2:]])}]."
            )
        array = array.reshape((1,) * (len(wanted) - array.ndim) + array.shape)
        return array[None, None] if self.rank == 2 else array[:, None] if self.rank == 3 else array


def as_array(name: str, given: Any, make: Callable[[Any], Any] = jnp.asarray) -> Array:
    """make(given), an array; a TypeError that names the argument where that is no array."""
    try:
        return make(given)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be an array. Got {given!r}. ({error})") from None


def check(query: Array, key: Array, value: Array | None) -> Axes:
    """Checks ranks, lengths, batch and head counts, and dtypes; returns the named sizes."""
    arrays = dict(query=query, key=key) | ({} if value is None else dict(value=value))
    listed = "query, key and value" if value is not None else "query and key"
    ranks = {array.ndim for array in arrays.values()}
    if len(ranks) != 1 or not ranks <= {2, 3, 4}:
        raise shape_error(f"{listed} must have one rank: {RANKS}", arrays, None, "add or drop axes")
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(
                f"{name} must be floating point. Got {name} {list(array.shape)} of dtype "
                f"{array.dtype}. Fix: {name}.astype(jnp.float32)."
            )
        if jnp.finfo(array.dtype).bits < 16:
            raise TypeError(
                f"{name} must have 16 bits or more: JAX promotes no narrower floats. Got {name} "
                f"{list(array.shape)} of dtype {array.dtype}. Fix: {name}.astype(jnp.bfloat16)."
            )
    rank = query.ndim
    length = -2 if rank < 4 else 1
    if value is not None and key.shape[length] != value.shape[length]:
        raise shape_error(
            "key and value must have the same length S", dict(key=key, value=value), None, ""
        )
    batch = [array.shape[0] for array in arrays.values()] if rank > 2 else [1]
    if len(set(batch)) != 1:
        raise shape_error(
            f"{listed} must have the same batch size B, axis 0",
            arrays,
            None,
            "jnp.broadcast_to the smaller one, or jax.vmap",
        )
    heads, key_heads = (query.shape[2], key.shape[2]) if rank == 4 else (1, 1)
    if rank == 4 and value is not None and value.shape[2] != key_heads:
        raise shape_error(
            "key and value must have the same number of heads K, axis 2",
            dict(key=key, value=value),
            None,
            "",
        )
    if key_heads == 0 or heads % key_heads:
        raise shape_error(
            "the key's number of heads K, axis 2, must divide the query's N", arrays, None, ""
        )
    return Axes(
        rank=rank,
        B=batch[0],
        T=query.shape[length],
        S=key.shape[length],
        N=heads,
        K=key_heads,
        query_width=query.shape[-1],
        key_width=key.shape[-1],
        V=0 if value is None else value.shape[-1],
    )


def check_scores(scores: Array) -> Axes:
    """The sizes of an array of scores, (T, S), (B, T, S) or (B, N, T, S)."""
    if scores.ndim not in (2, 3, 4):
        raise shape_error(
            "scores must have shape (T, S), (B, T, S) or (B, N, T, S)",
            dict(scores=scores),
            None,
            "add or drop axes",
        )
    if not jnp.issubdtype(scores.dtype, jnp.floating):
        raise TypeError(
            f"scores must be floating point. Got scores {list(scores.shape)} of dtype "
            f"{scores.dtype}. Fix: scores.astype(jnp.float32)."
        )
    leading = (1,) * (4 - scores.ndim) + scores.shape[:-2]
    B, N = leading if scores.ndim != 3 else (leading[1], 1)
    return Axes(scores.ndim, B, scores.shape[-2], scores.shape[-1], N, N, 0, 0, 0)


def require_arrays(name: str, **parameters: Any) -> None:
    """Raises TypeError for a parameter of this score that is neither an array nor None."""
    for parameter, given in parameters.items():
        if given is not None and not hasattr(given, "ndim"):
            raise TypeError(
                f"{name}'s {parameter} is an array. Got {given!r}. Fix: jnp.array({parameter})."
            )


def require_one_width(name: str, query_width: int, key_width: int) -> None:
    """Raises ValueError unless queries and keys have one width; `name` is the score's."""
    if query_width != key_width:
        raise ValueError(
            f"{name} needs queries and keys of one width. Got query width {query_width}, "
            f"key width {key_width}. Fix: score=regard.Bilinear(kernel [{query_width}, "
            f"{key_width}]) or regard.Additive, or project one side."
        )


def shape_error(rule: str, arrays: dict[str, Array], axes: Axes | None, fix: str) -> ValueError:
    """The rule, every array with its shape, the fix."""
    got = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
    text = f"{rule}. Got {got}"
    if axes is not None:
        text += f" for query {list(axes.query_shape())}, key {list(axes.key_shape())}"
    return ValueError(text + "." + (f" Fix: {fix}." if fix else ""))
