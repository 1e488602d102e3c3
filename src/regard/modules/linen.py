"""Flax linen front end: modules that own parameters and call `regard.attend`.

Arguments are in arguments.py, names, shapes and initializers in parameters.py and head_plan.py,
shared with `regard.nnx`: the same parameters give the same bits in both.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Unpack, cast

import jax.numpy as jnp
from jax import Array

try:
    from flax import linen as nn
except ModuleNotFoundError as _error:
    raise ImportError(
        "regard.linen needs Flax, which is not installed.\n"
        'Install it with: pip install "regard[flax]"'
    ) from _error

from regard.memory import Memory
from regard.modules import arguments as shared
from regard.modules.arguments import (
    MultiHeadCall,
    PoolingCall,
    deprecated_kv,
    documented,
    refuse_flax_only,
)
from regard.modules.flax_cache import as_flax, from_flax
from regard.modules.head_plan import plan
from regard.modules.loading import fit
from regard.modules.multi_head import MultiHead
from regard.modules.parameters import (
    LOGICAL_AXES,
    Initializer,
    Learned,
    Parameter,
    Pool,
    Tree,
    drops,
    no_rng,
)

__all__ = [
    "DotProductAttention",
    "GaussianAttention",
    "BilinearAttention",
    "AdditiveAttention",
    "MultiHeadAttention",
    "MultiHeadDotProductAttention",
    "Memory",
    "LOGICAL_AXES",
    "load",
]


class _Attention(nn.Module):
    """What every module here can do: decide whether to drop weights."""

    def _options(
        self,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """The options of a call, with the module's own and a decision on dropout."""
        own: Any = self  # its fields come from the arguments that the subclass inherits
        options |= dict(normalize=own.normalize, dtype=own.dtype, precision=own.precision)
        owner = type(self).__name__
        if drops(owner, own.dropout_rate, deterministic, own.deterministic):
            if dropout_rng is None and not self.has_rng("dropout"):
                fix = 'module.apply(..., rngs={"dropout": jax.random.key(0)})'
                raise no_rng(owner, own.dropout_rate, fix)
            rng = self.make_rng("dropout") if dropout_rng is None else dropout_rng
            options |= dict(dropout_rate=own.dropout_rate, dropout_rng=rng)
        return options


class _Pooling(_Attention):
    """A module that pools with one learned score."""

    def learned(self, query_width: int, key_width: int) -> Learned:
        raise NotImplementedError

    @nn.compact
    def __call__(
        self,
        query: Array,
        key: Array | Memory,
        value: Array | None = None,
        **options: Unpack[PoolingCall],
    ) -> Any:
        """Pools the values.

        Args:
            query: (T, D), (B, T, D) or (B, T, N, D).
            key: (S, D), (B, S, D) or (B, S, K, D); or a memory made by `remember`.
            value: (S, V), (B, S, V) or (B, S, K, V); none with a memory.
            options: valid_lens, mask, bias, deterministic, dropout_rng, implementation and
                return_weights, as in `regard.modules.arguments.PoolingCall`.

        Returns:
            The output, or (output, weights).
        """
        key_width = key.made.key_width if isinstance(key, Memory) else jnp.shape(key)[-1]
        own, learned = cast(Any, self), self.learned(jnp.shape(query)[-1], key_width)
        params = {
            name: self.param(name, _initializer(parameter, own.partitioned), own.param_dtype)
            for name, parameter in learned.parameters().items()
        }
        pool = Pool(type(self).__name__, learned)
        return pool(params, query, key, value, **self._options(**options))

    def remember(self, key: Array, value: Array, valid_lens: Array | None = None) -> Memory:
        """Keys and values prepared once: a call with (query, memory) then equals one with (query,
        key, value), without preparing a key again. For `module.apply(..., method="remember")`.

        Args:
            key: (S, D), (B, S, D) or (B, S, K, D).
            value: (S, V), (B, S, V) or (B, S, K, V).
            valid_lens: integers () or (B,): how many keys of each example there are.
        """
        own, params = cast(Any, self), _held(self)
        kernel = params.get("query_kernel", params.get("kernel"))
        width = jnp.shape(key)[-1]
        learned = self.learned(width if kernel is None else kernel.shape[0], width)
        pool = Pool(type(self).__name__, learned)
        return pool.remember(params, key, value, valid_lens, own.dtype, own.precision)


