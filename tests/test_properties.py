"""Attention at random: any score, regime, mask, dtype, rank and length, against the oracle.

A case is a program and the data it runs on. Compiling a program takes a second and running it a
millisecond, so there are few programs, each drawn at random, and many cases: lengths, boolean
tables, segments and numbers are data. Whatever nobody may look at is NaN.

200 cases in CI, 2,000 in the nightly profile (HYPOTHESIS_PROFILE=nightly), which also draws more
programs and gives them new data every night.
"""

import functools
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import regard
from cases import AS_RUN, BACKENDS, REGIMES, SCORES
from problem import LIFT_TOLERANCES, as_arguments, assert_near, rounded

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
CASES, PROGRAMS = (2000, 160) if NIGHTLY else (200, 14)

RUNNERS = {**BACKENDS, **AS_RUN}
SMOOTH = ("softmax", "kernel", "cone", "uniform")
# These jump where scores tie, so that a score within a tolerance may give other weights.
JUMPING = ("sparsemax", "hard", "hard, straight through")


def drawn_program(seed):
    """Everything that is compiled: a dict that `program` and `data` read."""
    rng = np.random.default_rng([7, seed])
    score = str(rng.choice(list(SCORES)))
    dtype = str(rng.choice(["float32", "float32", "float64", "bfloat16", "float16"]))
    steady = not SCORES[score].approximate and dtype in ("float32", "float64")
    rank = int(rng.integers(2, 5))
    K = int(rng.integers(1, 3)) if rank == 4 else None
    per_head = "per head" in score
    if per_head and rank < 4:
        score = score.removesuffix(" per head")
        score = score if score in SCORES and "per head" not in score else "gaussian"
    align = str(rng.choice(["end", "start"]))
    band = {
        "none": {},
        "causal": {"causal": align},
        "window": {"window": (int(rng.integers(0, 9)), int(rng.integers(0, 4)), align)},
    }
    return {
        "score": score,
        "regime": str(rng.choice(SMOOTH + JUMPING if steady else SMOOTH)),
        "dtype": dtype,
        "backend": str(rng.choice(list(RUNNERS))),
        "B": None if rank == 2 else int(rng.integers(1, 4)),
        "N": None if K is None else K * int(rng.integers(1, 3)),
        "K": K,
        "T": int(rng.integers(1, 14)),
        "S": int(rng.integers(1, 30)),
        "V": int(rng.integers(1, 5)),
        "band": band[str(rng.choice(list(band)))],
        "lens": str(rng.choice(["none", "example", "query"])),
        "table": bool(rng.integers(2)),
        "segments": bool(rng.integers(2)) and rng.random() < 0.5,
    }


def data(made, seed, scale):
    """The arrays of one case, in float64 but already rounded; and its mask."""
    rng = np.random.default_rng([11, seed])
    B, T, S, N, K = (made[name] for name in ("B", "T", "S", "N", "K"))
    lead, heads, key_heads = ([] if size is None else [size] for size in (B, N, K))
    row = SCORES[made["score"]]

    def normal(*shape):
        return rng.standard_normal(shape)

    tensors = {
        "query": normal(*lead, T, *heads, row.widths[0]) * scale,
        "key": normal(*lead, S, *key_heads, row.widths[1]),
        "value": normal(*lead, S, *key_heads, made["V"]),
    }
    parameters = row.draw(normal, N or 1)
    facts = dict(made["band"])
    if made["lens"] != "none":
        shape = [*lead, T] if made["lens"] == "query" else lead
        facts["valid_lens"] = rng.integers(-2, S + 3, shape).astype(np.int32)
    if made["table"]:
        shape = [*lead, *heads, T, S]
        facts["boolean"] = rng.random(shape) < rng.choice([0.0, 0.2, 0.8, 1.0])
    if made["segments"]:
        facts["segments"] = tuple(
            np.sort(rng.integers(0, 3, [*lead, n]), axis=-1).astype(np.int32) for n in (T, S)
        )
    cotangent = normal(*lead, T, *heads, made["V"])
    both = {name: rounded(x, made["dtype"]) for name, x in {**tensors, **parameters}.items()}
    split = {name: both.pop(name) for name in ("query", "key", "value")}
    return split, both, facts, rounded(cotangent, made["dtype"])


