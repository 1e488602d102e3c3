"""Flax NNX front end: modules that own parameters and call `regard.attend`.

Names, shapes and initializers are in parameters.py and score_plan.py, shared with `regard.linen`:
the same parameters give the same bits in both.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax import Array

try:
    from flax import nnx
    from flax.core import spmd
except ModuleNotFoundError as _error:
    raise ImportError(
        "regard.nnx needs Flax, which is not installed.\n"
        'Install it with: pip install "regard[flax]"'
    ) from _error

from regard.mask import Mask
from regard.modules.cache import KVCache
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
    flatten,
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


class Options(TypedDict, total=False):
    """The arguments that every module takes, explained at `DotProductAttention`."""

    normalize: Normalizer
    dropout_rate: float
    deterministic: bool | None
    dtype: Any
    param_dtype: Any
    precision: Any
    partitioned: bool


class _Attention(nnx.Module):
    """What every module here can do: own parameters, and tell whether to drop weights."""

    def __init__(
        self,
        *,
        normalize: Normalizer = Softmax(),
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        partitioned: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        self.normalize = normalize
        self.dropout_rate = dropout_rate
        self.deterministic = deterministic
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.partitioned = partitioned
        self.rngs = nnx.data(_dropout_stream(rngs).fork() if _drops(dropout_rate, rngs) else None)

    def set_view(self, deterministic: bool | None = None) -> None:
        """For nnx.view: the same module, training or not.

        Args:
            deterministic: True: no dropout.
        """
        if deterministic is not None:
            self.deterministic = deterministic

    def _own(self, owner: nnx.Module, parameters: dict[str, Parameter], rngs: nnx.Rngs) -> None:
        for name, parameter in parameters.items():
            param = _param(parameter, rngs.params(), self.param_dtype, self.partitioned)
            setattr(owner, name, param)

    def _options(
        self,
        deterministic: bool | None,
        rngs: nnx.Rngs | nnx.RngStream | None,
        dropout_rng: Array | None,
        implementation: str | Sequence[str] | None,
    ) -> dict[str, Any]:
        """normalize, dropout and implementation, as attend takes them."""
        options: dict[str, Any] = dict(normalize=self.normalize, implementation=implementation)
        owner = type(self).__name__
        if drops(owner, self.dropout_rate, deterministic, self.deterministic):
            if dropout_rng is None:
                stream = self.rngs if rngs is None else _dropout_stream(rngs)
                if stream is None:
                    raise no_rng(owner, self.dropout_rate, "rngs=nnx.Rngs(0)")
                dropout_rng = stream()
            options |= dict(dropout_rate=self.dropout_rate, dropout_rng=dropout_rng)
        return options


class _Pooling(_Attention):
    """A module that pools with one learned score."""

    def __init__(
        self, learned: Learned, *, rngs: nnx.Rngs | None, **options: Unpack[Options]
    ) -> None:
        super().__init__(rngs=rngs, **options)
        self.learned = learned
        if rngs is not None:
            self._own(self, learned.parameters(), rngs)

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
        rngs: nnx.Rngs | nnx.RngStream | None = None,
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
            rngs: random numbers for dropout, in place of the constructor's.
            dropout_rng: a JAX key, in place of rngs.
            implementation: as in regard.attend.
            return_weights: also return the weights, per head, before dropout.

        Returns:
            The output, or (output, weights).
        """
        return Pool(type(self).__name__, self.learned)(
            {name: getattr(self, name)[...] for name in self.learned.parameters()},
            query,
            key,
            value,
            valid_lens=valid_lens,
            mask=mask,
            bias=bias,
            dtype=self.dtype,
            precision=self.precision,
            return_weights=return_weights,
            **self._options(deterministic, rngs, dropout_rng, implementation),
        )


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

    Args:
        scale: the factor of q.k; None is 1/√D.
        normalize: Softmax(), Sparsemax(), Hard(), Uniform(), Kernel(f) or Cone(f).
        dropout_rate: inverted dropout on the weights.
        deterministic: True: no dropout. Here or in the call, which wins.
        dtype: of the computation; None promotes the inputs.
        param_dtype: of the parameters.
        precision: of the matrix products, as of jax.default_matmul_precision.
        partitioned: whether parameters carry the logical axis names of `LOGICAL_AXES`. Within a
            mesh they are sharded as nnx.logical_axis_rules says; without one they only carry
            them.
        rngs: random numbers for dropout.
    """

    def __init__(
        self,
        scale: float | None = None,
        *,
        rngs: nnx.Rngs | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(Fixed(Dot(scale)), rngs=rngs, **options)


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

    Args:
        width: the width to start from.
        rngs: random numbers for dropout.
        normalize, dropout_rate, deterministic, dtype, param_dtype, precision, partitioned: as in
            `DotProductAttention`.
    """

    width: nnx.Param

    def __init__(self, width: float = 1.0, *, rngs: nnx.Rngs, **options: Unpack[Options]) -> None:
        super().__init__(LearnedGaussian(width), rngs=rngs, **options)


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

    Args:
        query_features: the queries' width Hq.
        key_features: the keys' width Hk; None: as the queries'.
        use_bias: whether the projected query gets a bias.
        kernel_init: None draws scores of unit variance for unit-variance queries and keys.
        bias_init: of the bias.
        rngs: random numbers for the kernel and for dropout.
        normalize, dropout_rate, deterministic, dtype, param_dtype, precision, partitioned: as in
            `DotProductAttention`.
    """

    def __init__(
        self,
        query_features: int,
        key_features: int | None = None,
        use_bias: bool = False,
        kernel_init: Initializer | None = None,
        bias_init: Initializer = default_bias_init,
        *,
        rngs: nnx.Rngs,
        **options: Unpack[Options],
    ) -> None:
        Hk = query_features if key_features is None else key_features
        learned = LearnedBilinear(query_features, Hk, use_bias, kernel_init, bias_init)
        super().__init__(learned, rngs=rngs, **options)


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

    Args:
        hidden_features: h. None: no kernels, wᵀ tanh(q + k), as keras.layers.AdditiveAttention.
        query_features: the queries' width Hq.
        key_features: the keys' width Hk; None: as the queries'.
        use_bias: whether W_q q + W_k k gets a bias.
        tolerance: bound on the error of each tanh, as in regard.Additive.
        kernel_init, bias_init: of the kernels and the bias.
        rngs: random numbers for the parameters and for dropout.
        normalize, dropout_rate, deterministic, dtype, param_dtype, precision, partitioned: as in
            `DotProductAttention`.
    """

    def __init__(
        self,
        hidden_features: int | None,
        query_features: int,
        key_features: int | None = None,
        use_bias: bool = False,
        tolerance: float | str | None = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        *,
        rngs: nnx.Rngs,
        **options: Unpack[Options],
    ) -> None:
        learned = LearnedAdditive(
            query_features,
            query_features if key_features is None else key_features,
            hidden_features,
            use_bias,
            tolerance,
            kernel_init,
            bias_init,
        )
        super().__init__(learned, rngs=rngs, **options)


