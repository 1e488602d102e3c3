"""What the module front ends share: parameter names, shapes, initializers and logical axes.

`regard.nnx` and `regard.linen` own arrays; everything that decides what they are, and what is
computed with them, is in arguments.py, head_plan.py, multi_head.py and here. So the
same parameters give the same bits in both. Nothing here imports Flax.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn import initializers

from regard.attend import attend
from regard.memory import Memory
from regard.score import Additive, Bilinear, Gaussian, Score
from regard.score.contract import promote

Initializer = Callable[..., Any]
Tree = Mapping[str, Any]

# The names that sharding rules map to mesh axes: input and output features, query heads, key
# heads, a head's own features, and the hidden units of additive attention.
LOGICAL_AXES = ("embed", "heads", "key_heads", "head_features", "hidden")

default_kernel_init: Initializer = initializers.lecun_normal()  # as in Flax
default_bias_init: Initializer = initializers.zeros


@dataclass(frozen=True)
class Parameter:
    """One array of a module.

    Attributes:
        shape: its shape.
        axes: a logical name for each of its axes, or None.
        init: an initializer, called as init(rng, matrix or shape, dtype).
        matrix: the (fan in, fan out) that the initializer sees, so that its variance does not
            depend on how the heads are laid out; None: it sees the shape.
        heads: how many matrices stand side by side in `matrix`, to be stacked as a first axis;
            0: none, the matrix is only reshaped.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Initializer
    matrix: tuple[int, int] | None = None
    heads: int = 0

    def create(self, rng: Array, dtype: Any) -> Any:
        """The initial value: an array, or what a partitioning initializer boxes it in."""
        return self.init(rng, self.matrix or self.shape, dtype)

    def arrange(self, drawn: Array) -> Array:
        """What the initializer drew -> the shape."""
        if self.heads:
            fan_in, fan_out = drawn.shape
            drawn = drawn.reshape(fan_in, self.heads, fan_out // self.heads).swapaxes(0, 1)
        return drawn.reshape(self.shape)


class Learned(Protocol):
    """A score whose parameters a module owns: what they are, and the score made of them."""

    @property
    def widths(self) -> tuple[int, int] | None:
        """Of queries and keys, where the parameters fix them."""
        ...

    def parameters(self) -> dict[str, Parameter]: ...

    def score(self, params: Tree, query: Array) -> tuple[Score, Array]:
        """The score, and the query in the form it takes."""
        ...


@dataclass(frozen=True)
class Fixed:
    """A score without parameters to learn: dot products, or a Score of the caller's."""

    given: Score
    widths: ClassVar[None] = None

    def parameters(self) -> dict[str, Parameter]:
        return {}

    def score(self, params: Tree, query: Array) -> tuple[Score, Array]:
        return self.given, query


@dataclass(frozen=True)
class LearnedGaussian:
    """width (), or (n,), one per head."""

    width: float = 1.0
    heads: int | None = None
    widths: ClassVar[None] = None

    def parameters(self) -> dict[str, Parameter]:
        lead, names = _lead(self.heads)
        return {"width": Parameter(lead, names, initializers.constant(self.width))}

    def score(self, params: Tree, query: Array) -> tuple[Score, Array]:
        return Gaussian(params["width"]), query


@dataclass(frozen=True)
class _OfWidths:
    """A score whose parameters fix the widths of queries and keys."""

    query_features: int
    key_features: int

    @property
    def widths(self) -> tuple[int, int]:
        return self.query_features, self.key_features


@dataclass(frozen=True)
class LearnedBilinear(_OfWidths):
    """kernel (Hq, Hk), or (n, Hq, Hk); bias (Hk,): a(q, k) = (qᵀM + bᵀ) k."""

    use_bias: bool = False
    kernel_init: Initializer | None = None
    bias_init: Initializer = default_bias_init
    heads: int | None = None

    def parameters(self) -> dict[str, Parameter]:
        Hq, Hk = self.query_features, self.key_features
        # Scores of unit variance for unit-variance queries and keys, as the scaled dot product.
        init = self.kernel_init or initializers.normal(1 / math.sqrt(max(Hq * Hk, 1)))
        names = ("embed", "embed") if self.heads is None else ("head_features", "head_features")
        found = {"kernel": _matrix(Hq, Hk, names, init, self.heads)}
        if self.use_bias:
            found["bias"] = Parameter((Hk,), names[1:], self.bias_init)
        return found

    def score(self, params: Tree, query: Array) -> tuple[Score, Array]:
        kernel = params["kernel"]
        if self.use_bias:
            query, kernel = _affine(query, kernel, params["bias"])
        return Bilinear(kernel), query


@dataclass(frozen=True)
class LearnedAdditive(_OfWidths):
    """query_kernel (Hq, h), key_kernel (Hk, h), bias (h,), vector (h,), or each with (n, ...).

    Without hidden_features there are no kernels: queries and keys are added as they are.
    """

    hidden_features: int | None = None
    use_bias: bool = False
    tolerance: float | str | None = None
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = default_bias_init
    heads: int | None = None

    def parameters(self) -> dict[str, Parameter]:
        h = self.query_features if self.hidden_features is None else self.hidden_features
        outer = "embed" if self.heads is None else "head_features"
        lead, names = _lead(self.heads)
        found = {}
        if self.hidden_features is not None:
            for side, width in (("query", self.query_features), ("key", self.key_features)):
                found[f"{side}_kernel"] = _matrix(
                    width, h, (outer, "hidden"), self.kernel_init, self.heads
                )
            if self.use_bias:
                found["bias"] = Parameter((h,), ("hidden",), self.bias_init)
        found["vector"] = Parameter(
            (*lead, h),
            (*names, "hidden"),
            default_kernel_init,
            matrix=(h, self.heads or 1),
            heads=self.heads or 1,
        )
        return found

    def score(self, params: Tree, query: Array) -> tuple[Score, Array]:
        query_kernel = params.get("query_kernel")
        if "bias" in params:
            query, query_kernel = _affine(query, params["query_kernel"], params["bias"])
        return (
            Additive(query_kernel, params.get("key_kernel"), params["vector"], self.tolerance),
            query,
        )


@dataclass(frozen=True)
class LearnedScore:
    """A caller's Score: its floating-point arrays are learned, its other leaves are as given.

    Attributes:
        name: of its class, in lower case: where its parameters are found.
        treedef: of the score.
        leaves: for each leaf, its name where it is learned, else its value.
        shapes: of the learned leaves, by name.
        start: the score to begin with, given a JAX key.
    """

    name: str
    treedef: Any
    leaves: tuple[Any, ...]
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    start: Callable[[Array], Score] = field(compare=False)
    widths: ClassVar[None] = None

    @classmethod
    def of(cls, given: Score | Callable[[Array], Score]) -> "LearnedScore":
        """From a score that holds arrays, or from a function of a JAX key that returns a score."""
        start = (lambda rng: given) if isinstance(given, Score) else given
        # A given score keeps its plain numbers; of a function's, every leaf is an array.
        found = given if isinstance(given, Score) else jax.eval_shape(start, jax.random.key(0))
        if not isinstance(found, Score):
            raise TypeError(
                "a function given as score takes a JAX key and returns a regard.Score. Got "
                f"{type(found).__name__} from {given!r}."
            )
        paths, treedef = jax.tree_util.tree_flatten_with_path(found)
        leaves, shapes = [], []
        for path, leaf in paths:
            name = jax.tree_util.keystr(path, simple=True, separator="_")
            if hasattr(leaf, "dtype") and not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise TypeError(
                    f"the arrays of a score are learned, so they must be floating point. Got "
                    f"{type(found).__name__}.{name} of dtype {leaf.dtype}. Fix: a static field, "
                    "jax.tree_util.register_dataclass(..., meta_fields=[...])."
                )
            leaves.append(name if hasattr(leaf, "dtype") else leaf)
            if hasattr(leaf, "dtype"):
                shapes.append((name, jnp.shape(leaf)))
        return cls(type(found).__name__.lower(), treedef, tuple(leaves), tuple(shapes), start)

    def parameters(self) -> dict[str, Parameter]:
        def initializer(place: int) -> Initializer:
            return lambda rng, shape, dtype: jnp.asarray(
                jax.tree.leaves(self.start(rng))[place], dtype
            )

        return {
            name: Parameter(shape, (None,) * len(shape), initializer(self.leaves.index(name)))
            for name, shape in self.shapes
        }

    def score(self, params: Tree, query: Array) -> tuple[Score, Array]:
        leaves = [params[leaf] if isinstance(leaf, str) else leaf for leaf in self.leaves]
        return jax.tree.unflatten(self.treedef, leaves), query


def _lead(heads: int | None) -> tuple[tuple[int, ...], tuple[str, ...]]:
    return ((), ()) if heads is None else ((heads,), ("heads",))


def _matrix(
    rows: int, columns: int, names: tuple[str, str], init: Initializer, heads: int | None
) -> Parameter:
    lead, lead_names = _lead(heads)
    n = heads or 1
    return Parameter((*lead, rows, columns), (*lead_names, *names), init, (rows, n * columns), n)


def _affine(query: Array, kernel: Array, bias: Array) -> tuple[Array, Array]:
    """[q, 1] and [W; b]: q W + b as one product, done wherever the score does its products."""
    query = jnp.concatenate([query, jnp.ones_like(query[..., :1])], axis=-1)
    return query, jnp.concatenate([kernel, bias[None]], axis=0)


@dataclass(frozen=True)
class Pool:
    """Attention pooling with a learned score: what the four simple classes compute."""

    owner: str
    learned: Learned

    def __call__(
        self,
        params: Tree,
        query: Array,
        key: Array | Memory,
        value: Array | None = None,
        *,
        dtype: Any = None,
        precision: Any = None,
        **options: Any,
    ) -> Any:
        """attend(query, key, value) with the score made of `params`; options as attend's."""
        if isinstance(key, Memory):
            query = jnp.asarray(query)
            query = query if dtype is None else query.astype(dtype)
            with matmul_precision_of(precision):
                query = self.learned.score(params, query)[1]
                return attend(query, key, value, **options)
        query, key, value = (jnp.asarray(array) for array in (query, key, value))
        self._check(query, key)
        if dtype is None and params:
            dtype = promote(*(array.dtype for array in (query, key, value, *params.values())))
        if dtype is not None:
            # Kernels are cast by the score; a width or a vector stays as exact as it is stored.
            query, key, value = (array.astype(dtype) for array in (query, key, value))
        with matmul_precision_of(precision):
            score, query = self.learned.score(params, query)
            return attend(query, key, value, score=score, **options)

    def remember(
        self,
        params: Tree,
        key: Array,
        value: Array,
        valid_lens: Array | None,
        dtype: Any,
        precision: Any,
    ) -> Memory:
        """Keys and values prepared once for the score made of `params`."""
        key, value = jnp.asarray(key), jnp.asarray(value)
        if dtype is None and params:
            dtype = promote(*(array.dtype for array in (key, value, *params.values())))
        if dtype is not None:
            key, value = key.astype(dtype), value.astype(dtype)
        Hq = key.shape[-1] if self.learned.widths is None else self.learned.widths[0]
        no_query = jnp.zeros((*key.shape[:-1], Hq), key.dtype)
        self._check(no_query, key)
        with matmul_precision_of(precision):
            score, _ = self.learned.score(params, no_query[:0])
            return Memory.of(key, value, score=score, valid_lens=valid_lens)

    def _check(self, query: Array, key: Array) -> None:
        if self.learned.widths not in (None, (query.shape[-1], key.shape[-1])):
            Hq, Hk = self.learned.widths
            raise ValueError(
                f"this {self.owner} is for queries of width {Hq} and keys of width {Hk}. Got query "
                f"{list(query.shape)}, key {list(key.shape)}. Fix: query_features and "
                "key_features as the arrays have them."
            )


@contextlib.contextmanager
def matmul_precision_of(precision: Any) -> Iterator[None]:
    """Every product inside in this precision; None leaves JAX's setting as it is."""
    if precision is None:
        yield
        return
    if isinstance(precision, jax.lax.Precision | jax.lax.DotAlgorithmPreset):
        name = precision.name
        precision = name.lower() if isinstance(precision, jax.lax.Precision) else name
    if not isinstance(precision, str):
        raise TypeError(
            "precision must be None, a string as of jax.default_matmul_precision, or a "
            f"jax.lax.Precision. Got {precision!r}."
        )
    with jax.default_matmul_precision(precision):
        yield


def drops(owner: str, rate: float, at_call: bool | None, at_construction: bool | None) -> bool:
    """Whether this call drops weights. What is said in the call wins over the constructor."""
    if rate == 0.0:
        return False
    deterministic = at_construction if at_call is None else at_call
    if deterministic is None:
        raise ValueError(
            f"{owner} with dropout_rate {rate} needs deterministic, in the constructor or in the "
            "call: False drops weights (training), True does not. Got None in both. "
            "Fix: deterministic=True to predict, deterministic=False to train."
        )
    return not deterministic


def no_rng(owner: str, rate: float, fix: str) -> ValueError:
    return ValueError(
        f"{owner} with dropout_rate {rate} and deterministic=False needs random numbers. "
        f"Got no rngs and no dropout_rng. Fix: {fix}, dropout_rng=jax.random.key(0), or "
        "deterministic=True."
    )
