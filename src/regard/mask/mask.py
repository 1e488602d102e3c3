"""The `Mask` that callers write, and how masks combine.

Lengths, causal order and windows are ranges of keys, one [start, end) per query, and stay
ranges all the way into the kernels. Only `Mask.boolean`, and unions and complements that are not
one range per query, are ever as large as the weights.
"""

import operator
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from regard.mask.allowed import Band
from regard.shapes import as_array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mask:
    """Which keys each query may attend to. True takes part, everywhere.

    Made by `Mask.causal`, `Mask.lengths`, `Mask.window`, `Mask.segments`, `Mask.boolean`, and
    combined with `&` (both), `|` (either) and `~` (not). A bool array beside an operator is a
    mask. Lengths, bands and segments are a few numbers per token and stay so under `&`. Under `|`
    and `~` they stay so where each query still attends to one range of keys: causal order or a
    prefix, a longer and a shorter length, windows that touch, the complement of a length or of
    causal order. Any other `|` or `~` becomes a bool array of queries × keys when it is used.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> x = jnp.eye(4)
        >>> mask = regard.Mask.causal() & regard.Mask.lengths(jnp.array(3))
        >>> regard.weights(x, x, mask=mask, normalize=regard.Uniform()).round(2).tolist()[3]
        [0.33..., 0.33..., 0.33..., 0.0]
        >>> prefix = regard.Mask.causal() | regard.Mask.lengths(jnp.array(2))
        >>> regard.weights(x, x, mask=prefix, normalize=regard.Uniform()).tolist()[0]
        [0.5, 0.5, 0.0, 0.0]
        >>> later = ~regard.Mask.causal()
        >>> regard.weights(x, x, mask=later, normalize=regard.Uniform()).tolist()[2]
        [0.0, 0.0, 0.0, 1.0]
    """

    lens: tuple[Array, ...] = ()
    segment_ids: tuple[tuple[Array, Array], ...] = ()
    arrays: tuple[Array, ...] = ()
    # Complements: a pair takes part where none of these masks lets it. The union a | b is kept as
    # ~(~a & ~b).
    excluded: "tuple[Mask, ...]" = ()
    bands: tuple[Band, ...] = field(default=(), metadata=dict(static=True))
    # For each of segment_ids, whether queries and keys are known to have the same ids.
    shared_ids: tuple[bool, ...] = field(default=(), metadata=dict(static=True))

    @classmethod
    def causal(cls, align: str = "end") -> "Mask":
        """Each query attends to the keys up to its own position.

        With T ≠ S, align="end" (the default) puts the last query at the last key, as in decoding
        with a cache; align="start" puts the first query at the first key.

        Example:
            >>> import jax.numpy as jnp, regard
            >>> q, k = jnp.zeros((2, 1)), jnp.zeros((3, 1))
            >>> regard.weights(q, k, mask=regard.Mask.causal()).tolist()[0]
            [0.5, 0.5, 0.0]
            >>> regard.weights(q, k, mask=regard.Mask.causal(align="start")).tolist()[0]
            [1.0, 0.0, 0.0]
        """
        return cls.window(None, 0, align=align)

    @classmethod
    def window(cls, left: int | None, right: int | None, align: str = "end") -> "Mask":
        """A query at position p attends to the keys p - left ... p + right; None is no bound.

        The position of query t is t + S - T with align="end", t with align="start".

        Example:
            >>> import jax.numpy as jnp, regard
            >>> x = jnp.zeros((3, 1))
            >>> regard.weights(x, x, mask=regard.Mask.window(1, 0)).tolist()
            [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]

        Args:
            left, right: integers known at trace time (also NumPy's), or None.
        """
        if align not in ("start", "end"):
            raise ValueError(f'align must be "start" or "end". Got {align!r}.')
        return cls(bands=(Band(_width("left", left), _width("right", right), align),))

    @classmethod
    def lengths(cls, lens: Array) -> "Mask":
        """Keys s < lens take part; the same as `valid_lens=`.

        Example:
            >>> import jax.numpy as jnp, regard
            >>> x = jnp.zeros((3, 1))
            >>> regard.weights(x, x, mask=regard.Mask.lengths(2)).tolist()[2]
            [0.5, 0.5, 0.0]

        Args:
            lens: integers of shape (), (B,), (B, T) or (B, N, T); (T,) for one example. Clipped
                to [0, S].
        """
        return cls(lens=(as_lens(lens),))

    @classmethod
    def segments(cls, query_ids: Array, key_ids: Array | None = None) -> "Mask":
        """Queries attend to the keys of their own segment: several texts packed into one row.

        Example:
            >>> import jax.numpy as jnp, regard
            >>> x, ids = jnp.zeros((3, 1)), jnp.array([0, 0, 1])
            >>> regard.weights(x, x, mask=regard.Mask.segments(ids)).tolist()
            [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]

        Args:
            query_ids: integers, (T,) or (B, T).
            key_ids: integers, (S,) or (B, S); None, for self-attention, means query_ids.
        """
        shared = key_ids is None or key_ids is query_ids
        ids = _as_ids(query_ids, query_ids if key_ids is None else key_ids)
        return cls(segment_ids=(ids,), shared_ids=(shared,))

    @classmethod
    def boolean(cls, array: Array) -> "Mask":
        """Any mask at all: bool, broadcastable to the weights; True takes part.

        Example:
            >>> import jax.numpy as jnp, regard
            >>> x, table = jnp.zeros((2, 1)), jnp.array([[True, False], [True, True]])
            >>> regard.weights(x, x, mask=regard.Mask.boolean(table)).tolist()
            [[1.0, 0.0], [0.5, 0.5]]
        """
        return cls(arrays=(array,))

    def __and__(self, other: "Mask | Array") -> "Mask":
        mask = _operand(other)
        if mask is None:
            return NotImplemented
        return Mask(
            self.lens + mask.lens,
            self.segment_ids + mask.segment_ids,
            self.arrays + mask.arrays,
            self.excluded + mask.excluded,
            self.bands + mask.bands,
            self.shared_ids + mask.shared_ids,
        )

    def __or__(self, other: "Mask | Array") -> "Mask":
        mask = _operand(other)
        return NotImplemented if mask is None else ~(~self & ~mask)

    def __invert__(self) -> "Mask":
        others = self.lens or self.segment_ids or self.arrays or self.bands
        alone = len(self.excluded) == 1 and not others
        return self.excluded[0] if alone else Mask(excluded=(self,))

    __rand__, __ror__ = __and__, __or__
    __array_ufunc__ = None  # so that NumPy leaves `array & mask` to the mask

    def __bool__(self) -> bool:
        raise TypeError(
            "a Mask has no truth value: `and`, `or` and `not` would drop one of the masks. Fix: "
            "mask & other, mask | other, ~mask; or `mask is not None`."
        )


