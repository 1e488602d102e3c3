"""Fits the narrow features of the additive lift: `python tools/fit_narrow_features.py`.

Writes src/regard/score/narrow_features.npz, which the package reads instead of fitting. For each
pair of deviations and each offset, the truncated singular value decomposition of
tanh(x + y + offset), less a function of x and one of y, under the weight 0.9 N(0, s²) + 0.1 N(0,
4s²) on each side: data are not normal, and what is rare is not worthless. Values and derivatives
are fitted together, as the error of a gradient is that of a derivative. A few seconds on one core.
"""

import sys

import numpy as np
from numpy.polynomial import chebyshev

from regard.score import narrow_table
from regard.score.narrow_table import DEGREE, MOST, OFFSETS, entry_deviations, entry_offsets, reach

HEAVY = 0.1  # the part of the weight that is twice as wide
ANYWHERE = 1e-4  # a weight spread evenly over t: bounded errors however far x and y lie
DERIVATIVE = 1.0  # the weight of a squared derivative's error relative to a squared value's
POINTS = 400


class Side:
    """One number, x or y: points, their weight, and the polynomials orthonormal under both."""

    def __init__(self, deviation: float) -> None:
        angle = (np.arange(POINTS) + 0.5) / POINTS * np.pi
        t = np.cos(angle)
        scale = float(reach(deviation))
        self.points = np.arctanh(t) * scale
        spacing = scale / np.sin(angle)
        density = (1 - HEAVY) * _normal(self.points, deviation)
        density += HEAVY * _normal(self.points, 2 * deviation)
        weight = density * spacing
        self.weight = weight / weight.sum() + ANYWHERE / POINTS
        unit = np.eye(DEGREE + 1)
        slopes = [chebyshev.chebval(t, chebyshev.chebder(one)) for one in unit]
        self.values = chebyshev.chebvander(t, DEGREE)
        self.slopes = np.stack(slopes, 1) * ((1 - t * t) / scale)[:, None]
        gram = self.products(self.values, self.slopes)
        # Rows: coefficients of orthonormal polynomials, the constant first.
        self.orthonormal = np.linalg.inv(np.linalg.cholesky(gram))

    def products(self, values: np.ndarray, slopes: np.ndarray) -> np.ndarray:
        """Inner products of the polynomials with functions [points, ...], derivatives included."""
        return (self.values * self.weight[:, None]).T @ values + DERIVATIVE * (
            self.slopes * self.weight[:, None]
        ).T @ slopes


def _normal(x: np.ndarray, deviation: float) -> np.ndarray:
    return np.exp(-0.5 * (x / deviation) ** 2) / deviation


def fit(wider: float, other: float, offset: float) -> np.ndarray:
    """[2, 1 + MOST, DEGREE + 1], as in `narrow_table.NarrowTable`."""
    if offset == OFFSETS[-1]:
        found = np.zeros((2, 1 + MOST, DEGREE + 1))
        found[0, 0, 0] = 1.0
        return found
    x, y = Side(wider), Side(other)
    value = np.tanh(x.points[:, None] + y.points + offset)
    slope = 1 - value**2
    curve = -2 * value * slope
    by_x = x.products(value, slope), x.products(slope, curve)  # and their derivatives by y
    matrix = x.orthonormal @ y.products(by_x[0].T, by_x[1].T).T @ y.orthonormal.T
    left, size, right = np.linalg.svd(matrix[1:, 1:])
    root = np.sqrt(size[:MOST, None])
    phi = root * left.T[:MOST] @ x.orthonormal[1:]
    psi = root * right[:MOST] @ y.orthonormal[1:]
    f = matrix[1:, 0] @ x.orthonormal[1:] * y.orthonormal[0, 0]
    g = matrix[0] @ y.orthonormal * x.orthonormal[0, 0]
    return np.array([[f, *phi], [g, *psi]])


def main() -> None:
    entries = zip(entry_deviations(), entry_offsets(), strict=True)
    found = np.array([fit(*deviations, offset) for deviations, offset in entries], np.float32)
    path = f"src/regard/score/{narrow_table.STORED}"
    np.savez_compressed(path, coefficients=found)
    print(path, file=sys.stderr)


if __name__ == "__main__":
    main()
