"""Which source word explains a written word: attention before it was known, and Bayes' rule.

A look is made before its word: the weights a_ts say where the model expects the next word to come
from. Once the word is there, it is evidence. If annotation s alone had been the context, the word
y_t would have had the probability p(y_t | s), and

    p(s | y_t) = a_ts p(y_t | s) / sum_r a_tr p(y_t | r)

is where it did come from. Shankar & Sarawagi (2019) train models with this posterior; here it only
reads one that was trained as usual, at the price of a vocabulary for each s that is tried: those
that were looked at most.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from regard.seq2seq.model.translation_model import Model

TRIED = 32  # source tokens per target token, at most: long sentences cost no more per word


def explain_words(
    model: Model, source: Array, source_lens: Array, target_in: Array, target_out: Array
) -> Array:
    """How much of each written word comes from each source token: forced decoding, and then Bayes.

    Args:
        model: the translator; without attention nothing explains anything.
        source: [B, S] token ids.
        source_lens: [B].
        target_in: [B, T], the target behind <bos>, as `Batch.target_in`.
        target_out: [B, T], the target, as `Batch.target_out`.

    Returns:
        [B, T, S] float32; each row is a distribution over the 32 tokens of the source that were
        looked at most.
    """
    graph, params = nnx.split(model)
    arrays = (jnp.asarray(array) for array in (source, source_lens, target_in, target_out))
    return _explain(graph, params, *arrays)


@functools.partial(jax.jit, static_argnums=0)
def _explain(
    graph: Any, params: Any, source: Array, lens: Array, target_in: Array, target_out: Array
) -> Array:
    model = nnx.merge(graph, params)
    memory = model.encode(source, lens)
    if memory.kind == "none":
        return jnp.zeros((*target_in.shape, source.shape[1]), jnp.float32)

    def write(state: Any, tokens: tuple[Array, Array]) -> tuple[Any, Array]:
        before, written = tokens  # [B]
        after, _, weights = model.step(memory, state, before[:, None])
        weights = weights[:, 0].astype(jnp.float32)  # [B, S]
        heaviest, which = jax.lax.top_k(weights, min(TRIED, weights.shape[1]))  # [B, C]
        alone = jax.nn.log_softmax(model.alone(memory, state, before[:, None], which))  # [B, C, V]
        likely = jnp.take_along_axis(alone, written[:, None, None], axis=-1)[..., 0]  # [B, C]
        explained = jax.nn.softmax(jnp.log(heaviest) + likely, axis=-1)
        rows = jnp.arange(weights.shape[0])[:, None]
        return after, jnp.zeros_like(weights).at[rows, which].set(explained)

    _, explained = jax.lax.scan(write, model.start(memory), (target_in.T, target_out.T))
    # A row of padding has no tokens to look at: NaN, as 0 / 0 is.
    return jnp.where(lens[:, None, None] > 0, explained.swapaxes(0, 1), 0.0)
