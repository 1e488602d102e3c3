"""Run by test_ring.py in a process with 8 virtual CPU devices: the ring beside the definition."""

import dataclasses
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import regard
from absent_gpu import absent_gpus, on_hopper
from regard.pool import ring_shards
from regard.pool.kernels.feature_tiles import FeatureTiles
from regard.pool.layout import tiling
from regard.pool.pallas import interpreted

TOLERANCE = 1e-5  # relative to the largest entry, float32
ring_shards.LEAST["cpu"] = 2  # so that shards are cut, at lengths that take no time
B, N, K = 2, 4, 2
rng = np.random.default_rng(0)


def draw(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def additive(scale):
    return regard.Additive(scale * draw(6, 5), scale * draw(6, 5), draw(5))


CAUSAL = dict(mask=regard.Mask.causal())


def positions():
    """Keys turned, and two biases by distance."""
    return regard.Rotary() + regard.Alibi() + 0.5 * regard.RelativeBias(draw(N, 9))


def packed(*lengths):
    """Three segments, each array with borders of its own."""
    ids = [jnp.sort(jnp.asarray(rng.integers(0, 3, length), jnp.int32)) for length in lengths]
    return regard.Mask.segments(*ids)


CASES = {
    "dot": (64, 64, {}),
    "odd lengths, one example empty": (61, 37, dict(valid_lens=jnp.array([30, 0]))),
    "lengths per query": (40, 48, dict(valid_lens=jnp.asarray(rng.integers(0, 49, (B, 40))))),
    "causal": (61, 61, CAUSAL),
    "causal, more keys than queries": (24, 50, CAUSAL),
    "causal window and dropout": (
        50,
        50,
        dict(
            mask=regard.Mask.causal() & regard.Mask.window(17, 0),
            dropout_rate=0.25,
            dropout_rng=jax.random.key(7),
        ),
    ),
    "gaussian": (33, 40, dict(score=regard.Gaussian(1.3))),
    "bilinear": (33, 40, dict(score=regard.Bilinear(draw(6, 6)))),
    "additive": (33, 40, dict(score=additive(0.3))),
    "additive, out of the lift's range": (33, 40, dict(score=additive(40.0))),
    "packed segments, causal": (61, 61, dict(mask=packed(61) & regard.Mask.causal())),
    "segments, window, sink, soft cap and dropout": (
        50,
        37,
        dict(
            mask=packed(50, 37) & regard.Mask.window(19, 13),
            softcap=1.5,
            sink=draw(N),
            dropout_rate=0.25,
            dropout_rng=jax.random.key(7),
        ),
    ),
    "positions": (37, 50, dict(score=positions(), mask=packed(37, 50) & regard.Mask.causal())),
    "packed, biases by distance, sink": (
        50,
        50,
        dict(score=positions(), mask=packed(50) & regard.Mask.causal(), sink=draw(N)),
    ),
    "kernel": (33, 40, dict(normalize=regard.Kernel(jax.nn.softplus))),
    "cone, causal": (40, 40, dict(normalize=regard.Cone(jax.nn.softplus), **CAUSAL)),
    "uniform": (33, 40, dict(normalize=regard.Uniform(), valid_lens=jnp.array([12, 40]))),
}


# Inside the caller's shard_map nothing can be padded: lengths that 8 devices share evenly.
INSIDE = {
    "lengths per query, inside": (40, 48, CASES["lengths per query"][2]),
    "causal window and dropout, inside": (64, 64, CASES["causal window and dropout"][2]),
    "causal, odd shards, inside": (40, 56, CAUSAL),
    "gaussian, inside": (40, 48, dict(score=regard.Gaussian(1.3), valid_lens=jnp.array([45, 7]))),
    "additive, inside": (32, 40, dict(score=additive(0.3))),
    "positions, inside": (40, 56, dict(score=positions(), **CAUSAL)),
    "segments, inside": (48, 48, dict(mask=packed(48), softcap=1.5)),
}


def inside(mesh):
    """attend, called on shards inside a shard_map that a user wrote."""
    rows, whole = P(None, "seq"), P()

    def attend(*arrays, score, valid_lens=None, mask=None, **settings):
        ids = () if mask is None else mask.segment_ids

        def on_shards(score, lens, ids, *shards):
            own = mask if mask is None else dataclasses.replace(mask, segment_ids=ids)
            return regard.attend(
                *shards, score=score, valid_lens=lens, mask=own, **settings, sequence_axis="seq"
            )

        lens = rows if valid_lens is not None and valid_lens.ndim > 1 else whole
        specs = (whole, lens, P("seq"), rows, rows, rows)
        shared = jax.shard_map(on_shards, mesh=mesh, in_specs=specs, out_specs=rows)
        return shared(score, valid_lens, ids, *arrays)

    return attend


# The same with the GPU's kernels for each step, interpreted.
BY_KERNELS = "by kernels, "
KERNELS = [BY_KERNELS + "segments, window, sink, soft cap and dropout", BY_KERNELS + "causal"]


def by_kernels(name, mesh, batch):
    seen, forward = [], FeatureTiles.forward

    def counted(self, *inputs):
        seen.append(self)
        return forward(self, *inputs)

    FeatureTiles.forward = counted
    try:
        with interpreted():
            compare(name, mesh, batch)
    finally:
        FeatureTiles.forward = forward
    assert seen


def lowered():
    """Each step of the ring is a kernel in the program for GPUs that are not here."""
    mesh = absent_gpus(8, AxisType.Auto, axis="seq")
    x = jax.ShapeDtypeStruct((1, 8 * 2048, 2, 64), jnp.bfloat16)

    def loss(*arrays):
        score = regard.Rotary() + regard.Alibi()
        how = dict(mesh=mesh, sequence_axis="seq", **CAUSAL)
        return regard.attend(*arrays, score=score, **how).astype(jnp.float32).sum()

    with on_hopper(), jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(x, x, x)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("triton") >= 3, "forward, d keys and d queries"
    print("lowered ok", flush=True)


def compare(name, mesh, batch):
    T, S, settings = (CASES | INSIDE)[name]
    arrays = draw(B, T, N, 6), draw(B, S, K, 6), draw(B, S, K, 3)
    cotangent = draw(B, T, N, 3)
    score = settings.get("score", regard.Dot()), settings.get("sink")

    def run(score, arrays, attend=regard.attend, **how):
        def loss(score, arrays):
            given = {**settings, "score": score[0]}
            if score[1] is None:
                out = attend(*arrays, **given, **how)
                return jnp.sum(out * cotangent), out
            given |= dict(sink=score[1], return_lse=True)
            out, lse = attend(*arrays, **given, **how)
            return jnp.sum(out * cotangent) + jnp.sum(jnp.sin(lse)), (out, lse)

        (_, out), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(score, arrays)
        return out, grads

    expected = jax.jit(lambda *a: run(*a, implementation="reference"))(score, arrays)
    over = dict(mesh=mesh, sequence_axis="seq") if name in CASES else dict(attend=inside(mesh))
    got = jax.jit(lambda *a: run(*a, **over))(score, jax.device_put(arrays, batch))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        # The gradient of one number is a sum that may cancel.
        scale = max(float(jnp.abs(b).max()), 1e-6 if b.ndim else 1.0)
        np.testing.assert_allclose(a / scale, b / scale, atol=TOLERANCE, err_msg=name)
    print(name, "ok", flush=True)


def no_gather(mesh, batch=None):
    """The compiled program moves shards to neighbors, before it computes, and never puts a sequence
    together."""
    checked = []
    sharded = NamedSharding(mesh, P(batch, "seq"))
    x = jax.ShapeDtypeStruct((4, 256, 16), jnp.float32, sharding=sharded)

    def loss(q, k, v):
        mask = regard.Mask.causal()
        return regard.attend(q, k, v, mask=mask, mesh=mesh, sequence_axis="seq").sum()

    text = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x).compile().as_text()
    assert re.search(r"\bcollective-permute", text)
    assert not re.search(r"\ball-gather|\ball-to-all", text), "a sequence is put together"
    for body in text.split("\n\n"):  # keys are sent before this step's tiles are computed
        sent, computed = body.find(" collective-permute("), body.find(" while(")
        if "ENTRY" not in body and sent >= 0 and computed >= 0:
            assert sent < computed
            checked.append(body)
    assert len(checked) >= 2, "forward and backward"


