"""summarize and attention_map: what one would read off the weights, without making them."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regard
from cases import REGIMES, Case, Sizes, small_tiles
from intermediates import largest
from problem import as_arguments, assert_close, draw

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.sampled(2)]

SHAPES = {
    "rank 2": Case(mask="lengths per query", sizes=Sizes(B=None, N=None, K=None)),
    "rank 3": Case(mask="causal and lengths", sizes=Sizes(N=None, K=None)),
    "rank 4": Case(mask="causal window and lengths per query"),
    "gaussian": Case(score="gaussian", mask="lengths per example"),
    "additive": Case(score="additive", mask="lengths per example", bias=(19, 37)),
    "more queries than keys": Case(mask="causal", sizes=Sizes(T=23, S=11)),
}


def arguments(problem):
    found = problem.as_arguments(problem.inputs)
    del found["value"]
    return {
        **found,
        **as_arguments(problem.facts),
        "normalize": REGIMES[problem.case.regime].normalize,
    }


def entropy(weights):
    return -np.sum(
        np.where(weights > 0, weights * np.log(np.where(weights > 0, weights, 1.0)), 0.0), axis=-1
    )


@pytest.mark.parametrize(
    "tiles", [contextlib.nullcontext, small_tiles], ids=["default tiles", "small tiles"]
)
@pytest.mark.parametrize("name", SHAPES)
def test_summarize_is_read_off_the_weights(name, tiles):
    problem = draw(SHAPES[name])
    with tiles():
        stats = regard.summarize(**arguments(problem))
    weights = problem.pooled.weights
    assert_close(stats.entropy, entropy(weights), 1e-5, "entropy")
    assert_close(stats.max_weight, weights.max(axis=-1), 4e-6, "max_weight")
    assert_close(stats.key_total, weights.sum(axis=-2), 4e-6, "key_total")
    empty = ~problem.may.any(axis=-1)
    np.testing.assert_array_equal(stats.argmax, np.where(empty, -1, weights.argmax(axis=-1)))
    np.testing.assert_array_equal(np.asarray(stats.entropy)[empty], 0)
    np.testing.assert_array_equal(np.asarray(stats.max_weight)[empty], 0)


@pytest.mark.parametrize("regime", REGIMES)
def test_summarize_in_every_regime(regime):
    problem = draw(Case(regime=regime, mask="lengths per query", sizes=Sizes(N=None, K=None)))
    with small_tiles():
        stats = regard.summarize(**arguments(problem))
    weights = problem.pooled.weights
    assert_close(stats.max_weight, weights.max(axis=-1), 4e-6, "max_weight")
    assert_close(stats.key_total, weights.sum(axis=-2), 4e-6, "key_total")
    if regime != "cone":  # weights that do not sum to one have no entropy
        assert_close(stats.entropy, entropy(weights), 1e-5, "entropy")
    if regime != "uniform":  # all are the largest
        empty = ~weights.any(axis=-1)
        np.testing.assert_array_equal(stats.argmax, np.where(empty, -1, weights.argmax(axis=-1)))


@pytest.mark.parametrize("regime", ["softmax", "sparsemax", "kernel"])
def test_gradients_are_those_of_dense_weights(regime):
    """Of every part of a summary and of a map, with a mask; and forward over reverse."""
    rng = np.random.default_rng(5)
    query, key = (jnp.asarray(rng.standard_normal((2, 11, 2, 3))) for _ in range(2))
    settings = dict(normalize=REGIMES[regime].normalize, mask=regard.Mask.causal())
    settings |= dict(valid_lens=jnp.array([9, 0]))

    def by_tiles(query, key):
        with small_tiles():
            stats = regard.summarize(query, key, **settings)
            image = regard.attention_map(query, key, **settings, resolution=(11, 11))
        return stats.entropy, stats.max_weight, stats.key_total, image

    def dense(query, key):
        alpha = regard.weights(query, key, **settings, implementation="reference")
        logs = jnp.log(jnp.where(alpha > 0, alpha, 1.0))
        return -(alpha * logs).sum(-1), alpha.max(-1), alpha.sum(-2), alpha

    def derivatives(function):
        def loss(query, key):
            return sum(jnp.sum(jnp.sin(part)) for part in function(query, key))

        gradient = jax.grad(loss, (0, 1))
        return jax.jit(lambda *x: jax.jvp(gradient, x, x[::-1]))(query, key)

    for got, expected in zip(
        jax.tree.leaves(derivatives(by_tiles)), jax.tree.leaves(derivatives(dense)), strict=True
    ):
        np.testing.assert_allclose(got, expected, atol=1e-10)


def test_summarize_of_no_keys():
    stats = regard.summarize(jnp.zeros((2, 3, 4), jnp.float32), jnp.zeros((2, 0, 4), jnp.float32))
    np.testing.assert_array_equal(stats.entropy, np.zeros((2, 3)))
    np.testing.assert_array_equal(stats.argmax, np.full((2, 3), -1))
    np.testing.assert_array_equal(stats.max_weight, np.zeros((2, 3)))
    assert stats.key_total.shape == (2, 0)


def block_means(weights, rows, columns):
    """The mean weight of each cell, where a cell covers positions r T/rows to (r+1) T/rows,
    rounded to whole ones.
    """
    T, S = weights.shape[-2:]
    row_of = np.minimum(np.arange(T) * rows // T, rows - 1)
    column_of = np.minimum(np.arange(S) * columns // S, columns - 1)
    image = np.zeros((*weights.shape[:-2], rows, columns))
    for r in range(rows):
        for c in range(columns):
            cell = weights[..., row_of == r, :][..., column_of == c]
            image[..., r, c] = cell.mean(axis=(-2, -1))
    return image


@pytest.mark.parametrize("name", ["rank 2", "rank 3", "rank 4", "additive"])
def test_a_map_as_fine_as_the_weights_is_the_weights(name):
    problem = draw(SHAPES[name])
    with small_tiles():
        image = regard.attention_map(**arguments(problem))
    assert_close(image, problem.pooled.weights, 4e-6, "image")


@pytest.mark.parametrize(
    ("sizes", "resolution"), [((24, 36), (6, 9)), ((24, 36), (24, 4)), ((8, 12), (2, 100))]
)
def test_a_coarser_map_is_block_means(sizes, resolution):
    """Where the resolution divides the lengths there is no doubt about the cells."""
    T, S = sizes
    problem = draw(Case(mask="causal and lengths", sizes=Sizes(T=T, S=S, N=None, K=None)))
    with small_tiles():
        image = regard.attention_map(**arguments(problem), resolution=resolution)
    rows, columns = min(T, resolution[0]), min(S, resolution[1])
    assert image.shape == (2, rows, columns)
    assert_close(image, block_means(problem.pooled.weights, rows, columns), 4e-6, "image")


def test_a_map_that_does_not_divide_keeps_the_mass():
    """Ragged cells: every image row is still an average, within the range of the weights, of
    rows that sum to one.
    """
    problem = draw(Case(mask="none", sizes=Sizes(B=None, N=None, K=None)))
    image = np.asarray(regard.attention_map(**arguments(problem), resolution=(5, 8)))
    assert image.shape == (5, 8)
    weights = problem.pooled.weights
    assert image.min() >= weights.min()
    assert image.max() <= weights.max()


def test_linear_memory():
    """Neither makes the weights: no intermediate as large as T x S."""
    long = 2048
    x = jax.ShapeDtypeStruct((long, 4), jnp.float32)
    for function in (regard.summarize, regard.attention_map):
        name, shape = largest(lambda q, k, function=function: jax.tree.leaves(function(q, k)), x, x)
        assert np.prod(shape) < long * long, f"{function.__name__}: {name} makes {shape}"


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_sink_meets_scores_with_their_constant_per_query(softcap):
    """Softmax cannot see it, so that tiles may leave it out; a sink does."""
    rng = np.random.default_rng(6)
    query, key = (jnp.asarray(rng.standard_normal((2, 11, 2, 3)), jnp.float32) for _ in range(2))
    call = dict(score=regard.Gaussian(1.1), sink=jnp.asarray([-0.5, 0.5]), softcap=softcap)
    weights = regard.weights(query, key, **call, implementation="reference")
    with small_tiles():
        stats = regard.summarize(query, key, **call)
        image = regard.attention_map(query, key, **call)
    assert_close(stats.key_total, np.asarray(weights).sum(axis=-2), 4e-6, "key_total")
    assert_close(image, np.asarray(weights), 4e-6, "image")