@functools.cache
def program(seed):
    made = drawn_program(seed)
    runner, normalize = RUNNERS[made["backend"]], REGIMES[made["regime"]].normalize

    @jax.jit
    def run(tensors, score, masks, cotangent):
        def pool(tensors):
            return regard.attend(
                **tensors,
                score=score,
                **masks,
                normalize=normalize,
                implementation=runner.implementation,
            )

        out, pull = jax.vjp(pool, tensors)
        return out, pull(cotangent)[0]

    def tiled(*arguments):
        with runner.tiling():
            return run(*arguments)

    return made, tiled


def tolerances(made):
    """Relative errors of the output and of gradients that this dtype and score may have."""
    eps = float(ml_dtypes.finfo(made["dtype"]).eps)
    forward, backward = max(eps, 64 * 2.0**-53), max(2 * eps, 256 * 2.0**-53)
    if made["dtype"] != "float64":
        forward, backward = max(forward, 8e-6), max(backward, 4e-5)
    if SCORES[made["score"]].approximate:
        lift = LIFT_TOLERANCES[made["dtype"]]
        forward, backward = forward + 4 * lift[0], backward + 4 * lift[1]
    return forward, backward


@settings(max_examples=CASES, deadline=None)
@given(st.integers(0, PROGRAMS - 1), st.integers(0, 2**20), st.sampled_from([0.0, 0.3, 1.0, 3.0]))
def test_anything_is_what_the_oracle_says(which, seed, scale):
    made, run = program(which)
    tensors, parameters, facts, cotangent = data(made, seed, scale)
    may = oracle.allowed(oracle.weights_shape(tensors["query"], tensors["key"]), **facts)
    seen, sees = visible_keys(may, made), non_empty_rows(may)

    poisoned = {name: x.copy() for name, x in tensors.items()}
    poisoned["key"][~seen] = poisoned["value"][~seen] = np.nan
    arrays = {name: jnp.asarray(x, made["dtype"]) for name, x in poisoned.items()}
    row = SCORES[made["score"]]
    score = row.make(**{name: jnp.asarray(x, made["dtype"]) for name, x in parameters.items()})
    out, slopes = run(arrays, score, as_arguments(facts), jnp.asarray(cotangent, made["dtype"]))

    arguments = {
        "score": row.oracle(parameters),
        "may": may,
        "regime": REGIMES[made["regime"]].oracle,
    }
    expected = oracle.attend(*tensors.values(), **arguments).out
    expected_slopes = oracle.gradients(cotangent, *tensors.values(), **arguments)
    forward, backward = tolerances(made)
    assert out.dtype == made["dtype"]
    assert_near(out, expected, forward, 0.0, f"out of {made}")
    np.testing.assert_array_equal(np.asarray(out)[~sees], 0)
    least = 0.05 * np.linalg.norm(cotangent) * max(scale, 1.0)
    for name, slope in slopes.items():
        assert_near(slope, expected_slopes[name], backward, least, f"gradient of {name} of {made}")
    np.testing.assert_array_equal(np.asarray(slopes["query"])[~sees], 0)
    for name in ("key", "value"):
        np.testing.assert_array_equal(np.asarray(slopes[name])[~seen], 0)


def visible_keys(may, made):
    """[S], [B, S] or [B, S, K]: does any query of its heads see this key?"""
    if may.ndim < 4:
        return may.any(axis=-2)
    B, N, T, S = may.shape
    return may.reshape(B, made["K"], N // made["K"] * T, S).any(axis=2).swapaxes(1, 2)


def non_empty_rows(may):
    """[T], [B, T] or [B, T, N]: does this query see any key?"""
    sees = may.any(axis=-1)
    return sees.swapaxes(1, 2) if sees.ndim == 3 else sees


def test_the_programs_are_varied():
    """What is drawn has each of the scores, dtypes, ranks and backends at night, most by day."""
    drawn = [drawn_program(seed) for seed in range(160)]
    assert {made["score"] for made in drawn} == set(SCORES)
    assert {made["dtype"] for made in drawn} == {"float16", "bfloat16", "float32", "float64"}
    assert {made["regime"] for made in drawn} == {*SMOOTH, *JUMPING}
    by_day = drawn[: 200 // 14]
    assert len({made["score"] for made in by_day}) >= 6
    assert {made["backend"] for made in by_day} == set(RUNNERS)
