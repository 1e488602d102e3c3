"""The page's plane: the API's answers equal the library's for the arrays without padding."""

import base64
import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest

import oracle
import regard
from regard.playground import attend_api
from regard.playground.requests import REGIMES, SCORES, Limits, read_attend

pytestmark = pytest.mark.sampled(4)


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def asked(rng, T=3, S=5, D=2, V=2, **settings):
    shapes = {"query": (T, D), "key": (S, D), "value": (S, V)}
    body = {name: rng.standard_normal(shape).tolist() for name, shape in shapes.items()}
    return read_attend(json.loads(json.dumps(body | settings)), Limits())


def score_by_definition(request):
    """The score on points as they are, its temperature where its definition has it."""
    width, cold = request.query.shape[1], 1.0 / request.temperature
    if request.score == "dot":
        return oracle.Dot({"scale": cold * (width**-0.5 if request.scaled else 1.0)})
    if request.score == "gaussian":
        return oracle.Gaussian({"width": request.width * request.temperature**0.5})
    draw = np.random.default_rng(0)  # the API's own kernels are drawn like this
    if request.score == "bilinear":
        return oracle.Bilinear({"kernel": draw.standard_normal((width, width)) / width * cold})
    query_kernel, key_kernel = draw.standard_normal((2, width, attend_api.HIDDEN))
    vector = draw.standard_normal(attend_api.HIDDEN) * cold
    return oracle.Additive(
        {"query_kernel": query_kernel, "key_kernel": key_kernel, "vector": vector}
    )


def positive(scores):
    return np.maximum(0.0, 1.0 + scores)


