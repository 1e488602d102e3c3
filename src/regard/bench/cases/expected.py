"""The right answers, in float64 NumPy by the definition; imports nothing from regard.

Worked one head and a few query rows at a time, so that it never holds more than a block of
scores. Dropout is left out: what a program that drops weights is off by is bounded instead, see
`allowed_error`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from regard.bench.cases.case import Case, Inputs

BLOCK_TERMS = 2**22  # float64 score terms held at once: 32 MiB


def expected(case: Case, inputs: Inputs) -> dict[str, np.ndarray]:
    """The output, and for a backward case the gradient of every array, where they are checked.

    Returns:
        "out": [B, rows, (N,) V], "d_query" [B, rows, (N,) D], "d_key" and "d_value"
        [B, keys, (N,) D or V], and "d_<name>" of the shape of each parameter, all under
        `inputs.checked_cotangent`.
    """
    rows, keys = inputs.rows, inputs.keys
    sides = {"query": rows, "key": keys, "value": keys}
    parameters = {name: float64(a) for name, a in inputs.arrays.items() if name not in sides}
    outs = np.zeros(inputs.checked("out", inputs.cotangent).shape)
    grads = {name: np.zeros_like(a) for name, a in parameters.items()}
    for name, positions in sides.items():
        shape = inputs.arrays[name].shape
        grads[name] = np.zeros((shape[0], len(positions), *shape[2:]))
    per_row = case.S * (case.D if case.score == "additive" else 1)
    size = max(1, BLOCK_TERMS // max(1, per_row))
    for b in range(case.B):
        for n in range(case.N or 1):
            at = (b, slice(None)) if case.N is None else (b, slice(None), n)
            shared = at if case.N is None else (b, slice(None), n * (case.K or case.N) // case.N)
            query = float64(inputs.arrays["query"][at][rows])
            cotangent = float64(inputs.cotangent[at][rows])
            key, value = (float64(inputs.arrays[name][shared]) for name in ("key", "value"))
            for start in range(0, len(rows), size):
                block = slice(start, start + size)
                seen = _seen(case, inputs, b, rows[block])  # [rows, S]
                score, pullback = _score(case, parameters, query[block], key)
                pairs: Any = (0, *([] if case.N is None else [n]), rows[block])
                if case.bias:
                    score = score + parameters["bias"][pairs]
                weights, slope = _regime(case, np.where(seen, score, -np.inf))
                outs[at][block] = weights @ value
                if not case.backward:
                    continue
                g = cotangent[block]  # [rows, V]
                d_weights = g @ value.T
                d_score = slope(d_weights)
                d_query, d_key, d_parameters = pullback(d_score)
                grads["value"][shared] += weights[:, keys].T @ g
                grads["query"][at][block] = d_query
                grads["key"][shared] += d_key[keys]
                if case.bias:
                    grads["bias"][pairs] += d_score
                for name, d_parameter in d_parameters.items():
                    grads[name] += d_parameter
    if not case.backward:
        return {"out": outs}
    return {"out": outs} | {f"d_{name}": grad for name, grad in grads.items()}


def float64(array: np.ndarray) -> np.ndarray:
    """The same numbers in float64; bfloat16 by its bits, ten times as fast as its own cast."""
    if array.dtype.name == "bfloat16":
        array = (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def relative_errors(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> dict[str, float]:
    """Norm of the difference over the norm of the right answer, for each array.

    >>> relative_errors({"out": np.array([3.0, 4.5])}, {"out": np.array([3.0, 4.0])})
    {'out': 0.1}
    """
    errors = {}
    for name, right in want.items():
        arrived = float64(np.asarray(got[name]))
        if arrived.shape != right.shape:
            raise ValueError(
                f"{name} must have the shape of the right answer. "
                f"Got {list(arrived.shape)}, right answer {list(right.shape)}."
            )
        norm = float(np.linalg.norm(right))
        errors[name] = float(np.linalg.norm(arrived - right)) / (norm or 1.0)
    return errors


def allowed_error(case: Case) -> float:
    """The error past which a program is taken to compute something else and is not timed.

    Loose on purpose: the measured error is printed beside every time, this only detects a wrong
    mask, scale or layout (errors of order one) from rounding and from the lift's tolerance.
    """
    if case.dropout:
        # Weights off by noise of mean 0 and variance rate / (1 - rate) of their squares, and so a
        # sum of values drawn about 0: twice that, which still detects a wrong scale or layout.
        return 2 * (case.dropout / (1 - case.dropout)) ** 0.5
    rounding = {"float64": 1e-10, "float32": 1e-3, "float16": 3e-2, "bfloat16": 1e-1}[case.dtype]
    if case.device == "gpu" and case.dtype != "float64":
        # By default products of float32 are in TF32, which has the mantissa of float16; and where a
        # score is rounded past another, a query of a hard maximum gets another value.
        rounding = 3e-1 if case.normalize == "hard" else max(rounding, 3e-2)
    if case.backward and case.dtype == "bfloat16":
        rounding *= 3  # the book's form rounds every step of the chain
    if case.score != "additive" or not isinstance(case.tolerance, float):
        return rounding
    # tolerance bounds each tanh; a score adds up h of them and a derivative is about 10
    # times less exact than its value.
    return max(rounding, (200 if case.backward else 20) * case.tolerance)


def _seen(case: Case, inputs: Inputs, b: int, rows: np.ndarray) -> np.ndarray:
    keys = np.arange(case.S)[None, :]
    if case.mask == "causal":
        return keys <= rows[:, None] + (case.S - case.T)
    if inputs.valid_lens is None:
        return np.ones((len(rows), case.S), bool)
    lens = inputs.valid_lens[b]
    if case.mask in ("segments", "packed"):
        same = lens[rows][:, None] == lens[None]
        return same if case.mask == "segments" else same & (keys <= rows[:, None])
    if case.mask == "boolean":
        return lens[rows]
    return keys < (lens if lens.ndim == 0 else lens[rows][:, None])


def _regime(case: Case, score: np.ndarray) -> tuple[np.ndarray, Callable[..., np.ndarray]]:
    """The weights of scores, -inf where masked; and the map from their gradient to the scores'."""
    seen = score > -np.inf
    if case.normalize == "softmax":
        weights = _softmax(score)
        return weights, lambda d: weights * (d - (weights * d).sum(-1, keepdims=True))
    if case.normalize == "sparsemax":
        ordered = -np.sort(-score, -1)
        before = np.where(ordered > -np.inf, ordered, 0.0).cumsum(-1)
        ranks = np.arange(1, score.shape[-1] + 1)
        size = ((ordered > -np.inf) & (1 + ranks * ordered > before)).sum(-1, keepdims=True)
        total = np.take_along_axis(before, np.maximum(size - 1, 0), -1)
        weights = np.maximum(score - (total - 1) / np.maximum(size, 1), 0.0)
        support = weights > 0
        return (
            weights,
            lambda d: support * (d - (support * d).sum(-1, keepdims=True) / np.maximum(size, 1)),
        )
    if case.normalize in ("hard", "uniform"):
        ones = seen
        if case.normalize == "hard":
            ones = seen & (np.arange(score.shape[-1]) == score.argmax(-1, keepdims=True))
        return ones / np.maximum(ones.sum(-1, keepdims=True), 1), np.zeros_like
    value = np.where(seen, np.logaddexp(0.0, score), 0.0)  # softplus
    slope = np.where(seen, 1.0 / (1.0 + np.exp(-np.where(seen, score, 0.0))), 0.0)
    if case.normalize == "cone":
        return value, lambda d: slope * d
    total = value.sum(-1, keepdims=True)
    total = np.where(total == 0.0, 1.0, total)
    weights = value / total
    return weights, lambda d: slope / total * (d - (weights * d).sum(-1, keepdims=True))