@documented(shared.DotArguments, shared.Options)
class DotProductAttention(shared.DotArguments, _Pooling):
    """Scaled dot-product attention: softmax(q.k / √D) v. No parameters.

    Example:
        >>> import jax, jax.numpy as jnp, regard.linen
        >>> query, keys = jnp.ones((2, 1, 4)), jnp.ones((2, 10, 4))
        >>> values = jnp.arange(20.0).reshape(2, 10, 1)
        >>> attention = regard.linen.DotProductAttention(dropout_rate=0.5, deterministic=True)
        >>> out = attention.apply({}, query, keys, values, valid_lens=jnp.array([2, 6]))
        >>> out[:, 0, 0].tolist()  # the means of the first 2 and of the first 6 values
        [0.5, 12.5]
    """


@documented(shared.GaussianArguments, shared.Options)
class GaussianAttention(shared.GaussianArguments, _Pooling):
    """Nadaraya–Watson attention, softmax(-‖q - k‖² / 2σ²) v, with a width σ that is learned.

    Parameters: `width` ().

    Example:
        >>> import jax, jax.numpy as jnp, regard.linen
        >>> x = jnp.linspace(0.0, 1.0, 5)[:, None]  # (T, D)
        >>> attention = regard.linen.GaussianAttention(width=0.01)
        >>> variables = attention.init(jax.random.key(0), x, x, x)
        >>> float(variables["params"]["width"])
        0.01
        >>> attention.apply(variables, x, x, x)[:, 0].round(2).tolist()
        [0.0, 0.25, 0.5, 0.75, 1.0]
    """


@documented(shared.BilinearArguments, shared.Options)
class BilinearAttention(shared.BilinearArguments, _Pooling):
    """Bilinear ("general") attention, softmax(qᵀ M k) v, for queries and keys of any two widths.

    Luong et al. 2015, section 3.1. Parameters: `kernel` (Hq, Hk), and with use_bias `bias`
    (Hk,): a(q, k) = (qᵀM + bᵀ) k.

    Example:
        >>> import jax, jax.numpy as jnp, regard.linen
        >>> query, keys, values = jnp.ones((2, 1, 3)), jnp.ones((2, 10, 5)), jnp.ones((2, 10, 7))
        >>> attention = regard.linen.BilinearAttention()
        >>> out, variables = attention.init_with_output(jax.random.key(0), query, keys, values)
        >>> out.shape
        (2, 1, 7)
    """


@documented(shared.AdditiveArguments, shared.Options)
class AdditiveAttention(shared.AdditiveArguments, _Pooling):
    """Additive (Bahdanau) attention: softmax(wᵀ tanh(W_q q + W_k k)) v.

    Bahdanau et al. 2015, appendix A.1.2. Parameters: `query_kernel` (Hq, h), `key_kernel`
    (Hk, h), `vector` (h,), and with use_bias `bias` (h,) inside the tanh.

    Example:
        >>> import jax, jax.numpy as jnp, regard.linen
        >>> query, keys = jnp.ones((2, 1, 20)), jnp.ones((2, 10, 2))
        >>> values = jnp.arange(20.0).reshape(2, 10, 1)
        >>> attention = regard.linen.AdditiveAttention(hidden_features=8)
        >>> variables = attention.init(jax.random.key(0), query, keys, values)
        >>> out = attention.apply(variables, query, keys, values, valid_lens=jnp.array([2, 6]))
        >>> out[:, 0, 0].round(3).tolist()  # equal keys: the means of the first 2, the first 6
        [0.5, 12.5]
    """


