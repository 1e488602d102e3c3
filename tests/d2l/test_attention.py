"""The book's attention layers: its shapes and parameter names, the oracle's numbers, and the
places where the book is wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from regard import d2l

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.sampled(2)]

RNG = jax.random.PRNGKey(3)


def draw(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.PRNGKey(seed), shape, dtype)


def as_float64(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


# ---------------------------------------------------------------------------------------------
# masked_softmax.


@pytest.mark.parametrize("lens", [[2, 3], [[1, 3], [2, 4]], [0, 4], [[0, 9], [1, 0]], None])
def test_masked_softmax_is_the_oracles(lens):
    scores = np.asarray(draw(2, 2, 4), np.float64)
    lens = None if lens is None else jnp.array(lens)
    weights = d2l.masked_softmax(jnp.asarray(scores), lens)
    may = oracle.allowed((2, 2, 4), valid_lens=None if lens is None else np.asarray(lens))
    expected = np.zeros_like(scores)
    for at in np.ndindex(2, 2):
        if may[at].any():
            expected[at][may[at]] = oracle.Softmax().weights(scores[at][may[at]])
    np.testing.assert_allclose(weights, expected, rtol=1e-14)
    assert weights.shape == (2, 2, 4)


def test_length_zero_is_no_weight_and_not_uniform_weights():
    weights = d2l.masked_softmax(draw(2, 3, 4), jnp.array([0, 4]))
    np.testing.assert_array_equal(weights[0], np.zeros((3, 4)))
    np.testing.assert_allclose(weights[1].sum(-1), np.ones(3), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_half_precision_has_no_nan(dtype):
    """−1e6 is −inf in float16, and a softmax over nothing but −inf is NaN."""
    weights = d2l.masked_softmax(draw(2, 3, 4, dtype=dtype), jnp.array([0, 2]))
    assert weights.dtype == dtype
    np.testing.assert_array_equal(weights[0].astype(np.float32), np.zeros((3, 4)))
    np.testing.assert_allclose(weights[1].astype(np.float32).sum(-1), np.ones(3), rtol=2**-7)


def test_scores_below_any_fill_value_keep_their_weight():
    weights = d2l.masked_softmax(jnp.full((1, 1, 3), -1e7, jnp.float32), jnp.array([2]))
    np.testing.assert_array_equal(weights[0, 0], [0.5, 0.5, 0.0])


# ---------------------------------------------------------------------------------------------
# The layers, as the chapter calls them.


def chapter(query_width):
    lens = jnp.array([2, 6])
    return draw(2, 1, query_width), draw(2, 10, 2, seed=1), draw(2, 10, 4, seed=2), lens


def test_dot_product_attention():
    queries, keys, values, lens = chapter(2)
    attention = d2l.DotProductAttention(dropout=0.5)
    (output, weights), variables = attention.init_with_output(RNG, queries, keys, values, lens)
    may = oracle.allowed((2, 1, 10), valid_lens=np.asarray(lens))
    expected = oracle.attend(queries, keys, values, score=oracle.Dot(), may=may)
    np.testing.assert_allclose(output, expected.out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weights, expected.weights, rtol=1e-5)
    np.testing.assert_array_equal(weights[~may], 0)
    assert output.shape == (2, 1, 4)
    assert variables == {}


def test_additive_attention():
    queries, keys, values, lens = chapter(20)
    attention = d2l.AdditiveAttention(num_hiddens=8, dropout=0.1)
    (output, weights), variables = attention.init_with_output(RNG, queries, keys, values, lens)
    params = variables["params"]
    assert jax.tree.map(jnp.shape, params) == {
        "W_q": {"kernel": (20, 8)},
        "W_k": {"kernel": (2, 8)},
        "w_v": {"kernel": (8, 1)},
    }
    expected = oracle.attend(
        queries,
        keys,
        values,
        score=additive_oracle(params),
        may=oracle.allowed((2, 1, 10), valid_lens=np.asarray(lens)),
    )
    np.testing.assert_allclose(output, expected.out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weights, expected.weights, rtol=1e-5)
    assert output.shape == (2, 1, 4)


def test_additive_attention_over_long_sequences_does_not_make_the_large_array():
    """512 queries and keys, with the weights: less than a sixth of B · T · S · h numbers."""
    attention, x = d2l.AdditiveAttention(64, 0.1), jax.ShapeDtypeStruct((2, 512, 16), jnp.float32)
    variables = jax.eval_shape(attention.init, RNG, x, x, x)
    program = jax.jit(attention.apply).lower(variables, x, x, x).compile()
    assert program.memory_analysis().temp_size_in_bytes < 4 * (2 * 512 * 512 * 64) / 6


def additive_oracle(params):
    params = as_float64(params)
    return oracle.Additive(
        {
            "query_kernel": params["W_q"]["kernel"],
            "key_kernel": params["W_k"]["kernel"],
            "vector": params["w_v"]["kernel"][:, 0],
        }
    )


@pytest.mark.parametrize(
    ("lens", "bias"),
    [([3, 2], False), ([[0, 1, 2, 3], [6, 5, 4, 9]], True), (None, False)],
)
def test_multi_head_attention(lens, bias):
    """Against one oracle head after another, from the book's parameters."""
    X, Y, Z = draw(2, 4, 100), draw(2, 6, 30, seed=1), draw(2, 6, 20, seed=2)
    lens = None if lens is None else jnp.array(lens)
    attention = d2l.MultiHeadAttention(100, 5, 0.5, bias)
    shapes = jax.eval_shape(attention.init, RNG, X, Y, Z, lens)
    numbers = np.random.default_rng(0)  # for the biases too, which start as zeros
    variables = jax.tree.map(
        lambda x: jnp.asarray(0.1 * numbers.normal(size=x.shape), x.dtype), shapes
    )
    output, weights = attention.apply(variables, X, Y, Z, lens)
    params = as_float64(variables["params"])
    assert set(params) == {"W_q", "W_k", "W_v", "W_o"}

    def dense(name, x):
        return np.asarray(x, np.float64) @ params[name]["kernel"] + params[name].get("bias", 0)

    q, k, v = dense("W_q", X), dense("W_k", Y), dense("W_v", Z)
    may = oracle.allowed((2, 4, 6), valid_lens=None if lens is None else np.asarray(lens))
    heads = [
        oracle.attend(
            *(x[..., n * 20 : n * 20 + 20] for x in (q, k, v)), score=oracle.Dot(), may=may
        )
        for n in range(5)
    ]
    expected = dense("W_o", np.concatenate([head.out for head in heads], axis=-1))
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=2e-5)
    assert output.shape == (2, 4, 100)
    # The heads of example 0, then those of example 1.
    by_head = np.stack([head.weights for head in heads], axis=1).reshape(10, 4, 6)
    np.testing.assert_allclose(weights, by_head, rtol=1e-4, atol=1e-6)


