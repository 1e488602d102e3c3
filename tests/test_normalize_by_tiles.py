"""The contract of a weight regime, called directly: by tiles, merged, recomputed, differentiated.

Blockwise and ring pooling trust these numbers. Here they are computed without either, on rows of
scores cut into uneven tiles, and compared with the oracle's rows.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regard
from cases import REGIMES
from regard.normalize import Normalizer

pytestmark = pytest.mark.sampled(2)

Z, T, S, V = 2, 3, 11, 2
TILES = (slice(0, 4), slice(4, 5), slice(5, 11))
KEYS = np.arange(S, dtype=np.int32)
TOLERANCE = 1e-13


@pytest.fixture(scope="module")
def rows():
    """Scores, -inf where nobody may look; who may look; values; and the output's cotangent."""
    rng = np.random.default_rng(5)
    scores = 1.5 * rng.standard_normal((Z, T, S))
    may = rng.random((Z, T, S)) < 0.7
    may[0, 1] = False  # a row without keys
    may[1, 0] = False
    may[1, 0, 4] = True  # one whose only key is a tile
    may[1, 2, :5] = False  # one whose first tiles are empty
    scores[0, 0, 7] = scores[0, 0, 2] = 4.0  # the best one twice, in two tiles
    may[0, 0, 7] = may[0, 0, 2] = True
    value, cotangent = rng.standard_normal((Z, S, V)), rng.standard_normal((Z, T, V))
    return np.where(may, scores, -np.inf), may, value, cotangent


def pooled(normalize, rows, tiles=TILES):
    """Output [Z, T, V] and stats over some tiles, as blockwise pooling computes them."""
    scores, may, value, _ = (jnp.asarray(x) for x in rows)

    def sweep(step, carry):
        for tile in tiles:
            carry = step(carry, scores[..., tile], may[..., tile], jnp.int32(tile.start))
        return carry

    shape, dtype = (Z, T), scores.dtype
    known = normalize.prepare(sweep, shape, dtype)

    def step(carry, scores, may, first):
        acc, state = carry
        state, weights, rescale = normalize.absorb(state, known, scores, may, first)
        first = int(first)
        acc = acc if rescale is None else acc * rescale[..., None]
        return acc + weights @ value[:, first : first + weights.shape[-1]], state

    acc, state = sweep(step, (jnp.zeros((Z, T, V)), normalize.start(shape, dtype)))
    scale, stats = normalize.finish(state, known)
    return acc if scale is None else acc * scale[..., None], stats


def of_rows(regime, rows, give):
    """give(the oracle's row of weights, ...) for each row, zeros for keys nobody sees."""
    scores, may, value, cotangent = rows
    out = np.zeros((Z, T, S))
    for z in range(Z):
        for t in range(T):
            seen = may[z, t]
            if seen.any():
                a = scores[z, t, seen]
                w = regime.weights(a)
                out[z, t, seen] = give(a, w, value[z, seen] @ cotangent[z, t])
    return out


def whole_weights(regime, rows):
    return of_rows(regime, rows, lambda a, w, dw: w)


def per_row(stats):
    return jax.tree.map(lambda leaf: leaf[..., None], stats)


def near(got, expected):
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", REGIMES)
def test_tiles_pool_and_recompute_as_whole_rows(name, rows):
    normalize, regime = REGIMES[name]
    scores, may, value, _ = rows
    expected = whole_weights(regime, rows)
    near(normalize(jnp.asarray(scores), jnp.asarray(may)), expected)
    out, stats = pooled(normalize, rows)
    near(out, expected @ value)
    for tile in TILES:
        arguments = (jnp.asarray(x[..., tile]) for x in (scores, may, KEYS[None, None]))
        near(normalize.recompute(per_row(stats), *arguments), expected[..., tile])


@pytest.mark.parametrize("name", REGIMES)
def test_the_slope_is_the_derivative(name, rows):
    """d scores = slope * (d weights - delta), delta being what the regime says it is."""
    normalize, regime = REGIMES[name]
    scores, may, value, cotangent = rows
    expected = of_rows(regime, rows, lambda a, w, dw: regime.pull(a, w, dw))
    out, stats = pooled(normalize, rows)
    arguments = tuple(map(jnp.asarray, (scores, may, KEYS[None, None])))
    slope = normalize.slope(per_row(stats), *arguments)
    if not normalize.learns:
        near(slope, 0)
        near(expected, 0)
        return
    d_weights = np.einsum("ztv,zsv->zts", cotangent, value)
    if normalize.delta == "output":
        delta = (cotangent * np.asarray(out)).sum(-1)
    elif normalize.delta == "sweep":
        balance = np.asarray(normalize.balance(per_row(stats), *arguments))
        delta = (balance * d_weights).sum(-1)
    else:
        assert normalize.delta == "none"
        delta = np.zeros((Z, T))
    near(np.asarray(slope) * (d_weights - delta[..., None]), expected)
    assert np.abs(expected).max() > 0.01


MERGING = [name for name, row in REGIMES.items() if row.normalize.merges]


def test_which_regimes_merge():
    assert MERGING == ["softmax", "kernel", "compact kernel", "cone", "uniform"]