REGIMES_BY_DEFINITION = {
    "softmax": oracle.Softmax(),
    "sparsemax": oracle.Sparsemax(),
    "kernel": oracle.Kernel(positive, None),
    "cone": oracle.Cone(positive, None),
    "hard": oracle.Hard(),
    "uniform": oracle.Uniform(),
}


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("score", SCORES)
def test_answers_equal_the_definition(rng, score, regime):
    cases = ({"valid_len": 3}, {"causal": True, "temperature": 0.5}, {"width": 0.7, "D": 1})
    for settings in cases * 3:
        request = asked(rng, score=score, regime=regime, **settings)
        answer = attend_api.answer(request)
        may = np.tri(3, 5, dtype=bool) if request.causal else np.ones((3, 5), bool)
        if request.valid_len is not None:
            may &= np.arange(5) < request.valid_len
        points = (x.astype(np.float64) for x in (request.query, request.key, request.value))
        query, key, value = points
        definition = score_by_definition(request)
        regime_ = REGIMES_BY_DEFINITION[regime]
        expected = oracle.attend(query, key, value, score=definition, may=may, regime=regime_)
        close = dict(rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(answer["weights"], expected.weights, **close)
        np.testing.assert_allclose(answer["output"], expected.out, **close)
        scores = oracle.scores(query, key, score=definition)
        np.testing.assert_allclose(answer["scores"], scores, **close)


@pytest.mark.parametrize("regime", REGIMES)
def test_answers_equal_attend_without_padding(rng, regime):
    request = asked(rng, T=8, S=8, score="gaussian", regime=regime, valid_len=6)
    answer = attend_api.answer(request)
    out = regard.attend(
        request.query,
        request.key,
        request.value,
        score=regard.Gaussian(1.0),
        normalize=attend_api.NORMALIZERS[regime],
        valid_lens=np.int32(6),
    )
    np.testing.assert_allclose(answer["output"], out, rtol=1e-4, atol=1e-5)


def test_scaled_divides_by_the_root_of_the_width(rng):
    request = asked(rng, T=1, S=8, D=256)
    bare = dataclasses.replace(request, scaled=False)
    scaled, plain = (np.array(attend_api.answer(one)["scores"]) for one in (request, bare))
    np.testing.assert_allclose(plain, 16 * scaled, rtol=1e-4)


def test_no_valid_key_gives_zeros(rng):
    answer = attend_api.answer(asked(rng, valid_len=0))
    assert np.abs(answer["weights"]).max() == 0
    assert np.abs(answer["output"]).max() == 0
    assert answer["hull"] == []


@pytest.mark.slow
def test_the_number_of_programs_has_a_bound(rng):
    """Thirty-two programs at most, half of them for maps, whatever clients ask."""
    attend_api._program.clear_cache()
    compiled = []

    def listen(name, *_, **__):
        if name == "/jax/core/compile/backend_compile_duration":
            compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        sizes = (1, 2, 7, 8, 9, 33, 64)
        regimes, scores = itertools.cycle(REGIMES), itertools.cycle(SCORES)
        for T, S, D, V in itertools.product(sizes, sizes, (1, 2, 3, 100), (1, 2, 3)):
            settings = dict(score=next(scores), regime=next(regimes), causal=bool(T % 2))
            answer = attend_api.answer(
                asked(rng, T, S, D, V, valid_len=S // 2, map=D == 2, **settings)
            )
            assert np.shape(answer["weights"]) == np.shape(answer["scores"]) == (T, S)
            assert np.shape(answer["output"]) == (T, V)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert attend_api._program._cache_size() <= 32
    assert len(compiled) <= 32, "nothing else is compiled either"


@pytest.mark.parametrize("score", SCORES)
def test_the_map_says_which_key_wins(rng, score):
    request = asked(rng, S=5, score=score, valid_len=4, map=True)
    found = attend_api.answer(request)["map"]
    winner, share = (
        np.frombuffer(base64.b64decode(found[name]), np.uint8).reshape(found["size"], found["size"])
        for name in ("winner", "share")
    )
    for row, column in [(0, 0), (3, 30), (16, 15), (31, 31)]:
        place = np.array([[column + 0.5, found["size"] - row - 0.5]]) / found["size"] * 10 - 5
        single = dataclasses.replace(request, query=place)
        (weights,) = attend_api.attended(single)[1]
        assert winner[row, column] == weights.argmax() < 4
        assert share[row, column] == pytest.approx(255 * weights.max(), abs=1)


def test_the_map_shows_no_winner_where_all_are_equal(rng):
    found = attend_api.answer(asked(rng, regime="uniform", map=True))["map"]
    assert set(base64.b64decode(found["winner"])) == {255}
    one = attend_api.answer(asked(rng, regime="uniform", valid_len=1, map=True))["map"]
    assert set(base64.b64decode(one["winner"])) == {0}
    none = attend_api.answer(asked(rng, valid_len=0, map=True))["map"]
    assert set(base64.b64decode(none["winner"])) == {255}


def test_extreme_inputs_give_valid_json():
    for score, far in itertools.product(SCORES, (1e6, -1e6)):
        body = {"query": [[far, far]], "key": [[far, -far], [far, far]], "score": score}
        request = read_attend({**body, "temperature": 1e-3, "width": 1e-3}, Limits())
        json.dumps(attend_api.answer(request), allow_nan=False)


# The hull ----------------------------------------------------------------------------------------


def outside(corners, point):
    """How far a point is outside of a polygon that runs counterclockwise; 0: inside."""
    corners = np.asarray(corners)
    edges = np.roll(corners, -1, axis=0) - corners
    to_point = np.asarray(point) - corners
    turn = edges[:, 0] * to_point[:, 1] - edges[:, 1] * to_point[:, 0]
    return max(0.0, float(-(turn / np.linalg.norm(edges, axis=1)).min()))


@pytest.mark.parametrize("count", [3, 5, 40])
def test_the_hull_is_the_smallest_that_holds_all_values(rng, count):
    values = rng.standard_normal((count, 2))
    corners = attend_api.hull(values, "softmax")
    assert {tuple(corner) for corner in corners} <= {tuple(value) for value in values}
    assert max(outside(corners, value) for value in values) < 1e-12
    for left_out in corners:  # without any one of its corners, that corner would be outside
        rest = [corner for corner in corners if corner != left_out]
        assert len(rest) < 3 or outside(rest, left_out) > 0


@pytest.mark.parametrize(
    ("values", "corners"),
    [
        ([[0, 0], [0, 0]], [[0, 0]]),
        ([[1, 0], [0, 0]], [[0, 0], [1, 0]]),
        ([[0, 0], [1, 1], [2, 2]], [[0, 0], [2, 2]]),
        ([[0, 0], [1, 0], [0.2, 0.2], [0, 1]], [[0, 0], [1, 0], [0, 1]]),
    ],
)
def test_hulls_that_are_known(values, corners):
    assert attend_api.hull(np.array(values, np.float32), "softmax") == pytest.approx(
        np.array(corners)
    )


@pytest.mark.parametrize("regime", REGIMES)
def test_outputs_lie_in_their_hull(rng, regime):
    for _ in range(5):
        request = asked(rng, T=6, S=5, regime=regime, valid_len=4)
        answer = attend_api.answer(request)
        if regime == "cone":  # a cone goes on: its picture ends somewhere, its directions do not
            answer["output"] = [[x / 100, y / 100] for x, y in answer["output"]]
        assert max(outside(answer["hull"], point) for point in answer["output"]) < 1e-4