def _operand(other: Any) -> Mask | None:
    """What stands beside an operator, as a mask; None for something that cannot be one."""
    if isinstance(other, Mask):
        return other
    if not isinstance(other, (jax.Array, np.ndarray, np.generic)):
        return None
    if other.dtype != jnp.bool_:
        raise TypeError(
            "a Mask combines with masks and bool arrays. Got an array of dtype "
            f"{other.dtype}, shape {list(other.shape)}. Fix: regard.Mask.lengths(array) for valid "
            "lengths, array.astype(bool) for a mask."
        )
    return Mask.boolean(cast(Array, other))


def _width(name: str, width: Any) -> int | None:
    if width is None:
        return None
    try:
        return operator.index(width)
    except TypeError:
        raise TypeError(
            f"window's {name} must be an integer or None, known at trace time. Got {width!r}. "
            "Fix: a static argument of jax.jit, or Mask.lengths for a bound that is data."
        ) from None


def _as_ids(query_ids: Any, key_ids: Any) -> tuple[Any, Any]:
    """Integers of the host past int32 as their ranks, which JAX would wrap around."""
    both = (query_ids, key_ids)
    if not all(isinstance(leaf, int | np.ndarray | np.generic) for leaf in jax.tree.leaves(both)):
        return both
    query, key = (as_array("segment ids", ids, np.asarray) for ids in both)
    every = np.append(query, key)
    integers = query.dtype.kind in "iu" and key.dtype.kind in "iu" and every.dtype.kind in "iu"
    if not integers or -(2**31) <= int(every.min(initial=0)) <= int(every.max(initial=0)) < 2**31:
        return query, key
    ranks = np.unique(every, return_inverse=True)[1].astype(np.int32)
    return ranks[: query.size].reshape(query.shape), ranks[query.size :].reshape(key.shape)


def as_lens(lens: Any) -> Any:
    """Integers of the host as int32, clipped and not wrapped; JAX arrays as they are."""
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(lens)):
        return lens
    lens = as_array("valid_lens", lens, np.asarray)
    if lens.dtype.kind in "iu" and lens.dtype.itemsize >= 4:
        lens = np.clip(lens, 0, np.iinfo(np.int32).max).astype(np.int32)
    return lens