@documented(shared.MultiHeadArguments)
class MultiHeadAttention(shared.MultiHeadArguments, _Attention):
    """flax.linen.MultiHeadAttention with any score, or one score per head.

        h_i = f_i(W_i^(q) q, W_i^(k) k, W_i^(v) v),  i = 1 … N,    out = W_o [h_1; …; h_N]

    f_i pools with the head's own score; d2l "Multi-Head Attention". Arguments, call and
    parameters are Flax's, and more: those of `regard.nnx.MultiHeadAttention`. Both of Flax's
    names are here, `MultiHeadDotProductAttention` too: linen names parameters after the class.

    Example:
        >>> import jax, jax.numpy as jnp, regard, regard.linen
        >>> x = jax.random.normal(jax.random.key(0), (2, 6, 16))
        >>> attention = regard.linen.MultiHeadAttention(
        ...     num_heads=4, in_features=16, score=("dot", "gaussian", "additive", "additive")
        ... )
        >>> variables = attention.init(jax.random.key(1), x)
        >>> causal = regard.Mask.causal()
        >>> out, weights = attention.apply(variables, x, mask=causal, return_weights=True)
        >>> out.shape, weights.shape
        ((2, 6, 16), (2, 4, 6, 6))
        >>> cache = attention.init_cache(batch=2, max_len=6)
        >>> for start in (0, 3):  # the same in two chunks
        ...     chunk, cache = attention.apply(variables, x[:, start : start + 3], cache=cache)
        >>> bool(jnp.allclose(chunk, out[:, 3:], atol=1e-5))
        True
    """

    # As in Flax, these may be given by position; and three that only linen has.
    num_heads: int
    dtype: Any = None
    param_dtype: Any = jnp.float32
    qkv_features: int | None = None
    out_features: int | None = None
    broadcast_dropout: bool = False
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    force_fp32_for_softmax: bool = dataclasses.field(default=False, kw_only=True)
    qk_attn_weights_einsum_cls: Any = dataclasses.field(default=None, kw_only=True)
    attn_weights_value_einsum_cls: Any = dataclasses.field(default=None, kw_only=True)

    @nn.compact
    def __call__(
        self,
        inputs_q: Array,
        inputs_k: Array | None = None,
        inputs_v: Array | None = None,
        *,
        inputs_kv: Array | None = None,
        **options: Unpack[MultiHeadCall],
    ) -> Any:
        """Projects into heads, pools each, projects out.

        Args:
            inputs_q: (batch..., T, features).
            inputs_k: (batch..., S, features); None: inputs_q (self-attention).
            inputs_v: (batch..., S, features); None: inputs_k.
            inputs_kv: Flax's old way to give both.
            options: mask, deterministic, dropout_rng, sow_weights as Flax's; valid_lens, bias,
                cache, is_causal, implementation and return_weights: see
                `regard.modules.arguments.MultiHeadCall`.

        Returns:
            The output (batch..., T, out_features); with the weights and the grown cache appended,
            in this order, where asked for.
        """
        refuse_flax_only(vars(self), nn.MultiHeadDotProductAttention)
        if inputs_kv is not None:
            inputs_k = deprecated_kv(inputs_k, inputs_v, inputs_kv)
        heads = plan(self, (inputs_q, inputs_k, inputs_v))
        params = {
            name: _Group(tuple(group.items()), self.param_dtype, self.partitioned, name=name)()
            for name, group in heads.parameters().items()
        }
        held = None
        look, sow = options.pop("return_weights", False), options.pop("sow_weights", False)
        if self.decode:
            keys = inputs_q if inputs_k is None else inputs_k
            held = self._held_cache(heads, params, inputs_q, keys, options)
        given = options.pop("cache", None)
        options |= dict(cache=given if held is None else held, return_weights=look or sow)
        pooled = heads(params, inputs_q, inputs_k, inputs_v, **self._options(**options))
        if held is not None and pooled.cache is not None:
            shape: Any = self.get_variable("cache", "cached_key").shape
            names = ("cached_key", "cached_value", "cache_index")
            for name, array in zip(names, as_flax(pooled.cache, shape), strict=True):
                self.put_variable("cache", name, array)
        if sow and pooled.weights is not None:
            dtype = pooled.weights.dtype if self.force_fp32_for_softmax else pooled.out.dtype
            self.sow("intermediates", "attention_weights", pooled.weights.astype(dtype))
        return pooled.results(look, given is not None)

    def remember(
        self, inputs_k: Array, inputs_v: Array | None = None, *, valid_lens: Array | None = None
    ) -> Memory:
        """Keys and values projected once for cross-attention, for `memory=` in a call: see
        `regard.nnx.MultiHeadAttention.remember`. For `module.apply(..., method="remember")`.
        """
        params = _held(self)
        query = jnp.zeros((0, params["query"]["kernel"].shape[0]))
        heads = plan(self, (query, inputs_k, inputs_v))
        options: Any = dict(valid_lens=valid_lens, dtype=self.dtype, precision=self.precision)
        return heads.remember(params, inputs_k, inputs_v, **options)

    def init_cache(
        self, batch: int, max_len: int, dtype: Any = None, window: int | None = None
    ) -> Memory:
        """An empty cache for `batch` texts of up to `max_len` tokens, for `cache=`.

        The head widths must be known to the constructor (in_features, qkv_features, or the head
        widths themselves). dtype: None takes the module's dtype, or else param_dtype; window: see
        Memory.empty.
        """
        dtype = dtype or self.dtype or self.param_dtype
        return plan(self).init_cache(batch, max_len, dtype, window)

    def _held_cache(
        self, heads: MultiHead, params: Tree, query: Array, key: Array, options: Mapping[str, Any]
    ) -> Memory | None:
        """Flax's cache variables; None in the call that makes them, which is not causal."""
        if self.has_variable("cache", "cached_key"):
            names = ("cached_key", "cached_value", "cache_index")
            held: list[Any] = [self.get_variable("cache", name) for name in names]
            key, value, index = held
            return from_flax(key, value, index, options)
        dtype = self.dtype or heads.dtype(params, query, key)
        *batch, length = key.shape[:-1]
        made = heads.init_cache(1, length, dtype)
        for name, array in (("cached_key", made.key), ("cached_value", made.value)):
            self.variable("cache", name, jnp.zeros, (*batch, *array.shape[1:]), dtype)
        self.variable("cache", "cache_index", jnp.zeros, (), jnp.int32)
        return None


