"""Flax linen front end: modules that own parameters and call `regard.attend`.

Names, shapes and initializers are in parameters.py and score_plan.py, shared with `regard.nnx`:
the same parameters give the same bits in both.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

try:
    from flax import linen as nn
except ModuleNotFoundError as _error:
    raise ImportError(
        "regard.linen needs Flax, which is not installed.\n"
        'Install it with: pip install "regard[flax]"'
    ) from _error

from regard.mask import Mask
from regard.modules.cache import KVCache
from regard.modules.multi_head import MultiHead
from regard.modules.parameters import (
    LOGICAL_AXES,
    Fixed,
    Initializer,
    Learned,
    LearnedAdditive,
    LearnedBilinear,
    LearnedGaussian,
    Parameter,
    Pool,
    default_bias_init,
    default_kernel_init,
    drops,
    first_of,
    fit,
    no_rng,
)
from regard.modules.score_plan import plan
from regard.normalize import Normalizer, Softmax
from regard.score import Dot, Score

__all__ = [
    "DotProductAttention",
    "GaussianAttention",
    "BilinearAttention",
    "AdditiveAttention",
    "MultiHeadAttention",
    "KVCache",
    "LOGICAL_AXES",
    "load",
]


class _Attention(nn.Module, kw_only=True):
    """What every module here can do: own parameters, and tell whether to drop weights."""

    normalize: Normalizer = Softmax()
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    partitioned: bool = True

    def _own(self, parameters: dict[str, Parameter]) -> dict[str, Array]:
        return {
            name: self.param(name, _initializer(parameter, self.partitioned), self.param_dtype)
            for name, parameter in parameters.items()
        }

    def _options(
        self,
        deterministic: bool | None,
        dropout_rng: Array | None,
        implementation: str | Sequence[str] | None,
    ) -> dict[str, Any]:
        """normalize, dropout and implementation, as attend takes them."""
        options: dict[str, Any] = dict(normalize=self.normalize, implementation=implementation)
        owner = type(self).__name__
        if drops(owner, self.dropout_rate, deterministic, self.deterministic):
            if dropout_rng is None and not self.has_rng("dropout"):
                fix = 'module.apply(..., rngs={"dropout": jax.random.key(0)})'
                raise no_rng(owner, self.dropout_rate, fix)
            rng = self.make_rng("dropout") if dropout_rng is None else dropout_rng
            options |= dict(dropout_rate=self.dropout_rate, dropout_rng=rng)
        return options


class _Pooling(_Attention, kw_only=True):
    """A module that pools with one learned score."""

    def _learned(self, query: Array, key: Array) -> Learned:
        raise NotImplementedError

    @nn.compact
    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        valid_lens: Array | None = None,
        mask: Mask | Array | None = None,
        bias: Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        implementation: str | Sequence[str] | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Pools the values.

        Args:
            query: (T, D), (B, T, D) or (B, T, N, D).
            key: (S, D), (B, S, D) or (B, S, K, D).
            value: (S, V), (B, S, V) or (B, S, K, V).
            valid_lens: integers, how many keys take part: (), (B,), (B, T), (B, N, T).
            mask: a regard.Mask, or bool broadcastable to the weights; True takes part.
            bias: added to the scores.
            deterministic: True: no dropout.
            dropout_rng: a JAX key, in place of the rng named "dropout".
            implementation: as in regard.attend.
            return_weights: also return the weights, per head, before dropout.

        Returns:
            The output, or (output, weights).
        """
        pool = Pool(type(self).__name__, self._learned(query, key))
        return pool(
            self._own(pool.learned.parameters()),
            query,
            key,
            value,
            valid_lens=valid_lens,
            mask=mask,
            bias=bias,
            dtype=self.dtype,
            precision=self.precision,
            return_weights=return_weights,
            **self._options(deterministic, dropout_rng, implementation),
        )


class DotProductAttention(_Pooling):
    """Scaled dot-product attention: softmax(q.k / √D) v. No parameters.

    Example:
        >>> import jax, jax.numpy as jnp, regard.linen
        >>> query, keys = jnp.ones((2, 1, 4)), jnp.ones((2, 10, 4))
        >>> values = jnp.arange(20.0).reshape(2, 10, 1)
        >>> attention = regard.linen.DotProductAttention(dropout_rate=0.5, deterministic=True)
        >>> out = attention.apply({}, query, keys, values, valid_lens=jnp.array([2, 6]))
        >>> out[:, 0, 0].tolist()  # the means of the first 2 and of the first 6 values
        [0.5, 12.5]

    Args:
        scale: the factor of q.k; None is 1/√D.
        normalize: Softmax(), Sparsemax(), Hard(), Uniform(), Kernel(f) or Cone(f).
        dropout_rate: inverted dropout on the weights.
        deterministic: True: no dropout. Here or in the call, which wins.
        dtype: of the computation; None promotes the inputs.
        param_dtype: of the parameters.
        precision: of the matrix products, as of jax.default_matmul_precision.
        partitioned: whether parameters carry the logical axis names of `LOGICAL_AXES`, boxed
            as nn.with_logical_partitioning does.
    """

    scale: float | None = None

    def _learned(self, query: Array, key: Array) -> Learned:
        return Fixed(Dot(self.scale))


