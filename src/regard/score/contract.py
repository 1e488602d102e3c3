"""What a score is: a(q, k) by its definition and, where there is one, its lift.

A lift writes the score as an inner product, a(q, k) = phi(q) . psi(k) + beta(k) (+ a constant
per query), so that engines built for dot products can run it. Pooling and masks are elsewhere.
"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from regard.placement import current_platform
from regard.score.distances import spread_distances

if TYPE_CHECKING:
    from regard.score.positions import Placement


class Score:
    """The base class of every score, and of your own.

    A score is a pytree (its parameters are leaves, so it can be differentiated, jitted and
    vmapped) with one method that has to be there, `scores`, and four that may be:

    - `scores(query, key)`: a(q, k) by definition. `query` is [..., T, Hq], `key` [..., S, Hk],
      both of one floating dtype and with equal leading axes; returns [..., T, S] in float32
      or wider.
    - `lift(query, key, visible=...)`: the same score as an inner product, or None.
    - `projected(query, key)`: the same score on inputs projected once, before any loop.
    - `prepared(key, positions)`: the same score on keys prepared once, for a `Memory`.
    - `check(query_width, key_width)`: raise ValueError where the widths do not fit.

    Scores add, and multiply by numbers: `0.5 * Dot() + Laplace(0.1)` is a score; see
    regard/score/algebra.py.

    Without a lift, blockwise pooling calls `scores` on one tile of queries and keys at a time,
    so a new score has linear memory and a gradient from its first line on. The other methods state
    what a backend may use; their defaults are right for every score.

    Example:
        >>> from dataclasses import dataclass
        >>> import jax, jax.numpy as jnp, regard
        >>> @jax.tree_util.register_dataclass
        ... @dataclass(frozen=True)
        ... class Laplace(regard.Score):
        ...     width: float = 1.0
        ...
        ...     def scores(self, query, key):
        ...         gap = query[..., :, None, :] - key[..., None, :, :]  # [..., T, S, D]
        ...         return -jnp.abs(gap).sum(-1) / self.width
        >>> x = jnp.linspace(0.0, 1.0, 5)[:, None]  # [T, D]
        >>> regard.attend(x, x, x, score=Laplace(0.01)).shape
        (5, 1)
    """

    def __init_subclass__(cls) -> None:
        """A subclass that redefines `scores` inherits none of its parent's equal forms, which would
        be forms of another score; one that redefines `lift` inherits nothing stated about it.
        """
        super().__init_subclass__()
        stated: tuple[str, ...] = ("sums_over_shares", "static_scale", "about_keys", "scaled")
        stated = (*stated, "tanh_vector", "projects_keys")
        equal = ("lift", "tile_form", "scores_back", "projected", "prepared", "placed", *stated)
        for name in equal if "scores" in vars(cls) else stated if "lift" in vars(cls) else ():
            if name not in vars(cls):
                setattr(cls, name, vars(Score)[name])

    # Sums and multiples: see algebra.py -------------------------------------------------------

    __array_ufunc__ = None  # so that a NumPy number leaves c * score to the score

    def __add__(self, other: "Score") -> "Score":
        from regard.score.algebra import added  # algebra.py builds on this file

        return added(self, other)

    def __radd__(self, other: Any) -> "Score":
        return self if isinstance(other, int) and other == 0 else self + other  # of sum(scores)

    def __mul__(self, factor: "float | Array") -> "Score":
        from regard.score.algebra import multiplied

        return multiplied(factor, self)

    __rmul__ = __mul__

    def __truediv__(self, divisor: "float | Array") -> "Score":
        if isinstance(divisor, Score):
            return NotImplemented
        return self * (1.0 / divisor)

    def __neg__(self) -> "Score":
        return -1.0 * self

    def __sub__(self, other: "Score") -> "Score":
        return self + -1.0 * other

    def label(self) -> str:
        """What errors and `explain` call it."""
        return type(self).__name__

    def scores(self, query: Array, key: Array) -> Array:
        """a(q, k) by definition: [..., T, Hq] and [..., S, Hk] -> [..., T, S]."""
        raise NotImplementedError(f"{type(self).__name__} does not define scores(query, key)")

    def lift(self, query: Array, key: Array, *, visible: Array | None = None) -> "Lift | None":
        """The score as an inner product, or None where it has no such form.

        Args:
            query: [..., T, Hq].
            key: [..., S, Hk].
            visible: [..., S] bool, keys that some query may attend to; None means all.
        """
        return None

    def scores_back(
        self, query: Array, key: Array, d_scores: Array
    ) -> "tuple[Score, Array, Array]":
        """Cotangents of parameters, query and key for one tile; override where there is a faster
        form than autodiff.
        """
        return jax.vjp(lambda *inputs: type(self).scores(*inputs), self, query, key)[1](d_scores)

    def tile_form(
        self, query: Array, key: Array, *, visible: Array | None = None
    ) -> "TileForm | None":
        """An equal score on prepared inputs that is faster tile by tile, or None."""
        return None

    def projected(self, query: Array, key: Array) -> "tuple[Score, Array, Array]":
        """An equal score, query and key with every projection done: no loop may repeat one."""
        return self, query, key

    def prepared(self, key: Array, positions: Array) -> "tuple[Score, Array]":
        """An equal score for the same queries and for keys prepared once; what a `Memory` stores.

        Each key is prepared by itself, and the score depends on the parameters only: a memory
        prepares chunks of keys as they come and asks for the score without any key. It holds
        what the parameters do to keys (a projection, say), so that attending repeats none of it.
        The default stores the keys as they are, which is right for every score.

        Args:
            key: [..., K, S, Hk]; S may be 0.
            positions: int32, [..., 1, S], of the keys in their text.

        Returns:
            The score, and what is stored: [..., K, S, F], or N heads where parameters are per head.
        """
        return self, key

    def uses_positions(self) -> bool:
        """Whether the score depends on where queries and keys stand in their text."""
        return False

    def placed(self, query: Array, key: Array, at: "Placement") -> "tuple[Score, Array, Array]":
        """An equal score, [B, N, T, Hq] queries and [B, K, S, Hk] keys for these positions."""
        return self, query, key

    def check(self, query_width: int, key_width: int) -> None:
        """Raises ValueError when queries and keys of these widths cannot be compared."""

    def head_axes(self) -> dict[str, tuple[int, ...]]:
        """The parameters that carry a leading axis of heads, with their shapes."""
        return {}

    def per_head(self) -> bool:
        """Whether a parameter carries a leading axis of heads."""
        return bool(self.head_axes())

    def tile_width(self, query_width: int) -> int:
        """Numbers that the definition holds per (query, key) pair: bounds a tile's size."""
        return query_width

    # What a backend may ask -------------------------------------------------------------------

    sums_over_shares: ClassVar[bool] = False  # the lift reduces over keys by `over_shares` only

    def static_scale(self, query_width: int) -> float | None:
        """c, where the score is c · q.k with a positive number c known before any data."""
        return None

    def tanh_vector(self) -> Array | None:
        """w, where the projected score is wᵀ tanh(x + y); there is a kernel for that."""
        return None

    def projects_keys(self) -> bool:
        """Whether `projected` does more to keys than to widen their numbers."""
        return True

    # What a sum or a multiple may ask ---------------------------------------------------------

    def about_keys(self, query: Array, center: Array | None) -> "KeyPolynomial | None":
        """The score as a polynomial of the key around a center, [..., K, 1, Hk]; None: 0.

        Sums of such scores need no more features than one of them. None for no such form.
        """
        return None

    def scaled(self, factor: Array) -> "Score | None":
        """The score times a factor, () or (N,), as a score of its own class; None: no such form."""
        return None


