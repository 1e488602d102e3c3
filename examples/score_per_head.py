"""One score per head: an encoder whose heads are good at different things.

Every token has a place, a wish (a direction), a number and a value, and must tell three values of
others: of the one farthest along its wish (a dot product), of the nearest to its place (a
distance), and the mean where numbers are above its own (a threshold). Prints a table, 20 seconds.
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from regard.linen import MultiHeadAttention

T, STEPS, RNG, SCORES = 10, 500, jax.random.key(1), ("dot", "gaussian", "additive")
OTHERS = ~jnp.eye(T, dtype=bool)  # a token may look at everybody else


def missed(model, params, rng, batch=64):
    """The part of each answer's variance that the model misses: 1 is as bad as a constant."""
    tokens = jax.random.normal(rng, (batch, T, 6))
    place, wish, number, value = jnp.split(tokens, (2, 4, 5), axis=2)
    along = jnp.einsum("btd,bsd->bts", wish, place)
    close = -((place[:, :, None] - place[:, None]) ** 2).sum(-1)  # [B, T, S]
    above = number.swapaxes(1, 2) > number
    mean = above @ value / jnp.maximum(above.sum(2, keepdims=True), 1)
    best = [jnp.where(OTHERS, scores, -jnp.inf).argmax(2)[..., None] for scores in (along, close)]
    picked = [jnp.take_along_axis(value, index, axis=1) for index in best]
    answers = jnp.concatenate([*picked, mean], axis=2)  # [B, T, 3]
    squares = (answers - model.apply(params, tokens, mask=OTHERS)) ** 2
    return squares.mean((0, 1)) / answers.var((0, 1))


def train(score):
    model = MultiHeadAttention(3, qkv_features=24, out_features=3, score=score)
    params = nn.unbox(model.init(RNG, jnp.zeros((1, T, 6))))
    optimizer = optax.adam(optax.cosine_decay_schedule(0.03, STEPS))

    def step(carry, rng):
        slopes = jax.grad(lambda params: missed(model, params, rng).sum())(carry[0])
        updates, state = optimizer.update(slopes, carry[1])
        return (optax.apply_updates(carry[0], updates), state), None

    run = jax.jit(lambda carry: jax.lax.scan(step, carry, jax.random.split(RNG, STEPS))[0])
    return model, run((params, optimizer.init(params)))[0]


def report(name, model, params):
    print(f"{name:<30}", *(f"{part:>11.1%}" for part in missed(model, params, RNG, batch=1024)))


print(f"{'variance missed':<30} {'farthest':>11} {'nearest':>11} {'mean above':>11}")
report("three dot-product heads", *train("dot"))
model, params = train(SCORES)
report("one of each score", model, params)
kernel = params["params"]["out"]["kernel"]
for head, score in enumerate(SCORES):  # a head that is gone shows what it did
    params["params"]["out"]["kernel"] = kernel.at[head].set(0)  # [heads, width, answers]
    report(f"  the same without {score}", model, params)
