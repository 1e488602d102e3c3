"""The decoder's attention, by any score of regard, over a memory made once per sentence.

The module owns the score's parameters through `regard.nnx`. `Attention.remember` projects the keys
and makes a `regard.Memory` of them; `attend_step` is one step, for all hypotheses of a sentence.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import regard
import regard.nnx
from regard.seq2seq.model.config import Config
from regard.seq2seq.model.recurrence import Times, multiply


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Encoded:
    """Sentences as decoding needs them; made once, used at every step by all hypotheses.

    Attributes:
        memory: keys as the score stores them, and the annotations [B, S, 2 · encoder] as values.
        summary: [B, 2 · encoder], the encoder's last states.
        projected: whether the values are what the decoder makes of a context, instead of
            annotations: see `Decoder.for_hypotheses`.
    """

    memory: regard.Memory
    summary: Array
    projected: bool = field(default=False, metadata=dict(static=True))

    @property
    def attends(self) -> bool:
        """Whether the decoder attends to the memory; if not, its context is the summary."""
        return self.memory.score is not None

    @property
    def lens(self) -> Array:
        """[B], how many tokens each sentence has."""
        return self.memory.length

    @property
    def keys(self) -> Array:
        """As the score stores them."""
        return self.memory.key

    @property
    def values(self) -> Array:
        """[B, S, width], zero at padding: the annotations, unless they are projected."""
        return self.memory.value[:, :, 0]

    def rows(self, which: Array) -> "Encoded":
        """Some of the sentences, by their numbers [b]."""
        return replace(self, memory=self.memory.rows(which), summary=self.summary[which])


class Attention(nnx.Module):
    """The score's parameters, and the memory of a sentence.

    Parameters, in `score`: those of the `regard.nnx` class of the same name.

    Args:
        config: the model's; its `attention` is not "none".
        rngs: random numbers for the parameters.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.kind, self.dtype = config.attention, config.compute_dtype
        self.score: Any
        Hq, Hk = config.decoder, config.annotation
        if self.kind == "additive":
            h = config.attention_width or config.decoder
            self.score = regard.nnx.AdditiveAttention(h, Hq, Hk, rngs=rngs)
        elif self.kind == "bilinear":
            self.score = regard.nnx.BilinearAttention(Hq, Hk, rngs=rngs)
        elif self.kind == "gaussian":
            # Scores then start as varied as the scaled dot product's: q.k / σ², σ² = √D.
            self.score = regard.nnx.GaussianAttention(Hk**0.25, rngs=rngs)

    def remember(self, annotations: Array, lens: Array) -> regard.Memory:
        """The memory of annotations [B, S, 2 · encoder]: no step projects a key again."""
        key = annotations
        score: regard.Score = regard.Dot()
        if self.kind == "additive":
            key = multiply({"key": self._kernel(self.score.key_kernel)}, "key", key)  # [B, S, h]
            score = regard.Additive(None, None, self.score.vector[...], tolerance="exact")
        elif self.kind == "bilinear":  # qᵀ M k = q . (M k), [B, S, Hq]
            key = multiply({"key": self._kernel(self.score.kernel).T}, "key", key)
            score = regard.Dot(1.0)
        elif self.kind == "gaussian":
            score = regard.Gaussian(self.score.width[...])
        key, value = key.astype(self.dtype), annotations.astype(self.dtype)
        return regard.Memory.of(key, value, score=score, valid_lens=lens)

    def kernels(self) -> dict[str, Array]:
        """The kernels that each step needs: {"query": (Hq, h)}, or none."""
        return {"query": self._kernel(self.score.query_kernel)} if self.kind == "additive" else {}

    def _kernel(self, kernel: Any) -> Array:
        return kernel[...].astype(self.dtype)


def attend_step(times: Times, memory: regard.Memory, query: Array) -> tuple[Array, Array]:
    """One step of attention, for any number of queries per sentence.

    Args:
        times: multiplies by `Attention.kernels`.
        memory: the sentence's; its values are zero at padding.
        query: [B, T, decoder], the decoder's states.

    Returns:
        The contexts [B, T, width of the values], and the weights [B, T, S], both float32.
    """
    if isinstance(memory.score, regard.Additive):
        query = times("query", query)
    # For a few queries per sentence the dense form is the fastest.
    query = query.astype(memory.value.dtype)
    weights = regard.weights(query, memory, implementation="reference").astype(jnp.float32)
    value = memory.value[:, :, 0].astype(jnp.float32)
    return jnp.einsum("bts,bsv->btv", weights, value), weights
