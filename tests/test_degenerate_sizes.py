"""Sizes of 0 and 1 on every axis: attention is what the oracle says, or has nothing to say.

Random scores, regimes, masks and backends, each axis 0 in turn; by hand, what each of them is.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import regard
from cases import BACKENDS, MASKS, REGIMES
from problem import as_arguments

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.sampled(6)]

RUNS = 300 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 40


def normal(rng, *shape):
    return rng.standard_normal(shape)


def scores(rng, query_width, key_width, hidden):
    """name -> (the class here, the oracle's, its parameters), of these widths."""
    kernels = {
        "query_kernel": normal(rng, query_width, hidden),
        "key_kernel": normal(rng, key_width, hidden),
        "vector": normal(rng, hidden),
    }
    found = {
        "bilinear": (
            regard.Bilinear,
            oracle.Bilinear,
            {"kernel": normal(rng, query_width, key_width)},
        ),
        "additive": (regard.Additive, oracle.Additive, kernels),
    }
    if query_width == key_width:
        found["dot"] = (regard.Dot, oracle.Dot, {})
        found["gaussian"] = (regard.Gaussian, oracle.Gaussian, {"width": np.float64(1.5)})
    return found


def check(sizes, score, regime, mask, backend, seed):
    """Output, weights and gradients of these sizes, against the oracle."""
    rng = np.random.default_rng(seed)
    B, T, S, N, Hq, Hk, hidden, V = sizes
    ours, theirs, parameters = scores(rng, Hq, Hk, hidden)[score]
    arrays = [normal(rng, B, T, N, Hq), normal(rng, B, S, N, Hk), normal(rng, B, S, N, V)]
    facts = MASKS[mask](rng, B, N, T, S)
    masks = as_arguments(facts)
    facts.pop("as_mask", None)
    exact = {
        "score": theirs(parameters),
        "may": oracle.allowed((B, N, T, S), **facts),
        "regime": REGIMES[regime].oracle,
    }
    cotangent = normal(rng, B, T, N, V)
    pooled = oracle.attend(*arrays, **exact)
    slopes = oracle.gradients(cotangent, *arrays, **exact)
    chosen, normalize = BACKENDS[backend], REGIMES[regime].normalize
    keywords = dict(score=ours(**{n: jnp.asarray(p) for n, p in parameters.items()}), **masks)
    keywords |= dict(normalize=normalize)

    def attend(*arrays):
        return regard.attend(*arrays, implementation=chosen.implementation, **keywords)

    with chosen.tiling():
        out, pull = jax.vjp(attend, *map(jnp.asarray, arrays))
        got = pull(jnp.asarray(cotangent))
        weights = regard.weights(
            *map(jnp.asarray, arrays[:2]), implementation=chosen.implementation, **keywords
        )
    np.testing.assert_allclose(out, pooled.out, atol=1e-10)
    np.testing.assert_allclose(weights, pooled.weights, atol=1e-10)
    for name, slope in zip(("query", "key", "value"), got, strict=True):
        np.testing.assert_allclose(slope, slopes[name], atol=1e-9, err_msg=name)
    return arrays, keywords


EMPTY = ("B", "T", "S", "none")
SMALL_MASKS = [name for name in MASKS if name not in ("boolean with an empty row",)]


@settings(max_examples=RUNS)
@given(
    st.sampled_from(EMPTY),
    st.sampled_from(["dot", "gaussian", "bilinear", "additive"]),
    st.sampled_from(sorted(REGIMES)),
    st.sampled_from(SMALL_MASKS),
    st.sampled_from(sorted(BACKENDS)),
    st.integers(0, 2**20),
)
@pytest.mark.slow
def test_no_examples_queries_or_keys(empty, score, regime, mask, backend, seed):
    rng = np.random.default_rng(seed)
    B, T, S, N = (int(n) for n in rng.integers(1, 4, 4))
    B, T, S = (0 if empty == name else n for name, n in (("B", B), ("T", T), ("S", S)))
    Hq = int(rng.integers(1, 4))
    Hk = Hq if score in ("dot", "gaussian") else int(rng.integers(1, 4))
    check((B, T, S, N, Hq, Hk, 2, 2), score, regime, mask, backend, seed)


WIDTHS = {  # query width, key width, hidden units, value width
    "no queries' width": (0, 2, 2, 2),
    "no keys' width": (2, 0, 2, 2),
    "no width": (0, 0, 2, 2),
    "no hidden units": (2, 3, 0, 2),
    "no values' width": (2, 2, 2, 0),
    "nothing": (0, 0, 0, 0),
}


@pytest.mark.parametrize(
    ("name", "score", "backend"),
    [
        (name, score, backend)
        for name, (Hq, Hk, *_) in WIDTHS.items()
        for score in ("dot", "gaussian", "bilinear", "additive")
        if Hq == Hk or score in ("bilinear", "additive")
        for backend in BACKENDS
    ],
)
def test_widths_of_zero(name, score, backend):
    """Without a width every score is 0, and the weights are uniform; without values nothing is
    pooled.
    """
    Hq, Hk, hidden, V = WIDTHS[name]
    for mask in ("lengths per example", "causal"):
        arrays, keywords = check(
            (2, 3, 5, 2, Hq, Hk, hidden, V), score, "softmax", mask, backend, 1
        )
    if backend == "blockwise":
        query, key, value = map(jnp.asarray, arrays)
        found = regard.summarize(query, key, **keywords)
        assert found.entropy.shape == (2, 2, 3)
        np.testing.assert_allclose(found.key_total.sum(-1), 3.0, rtol=1e-6)
        image = regard.attention_map(query, key, resolution=(2, 2), **keywords)
        assert image.shape == (2, 2, 2, 2)
        assert regard.explain(query, key, value, **keywords)


@pytest.mark.parametrize("call", ["attend", "weights", "summarize", "attention_map", "explain"])
@pytest.mark.parametrize(
    "masks",
    [
        lambda: dict(valid_lens=jnp.array([2, 1])),
        lambda: dict(mask=regard.Mask.causal(align="start")),
        lambda: dict(valid_lens=jnp.array(2), mask=regard.Mask.causal()),
        lambda: dict(valid_lens=jnp.zeros((2, 0), jnp.int32)),
        lambda: dict(mask=regard.Mask.window(1, 1) | jnp.ones((0, 5), bool)),
    ],
    ids=["lengths", "causal from the start", "length and causal", "no lengths", "a union"],
)
def test_no_queries(call, masks):
    query, key = jnp.zeros((2, 0, 4), jnp.float32), jnp.zeros((2, 5, 4), jnp.float32)
    value = (key,) if call in ("attend", "explain") else ()
    found = getattr(regard, call)(query, key, *value, **masks())
    shapes = {"attend": (2, 0, 4), "weights": (2, 0, 5), "attention_map": (2, 0, 5)}
    if call in shapes:
        assert found.shape == shapes[call]
    if call == "summarize":
        np.testing.assert_array_equal(found.key_total, np.zeros((2, 5)))