def memory(mesh):
    """A device's temporaries are its share of what one device would need, and 0.3 of it at most.

    Programs are compiled and asked; nothing runs.
    """
    shape, rows = (1, 32768, 16, 64), NamedSharding(mesh, P(None, "seq"))

    def bytes_of(way, sharding, **how):
        def pool(query, key, value):
            return regard.attend(query, key, value, **how)

        def step(query, key, value, cotangent):
            out, pull = jax.vjp(pool, query, key, value)
            return out, pull(cotangent)

        x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        call, count = (pool, 3) if way == "forward" else (step, 4)
        compiled = jax.jit(call).lower(*[x] * count).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    for way in ("forward", "forward and backward"):
        alone = bytes_of(way, None, implementation="blockwise")
        shared = bytes_of(way, rows, mesh=mesh, sequence_axis="seq")
        assert shared <= 1.3 * alone / 8, (way, alone, shared)
    print("memory ok", flush=True)


if __name__ == "__main__":
    assert jax.device_count() == 8, jax.devices()
    eight = jax.make_mesh((8,), ("seq",), axis_types=(AxisType.Auto,))
    mixed = jax.make_mesh((2, 4), ("data", "seq"), axis_types=(AxisType.Auto,) * 2)
    shared = NamedSharding(mixed, P("data"))
    for name in sys.argv[1:]:
        if name == "no gather":
            no_gather(eight)
            with tiling(block_q=16, block_k=16):  # one example at a time, if it were for this
                no_gather(mixed, "data")
            print("no gather ok", flush=True)
        elif name == "memory":
            memory(eight)
        elif name == "lowered":
            lowered()
        elif name in KERNELS:
            by_kernels(name.removeprefix(BY_KERNELS), eight, NamedSharding(eight, P()))
        elif name == "batch and sequence":
            compare("causal", mixed, shared)
        else:
            compare(name, eight, NamedSharding(eight, P()))
