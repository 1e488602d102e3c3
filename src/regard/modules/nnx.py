"""Flax NNX front end: modules that own parameters and call `regard.attend`.

Arguments are in arguments.py, names, shapes and initializers in parameters.py and head_plan.py,
shared with `regard.linen`: the same parameters give the same bits in both.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import jax.numpy as jnp
from jax import Array

from regard.memory import Memory
from regard.modules import arguments as shared
from regard.modules.arguments import (
    MultiHeadCall,
    PoolingCall,
    documented,
    refuse_flax_only,
    takes,
)
from regard.modules.flax_cache import as_flax, from_flax
from regard.modules.head_plan import plan
from regard.modules.nnx_base import (
    AdditiveConstructor,
    Attention,
    BilinearConstructor,
    DotConstructor,
    GaussianConstructor,
    Group,
    MultiHeadConstructor,
    load,
    nnx,
    param,
)
from regard.modules.parameters import LOGICAL_AXES, Pool

__all__ = [
    "DotProductAttention",
    "GaussianAttention",
    "BilinearAttention",
    "AdditiveAttention",
    "MultiHeadAttention",
    "Memory",
    "LOGICAL_AXES",
    "load",
]


class _Pooling(Attention):
    """A module that pools with one learned score."""

    def __init__(self, arguments: Any) -> None:
        super().__init__(arguments)
        self.learned = arguments.learned()
        parameters = self.learned.parameters()
        if parameters and arguments.rngs is None:
            name = type(self).__name__
            raise TypeError(f"{name} draws its parameters. Fix: {name}(..., rngs=nnx.Rngs(0)).")
        for name, parameter in parameters.items():
            setattr(self, name, param(parameter, arguments))

    def __call__(
        self,
        query: Array,
        key: Array | Memory,
        value: Array | None = None,
        *,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        **options: Unpack[PoolingCall],
    ) -> Any:
        """Pools the values.

        Args:
            query: (T, D), (B, T, D) or (B, T, N, D).
            key: (S, D), (B, S, D) or (B, S, K, D); or a memory made by `remember`.
            value: (S, V), (B, S, V) or (B, S, K, V); none with a memory.
            rngs: random numbers for dropout, in place of the constructor's.
            options: valid_lens, mask, bias, deterministic, dropout_rng, implementation and
                return_weights, as in `regard.modules.arguments.PoolingCall`.

        Returns:
            The output, or (output, weights).
        """
        return self._pool(self._params(), query, key, value, **self._options(rngs, **options))

    def remember(self, key: Array, value: Array, valid_lens: Array | None = None) -> Memory:
        """Keys and values prepared once: `attention(query, memory)` then equals
        `attention(query, key, value)`, without preparing a key again.

        Args:
            key: (S, D), (B, S, D) or (B, S, K, D).
            value: (S, V), (B, S, V) or (B, S, K, V).
            valid_lens: integers () or (B,): how many keys of each example there are.
        """
        return self._pool.remember(
            self._params(), key, value, valid_lens, self.dtype, self.precision
        )

    @property
    def _pool(self) -> Pool:
        return Pool(type(self).__name__, self.learned)

    def _params(self) -> dict[str, Array]:
        return {name: getattr(self, name)[...] for name in self.learned.parameters()}


@documented(shared.DotArguments, shared.Options)
class DotProductAttention(_Pooling):
    """Scaled dot-product attention: softmax(q.k / √D) v. No parameters.

    Example:
        >>> import jax.numpy as jnp, regard.nnx
        >>> query, keys = jnp.ones((2, 1, 4)), jnp.ones((2, 10, 4))
        >>> values = jnp.arange(20.0).reshape(2, 10, 1)
        >>> attention = regard.nnx.DotProductAttention(dropout_rate=0.5, deterministic=True)
        >>> out = attention(query, keys, values, valid_lens=jnp.array([2, 6]))
        >>> out[:, 0, 0].tolist()  # the means of the first 2 and of the first 6 values
        [0.5, 12.5]
    """

    @takes(DotConstructor)
    def __init__(self, arguments: DotConstructor) -> None:
        super().__init__(arguments)


@documented(shared.GaussianArguments, shared.Options)
class GaussianAttention(_Pooling):
    """Nadaraya–Watson attention, softmax(-‖q - k‖² / 2σ²) v, with a width σ that is learned.

    Parameters: `width` ().

    Example:
        >>> import jax.numpy as jnp, regard.nnx
        >>> from flax import nnx
        >>> x = jnp.linspace(0.0, 1.0, 5)[:, None]  # (T, D)
        >>> attention = regard.nnx.GaussianAttention(width=0.01, rngs=nnx.Rngs(0))
        >>> float(attention.width[...])
        0.01
        >>> attention(x, x, x)[:, 0].round(2).tolist()
        [0.0, 0.25, 0.5, 0.75, 1.0]
    """

    width: nnx.Param

    @takes(GaussianConstructor)
    def __init__(self, arguments: GaussianConstructor) -> None:
        super().__init__(arguments)


@documented(shared.BilinearArguments, shared.Options)
class BilinearAttention(_Pooling):
    """Bilinear ("general") attention, softmax(qᵀ M k) v, for queries and keys of any two widths.

    Luong et al. 2015, section 3.1. Parameters: `kernel` (Hq, Hk), and with use_bias `bias`
    (Hk,): a(q, k) = (qᵀM + bᵀ) k.

    Example:
        >>> import jax.numpy as jnp, regard.nnx
        >>> from flax import nnx
        >>> query, keys, values = jnp.ones((2, 1, 3)), jnp.ones((2, 10, 5)), jnp.ones((2, 10, 7))
        >>> attention = regard.nnx.BilinearAttention(3, 5, rngs=nnx.Rngs(0))
        >>> attention(query, keys, values).shape
        (2, 1, 7)
    """

    @takes(BilinearConstructor)
    def __init__(self, arguments: BilinearConstructor) -> None:
        super().__init__(arguments)


@documented(shared.AdditiveArguments, shared.Options)
class AdditiveAttention(_Pooling):
    """Additive (Bahdanau) attention: softmax(wᵀ tanh(W_q q + W_k k)) v.

    Bahdanau et al. 2015, appendix A.1.2. Parameters: `query_kernel` (Hq, h), `key_kernel`
    (Hk, h), `vector` (h,), and with use_bias `bias` (h,) inside the tanh.

    Example:
        >>> import jax.numpy as jnp, regard.nnx
        >>> from flax import nnx
        >>> query, keys = jnp.ones((2, 1, 20)), jnp.ones((2, 10, 2))
        >>> values = jnp.arange(20.0).reshape(2, 10, 1)
        >>> attention = regard.nnx.AdditiveAttention(8, 20, 2, rngs=nnx.Rngs(0))
        >>> out = attention(query, keys, values, valid_lens=jnp.array([2, 6]))
        >>> out[:, 0, 0].round(3).tolist()  # equal keys: the means of the first 2, the first 6
        [0.5, 12.5]
    """

    @takes(AdditiveConstructor)
    def __init__(self, arguments: AdditiveConstructor) -> None:
        super().__init__(arguments)


@documented(shared.MultiHeadArguments, MultiHeadConstructor)
class MultiHeadAttention(Attention):
    """flax.nnx.MultiHeadAttention with any score, or one score per head.

        h_i = f_i(W_i^(q) q, W_i^(k) k, W_i^(v) v),  i = 1 … N,    out = W_o [h_1; …; h_N]

    f_i pools with the head's own score; d2l "Multi-Head Attention". Arguments, call and
    parameters are Flax's, and more: `query`, `key`, `value`, each with `kernel` (features, heads,
    width) and `bias` (heads, width), `out` with `kernel` (heads, width, out_features) and `bias`,
    and with normalize_qk `query_ln` and `key_ln`, each with `scale` (width,). Then, for the n
    heads with such a score: `gaussian` with `width` (n,); `bilinear` with `kernel` (n, Hq, Hk);
    `additive` with `vector` (n, h) and, with hidden_features, `query_kernel` (n, Hq, h) and
    `key_kernel` (n, Hk, h); and the arrays of your own score, under its class's name.

    Example:
        >>> import jax, jax.numpy as jnp, regard, regard.nnx
        >>> from flax import nnx
        >>> x = jax.random.normal(jax.random.key(0), (2, 6, 16))
        >>> attention = regard.nnx.MultiHeadAttention(
        ...     4, 16, score=("dot", "gaussian", "additive", "additive"), rngs=nnx.Rngs(0)
        ... )
        >>> out, weights = attention(x, mask=regard.Mask.causal(), return_weights=True)
        >>> out.shape, weights.shape
        ((2, 6, 16), (2, 4, 6, 6))
        >>> cache = attention.init_cache(batch=2, max_len=6)
        >>> for start in (0, 3):  # the same in two chunks
        ...     chunk, cache = attention(x[:, start : start + 3], cache=cache)
        >>> bool(jnp.allclose(chunk, out[:, 3:], atol=1e-5))
        True
    """

    cached_key: Any
    cached_value: Any
    cache_index: Any

    @takes(MultiHeadConstructor)
    def __init__(self, arguments: MultiHeadConstructor) -> None:
        refuse_flax_only(vars(arguments), nnx.MultiHeadAttention.__init__)
        self.heads = plan(arguments)
        if self.heads.query_features == 0:
            raise TypeError("MultiHeadAttention needs in_features, the width of the queries.")
        self.decode = arguments.decode
        for name, parameters in self.heads.parameters().items():
            setattr(self, name, group := Group())
            for leaf, parameter in parameters.items():
                metadata = arguments.metadata(name, leaf)
                setattr(group, leaf, param(parameter, arguments, metadata))
        super().__init__(arguments, arguments.keep_rngs)
        self.cached_key = self.cached_value = self.cache_index = nnx.data(None)

    def __call__(
        self,
        inputs_q: Array,
        inputs_k: Array | None = None,
        inputs_v: Array | None = None,
        *,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        decode: bool | None = None,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
        **options: Unpack[MultiHeadCall],
    ) -> Any:
        """Projects into heads, pools each, projects out.

        Args:
            inputs_q: (batch..., T, features).
            inputs_k: (batch..., S, features); None: inputs_q (self-attention).
            inputs_v: (batch..., S, features); None: inputs_k.
            rngs: random numbers for dropout, in place of the constructor's.
            decode: as in the constructor, over which it wins.
            options: mask, deterministic, sow_weights, is_causal as Flax's; valid_lens, bias,
                cache, dropout_rng, implementation and return_weights: see
                `regard.modules.arguments.MultiHeadCall`.

        Returns:
            The output (batch..., T, out_features); with the weights and the grown cache appended,
            in this order, where asked for.
        """
        shardings = dict(out_sharding=out_sharding, qkv_sharding=qkv_sharding)
        refuse_flax_only(shardings, MultiHeadAttention.__call__)
        params, held = self._params(), None
        look, sow = options.pop("return_weights", False), options.pop("sow_weights", False)
        if self.decode if decode is None else decode:
            held = self._held_cache(options)
        given = options.pop("cache", None)
        options |= dict(cache=given if held is None else held, return_weights=look or sow)
        pooled = self.heads(params, inputs_q, inputs_k, inputs_v, **self._options(rngs, **options))
        if held is not None and pooled.cache is not None:
            self.cached_key[...], self.cached_value[...], self.cache_index[...] = as_flax(
                pooled.cache, self.cached_key.shape
            )
        if sow and pooled.weights is not None:
            self.sow(nnx.Intermediate, "attention_weights", pooled.weights.astype(pooled.out.dtype))
        return pooled.results(look, given is not None)

    def remember(
        self, inputs_k: Array, inputs_v: Array | None = None, *, valid_lens: Array | None = None
    ) -> Memory:
        """Keys and values projected once for cross-attention: `layer(query, memory=memory)` then
        equals `layer(query, inputs_k, inputs_v, valid_lens=valid_lens)` at every step.

        Args:
            inputs_k: (batch..., S, features).
            inputs_v: (batch..., S, features); None: inputs_k.
            valid_lens: integers () or (B,): how many keys of each example there are.
        """
        options = dict(valid_lens=valid_lens, dtype=self.dtype, precision=self.precision)
        return self.heads.remember(self._params(), inputs_k, inputs_v, **options)

    def _params(self) -> dict[str, dict[str, Array]]:
        return {
            name: {leaf: getattr(getattr(self, name), leaf)[...] for leaf in group}
            for name, group in self.heads.parameters().items()
        }

    def init_cache(
        self,
        batch: int | Sequence[int] | None = None,
        max_len: int | None = None,
        dtype: Any = None,
        *,
        input_shape: Sequence[int] | None = None,
        window: int | None = None,
    ) -> Memory | None:
        """An empty cache: returned for `cache=`, or kept in the module for `decode=True`.

        init_cache(batch, max_len) returns a Memory for `batch` texts of up to `max_len` tokens;
        dtype: None takes the module's dtype, or else param_dtype; window: see Memory.empty. As in
        Flax, init_cache(input_shape), of inputs (batch..., max_len, features), keeps one of dtype
        float32 in `cached_key`, `cached_value` and `cache_index`, and returns None.
        """
        if isinstance(batch, Sequence):
            input_shape, dtype = batch, max_len if dtype is None else dtype
        if input_shape is not None:
            self._keep_cache(input_shape[:-1], jnp.float32 if dtype is None else dtype)
            return None
        if batch is None or isinstance(batch, Sequence) or max_len is None:
            raise TypeError("init_cache takes batch and max_len, or Flax's input_shape.")
        dtype = dtype or self.dtype or self.param_dtype
        return self.heads.init_cache(batch, max_len, dtype, window)

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | Sequence[int] | None = None,
        max_length: int | None = None,
    ) -> None:
        """For nnx.view: the same module, training or not, decoding or not.

        Args:
            deterministic: True: no dropout.
            decode: whether calls use the cache in the module.
            batch_size, max_length: of that cache, where there is none yet.
        """
        super().set_view(deterministic)
        if decode is not None:
            self.decode = decode
            if batch_size is not None and max_length is not None and self.cached_key is None:
                batch = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
                self._keep_cache((*batch, max_length), self.dtype or self.param_dtype)

    def _keep_cache(self, tokens: Sequence[int], dtype: Any) -> None:
        *batch, max_len = tokens
        made = self.heads.init_cache(math.prod(batch), max_len, dtype)
        arrays = as_flax(made, (*tokens, *made.key.shape[2:]))
        self.cached_key, self.cached_value, self.cache_index = map(nnx.Cache, arrays)

    def _held_cache(self, options: Mapping[str, Any]) -> Memory:
        if self.cached_key is None:
            raise ValueError(
                "decode=True needs a cache. Fix: init_cache(input_shape) first, as in Flax, or "
                "cache=init_cache(batch, max_len) in the call."
            )
        return from_flax(
            self.cached_key[...],
            self.cached_value[...],
            self.cache_index[...],
            options,
        )
