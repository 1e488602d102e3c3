"""The narrow lift: its error is measured on the data, and what is too large is never used."""

import functools
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
import regard
from problem import assert_close
from regard.score import narrow_table
from regard.score.additive import lift_anywhere
from regard.score.narrow_lift import EACH_TOKEN
from regard.score.narrow_table import DEVIATIONS, EDGES, MOST, OFFSETS, PAIRS, NarrowTable
from regard.score.sine_series import SeriesTable

pytestmark = pytest.mark.sampled(2)


@pytest.fixture(autouse=True)
def _lift():
    """Also on a CPU, where an exact form is faster."""
    with lift_anywhere():
        yield


B, T, S, H, V = 2, 160, 128, 16, 8
DEFAULT = 2**-8


def drawn(x_deviation=1.0, y_deviation=1.0, offset=0.0, seed=3):
    rng = np.random.default_rng(seed)
    return dict(
        query=x_deviation * rng.standard_normal((B, T, H)) + offset,
        key=y_deviation * rng.standard_normal((B, S, H)),
        vector=rng.standard_normal(H) / 4,
        value=rng.standard_normal((B, S, V)),
        cotangent=rng.standard_normal((B, T, V)),
    )


@functools.partial(jax.jit, static_argnames=("tolerance", "bound"))
def lift_of(query, key, vector, visible, tolerance=DEFAULT, bound="rms"):
    """Scores by the first lift, whether it is in range, and whether the next one is."""
    score = regard.Additive(None, None, vector, tolerance=tolerance, bound=bound)
    lift = score.lift(query[:, None], key[:, None], visible=visible[:, None])
    after = lift.otherwise
    return lift.scores()[:, 0], lift.in_range, after is not None and after.in_range


def measured(arrays, visible=None, tolerance=DEFAULT):
    """The error of the scores in tolerances · ‖w‖₁, [B, T, S], and the flags."""
    visible = np.ones((B, S), bool) if visible is None else visible
    x, y, w = (jnp.asarray(arrays[name], jnp.float32) for name in ("query", "key", "vector"))
    found, in_range, after = lift_of(x, y, w, jnp.asarray(visible), tolerance=tolerance)
    x, y, w = (np.asarray(a, np.float64) for a in (x, y, w))
    exact = np.tanh(x[:, :, None] + y[:, None]) @ w
    error = (np.asarray(found, np.float64) - exact) / (tolerance * np.abs(w).sum())
    return np.where(visible[:, None], error, 0), bool(in_range), bool(after)


def rms(error, axis=None):
    return np.sqrt(np.mean(error**2, axis=axis))


@pytest.mark.parametrize(
    ("tolerance", "rank"),
    [(2e-2, 6), (2**-8, 8), (2**-11, 12), (1e-6, None)],
)
def test_the_number_of_features_follows_the_tolerance(tolerance, rank):
    table = NarrowTable.of(tolerance)
    assert (table and table.rank) == rank


def two_points(rng):
    return rng.choice([-1.0, 1.0], (B, T, H)), rng.choice([-0.7, 0.2], (B, S, H))


def uniform(rng):
    return rng.uniform(-1.5, 1.5, (B, T, H)), rng.uniform(-1, 2, (B, S, H))


def saturated(rng):
    return rng.standard_normal((B, T, H)) - 40, rng.standard_normal((B, S, H))


def constant(rng):
    return np.full((B, T, H), 0.3), np.full((B, S, H), -2.0)


def skewed(rng):
    return 0.4 * rng.exponential(size=(B, T, H)), rng.standard_normal((B, S, H)) ** 2 / 2


def logistic(rng):
    return 0.5 * rng.logistic(size=(B, T, H)), 0.4 * rng.logistic(size=(B, S, H))


NORMAL = [(0.1, 0.1, 0), (0.5, 0.5, 1), (1, 1, 0), (1, 1, 0.7), (1, 1, -2), (1.4, 0.7, 0)]
NORMAL += [(0.3, 1.5, 0), (2.5, 0.2, 0), (1, 0, 0), (0.8, 0.8, -5), (1, 1, 300)]
OTHERS = [two_points, uniform, saturated, constant, skewed, logistic]


@pytest.mark.parametrize("data", NORMAL + OTHERS, ids=lambda one: getattr(one, "__name__", one))
@pytest.mark.parametrize("tolerance", [2**-8, 2**-11])
def test_where_it_is_in_range_the_error_is_within_the_tolerance(data, tolerance):
    arrays = drawn(*data) if isinstance(data, tuple) else drawn()
    if callable(data):
        arrays["query"], arrays["key"] = data(np.random.default_rng(0))
    error, in_range, _ = measured(arrays, tolerance=tolerance)
    assert in_range or tolerance < 2**-8  # what the default of bfloat16 is made for
    if in_range:
        assert rms(error, (1, 2)).max() <= 1.0
        assert max(rms(error, 2).max(), rms(error, 1).max()) <= EACH_TOKEN