class MultiHeadDotProductAttention(MultiHeadAttention):
    """Flax's other name of `MultiHeadAttention`: the same in everything but this name."""


class _Group(nn.Module):
    """The parameters under one name: MultiHeadAttention's query, key, value, out, additive, …"""

    parameters: tuple[tuple[str, Parameter], ...]
    param_dtype: Any
    partitioned: bool

    @nn.compact
    def __call__(self) -> dict[str, Array]:
        return {
            name: self.param(name, _initializer(parameter, self.partitioned), self.param_dtype)
            for name, parameter in self.parameters
        }


def _held(module: nn.Module) -> dict[str, Any]:
    """The parameters of a module inside of apply, by name."""
    return nn.meta.unbox(module.variables.get("params", {}))


def load(variables: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of a module, with its parameters replaced by `params`, all or none.

    Example:
        >>> import jax, jax.numpy as jnp, regard.linen
        >>> x = jnp.ones((2, 3))
        >>> attention = regard.linen.GaussianAttention()
        >>> variables = attention.init(jax.random.key(0), x, x, x)
        >>> variables = regard.linen.load(variables, {"width": jnp.array(2.0)})
        >>> float(variables["params"]["width"])
        2.0

    Args:
        variables: what `module.init` returned; boxes of partitioning metadata are kept.
        params: nested mappings of arrays, as `regard.interop` gives them.

    Raises:
        ValueError: lists every array that is missing, unexpected or of another shape.
    """
    held = variables["params"]
    return {**variables, "params": nn.meta.replace_boxed(held, fit(nn.meta.unbox(held), params))}


def _initializer(parameter: Parameter, partitioned: bool) -> Initializer:
    """For nn.Module.param: the value, boxed with its logical axes if partitioned, unless the
    caller's initializer boxed it already."""

    def create(rng: Array, dtype: Any) -> Any:
        drawn = parameter.create(rng, dtype)
        if isinstance(drawn, nn.meta.AxisMetadata):
            return drawn.replace_boxed(parameter.arrange(drawn.unbox()))
        value = parameter.arrange(drawn)
        return nn.LogicallyPartitioned(value, parameter.axes) if partitioned else value

    return create
