"""Scores, weights and outputs for points, all of them computed by the library.

Points are padded to a few shapes, and everything that a request may vary is an argument of the
compiled program: there are sixteen programs (four scores, four shapes), and as many for the map of
winners, whatever clients ask.
"""

import base64
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import regard
from regard import Score
from regard.playground.requests import REGIMES, SCORES, AttendRequest, Limits, read_attend

POINTS, WIDTHS = (8, 64), (2, 512)  # the shapes that are compiled; the limits are the largest
HIDDEN = 16  # units of the additive score
MAP, EDGE, TIE = 32, 5.0, 255  # places in a row of the map; it reaches from -EDGE to EDGE


def answer(request: AttendRequest) -> dict[str, Any]:
    """The JSON of /api/attend: scores [T, S], weights [T, S], output [T, V], and a hull."""
    scores, weights, output = attended(request)
    answered: dict[str, Any] = {
        "scores": _rows(scores),
        "weights": _rows(weights),
        "output": _rows(output),
        "hull": hull(request.value[: valid_len(request)], request.regime),
    }
    if request.map:
        answered["map"] = winners(request)
    return answered


def attended(request: AttendRequest) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores [T, S], weights [T, S] and output [T, V]."""
    (T, D), (S, V) = request.query.shape, request.value.shape
    keys, width = _bucket(max(T if POINTS[-1] >= T else 0, S), POINTS), _bucket(max(D, V), WIDTHS)
    queries = max(T, keys)  # more than there may be keys only where the map asks
    query, key, kernels = _inputs(request, width)
    # Zeros change no score, and padded keys are beyond the valid length.
    found = _program(
        request.score,
        np.int32(REGIMES.index(request.regime)),
        _padded(query, queries, width),
        _padded(key, keys, width),
        _padded(request.value, keys, width),
        kernels,
        np.int32(valid_len(request)),
        np.tri(queries, keys, dtype=bool) if request.causal else np.ones((queries, keys), bool),
    )
    # Sliced in NumPy: in JAX, every T, S and V would be a program of its own.
    scores, weights, output = (np.asarray(array) for array in found)
    return scores[:T, :S], weights[:T, :S], output[:T, :V]


def valid_len(request: AttendRequest) -> int:
    """The number of keys that take part."""
    return len(request.key) if request.valid_len is None else request.valid_len


def winners(request: AttendRequest) -> dict[str, Any]:
    """Which key a query would give its largest weight to, at each place of the page's plane.

    Returns:
        The number of places in a row, and in base64 a byte for each place, row by row from the top:
        the winning key (255 where all weights are equal), and its weight in 255ths.
    """
    middle = (np.arange(MAP) + 0.5) / MAP * 2 * EDGE - EDGE
    x, y = np.meshgrid(middle, -middle)
    grid = np.stack([x.ravel(), y.ravel()], axis=1)
    _, weights, _ = attended(dataclasses.replace(request, query=grid, causal=False))
    largest, best = weights.max(axis=1), weights.argmax(axis=1)
    taking_part = weights[:, : max(valid_len(request), 1)]
    equal = (largest - taking_part.min(axis=1) < 1e-6) & (taking_part.shape[1] > 1)
    best = np.where(equal | (largest == 0), TIE, best)
    arrays = {"winner": best, "share": np.rint(np.clip(largest, 0, 1) * 255)}
    packed = {
        name: base64.b64encode(array.astype(np.uint8).tobytes()).decode("ascii")
        for name, array in arrays.items()
    }
    return {"size": MAP, **packed}


def positive(scores: Array) -> Array:
    """max(0, 1 + a): the f of the page's kernel and cone."""
    return jnp.maximum(0.0, 1.0 + scores)


NORMALIZERS: dict[str, Any] = {
    "softmax": regard.Softmax(),
    "sparsemax": regard.Sparsemax(),
    "kernel": regard.Kernel(positive),
    "cone": regard.Cone(positive),
    "hard": regard.Hard(),
    "uniform": regard.Uniform(),
}


