"""What may be asked: good requests come through as values, and each refusal says its rule."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.playground.limits import Limits
from regard.playground.requests import Refusal, parse, read_attend, read_translate

LIMITS = Limits(sentences=3, characters=20, beam=4, points=4, width=3)
PLANE = {"query": [[1, 2]], "key": [[0, 1], [2, 3]]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "must be JSON"),
        (b"{", "must be JSON"),
        (b"\xff\xfe", "must be JSON"),
        (b'{"a": NaN}', "NaN is no JSON"),
        (b'{"a": -Infinity}', "Infinity is no JSON"),
        (b"[" * 100_000, "must be JSON"),
        (b"[1]", "must be a JSON object. Got list"),
        (b"null", "must be a JSON object. Got NoneType"),
        (b"9" * 10_000, "must be JSON"),
    ],
)
def test_what_is_no_json_object_is_refused(body, message):
    with pytest.raises(Refusal, match=message) as refused:
        parse(body)
    assert refused.value.status == 422


def test_a_text_may_stand_alone():
    assert read_translate({"text": "a b"}, LIMITS) == read_translate({"text": ["a b"]}, LIMITS)
    asked = read_translate({"text": ["a", ""], "beam": 4, "n_best": 3}, LIMITS)
    assert (asked.text, asked.beam, asked.n_best) == (("a", ""), 4, 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "text must be a list"),
        ({"text": []}, "text must be a list"),
        ({"text": [1]}, "text must be a list"),
        ({"text": {"a": 1}}, "text must be a list"),
        ({"text": ["a"] * 4}, "at most 3 strings. Got 4"),
        ({"text": ["a" * 21]}, "at most 20 characters. Got 21"),
        ({"text": ["\ud800"]}, "half of a surrogate pair"),
        ({"text": "a", "beam": 0}, "beam must be an integer from 1 to 4. Got 0"),
        ({"text": "a", "beam": True}, "beam must be an integer from 1 to 4. Got True"),
        ({"text": "a", "beam": 2.0}, "beam must be an integer from 1 to 4. Got 2.0"),
        ({"text": "a", "beam": 2, "n_best": 3}, "n_best must be an integer from 1 to 2. Got 3"),
        ({"text": "a", "n_best": "1"}, "n_best must be an integer"),
        ({"text": "a", "best": 1}, "unknown fields: best. Known: text, beam, n_best"),
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
        ({"extra": 1, "more": 2}, "unknown fields: extra, more"),
    ],
)
def test_points_that_break_a_rule_are_refused(change, message):
    with pytest.raises(Refusal, match=message) as refused:
        read_attend({**PLANE, **change}, LIMITS)
    assert refused.value.status == 422


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
FIELDS += ("width", "scaled", "valid_len", "causal", "other")


@given(st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=5))
def test_whatever_comes_is_read_or_refused(asked):
    body = parse(json.dumps(asked).encode())
    for read, given_body in ((read_translate, body), (read_attend, {**PLANE, **body})):
        refused = None
        try:
            read(given_body, LIMITS)
        except Refusal as refusal:
            refused = refusal
        assert refused is None or (refused.status == 422 and refused.message.endswith("."))