class KeyPolynomial(NamedTuple):
    """linear(q) . (k - c) + square ‖k - c‖² + constant(q).

    Attributes:
        linear: [..., T, Hk], float32 or wider.
        square: broadcasts against [..., T, Hk]; None is zero.
        constant: [..., T]; None is zero.
    """

    linear: Array
    square: Array | None = None
    constant: Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TileForm:
    """A score on inputs prepared once: faster per tile than the definition, and as exact.

    Attributes:
        score: scores the prepared inputs.
        query, key: [..., T, F] and [..., S, F].
        in_range: bool scalar, False where the data needs the definition itself.
        standing: its form and range, for `explain`.
    """

    score: Score
    query: Array
    key: Array
    in_range: Bool[Array, ""]
    standing: str = field(default="exact", metadata=dict(static=True))


class Expansion(Protocol):
    """Makes wide features from the compact arrays of a lift, a block of rows at a time."""

    def query(self, compact: Array) -> Array: ...

    def key(self, compact: Array) -> Array: ...


class RawQueries(NamedTuple):
    """The same scores from the caller's unchanged queries: query . psi(k) + key_bias.

    For a forward pass, which then needs no pass over the queries before it. Not for a backward
    pass: what the query lacks is in the bias, and gradients of keys would be the difference of two
    large numbers.

    Attributes:
        query: [..., T, F], in the caller's dtype.
        key_bias: [..., S].
    """

    query: Array
    key_bias: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Lift:
    """A score written as phi(q) . psi(k) + key_bias + query_bias + distance_bias.

    `query` and `key` are compact: an `expansion`, where there is one, turns a block of their
    rows into features, so that wide features never have to be stored whole. Without one they
    are the features.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> query, key = jnp.ones((1, 4)), jnp.ones((2, 4))
        >>> lift = regard.Dot(scale=0.5).lift(query, key)
        >>> lift.width(), lift.standing, lift.scores().tolist()
        (4, 'exact', [[2.0, 2.0]])

    Attributes:
        query: [..., T, F].
        key: [..., S, F].
        key_bias: [..., S], float32 or wider; None is zero.
        query_bias: [..., T]: the constant per query that softmax cannot see but
            unnormalized regimes can; None is zero.
        expansion: see `Expansion`.
        in_range: a bool scalar, False where the data left the range in which the lift keeps
            its promise and `otherwise` has to be used; None for a lift that always holds.
        otherwise: the next lift to try where this one is out of range; None: the definition.
        raw_queries: see `RawQueries`; None for a lift without this.
        distance_bias: [..., N|1, T + S - 1], a number per distance of query t and key s, entry
            s - t + T - 1, float32 or wider; None is zero.
        bends: the numbers lie on a straight line from distances of so many tokens on, on either
            side, where the last query and the last key are at distance 0.
        standing: "exact", "exact up to a per-query constant" or "within ... over ...".
    """

    query: Array
    key: Array
    key_bias: Array | None = None
    query_bias: Array | None = None
    expansion: Expansion | None = None
    in_range: Bool[Array, ""] | None = None
    otherwise: "Lift | None" = None
    raw_queries: RawQueries | None = None
    distance_bias: Array | None = None
    bends: int = field(default=0, metadata=dict(static=True))
    standing: str = field(default="exact", metadata=dict(static=True))

    def width(self) -> int:
        """R, of the features; known before any data."""
        if self.expansion is None:
            return self.key.shape[-1]
        return jax.eval_shape(type(self.expansion).key, self.expansion, self.key).shape[-1]

    def query_features(self) -> Array:
        """phi(q), [..., T, R]."""
        return self.query if self.expansion is None else self.expansion.query(self.query)

    def key_features(self) -> Array:
        """psi(k), [..., S, R]."""
        return self.key if self.expansion is None else self.expansion.key(self.key)

    def scores(self) -> Array:
        """phi(q) . psi(k) + biases, [..., T, S]."""
        query = self.query_features()
        key = repeat_heads(self.key_features().astype(query.dtype), query)
        scores = inner_products(query, key, exact=self.expansion is not None)
        if self.key_bias is not None:
            scores = scores + repeat_heads(self.key_bias[..., None, :], query)
        if self.query_bias is not None:
            scores = scores + self.query_bias[..., :, None]
        if self.distance_bias is not None:
            scores = scores + spread_distances(self.distance_bias, *scores.shape[-2:])
        return scores


