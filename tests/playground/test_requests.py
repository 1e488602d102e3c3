"""Requests: good ones become checked values, and each refusal states its rule."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.playground.requests import Limits, Refusal, parse, read_attend, read_translate

LIMITS = Limits(sentences=3, characters=20, points=4, width=3)
PLANE = {"query": [[1, 2]], "key": [[0, 1], [2, 3]]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "must be JSON"),
        (b"{", "must be JSON"),
        (b"\xff\xfe", "must be JSON"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": -Infinity}', "Infinity is not JSON"),
        (b"[" * 100_000, "must be JSON"),
        (b"[1]", "must be a JSON object. Got list"),
        (b"null", "must be a JSON object. Got NoneType"),
        (b"9" * 10_000, "must be JSON"),
    ],
)
def test_a_body_that_is_not_a_json_object_is_refused(body, message):
    with pytest.raises(Refusal, match=message) as refused:
        parse(body)
    assert refused.value.status == 422


def test_a_text_may_stand_alone():
    assert read_translate({"text": "a b"}, LIMITS) == read_translate({"text": ["a b"]}, LIMITS)
    asked = read_translate({"text": ["a", ""], "beam": 8, "n_best": 3}, LIMITS)
    assert (asked.text, asked.beam, asked.n_best) == (("a", ""), 8, 3)
    assert (asked.weights, asked.next_words) == (False, 0)
    assert (asked.program, read_translate({"text": "a"}, LIMITS).program) == ((8, 8), (5, 1))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "text must be a list"),
        ({"text": []}, "text must be a list"),
        ({"text": [1]}, "text must be a list"),
        ({"text": {"a": 1}}, "text must be a list"),
        ({"text": ["a"] * 4}, "at most 3 strings. Got 4"),
        ({"text": ["a" * 21]}, "at most 20 characters. Got 21"),
        ({"text": ["\ud800"]}, "a lone surrogate"),
        ({"text": "a", "beam": 0}, "beam must be one of 1, 3, 5, 8. Got 0"),
        ({"text": "a", "beam": True}, "beam must be one of 1, 3, 5, 8. Got True"),
        ({"text": "a", "beam": 2.0}, "beam must be one of 1, 3, 5, 8. Got 2.0"),
        ({"text": "a", "beam": 3, "n_best": 4}, "n_best must be an integer from 1 to 3. Got 4"),
        ({"text": "a", "weights": 1}, "weights must be true or false. Got 1"),
        ({"text": "a", "next_words": 11}, "next_words must be an integer from 0 to 10. Got 11"),
        ({"text": ["a", "b"], "next_words": 1}, "for one text at a time. Got 2 texts"),
        ({"text": "a", "n_best": "1"}, "n_best must be an integer"),
        ({"text": "a", "best": 1}, "unknown fields: 'best'. Known: text, beam, n_best"),
    ],
)
def test_a_translation_that_breaks_a_rule_is_refused(given, message):
    with pytest.raises(Refusal, match=message) as refused:
        read_translate(given, LIMITS)
    assert refused.value.status == 422


def test_points_come_through_with_defaults():
    asked = read_attend(PLANE, LIMITS)
    assert (asked.query.shape, asked.key.shape, asked.value.shape) == ((1, 2), (2, 2), (2, 2))
    np.testing.assert_array_equal(asked.value, asked.key)
    assert (asked.score, asked.regime, asked.temperature) == ("dot", "softmax", 1.0)
    assert (asked.scaled, asked.causal, asked.valid_len) == (True, False, None)
    assert read_attend({**PLANE, "valid_len": 0}, LIMITS).valid_len == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": []}, "query must be a list of points"),
        ({"query": [1]}, "query must be a list of points"),
        ({"query": [[]]}, "1 to 3 numbers. Got 1 of 0"),
        ({"key": [[0, 0]] * 5}, "at most 4 points of 1 to 3 numbers. Got 5 of 2"),
        ({"query": [[1, 2, 3, 4]]}, "Got 1 of 4"),
        ({"query": [[1, "2"]]}, "query must be points of one width"),
        ({"query": [[1, True]]}, "query must be points of one width"),
        ({"query": [[1, 1e7]]}, "at most a million"),
        ({"query": [[1, 10**400]]}, "at most a million"),
        ({"key": [[1, 2], [3]]}, "key must be points of one width"),
        ({"query": [[1, 2, 3]]}, "query and key must have one width. Got 3 and 2"),
        ({"value": [[1.0]]}, "one value per key. Got 1 and 2"),
        ({"score": "cosine"}, "score must be one of dot, .* Got 'cosine'"),
        ({"score": ["dot"]}, "score must be one of"),
        ({"regime": None}, "regime must be one of softmax"),
        ({"temperature": 0}, "temperature must be a number from 0.001 to 1000.0. Got 0"),
        ({"temperature": 10**400}, "temperature must be a number .* Got 1000.*…"),
        ({"width": "1"}, "width must be a number"),
        ({"scaled": 1}, "scaled must be true or false. Got 1"),
        ({"valid_len": 3}, "valid_len must be an integer from 0 to 2. Got 3"),
        ({"map": True, "query": [[1]], "key": [[1], [2]]}, "map is for points of 2 numbers. Got 1"),
        ({"extra": 1, "more": 2}, "unknown fields: 'extra', 'more'"),
    ],
)
def test_points_that_break_a_rule_are_refused(change, message):
    with pytest.raises(Refusal, match=message) as refused:
        read_attend({**PLANE, **change}, LIMITS)
    assert refused.value.status == 422


@pytest.mark.parametrize(
    ("asked", "tokens", "message"),
    [
        ({}, [4097], "at most 4096 tokens in all. Got 4097"),
        ({}, [2048, 2049], "at most 4096 tokens in all. Got 4097"),
        ({"n_best": 2}, [1000], r"hypotheses × tokens² may be at most 4194304 .* Got 5000000\."),
        ({"weights": True}, [513], "texts whose weights are returned. Got 263169. Fix: shorter"),
        ({"weights": True, "n_best": 5}, [200, 200], "Got 400000"),
    ],
)
def test_work_that_needs_too_much_memory_is_refused(asked, tokens, message):
    request = read_translate({"text": ["a"] * len(tokens), **asked}, LIMITS)
    with pytest.raises(Refusal, match=message):
        request.check_size(tokens, LIMITS)


def test_ordinary_work_is_not_refused():
    many = read_translate({"text": ["a"] * 64, "weights": True}, Limits())
    many.check_size([40] * 64, Limits())
    page = read_translate({"text": "a", "weights": True, "n_best": 5, "next_words": 5}, LIMITS)
    page.check_size([150], LIMITS)
    read_translate({"text": "a"}, LIMITS).check_size([1200], LIMITS)


@pytest.mark.parametrize("name", ["\ud800", "x\udfff" * 50, "n" * 10_000])
def test_a_refusal_that_quotes_the_client_can_be_sent(name):
    with pytest.raises(Refusal, match="unknown fields") as refused:
        read_translate({"text": "a", name: 1}, LIMITS)
    refused.value.message.encode()
    assert len(refused.value.message) < 500


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = ("text", "beam", "n_best", "query", "key", "value", "score", "regime", "temperature")
FIELDS += ("width", "scaled", "valid_len", "causal", "weights", "next_words", "other")


@given(st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=5))
def test_any_json_is_read_or_refused(asked):
    body = parse(json.dumps(asked).encode())
    for read, given_body in ((read_translate, body), (read_attend, {**PLANE, **body})):
        refused = None
        try:
            read(given_body, LIMITS)
        except Refusal as refusal:
            refused = refusal
        assert refused is None or (refused.status == 422 and refused.message.endswith("."))
