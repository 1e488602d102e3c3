"""A small causal model that generates from a ragged batch of prompts, with a memory for its keys.

It learns to count modulo ten in about ten seconds, then continues three prompts of different
lengths at once, and each continuation equals the one made alone. Run: python examples/generate.py
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import regard.nnx

WORDS, WIDTH, ROOM = 10, 32, 24


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.attention = regard.nnx.MultiHeadAttention(4, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WORDS, rngs=rngs)

    def __call__(self, tokens, **options):  # (B, T) -> (B, T, WORDS), and the memory
        x = self.embed(tokens)
        found = self.attention(x, **options)
        attended, *memory = found if isinstance(found, tuple) else (found,)
        return self.out(x + attended), *memory


@nnx.jit
def learn(model, optimizer, tokens):
    def loss(model):
        [logits] = model(tokens[:, :-1], mask=regard.Mask.causal())
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    optimizer.update(model, nnx.grad(loss)(model))


@nnx.jit(static_argnums=3)
def generate(model, prompts, lens, count):
    memory = model.attention.init_cache(len(prompts), ROOM)
    logits, memory = model(prompts, cache=memory, valid_lens=lens)  # each its own length
    tokens = [token := logits[jnp.arange(len(prompts)), lens - 1].argmax(-1)]
    for _ in range(count - 1):  # one token at a time; no key is projected twice
        logits, memory = model(token[:, None], cache=memory)
        tokens.append(token := logits[:, 0].argmax(-1))
    return jnp.stack(tokens, 1)


model = Model(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
for step in range(60):
    starts = jax.random.randint(jax.random.key(step), (32, 1), 0, WORDS)
    learn(model, optimizer, (starts + jnp.arange(12)) % WORDS)
prompts, lens = jnp.array([[3, 4, 5, 6], [8, 9, 0, 0], [1, 0, 0, 0]]), jnp.array([4, 2, 1])
for prompt, length, text in zip(prompts, lens, generate(model, prompts, lens, 8), strict=True):
    alone = generate(model, prompt[None, :length], length[None], 8)[0]
    assert (alone == text).all()
    print(prompt[:length].tolist(), "->", text.tolist())