class MultiHeadAttention(_Attention):
    """Heads of attention on learned projections, with any score, or one score per head.

        h_i = f_i(W_i^(q) q, W_i^(k) k, W_i^(v) v),  i = 1 … N,    out = W_o [h_1; …; h_N]

    f_i pools with the head's own score; d2l "Multi-Head Attention". Parameters, as in
    flax.nnx.MultiHeadAttention: `query`, `key`, `value`, each with `kernel` (features, heads,
    width) and `bias` (heads, width), and `out` with `kernel` (heads, width, out_features) and
    `bias`. Then, for the n heads with such a score: `gaussian` with `width` (n,); `bilinear`
    with `kernel` (n, Hq, Hk); `additive` with `vector` (n, h) and, with hidden_features,
    `query_kernel` (n, Hq, h) and `key_kernel` (n, Hk, h).

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

    Args:
        num_heads: N.
        query_features: the queries' width.
        key_features: the keys' width; None: as the queries'.
        value_features: the values' width; None: as the keys'.
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
        rngs: random numbers for the parameters and for dropout.
        normalize, dropout_rate, deterministic, dtype, param_dtype, precision, partitioned: as in
            `DotProductAttention`.
    """

    def __init__(
        self,
        num_heads: int,
        query_features: int,
        key_features: int | None = None,
        value_features: int | None = None,
        qkv_features: int | None = None,
        query_head_features: int | None = None,
        key_head_features: int | None = None,
        value_head_features: int | None = None,
        out_features: int | None = None,
        key_heads: int | None = None,
        score: str | Score | Sequence[str | Score] = "dot",
        hidden_features: int | None = None,
        tolerance: float | str | None = None,
        use_bias: bool = True,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        *,
        rngs: nnx.Rngs,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(rngs=rngs, **options)
        self.heads = plan(
            num_heads,
            query_features,
            key_features,
            value_features,
            qkv_features=qkv_features,
            query_head_features=query_head_features,
            key_head_features=key_head_features,
            value_head_features=value_head_features,
            out_features=out_features,
            key_heads=key_heads,
            score=score,
            hidden_features=hidden_features,
            tolerance=tolerance,
            use_bias=use_bias,
            kernel_init=kernel_init,
            bias_init=bias_init,
        )
        for name, parameters in self.heads.parameters().items():
            setattr(self, name, group := _Group())
            self._own(group, parameters, rngs)

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
        rngs: nnx.Rngs | nnx.RngStream | None = None,
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
            rngs: random numbers for dropout, in place of the constructor's.
            dropout_rng: a JAX key, in place of rngs.
            implementation: as in regard.attend.
            return_weights: also return the weights (B, N, T, S), before dropout.

        Returns:
            The output (B, T, out_features); with the weights and the grown cache appended, in
            this order, where asked for.
        """
        params = {
            name: {leaf: getattr(getattr(self, name), leaf)[...] for leaf in group}
            for name, group in self.heads.parameters().items()
        }
        return self.heads(
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
            **self._options(deterministic, rngs, dropout_rng, implementation),
        )

    def init_cache(self, batch: int, max_len: int, dtype: Any = None) -> KVCache:
        """An empty cache for `batch` texts of up to `max_len` tokens.

        dtype: None takes the module's dtype, or else param_dtype.
        """
        return self.heads.init_cache(batch, max_len, first_of(dtype, self.dtype, self.param_dtype))


class _Group(nnx.Module):
    """The parameters under one name: MultiHeadAttention's query, key, value, out, additive, …"""


def load(module: nnx.Module, params: Mapping[str, Any]) -> None:
    """Replaces all parameters of a module by `params`, in place, all or none.

    Example:
        >>> import jax.numpy as jnp, regard.nnx
        >>> from flax import nnx
        >>> attention = regard.nnx.GaussianAttention(rngs=nnx.Rngs(0))
        >>> regard.nnx.load(attention, {"width": jnp.array(2.0)})
        >>> float(attention.width[...])
        2.0

    Args:
        module: any nnx.Module; its nnx.Param are replaced.
        params: nested mappings of arrays, as `regard.interop` gives them.

    Raises:
        ValueError: lists every array that is missing, unexpected or of another shape.
    """
    state = dict(nnx.to_flat_state(nnx.state(module, nnx.Param)))
    names = {path: ".".join(map(str, path)) for path in state}
    fitted = flatten(fit({names[path]: param for path, param in state.items()}, params))
    loaded = [(path, param.replace(fitted[names[path]])) for path, param in state.items()]
    nnx.update(module, nnx.from_flat_state(loaded))


def _param(parameter: Parameter, rng: Array, dtype: Any, partitioned: bool) -> nnx.Param:
    """The parameter with its logical axes, unless the caller's initializer says others."""
    drawn = parameter.create(rng, dtype)
    if isinstance(drawn, nnx.VariableMetadata):
        drawn.raw_value = parameter.arrange(drawn.raw_value)
        return nnx.Param(drawn)
    value = parameter.arrange(drawn)
    if not partitioned:
        return nnx.Param(value)
    # Flax's eager sharding insists on a mesh and on a rule for every name. A name without one
    # means "not sharded", as in linen, and no mesh means one device.
    value = _sharded(value, parameter.axes)
    return nnx.Param(value, out_sharding=parameter.axes, eager_sharding=False)


def _sharded(value: Array, axes: tuple[str | None, ...]) -> Array:
    """Laid out over the mesh in force, where there is one."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not nnx.using_eager_sharding():
        return value
    rules: dict[Any, Any] = dict(spmd.get_logical_axis_rules())
    known = set(mesh.axis_names)

    def on_mesh(axis: str | None) -> Any:
        found = rules.get(axis, axis)
        names = found if isinstance(found, tuple) else (found,)
        return found if set(names) <= known else None

    return nnx.Param(value, out_sharding=tuple(on_mesh(axis) for axis in axes))[...]


def _drops(rate: float, rngs: nnx.Rngs | None) -> bool:
    return rate > 0.0 and rngs is not None and _dropout_stream(rngs) is not None


def _dropout_stream(rngs: Any) -> Any:
    """The stream named "dropout", or the default one; None where there is neither."""
    if not isinstance(rngs, nnx.Rngs):
        return rngs
    return rngs.dropout if "dropout" in rngs or "default" in rngs else None