S = TypeVar("S", bound=Score)


def register_score(cls: type[S]) -> type[S]:
    """Makes a frozen dataclass a pytree, as jax.tree_util.register_dataclass does.

    JAX (0.10.2) takes the structures of two dataclasses with as many leaves for equal, those of
    Dot(x) and Gaussian(x) for example: one in about a hundred calls of jax.jit then runs the
    program of the other class. It compares the classes of nodes that are registered as here.
    """
    static = [f.name for f in fields(cls) if f.metadata.get("static")]  # type: ignore[arg-type]
    held = [f.name for f in fields(cls) if f.name not in static]  # type: ignore[arg-type]

    def flatten(score: S) -> tuple[tuple, tuple]:
        return tuple(getattr(score, n) for n in held), tuple(getattr(score, n) for n in static)

    def flatten_with_keys(score: S) -> tuple[list, tuple]:
        leaves, known = flatten(score)
        return list(zip(map(jax.tree_util.GetAttrKey, held), leaves, strict=True)), known

    def make(known: tuple, leaves: Any) -> S:
        score = object.__new__(cls)
        for name, value in zip((*held, *static), (*leaves, *known), strict=True):
            object.__setattr__(score, name, value)
        return score

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, make, flatten)
    return cls


def classes_in(score: Score) -> tuple[type, ...]:
    """The classes of a score and of those inside it: part of a jit cache's key, because JAX does
    not tell a caller's own dataclasses apart, see `register_score`.
    """

    def walk(structure: Any) -> Iterator[type]:
        node = structure.node_data()
        if node is not None:
            yield node[0]
        for child in structure.children():
            yield from walk(child)

    return tuple(walk(jax.tree.structure(score)))


