"""What positions, terms and memories cost on a GPU, each over the plain call beside it.

    python benchmarks/terms.py             # the table
    python benchmarks/terms.py --only memory --record FOLDER

Every program of a group is timed in turns in one process, by the device's clock; the ratio is of
medians. Groups: `terms` (positions, soft caps, sinks, sums of scores, over the dot product),
`memory` (a step through a `Memory` over the same call on plain arrays), `ring` (eight parts of the
keys, merged, over one call), `looking` (summarize and attention_map over one pass), `layer` (a
multi-head layer of additive heads), `short` (short sequences and small caches, each backend over
the automatic choice), `second` (temporaries of a Hessian-vector product).
"""

import argparse
import functools
import json
import statistics
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import regard
from regard.bench.results.record import write_script_record
from regard.bench.run.timing import DeviceClock, Queued, interleave

RNG = np.random.default_rng(0)


class Timed(NamedTuple):
    """A program and what its time is divided by: the name of another of its group, or None."""

    name: str
    function: Any
    arguments: tuple[Any, ...]
    over: str | None = None
    goal: float | None = None


def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape, np.float32), dtype)


def both(name: str, call: Any, arrays: Any, over: str | None, goals: Any) -> list[Timed]:
    """A call of one pytree of arrays, forward, and with the gradient of all of them."""
    shape = jax.eval_shape(call, arrays).shape
    cotangent = normal(*shape)

    def backward(arrays: Any, cotangent: jax.Array) -> Any:
        out, pullback = jax.vjp(call, arrays)
        return out, pullback(cotangent)

    forward, gradient = goals
    return [
        Timed(name, call, (arrays,), over, forward),
        Timed(
            f"{name}, gradients",
            backward,
            (arrays, cotangent),
            over and f"{over}, gradients",
            gradient,
        ),
    ]


def terms() -> list[Timed]:
    B, T, N, D = 4, 4096, 16, 64
    rows = dict(query=normal(B, T, N, D), key=normal(B, T, N, D), value=normal(B, T, N, D))
    float32 = functools.partial(normal, dtype=jnp.float32)
    causal = regard.Mask.causal()

    def call(arrays: Any, score: Any = lambda parameters: regard.Dot(), **options: Any) -> Any:
        arrays = dict(arrays)
        rows = [arrays.pop(name) for name in ("query", "key", "value")]
        if "sink" in arrays:
            options["sink"] = arrays.pop("sink")
        return regard.attend(*rows, score=score(arrays), **options)

    def case(name: str, over: str | None, goals: Any, more: Any = (), **options: Any) -> Any:
        return both(name, functools.partial(call, **options), rows | dict(more), over, goals)

    def sum_with(term: Any) -> Any:
        return lambda parameters: regard.Dot() + term(parameters)

    alibi = sum_with(lambda p: regard.Alibi())
    two_sided = sum_with(lambda p: regard.Alibi(two_sided=True))
    buckets = sum_with(lambda p: regard.RelativeBias(p["table"], 128))
    table = sum_with(lambda p: regard.RelativeBias(p["table"]))
    return [
        *case("dot", None, (None, None)),
        *case("dot, causal", None, (None, None), mask=causal),
        *case("rotary", "dot", (1.1, 1.15), score=lambda p: regard.Rotary(regard.Dot())),
        *case("alibi, causal", "dot, causal", (1.1, 1.15), mask=causal, score=alibi),
        *case("soft cap", "dot", (1.1, 1.15), softcap=30.0),
        *case("sink", "dot", (1.1, 1.15), dict(sink=float32(N))),
        *case("T5 buckets", "dot", (1.4, 1.4), dict(table=float32(N, 32)), score=buckets),
        *case("table of distances", "dot", (1.4, 1.4), dict(table=float32(N, 257)), score=table),
        *case("dot + Gaussian", "dot", (1.2, 1.2), score=sum_with(lambda p: regard.Gaussian(3.0))),
        *case("two-sided alibi", "dot", (1.4, 1.4), score=two_sided),
        *case("soft cap, causal", "dot, causal", (1.1, 1.15), mask=causal, softcap=30.0),
        *case("sink, causal", "dot, causal", (1.1, 1.15), dict(sink=float32(N)), mask=causal),
    ]