class GaussianAttention(_Pooling):
    """Nadaraya–Watson attention, softmax(-‖q - k‖² / 2σ²) v, with a width σ that is learned.

    Parameters: `width` ().

    Example:
        >>> import jax, jax.numpy as jnp, regard.linen
        >>> x = jnp.linspace(0.0, 1.0, 5)[:, None]  # (T, D)
        >>> attention = regard.linen.GaussianAttention(width=0.01, partitioned=False)
        >>> variables = attention.init(jax.random.key(0), x, x, x)
        >>> float(variables["params"]["width"])
        0.01
        >>> attention.apply(variables, x, x, x)[:, 0].round(2).tolist()
        [0.0, 0.25, 0.5, 0.75, 1.0]

    Args:
        width: the width to start from.
        normalize, dropout_rate, deterministic, dtype, param_dtype, precision, partitioned: as in
            `DotProductAttention`.
    """

    width: float = 1.0

    def _learned(self, query: Array, key: Array) -> Learned:
        return LearnedGaussian(self.width)


class BilinearAttention(_Pooling):
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

    Args:
        query_features: the queries' width Hq; None: as of the first call.
        key_features: the keys' width Hk; None: as of the first call.
        use_bias: whether the projected query gets a bias.
        kernel_init: None draws scores of unit variance for unit-variance queries and keys.
        bias_init: of the bias.
        normalize, dropout_rate, deterministic, dtype, param_dtype, precision, partitioned: as in
            `DotProductAttention`.
    """

    query_features: int | None = None
    key_features: int | None = None
    use_bias: bool = False
    kernel_init: Initializer | None = None
    bias_init: Initializer = default_bias_init

    def _learned(self, query: Array, key: Array) -> Learned:
        Hq, Hk = _widths(self, query, key)
        return LearnedBilinear(Hq, Hk, self.use_bias, self.kernel_init, self.bias_init)


class AdditiveAttention(_Pooling):
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

    Args:
        hidden_features: h. None: no kernels, wᵀ tanh(q + k), as keras.layers.AdditiveAttention.
        query_features: the queries' width Hq; None: as of the first call.
        key_features: the keys' width Hk; None: as of the first call.
        use_bias: whether W_q q + W_k k gets a bias.
        tolerance: bound on the error of each tanh, as in regard.Additive.
        kernel_init, bias_init: of the kernels and the bias.
        normalize, dropout_rate, deterministic, dtype, param_dtype, precision, partitioned: as in
            `DotProductAttention`.
    """

    hidden_features: int | None = None
    query_features: int | None = None
    key_features: int | None = None
    use_bias: bool = False
    tolerance: float | str | None = None
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = default_bias_init

    def _learned(self, query: Array, key: Array) -> Learned:
        return LearnedAdditive(
            *_widths(self, query, key),
            self.hidden_features,
            self.use_bias,
            self.tolerance,
            self.kernel_init,
            self.bias_init,
        )