def require_score(score: Any) -> None:
    """Raises TypeError unless this is a score, and it and every score inside it are pytrees; those
    without attributes become one.
    """
    if not isinstance(score, Score):
        raise TypeError(
            "score must be a regard.Score: Dot(), Gaussian(), Bilinear(kernel), "
            f"Additive(query_kernel, key_kernel, vector), or your own subclass. Got {score!r}."
        )
    unknown = {type(leaf): leaf for leaf in jax.tree.leaves(score) if isinstance(leaf, Score)}
    for cls, part in unknown.items():
        _refuse_attributes(part)
        make: Any = functools.partial(_without_attributes, cls)
        with contextlib.suppress(ValueError):  # another thread registered it meanwhile
            jax.tree_util.register_pytree_node(cls, _refuse_attributes, make)


def _without_attributes(cls: type[Score], static: None, leaves: tuple[()]) -> Score:
    return cls.__new__(cls)


def _refuse_attributes(score: Score) -> tuple[tuple[()], None]:
    """No leaves and nothing static; TypeError where that would lose an attribute."""
    slots = [name for cls in type(score).__mro__ for name in getattr(cls, "__slots__", ())]
    held = [*vars(score), *(name for name in slots if hasattr(score, name))]
    if not held:
        return (), None
    name = type(score).__name__
    raise TypeError(
        f"a score with parameters must be a pytree, so that JAX can trace and differentiate them. "
        f"Got {name} with {', '.join(held)}. Fix: @jax.tree_util.register_dataclass above "
        f"@dataclass(frozen=True) on class {name}, with field(metadata=dict(static=True)) for what "
        "is no number."
    )


def promote(*dtypes: jnp.dtype) -> jnp.dtype:
    """The common dtype of mixed inputs, also where the user's JAX promotes nothing by itself."""
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, dtypes)


def accumulation_dtype(*dtypes: jnp.dtype) -> jnp.dtype:
    """float32, or wider where an input is wider: the type of scores, softmax and sums."""
    return promote(jnp.dtype(jnp.float32), *dtypes)


def matmul_precision(dtype: jnp.dtype, *, exact: bool = False) -> jax.lax.Precision | None:
    """The precision of a matrix product: what `jax.default_matmul_precision` says.

    Where it says nothing, JAX's default for the device: a GPU multiplies float32 in TF32, whose
    numbers have 11 significant bits, a CPU in float32.

    Args:
        exact: for the features of a lift whose tolerance TF32 would exceed: float32 on a GPU too,
            unless the user chose otherwise.
    """
    unset = chosen_precision() is None
    if unset and jnp.dtype(dtype).itemsize >= 4 and (exact or current_platform() == "cpu"):
        return jax.lax.Precision.HIGHEST
    return None


