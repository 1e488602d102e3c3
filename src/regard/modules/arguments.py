"""The arguments of every module, defined and documented once for `regard.nnx` and `regard.linen`.

Linen modules inherit these dataclasses, whose fields become theirs; NNX constructors take them
through `takes`. Nothing here imports Flax.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypedDict, TypeVar

import jax.numpy as jnp
from jax import Array

from regard.mask import Mask
from regard.memory import Memory
from regard.modules.parameters import (
    Fixed,
    Initializer,
    Learned,
    LearnedAdditive,
    LearnedBilinear,
    LearnedGaussian,
    default_bias_init,
    default_kernel_init,
)
from regard.normalize import Normalizer, Softmax
from regard.score import Dot, Score

P = ParamSpec("P")
A = TypeVar("A")
C = TypeVar("C", bound=type)

SOFTMAX = Softmax()
HeadScore = str | Score | Callable[[Array], Score]


@dataclass(kw_only=True)
class Options:
    """The arguments that every module takes.

    Args:
        normalize: Softmax(), Sparsemax(), Hard(), Uniform(), Kernel(f) or Cone(f).
        dropout_rate: inverted dropout on the weights.
        deterministic: True: no dropout. Here or in the call, which wins.
        dtype: of the computation; None promotes the inputs and the parameters.
        param_dtype: of the parameters.
        precision: of the matrix products, as of jax.default_matmul_precision.
        partitioned: whether parameters carry the logical axis names of `LOGICAL_AXES`: in linen
            boxed as nn.with_logical_partitioning does; in NNX as metadata, and sharded as
            nnx.logical_axis_rules says where a mesh is in force.
    """

    normalize: Normalizer = SOFTMAX
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    partitioned: bool = False


@dataclass
class DotArguments(Options):
    """The arguments of DotProductAttention.

    Args:
        scale: the factor of q.k; None is 1/√D.
    """

    scale: float | None = None

    def learned(self, query_width: int | None = None, key_width: int | None = None) -> Learned:
        return Fixed(Dot(self.scale))


@dataclass
class GaussianArguments(Options):
    """The arguments of GaussianAttention.

    Args:
        width: the width to start from.
    """

    width: float = 1.0

    def learned(self, query_width: int | None = None, key_width: int | None = None) -> Learned:
        return LearnedGaussian(self.width)


@dataclass
class BilinearArguments(Options):
    """The arguments of BilinearAttention.

    Args:
        query_features: the queries' width Hq; None, in linen: as of the first call.
        key_features: the keys' width Hk; None: as the queries', in linen as of the first call.
        use_bias: whether the projected query gets a bias.
        kernel_init: None draws scores of unit variance for unit-variance queries and keys.
        bias_init: of the bias.
    """

    query_features: int | None = None
    key_features: int | None = None
    use_bias: bool = False
    kernel_init: Initializer | None = None
    bias_init: Initializer = default_bias_init

    def learned(self, query_width: int | None = None, key_width: int | None = None) -> Learned:
        widths = _widths(self, query_width, key_width)
        return LearnedBilinear(*widths, self.use_bias, self.kernel_init, self.bias_init)


@dataclass
class AdditiveArguments(Options):
    """The arguments of AdditiveAttention.

    Args:
        hidden_features: h. None: no kernels, wᵀ tanh(q + k), as keras.layers.AdditiveAttention.
        query_features: the queries' width Hq; None, in linen: as of the first call.
        key_features: the keys' width Hk; None: as the queries', in linen as of the first call.
        use_bias: whether W_q q + W_k k gets a bias.
        tolerance: bound on the error of the tanhs, as in regard.Additive.
        kernel_init, bias_init: of the kernels and the bias.
    """

    hidden_features: int | None = None
    query_features: int | None = None
    key_features: int | None = None
    use_bias: bool = False
    tolerance: float | str | None = None
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = default_bias_init

    def learned(self, query_width: int | None = None, key_width: int | None = None) -> Learned:
        return LearnedAdditive(
            *_widths(self, query_width, key_width),
            self.hidden_features,
            self.use_bias,
            self.tolerance,
            self.kernel_init,
            self.bias_init,
        )


@dataclass(kw_only=True)
class MultiHeadArguments:
    """Flax's arguments, under Flax's names, and regard's own.

    An argument of Flax's that regard cannot give the same meaning is an error that names what to
    use instead: attention_fn, the dot_general and einsum hooks, the promote_dtype functions, and
    broadcast_dropout=True.

    Args:
        num_heads: N.
        dtype: of the computation; None promotes the inputs and the parameters.
        param_dtype: of the parameters.
        in_features: the queries' width; None, in linen: as of the first call.
        qkv_features: the width that all heads share, N times a head's; None: in_features.
        out_features: p_o, the width of the output; None: in_features.
        num_kv_heads: K, a divisor of N: N/K query heads share a key head; None: N.
        in_kv_features: the width of keys and values; None: in_features, in linen as of the
            first call.
        broadcast_dropout: Flax's True drops the same weights in every example and head; here
            each is dropped independently.
        dropout_rate: inverted dropout on the weights.
        deterministic: True: no dropout. Here or in the call, which wins.
        precision: of the matrix products, as of jax.default_matmul_precision.
        kernel_init, bias_init: of the projections (and of additive heads' kernels).
        out_kernel_init, out_bias_init: of the output projection; None: as the others.
        use_bias: whether the projections have biases.
        decode: keeps the keys and values of earlier calls in Flax's cache variables. `cache=` in
            the call does the same explicitly, for ragged batches as well.
        normalize_qk: a LayerNorm of each head's queries and keys, without bias.
        score: "dot", "gaussian", "bilinear", "additive", whose parameters are learned; a
            regard.Score, whose arrays are learned from their present values on while its plain
            numbers stay fixed; a function of a JAX key that returns one, all of it learned; or
            a sequence of N of these, one per head.
        positions: where tokens stand, in every head: "rotary" rotates queries and keys by it;
            "alibi" lowers scores by the distance times the paper's slopes; "relative" adds a
            learned bias by distance, in T5's 32 buckets up to 128. None: the module cannot see the
            order.
            With other settings they are scores: `score=regard.Rotary(regard.Dot(), base=5e5)`.
        hidden_features: h, the width of additive heads' own W_q and W_k. None: none, wᵀ tanh(q_i
            + k_i) on the projections themselves.
        tolerance: of additive heads, as in regard.Additive.
        query_features: another name of in_features.
        key_features: the keys' width, where it is not in_kv_features.
        value_features: the values' width, where it is not in_kv_features; None: as the keys'.
        query_head_features: p_q, a head's query width; None: qkv_features / N.
        key_head_features: p_k; None: as the query's. It may differ for "bilinear", and for
            "additive" with hidden_features.
        value_head_features: p_v; None: qkv_features / N.
        key_heads: another name of num_kv_heads.
        normalize: Softmax(), Sparsemax(), Hard(), Uniform(), Kernel(f) or Cone(f).
        partitioned: whether parameters carry logical axis names, as in `Options`.
    """

    # In an order that has both of Flax's positional orders in it: linen's and NNX's.
    num_heads: int
    dtype: Any = None
    param_dtype: Any = jnp.float32
    in_features: int | None = None
    qkv_features: int | None = None
    out_features: int | None = None
    num_kv_heads: int | None = None
    in_kv_features: int | None = None
    broadcast_dropout: bool = False
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    precision: Any = None
    kernel_init: Initializer = default_kernel_init
    out_kernel_init: Initializer | None = None
    bias_init: Initializer = default_bias_init
    out_bias_init: Initializer | None = None
    use_bias: bool = True
    attention_fn: Any = None
    decode: bool | None = None
    normalize_qk: bool = False
    qkv_dot_general: Any = None
    out_dot_general: Any = None
    qkv_dot_general_cls: Any = None
    out_dot_general_cls: Any = None
    # regard's own
    score: HeadScore | Sequence[HeadScore] = "dot"
    positions: str | None = None
    hidden_features: int | None = None
    tolerance: float | str | None = None
    query_features: int | None = None
    key_features: int | None = None
    value_features: int | None = None
    query_head_features: int | None = None
    key_head_features: int | None = None
    value_head_features: int | None = None
    key_heads: int | None = None
    normalize: Normalizer = SOFTMAX
    partitioned: bool = False


class PoolingCall(TypedDict, total=False):
    """The keywords of a call of any module.

    Args:
        valid_lens: integers, how many keys take part: (), (B,), (B, T) or (B, N, T).
        mask: a regard.Mask, or bool broadcastable to the weights; True takes part.
        bias: added to the scores, broadcastable to the weights.
        deterministic: True: no dropout.
        dropout_rng: a JAX key for dropout, in place of the module's own random numbers.
        implementation: as in regard.attend.
        return_weights: also return the weights, per head, before dropout.
    """

    valid_lens: Array | None
    mask: Mask | Array | None
    bias: Array | None
    deterministic: bool | None
    dropout_rng: Array | None
    implementation: str | Sequence[str] | None
    return_weights: bool


class MultiHeadCall(PoolingCall, total=False):
    """The keywords of a call of MultiHeadAttention: those of `PoolingCall`, and more.

    Masks and bias broadcast to the weights (batch..., N, T, S), as Flax's do; a mask of numbers,
    which Flax's mask makers return by default, takes part where it is not 0. The weights come
    after the output, and the grown cache after both.

    Args:
        cache: a Memory of init_cache; the chunk is appended, and attends to itself and all tokens
            before. Masks and bias then span the cache, S = max_len, and valid_lens, () or (B,),
            say how many tokens of the chunk belong to each example.
        memory: a Memory of `remember`, in place of inputs_k and inputs_v: cross-attention to keys
            that were projected once.
        is_causal: as `mask=regard.Mask.causal(align="start")`; with a cache, every call is.
        sow_weights: sows the weights as "attention_weights", as Flax does.
        query_positions, key_positions: integers (T,) or (batch..., T), and of S: where the tokens
            stand, for scores with positions. None: keys count from 0, and the last query stands
            where the last key does; with is_causal, the first where the first does. A cache knows
            them; with `memory=`, query_positions have to be given.
    """

    cache: Memory | None
    memory: Memory | None
    is_causal: bool
    sow_weights: bool
    query_positions: Array | None
    key_positions: Array | None


# What regard does instead of these arguments of Flax's.
INSTEAD = {
    "attention_fn": "score=, normalize= and implementation= choose what is computed",
    **dict.fromkeys(
        (
            *("qkv_dot_general", "out_dot_general", "qkv_dot_general_cls", "out_dot_general_cls"),
            *("qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls"),
        ),
        "precision= and dtype= choose the products, implementation= the attention",
    ),
    **dict.fromkeys(
        ("qkv_promote_dtype", "out_promote_dtype", "ln_promote_dtype"),
        "dtype= is the type of the whole computation",
    ),
    "out_sharding": "jax.sharding.reshard(out, ...) on the output",
    "qkv_sharding": "partitioned=True shards the kernels by nnx.logical_axis_rules",
}


def refuse_flax_only(given: Mapping[str, Any], theirs: Callable[..., Any]) -> None:
    """Raises for the arguments of Flax's that mean nothing here, unless they are Flax's defaults.

    Raises:
        ValueError: names the argument and what to use instead.
    """
    defaults = inspect.signature(theirs).parameters
    for name, instead in INSTEAD.items():
        value = given.get(name)
        if value is not None and (name not in defaults or value is not defaults[name].default):
            raise ValueError(f"regard has no {name}: {instead}. Got {name}={value!r}.")
    if given.get("broadcast_dropout") and given.get("dropout_rate"):
        raise ValueError(
            "regard drops each weight independently of the other examples and heads. Got "
            f"broadcast_dropout=True, dropout_rate={given['dropout_rate']}. "
            "Fix: broadcast_dropout=False."
        )


def deprecated_kv(inputs_k: Array | None, inputs_v: Array | None, inputs_kv: Array) -> Array:
    """Keys and values from the one argument that Flax's linen once had for both."""
    if inputs_k is not None or inputs_v is not None:
        raise ValueError(
            "If either `inputs_k` or `inputs_v` is not None, `inputs_kv` must be None. Fix: "
            "(inputs_q, inputs_k, inputs_v)."
        )
    warnings.warn(
        "The inputs_kv arg will be deprecated soon. Use inputs_k and inputs_v instead.",
        DeprecationWarning,
        stacklevel=3,
    )
    return inputs_kv


