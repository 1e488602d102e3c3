"""A translator that has learned, in seconds, to write a sentence backwards."""

import dataclasses

import jax
import optax
from flax import nnx

from regard.seq2seq.model.translation_model import Model
from regard.seq2seq.text.tokenizer import SPECIAL, Tokenizer
from regard.seq2seq.text.tokenizer_pair import TokenizerPair
from regard.seq2seq.train.batches import Batch
from regard.seq2seq.translator import Translator
from seq2seq import reversing

WORDS = ("ant", "bee", "cat", "dog", "elk")
CONFIG = dataclasses.replace(
    reversing.CONFIG, embedding=16, encoder=16, decoder=32, tie="none", dtype="float32"
)


def reversing_translator(steps: int = 200) -> Translator:
    tokenizer = Tokenizer("word", SPECIAL + WORDS)
    graph, params = nnx.split(Model(CONFIG, rngs=nnx.Rngs(0)))
    adam = optax.adam(2e-2)

    @jax.jit
    def step(params, state, batch):
        def loss(params):
            total, _, count = nnx.merge(graph, params).loss(batch)
            return total / count

        updates, state = adam.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    state = adam.init(params)
    with jax.numpy_dtype_promotion("standard"):  # optax counts its steps in integers
        for seed in range(steps):
            params, state = step(params, state, Batch.of(reversing.pairs(64, seed), width=8))
    return Translator(nnx.merge(graph, params), TokenizerPair(tokenizer, tokenizer))