@pytest.mark.parametrize("data", [(4, 4, 0), (3, 3, 0), (3, 3, 2)])
def test_data_that_are_too_wide_are_out_of_range(data):
    error, in_range, _ = measured(drawn(*data))
    assert not in_range
    # Rightly so: the units' errors, of either sign, all but cancel in the score's.
    assert rms(error) > 1 / np.sqrt(H)


def test_one_bad_example_is_enough():
    arrays = drawn()
    assert measured(arrays)[1]
    arrays["query"][1] *= 4
    arrays["key"][1] *= 4
    assert not measured(arrays)[1]


def test_a_unit_without_weight_still_keeps_its_gradient():
    """Its error moves no score, but d vector would be wrong."""
    arrays = drawn()
    arrays["query"][..., 0] *= 6
    arrays["key"][..., 0] *= 6
    arrays["vector"][0] = 0
    assert not measured(arrays)[1]


def test_masked_keys_are_not_measured():
    arrays, visible = drawn(), np.arange(S) < np.array([[S], [70]])
    clean = measured(arrays, visible)
    arrays["key"][1, 70:] = 1e4
    error, in_range, after = measured(arrays, visible)
    assert in_range
    assert after
    np.testing.assert_array_equal(error, clean[0])
    arrays["key"][1, 69:] = 1e4  # negative control: one of them takes part
    assert not measured(arrays, visible)[2]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_out_of_range(bad):
    arrays = drawn()
    arrays["query"][0, 5, 2] = bad
    assert not measured(arrays)[1]


@functools.partial(jax.jit, static_argnames=("tolerance", "bound", "implementation"))
def run(arrays, tolerance=DEFAULT, bound="rms", implementation="blockwise"):
    """Out, gradients by name, and the flag."""

    def pool(query, key, value, vector):
        score = regard.Additive(None, None, vector, tolerance=tolerance, bound=bound)
        options = dict(score=score, implementation=implementation, return_lifted=True)
        return regard.attend(query, key, value, **options)

    names = ("query", "key", "value", "vector")
    out, pull, lifted = jax.vjp(pool, *(arrays[name] for name in names), has_aux=True)
    return out, dict(zip(names, pull(arrays["cotangent"]), strict=True)), lifted


def as_jax(arrays, dtype=jnp.float32):
    return {name: jnp.asarray(one, dtype) for name, one in arrays.items()}


def expected(arrays):
    eye = np.eye(H)
    score = oracle.Additive(dict(query_kernel=eye, key_kernel=eye, vector=arrays["vector"]))
    may = oracle.allowed((B, T, S))
    tensors = arrays["query"], arrays["key"], arrays["value"]
    out = oracle.attend(*tensors, score=score, may=may).out
    return out, oracle.gradients(arrays["cotangent"], *tensors, score=score, may=may)


def relative(found, wanted):
    return rms(np.asarray(found, np.float64) - wanted) / rms(wanted)


@pytest.mark.parametrize("data", [(0.5, 0.5), (1, 1), (0.7, 1.4), (1, 1, 0.75)], ids=str)
def test_output_and_gradients(data):
    """The error of a gradient is that of a derivative, some four times that of the value."""
    arrays = drawn(*data)
    out, slopes = expected(arrays)
    found, gradients, lifted = run(as_jax(arrays))
    assert bool(lifted)
    assert relative(found, out) < DEFAULT / 4
    for name in ("query", "key", "vector"):
        assert relative(gradients[name], slopes[name]) < 4 * DEFAULT, name


def test_the_derivative_is_as_good_as_the_sine_series():
    """Unit normal x and y, and the series for the range that 4,096 of each have."""
    series = SeriesTable.of(DEFAULT, 10.25)
    entry = np.searchsorted(series.limits, 8.3)
    z = np.linspace(-5, 5, 201)
    weight = np.exp(-0.5 * z * z) / np.exp(-0.5 * z * z).sum()
    sums = z[:, None] + z
    angles = sums[..., None] * series.frequency[entry] * (2 * np.arange(8) + 1)
    table = NarrowTable.of(DEFAULT)
    errors = [np.sin(angles) @ series.coefficients[:, entry] - np.tanh(sums)]
    errors += [table(NarrowTable.entry(1.0, 1.0, 0.0), z, z) - np.tanh(sums)]
    for derive in (lambda e: e, lambda e: np.gradient(e, z, axis=0)):
        sines, narrow = (weight @ derive(error) ** 2 @ weight for error in errors)
        assert narrow <= sines


@pytest.mark.parametrize("wide", [20, 1000])
def test_outliers_are_scored_within_the_tolerance(wide):
    """Cauchy numbers in one token of a hundred. No feature grows with them, so that their rows too
    may be right; otherwise another path runs.
    """
    arrays, rng = drawn(), np.random.default_rng(0)
    arrays["query"][:, ::100] = rng.standard_cauchy(arrays["query"][:, ::100].shape) * wide
    error, in_range, _ = measured(arrays)
    assert not in_range or rms(error, 2).max() < 1.0
    out, slopes = expected(arrays)
    found, gradients, lifted = run(as_jax(arrays))
    assert bool(lifted) is in_range
    assert rms(np.asarray(found, np.float64) - out, 2).max() < 4 * DEFAULT
    for name in ("query", "key", "vector"):
        assert relative(gradients[name], slopes[name]) < 8 * DEFAULT, name


