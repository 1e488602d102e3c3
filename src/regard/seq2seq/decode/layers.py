"""Every layer's and head's attention for a given translation, by forced decoding."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from regard.seq2seq.decode.batch_shapes import width_for
from regard.seq2seq.model.attention_record import Recorder
from regard.seq2seq.model.translation_model import Model
from regard.seq2seq.text.marks import CAPITAL, JOINER, START
from regard.seq2seq.text.tokenizer_pair import TokenizerPair
from regard.seq2seq.train.batches import Batch
from regard.seq2seq.train.runtime_options import unoptimized

BEGIN, END = "(start)", "(end)"  # how <bos> and <eos> are written among tokens


class LayerWeights(NamedTuple):
    """The weights of the layers of an encoder, of a decoder, or between them.

    Attributes:
        weights: float32 (layers, heads, T, S).
        query_labels, key_labels: the T query tokens and the S key tokens.
    """

    weights: np.ndarray
    query_labels: tuple[str, ...]
    key_labels: tuple[str, ...]


def layer_weights(
    model: Model, tokenizers: TokenizerPair, source: str, target: str
) -> dict[str, LayerWeights]:
    """See `Translator.layers`."""
    read, written = tokenizers.source.encode(source), tokenizers.target.encode(target)
    S, T = len(read.ids) + 1, len(written.ids) + 1
    width = width_for(max(S, T))
    batch = Batch.of([(read.ids, written.ids)], rows=1, width=width)
    arrays = (jnp.asarray(x) for x in (batch.source, batch.source_lens, batch.target_in))
    graph, params = nnx.split(model)
    found = jax.tree.map(lambda x: np.asarray(x[0], np.float32), _program()(graph, params, *arrays))
    ends = (
        _labels(tokenizers.source.pieces, read.ids),
        _labels(tokenizers.target.pieces, written.ids),
    )
    sides = {
        "encoder": ((*ends[0], END), (*ends[0], END)),
        # The decoder reads a token behind, and attends to the source to write the next one.
        "decoder": ((BEGIN, *ends[1]), (BEGIN, *ends[1])),
        "cross": ((*ends[1], END), (*ends[0], END)),
    }
    return {
        name: LayerWeights(
            weights[:, :, : len(sides[name][0]), : len(sides[name][1])], *sides[name]
        )
        for name, weights in found.items()
    }


def _labels(pieces: Any, ids: Any) -> tuple[str, ...]:
    """Tokens as they are read: without the marks of spaces."""
    found = (pieces[token] for token in ids)
    return tuple(
        one if one == CAPITAL else one.removeprefix(START).strip(JOINER) or one for one in found
    )


@functools.cache
def _program() -> Any:
    """Compiled at optimization level 0: it runs once for each picture."""
    return jax.jit(_weights, static_argnums=0, compiler_options=unoptimized())


def _weights(
    graph: Any, params: Any, source: Array, lens: Array, target_in: Array
) -> dict[str, Array]:
    model, record = nnx.merge(graph, params), Recorder()
    model.decode(model.encode(source, lens, record=record), target_in, record=record)
    return record.stacked()
