"""The oracle against itself: its hand-written gradients against central differences of its
forward.
"""

import numpy as np
import pytest

import oracle

B, T, N, K, S, V = 2, 3, 4, 2, 5, 3

SCORES = {
    "dot": (4, 4, lambda draw: oracle.Dot()),
    "scaled dot": (4, 4, lambda draw: oracle.Dot({"scale": np.float64(0.7)})),
    "gaussian": (4, 4, lambda draw: oracle.Gaussian({"width": 1 + draw(N) ** 2})),
    "bilinear": (4, 3, lambda draw: oracle.Bilinear({"kernel": draw(4, 3)})),
    "additive": (
        4,
        3,
        lambda draw: oracle.Additive(
            {"query_kernel": draw(4, 6), "key_kernel": draw(N, 3, 6), "vector": draw(6)}
        ),
    ),
    "additive, projected": (4, 4, lambda draw: oracle.Additive({"vector": draw(N, 4)})),
    "manhattan": (4, 4, lambda draw: oracle.Manhattan({"rate": draw(4)})),
}
REGIMES = {
    "softmax": oracle.Softmax(),
    "sparsemax": oracle.Sparsemax(),
    "kernel": oracle.Kernel(np.exp, np.exp),
    "cone": oracle.Cone(np.square, lambda a: 2 * a),
    "uniform": oracle.Uniform(),
    "hard": oracle.Hard(),
}


@pytest.mark.parametrize(
    ("score_name", "regime_name"),
    [(s, "softmax") for s in SCORES] + [("bilinear", r) for r in REGIMES],
)
def test_gradients_are_the_slopes_of_the_forward(score_name, regime_name):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape)  # noqa: E731
    Hq, Hk, make = SCORES[score_name]
    score = make(draw)
    inputs = {
        "query": draw(B, T, N, Hq),
        "key": draw(B, S, K, Hk),
        "value": draw(B, S, K, V),
        "bias": draw(B, 1, T, S),
        **score.parameters,
    }
    fixed = {
        "regime": REGIMES[regime_name],
        "may": oracle.allowed((B, N, T, S), valid_lens=[S, 3], causal="end"),
        "keep": rng.random((B, N, T, S)) < 0.8,
        "rate": 0.2,
    }
    cotangent = draw(B, T, N, V)

    def call(function, values, *first):
        parameters = {name: values[name] for name in score.parameters}
        args = [values[name] for name in ("query", "key", "value")]
        return function(*first, *args, bias=values["bias"], score=type(score)(parameters), **fixed)

    found = call(oracle.gradients, inputs, cotangent)
    assert set(found) == set(inputs)
    step = 1e-6
    for name, x in inputs.items():
        direction = rng.standard_normal(np.shape(x))
        up, down = (
            np.sum(
                cotangent * call(oracle.attend, {**inputs, name: x + sign * step * direction}).out
            )
            for sign in (1, -1)
        )
        np.testing.assert_allclose(
            np.sum(found[name] * direction),
            (up - down) / (2 * step),
            rtol=1e-7,
            atol=1e-8,
            err_msg=name,
        )


def test_a_row_by_hand():
    # Scores ln 1, ln 2, ln 5 and one key out of sight: weights 1/8, 2/8, 5/8, 0.
    bias = np.log([[1.0, 2.0, 5.0, 9.0]])
    may = np.array([[True, True, True, False]])
    ones, value = np.zeros((4, 1)), np.arange(4.0)[:, None]
    pooled = oracle.attend(np.zeros((1, 1)), ones, value, score=oracle.Dot(), may=may, bias=bias)
    np.testing.assert_allclose(pooled.weights, [[1 / 8, 2 / 8, 5 / 8, 0]], rtol=1e-15)
    np.testing.assert_allclose(pooled.out, [[1 * 2 / 8 + 2 * 5 / 8]], rtol=1e-15)


def test_sparsemax_by_hand():
    # Threshold of (1.0, 0.8, -5): support two, (1.8 - 1)/2 = 0.4.
    np.testing.assert_allclose(
        oracle.Sparsemax().weights(np.array([0.8, 1.0, -5.0])), [0.4, 0.6, 0.0], rtol=1e-15
    )


def test_masks_by_hand():
    np.testing.assert_array_equal(
        oracle.allowed((2, 4), causal="end"), np.array([[1, 1, 1, 0], [1, 1, 1, 1]], bool)
    )
    np.testing.assert_array_equal(
        oracle.allowed((2, 4), causal="start"), np.array([[1, 0, 0, 0], [1, 1, 0, 0]], bool)
    )
    np.testing.assert_array_equal(
        oracle.allowed((2, 4), window=(1, 0, "end")), np.array([[0, 1, 1, 0], [0, 0, 1, 1]], bool)
    )
    np.testing.assert_array_equal(
        oracle.allowed((2, 2, 3), valid_lens=[1, 0], causal="end"),
        np.array([[[1, 0, 0], [1, 0, 0]], [[0, 0, 0], [0, 0, 0]]], bool),
    )
    np.testing.assert_array_equal(
        oracle.allowed((2, 3), segments=([0, 1], [1, 0, 1]), valid_lens=[3, 2]),
        np.array([[0, 1, 0], [1, 0, 0]], bool),
    )
