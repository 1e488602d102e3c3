"""Short sine series for tanh: tanh(z) ~ sum_r c_r sin((2r-1) pi z / 2P) on [-L, L].

Pure NumPy in float64. Fitting takes up to ten seconds, so the tables for the default tolerances
are stored in the package, in sine_series.npz (`python tools/fit_sine_series.py`). Nothing here
depends on attention; `additive.py` turns a series into features.
"""

import functools
from dataclasses import dataclass
from importlib import resources

import numpy as np

STORED = "sine_series.npz"

# The weight of a derivative error relative to a value error of the same size while fitting.
# 0.1 reduces the derivative's error by about a third and hardly changes the value's.
_DERIVATIVE_WEIGHT = 0.1

# Sums x + y of which the largest is L have a standard deviation of about L/5: the largest of
# thousands of unit normals is near 4 on each side, and the standard deviation of the sum is √2.
_DEVIATION = 0.2


@dataclass(frozen=True)
class SineSeries:
    """One fitted series, with the errors measured on a dense grid of [0, limit].

    Attributes:
        limit: L; the errors hold for abs(z) <= L.
        half_period: P, where every term has an extremum; the frequencies are (2r-1) pi / 2P.
        coefficients: c_1 ... c_R.
        value_error: max abs(tanh(z) - series(z)).
        derivative_error: max abs(sech(z)^2 - series'(z)).
    """

    limit: float
    half_period: float
    coefficients: np.ndarray
    value_error: float
    derivative_error: float

    @property
    def frequencies(self) -> np.ndarray:
        return _frequencies(len(self.coefficients), self.half_period)

    def __call__(self, z: np.ndarray) -> np.ndarray:
        return np.sin(np.multiply.outer(z, self.frequencies)) @ self.coefficients

    def derivative(self, z: np.ndarray) -> np.ndarray:
        w = self.frequencies
        return np.cos(np.multiply.outer(z, w)) @ (w * self.coefficients)


@functools.cache
def fit(terms: int, limit: float) -> SineSeries:
    """Fit `terms` sines to tanh on [-limit, limit], nearly minimax in value and derivative.

    Every term is symmetric about z = P, so past P the series takes the same values in reverse.
    tanh is nearly constant there, so that this does no harm: with P *inside* the range (about
    0.65 L for a tolerance of 2^-8) the same number of terms spans a much shorter period, which
    saves three of ten terms over the textbook choice P > L.

    Example:
        >>> series = fit(7, 9.0)
        >>> series.half_period < series.limit
        True
        >>> bool(series.value_error < 2**-8)
        True
    """
    ratios = np.linspace(0.5, 1.3, 17) if limit > 3 else np.linspace(1.0, 3.4, 13)
    errors = [_weighted_fit(terms, limit, limit * ratio, iterations=3)[1] for ratio in ratios]
    best = int(np.argmin(errors))
    step = ratios[1] - ratios[0]
    fine = ratios[best] + step * np.linspace(-0.8, 0.8, 9)
    candidates = [_weighted_fit(terms, limit, limit * ratio, iterations=16) for ratio in fine]
    pick = int(np.argmin([error for _, error in candidates]))
    coefficients, half_period = candidates[pick][0], limit * float(fine[pick])

    return _measured(limit, half_period, coefficients)


@functools.cache
def terms_for(tolerance: float, limit: float) -> int:
    """The fewest terms whose series is within `tolerance` of tanh up to `limit`.

    Example:
        >>> terms_for(2**-8, 9.25), terms_for(2e-2, 9.25)
        (7, 5)
    """
    low, high = 1, 2
    while fit(high, limit).value_error > tolerance:
        low, high = high, 2 * high
        if high > 256:
            raise ValueError(
                f"no series of 256 terms is within {tolerance:g} of tanh up to {limit:g}. "
                'Fix: a larger tolerance, or tolerance="exact".'
            )
    while high - low > 1:
        middle = (low + high) // 2
        if fit(middle, limit).value_error > tolerance:
            low = middle
        else:
            high = middle
    return high


@dataclass(frozen=True)
class SeriesTable:
    """Series of one number of terms as arrays, narrowest range first.

    Example:
        >>> table = SeriesTable.of(2**-8, 9.25)
        >>> table.coefficients.shape
        (7, 9)
    """

    limits: np.ndarray  # [J]
    frequency: np.ndarray  # [J], π/2P
    coefficients: np.ndarray  # [R, J]

    @staticmethod
    @functools.cache
    def of(tolerance: float, limit: float) -> "SeriesTable":
        """The table of the package, where it has this one; otherwise it is fitted."""
        stored = _stored().get(table_name(tolerance, limit))
        if stored is None:
            return SeriesTable.fit(tolerance, limit)
        return SeriesTable(stored[0], stored[1], stored[2:])

    @staticmethod
    def fit(tolerance: float, limit: float) -> "SeriesTable":
        series = series_table(terms_for(tolerance, limit), tolerance, limit)
        return SeriesTable(
            np.array([s.limit for s in series]),
            np.array([np.pi / (2 * s.half_period) for s in series]),
            np.stack([s.coefficients for s in series], axis=1),
        )


def table_name(tolerance: float, limit: float) -> str:
    """The name of a table in the package's file."""
    return f"{tolerance:.9g} up to {limit:g}"


