"""A model small enough for NumPy loops and brute force, with random weights, and data for it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from regard.seq2seq.model.config import (
    ATTENTIONS,
    HEAD_SCORES,
    Config,
    ModelConfig,
    TransformerConfig,
)
from regard.seq2seq.model.translation_model import Model
from regard.seq2seq.train.batches import Batch

VOCAB = 9

CONFIG = Config(
    source_vocab=VOCAB,
    target_vocab=VOCAB,
    embedding=5,
    encoder=4,
    decoder=8,
    attention_width=6,
    embedding_dropout=0.0,
    annotation_dropout=0.0,
    output_dropout=0.0,
    layer_dropout=0.0,
)

# Every attention, and each other choice once.
CONFIGS = {
    **{attention: dataclasses.replace(CONFIG, attention=attention) for attention in ATTENTIONS},
    "asks with the token": dataclasses.replace(CONFIG, query="token"),
    "bilinear, asks with the token": dataclasses.replace(
        CONFIG, attention="bilinear", query="token"
    ),
    "reads the token first": dataclasses.replace(CONFIG, query="conditional"),
    "deep lstm, reads the token first": dataclasses.replace(
        CONFIG, decoder_layers=2, cell="lstm", attention="gaussian", query="conditional"
    ),
    "lstm, tied": dataclasses.replace(CONFIG, cell="lstm", tie="all"),
    "deep": dataclasses.replace(CONFIG, encoder_layers=2, decoder_layers=3, tie="none"),
    "deep lstm, fixed": dataclasses.replace(
        CONFIG, encoder_layers=2, decoder_layers=2, cell="lstm", attention="none"
    ),
}

TRANSFORMER = TransformerConfig(
    source_vocab=VOCAB,
    target_vocab=VOCAB,
    embedding=8,
    heads=2,
    feed_forward=6,
    encoder_layers=1,
    decoder_layers=2,
    embedding_dropout=0.0,
    target_dropout=0.0,
    layer_dropout=0.0,
    feed_forward_dropout=0.0,
)

# Every score, one for each head, and each other choice once.
TRANSFORMERS = {
    **{name: dataclasses.replace(TRANSFORMER, attention=name) for name in HEAD_SCORES},
    "a score per head": dataclasses.replace(
        TRANSFORMER, heads=4, attention=",".join(HEAD_SCORES), encoder_layers=2, tie="all"
    ),
    "learned positions": dataclasses.replace(
        TRANSFORMER, positions="learned", max_positions=12, decoder_layers=1, tie="none"
    ),
    **{
        f"{positions} positions": dataclasses.replace(
            TRANSFORMER, positions=positions, attention="dot,gaussian"
        )
        for positions in ("rotary", "alibi", "relative")
    },
}


def random_model(config: ModelConfig = CONFIG, seed: int = 0, scale: float = 0.5) -> Model:
    """All parameters random, the biases too."""
    graph, params = _shapes(config)
    draw = np.random.default_rng(seed)

    def drawn(like):
        center = 0.0 if like.shape else 1.0  # a Gaussian's width
        return jnp.asarray(center + scale * draw.normal(size=like.shape), like.dtype)

    return nnx.merge(graph, jax.tree.map(drawn, params))


@functools.cache
def _shapes(config: ModelConfig):
    return nnx.split(nnx.eval_shape(lambda: Model(config, rngs=nnx.Rngs(0))))


def some_batch(rows: int = 4, width: int = 6, seed: int = 0, vocab: int = VOCAB) -> Batch:
    """Sentences of many lengths, one of them of length 1, and a row of padding at the end."""
    draw = np.random.default_rng(seed)
    lens = draw.integers(0, width, size=(rows - 1, 2))
    lens[0] = 0  # nothing but <eos>
    pairs = [tuple(draw.integers(4, vocab, size=n).tolist() for n in pair) for pair in lens]
    return Batch.of(pairs, rows=rows, width=width)