def test_the_heads_transposed_by_hand():
    """The book's two methods: heads onto the batch axis, and back."""
    attention, X = d2l.MultiHeadAttention(100, 5, 0.5), draw(2, 4, 100)
    heads = attention.transpose_qkv(X)
    assert heads.shape == (10, 4, 20)
    np.testing.assert_array_equal(heads[7], X[1, :, 40:60])
    np.testing.assert_array_equal(attention.transpose_output(heads), X)


def test_heads_that_do_not_divide():
    x = draw(2, 4, 100)
    with pytest.raises(ValueError, match="num_hiddens 100, num_heads 3"):
        d2l.MultiHeadAttention(100, 3, 0.5).init(RNG, x, x, x, None)


LAYERS = {
    "dot": d2l.DotProductAttention(0.5),
    "additive": d2l.AdditiveAttention(8, 0.5),
    "multi-head": d2l.MultiHeadAttention(8, 2, 0.5),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
class TestEveryLayer:
    X = draw(2, 5, 8)
    LENS = jnp.array([0, 3])

    def test_a_batch_of_no_examples(self, layer):
        variables = layer.init(RNG, self.X, self.X, self.X, None)
        output, weights = layer.apply(variables, *[self.X[:0]] * 3, self.LENS[:0])
        assert (output.shape, weights.shape) == ((0, 5, 8), (0, 5, 5))

    def test_an_empty_example_and_poisoned_padding(self, layer):
        """Output 0 and gradient 0 for length 0; NaN after the length reaches nothing."""
        variables = layer.init(RNG, self.X, self.X, self.X, self.LENS)
        poisoned = self.X.at[1, 3:].set(jnp.nan).at[0].set(jnp.nan)
        clean = self.X.at[0].set(0)

        def pooled(variables, keys):
            output, weights = layer.apply(variables, self.X, keys, keys, self.LENS)
            return (output**2).sum(), (output, weights)

        run = jax.jit(jax.value_and_grad(pooled, has_aux=True))
        (_, (output, weights)), grads = run(variables, clean)
        (_, (output_poisoned, weights_poisoned)), grads_poisoned = run(variables, poisoned)
        np.testing.assert_array_equal(output[0], np.zeros((5, 8)))
        np.testing.assert_array_equal(weights[..., 3:], 0)
        np.testing.assert_array_equal(output, output_poisoned)
        np.testing.assert_array_equal(weights, weights_poisoned)
        jax.tree.map(np.testing.assert_array_equal, grads, grads_poisoned)

    def test_dropout_is_on_the_weights_in_training_only(self, layer):
        variables = layer.init(RNG, self.X, self.X, self.X, None)
        args = variables, self.X, self.X, self.X, None
        plain, weights = layer.apply(*args)
        np.testing.assert_array_equal(plain, layer.apply(*args, training=False)[0])
        rngs = {"dropout": jax.random.PRNGKey(1)}
        dropped, weights_before = layer.apply(*args, training=True, rngs=rngs)
        assert not np.allclose(plain, dropped)
        np.testing.assert_array_equal(weights, weights_before)
        again, _ = layer.apply(*args, training=True, rngs=rngs)
        np.testing.assert_array_equal(dropped, again)

    def test_dropout_keeps_the_mean(self, layer):
        variables = layer.init(RNG, self.X, self.X, self.X, None)
        args = variables, self.X, self.X, self.X, None
        rngs = jax.random.split(jax.random.PRNGKey(1), 1024)
        drop = jax.jit(
            jax.vmap(lambda rng: layer.apply(*args, training=True, rngs={"dropout": rng})[0])
        )
        found = drop(rngs)
        noise = np.asarray(found.std(0)) / np.sqrt(1024)
        difference = np.asarray(found.mean(0)) - np.asarray(layer.apply(*args)[0])
        assert np.abs(difference / noise).max() < 5.5  # of 80 numbers, about normal

    def test_dropout_without_a_key_says_what_to_write(self, layer):
        variables = layer.init(RNG, self.X, self.X, self.X, None)
        with pytest.raises(ValueError, match=r'dropout=0\.5 .*rngs=\{"dropout": key\}'):
            layer.apply(variables, self.X, self.X, self.X, None, training=True)

    def test_no_dropout_needs_no_key(self, layer):
        calm = layer.clone(dropout=0)
        variables = calm.init(RNG, self.X, self.X, self.X, None)
        args = variables, self.X, self.X, self.X, None
        np.testing.assert_array_equal(calm.apply(*args, training=True)[0], calm.apply(*args)[0])


# ---------------------------------------------------------------------------------------------
# Positional encoding.


@pytest.mark.parametrize("width", [32, 5, 1])
def test_positional_encoding(width):
    layer = d2l.PositionalEncoding(width, dropout=0.1)
    X = draw(2, 60, width)
    out, sown = layer.apply({}, X, mutable="intermediates")
    P = np.zeros((60, width))
    for i in range(60):
        for j in range(width):
            wave = np.sin if j % 2 == 0 else np.cos
            P[i, j] = wave(i / 10000 ** ((j - j % 2) / width))
    np.testing.assert_allclose(out, np.asarray(X) + P, rtol=1e-5, atol=1e-6)
    assert sown["intermediates"]["P"][0].shape == (1, 1000, width)
    ones = jnp.ones((1, 60, width), jnp.int32)  # integers too get the sines, not 0
    np.testing.assert_allclose(layer.apply({}, ones)[0], 1 + P, rtol=1e-5, atol=1e-6)


def test_positional_encoding_of_too_long_a_sequence():
    with pytest.raises(ValueError, match=r"X \[1, 9, 2\], max_len 8"):
        d2l.PositionalEncoding(2, 0, max_len=8).apply({}, draw(1, 9, 2))
