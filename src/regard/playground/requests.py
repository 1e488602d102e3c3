"""What a client may ask of the API: the limits, and the parsers that check a JSON body.

A parser returns checked values, or raises a `Refusal` that states the rule that was broken.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

BEAMS, BEAM = (1, 3, 5, 8), 5  # the beam widths that are offered, and the default
SCORES = ("dot", "gaussian", "bilinear", "additive")
REGIMES = ("softmax", "sparsemax", "kernel", "cone", "hard", "uniform")


@dataclass(frozen=True)
class Limits:
    """Bounds on requests and on the server's work; in brackets the HTTP status of the refusal.

    Attributes:
        body: bytes of one request (413).
        sentences: texts in one request (422).
        characters: of one text (422).
        tokens: of all texts of one request together, as the model reads them (422); also the most
            that one batch takes.
        cells: source tokens squared x hypotheses, summed over a request's texts (422): a measure
            of the translator's memory, since every hypothesis has an alignment.
        weight_cells: the same where the weights are returned (422).
        next_words: alternatives listed for each word (422).
        layer_tokens: of the source, and of the target, whose layers are shown (422).
        points: queries, and keys, of one attend request (422).
        width: numbers of one query or key (422).
        attends: attend and layers requests that run or wait (429).
        queue: sentences that run or wait (429).
        seconds: from the request to its answer (503).
        upload: seconds in which a request's head, and then its body, must arrive (408).
        connections: open at one time; a further one is closed at once.
        batch: sentences of one beam search.
        gather: seconds that an idle server waits for further requests before it starts a search.
    """

    body: int = 256 * 1024
    sentences: int = 64
    characters: int = 2000
    tokens: int = 4096
    cells: int = 4 * 2**20
    weight_cells: int = 2**18
    next_words: int = 10
    layer_tokens: int = 95
    points: int = 64
    width: int = 512
    attends: int = 64
    queue: int = 512
    seconds: float = 30.0
    upload: float = 10.0
    connections: int = 768
    batch: int = 64
    gather: float = 0.004


class Refusal(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: one sentence for the caller.
        retry: seconds after which to try again; None: never.
    """

    def __init__(self, status: int, message: str, retry: int | None = None) -> None:
        message = message.encode("utf-8", "backslashreplace").decode()  # it may quote a surrogate
        super().__init__(message)
        self.status, self.message, self.retry = status, message, retry


@dataclass(frozen=True)
class TranslateRequest:
    """Texts to translate.

    Attributes:
        text: the texts.
        beam: hypotheses that the search keeps.
        n_best: hypotheses that are returned.
        weights: whether each hypothesis comes with its alignment.
        next_words: for each word, how many of the most probable next words are returned.
    """

    text: tuple[str, ...]
    beam: int = BEAM
    n_best: int = 1
    weights: bool = False
    next_words: int = 0

    @property
    def program(self) -> tuple[int, int]:
        """Beam and n_best of the compiled search that serves this request.

        n_best is 1 or the whole beam, so that few programs are compiled. The two stay separate
        because a search for the best one stops earlier and may find something else, and an answer
        must not depend on which requests share a batch.
        """
        return self.beam, 1 if self.n_best == 1 else self.beam

    def check_size(self, tokens: Sequence[int], limits: Limits) -> None:
        """Refuses what would take too much memory, given each text's number of tokens."""
        if sum(tokens) > limits.tokens:
            raise Refusal(
                422, f"the texts have at most {limits.tokens} tokens in all. Got {sum(tokens)}."
            )
        most = limits.weight_cells if self.weights else limits.cells
        cells = self.program[1] * sum(count * count for count in tokens)
        if cells > most:
            returned = " whose weights are returned" if self.weights else ""
            raise Refusal(
                422,
                f"hypotheses × tokens² may be at most {most} for texts{returned}. Got {cells}. "
                "Fix: shorter texts, or n_best 1.",
            )


@dataclass(frozen=True)
class LayersRequest:
    """A text and its translation, whose attention in every layer and head is wanted."""

    source: str
    target: str