def _softmax(score: np.ndarray) -> np.ndarray:
    highest = score.max(-1, keepdims=True, initial=-np.inf)
    weights = np.exp(score - np.where(np.isfinite(highest), highest, 0.0))
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total == 0.0, 1.0, total)


def _score(case: Case, parameters: dict[str, np.ndarray], query: np.ndarray, key: np.ndarray):
    """a(q, k) [rows, S], and the map from its gradient to those of query, key, parameters."""
    if case.score in ("dot", "features"):
        scale = case.D**-0.5 if case.score == "dot" else 1.0
        return scale * query @ key.T, lambda d: (
            scale * d @ key,
            scale * d.T @ query,
            {},
        )
    if case.score == "bilinear":
        kernel = parameters["kernel"]
        return query @ kernel @ key.T, lambda d: (
            d @ key @ kernel.T,
            d.T @ query @ kernel,
            {"kernel": query.T @ d @ key},
        )
    if case.score == "gaussian":
        width = parameters["width"]
        # Multiplied out, which float64 can afford: no [rows, S, D] tensor of differences.
        squares = (query**2).sum(-1)[:, None] + (key**2).sum(-1) - 2 * query @ key.T  # [rows, S]
        return -squares / (2 * width**2), lambda d: (
            (d @ key - d.sum(1)[:, None] * query) / width**2,
            (d.T @ query - d.sum(0)[:, None] * key) / width**2,
            {"width": (d * squares).sum() / width**3},
        )
    query_kernel, key_kernel = parameters["query_kernel"], parameters["key_kernel"]
    vector = parameters["vector"]
    tanh = np.tanh((query @ query_kernel)[:, None] + (key @ key_kernel)[None])

    def pullback(d):
        slope = 1.0 - tanh**2  # [rows, S, h]
        d_x = np.einsum("ts,tsh->th", d, slope, optimize=True) * vector
        d_y = np.einsum("ts,tsh->sh", d, slope, optimize=True) * vector
        return (
            d_x @ query_kernel.T,
            d_y @ key_kernel.T,
            {
                "query_kernel": query.T @ d_x,
                "key_kernel": key.T @ d_y,
                "vector": np.tensordot(d, tanh, axes=2),
            },
        )

    return tanh @ vector, pullback
