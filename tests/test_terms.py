"""softcap=, sink=, return_lse= and merge: against dense formulas, and in first and second order."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regard
from cases import BACKENDS, interpreted_kernels, small_tiles

RNG = np.random.default_rng(0)
B, T, S, N, K, D, V, CAP = 2, 19, 37, 4, 2, 16, 5, 1.5
LENS, CAUSAL = np.array([0, 30]), regard.Mask.causal()


def arrays(dtype=jnp.float64):
    shapes = (B, T, N, D), (B, S, K, D), (B, S, K, V), (N,)
    return [jnp.asarray(RNG.standard_normal(shape), dtype) for shape in shapes]


def dense(query, key, value, sink):
    """The formulas: out, and the log-sum-exp of capped scores and the sink."""
    wide = [jnp.repeat(x, N // K, axis=2) for x in (key, value)]
    scores = jnp.einsum("btnd,bsnd->bnts", query, wide[0]) / np.sqrt(D)
    scores = CAP * jnp.tanh(scores / CAP)
    may = np.arange(S)[None, :] <= np.arange(T)[:, None] + S - T
    may = may[None, None] & (np.arange(S) < LENS[:, None])[:, None, None, :]
    some = jnp.asarray(may.any(-1))
    e = jnp.where(jnp.asarray(may), jnp.exp(scores), 0.0)
    total = e.sum(-1) + jnp.exp(sink)[None, :, None]
    out = jnp.einsum("bnts,bsnv->btnv", e / total[..., None], wide[1])
    return out, jnp.log(total), some


def ours(implementation):
    def call(query, key, value, sink):
        settings = dict(mask=CAUSAL, valid_lens=jnp.asarray(LENS), implementation=implementation)
        with small_tiles():
            return regard.attend(
                query, key, value, softcap=CAP, sink=sink, return_lse=True, **settings
            )

    return call


@pytest.mark.parametrize("implementation", BACKENDS)
def test_out_and_log_sum_exp_are_the_formula_up_to_second_order(implementation):
    given = arrays()

    def loss(call):
        def of(*given):
            out, lse = call(*given)[:2]
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

        return of

    out, lse = ours(implementation)(*given)
    expected_out, expected_lse, _ = dense(*given)
    np.testing.assert_allclose(out, expected_out, atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-12)

    def derivatives(call):
        gradient = jax.grad(loss(call), (0, 1, 2, 3))
        forward = jax.jvp(gradient, tuple(given), tuple(given))
        reverse = jax.grad(lambda *x: sum(jnp.vdot(g, g) for g in gradient(*x)), (0, 1, 2, 3))
        return forward, reverse(*given)

    got, wanted = (jax.jit(lambda f=f: derivatives(f))() for f in (ours(implementation), dense))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-9)


@pytest.mark.parametrize("implementation", BACKENDS)
def test_an_empty_row(implementation):
    """Without a sink its log-sum-exp is -inf; with one, the sink. Output and gradients are 0."""
    query, key, value, sink = arrays(jnp.float32)
    settings = dict(valid_lens=jnp.zeros(B, jnp.int32), implementation=implementation)
    _, lse = regard.attend(query, key, value, return_lse=True, **settings)
    np.testing.assert_array_equal(lse, -np.inf)

    def pool(query, key, value, sink):
        return regard.attend(query, key, value, sink=sink, return_lse=True, **settings)

    (out, lse), pull = jax.vjp(pool, query, key, value, sink)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_allclose(lse, jnp.broadcast_to(sink[None, :, None], lse.shape), rtol=1e-6)
    for gradient in pull((jnp.ones_like(out), jnp.zeros_like(lse))):
        np.testing.assert_array_equal(gradient, 0)


def test_a_sink_may_be_a_python_integer():
    found = regard.attend(X, X, X, sink=1)
    np.testing.assert_array_equal(found, regard.attend(X, X, X, sink=1.0))


@pytest.mark.parametrize(("rank", "shape"), [(2, (T,)), (3, (B, T)), (4, (B, N, T))])
def test_shapes_and_dtypes(rank, shape):
    query, key, value, _ = (x.astype(jnp.bfloat16) for x in arrays(jnp.float32))
    if rank < 4:
        query, key, value = (x[:, :, 0] if rank == 3 else x[0, :, 0] for x in (query, key, value))
    found = regard.attend(
        query, key, value, return_weights=True, return_lse=True, return_lifted=True, sink=0.5
    )
    out, weights, lse, lifted = found
    assert out.dtype == jnp.bfloat16
    assert (lse.shape, lse.dtype, lifted.shape) == (shape, jnp.float32, ())
    shares = 1 - jnp.exp(jnp.float32(0.5) - lse)  # what the sink leaves to the keys
    np.testing.assert_allclose(weights.sum(-1), shares, rtol=1e-5)


@pytest.mark.parametrize("sizes", [(0, V), (S, 0), (0, 0)])
def test_no_keys_and_no_columns(sizes):
    keys, columns = sizes
    query, key = jnp.ones((B, T, 4)), jnp.ones((B, keys, 4))
    out, lse = regard.attend(query, key, jnp.ones((B, keys, columns)), return_lse=True)
    assert out.shape == (B, T, columns)
    np.testing.assert_allclose(lse, -np.inf if keys == 0 else 2.0 + np.log(keys))


def test_the_log_sum_exp_is_that_of_jax_nn():
    if "return_residual" not in inspect.signature(jax.nn.dot_product_attention).parameters:
        pytest.skip("this JAX has no return_residual")
    query, key, _, _ = arrays(jnp.float32)
    _, expected = jax.nn.dot_product_attention(query, key, key, return_residual=True)
    _, lse = regard.attend(query, key, key, return_lse=True)
    np.testing.assert_allclose(lse.swapaxes(1, 2), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("score", "cap"),
    [(regard.Dot(), CAP), (regard.Gaussian(1.3), None), (regard.Dot() + regard.Alibi(), None)],
    ids=["capped", "gaussian", "alibi"],
)
def test_a_map_and_a_summary_count_the_sink(score, cap):
    """Lifts of the last two lack a constant per query, which the sink is compared with."""
    query, key, _, sink = arrays()
    settings = dict(score=score, softcap=cap, mask=CAUSAL)
    alpha = regard.weights(query, key, sink=sink, **settings)
    with small_tiles():
        stats = regard.summarize(query, key, sink=sink, **settings)
        image = regard.attention_map(query, key, sink=sink, **settings)
    np.testing.assert_allclose(image, alpha, atol=1e-12)
    np.testing.assert_allclose(stats.key_total, alpha.sum(-2), atol=1e-12)
    np.testing.assert_allclose(stats.max_weight, alpha.max(-1), atol=1e-12)

    def total(query, sink):
        with small_tiles():
            return regard.summarize(query, key, sink=sink, **settings).key_total.sum()

    def expected(query, sink):
        return regard.weights(query, key, sink=sink, **settings).sum()

    slopes = (jax.grad(function, (0, 1))(query, sink) for function in (total, expected))
    for got, right in zip(*slopes, strict=True):
        np.testing.assert_allclose(got, right, atol=1e-10)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("implementation", ["blockwise", "pallas"])
@pytest.mark.parametrize("score", [regard.Gaussian(1.3), regard.Gaussian(np.linspace(0.8, 2.0, N))])
def test_a_lift_that_lacks_a_constant_per_query(score, implementation):
    """A sink and the log-sum-exp see what softmax does not: the Gaussian's -|q - c|^2 / 2 width^2,
    far from the origin; and its gradient, which is 0 in an empty row.
    """
    query, key, value, sink = arrays(jnp.float32)
    score, lens = jax.tree.map(jnp.float32, score), jnp.asarray(LENS, jnp.int32)

    def run(implementation):
        def pool(query, key, value, sink):
            settings = dict(valid_lens=lens, sink=sink, score=score, return_lse=True)
            out, lse = regard.attend(query, key, value, **settings, implementation=implementation)
            return out, jnp.where(lens[:, None, None] > 0, lse, 0.0)

        found, pull = jax.vjp(pool, query + 2, key + 2, value, sink)
        return found, pull(jax.tree.map(jnp.ones_like, found))

    expected = run("reference")
    with interpreted_kernels() if implementation == "pallas" else small_tiles():
        found = jax.jit(lambda: run(implementation))()
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5 * float(jnp.abs(other).max() + 1))
    np.testing.assert_array_equal(found[1][0][0], 0)


@pytest.mark.usefixtures("quick_compilation")
def test_the_kernels_have_sinks_and_second_derivatives():
    """In interpret mode, float32: gradient and forward over reverse of output and log-sum-exp."""
    query, key, value, sink = arrays(jnp.float32)
    cotangent = jnp.asarray(RNG.standard_normal((B, T, N, V)), jnp.float32)
    lens = jnp.asarray(LENS, jnp.int32)

    def derivatives(implementation):
        def loss(query, key, value, sink):
            out, lse = regard.attend(
                query,
                key,
                value,
                sink=sink,
                valid_lens=lens,
                return_lse=True,
                implementation=implementation,
            )
            return jnp.sum(out * cotangent) + jnp.sum(jnp.sin(lse))

        given = query, key, value, sink
        return jax.jit(lambda *x: jax.jvp(jax.grad(loss, (0, 1, 2, 3)), x, x))(*given)

    with interpreted_kernels():
        got = derivatives("pallas")
    for one, other in zip(
        jax.tree.leaves(got), jax.tree.leaves(derivatives("reference")), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=2e-5 * float(jnp.abs(other).max() + 1))


# ---------------------------------------------------------------------------------------------
# merge


def test_parts_of_the_keys_merge_to_the_whole():
    """Three parts, one of them empty for every query, a sink in one: output, lse and gradients."""
    query, key, value, sink = arrays()
    table = jnp.asarray(RNG.random((B, N, T, S)) < 0.3).at[:, :, 3].set(False)
    table = table.at[..., 10:15].set(False)
    cuts = [0, 10, 15, S]

    def whole(query, key, value, sink):
        return regard.attend(query, key, value, mask=table, sink=sink, return_lse=True)

    def merged(query, key, value, sink):
        parts = []
        for i, (low, high) in enumerate(itertools.pairwise(cuts)):
            settings = dict(mask=table[..., low:high], sink=sink if i == 1 else None)
            found = regard.attend(
                query, key[:, low:high], value[:, low:high], return_lse=True, **settings
            )
            parts.append(found)
        return regard.merge(*parts)

    def with_gradients(call):
        def loss(*given):
            out, lse = call(*given)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse)), (out, lse)

        return jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(query, key, value, sink)

    got, expected = with_gradients(merged), with_gradients(whole)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)


def test_empty_parts_merge_to_an_empty_row():
    empty = jnp.zeros((T, V)), jnp.full((T,), -jnp.inf)
    (out, lse), pull = jax.vjp(lambda a, b: regard.merge(a, b), empty, empty)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)
    for gradient in jax.tree.leaves(pull((out + 1, jnp.ones_like(lse)))):
        np.testing.assert_array_equal(gradient, 0)


# ---------------------------------------------------------------------------------------------
# Errors, and what is refused by name


X = jnp.ones((B, T, 4), jnp.float32)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (dict(softcap=-1.0), ValueError, r"softcap must be a positive number.*Got -1.0"),
        (dict(softcap=jnp.array(2.0)), ValueError, "known before the call is traced"),
        (dict(softcap=True), ValueError, "softcap must be a positive number"),
        (dict(softcap=2.0, normalize=regard.Uniform()), ValueError, "Uniform uses none"),
        (dict(sink=1.0, normalize=regard.Hard()), ValueError, r"sink: .* for normalize=Softmax\("),
        (dict(return_lse=True, normalize=regard.Sparsemax()), ValueError, "return_lse: a sink and"),
        (dict(sink=jnp.ones(3)), ValueError, r"each of the N = 1 heads. Got sink \[3\] for query"),
        (dict(sink=jnp.array(1)), TypeError, "sink must be floating point: it is a score"),
    ],
)
def test_bad_terms(settings, error, message):
    with pytest.raises(error, match=message):
        regard.attend(X, X, X, **settings)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((), "merge needs at least one"),
        (((X, X[..., 0]), (X[:1], X[:1, :, 0])), r"output \[1, 19, 4\] with lse \[1, 19\]. Fix"),
        (((X, X),), r"Got output \[2, 19, 4\] with lse \[2, 19, 4\]"),
    ],
)
def test_bad_parts(parts, message):
    with pytest.raises(ValueError, match=message):
        regard.merge(*parts)


def test_refusals_name_the_argument():
    with pytest.raises(NotImplementedError, match=r"cudnn: .* has no softcap="):
        regard.attend(X, X, X, softcap=2.0, implementation="cudnn")
    with pytest.raises(NotImplementedError, match="differentiated, which return_lse= needs"):
        regard.attend(X, X, X, return_lse=True, implementation="cudnn")
