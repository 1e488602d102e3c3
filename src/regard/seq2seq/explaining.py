"""Which source word explains a written word: attention before it was known, and Bayes' rule.

A look is made before its word: the weights a_ts say where the model expects the next word to come
from. Once the word is there, it is evidence. If annotation s alone had been the context, the word
y_t would have had the probability p(y_t | s), and

    p(s | y_t) = a_ts p(y_t | s) / sum_r a_tr p(y_t | r)

is where it did come from. Shankar & Sarawagi (2019) train models with this posterior; here it only
reads one that was trained as usual, at the price of S vocabularies per target word.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from regard.seq2seq.model import Model


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
        [B, T, S] float32; each row is a distribution over the tokens of the source.
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
        alone = jax.nn.log_softmax(model.alone(memory, state, before[:, None]))  # [B, S, V]
        likely = jnp.take_along_axis(alone, written[:, None, None], axis=-1)[..., 0]  # [B, S]
        state, _, weights = model.step(memory, state, before[:, None])
        known = jnp.log(weights[:, 0].astype(jnp.float32)) + likely
        return state, jax.nn.softmax(known, axis=-1)

    _, explained = jax.lax.scan(write, model.start(memory), (target_in.T, target_out.T))
    # A row of padding has no tokens to look at: NaN, as 0 / 0 is.
    return jnp.where(lens[:, None, None] > 0, explained.swapaxes(0, 1), 0.0)
