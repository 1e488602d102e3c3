"""The properties that every backend and every score has; the contract suites check them for each
case.
"""

import numpy as np

from problem import assert_close, error

POISON = (np.nan, np.inf, -np.inf)


def equals_the_oracle(problem):
    """Output and every gradient within the dtype's tolerance; dtypes and shapes kept."""
    out, gradients = problem.answer
    assert str(out.dtype) == problem.dtypes["out"], "the output has the value's dtype"
    assert_close(out, problem.pooled.out, problem.tolerance("out"), "out")
    assert set(gradients) == set(problem.gradients)
    for name, expected in problem.gradients.items():
        assert str(gradients[name].dtype) == problem.dtypes[name], f"gradient of {name}"
        assert_close(gradients[name], expected, problem.tolerance(name), f"gradient of {name}")


def empty_rows_are_exactly_zero(problem):
    """An empty row: output 0, and gradient 0 in its query and bias. Never NaN."""
    out, gradients = problem.answer
    empty = ~problem.may_per_query
    np.testing.assert_array_equal(out[empty], 0)
    np.testing.assert_array_equal(gradients["query"][empty], 0)
    unseen = ~problem.may_per_key
    np.testing.assert_array_equal(gradients["key"][unseen], 0)
    np.testing.assert_array_equal(gradients["value"][unseen], 0)
    if "bias" in gradients and gradients["bias"].shape == problem.shape:
        np.testing.assert_array_equal(gradients["bias"][~problem.may], 0)


def padding_reaches_nothing(problem):
    """NaN and Inf in masked keys and values, and in queries of empty rows: not one bit changes."""
    poisoned = _poisoned_padding(problem)
    if poisoned is None:
        return  # No padding in this mask; the masks that have it are in every table.
    out, gradients = problem.answer
    out_poisoned, gradients_poisoned = problem.run(poisoned)
    np.testing.assert_array_equal(out_poisoned, out, err_msg="out")
    for name, expected in gradients.items():
        np.testing.assert_array_equal(
            gradients_poisoned[name], expected, err_msg=f"gradient of {name}"
        )


def padding_reaches_nothing_alone(problem):
    """The same of a call that is not differentiated, which may zero less."""
    poisoned = _poisoned_padding(problem)
    if poisoned is None:
        return
    out = problem.run_alone()
    assert_close(out, problem.pooled.out, problem.tolerance("out"), "out")
    np.testing.assert_array_equal(out[~problem.may_per_query], 0)
    np.testing.assert_array_equal(problem.run_alone(poisoned), out)


def explain_says_what_ran(problem):
    """The backend by name; a lift where it ran, and none where it did not."""
    assert problem.answer
    text = problem.explained()
    assert text.startswith(f"{problem.backend.implementation} runs: asked for; ")
    says_lift, says_guard = "by an inner product" in text, "where that does not hold" in text
    if bool(problem.lifted):
        assert says_lift
    else:
        assert says_guard or not says_lift


def breaking_one_value_shows(problem):
    """Negative control of equals_the_oracle: with one value changed, the comparison must fail."""
    weights = problem.pooled.weights
    if not weights.any():
        return  # Every row is empty.
    *lead, _, s = np.unravel_index(np.argmax(weights), weights.shape)
    value = problem.inputs["value"].copy()
    where = (
        (s,)
        if not lead
        else (lead[0], s)
        if len(lead) == 1
        else (lead[0], s, lead[1] * value.shape[2] // weights.shape[1])
    )
    value[where] += 8.0
    out, _ = problem.run({"value": value})
    assert error(out, problem.pooled.out) > 8 * problem.tolerance("out")


def _poisoned_padding(problem):
    """The inputs with NaN and Inf in masked places; None where there is no such place."""
    unseen, empty = ~problem.may_per_key, ~problem.may_per_query
    if not (unseen.any() or empty.any()):
        return None
    return {
        "query": _poisoned(problem.inputs["query"], empty),
        "key": _poisoned(problem.inputs["key"], unseen),
        "value": _poisoned(problem.inputs["value"], unseen),
    }


def _poisoned(x, where):
    x = x.copy()
    x[where] = np.resize(POISON, x[where].shape)
    return x


class EveryCase:
    """The properties as tests: a suite subclasses this and has a fixture named `problem`."""

    def test_equals_the_oracle(self, problem):
        equals_the_oracle(problem)

    def test_empty_rows_are_exactly_zero(self, problem):
        empty_rows_are_exactly_zero(problem)

    def test_padding_reaches_nothing(self, problem):
        padding_reaches_nothing(problem)
