"""Multi-head attention as a pure function of its parameters.

Heads that share a score run as one `attend` call, with parameters of their own each. The sizes
are decided in head_plan.py; the arrays belong to `regard.nnx` and `regard.linen`.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array

from regard.attend import attend
from regard.mask import Mask, resolve
from regard.memory import Memory, is_real
from regard.modules.axes import as_mask, flat, flat_pairs, mask_of_heads, pairs_of_heads, take
from regard.modules.head_positions import (
    HeadPositions,
    flat_positions,
    places,
    require_positions,
)
from regard.modules.parameters import Initializer, Learned, Parameter, Tree, matmul_precision_of
from regard.score import Score
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
    cache: Memory | None

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
    positions: HeadPositions
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
        return found | self.positions.parameters()

    def init_cache(self, batch: int, max_len: int, dtype: Any, window: int | None = None) -> Memory:
        return Memory.empty(
            batch,
            max_len,
            key_heads=self.key_heads,
            key_width=self.key_head_features,
            value_width=self.value_head_features,
            score=self._fixed_score(),
            dtype=dtype,
            window=window,
        )

    def _fixed_score(self) -> Score | None:
        """One score of all heads that has positions and no parameters, for a cache to store keys
        turned. Others leave the keys as they are: the heads may have several, their parameters
        may change, and which of ALiBi's two forms it is depends on the mask of the call."""
        learned = len(self.groups) > 1 or self.groups[0].learned.parameters()
        if learned or self.positions.kind in ("alibi", "relative"):
            return None
        score = self._score(self.groups[0], {}, jnp.zeros((1, 1, 1, 0)))[0]
        return score if score.uses_positions() else None

    def _score(
        self, group: Group, params: Tree, query: Array, causal: bool = False
    ) -> tuple[Score, Array]:
        """The score of a group of heads, with positions, and their queries in the form it takes."""
        own = params.get(group.name, {}) if group.name else {}
        score, query = group.learned.score(own, query)
        return self.positions.placed(score, params, group.heads, causal), query

    def remember(
        self,
        params: Tree,
        key: Array,
        value: Array | None = None,
        *,
        valid_lens: Array | None = None,
        dtype: Any = None,
        precision: Any = None,
    ) -> Memory:
        """Keys and values projected once, for calls with `memory=`; options as of a call.

        Where all heads share a score, keys are also prepared for it.
        """
        inputs = self._inputs(None, key, value)[1:]
        key, value = (flat(array, array.shape[:-2], 2) for array in inputs)
        if valid_lens is not None:
            valid_lens = jnp.asarray(valid_lens)
            valid_lens = valid_lens.reshape(-1) if valid_lens.ndim else valid_lens
            place = jnp.arange(key.shape[1], dtype=valid_lens.dtype)[None]  # [1, S]
            real = (place < valid_lens.reshape(-1, 1))[..., None]
            key, value = jnp.where(real, key, 0), jnp.where(real, value, 0)
        dtype = self.dtype(params, key, value) if dtype is None else dtype
        score = None
        with matmul_precision_of(precision):
            key, value = self._keys_and_values(params, key, value, dtype)
            if len(self.groups) == 1:
                no_query = jnp.zeros((1, 1, 1, self.query_head_features))
                score, _ = self._score(self.groups[0], params, no_query)
            return Memory.of(key, value, score=score, valid_lens=valid_lens)

    def _keys_and_values(
        self, params: Tree, key: Array, value: Array, dtype: Any
    ) -> tuple[Array, Array]:
        """[B, S, K, Hk] and [B, S, K, V]."""
        key = _into_heads(key, params["key"], dtype)
        if self.normalize_qk:
            key = _layer_norm(key, params["key_ln"]["scale"])
        return key, _into_heads(value, params["value"], dtype)

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
        cache: Memory | None = None,
        memory: Memory | None = None,
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
        if memory is not None:
            key, value = self._no_keys(query, key, value, cache, memory)
        query, key, value = self._inputs(query, key, value)
        batch = query.shape[:-2]
        query, key, value = (flat(array, batch, 2) for array in (query, key, value))
        found = as_mask(mask, valid_lens if cache is None else None, batch)
        bias = None if bias is None else flat_pairs(jnp.asarray(bias), batch)
        flat_positions(options, batch)
        count, lens = query.shape[1], None
        if cache is not None:
            if not options.get("query_positions") is options.get("key_positions") is None:
                raise ValueError(
                    "a cache stores its tokens' positions. Fix: leave query_positions= and "
                    "key_positions= out; layer(query, memory=cache, query_positions=...) attends "
                    "without appending."
                )
            lens = cache.chunk_lens(valid_lens, count)
            query, key, value = _zero_chunk_padding(query, key, value, lens)
        elif is_causal:
            found = found & Mask.causal(align="start")
        if cache is None and memory is None:
            key, value = self._zero_padding(query, key, value, found)
        if dtype is None:
            dtype = self.dtype(params, query, key, value)
        with matmul_precision_of(precision):
            query = _into_heads(query, params["query"], dtype)  # [B, T, N, Hq]
            if self.normalize_qk:
                query = _layer_norm(query, params["query_ln"]["scale"])
            if memory is None:
                key, value = self._keys_and_values(params, key, value, dtype)
            if cache is not None and lens is not None:
                # A padded query stands before the text, so that it sees no key.
                positions = jnp.where(is_real(count, jnp.asarray(lens)), cache.positions(count), -1)
                options["query_positions"] = positions
                memory = cache = cache.append(key, value, lens)
                found = found & Mask.causal()
            pooled, weights = self._pool(
                params, query, memory or (key, value), found, bias, return_weights, options, dtype
            )
            out = _out_of_heads(pooled, params["out"], dtype)  # [B, T, out]
        out = out.reshape(*batch, *out.shape[1:])
        weights = [alpha.reshape(*batch, *alpha.shape[1:]) for alpha in weights]
        return Pooled(out, weights[0] if weights else None, cache)

    def dtype(self, params: Tree, *inputs: Array) -> Any:
        """The type of a computation whose dtype is not given."""
        return promote(*(x.dtype for x in (*inputs, *jax.tree.leaves(params))))

    def _no_keys(
        self, query: Array, key: Any, value: Any, cache: Memory | None, memory: Memory
    ) -> list[Array]:
        """Keys and values of no tokens: the memory has them."""
        if not key is value is cache is None:
            raise ValueError(
                "memory= has the keys and values: they are not given again. Got inputs_k "
                f"{None if key is None else list(key.shape)}, inputs_v "
                f"{None if value is None else list(value.shape)}, cache "
                f"{'given' if cache else None}, memory.key {list(memory.key.shape)}. Fix: "
                "layer(query, memory=memory)."
            )
        batch, widths = jnp.shape(query)[:-2], (self.key_features, self.value_features)
        return [jnp.zeros((*batch, 0, width), jnp.result_type(query)) for width in widths]

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
        held: Memory | tuple[Array, Array],
        mask: Mask,
        bias: Array | None,
        return_weights: bool,
        options: dict[str, Any],
        dtype: Any,
    ) -> tuple[Array, list[Array]]:
        """[B, T, N, V], and [B, N, T, S] where asked for, from every group, in order of heads.

        Args:
            held: keys and values, or a memory of them.
        """
        pooled: list[Array] = []
        weights: list[Array] = []
        rng = options.pop("dropout_rng", None)
        given = {name: x for name, x in options.items() if name.endswith("_positions")}
        at, causal = places(held, mask, query.shape[1], options)
        scored = [
            self._score(group, params, take(query, group.heads, 2), causal) for group in self.groups
        ]
        anywhere = any(score.uses_positions() for score, _ in scored)
        for number, (group, (score, own_query)) in enumerate(zip(self.groups, scored, strict=True)):
            heads, of_keys = group.heads, self._key_heads_of(group.heads)
            own_options: Any = dict(score=score)
            if isinstance(held, Memory):
                require_positions(score, held, own_query, at["query_positions"])
                if held.score is not None:  # it carries this one
                    own_options = {}
            if isinstance(held, Memory) or score.uses_positions():
                own_options |= at
            elif not anywhere:  # refused, where there are any
                own_options |= given
            found = cast(Any, attend)(
                own_query,
                *_of_heads(held, of_keys, dtype),
                mask=mask_of_heads(mask, heads, self.num_heads),
                bias=pairs_of_heads(bias, heads, self.num_heads),
                # Each group counts its heads from 0, so each needs random numbers of its own.
                dropout_rng=rng if rng is None or number == 0 else jax.random.fold_in(rng, number),
                return_weights=return_weights,
                **options,
                **own_options,
            )
            out, *alpha = found if return_weights else (found,)
            pooled.append(out)
            weights += alpha
        order = [head for group in self.groups for head in group.heads]
        back = tuple(order.index(head) for head in range(self.num_heads))
        out = take(jnp.concatenate(pooled, axis=2), back, 2)
        return out, [take(jnp.concatenate(weights, axis=1), back, 1)] if return_weights else []

    def _key_heads_of(self, heads: tuple[int, ...]) -> tuple[int, ...]:
        """The key heads of these query heads, each once where the queries still form groups."""
        used = [head * self.key_heads // self.num_heads for head in heads]
        distinct = sorted(set(used))
        if len({used.count(head) for head in distinct}) == 1:
            return tuple(distinct)
        return tuple(used)

    def _inputs(
        self, query: Array | None, key: Array | None, value: Array | None
    ) -> tuple[Array, Array, Array]:
        """Checked; a missing key is the query (self-attention), a missing value the key."""
        if key is None and value is not None:
            raise ValueError(
                "`inputs_k` cannot be None if `inputs_v` is not None. Fix: (inputs_q), (inputs_q, "
                "inputs_k), or (inputs_q, inputs_k, inputs_v)."
            )
        key = jnp.asarray(query if key is None else key)
        value = key if value is None else jnp.asarray(value)
        if query is None:  # only keys and values are wanted
            query = jnp.zeros((*key.shape[:-2], 0, self.query_features), key.dtype)
        query = jnp.asarray(query)
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


def _of_heads(
    held: Memory | tuple[Array, Array], heads: tuple[int, ...], dtype: Any
) -> tuple[Any, ...]:
    """Keys and values of some key heads; of a memory with a score all of them, which share it."""
    if not isinstance(held, Memory):
        return tuple(take(array, heads, 2) for array in held)
    if held.score is not None:
        return (replace(held, value=held.value.astype(dtype)),)
    key, value = (take(array, heads, 2).astype(dtype) for array in (held.key, held.value))
    made = held.made._replace(key_heads=len(heads))
    return (replace(held, key=key, value=value, made=made),)


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
