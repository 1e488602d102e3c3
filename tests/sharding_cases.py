"""Run by test_sharding.py in a process with 8 virtual CPU devices: batch and heads over a mesh.

Every case is compiled for 2 × 4 devices. Its program must not put an array together, its results
must lie where the inputs do, and its numbers must be those of one device. The tests run some; all
take two minutes: `XLA_FLAGS=--xla_force_host_platform_device_count=8 python sharding_cases.py all`.
"""

import contextlib
import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import regard
from absent_gpu import on_hopper
from regard.pool.pallas import interpreted
from regard.score.additive import lift_anywhere

TOLERANCE = 5e-5  # relative to the largest entry, float32; a lift is off by 1e-6 per tanh
B, T, S, N, D, V = 4, 24, 40, 8, 8, 3
GATHERS = ("all-gather", "all-to-all", "collective-permute", "reduce-scatter")
rng = np.random.default_rng(0)


def draw(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


LENS = jnp.asarray([0, S, 7, 30])
PER_QUERY = jnp.asarray(rng.integers(0, S + 1, (B, T)))
PER_HEAD = jnp.asarray(rng.integers(0, S + 1, (B, N, T)))
SEGMENTS = regard.Mask.segments(
    jnp.sort(jnp.asarray(rng.integers(0, 3, (B, T)))),
    jnp.sort(jnp.asarray(rng.integers(0, 3, (B, S)))),
)
DROPOUT = dict(dropout_rate=0.25, dropout_rng=jax.random.key(7))


def additive(heads=(), scale=0.3, **how):
    return regard.Additive(
        scale * draw(*heads, D, 5), scale * draw(*heads, D, 5), draw(*heads, 5), **how
    )


# name: (implementations, key heads, settings)
ALL, FUSED, TILES = ("reference", "blockwise", "pallas"), ("blockwise", "pallas"), ("blockwise",)
CASES = {
    "dot": (ALL, N, {}),
    "dot, lengths": (ALL, N, dict(valid_lens=LENS)),
    "dot, lengths per query, dropout": (ALL, 4, dict(valid_lens=PER_QUERY, **DROPOUT)),
    "dot, causal, one of two key heads": (FUSED, 2, dict(mask=regard.Mask.causal())),
    "gaussian, lengths per head": (
        FUSED,
        4,
        dict(score=regard.Gaussian(jnp.float32(1.3)), valid_lens=PER_HEAD),
    ),
    "gaussian per head, one key head": (ALL, 1, dict(score=regard.Gaussian(1 + draw(N) ** 2))),
    "by distance": (
        FUSED,
        4,
        dict(score=regard.Dot() + regard.RelativeBias(draw(2 * S + 1)), valid_lens=PER_QUERY),
    ),
    "bilinear": (ALL, N, dict(score=regard.Bilinear(draw(D, D)))),
    "bilinear per head, segments": (
        FUSED,
        4,
        dict(score=regard.Bilinear(draw(N, D, D)), mask=SEGMENTS),
    ),
    "additive": (ALL, N, dict(score=additive(), valid_lens=LENS)),
    "additive per head": (FUSED, 4, dict(score=additive((N,)), valid_lens=PER_QUERY)),
    "additive, exact, dropout": (
        FUSED,
        4,
        dict(score=additive(tolerance="exact"), valid_lens=LENS, **DROPOUT),
    ),
    "additive, past its range": (FUSED, N, dict(score=additive(scale=40.0))),
    "bias, boolean mask": (
        TILES,
        4,
        dict(bias=draw(1, N, T, S), mask=jnp.asarray(rng.integers(0, 2, (B, 1, T, S)), bool)),
    ),
    "sparsemax": (TILES, 4, dict(normalize=regard.Sparsemax(), valid_lens=LENS)),
    "uniform": (TILES, 4, dict(normalize=regard.Uniform(), valid_lens=PER_QUERY)),
}


def run(case, implementation, arrays, cotangent, parameters):
    """The output, and gradients of everything there is."""
    _, _, settings = CASES[case]

    def pool(arrays, parameters):
        return regard.attend(*arrays, **{**settings, **parameters}, implementation=implementation)

    out, pull = jax.vjp(pool, arrays, parameters)
    return out, *pull(cotangent)


def compare(got, expected, what):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        scale = max(float(jnp.abs(b).max()), 1e-6)
        np.testing.assert_allclose(np.asarray(a) / scale, b / scale, atol=TOLERANCE, err_msg=what)


def check(case, implementation, mesh):
    _, key_heads, settings = CASES[case]
    arrays = draw(B, T, N, D), draw(B, S, key_heads, D), draw(B, S, key_heads, V)
    cotangent = draw(B, T, N, V)
    learned = {name: settings[name] for name in ("score", "bias") if name in settings}
    by_batch_and_head = NamedSharding(mesh, P("data", None, "model"))
    by_batch = NamedSharding(mesh, P("data"))
    enough = key_heads % mesh.shape["model"] == 0
    places = (by_batch_and_head, *(by_batch_and_head if enough else by_batch,) * 2)

    def step(*inputs):
        return run(case, implementation, *inputs)

    expected = jax.jit(lambda *inputs: run(case, "reference", *inputs))(arrays, cotangent, learned)
    with interpreted() if implementation == "pallas" else contextlib.nullcontext():
        placed = jax.device_put(arrays, places), jax.device_put(cotangent, by_batch_and_head)
        compiled = jax.jit(step).lower(*placed, learned).compile()
    got = compiled(*placed, learned)
    compare(got, expected, case)
    for array, place in zip((got[0], *got[1]), (by_batch_and_head, *places), strict=True):
        if not array.any():  # a constant: a regime without scores has no gradient of queries
            continue
        assert array.sharding.is_equivalent_to(place, array.ndim), (case, array.sharding)
    # Parameters are everywhere, so their gradients are summed; and keys that are everywhere.
    sums = [leaf.size for leaf in jax.tree.leaves(learned)]
    sums += [] if enough else [math.prod(array.shape) // mesh.shape["data"] for array in arrays[1:]]
    assert_no_gather(compiled.as_text(), max(sums, default=0), f"{case}, {implementation}")


def assert_no_gather(text, largest_sum, what):
    """No array is put together; sums are of at most so many numbers each."""
    calls = re.findall(r"= (.+?) ([a-z-]+?)(?:-start)?\(", text)
    gathered = [(shape, name) for shape, name in calls if name in GATHERS]
    assert not gathered, (what, gathered)
    for shapes, name in calls:
        for _, sizes in re.findall(r"(\w+)\[([\d,]*)\]", shapes) if name == "all-reduce" else ():
            numbers = math.prod(int(size) for size in sizes.split(",") if size)
            assert numbers <= max(largest_sum, 1), (what, shapes, largest_sum)


def lowers_for_a_gpu(mesh):
    """Programs of the GPU's backends, which cannot run here: kernels stand in a partitioned call,
    and every such call comes with its rule.
    """
    place = NamedSharding(mesh, P("data", None, "model"))
    x = jax.ShapeDtypeStruct((B, 128, N, 64), jnp.bfloat16, sharding=place)
    lens = jax.ShapeDtypeStruct((B,), jnp.int32, sharding=NamedSharding(mesh, P("data")))
    score = regard.Additive(draw(64, 16), draw(64, 16), draw(16))
    # Each path of a score: a call forward, one backward. Short additive scores have the exact path
    # alone; lifted ones the narrow lift, the sines for data outside its range, and the exact path.
    for name, settings, policy, paths in (
        ("cudnn", {}, contextlib.nullcontext, 1),
        ("pallas", {}, contextlib.nullcontext, 1),
        ("pallas, additive", dict(score=score), contextlib.nullcontext, 1),
        ("pallas, additive, lifted", dict(score=score), lift_anywhere, 3),
    ):
        backend = name.split(",")[0]

        def step(query, key, value, cotangent, lens, settings=settings, backend=backend):
            def pool(*arrays):
                return regard.attend(*arrays, valid_lens=lens, implementation=backend, **settings)

            out, pull = jax.vjp(pool, query, key, value)
            return out, pull(cotangent)

        with on_hopper(), policy():
            text = jax.jit(step).trace(x, x, x, x, lens).lower(lowering_platforms=("cuda",))
        calls = [line for line in text.as_text().splitlines() if "stablehlo.custom_call @" in line]
        shared = [line for line in calls if "@CustomSPMDPartitioning" in line]
        assert len(shared) == 2 * paths, (name, calls)
        assert all("sdy.sharding_rule" in line for line in shared), (name, shared)
        bare = [line for line in calls if "triton" in line or "mosaic" in line or "cudnn" in line]
        assert not bare, (name, bare)
    print("for a GPU / lowered", flush=True)


def explicit():
    """Arrays whose types carry their sharding: results lie as the queries do, ring or no ring."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    spec = P("data", None, "model", None)
    arrays = draw(B, T, N, D), draw(B, S, 4, D), draw(B, S, 4, V)
    cotangent, score = draw(B, T, N, V), additive()

    def step(score, arrays, cotangent, **how):
        def pool(score, arrays):
            return regard.attend(*arrays, score=score, valid_lens=LENS, **DROPOUT, **how)

        out, pull = jax.vjp(pool, score, arrays)
        return out, *pull(cotangent)

    expected = step(score, arrays, cotangent, implementation="reference")
    typed = jax.device_put((arrays, cotangent), NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        got = jax.jit(lambda *inputs: step(*inputs, implementation="blockwise"))(score, *typed)
        alpha = regard.attend(*typed[0], return_weights=True)[1]
    compare(got, expected, "explicit")
    assert all(jax.typeof(one).sharding.spec == spec for one in (got[0], *got[2])), got
    assert jax.typeof(alpha).sharding.spec == P("data", "model", None, None)
    alone = regard.attend(*typed[0], implementation="blockwise")  # not jitted, no mesh in force
    assert jax.typeof(alone).sharding.spec == spec

    rows = P("data", "model", None, None)
    shards = jax.device_put((arrays, cotangent), NamedSharding(mesh, rows))
    with jax.set_mesh(mesh):
        got = jax.jit(lambda *inputs: step(*inputs, sequence_axis="model"))(score, *shards)
    compare(got, expected, "explicit, ring")
    assert jax.typeof(got[0]).sharding.spec == rows
    print("explicit / typed", flush=True)


def transforms():
    """Under vmap and jvp a pass is not divided, and the numbers are the same."""
    x = draw(B, T, D)

    def loss(query, key, implementation):
        return jnp.sin(regard.attend(query, key, key, implementation=implementation)).sum()

    def slopes(implementation):
        slope = jax.grad(lambda *arrays: loss(*arrays, implementation), argnums=(0, 1))
        _, curvature = jax.jvp(lambda query: slope(query, x)[0], (x,), (x,))
        return jax.vmap(slope, (0, None))(x, x[0]), curvature

    compare(slopes("blockwise"), slopes("reference"), "transforms")
    print("transforms / vmap and jvp", flush=True)


def looks(mesh):
    """Numbers and pictures of the weights, by kernels."""
    place = NamedSharding(mesh, P("data", None, "model", None))
    arrays = draw(B, T, N, D), draw(B, S, 4, D)
    settings = dict(score=regard.Gaussian(jnp.float32(1.3)), valid_lens=PER_QUERY, sink=draw(N))

    def look(query, key):
        image = regard.attention_map(query, key, resolution=(6, 5), **settings)
        return regard.summarize(query, key, **settings), image

    expected = look(*arrays)
    with interpreted():
        program = jax.jit(look).lower(*jax.device_put(arrays, place)).compile()
    assert not any(kind in program.as_text() for kind in GATHERS)
    got = program(*jax.device_put(arrays, place))
    np.testing.assert_array_equal(got[0].argmax, expected[0].argmax)
    compare(got, expected, "looks")
    print("looks / summary and map", flush=True)


if __name__ == "__main__":
    assert jax.device_count() == 8, jax.devices()
    two_by_four = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    every = [f"{name} / {one}" for name, case in CASES.items() for one in case[0]]
    for line in every if sys.argv[1:] == ["all"] else sys.argv[1:]:
        name, one = line.split(" / ")
        if one == "lowered":
            lowers_for_a_gpu(two_by_four)
            continue
        if one == "summary and map":
            looks(two_by_four)
            continue
        if one in ("typed", "vmap and jvp"):
            explicit() if one == "typed" else transforms()
            continue
        # On a CPU additive scores go by a quicker exact form; a GPU lifts them.
        lifts = "additive" in name and one == "pallas"
        with lift_anywhere() if lifts else contextlib.nullcontext():
            check(name, one, two_by_four)
        print(line, flush=True)
