"""What may be asked of the API: JSON in, checked values out, or a refusal that says the rule."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.playground.limits import Limits

BEAM = 5  # unless told otherwise
SCORES = ("dot", "gaussian", "bilinear", "additive")
REGIMES = ("softmax", "sparsemax", "kernel", "cone", "hard", "uniform")


class Refusal(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: one sentence for the caller.
        retry: seconds after which to try again; None: never.
    """

    def __init__(self, status: int, message: str, retry: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.retry = status, message, retry


@dataclass(frozen=True)
class TranslateRequest:
    """Texts to translate. `beam` hypotheses are kept alive, `n_best` of them returned."""

    text: tuple[str, ...]
    beam: int = BEAM
    n_best: int = 1


@dataclass(frozen=True)
class AttendRequest:
    """Points in space: who looks at whom, and what comes of it."""

    query: np.ndarray  # [T, D]
    key: np.ndarray  # [S, D]
    value: np.ndarray  # [S, V]
    score: str
    regime: str
    temperature: float
    width: float  # of the Gaussian
    scaled: bool  # the dot product's 1/sqrt(d)
    valid_len: int | None
    causal: bool


def parse(body: bytes) -> dict[str, Any]:
    """A JSON object."""
    try:
        given = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Refusal(422, f"the body must be JSON: {error}.") from None
    if not isinstance(given, dict):
        raise Refusal(422, f"the body must be a JSON object. Got {type(given).__name__}.")
    return given


def read_translate(given: dict[str, Any], limits: Limits) -> TranslateRequest:
    """Checks the body of /api/translate."""
    _known(given, ("text", "beam", "n_best"))
    text = given.get("text")
    if isinstance(text, str):
        text = [text]
    if not isinstance(text, list) or not text or not all(isinstance(one, str) for one in text):
        raise Refusal(422, "text must be a list of one or more strings.")
    if len(text) > limits.sentences:
        raise Refusal(422, f"text has at most {limits.sentences} strings. Got {len(text)}.")
    longest = max(map(len, text))
    if longest > limits.characters:
        raise Refusal(422, f"a text has at most {limits.characters} characters. Got {longest}.")
    if any("\ud800" <= letter <= "\udfff" for one in text for letter in one):
        raise Refusal(422, "text must be Unicode: it has half of a surrogate pair.")
    beam = _integer(given, "beam", min(BEAM, limits.beam), 1, limits.beam)
    return TranslateRequest(tuple(text), beam, _integer(given, "n_best", 1, 1, beam))


def read_attend(given: dict[str, Any], limits: Limits) -> AttendRequest:
    """Checks the body of /api/attend."""
    fields = ("query", "key", "value", "score", "regime", "temperature", "width", "scaled")
    _known(given, (*fields, "valid_len", "causal"))
    query = _points(given, "query", limits)
    key = _points(given, "key", limits)
    value = _points(given, "value", limits) if "value" in given else key
    if query.shape[1] != key.shape[1]:
        raise Refusal(
            422, f"query and key must have one width. Got {query.shape[1]} and {key.shape[1]}."
        )
    if len(value) != len(key):
        raise Refusal(422, f"there is one value per key. Got {len(value)} and {len(key)}.")
    valid_len = None
    if given.get("valid_len") is not None:
        valid_len = _integer(given, "valid_len", 0, 0, len(key))
    return AttendRequest(
        query,
        key,
        value,
        _choice(given, "score", SCORES),
        _choice(given, "regime", REGIMES),
        _number(given, "temperature", 1.0, 1e-3, 1e3),
        _number(given, "width", 1.0, 1e-3, 1e3),
        _boolean(given, "scaled", True),
        valid_len,
        _boolean(given, "causal", False),
    )


def _known(given: dict[str, Any], names: Sequence[str]) -> None:
    unknown = sorted(str(name) for name in given if name not in names)
    if unknown:
        raise Refusal(422, f"unknown fields: {', '.join(unknown)}. Known: {', '.join(names)}.")


def _integer(given: dict[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise Refusal(422, f"{name} must be an integer from {low} to {high}. Got {_short(value)}.")
    return value


def _number(given: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = given.get(name, default)
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not low <= value <= high:
        raise Refusal(422, f"{name} must be a number from {low} to {high}. Got {_short(value)}.")
    return float(value)


def _boolean(given: dict[str, Any], name: str, default: bool) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise Refusal(422, f"{name} must be true or false. Got {_short(value)}.")
    return value


def _choice(given: dict[str, Any], name: str, known: Sequence[str]) -> str:
    value = given.get(name, known[0])
    if value not in known:
        raise Refusal(422, f"{name} must be one of {', '.join(known)}. Got {_short(value)}.")
    return str(value)


def _points(given: dict[str, Any], name: str, limits: Limits) -> np.ndarray:
    """A list of equally long lists of numbers -> [count, width]."""
    rows = given.get(name)
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) for row in rows):
        raise Refusal(422, f"{name} must be a list of points, each a list of numbers.")
    width = len(rows[0])
    if len(rows) > limits.points or not 1 <= width <= limits.width:
        raise Refusal(
            422,
            f"{name} has at most {limits.points} points of 1 to {limits.width} numbers. "
            f"Got {len(rows)} of {width}.",
        )
    for row in rows:
        good = all(
            isinstance(x, int | float) and not isinstance(x, bool) and abs(x) <= 1e6 for x in row
        )
        if len(row) != width or not good:
            raise Refusal(
                422, f"{name} must be points of one width, their numbers at most a million."
            )
    return np.array(rows, np.float32)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _short(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "a number that is not finite"
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"