@pytest.mark.parametrize("name", MERGING)
def test_rows_over_some_keys_and_others_are_rows_over_both(name, rows):
    normalize, regime = REGIMES[name]
    scores, may, value, _ = rows
    expected = whole_weights(regime, rows)
    first, second = pooled(normalize, rows, TILES[:2]), pooled(normalize, rows, TILES[2:])
    for (one, stats), (other, others) in ((first, second), (second, first)):
        both, counts, other_counts = normalize.merge(stats, others)
        parts = [
            part if count is None else part * count[..., None]
            for part, count in ((one, counts), (other, other_counts))
        ]
        near(parts[0] + parts[1], expected @ value)
        arguments = (jnp.asarray(x) for x in (scores, may, KEYS[None, None]))
        near(normalize.recompute(per_row(both), *arguments), expected)
    out, stats = pooled(normalize, rows)
    same, counts, none = normalize.merge(stats, normalize.nothing((Z, T), jnp.dtype("float64")))
    near(out if counts is None else out * counts[..., None], expected @ value)
    assert none is None or not np.asarray(none)[np.asarray(may.any(-1))].any()
    arguments = (jnp.asarray(x) for x in (scores, may, KEYS[None, None]))
    near(normalize.recompute(per_row(same), *arguments), expected)


@pytest.mark.parametrize("name", REGIMES)
def test_what_a_regime_says_of_itself(name, rows):
    normalize = REGIMES[name].normalize
    scores, may = jnp.asarray(rows[0]), jnp.asarray(rows[1])
    weights = np.asarray(normalize(scores, may))

    shifted = np.asarray(normalize(scores + 0.75, may))
    assert normalize.shift_invariant == np.allclose(weights, shifted, atol=1e-9)

    turned = jnp.where(may, 0.4 - scores, -jnp.inf)
    other = np.asarray(normalize(turned, may))
    assert normalize.uses_scores == (not np.array_equal(weights, other))

    slopes = jax.grad(lambda a: (normalize(a, may) * jnp.arange(S * 1.0)[None, None]).sum())
    moved = np.nan_to_num(np.asarray(slopes(jnp.where(may, scores, -9.0))))
    assert normalize.learns == bool((np.abs(moved) > 1e-9).any())

    if normalize.bounded:
        state = normalize.start((Z, T), scores.dtype)
        known = normalize.prepare(
            lambda step, carry: step(carry, scores, may, 0), (Z, T), scores.dtype
        )
        _, tile, _ = normalize.absorb(state, known, scores, may, jnp.int32(0))
        assert np.asarray(tile).min() >= 0
        assert np.asarray(tile).max() <= 1
    else:
        assert np.asarray(normalize.f(scores + 9.0)).max() > 1 or "compact" in name


@pytest.mark.parametrize("name", REGIMES)
def test_no_mask_is_a_mask_of_everything(name, rows):
    normalize, _ = REGIMES[name]
    scores = jnp.asarray(np.where(rows[1], rows[0], 0.25))
    everything = jnp.ones(scores.shape, bool)
    near(normalize(scores, None), np.asarray(normalize(scores, everything)))
    state, known = normalize.start((Z, T), scores.dtype), None
    if isinstance(normalize, regard.Sparsemax):
        known = normalize.prepare(lambda f, c: f(c, scores, None, 0), (Z, T), scores.dtype)
    for part in range(2):
        with_mask = normalize.absorb(state, known, scores, everything, jnp.int32(0))[part]
        without = normalize.absorb(state, known, scores, None, jnp.int32(0))[part]
        jax.tree.map(near, without, with_mask)


@pytest.mark.parametrize("straight_through", [False, True])
def test_sparsemax_and_hard_on_a_row_with_one_score_or_none(straight_through):
    nothing = jnp.full((1, 1, 3), -jnp.inf)
    one = nothing.at[0, 0, 1].set(-700.0)  # far below, where exp(a) is 0
    for normalize in (regard.Sparsemax(), regard.Hard(straight_through), regard.Softmax()):
        np.testing.assert_array_equal(normalize(nothing, nothing > 0), 0)
        np.testing.assert_array_equal(normalize(one, one > -jnp.inf)[0, 0], [0, 1, 0])
        empty = jnp.zeros((1, 2, 0))
        assert normalize(empty, empty > 0).shape == (1, 2, 0)


def test_the_contract_is_open():
    """What a regime of one's own does not say, it has not."""
    bare, x = Normalizer(), jnp.zeros((1, 1, 2))
    assert bare.prepare(None, (1, 1), x.dtype) == ()
    for call in (
        lambda: bare(x, None),
        lambda: bare.start((1, 1), x.dtype),
        lambda: bare.nothing((1, 1), x.dtype),
        lambda: bare.absorb((), (), x, None, jnp.int32(0)),
        lambda: bare.finish((), ()),
        lambda: bare.recompute((), x, None, x),
        lambda: bare.slope((), x, None, x),
        lambda: bare.balance((), x, None, x),
        lambda: bare.merge((), ()),
    ):
        with pytest.raises(NotImplementedError):
            call()
