"""Which source token explains a written word: attention as a prior, and Bayes' rule.

The attention weights a_ts are computed before the word y_t is chosen: they say where the model
expects the next word to come from. The word itself is evidence. If annotation s alone were the
context, y_t would have the probability p(y_t | s), and the posterior

    p(s | y_t) = a_ts p(y_t | s) / sum_r a_tr p(y_t | r)

says where it did come from. Shankar & Sarawagi (2019) train models with this posterior; here it is
applied to models trained as usual. It takes one softmax over the vocabulary for each s, so only the
tokens with the largest weights are tried.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from regard.seq2seq.model.translation_model import Model

TRIED = 32  # source tokens per target token, at most


def explain_words(
    model: Model, source: Array, source_lens: Array, target_in: Array, target_out: Array
) -> Array:
    """The posterior over source tokens for each target token, by forced decoding.

    Args:
        model: the translator; without attention all weights are zero.
        source: [B, S] token ids.
        source_lens: [B].
        target_in: [B, T], the target behind <bos>, as `Batch.target_in`.
        target_out: [B, T], the target, as `Batch.target_out`.

    Returns:
        [B, T, S] float32; each row is a distribution over the 32 source tokens with the largest
        attention weights.
    """
    graph, params = nnx.split(model)
    arrays = (jnp.asarray(array) for array in (source, source_lens, target_in, target_out))
    return _explain(graph, params, *arrays)


@functools.partial(jax.jit, static_argnums=0)
def _explain(
    graph: Any, params: Any, source: Array, lens: Array, target_in: Array, target_out: Array
) -> Array:
    model = nnx.merge(graph, params)
    encoded = model.encode(source, lens)
    if not encoded.attends:
        return jnp.zeros((*target_in.shape, source.shape[1]), jnp.float32)

    def write(state: Any, tokens: tuple[Array, Array]) -> tuple[Any, Array]:
        before, written = tokens  # [B]
        after, _, weights = model.step(encoded, state, before[:, None])
        weights = weights[:, 0].astype(jnp.float32)  # [B, S]
        heaviest, which = jax.lax.top_k(weights, min(TRIED, weights.shape[1]))  # [B, C]
        alone = jax.nn.log_softmax(model.alone(encoded, state, before[:, None], which))  # [B, C, V]
        likely = jnp.take_along_axis(alone, written[:, None, None], axis=-1)[..., 0]  # [B, C]
        explained = jax.nn.softmax(jnp.log(heaviest) + likely, axis=-1)
        rows = jnp.arange(weights.shape[0])[:, None]
        return after, jnp.zeros_like(weights).at[rows, which].set(explained)

    _, explained = jax.lax.scan(
        write, model.start(encoded, target_in.shape[1]), (target_in.T, target_out.T)
    )
    # Rows of padding have no source tokens: their posterior is 0 / 0.
    return jnp.where(lens[:, None, None] > 0, explained.swapaxes(0, 1), 0.0)
