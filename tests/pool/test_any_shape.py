"""Shapes, ranks, lengths, masks and regimes at random: whatever arrives, the oracle is right."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import regard
from cases import BACKENDS, REGIMES, Case, Sizes
from problem import as_arguments, assert_close, assert_near, draw

# Every new shape is a new program to compile, so half as many shapes as lengths.
FEWER = settings(max_examples=max(1, settings.default.max_examples // 2))


@st.composite
def cases(draw):
    rank = draw(st.sampled_from([2, 3, 4]))
    B = None if rank == 2 else draw(st.integers(0, 3))
    K = draw(st.integers(1, 2)) if rank == 4 else None
    N = K * draw(st.integers(1, 2)) if rank == 4 else None
    sizes = Sizes(
        B, draw(st.integers(1, 20)), N, K, draw(st.integers(0, 40)), draw(st.integers(1, 4))
    )
    masks = [
        "none",
        "one length",
        "lengths per query",
        "causal",
        "window",
        "segments",
        "everything",
    ]
    return Case(
        backend=draw(st.sampled_from(list(BACKENDS))),
        score=draw(st.sampled_from(["dot", "gaussian", "bilinear", "additive"])),
        regime=draw(st.sampled_from(list(REGIMES))),
        mask=draw(st.sampled_from(masks)),
        sizes=sizes,
        seed=draw(st.integers(0, 9)),
    )


@FEWER
@given(cases())
def test_any_shape(case):
    problem = draw(case)
    chosen = BACKENDS[case.backend]
    with chosen.tiling():
        out = jax.jit(
            lambda arguments, masks: regard.attend(
                **arguments,
                **masks,
                normalize=REGIMES[case.regime].normalize,
                implementation=chosen.implementation,
            )
        )(problem.as_arguments(problem.inputs), as_arguments(problem.facts))
    query, key, value = problem._tensors()
    # Values that cancel leave their rounding behind: an error is measured by what was added up.
    added = oracle.attend(query, key, np.abs(value), **problem._oracle_arguments).out
    assert_near(out, problem.pooled.out, 4e-6, np.linalg.norm(added), str(case))
    np.testing.assert_array_equal(np.asarray(out)[~problem.may_per_query], 0)


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_segments_of_no_keys_and_of_no_queries(backend):
    for T, S in ((3, 0), (0, 3), (0, 0)):
        x, y = jnp.ones((T, 4), jnp.float32), jnp.ones((S, 4), jnp.float32)
        mask = regard.Mask.segments(jnp.zeros(T, jnp.int32), jnp.zeros(S, jnp.int32))
        with BACKENDS[backend].tiling():
            out = regard.attend(x, y, y, mask=mask, implementation=BACKENDS[backend].implementation)
        np.testing.assert_array_equal(out, np.zeros((T, 4)))


B, T, S = 2, 11, 37


@functools.cache
def program(backend, regime):
    """One compiled program for every mask drawn below: lengths and window starts are data."""
    chosen = BACKENDS[backend]

    @jax.jit
    def run(query, key, value, lens, table, cotangent):
        out, pull = jax.vjp(
            lambda *tensors: regard.attend(
                *tensors,
                valid_lens=lens,
                mask=table,
                normalize=REGIMES[regime].normalize,
                implementation=chosen.implementation,
            ),
            query,
            key,
            value,
        )
        return out, pull(cotangent)

    def traced_with_tiles(*args):
        with chosen.tiling():
            return run(*args)

    return traced_with_tiles


@given(
    backend=st.sampled_from(list(BACKENDS)),
    regime=st.sampled_from(["softmax", "sparsemax", "kernel"]),
    lens=st.lists(st.integers(-2, S + 2), min_size=B * T, max_size=B * T),
    density=st.sampled_from([0.0, 0.1, 0.9, 1.0]),
    scale=st.sampled_from([0.1, 1.0, 5.0]),
    seed=st.integers(0, 2**16),
)
def test_any_lengths(backend, regime, lens, density, scale, seed):
    rng = np.random.default_rng(seed)
    query, key, value, cotangent = (
        rng.standard_normal((B, n, 4)).astype(np.float32) for n in (T, S, S, T)
    )
    query = query * np.float32(scale)
    lens = np.array(lens, np.int32).reshape(B, T)
    table = rng.random((B, T, S)) < density
    arrays = [jnp.asarray(x) for x in (query, key, value, lens, table, cotangent)]
    out, slopes = program(backend, regime)(*arrays)
    arguments = {
        "score": oracle.Dot(),
        "may": oracle.allowed((B, T, S), valid_lens=lens, boolean=table),
        "regime": REGIMES[regime].oracle,
    }
    assert_close(out, oracle.attend(query, key, value, **arguments).out, 8e-6, "out")
    expected = oracle.gradients(cotangent, query, key, value, **arguments)
    for name, slope in zip(("query", "key", "value"), slopes, strict=True):
        assert_close(slope, expected[name], 4e-5, name)
