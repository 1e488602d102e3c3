"""Run by memory/test_sharding.py in a process with 8 virtual CPU devices: a memory over a mesh.

Batch and heads lie over 2 × 4 devices. A step, append and attend, must put no array together, the
memory must stay where it lies, and its numbers must be those of one device.
"""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import regard

B, S, N, K, D = 4, 16, 8, 4, 8
GATHERS = ("all-gather", "all-to-all", "collective-permute", "reduce-scatter")
rng = np.random.default_rng(0)


def draw(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


SCORES = {
    "dot": regard.Dot(),
    "gaussian": regard.Gaussian(1.3),
    "additive": regard.Additive(draw(D, 6), draw(D, 6), draw(6)),
}


def step(memory, query, key, value, lens):
    memory = memory.append(key, value, lens)
    return memory, regard.attend(query, memory, mask=regard.Mask.causal())


def main(name, kind):
    window = 12 if kind == "window" else None
    sizes = dict(key_heads=K, key_width=D, value_width=D, score=SCORES[name])
    memory = regard.Memory.empty(B, S, window=window, **sizes)
    memory = memory.append(draw(B, 13, K, D), draw(B, 13, K, D), jnp.asarray([3, 13, 7, 1]))
    inputs = draw(B, 1, N, D), draw(B, 1, K, D), draw(B, 1, K, D), jnp.asarray([1, 0, 1, 1])
    expected_memory, expected = step(memory, *inputs)
    mesh = jax.make_mesh((2, 4), ("data", "model"))

    def spread(array):
        spec = {4: P("data", None, "model"), 1: P("data")}.get(array.ndim, P())
        return jax.device_put(array, NamedSharding(mesh, spec))

    params = jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, P())), memory.score)
    arrays = [spread(a) for a in (memory.key, memory.value, memory.length)]
    spread_memory = type(memory)(*arrays, params, None, memory.made)
    inputs = [spread(array) for array in inputs]
    program = jax.jit(step, donate_argnums=0).lower(spread_memory, *inputs).compile()
    found = [gather for gather in GATHERS if re.search(rf"\b{gather}", program.as_text())]
    grown, out = program(spread_memory, *inputs)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    np.testing.assert_allclose(grown.key, expected_memory.key, atol=2e-6)
    kept = grown.key.sharding.is_equivalent_to(inputs[1].sharding, 4)
    with jax.set_mesh(mesh):
        begun = regard.Memory.empty(B, S, window=window, **sizes).append(*inputs[1:])
        options = dict(score=SCORES[name], valid_lens=inputs[3], max_len=S)
        at_once = regard.Memory.of(*inputs[1:3], **options)
    for memory in (begun, at_once):  # slots that lay nowhere yet lie as the chunk does
        kept &= memory.key.sharding.is_equivalent_to(inputs[1].sharding, 4)
    print(f"{name}, {kind}: gathers {found}, sharding kept {kept}")


if __name__ == "__main__":
    for case in sys.argv[1:]:
        main(*case.split(", "))
