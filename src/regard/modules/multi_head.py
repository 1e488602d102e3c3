"""Multi-head attention as a pure function of its parameters.

Heads that share a score run as one `attend` call, with parameters of their own each. The sizes
are decided in head_plan.py; the arrays belong to `regard.nnx` and `regard.linen`.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from regard.attend import attend
from regard.cache import KVCache, is_real
from regard.mask import Mask, resolve
from regard.modules.parameters import Initializer, Learned, Parameter, Tree, matmul_precision_of
from regard.score.contract import promote
from regard.shapes import Axes


@dataclass(frozen=True)
class Group:
    """Heads that share a score; `name` is where their parameters are, None where there are none."""

    name: str | None
    heads: tuple[int, ...]
    learned: Learned


class Pooled(NamedTuple):
    """What a call computes; None where it was not asked for."""

    out: Array
    weights: Array | None
    cache: KVCache | None

    def results(self, return_weights: bool, return_cache: bool) -> Any:
        """The output alone, or a tuple of it and of what else the caller asked for."""
        found = (self.out, *[self.weights] * return_weights, *[self.cache] * return_cache)
        return found if len(found) > 1 else self.out


@dataclass(frozen=True)
class MultiHead:
    """The sizes of a multi-head attention, all decided and checked; made by `head_plan.plan`."""

    num_heads: int
    key_heads: int
    query_features: int
    key_features: int
    value_features: int
    query_head_features: int
    key_head_features: int
    value_head_features: int
    out_features: int
    groups: tuple[Group, ...]
    use_bias: bool
    normalize_qk: bool
    kernel_init: Initializer
    bias_init: Initializer
    out_kernel_init: Initializer
    out_bias_init: Initializer

    def parameters(self) -> dict[str, dict[str, Parameter]]:
        """Under Flax's names and in Flax's order, so that equal seeds draw equal parameters."""
        N, K = (self.num_heads, "heads"), (self.key_heads, "key_heads")
        found = {
            "query": self._into_heads(self.query_features, *N, self.query_head_features),
            "key": self._into_heads(self.key_features, *K, self.key_head_features),
            "value": self._into_heads(self.value_features, *K, self.value_head_features),
        }
        if self.normalize_qk:
            for side, width in (
                ("query", self.query_head_features),
                ("key", self.key_head_features),
            ):
                scale = Parameter((width,), ("head_features",), jax.nn.initializers.ones)
                found[f"{side}_ln"] = {"scale": scale}
        found["out"] = self._out()
        for group in self.groups:
            if group.name is not None and (own := group.learned.parameters()):
                found[group.name] = own
        return found

    def init_cache(self, batch: int, max_len: int, dtype: Any) -> KVCache:
        return KVCache.empty(
            batch,
            max_len,
            key_heads=self.key_heads,
            key_width=self.key_head_features,
            value_width=self.value_head_features,
            dtype=dtype,
        )

    def _into_heads(self, features: int, heads: int, axis: str, width: int) -> dict[str, Parameter]:
        kernel = Parameter(
            (features, heads, width),
            ("embed", axis, "head_features"),
            self.kernel_init,
            (features, heads * width),
        )
        bias = Parameter((heads, width), (axis, "head_features"), self.bias_init)
        return {"kernel": kernel} | ({"bias": bias} if self.use_bias else {})

    def _out(self) -> dict[str, Parameter]:
        N, V, out = self.num_heads, self.value_head_features, self.out_features
        kernel = Parameter(
            (N, V, out), ("heads", "head_features", "embed"), self.out_kernel_init, (N * V, out)
        )
        bias = Parameter((out,), ("embed",), self.out_bias_init)
        return {"kernel": kernel} | ({"bias": bias} if self.use_bias else {})

    def __call__(
        self,
        params: Tree,
        query: Array,
        key: Array | None = None,
        value: Array | None = None,
        *,
        cache: KVCache | None = None,
        valid_lens: Array | None = None,
        mask: Mask | Array | None = None,
        bias: Array | None = None,
        is_causal: bool = False,
        dtype: Any = None,
        precision: Any = None,
        return_weights: bool = False,
        **options: Any,
    ) -> Pooled:
        """Projects into heads, pools each, projects out; `options` are attend's."""
        query, key, value = self._inputs(query, key, value)
        batch = query.shape[:-2]
        query, key, value = (_flat(array, batch, 2) for array in (query, key, value))
        found = _as_mask(mask, valid_lens if cache is None else None, batch)
        bias = None if bias is None else _flat_pairs(jnp.asarray(bias), batch)
        if cache is None:
            found = found & Mask.causal(align="start") if is_causal else found
            key, value = self._zero_padding(query, key, value, found)
        else:
            count, lens = query.shape[1], cache.chunk_lens(valid_lens, query.shape[1])
            query, key, value = _zero_chunk_padding(query, key, value, lens)
        if dtype is None:
            dtype = self.dtype(params, query, key, value)
        with matmul_precision_of(precision):
            query = _into_heads(query, params["query"], dtype)  # [B, T, N, Hq]
            key = _into_heads(key, params["key"], dtype)  # [B, S, K, Hk]
            value = _into_heads(value, params["value"], dtype)  # [B, S, K, V]
            if self.normalize_qk:
                query = _layer_norm(query, params["query_ln"]["scale"])
                key = _layer_norm(key, params["key_ln"]["scale"])
            late = None
            if cache is not None:
                late, found = cache.late(count, lens), cache.mask(found, count, lens)
                cache = cache.append(key, value, lens)
                key, value = cache.key.astype(dtype), cache.value.astype(dtype)
            pooled, weights = self._pool(
                params, query, key, value, found, bias, return_weights, options
            )
            out = _out_of_heads(pooled, params["out"], dtype)  # [B, T, out]
        if late is not None:
            out = jnp.where(late[..., None], jnp.nan, out)
            weights = [jnp.where(late[:, None, :, None], jnp.nan, alpha) for alpha in weights]
        out = out.reshape(*batch, *out.shape[1:])
        weights = [alpha.reshape(*batch, *alpha.shape[1:]) for alpha in weights]
        return Pooled(out, weights[0] if weights else None, cache)

    def dtype(self, params: Tree, *inputs: Array) -> Any:
        """The type of a computation whose dtype is not given."""
        return promote(*(x.dtype for x in (*inputs, *jax.tree.leaves(params))))

    def _zero_padding(
        self, query: Array, key: Array, value: Array, mask: Mask
    ) -> tuple[Array, Array]:
        """Zeroes keys and values that every query masks, before they are projected: `attend` zeroes
        them after, but 0 times a NaN there would be NaN in a kernel's gradient."""
        axes = Axes(
            4,
            *(query.shape[0], query.shape[1], key.shape[1], self.num_heads, self.num_heads),
            *(self.query_head_features, self.key_head_features, self.value_head_features),
        )
        if axes.empty() or (visible := resolve(mask, None, axes).visible_keys(axes)) is None:
            return key, value
        visible = visible.any(1)[..., None]  # [B|1, S, 1]
        return jnp.where(visible, key, 0), jnp.where(visible, value, 0)

    def _pool(
        self,
        params: Tree,
        query: Array,
        key: Array,
        value: Array,
        mask: Mask,
        bias: Array | None,
        return_weights: bool,
        options: dict[str, Any],
    ) -> tuple[Array, list[Array]]:
        """[B, T, N, V], and [B, N, T, S] where asked for, from every group, in order of heads."""
        pooled: list[Array] = []
        weights: list[Array] = []
        rng = options.pop("dropout_rng", None)
        for number, group in enumerate(self.groups):
            heads, of_keys = group.heads, self._key_heads_of(group.heads)
            own = params.get(group.name, {}) if group.name else {}
            score, own_query = group.learned.score(own, _take(query, heads, 2))
            found = attend(
                own_query,
                _take(key, of_keys, 2),
                _take(value, of_keys, 2),
                score=score,
                mask=_mask_of_heads(mask, heads, self.num_heads),
                bias=_pairs_of_heads(bias, heads, self.num_heads),
                # Each group counts its heads from 0, so each needs random numbers of its own.
                dropout_rng=rng if rng is None or number == 0 else jax.random.fold_in(rng, number),
                return_weights=return_weights,
                **options,
            )
            out, *alpha = found if return_weights else (found,)
            pooled.append(out)
            weights += alpha
        order = [head for group in self.groups for head in group.heads]
        back = tuple(order.index(head) for head in range(self.num_heads))
        out = _take(jnp.concatenate(pooled, axis=2), back, 2)
        return out, [_take(jnp.concatenate(weights, axis=1), back, 1)] if return_weights else []

    def _key_heads_of(self, heads: tuple[int, ...]) -> tuple[int, ...]:
        """The key heads of these query heads, each once where the queries still form groups."""
        used = [head * self.key_heads // self.num_heads for head in heads]
        distinct = sorted(set(used))
        if len({used.count(head) for head in distinct}) == 1:
            return tuple(distinct)
        return tuple(used)

    def _inputs(
        self, query: Array, key: Array | None, value: Array | None
    ) -> tuple[Array, Array, Array]:
        """Checked; a missing key is the query (self-attention), a missing value the key."""
        if key is None and value is not None:
            raise ValueError(
                "`inputs_k` cannot be None if `inputs_v` is not None. Fix: (inputs_q), (inputs_q, "
                "inputs_k), or (inputs_q, inputs_k, inputs_v)."
            )
        query = jnp.asarray(query)
        key = query if key is None else jnp.asarray(key)
        value = key if value is None else jnp.asarray(value)
        batches = {array.shape[:-2] for array in (query, key, value)}
        widths = (query.shape[-1:], key.shape[-1:], value.shape[-1:])
        wanted = (self.query_features,), (self.key_features,), (self.value_features,)
        if len(batches) != 1 or query.ndim < 2 or widths != wanted:
            raise ValueError(
                "MultiHeadAttention takes (batch..., length, features), with one batch for all and "
                f"here of query width {self.query_features}, key width {self.key_features} and "
                f"value width {self.value_features}. Got query {list(query.shape)}, key "
                f"{list(key.shape)}, value {list(value.shape)}. Fix: in_features, key_features and "
                "value_features as the arrays have them; a mask is passed as mask=."
            )
        return query, key, value


def _into_heads(inputs: Array, params: Tree, dtype: Any) -> Array:
    """[B, T, features] -> [B, T, heads, width]."""
    out = jnp.einsum("bte,enh->btnh", inputs.astype(dtype), params["kernel"].astype(dtype))
    return out + params["bias"].astype(dtype)[None, None] if "bias" in params else out


def _out_of_heads(pooled: Array, params: Tree, dtype: Any) -> Array:
    """[B, T, N, V] -> [B, T, out]."""
    out = jnp.einsum("btnv,nvo->bto", pooled, params["kernel"].astype(dtype))
    return out + params["bias"].astype(dtype)[None, None] if "bias" in params else out


def _layer_norm(heads: Array, scale: Array) -> Array:
    """Flax's LayerNorm of each head, without bias: statistics in float32 or wider."""
    wide = heads.astype(promote(heads.dtype, jnp.dtype(jnp.float32)))
    centered = wide - wide.mean(-1, keepdims=True)
    variance = jnp.square(centered).mean(-1, keepdims=True)
    normed = centered * jax.lax.rsqrt(variance + 1e-6)  # [B, T, heads, width]
    return (normed * scale.astype(wide.dtype)[None, None, None]).astype(heads.dtype)


def _zero_chunk_padding(
    query: Array, key: Array, value: Array, lens: Array
) -> tuple[Array, Array, Array]:
    """Zeroes the padding of a chunk before it is appended, so that NaN there has no effect."""
    if key.shape[1] != query.shape[1]:
        raise ValueError(
            "a call with a cache appends one key for each query. Got query "
            f"{list(query.shape)}, key {list(key.shape)}. Fix: the same tokens as queries and keys."
        )
    real = is_real(query.shape[1], lens)[..., None]  # [B, T, 1]
    query, key, value = (jnp.where(real, array, 0) for array in (query, key, value))
    return query, key, value


def _as_mask(mask: Mask | Array | None, valid_lens: Array | None, batch: tuple[int, ...]) -> Mask:
    """One Mask, whose parts have one batch axis in place of the caller's none or several."""
    if mask is None:
        mask = Mask()
    elif not isinstance(mask, Mask):
        mask = Mask.boolean(_as_bool(jnp.asarray(mask)))
    if valid_lens is not None:
        mask = mask & Mask.lengths(valid_lens)
    return mask if len(batch) == 1 else _flat_mask(mask, batch)


def _flat_mask(mask: Mask, batch: tuple[int, ...]) -> Mask:
    ids = [
        tuple(_flat(x, batch, 1) if jnp.ndim(x) > 1 else x for x in pair)
        for pair in mask.segment_ids
    ]
    return replace(
        mask,
        lens=tuple(_flat(lens, batch) if jnp.ndim(lens) else lens for lens in mask.lens),
        segment_ids=tuple((query_ids, key_ids) for query_ids, key_ids in ids),
        arrays=tuple(_flat_pairs(array, batch) for array in mask.arrays),
        excluded=tuple(_flat_mask(inner, batch) for inner in mask.excluded),
    )


def _as_bool(mask: Array) -> Array:
    """Flax's mask makers return float32 by default: what is not 0 takes part."""
    if mask.dtype == jnp.bool_:
        return mask
    if not isinstance(mask, jax.core.Tracer) and not np.isin(np.asarray(mask), (0, 1)).all():
        raise ValueError(
            "a mask of numbers must be of zeros and ones; True and 1 take part. Got mask "
            f"{list(mask.shape)} of dtype {mask.dtype}. Fix: bias= for numbers added to the scores."
        )
    return mask != 0


def _flat(array: Array, batch: tuple[int, ...], rest: int | None = None) -> Array:
    """One batch axis for (batch..., rest); without the batch in front, the array as it is."""
    shape = jnp.shape(array)
    rest = len(shape) - len(batch) if rest is None else rest
    if len(batch) == 1 or len(shape) != len(batch) + rest or shape[: len(batch)] != batch:
        return array
    return jnp.reshape(array, (math.prod(batch), *shape[len(batch) :]))


def _flat_pairs(array: Array, batch: tuple[int, ...]) -> Array:
    """What broadcasts to (batch..., N, T, S), with one batch axis where it has any."""
    if jnp.ndim(array) <= 3 or len(batch) == 1:
        return array
    try:
        return _flat(jnp.broadcast_to(array, (*batch, *array.shape[-3:])), batch)
    except ValueError:
        raise ValueError(
            f"mask and bias must broadcast to the weights (batch..., N, T, S), with batch "
            f"{list(batch)}. Got {list(array.shape)}. Fix: size-1 axes where it is shared."
        ) from None


def _mask_of_heads(mask: Mask, heads: tuple[int, ...], num_heads: int) -> Mask:
    return replace(
        mask,
        lens=tuple(_take(lens, heads, 1) if jnp.ndim(lens) == 3 else lens for lens in mask.lens),
        arrays=tuple(_pairs_of_heads(array, heads, num_heads) for array in mask.arrays),
        excluded=tuple(_mask_of_heads(inner, heads, num_heads) for inner in mask.excluded),
    )


def _pairs_of_heads(array: Any, heads: tuple[int, ...], num_heads: int) -> Any:
    """What broadcasts to [B, N, T, S], for some of the heads."""
    if array is None or jnp.ndim(array) < 3 or array.shape[-3] != num_heads:
        return array
    return _take(array, heads, jnp.ndim(array) - 3)


def _take(array: Array, at: tuple[int, ...], axis: int) -> Array:
    """array[..., at, ...]: a slice where `at` is one, nothing to do where it is everything."""
    first, size = at[0], len(at)
    if at != tuple(range(first, first + size)):
        return jnp.take(array, jnp.asarray(at), axis=axis)
    if size == array.shape[axis]:
        return array
    return jax.lax.slice_in_dim(array, first, first + size, axis=axis)
