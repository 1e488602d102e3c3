"""Additive attention over 16,384 tokens, where the textbook's form would need gigabytes.

The textbook adds every projected query to every projected key, a tensor of T × S × h, and takes
tanh of it. regard never makes it. Its working memory is what the compiler says it set aside; the
textbook's is arithmetic: four times the tokens are sixteen times the tensor.

    python examples/long_additive.py [TOKENS]          prints a table, 10 seconds
"""

import sys
import time

import jax
import jax.numpy as jnp

import regard

HIDDEN, WIDTH = 16, 16
LONGEST = int(sys.argv[1]) if len(sys.argv) > 1 else 16_384


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


score = regard.Additive(normal(0, WIDTH, HIDDEN) / 4, normal(1, WIDTH, HIDDEN) / 4, normal(2, 16))


@jax.jit
def attend(query, key, value):
    return regard.attend(query, key, value, score=score)


def textbook(query, key, value):
    hidden = (query @ score.query_kernel)[:, None] + (key @ score.key_kernel)[None]  # [T, S, h]
    return jax.nn.softmax(jnp.tanh(hidden) @ score.vector) @ value


print("  tokens   textbook's tensor   regard's memory    time   a query against the textbook")
tokens = max(LONGEST // 16, 1)
while tokens <= LONGEST:
    query, key, value = (normal(seed, tokens, WIDTH) for seed in (3, 4, 5))
    compiled = attend.lower(query, key, value).compile()
    start = time.perf_counter()
    out = jax.block_until_ready(compiled(query, key, value))
    seconds = time.perf_counter() - start
    materialized = tokens * tokens * HIDDEN * 4 / 2**20  # MiB, in float32
    memory = compiled.memory_analysis().temp_size_in_bytes / 2**20
    few = slice(0, None, max(tokens // 8, 1))  # all of them would not fit
    apart = jnp.abs(out[few] - textbook(query[few], key, value)).max()
    print(
        f"{tokens:8,d} {materialized:15,.0f} MiB {memory:13,.1f} MiB {seconds:6.2f}s"
        f"   {apart:.0e} apart"
    )
    tokens *= 4