@functools.partial(jax.jit, static_argnums=0)
def _program(
    score_name: str,
    regime: Array,
    query: Array,
    key: Array,
    value: Array,
    kernels: tuple[Array, ...],
    valid_len: Array,
    mask: Array,
) -> tuple[Array, Array, Array]:
    """Scores, weights and output, all of them padded."""
    score = _score(score_name, kernels)

    def attended(name: str) -> Any:
        return lambda: regard.attend(
            query,
            key,
            value,
            score=score,
            normalize=NORMALIZERS[name],
            mask=mask,
            valid_lens=valid_len,
            return_weights=True,
            implementation="reference",
        )

    output, weights = jax.lax.switch(regime, [attended(name) for name in REGIMES])
    return regard.scores(query, key, score=score), weights, output


def _score(name: str, kernels: tuple[Array, ...]) -> Score:
    """A score whose parameters are arguments of the program; temperature is in `_inputs`."""
    if name == "bilinear":
        return regard.Bilinear(*kernels)
    if name == "additive":
        query_kernel, key_kernel, vector = kernels
        return regard.Additive(query_kernel, key_kernel, vector)
    return regard.Gaussian(1.0) if name == "gaussian" else regard.Dot(1.0)


def _inputs(
    request: AttendRequest, padded: int
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, ...]]:
    """Query, key and the score's kernels, with temperature and width already applied.

    Both are in the numbers rather than in the score, so that another temperature is the same
    program. The kernels are always drawn from the same seed, so that results can be talked about.
    """
    query, key = request.query, request.key
    width, cold = query.shape[1], 1.0 / request.temperature
    if request.score == "dot":
        return query * (cold * (width**-0.5 if request.scaled else 1.0)), key, ()
    if request.score == "gaussian":  # exp(-|q-k|² / 2w²)
        narrow = cold**0.5 / request.width
        return query * narrow, key * narrow, ()
    rng = np.random.default_rng(0)
    if request.score == "bilinear":
        kernel = rng.standard_normal((width, width)) / width
        return query * cold, key, (_padded(kernel, padded, padded),)
    kernels = (_padded(one, padded, HIDDEN) for one in rng.standard_normal((2, width, HIDDEN)))
    vector = rng.standard_normal(HIDDEN) * cold
    return query, key, (*kernels, vector.astype(np.float32))


def warm_up() -> list[Callable[[], None]]:
    """Functions that compile the attention of the page's plane, and of its row of eight keys."""

    def step(T: int, S: int, D: int, score: str) -> None:
        body: dict[str, Any] = {
            "map": D == 2,
            "query": [[1.0] * D] * T,
            "key": [[1.0] * D] * S,
            "score": score,
        }
        answer(read_attend(body, Limits()))

    planes = [(3, 5, 2, score) for score in SCORES]
    return [functools.partial(step, *one) for one in [*planes, (1, 8, 4, "dot")]]


def hull(values: np.ndarray, regime: str) -> list[list[float]]:
    """The corners of the region where outputs of this regime can be, counterclockwise.

    The convex hull of values in the plane. For the cone, the hull of the origin and of the values
    scaled by ten: a cone as far as the page shows.
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


def _bucket(count: int, sizes: tuple[int, ...]) -> int:
    return next(size for size in sizes if size >= count)


def _padded(array: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """float32, with zeros below and to the right."""
    missing = [(0, rows - array.shape[0]), (0, columns - array.shape[1])]
    return np.pad(array, missing).astype(np.float32)


def _rows(array: np.ndarray) -> list[list[float]]:
    """Numbers as JSON can hold them."""
    rows = np.nan_to_num(array.astype(np.float64), posinf=1e300, neginf=-1e300)
    return [[float(f"{x:.6g}") for x in row] for row in rows]
