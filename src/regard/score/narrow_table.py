"""The narrow features of tanh(x + y): tables of polynomials, and how far they are from tanh.

    tanh(x + y + m) ~ f(x) + g(y) + sum_j phi_j(x) psi_j(y)

Softmax cannot see f, and g is a bias of the keys, which is free: only the sum costs width. Its
features are the truncated singular value decomposition of tanh under a weight on x and y, which
says how often a pair occurs. All functions are polynomials of a squashed number, t = tanh(x /
reach): they stay bounded however far x lies. `tools/fit_narrow_features.py` fits them for a grid of
deviations of x and of y and of offsets m, and stores them in narrow_features.npz. Pure NumPy;
nothing here depends on attention.
"""

import functools
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from numpy.polynomial import chebyshev

STORED = "narrow_features.npz"

# Of the tables: standard deviations of x and y, and means of x + y. A negative mean is a positive
# one of -x and -y, as tanh is odd. At the last offset and past it tanh is 1: no features.
DEVIATIONS = np.array([0.25, 0.5, 2**-0.5, 1.0, 2**0.5, 2.0, 2**1.5])
OFFSETS = np.array([0.0, 0.75, 1.5, 2.25, 3.0, 4.5, 6.5, 10.0])
MOST = 12  # features of one number
DEGREE = 15  # of the polynomials

# Unordered pairs of deviations: features for (a, b) are those for (b, a) with sides exchanged.
PAIRS = [(a, b) for a in range(len(DEVIATIONS)) for b in range(a + 1)]
PAIR_OF = np.array([[PAIRS.index((max(a, b), min(a, b))) for b in range(7)] for a in range(7)])

# Where bins of the histograms by which the error is measured end, in deviations of the table.
_HALF = (0.3, 0.6, 0.9, 1.2, 1.5, 1.8, 2.1, 2.5, 3.0, 3.5, 4.2, 5.0, 6.5)
EDGES = np.array([*(-z for z in reversed(_HALF)), 0.0, *_HALF])

# The least number of features is taken whose error at unit deviations is below this part of the
# tolerance. The rest is room for other data; and gradients are then as good as the sine series'.
_ROOM = 0.275


def reach(deviation: Any) -> Any:
    """Of the squash t = tanh(x / reach), for a number or an array of any library."""
    return 2.0 * deviation**0.6  # wider data are resolved less finely