class MultiHeadAttention(_Attention):
    """Heads of attention on learned projections, with any score, or one score per head.

        h_i = f_i(W_i^(q) q, W_i^(k) k, W_i^(v) v),  i = 1 … N,    out = W_o [h_1; …; h_N]

    f_i pools with the head's own score; d2l "Multi-Head Attention". Parameters, as in
    flax.linen.MultiHeadDotProductAttention: `query`, `key`, `value`, each with `kernel`
    (features, heads, width) and `bias` (heads, width), and `out` with `kernel` (heads, width,
    out_features) and `bias`. Then, for the n heads with such a score: `gaussian` with `width`
    (n,); `bilinear` with `kernel` (n, Hq, Hk); `additive` with `vector` (n, h) and, with
    hidden_features, `query_kernel` (n, Hq, h) and `key_kernel` (n, Hk, h).

    Example:
        >>> import jax, jax.numpy as jnp, regard, regard.linen
        >>> x = jax.random.normal(jax.random.key(0), (2, 6, 16))
        >>> attention = regard.linen.MultiHeadAttention(
        ...     num_heads=4, query_features=16, score=("dot", "gaussian", "additive", "additive")
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

    Args:
        num_heads: N.
        query_features: the queries' width; None: as of the first call.
        key_features: the keys' width; None: as of the first call.
        value_features: the values' width; None: as of the first call.
        qkv_features: the width that all heads share, N times a head's; None: query_features.
        query_head_features: p_q, a head's query width; None: qkv_features / N.
        key_head_features: p_k; None: as the query's. It may differ for "bilinear", and for
            "additive" with hidden_features.
        value_head_features: p_v; None: qkv_features / N.
        out_features: p_o, the width of the output; None: query_features.
        key_heads: K, a divisor of N: N/K query heads share a key head; None: N.
        score: "dot", "gaussian", "bilinear", "additive", whose parameters are learned; a
            regard.Score of numbers, which is fixed; or a sequence of N of them, one per head.
        hidden_features: h, the width of additive heads' own W_q and W_k. None: none, wᵀ tanh(q_i
            + k_i) on the projections themselves.
        tolerance: of additive heads, as in regard.Additive.
        use_bias: whether the projections have biases.
        kernel_init, bias_init: of the projections (and of additive heads' kernels).
        normalize, dropout_rate, deterministic, dtype, param_dtype, precision, partitioned: as in
            `DotProductAttention`.
    """

    num_heads: int
    query_features: int | None = None
    key_features: int | None = None
    value_features: int | None = None
    qkv_features: int | None = None
    query_head_features: int | None = None
    key_head_features: int | None = None
    value_head_features: int | None = None
    out_features: int | None = None
    key_heads: int | None = None
    score: str | Score | Sequence[str | Score] = "dot"
    hidden_features: int | None = None
    tolerance: float | str | None = None
    use_bias: bool = True
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = default_bias_init

    @nn.compact
    def __call__(
        self,
        query: Array,
        key: Array | None = None,
        value: Array | None = None,
        *,
        valid_lens: Array | None = None,
        mask: Mask | Array | None = None,
        bias: Array | None = None,
        cache: KVCache | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        implementation: str | Sequence[str] | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Projects into heads, pools each, projects out.

        Args:
            query: (T, features) or (B, T, features).
            key: (S, features) or (B, S, features); None: the query (self-attention).
            value: (S, features) or (B, S, features); None: the key.
            valid_lens: integers, how many keys take part: (), (B,), (B, T), (B, N, T).
            mask: a regard.Mask, or bool broadcastable to the weights (B, N, T, S).
            bias: added to the scores, broadcastable to the weights.
            cache: a KVCache; the chunk is appended, and sees itself and what came before.
                Masks and bias then span the cache, S = max_len, and valid_lens, () or (B,), say
                how many tokens of the chunk belong to each example.
            deterministic: True: no dropout.
            dropout_rng: a JAX key, in place of the rng named "dropout".
            implementation: as in regard.attend.
            return_weights: also return the weights (B, N, T, S), before dropout.

        Returns:
            The output (B, T, out_features); with the weights and the grown cache appended, in
            this order, where asked for.
        """
        heads = self._plan(query, key, value)
        params = {
            name: _Group(tuple(group.items()), self.param_dtype, self.partitioned, name=name)()
            for name, group in heads.parameters().items()
        }
        return heads(
            params,
            query,
            key,
            value,
            cache=cache,
            valid_lens=valid_lens,
            mask=mask,
            bias=bias,
            dtype=self.dtype,
            precision=self.precision,
            return_weights=return_weights,
            **self._options(deterministic, dropout_rng, implementation),
        )

    def init_cache(self, batch: int, max_len: int, dtype: Any = None) -> KVCache:
        """An empty cache for `batch` texts of up to `max_len` tokens.

        The head widths must be known to the constructor (query_features, qkv_features, or the
        head widths themselves). dtype: None takes the module's dtype, or else param_dtype.
        """
        heads = self._plan()
        return heads.init_cache(batch, max_len, first_of(dtype, self.dtype, self.param_dtype))

    def _plan(
        self, query: Array | None = None, key: Array | None = None, value: Array | None = None
    ) -> MultiHead:
        key = query if key is None else key
        value = key if value is None else value

        def width(given: int | None, array: Array | None) -> int | None:
            return given if given is not None or array is None else jnp.shape(array)[-1]

        return plan(
            self.num_heads,
            width(self.query_features, query),
            width(self.key_features, key),
            width(self.value_features, value),
            qkv_features=self.qkv_features,
            query_head_features=self.query_head_features,
            key_head_features=self.key_head_features,
            value_head_features=self.value_head_features,
            out_features=self.out_features,
            key_heads=self.key_heads,
            score=self.score,
            hidden_features=self.hidden_features,
            tolerance=self.tolerance,
            use_bias=self.use_bias,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
        )


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


def load(variables: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of a module, with its parameters replaced by `params`, all or none.

    Example:
        >>> import jax, jax.numpy as jnp, regard.linen
        >>> x = jnp.ones((2, 3))
        >>> attention = regard.linen.GaussianAttention(partitioned=False)
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
    """For nn.Module.param: the value, boxed with its logical axes unless the caller's init boxed
    it already."""

    def create(rng: Array, dtype: Any) -> Any:
        drawn = parameter.create(rng, dtype)
        if isinstance(drawn, nn.meta.AxisMetadata):
            return drawn.replace_boxed(parameter.arrange(drawn.unbox()))
        value = parameter.arrange(drawn)
        return nn.LogicallyPartitioned(value, parameter.axes) if partitioned else value

    return create


def _widths(module: Any, query: Array, key: Array) -> tuple[int, int]:
    """Of queries and keys: as given to the constructor, else as the arrays have them."""
    Hq, Hk = jnp.shape(query)[-1], jnp.shape(key)[-1]
    return module.query_features or Hq, module.key_features or Hk