@dataclass(frozen=True)
class AttendRequest:
    """Queries, keys and values as points, and the attention to compute between them."""

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
    map: bool = False  # whether to return which key wins where


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
    _known(given, ("text", "beam", "n_best", "weights", "next_words"))
    text = given.get("text")
    if isinstance(text, str):
        text = [text]
    if not isinstance(text, list) or not text or not all(isinstance(one, str) for one in text):
        raise Refusal(422, "text must be a list of one or more strings.")
    if len(text) > limits.sentences:
        raise Refusal(422, f"text has at most {limits.sentences} strings. Got {len(text)}.")
    _check_texts(text, limits)
    beam = _choice(given, "beam", BEAMS, BEAM)
    next_words = _integer(given, "next_words", 0, 0, limits.next_words)
    if next_words and len(text) > 1:
        raise Refusal(422, f"next_words is for one text at a time. Got {len(text)} texts.")
    return TranslateRequest(
        tuple(text),
        beam,
        _integer(given, "n_best", 1, 1, beam),
        _boolean(given, "weights", False),
        next_words,
    )


def read_layers(given: dict[str, Any], limits: Limits) -> LayersRequest:
    """Checks the body of /api/layers."""
    _known(given, ("source", "target"))
    source, target = given.get("source"), given.get("target")
    if not (isinstance(source, str) and isinstance(target, str)):
        raise Refusal(422, "source and target must be strings.")
    _check_texts((source, target), limits)
    return LayersRequest(source, target)


def read_attend(given: dict[str, Any], limits: Limits) -> AttendRequest:
    """Checks the body of /api/attend."""
    fields = ("query", "key", "value", "score", "regime", "temperature", "width", "scaled")
    _known(given, (*fields, "valid_len", "causal", "map"))
    query = _points(given, "query", limits)
    key = _points(given, "key", limits)
    value = _points(given, "value", limits) if "value" in given else key
    if query.shape[1] != key.shape[1]:
        raise Refusal(
            422, f"query and key must have one width. Got {query.shape[1]} and {key.shape[1]}."
        )
    if len(value) != len(key):
        raise Refusal(422, f"there is one value per key. Got {len(value)} and {len(key)}.")
    with_map = _boolean(given, "map", False)
    if with_map and key.shape[1] != 2:
        raise Refusal(422, f"map is for points of 2 numbers. Got {key.shape[1]}.")
    valid_len = None
    if given.get("valid_len") is not None:
        valid_len = _integer(given, "valid_len", 0, 0, len(key))
    return AttendRequest(
        query,
        key,
        value,
        _choice(given, "score", SCORES, SCORES[0]),
        _choice(given, "regime", REGIMES, REGIMES[0]),
        _number(given, "temperature", 1.0, 1e-3, 1e3),
        _number(given, "width", 1.0, 1e-3, 1e3),
        _boolean(given, "scaled", True),
        valid_len,
        _boolean(given, "causal", False),
        with_map,
    )


def _check_texts(texts: Sequence[str], limits: Limits) -> None:
    longest = max(map(len, texts))
    if longest > limits.characters:
        raise Refusal(422, f"a text has at most {limits.characters} characters. Got {longest}.")
    if any("\ud800" <= letter <= "\udfff" for one in texts for letter in one):
        raise Refusal(422, "text must be Unicode: it has a lone surrogate.")


def _known(given: dict[str, Any], names: Sequence[str]) -> None:
    unknown = sorted(name for name in given if name not in names)
    if unknown:
        listed = ", ".join(_short(name) for name in unknown[:5])
        raise Refusal(422, f"unknown fields: {listed}. Known: {', '.join(names)}.")


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


def _choice(given: dict[str, Any], name: str, known: Sequence[Any], default: Any) -> Any:
    value = given.get(name, default)
    if type(value) is not type(default) or value not in known:
        listed = ", ".join(map(str, known))
        raise Refusal(422, f"{name} must be one of {listed}. Got {_short(value)}.")
    return value


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
    raise ValueError(f"{name} is not JSON")


def _short(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "a number that is not finite"
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"