def multiplies_in_float32(dtype: jnp.dtype, *, exact: bool = False) -> bool:
    """Whether `matmul_precision` asks for products of whole float32 numbers, and not of TF32."""
    if jnp.dtype(dtype).itemsize < 4:
        return False
    full = ("highest", "float32", "F32_F32_F32")
    return matmul_precision(dtype, exact=exact) is not None or chosen_precision() in full


def as_multiplied(array: Array) -> Array:
    """The array as a matrix unit reads it: float32 rounded to TF32 where products are in TF32.

    For what depends on the very numbers that are multiplied, such as the norm of a key.
    """
    in_tf32 = array.dtype == jnp.float32 and current_platform(array) == "gpu"
    if not in_tf32 or multiplies_in_float32(array.dtype):
        return array
    return jax.lax.reduce_precision(array, exponent_bits=8, mantissa_bits=10)


def chosen_precision() -> str | None:
    """The user's setting of `jax.default_matmul_precision`."""
    return getattr(jax.config, "jax_default_matmul_precision", None)


def inner_products(
    query: Float[Array, "... T R"], key: Float[Array, "... S R"], *, exact: bool = False
) -> Float[Array, "... T S"]:
    """query . key for every pair, in float32 or wider; `exact` as in `matmul_precision`."""
    return _product("...tr,...sr->...ts", query, key, exact=exact)


def _product(
    subscripts: str, left: Array, right: Array, dtype: jnp.dtype | None = None, exact: bool = False
) -> Array:
    wide = accumulation_dtype(left.dtype) if dtype is None else dtype
    if current_platform(left) == "cpu":  # not every product of 16-bit numbers exists there
        left, right = left.astype(wide), right.astype(wide)
    precision = matmul_precision(left.dtype, exact=exact)
    return jnp.einsum(subscripts, left, right, precision=precision, preferred_element_type=wide)


def project(
    inputs: Float[Array, "... T H"], kernel: Array, rounded: bool = False
) -> Float[Array, "... T F"]:
    """inputs @ kernel in the inputs' dtype, accumulated in float32 or wider.

    A kernel [H, F] serves every head; [N, H, F] one each. Returned as accumulated or, `rounded`, in
    the inputs' dtype, where a matrix unit would round it next: it writes half as much.
    """
    dtype = inputs.dtype if rounded and current_platform(inputs) != "cpu" else None
    kernel = kernel.astype(inputs.dtype)
    if kernel.ndim == 3:
        return _product("...nth,nhf->...ntf", inputs, kernel, dtype)
    if inputs.ndim < 4:
        return _product("...th,hf->...tf", inputs, kernel, dtype)
    # In the caller's layout, [B, T, N, H], where two transposes cancel. For a product over
    # [B, N, T] XLA copies the heads to the front and its result back: on a GPU, twice the
    # product's time.
    return _product("...tnh,hf->...tnf", inputs.swapaxes(-3, -2), kernel, dtype).swapaxes(-3, -2)


def repeat_heads(array: Array, like: Array) -> Array:
    """Repeats key heads, axis -3, up to the query heads of `like` (grouped queries)."""
    if array.ndim < 3 or array.shape[-3] == like.shape[-3]:
        return array
    return jnp.repeat(array, like.shape[-3] // array.shape[-3], axis=-3)


def require_arrays(score: Score, **parameters: Any) -> None:
    """Raises TypeError for a parameter that is neither an array nor None."""
    for name, given in parameters.items():
        if given is not None and not hasattr(given, "ndim"):
            raise TypeError(
                f"{score.label()}'s {name} is an array. Got {given!r}. Fix: jnp.array({name})."
            )


def with_heads(rank: int, **parameters: Array | float | None) -> dict[str, tuple[int, ...]]:
    """Those of the parameters that have one axis more than they need: the heads'."""
    shapes = {name: jnp.shape(array) for name, array in parameters.items() if array is not None}
    return {name: shape for name, shape in shapes.items() if len(shape) > rank}


def over_heads(parameter: float | Array, like: Array) -> Array:
    """A number, or (N,), one per head, in float32 or wider, to multiply [..., N, T, D] by."""
    array = jnp.asarray(parameter, accumulation_dtype(like.dtype))
    return array.reshape((1,) * (like.ndim - array.ndim - 2) + array.shape + (1, 1))