@dataclass(frozen=True)
class NarrowTable:
    """Features for every entry of the grid, and their errors; entries are (pair, offset), flat.

    Example:
        >>> table = NarrowTable.of(2**-8)
        >>> table.rank
        8
        >>> x, y = np.linspace(-2, 2, 5), np.linspace(-2, 2, 5)
        >>> entry = table.entry(1.0, 1.0, 0.0)
        >>> float(np.abs(table(entry, x, y) - np.tanh(x[:, None] + y)).max().round(3))
        0.001

    Attributes:
        coefficients: [entries, 2, 1 + rank, DEGREE + 1], of Chebyshev polynomials, for the side of
            the wider deviation and for the other; row 0 is f or g, the others are the features.
        mean_square, largest_square: [entries, bins, bins], of the error over pairs of bins, x and
            y normal in the one, wherever in their bins in the other.
    """

    coefficients: np.ndarray
    mean_square: np.ndarray
    largest_square: np.ndarray

    @property
    def rank(self) -> int:
        return self.coefficients.shape[2] - 1

    @staticmethod
    @functools.cache
    def of(tolerance: float) -> "NarrowTable | None":
        """The table for a tolerance; None where MOST features are not enough."""
        unit = NarrowTable.entry(1.0, 1.0, 0.0)
        z, weight = _normal_grid()
        exact = np.tanh(z[:, None] + z)
        for rank in range(1, MOST + 1):
            found = _evaluate(_stored()[unit : unit + 1, :, : rank + 1], np.ones((1, 2)), z, z)[0]
            if weight @ (found - exact) ** 2 @ weight <= (_ROOM * tolerance) ** 2:
                return NarrowTable.with_rank(rank)
        return None

    @staticmethod
    @functools.cache
    def with_rank(rank: int) -> "NarrowTable":
        coefficients = _stored()[:, :, : rank + 1]
        return NarrowTable(coefficients, *_errors(coefficients))

    @staticmethod
    def entry(wider: float, other: float, offset: float) -> int:
        """The nearest entry for these deviations, the wider first, and this offset."""
        first, second = (int(np.sum(s > between(DEVIATIONS))) for s in (wider, other))
        return int(PAIR_OF[first, second] * len(OFFSETS) + np.sum(offset > between(OFFSETS)))

    def __call__(self, entry: int, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Approximates tanh(x + y + offset), [x, y]; x has the wider deviation."""
        one = slice(entry, entry + 1)
        return _evaluate(self.coefficients[one], entry_deviations()[one], x, y)[0]


def between(grid: np.ndarray) -> np.ndarray:
    """Where the nearest point of a grid changes: by ratio of deviations, halfway of offsets."""
    return np.sqrt(grid[1:] * grid[:-1]) if grid[0] > 0 else 0.5 * (grid[1:] + grid[:-1])


def entry_deviations() -> np.ndarray:
    """[entries, 2], the wider first."""
    return np.repeat(DEVIATIONS[np.array(PAIRS)], len(OFFSETS), axis=0)


def entry_offsets() -> np.ndarray:
    """[entries]."""
    return np.tile(OFFSETS, len(PAIRS))


@functools.cache
def _stored() -> np.ndarray:
    with resources.files("regard.score").joinpath(STORED).open("rb") as file:
        return np.load(file)["coefficients"]


def _evaluate(
    coefficients: np.ndarray, deviations: np.ndarray, x: np.ndarray, y: np.ndarray
) -> np.ndarray:
    """At x and y, each [entries or 1, points] -> [entries, x, y]."""
    sides = []
    for side, z in enumerate((x, y)):
        t = np.tanh(np.atleast_2d(z) / reach(deviations[:, side, None]))
        basis = chebyshev.chebvander(t.astype(np.float32), coefficients.shape[-1] - 1)
        sides.append(coefficients[:, side] @ np.swapaxes(basis, -1, -2))  # [entries, 1 + rank, n]
    f, g = sides[0][:, 0, :, None], sides[1][:, 0, None]
    return f + g + np.swapaxes(sides[0][:, 1:], -1, -2) @ sides[1][:, 1:]


def _normal_grid() -> tuple[np.ndarray, np.ndarray]:
    z = np.linspace(-5.5, 5.5, 221)
    weight = np.exp(-0.5 * z * z)
    return z, weight / weight.sum()


def _errors(coefficients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and largest square of the error over each pair of bins, [entries, bins, bins]."""
    inner = np.linspace(EDGES[:-1], EDGES[1:], 5, axis=1)  # [bins - 2, 5], the edges included
    tail = EDGES[-1] + np.array([0.0, 0.7, 2.0, 6.0, 1000.0])
    points = np.concatenate([-tail[None, ::-1], inner, tail[None]])  # [bins, 5]
    weight = np.exp(-0.5 * points**2)
    weight[[0, -1]] = 0.2  # the last bins have no end: any of their points
    weight /= weight.sum(1, keepdims=True)
    z = points.ravel()
    deviations, offsets = entry_deviations(), entry_offsets()
    mean, largest = [], []
    # One entry at a time: all at once would take 200 MB.
    for one, s, offset in zip(coefficients, deviations, offsets, strict=True):
        x, y = (side[:, None] * z for side in np.reshape(s, (2, 1)))
        exact = np.tanh((x[0][:, None] + y[0] + offset).astype(np.float32))
        square = (_evaluate(one[None], s[None], x[0], y[0])[0] - exact) ** 2
        square = square.reshape(*points.shape, *points.shape)
        mean.append(np.einsum("iajb,ia,jb->ij", square, weight, weight))
        largest.append(square.max((1, 3)))
    return np.array(mean, np.float32), np.array(largest, np.float32)