def takes(
    arguments: Callable[P, A],
) -> Callable[[Callable[[Any, A], None]], Callable[Concatenate[Any, P], None]]:
    """A constructor whose signature is that of the dataclass `arguments`, of which it gets one."""

    def decorate(build: Callable[[Any, A], None]) -> Callable[Concatenate[Any, P], None]:
        @functools.wraps(build)
        def init(self: Any, *args: P.args, **kwargs: P.kwargs) -> None:
            build(self, arguments(*args, **kwargs))

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        theirs = inspect.signature(arguments)
        init.__signature__ = theirs.replace(  # type: ignore[attr-defined]
            parameters=[own, *theirs.parameters.values()], return_annotation=None
        )
        return init

    return decorate


def documented(*arguments: type) -> Callable[[C], C]:
    """Appends the arguments' documentation to the class's, for help()."""

    def decorate(cls: C) -> C:
        parts = [part.__doc__ or "" for part in (cls, *arguments)]
        cls.__doc__ = "\n\n".join(inspect.cleandoc(part) for part in parts)
        return cls

    return decorate


def _widths(arguments: Any, query_width: int | None, key_width: int | None) -> tuple[int, int]:
    """Of queries and keys: as given to the constructor, else as the arrays have them."""
    Hq, Hk = arguments.query_features or query_width, arguments.key_features or key_width
    if Hq is None:
        raise ValueError("query_features must be given: the width of the queries. Got None.")
    return Hq, Hq if Hk is None else Hk
