"""The API's OpenAPI 3.1 document, the answer of /openapi.json."""

from typing import Any

import regard
from regard.playground.requests import BEAM, BEAMS, REGIMES, SCORES, Limits


def describe(limits: Limits) -> dict[str, Any]:
    """The document; the limits in it are those that are enforced."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "regard playground",
            "version": regard.__version__,
            "description": "Translations with their attention weights; attention over points.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {
            "/api/translate": {"post": _post("Translate texts", _translate(limits), _TRANSLATED)},
            "/api/layers": {"post": _post("Every layer and head", _layers(limits), _LAYERS)},
            "/api/attend": {
                "post": _post("Scores, weights and outputs", _attend(limits), _ATTENDED)
            },
            "/api/models": {"get": _get("The models", _MODELS)},
            "/healthz": {"get": _get("Whether it is ready", _HEALTH, (503,))},
            "/metrics": {"get": _text("Counters, as Prometheus reads them")},
            "/openapi.json": {"get": _get("This document", {"type": "object"})},
        },
        "components": {
            "schemas": {
                "Error": {
                    "type": "object",
                    "required": ["error"],
                    "properties": {"error": {"type": "string"}},
                }
            }
        },
    }


def _object(properties: dict[str, Any], required: list[str], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, **more}


def _list(items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


def _translate(limits: Limits) -> dict[str, Any]:
    text = {"type": "string", "maxLength": limits.characters}
    several = _list(text, minItems=1, maxItems=limits.sentences)
    return _object(
        {
            "text": {"oneOf": [text, several]},
            "beam": {"enum": list(BEAMS), "default": BEAM},
            "n_best": {
                "type": "integer",
                "minimum": 1,
                "maximum": BEAMS[-1],
                "default": 1,
                "description": "at most beam",
            },
            "weights": {
                "type": "boolean",
                "default": False,
                "description": "return the alignment of each translation",
            },
            "next_words": {
                "type": "integer",
                "minimum": 0,
                "maximum": limits.next_words,
                "default": 0,
                "description": "alternatives to return for each word; for one text at a time",
            },
        },
        ["text"],
        additionalProperties=False,
    )


def _layers(limits: Limits) -> dict[str, Any]:
    text = {"type": "string", "maxLength": limits.characters}
    return _object(
        {"source": text, "target": {**text, "description": "a translation of the source"}},
        ["source", "target"],
        additionalProperties=False,
    )


def _attend(limits: Limits) -> dict[str, Any]:
    number = {"type": "number", "minimum": -1e6, "maximum": 1e6}
    point = _list(number, minItems=1, maxItems=limits.width)
    points = _list(point, minItems=1, maxItems=limits.points)
    positive = {"type": "number", "minimum": 1e-3, "maximum": 1e3, "default": 1.0}
    return _object(
        {
            "query": points,
            "key": points,
            "value": {**points, "description": "one per key; without it, the keys themselves"},
            "score": {"enum": list(SCORES), "default": SCORES[0]},
            "regime": {"enum": list(REGIMES), "default": REGIMES[0]},
            "temperature": positive,
            "width": {**positive, "description": "of the Gaussian"},
            "scaled": {"type": "boolean", "default": True},
            "valid_len": {"type": ["integer", "null"], "minimum": 0},
            "causal": {"type": "boolean", "default": False},
            "map": {
                "type": "boolean",
                "default": False,
                "description": "return which key wins where; for points of 2 numbers",
            },
        },
        ["query", "key"],
        additionalProperties=False,
    )


_WORDS = _list({"type": "string"})
_MATRIX = _list(_list({"type": "number"}))
_TRANSLATED = _object(
    {
        "translations": _list(
            _list(
                _object(
                    {
                        "text": {"type": "string"},
                        "score": {"type": ["number", "null"]},
                        "source_words": _WORDS,
                        "target_words": _WORDS,
                        "weights": {
                            **_object(
                                {"shape": _list({"type": "integer"}), "data": {"type": "string"}},
                                ["shape", "data"],
                            ),
                            "description": "target words x source words, where asked for: base64 "
                            "of little-endian 16-bit integers, 65535 for a weight of 1. A row "
                            "sums to 1 less the weight on the end of the source.",
                        },
                        "next_words": {
                            **_list(_list(_list({"type": ["string", "number"]}))),
                            "description": "where asked for: for each word, and for the end, the "
                            "most probable next words, each with its probability; an empty "
                            "string stands for the end of the sentence",
                        },
                    },
                    ["text", "score", "source_words", "target_words"],
                )
            )
        )
    },
    ["translations"],
)
_LAYERS = _object(
    {
        "maps": {
            "type": "object",
            "description": "by name: encoder, decoder and cross of a Transformer, cross of a "
            "recurrent model. The query tokens, the key tokens, and layers x heads "
            "x queries x keys, packed as the weights of a translation.",
            "additionalProperties": _object(
                {
                    "queries": _WORDS,
                    "keys": _WORDS,
                    "shape": _list({"type": "integer"}),
                    "data": {"type": "string"},
                },
                ["queries", "keys", "shape", "data"],
            ),
        }
    },
    ["maps"],
)
_ATTENDED = _object(
    {
        "scores": _MATRIX,
        "weights": _MATRIX,
        "output": _MATRIX,
        "hull": _MATRIX,
        "map": {
            **_object(
                {
                    "size": {"type": "integer"},
                    "winner": {"type": "string"},
                    "share": {"type": "string"},
                },
                ["size", "winner", "share"],
            ),
            "description": "where asked for: size x size places from -5 to 5, row by row from the "
            "top, a byte each in base64: the key with the largest weight (255 where all are "
            "equal), and that weight in 255ths",
        },
    },
    ["scores", "weights", "output", "hull"],
)
_STATUS = {"enum": ["ok", "starting", "stopping"]}
_MODELS = _object({"models": _list({"type": "object"}), "status": _STATUS}, ["models", "status"])
_HEALTH = _object({"status": _STATUS, "compiling": {"type": "boolean"}}, ["status", "compiling"])


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}


def _error(meaning: str) -> dict[str, Any]:
    return {"description": meaning, **_json({"$ref": "#/components/schemas/Error"})}


_ERRORS = {
    403: "The request comes from a page of another origin.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    422: "The request breaks a rule, which the error states.",
    429: "The queue is full; Retry-After says when to try again.",
    503: "Not ready, or not in time.",
}


def _post(summary: str, body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    errors = {str(status): _error(meaning) for status, meaning in _ERRORS.items()}
    return {
        "summary": summary,
        "requestBody": {"required": True, **_json(body)},
        "responses": {"200": {"description": "OK", **_json(answer)}, **errors},
    }


def _get(summary: str, answer: dict[str, Any], more: tuple[int, ...] = ()) -> dict[str, Any]:
    found = {str(status): {"description": _ERRORS[status], **_json(answer)} for status in more}
    return {
        "summary": summary,
        "responses": {"200": {"description": "OK", **_json(answer)}, **found},
    }


def _text(summary: str) -> dict[str, Any]:
    content = {"text/plain": {"schema": {"type": "string"}}}
    return {"summary": summary, "responses": {"200": {"description": "OK", "content": content}}}