def memory() -> list[Timed]:
    attend = regard.attend

    def with_lengths(score: Any, query: Any, key: Any, value: Any, lens: Any) -> Any:
        return attend(query, key, value, score=score, valid_lens=lens)

    found = []
    for B, S, N, K, D in ((8, 32768, 32, 8, 128), (1, 131072, 32, 8, 128), (64, 2048, 16, 16, 64)):
        lens = jnp.asarray(np.maximum(1, S - np.arange(B)), jnp.int32)
        query, key, value = normal(B, 1, N, D), normal(B, S, K, D), normal(B, S, K, D)
        name = f"one query, B={B} S={S}"
        for kind, score in (("", regard.Dot()), (", Gaussian", regard.Gaussian(D**0.5))):
            plain = functools.partial(with_lengths, score)
            held = regard.Memory.of(key, value, score=score, valid_lens=lens)
            found += [
                Timed(name + kind, plain, (query, key, value, lens)),
                Timed(f"{name}{kind}, Memory", attend, (query, held), name + kind, 1.05),
            ]
    B, S, h = 64, 4096, 256
    query, key, value = normal(B, 1, h), normal(B, S, h), normal(B, S, h)
    score = regard.Additive(normal(h, h) / 16, normal(h, h) / 16, normal(h) / 16)
    lens = jnp.asarray(np.maximum(1, S - np.arange(B)), jnp.int32)
    held = regard.Memory.of(key, value, score=score, valid_lens=lens)
    found += [
        Timed("one query, additive", with_lengths, (score, query, key, value, lens)),
        Timed("one query, additive, Memory", attend, (query, held), "one query, additive", 1.0),
    ]
    pages, page, B, K, D = 10_000, 16, 256, 8, 128
    counts = RNG.integers(1, 2 * pages // B, B)
    counts = np.minimum(counts, counts * pages // counts.sum())
    order = RNG.permutation(pages)
    table = np.full((B, counts.max()), -1, np.int32)
    for row, start, count in zip(table, np.cumsum(counts) - counts, counts, strict=True):
        row[:count] = order[start : start + count]
    lens = jnp.asarray(counts * page - RNG.integers(0, page, B), jnp.int32)
    pool = regard.Memory.of(normal(pages, page, K, D), normal(pages, page, K, D))
    paged = regard.Memory.paged(pool, jnp.asarray(table), lens)
    wide = int(counts.max()) * page
    dense = regard.Memory.of(normal(B, wide, K, D), normal(B, wide, K, D), valid_lens=lens)
    query = normal(B, 1, 32, D)
    return [
        *found,
        Timed("256 sequences, contiguous", attend, (query, dense)),
        Timed("256 sequences, paged", attend, (query, paged), "256 sequences, contiguous", 1.15),
    ]


def ring() -> list[Timed]:
    B, T, N, D = 4, 4096, 16, 64
    rows = normal(B, T, N, D), normal(B, T, N, D), normal(B, T, N, D)

    def eighths(query: Any, key: Any, value: Any) -> Any:
        parts = zip(jnp.split(key, 8, 1), jnp.split(value, 8, 1), strict=True)
        return regard.merge(*(regard.attend(query, k, v, return_lse=True) for k, v in parts))[0]

    lse = functools.partial(regard.attend, return_lse=True)
    return [
        Timed("one call", regard.attend, rows),
        Timed("with log-sum-exp", lse, rows, "one call", None),
        Timed("eighths, merged", eighths, rows, "one call", 1.1),
    ]


def looking() -> list[Timed]:
    B, T, N, D = 2, 4096, 16, 64
    rows = normal(B, T, N, D), normal(B, T, N, D)
    causal = functools.partial(regard.summarize, mask=regard.Mask.causal())
    return [
        Timed("one pass", regard.attend, (*rows, rows[1])),
        Timed("summarize", regard.summarize, rows, "one pass", 2.0),
        Timed("attention_map", regard.attention_map, rows, "one pass", None),
        Timed("summarize, causal", causal, rows, "one pass", 2.0),
    ]


def layer() -> list[Timed]:
    from flax import nnx

    import regard.nnx as front

    layer = front.MultiHeadAttention(
        16, 1024, score="additive", dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    )
    definition, state = nnx.split(layer)
    x = normal(8, 2048, 1024)
    call = lambda arrays: nnx.merge(definition, arrays[0])(arrays[1])  # noqa: E731
    return both("additive heads", call, (state, x), None, (None, None))


def short() -> list[Timed]:
    """What `pool/choose.py` has to decide where all is small: sentences, patches, hypotheses."""
    found = []
    shapes = (  # B, T, S, N, D, whether with gradients
        *((256, 16, 16, 4, 32, True), (128, 32, 32, 4, 64, True), (80, 48, 48, 8, 64, True)),
        *((64, 100, 100, 8, 64, True), (32, 197, 197, 12, 64, True), (16, 400, 400, 8, 64, True)),
        *((168, 5, 24, 4, 32, False), (840, 1, 60, 4, 32, False), (64, 4, 512, 8, 64, False)),
        *((16, 1, 1024, 8, 128, False), (256, 1, 256, 16, 64, False)),
    )
    for B, T, S, N, D, trains in shapes:
        rows = dict(query=normal(B, T, N, D), key=normal(B, S, N, D), value=normal(B, S, N, D))
        lens = jnp.asarray(np.maximum(1, S - np.arange(B) % (S // 2)), jnp.int32)
        first = f"{B}×{N} of {T} × {S}, {D} wide"
        for backend in (None, "reference", "cudnn", "pallas"):

            def call(rows: Any, backend: str | None = backend, lens: Any = lens) -> jax.Array:
                return regard.attend(**rows, valid_lens=lens, implementation=backend)

            name, over = f"{first}, {backend or 'chosen'}", f"{first}, chosen" if backend else None
            if trains:
                found += both(name, call, rows, over, (None, None))
            else:
                found.append(Timed(name, call, (rows,), over))
    return found


def second() -> dict[str, float]:
    """MiB of temporaries of a Hessian-vector product at T = S = 4,096."""
    found = {}
    for name in ("blockwise", "pallas"):
        for dtype in (jnp.bfloat16, jnp.float32):
            rows = [normal(1, 4096, 2, 64, dtype=dtype) for _ in range(3)]

            def energy(query: Any, rest: Any, name: str = name) -> Any:
                out = regard.attend(query, *rest, implementation=name)
                return jnp.square(out.astype(jnp.float32)).sum()

            def product(query: Any, along: Any, *rest: Any) -> Any:
                return jax.jvp(jax.grad(lambda q: energy(q, rest)), (query,), (along,))[1]

            try:
                compiled = jax.jit(product).lower(rows[0], rows[0], *rows[1:]).compile()
                assert np.isfinite(np.asarray(compiled(rows[0], rows[0], *rows[1:]), float)).all()
                found[f"{name}, {jnp.dtype(dtype).name}"] = (
                    compiled.memory_analysis().temp_size_in_bytes / 2**20
                )
            except Exception as error:
                found[f"{name}, {jnp.dtype(dtype).name}: {str(error)[:200]}"] = -1
    return found


GROUPS = dict(terms=terms, memory=memory, ring=ring, looking=looking, layer=layer, short=short)


def ran_by(timed: Timed) -> Any:
    start = time.perf_counter()
    try:
        compiled = jax.jit(timed.function).lower(*timed.arguments).compile()
    except Exception as error:
        traceback.print_exc()
        return f"failed: {str(error).splitlines()[0][:150]}"
    return compiled, time.perf_counter() - start


def queued(compiled: Any, arguments: Any) -> Queued:
    def burst(runs: int) -> float:
        start = time.perf_counter()
        for _ in range(runs):
            result = compiled(*arguments)
        jax.block_until_ready(result)
        return time.perf_counter() - start

    return Queued(once=lambda: jax.block_until_ready(compiled(*arguments)), burst=burst)


def measure(group: str, rounds: int) -> list[dict[str, Any]]:
    programs = GROUPS[group]()
    with ThreadPoolExecutor(8) as pool:
        built = list(pool.map(ran_by, programs))
    runs, lines = {}, []
    for timed, compiled in zip(programs, built, strict=True):
        if not isinstance(compiled, str):
            runs[timed.name] = queued(compiled[0], timed.arguments)
            try:
                runs[timed.name]()
            except Exception as error:
                built[programs.index(timed)] = f"failed: {str(error).splitlines()[0][:150]}"
                del runs[timed.name]
    timings = interleave(runs, rounds, clock=DeviceClock(), rest=0.002)
    ms = {name: 1e3 * statistics.median(timing.seconds) for name, timing in timings.items()}
    for timed, compiled in zip(programs, built, strict=True):
        line: dict[str, Any] = dict(group=group, name=timed.name, goal=timed.goal)
        if isinstance(compiled, str):
            line["failed"] = compiled
        else:
            line |= dict(ms=ms[timed.name], compile_s=round(compiled[1], 2))
            line |= dict(temp_mib=compiled[0].memory_analysis().temp_size_in_bytes / 2**20)
            if timed.over in ms:
                line |= dict(over=timed.over, ratio=ms[timed.name] / ms[timed.over])
        lines.append(line)
    return lines


def told(line: dict[str, Any]) -> str:
    """A line of the table."""
    start = f"{line['group']}: {line['name']:38} "
    if "failed" in line:
        return start + line["failed"]
    text = f"{line['ms']:8.4f} ms, compiled {line['compile_s']:5.1f} s, {line['temp_mib']:7.1f} MiB"
    if "ratio" in line:
        text += f", {line['ratio']:.3f} of {line['over']} (goal {line['goal']})"
    return start + text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[*GROUPS, "second"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--record", type=Path, help="folder for the JSON")
    given = parser.parse_args()
    record: dict[str, Any] = dict(lines=[])
    for group in given.only:
        if group == "second":
            record["second_order_mib"] = second()
            print(json.dumps(record["second_order_mib"], indent=1), flush=True)
            continue
        for line in measure(group, given.rounds):
            record["lines"].append(line)
            print(told(line), flush=True)
    if given.record:
        print(write_script_record("terms", record, given.record))


if __name__ == "__main__":
    main()
