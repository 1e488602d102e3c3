"""The sine series of tanh: the errors it claims are its errors, and they are design section 2's."""

import numpy as np
import pytest

from regard.score import sine_series
from regard.score.additive import DEFAULT_TOLERANCE, design_limit

# Design section 2, "fitted (minimax-like) errors, value / derivative", by range and terms.
DESIGN_ERRORS = {
    4: {6: (7e-4, 4e-3), 8: (7e-5, 9e-4), 12: (1e-6, 5e-5), 16: (3e-8, 2e-6)},
    6: {6: (7e-3, 3e-2), 8: (1e-3, 7e-3), 12: (5e-5, 4e-4), 16: (2e-6, 2e-5)},
    8: {6: (2e-2, 7e-2), 8: (6e-3, 3e-2), 12: (6e-4, 3e-3), 16: (5e-5, 4e-4)},
    12: {6: (7e-2, 2e-1), 8: (3e-2, 1e-1), 12: (6e-3, 3e-2), 16: (1e-3, 6e-3)},
}
PAIRS = [(limit, terms) for limit, row in DESIGN_ERRORS.items() for terms in row]


def series(fitted, z):
    """The series and its derivative at z, from its definition."""
    r = np.arange(1, fitted.coefficients.size + 1)
    omega = (2 * r - 1) * np.pi / (2 * fitted.half_period)
    angles = np.multiply.outer(z, omega)
    return np.sin(angles) @ fitted.coefficients, np.cos(angles) @ (omega * fitted.coefficients)


def errors(fitted, limit):
    z = np.linspace(-limit, limit, 40_001)
    value, derivative = series(fitted, z)
    return np.abs(value - np.tanh(z)).max(), np.abs(derivative - 1 / np.cosh(z) ** 2).max()


@pytest.mark.parametrize(("limit", "terms"), PAIRS)
def test_the_claimed_errors_are_the_true_ones(limit, terms):
    fitted = sine_series.fit(terms, float(limit))
    value, derivative = errors(fitted, limit)
    # The grid here is not the fit's: between two grids the maximum differs by a little.
    assert value <= 1.01 * fitted.value_error + 1e-13
    assert derivative <= 1.01 * fitted.derivative_error + 1e-12
    assert value >= 0.9 * fitted.value_error - 1e-13
    assert derivative >= 0.9 * fitted.derivative_error - 1e-12


@pytest.mark.parametrize(("limit", "terms"), PAIRS)
def test_the_errors_are_the_designs_or_better(limit, terms):
    value, derivative = errors(sine_series.fit(terms, float(limit)), limit)
    # The design prints one digit, which alone is worth a factor of up to 1.5, and a fit may give
    # a little of the value for a better derivative.
    assert value <= 1.6 * DESIGN_ERRORS[limit][terms][0]
    assert derivative <= 1.1 * DESIGN_ERRORS[limit][terms][1]


@pytest.mark.parametrize(("limit", "terms"), [(8.5, 7), (8.5, 10), (8.5, 12), (8.5, 22)])
def test_the_errors_at_the_range_of_unit_variance(limit, terms):
    # Design section 2, last sentence.
    expected = {7: 1.5e-2, 10: 2.7e-3, 12: 9e-4, 22: 3e-6}[terms]
    assert errors(sine_series.fit(terms, limit), limit)[0] <= 1.5 * expected


def test_a_fit_is_float64_and_of_its_size():
    fitted = sine_series.fit(10, 6.0)
    assert fitted.coefficients.shape == (10,)
    assert fitted.coefficients.dtype == np.float64
    assert fitted.half_period > 0


@pytest.mark.parametrize("limit", [2.0, 4.0, 8.5])
@pytest.mark.parametrize("tolerance", [2e-2, 2**-8, 2**-11, 1e-4, 1e-6])
def test_terms_for_is_the_fewest_that_do(tolerance, limit):
    terms = sine_series.terms_for(tolerance, limit)
    assert isinstance(terms, int)
    assert errors(sine_series.fit(terms, limit), limit)[0] <= tolerance
    if terms > 1:
        assert sine_series.fit(terms - 1, limit).value_error > tolerance


def test_terms_grow_with_range_and_precision():
    by_limit = [sine_series.terms_for(1e-4, limit) for limit in (2.0, 4.0, 6.0, 8.0)]
    assert by_limit == sorted(by_limit)
    by_tolerance = [sine_series.terms_for(tolerance, 6.0) for tolerance in (1e-2, 1e-3, 1e-4, 1e-6)]
    assert by_tolerance == sorted(by_tolerance)
    assert by_tolerance[0] < by_tolerance[-1]


@pytest.mark.parametrize("tolerance", [2e-2, 2**-8, 2**-11, 1e-6])
def test_a_table_keeps_to_the_tolerance_and_is_closest_where_most_sums_are(tolerance):
    limit = 9.5
    terms = sine_series.terms_for(tolerance, limit)
    *narrower, last = sine_series.series_table(terms, tolerance, limit)
    sums = np.random.default_rng(0).normal(size=2000)
    ratios = []
    for series in narrower:
        value, derivative = errors(series, series.limit)
        assert value <= 1.01 * tolerance
        assert derivative <= 1.01 * last.derivative_error
        # Sums whose deviation is a fifth of the range: against the fit that is even everywhere.
        z = np.clip(sums * series.limit / 5, -series.limit, series.limit)
        even = sine_series.fit(terms, series.limit)
        missed, before = (np.mean((one(z) - np.tanh(z)) ** 2) ** 0.5 for one in (series, even))
        ratios.append(missed / before)
    assert max(ratios) <= 1.0
    assert np.mean(ratios) < 0.75  # the widest have hardly any room


@pytest.mark.parametrize(
    ("tolerance", "limit"),
    [(2**-8, 9.25), (2**-11, 7.0), pytest.param(1e-6, 9.25, marks=pytest.mark.slow)],
)
def test_the_stored_tables_are_what_fitting_gives(tolerance, limit):
    stored = sine_series.SeriesTable.of(tolerance, limit)
    fitted = sine_series.SeriesTable.fit(tolerance, limit)
    np.testing.assert_allclose(stored.limits, fitted.limits, rtol=1e-12)
    z = np.linspace(-limit, limit, 201)
    for (w, c), (other_w, other_c) in zip(*(_series(t) for t in (stored, fitted)), strict=True):
        odd = 2 * np.arange(len(c)) + 1
        ours, theirs = (np.sin(np.outer(z, odd * a)) @ b for a, b in ((w, c), (other_w, other_c)))
        np.testing.assert_allclose(ours, theirs, atol=1e-9)  # another LAPACK rounds otherwise


def _series(table):
    return zip(table.frequency, table.coefficients.T, strict=True)


@pytest.mark.parametrize("tokens", [33, 100, 4096, 131_072])
@pytest.mark.parametrize("tolerance", DEFAULT_TOLERANCE.values())
def test_no_default_is_fitted_while_a_call_is_traced(tolerance, tokens, monkeypatch):
    monkeypatch.setattr(sine_series, "series_table", None)
    for other in (33, tokens, 1 << 20):
        for units in (1, 64, 8 * 16 * 1024, 1 << 30):
            sine_series.SeriesTable.of(tolerance, design_limit(tokens, other, units))
