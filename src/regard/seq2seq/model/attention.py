"""The decoder's attention, by any score of regard; keys are projected once per sentence.

The module owns the score's parameters through `regard.nnx`; `Memory` is what one sentence's
decoding needs of them, and `look` is one step, through `regard.attend`.
"""

import functools
from dataclasses import dataclass, field, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import regard
import regard.nnx
from regard.score.contract import accumulation_dtype
from regard.seq2seq.model.config import Config
from regard.seq2seq.model.recurrence import Times, multiply


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Memory:
    """An encoded batch with projected keys; made once, used at every step.

    Attributes:
        annotations: [B, S, 2 · encoder], the values.
        keys: [B, S, h], projected as the score wants them; None without attention.
        lens: [B], the valid lengths.
        summary: [B, 2 · encoder], the encoder's last states.
        parameter: the additive score's vector (h,), the Gaussian's width (); None otherwise.
        kind: the attention's name.
    """

    annotations: Array
    keys: Array | None
    lens: Array
    summary: Array
    parameter: Array | None
    kind: str = field(metadata=dict(static=True))

    def rows(self, which: Array) -> "Memory":
        """The memory of some of the sentences, by their numbers [b]."""
        keys = None if self.keys is None else self.keys[which]
        return replace(
            self,
            annotations=self.annotations[which],
            keys=keys,
            lens=self.lens[which],
            summary=self.summary[which],
        )


class Attention(nnx.Module):
    """The score's parameters, and the projection of the keys.

    Parameters, in `score`: those of the `regard.nnx` class of the same name.

    Args:
        config: the model's; its `attention` is not "none".
        rngs: random numbers for the parameters.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.kind, self.dtype = config.attention, config.compute_dtype
        self.score: Any
        Hq, Hk = config.decoder, config.annotation
        options: dict[str, Any] = {}
        if self.kind == "additive":
            h = config.attention_width or config.decoder
            self.score = regard.nnx.AdditiveAttention(h, Hq, Hk, rngs=rngs, **options)
        elif self.kind == "bilinear":
            self.score = regard.nnx.BilinearAttention(Hq, Hk, rngs=rngs, **options)
        elif self.kind == "gaussian":
            # Scores then start as varied as the scaled dot product's: q.k / σ², σ² = √D.
            self.score = regard.nnx.GaussianAttention(Hk**0.25, rngs=rngs, **options)

    def remember(self, annotations: Array, lens: Array, summary: Array) -> Memory:
        """Projects the keys, once for all steps."""
        keys, parameter = annotations, None
        if self.kind == "additive":
            kernel = self.score.key_kernel[...].astype(self.dtype)
            keys = multiply({"key": kernel}, "key", annotations)  # [B, S, h]
            parameter = self.score.vector[...]
        elif self.kind == "bilinear":  # qᵀ M k = q . (M k)
            kernel = self.score.kernel[...].T.astype(self.dtype)
            keys = multiply({"key": kernel}, "key", annotations)  # [B, S, Hq]
        elif self.kind == "gaussian":
            parameter = self.score.width[...]
        keys, annotations = keys.astype(self.dtype), annotations.astype(self.dtype)
        return Memory(annotations, keys, lens, summary, parameter, self.kind)

    def kernels(self) -> dict[str, Array]:
        """The kernels that each step needs: {"query": (Hq, h)}, or none."""
        if self.kind != "additive":
            return {}
        return {"query": self.score.query_kernel[...].astype(self.dtype)}


def look(
    times: Times, memory: Memory, query: Array, return_weights: bool
) -> tuple[Array, Array | None]:
    """One step of attention, for any number of queries per sentence.

    Args:
        times: multiplies by `Attention.kernels`.
        memory: the sentence.
        query: [B, T, decoder], the decoder's states.
        return_weights: whether the weights are wanted.

    Returns:
        The contexts [B, T, 2 · encoder] in float32, and the weights [B, T, S] or None.
    """
    score: regard.Score
    if memory.kind == "additive":
        score = OneQueryAdditive(cast(Array, memory.parameter))
        query = times("query", query)
    elif memory.kind == "gaussian":
        score = regard.Gaussian(cast(Array, memory.parameter))
    else:
        score = regard.Dot(1.0 if memory.kind == "bilinear" else None)
    found = regard.attend(
        query.astype(memory.annotations.dtype),
        cast(Array, memory.keys),
        memory.annotations,
        score=score,
        valid_lens=memory.lens,
        implementation="reference",  # for one query per sentence the dense form is the fastest
        return_weights=return_weights,
    )
    out, weights = found if return_weights else (found, None)
    return out.astype(jnp.float32), weights


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OneQueryAdditive(regard.Score):
    """wᵀ tanh(q + k) on projected queries and keys, with a backward pass made for one query.

    It recomputes the tanh, which stays in cache, instead of storing one per step and key, and sums
    by matrix products: left to autodiff, decoding's backward pass takes five times as long on a
    CPU. The same numbers as regard.Additive(None, None, vector, "exact").

    Args:
        vector: w, (h,).
    """

    vector: Array

    def scores(self, query: Array, key: Array) -> Array:
        wide = accumulation_dtype(query.dtype)
        return _additive(query.astype(wide), key.astype(wide), self.vector.astype(wide))


@jax.custom_vjp
def _additive(query: Array, key: Array, vector: Array) -> Array:
    """[..., T, h], [..., S, h], (h,) -> [..., T, S]."""
    return jnp.tanh(query[..., :, None, :] + key[..., None, :, :]) @ vector


def _additive_forward(query: Array, key: Array, vector: Array) -> tuple[Array, tuple]:
    return _additive(query, key, vector), (query, key, vector)


def _additive_backward(residuals: tuple, d_scores: Array) -> tuple[Array, Array, Array]:
    query, key, vector = residuals
    h = vector.shape[0]
    tanh = jnp.tanh(query[..., :, None, :] + key[..., None, :, :])  # [..., T, S, h]
    slope = 1.0 - tanh * tanh
    along = functools.partial(jnp.broadcast_to, vector)
    d_query = jnp.einsum("...ts,...tsh->...th", d_scores, slope)
    if query.shape[-2] == 1:  # nothing to sum
        d_key = d_scores[..., 0, :, None] * slope[..., 0, :, :]
    else:
        d_key = jnp.einsum("...ts,...tsh->...sh", d_scores, slope)
    d_vector = d_scores.reshape(1, -1) @ tanh.reshape(-1, h)
    return d_query * along(d_query.shape), d_key * along(d_key.shape), d_vector[0]


_additive.defvjp(_additive_forward, _additive_backward)