def test_the_steps_are_narrow_sines_definition():
    """Wide numbers, cut off where the series ends: the narrow features are wrong, the sines not."""
    text = regard.explain(
        *(jnp.zeros(shape) for shape in ((B, T, H), (B, S, H), (B, S, V))),
        score=regard.Additive(None, None, jnp.ones(H), tolerance=DEFAULT),
        implementation="blockwise",
    )
    narrow, sines, definition = (
        text.index(words) for words in (f"width {8 * H},", f"width {14 * H},", "by definition")
    )
    assert narrow < sines < definition
    arrays = drawn(20, 20)
    arrays = {k: np.clip(a, -3.5, 3.5) if k in ("query", "key") else a for k, a in arrays.items()}
    _, in_range, after = measured(arrays)
    assert (in_range, after) == (False, True)
    out, gradients, lifted = run(as_jax(arrays))
    by_sines, of_sines, _ = run(as_jax(arrays), bound="worst")
    assert bool(lifted)
    assert_close(out, np.asarray(by_sines, np.float64), 1e-6, "out")
    for name, one in of_sines.items():
        assert_close(gradients[name], np.asarray(one, np.float64), 1e-5, f"gradient of {name}")


def test_a_soft_cap_and_the_log_sum_exp_see_the_function_of_the_query():
    arrays = as_jax(drawn())
    options = dict(softcap=2.0, return_lse=True, sink=0.5, implementation="blockwise")

    def run(tolerance):
        score = regard.Additive(None, None, arrays["vector"], tolerance=tolerance)
        return jax.jit(functools.partial(regard.attend, **options))(
            arrays["query"], arrays["key"], arrays["value"], score=score
        )

    for found, wanted in zip(run(DEFAULT), run("exact"), strict=True):
        assert np.abs(found - wanted).max() < 0.02
    options["softcap"] = None
    for found, wanted in zip(run(DEFAULT), run("exact"), strict=True):
        assert np.abs(found - wanted).max() < 0.02


def test_forward_mode_and_second_derivatives():
    """By the lift as by the definition, up to the lift's error."""
    arrays = as_jax(drawn(0.25, 0.25))

    def curvature(tolerance):
        def pooled(query):
            score = regard.Additive(None, None, arrays["vector"], tolerance=tolerance)
            out = regard.attend(
                query, arrays["key"], arrays["value"], score=score, implementation="blockwise"
            )
            return (out * arrays["cotangent"]).sum()

        direction = jnp.ones_like(arrays["query"])
        return jax.jit(lambda x: jax.jvp(jax.grad(pooled), (x,), (direction,))[1])(arrays["query"])

    found, wanted = curvature(DEFAULT), curvature("exact")
    assert relative(found, np.asarray(wanted, np.float64)) < 0.05


# ---------------------------------------------------------------------------------------------
# The tables.


def test_the_stored_features_are_what_fitting_gives():
    path = pathlib.Path(__file__).parents[2] / "tools" / "fit_narrow_features.py"
    spec = importlib.util.spec_from_file_location("fit_narrow_features", path)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    whole = NarrowTable.with_rank(MOST)
    for entry in (0, 60, 131):
        wider, other = narrow_table.entry_deviations()[entry]
        fitted = tool.fit(wider, other, narrow_table.entry_offsets()[entry])[None]
        z = np.linspace(-3, 3, 61)
        one = narrow_table._evaluate(
            fitted.astype(np.float32), narrow_table.entry_deviations()[[entry]], z, z
        )
        np.testing.assert_allclose(whole(entry, z, z), one[0], atol=2e-4)  # another LAPACK


@pytest.mark.parametrize("entry", [0, 9, 75, 100, 220])
def test_the_stated_errors_are_the_true_ones(entry):
    table = NarrowTable.with_rank(8)
    rng = np.random.default_rng(entry)
    deviations = narrow_table.entry_deviations()[entry]
    z = rng.standard_normal((2, 1500))
    x, y = z * deviations[:, None]
    exact = np.tanh(x[:, None] + y + narrow_table.entry_offsets()[entry])
    square = (table(entry, x, y) - exact) ** 2
    of_x, of_y = (np.searchsorted(EDGES, one) for one in z)
    largest = table.largest_square[entry][of_x[:, None], of_y]
    assert np.all(square <= 1.3 * largest + 1e-12)  # its grid is five points for each bin
    stated = table.mean_square[entry][of_x[:, None], of_y].mean()
    np.testing.assert_allclose(square.mean(), stated, rtol=0.3, atol=1e-12)


def test_an_entry_is_the_nearest():
    for pair, (a, b) in enumerate(PAIRS):
        for number, offset in enumerate(OFFSETS):
            found = NarrowTable.entry(1.05 * DEVIATIONS[a], 0.95 * DEVIATIONS[b], offset + 0.1)
            assert found == pair * len(OFFSETS) + number
