"""Dropout on the weights: counted, not drawn, so that every backend drops the same ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
import regard
from cases import BACKENDS, REGIMES, Case
from problem import as_arguments, assert_close, draw
from regard.dropout import is_kept, key_words, row_words

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.sampled(2)]

B, T, N, S = 2, 19, 2, 37
RATE = 0.25


@functools.partial(jax.jit, static_argnames=("backend", "shape", "rate"))
def dropped_weights(rng, backend, shape=(B, N, T, S), rate=RATE):
    """Uniform weights of 1/S after dropout: with the identity as value, the output is the
    weights.
    """
    B, N, T, S = shape
    chosen = BACKENDS[backend]
    with chosen.tiling():
        out = regard.attend(
            jnp.zeros((B, T, N, 1), jnp.float32),
            jnp.zeros((B, S, N, 1), jnp.float32),
            jnp.broadcast_to(jnp.eye(S, dtype=jnp.float32)[None, :, None, :], (B, S, N, S)),
            normalize=regard.Uniform(),
            dropout_rate=rate,
            dropout_rng=rng,
            implementation=chosen.implementation,
        )
    return out.swapaxes(1, 2)  # [B, N, T, S]


def kept(rng, backend="reference", shape=(B, N, T, S), rate=RATE):
    return np.asarray(dropped_weights(rng, backend, shape, rate)) > 0


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_every_backend_keeps_the_same_weights(seed):
    """Bit for bit, across tiles that do not divide the lengths."""
    rng = jax.random.key(seed)
    expected = kept(rng)
    assert 0 < expected.mean() < 1
    for backend in BACKENDS:
        np.testing.assert_array_equal(kept(rng, backend), expected, err_msg=backend)


def test_old_style_keys_are_the_same_keys():
    np.testing.assert_array_equal(kept(jax.random.PRNGKey(3)), kept(jax.random.key(3)))


def test_another_seed_keeps_others():
    """Negative control: nearly 2 * rate * (1 - rate) of the weights change sides."""
    changed = (kept(jax.random.key(0)) != kept(jax.random.key(1))).mean()
    np.testing.assert_allclose(
        changed, 2 * RATE * (1 - RATE), atol=5 * np.sqrt(0.25 / (B * N * T * S))
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_kept_ones_are_scaled_up(backend):
    weights = np.asarray(dropped_weights(jax.random.key(0), backend))
    np.testing.assert_allclose(weights[weights > 0], 1 / S / (1 - RATE), rtol=1e-6)


@pytest.mark.parametrize("rate", [0.01, 0.3, 0.9])
def test_the_rate_is_the_rate(rate):
    n = 4 * 2 * 64 * 128
    keep = kept(jax.random.key(7), shape=(4, 2, 64, 128), rate=rate)
    # Five standard deviations of a mean of n coins.
    np.testing.assert_allclose(keep.mean(), 1 - rate, atol=5 * np.sqrt(rate * (1 - rate) / n))


def test_independent_across_batch_head_query_and_key():
    """No axis repeats or echoes another: correlations of neighbors within five deviations of
    nothing.
    """
    keep = kept(jax.random.key(11), shape=(4, 2, 64, 128), rate=0.5).astype(np.float64) - 0.5
    pairs = {
        "batch": (keep[:-1], keep[1:]),
        "head": (keep[:, :-1], keep[:, 1:]),
        "query": (keep[:, :, :-1], keep[:, :, 1:]),
        "key": (keep[..., :-1], keep[..., 1:]),
        "key, a power of two apart": (keep[..., :-64], keep[..., 64:]),
        "query and key, on the diagonal": (keep[:, :, :-1, :-1], keep[:, :, 1:, 1:]),
        "query and key, exchanged": (keep[:, :, :, :64], keep[:, :, :, :64].swapaxes(2, 3)),
    }
    for name, (one, other) in pairs.items():
        correlation = np.mean(one * other) * 4
        # Exchanged pairs count each pair twice and the diagonal once in full.
        mean = 1 / 64 if "exchanged" in name else 0.0
        assert abs(correlation - mean) < 5 * np.sqrt(2 / one.size), name
    # Sums over whole rows and columns are as wide as independent coins make them.
    for axis in range(4):
        totals = keep.sum(axis=axis) / np.sqrt(keep.shape[axis] * 0.25)
        np.testing.assert_allclose(totals.var(), 1.0, atol=5 * np.sqrt(2 / totals.size))


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_the_hash_equals_independent_coins(rate):
    """Row sums, column sums, every pair of rows or columns, and rectangles: as wide as coins
    make them, with no pair that echoes another. A variant without the first product fails.
    """
    n, seed = 1024, jnp.array([3, 141592653], jnp.uint32)
    index = jnp.arange(n, dtype=jnp.int32)
    rows = tuple(word[:, None] for word in row_words(seed, index))
    keys = tuple(word[None, :] for word in key_words(seed, index))
    assert _unlike_coins(np.asarray(is_kept(rows, keys, rate)), rate) is None
    bits = (rows[0] ^ keys[0]) >= jnp.uint32(round(rate * 2**32))
    assert _unlike_coins(np.asarray(bits), rate) is not None


def _unlike_coins(kept, rate):
    """What differs from independent coins, in words; None: nothing."""
    coins = (kept - (1 - rate)) / np.sqrt(rate * (1 - rate))  # mean 0, variance 1
    n = coins.shape[0]
    if abs(coins.mean()) * n > 5:
        return "the rate"
    for name, side in (("rows", coins), ("columns", coins.T)):
        if abs((side.sum(1) ** 2 / n).mean() - 1) > 5 * np.sqrt(2 / n):
            return f"the sums of {name}"
        pairs = (side @ side.T / np.sqrt(n))[np.triu_indices(n, 1)]
        if abs((pairs**2).mean() - 1) > 0.02 or abs((pairs**4).mean() / 3 - 1) > 0.1:
            return f"the correlations of {name}"
        if abs(pairs).max() > 7:
            return f"two {name}"
    near = coins[:-1] * coins[1:]
    rectangles = near[:, :-1] * near[:, 1:]
    return "rectangles" if abs(rectangles.mean()) * n > 5 else None


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_returned_weights_are_before_dropout(backend):
    problem = draw(Case(mask="causal and lengths"))
    chosen = BACKENDS[backend]
    arguments, masks = problem.as_arguments(problem.inputs), as_arguments(problem.facts)
    with chosen.tiling():
        out, weights = regard.attend(
            **arguments,
            **masks,
            dropout_rate=0.5,
            dropout_rng=jax.random.key(0),
            implementation=chosen.implementation,
            return_weights=True,
        )
    assert_close(weights, problem.pooled.weights, problem.tolerance("out"), "weights")
    assert np.abs(np.asarray(out) - problem.pooled.out).max() > 0.1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "case",
    [
        Case(mask="causal and lengths"),
        Case(mask="lengths per query", bias=(19, 37), regime="sparsemax"),
        Case(regime="cone"),
        Case(score="additive, exact", regime="kernel"),
    ],
    ids=str,
)
def test_output_and_gradients_with_dropout(case, backend):
    """Against the oracle, given which weights were kept: those that the identity value shows."""
    problem = draw(case)
    rng = jax.random.key(5)
    keep = kept(rng, shape=problem.shape)
    chosen = BACKENDS[backend]

    @jax.jit
    def run(arguments, masks, cotangent):
        def pool(arguments):
            return regard.attend(
                **arguments,
                **masks,
                normalize=REGIMES[case.regime].normalize,
                dropout_rate=RATE,
                dropout_rng=rng,
                implementation=chosen.implementation,
            )

        out, pull = jax.vjp(pool, arguments)
        return out, pull(cotangent)[0]

    with chosen.tiling():
        out, found = run(
            problem.as_arguments(problem.inputs),
            as_arguments(problem.facts),
            jnp.asarray(problem.cotangent, jnp.float32),
        )
    tensors = [problem.inputs[name] for name in ("query", "key", "value")]
    arguments = {**problem._oracle_arguments, "keep": keep, "rate": RATE}
    assert_close(out, oracle.attend(*tensors, **arguments).out, problem.tolerance("out"), "out")
    expected = oracle.gradients(problem.cotangent, *tensors, **arguments)
    for name, slope in expected.items():
        got = found[name] if name in found else getattr(found["score"], name)
        assert_close(got, slope, problem.tolerance(name), f"gradient of {name}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_rate_zero_is_no_dropout(backend):
    problem = draw(Case(mask="causal and lengths"))
    chosen = BACKENDS[backend]
    arguments, masks = problem.as_arguments(problem.inputs), as_arguments(problem.facts)
    with chosen.tiling():
        plain = regard.attend(**arguments, **masks, implementation=chosen.implementation)
        with_rng = regard.attend(
            **arguments,
            **masks,
            dropout_rng=jax.random.key(0),
            implementation=chosen.implementation,
        )
    np.testing.assert_array_equal(plain, with_rng)


def test_ranks_count_alike():
    """One example, a batch of one and a batch with one head drop the same weights: the counter
    is (b N + n, t, s).
    """
    rng = jax.random.key(2)
    expected = kept(rng, shape=(1, 1, T, S))[0, 0]
    query, key, value = (
        jnp.zeros((T, 1), jnp.float32),
        jnp.zeros((S, 1), jnp.float32),
        jnp.eye(S, dtype=jnp.float32),
    )
    for lead in ((), (None,)):
        arrays = [x[lead] if lead else x for x in (query, key, value)]
        out = regard.attend(*arrays, normalize=regard.Uniform(), dropout_rate=RATE, dropout_rng=rng)
        np.testing.assert_array_equal(np.asarray(out).reshape(T, S) > 0, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_grouped_heads_drop_on_their_own(backend):
    """Four query heads over one key head: four different patterns, the same as with four key
    heads.
    """
    rng = jax.random.key(4)
    expected = kept(rng, shape=(1, 4, T, S))
    chosen = BACKENDS[backend]
    with chosen.tiling():
        out = regard.attend(
            jnp.zeros((1, T, 4, 1), jnp.float32),
            jnp.zeros((1, S, 1, 1), jnp.float32),
            jnp.eye(S, dtype=jnp.float32)[None, :, None, :],
            normalize=regard.Uniform(),
            dropout_rate=RATE,
            dropout_rng=rng,
            implementation=chosen.implementation,
        )
    np.testing.assert_array_equal(np.asarray(out).swapaxes(1, 2) > 0, expected)
