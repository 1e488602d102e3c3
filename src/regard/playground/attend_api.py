"""The page's plane of points: scores, weights and outputs, all of them computed by the library."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

import regard
from regard import Score
from regard.playground.requests import AttendRequest

POINTS, WIDTHS = (8, 64), (2, 512)  # the shapes that are compiled; the limits are the largest
HIDDEN = 16  # units of the additive score shown on the page


def answer(request: AttendRequest) -> dict[str, Any]:
    """The JSON of /api/attend: scores [T, S], weights [T, S], output [T, V], and a hull."""
    (T, D), (S, V) = request.query.shape, request.value.shape
    count, width, values = _room(max(T, S), POINTS), _room(D, WIDTHS), _room(V, WIDTHS)
    # Few shapes, whatever is asked for, so that few programs are compiled. Zeros change no score,
    # and the keys that are padding are not valid.
    query = _padded(request.query, count, width)
    key, value = _padded(request.key, count, width), _padded(request.value, count, values)
    query, key, score = score_of(request, query, key)
    lens = jnp.asarray(S if request.valid_len is None else request.valid_len, jnp.int32)
    out, weights = regard.attend(
        query,
        key,
        value,
        score=score,
        normalize=REGIMES[request.regime],
        mask=regard.Mask.causal(align="start") if request.causal else None,
        valid_lens=lens,
        return_weights=True,
        implementation="reference",
    )
    scores = regard.scores(query, key, score=score)
    return {
        "scores": _rows(scores[:T, :S]),
        "weights": _rows(weights[:T, :S]),
        "output": _rows(out[:T, :V]),
        "hull": hull(request.value[: int(lens)], request.regime),
    }


def score_of(request: AttendRequest, query: Array, key: Array) -> tuple[Array, Array, Score]:
    """Query, key and score with the temperature inside.

    It is in the numbers rather than in the score, so that another temperature is no other program.
    """
    width, cold = request.query.shape[1], 1.0 / request.temperature
    if request.score == "dot":
        return query * (cold * (width**-0.5 if request.scaled else 1.0)), key, regard.Dot(1.0)
    if request.score == "gaussian":  # exp(-|q-k|² / 2w²)
        narrow = cold**0.5 / request.width
        return query * narrow, key * narrow, regard.Gaussian(1.0)
    rng = np.random.default_rng(0)  # always the same, so that the page can be talked about
    padded = query.shape[1]
    if request.score == "bilinear":
        turn = rng.standard_normal((width, width)) / width
        return query * cold, key, regard.Bilinear(_padded(turn, padded, padded))
    query_kernel, key_kernel = rng.standard_normal((2, width, HIDDEN))
    vector = jnp.asarray(rng.standard_normal(HIDDEN) * cold, jnp.float32)
    score = regard.Additive(
        _padded(query_kernel, padded, HIDDEN), _padded(key_kernel, padded, HIDDEN), vector
    )
    return query, key, score


def positive(scores: Array) -> Array:
    """max(0, 1 + a): the f of the page's kernel and cone."""
    return jnp.maximum(0.0, 1.0 + scores)


REGIMES: dict[str, Any] = {
    "softmax": regard.Softmax(),
    "sparsemax": regard.Sparsemax(),
    "kernel": regard.Kernel(positive),
    "cone": regard.Cone(positive),
    "hard": regard.Hard(),
    "uniform": regard.Uniform(),
}


def hull(values: np.ndarray, regime: str) -> list[list[float]]:
    """The corners of what outputs of this regime can be, counterclockwise; values in the plane.

    The convex hull of the values, or for the cone, that of the values ten times as far and the
    origin: a cone as far as the page shows.
    """
    if values.shape[1] != 2 or len(values) == 0:
        return []
    points = values.astype(np.float64)
    if regime == "cone":
        points = np.concatenate([10.0 * points, np.zeros((1, 2))])
    order = sorted(set(map(tuple, points.tolist())))
    if len(order) < 3:
        return [list(point) for point in order]

    def half(points: list[tuple]) -> list[tuple]:
        """One side of the hull (Andrew's monotone chain): only turns to the left."""
        found: list[tuple] = []
        for x, y in points:
            while len(found) > 1:
                (x1, y1), (x2, y2) = found[-2:]
                if (x2 - x1) * (y - y1) - (y2 - y1) * (x - x1) > 0:
                    break
                found.pop()
            found.append((x, y))
        return found[:-1]

    return [list(point) for point in half(order) + half(order[::-1])]


def _room(count: int, sizes: tuple[int, ...]) -> int:
    return next(size for size in sizes if size >= count)


def _padded(array: np.ndarray, rows: int, columns: int) -> Array:
    """Zeros below and to the right."""
    missing = [(0, rows - array.shape[0]), (0, columns - array.shape[1])]
    return jnp.asarray(np.pad(array, missing), jnp.float32)


def _rows(array: Any) -> list[list[float]]:
    """Numbers as JSON can hold them."""
    rows = np.nan_to_num(np.asarray(array, np.float64), posinf=1e300, neginf=-1e300)
    return [[float(f"{x:.6g}") for x in row] for row in rows]