@functools.cache
def _stored() -> dict[str, np.ndarray]:
    """The package's tables by name, each [2 + R, J]: limits, frequency, coefficients."""
    with resources.files("regard.score").joinpath(STORED).open("rb") as file:
        return dict(np.load(file))


@functools.cache
def series_table(terms: int, tolerance: float, limit: float) -> tuple[SineSeries, ...]:
    """Series of `terms` terms for a geometric grid of ranges, the last as wide as `terms` can do.

    A hidden unit uses the first series whose limit covers its own range, so that narrower data
    have a smaller error. The last limit is the widest at which `terms` sines still meet
    `tolerance` (at least `limit`, for which `terms_for` chose their number). The narrower series
    could be better than `tolerance` everywhere; instead they are best where most sums lie.
    """
    step = 2.0 ** (1 / 32)
    widest = limit
    while fit(terms, widest * step).value_error <= tolerance:
        widest *= step
    narrower = [fit(terms, widest * 2.0 ** (-j / 8)) for j in range(8, 0, -1)]
    last = fit(terms, widest)
    slope = last.derivative_error
    return (*(_fit_by_density(series, tolerance, slope) for series in narrower), last)


def _fit_by_density(series: SineSeries, value: float, slope: float) -> SineSeries:
    """The same number of terms up to the same limit, with the least error where most sums lie.

    Least squares weighted by the density of the sums plus a constant, the smallest for which no
    error exceeds `value` and `slope`.
    """
    limit, terms = series.limit, len(series.coefficients)
    z = _points(terms, limit)
    density = _density(z, limit)
    spacing = np.sqrt(1.0 - (z / limit) ** 2)  # the points are denser towards the end
    best, best_error = series, _rms_error(series)
    for ratio in series.half_period / limit + np.linspace(-0.04, 0.04, 5):
        problem = _problem(terms, limit, limit * ratio)
        low, high = 0, 36  # constants of 10^-8 to 10, in steps of 10^(1/4)
        while low < high:
            middle = (low + high) // 2
            weight = np.tile((density + 10.0 ** (middle / 4 - 8)) * spacing, 2)
            candidate = _measured(limit, limit * ratio, _solve(*problem, weight))
            if candidate.value_error > value or candidate.derivative_error > slope:
                low = middle + 1
                continue
            high = middle
            error = _rms_error(candidate)
            if error < best_error:
                best, best_error = candidate, error
    return best


def _rms_error(series: SineSeries) -> float:
    """Root mean square of the error over the sums' density."""
    z = np.linspace(0.0, series.limit, 401)
    density = _density(z, series.limit)
    return float(np.sqrt(density @ (series(z) - np.tanh(z)) ** 2 / density.sum()))


def _density(z: np.ndarray, limit: float) -> np.ndarray:
    return np.exp(-0.5 * (z / (_DEVIATION * limit)) ** 2)


def _measured(limit: float, half_period: float, coefficients: np.ndarray) -> SineSeries:
    z = np.linspace(0.0, limit, 200 * len(coefficients) + 1)
    w = _frequencies(len(coefficients), half_period)
    value = np.abs(np.sin(np.outer(z, w)) @ coefficients - np.tanh(z)).max()
    slope = np.abs(np.cos(np.outer(z, w)) @ (w * coefficients) - np.cosh(z) ** -2.0).max()
    return SineSeries(limit, half_period, coefficients, float(value), float(slope))


def _frequencies(terms: int, half_period: float) -> np.ndarray:
    return (2 * np.arange(terms) + 1) * (np.pi / (2 * half_period))


def _weighted_fit(
    terms: int, limit: float, half_period: float, iterations: int
) -> tuple[np.ndarray, float]:
    """Lawson's iteration: least squares, reweighted towards where the error is largest."""
    basis, target = _problem(terms, limit, half_period)
    weight = np.ones_like(target)
    best, best_error = np.zeros(terms), np.inf
    for _ in range(iterations):
        solution = _solve(basis, target, weight)
        miss = np.abs(basis @ solution - target)
        if miss.max() < best_error:
            best, best_error = solution, miss.max()
        weight = weight * (miss / miss.max() + 1e-3)
        weight /= weight.mean()
    return best, float(best_error)


def _points(terms: int, limit: float) -> np.ndarray:
    """The points at which a series is fitted, denser towards the limit."""
    count = 6 * terms + 24
    return limit * np.sin(np.pi * (np.arange(count) + 0.5) / (2 * count))


def _problem(terms: int, limit: float, half_period: float) -> tuple[np.ndarray, np.ndarray]:
    """The basis and the target of the least-squares fit: values first, then derivatives."""
    z, w = _points(terms, limit), _frequencies(terms, half_period)
    angle = np.outer(z, w)
    basis = np.concatenate([np.sin(angle), _DERIVATIVE_WEIGHT * np.cos(angle) * w])
    return basis, np.concatenate([np.tanh(z), _DERIVATIVE_WEIGHT * np.cosh(z) ** -2.0])


def _solve(basis: np.ndarray, target: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Weighted least squares."""
    root = np.sqrt(weight)
    return np.linalg.lstsq(basis * root[:, None], target * root, rcond=1e-14)[0]
