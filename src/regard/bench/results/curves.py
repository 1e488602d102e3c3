"""The sweeps of a record as curves: what each program costs against the length.

Reads the record that goes to JSON, so a stored run can be looked at again, on any machine.
"""

from typing import Any

from regard.bench.run.measure import AGAIN

SWEPT = ("sweep_", "memory_")  # cases shown as cost against length, not row by row
BACKWARD = "+backward"  # ends the name of a curve of forward+backward

Curves = dict[str, dict[int, dict[str, Any]]]  # name of the curve -> length -> row


def swept(record: dict[str, Any]) -> Curves:
    """The curves of a record.

    A row without "ms" was compiled for its memory and not run; one that is "absent" has neither.
    """
    curves: Curves = {}
    cases = {case["name"]: case for case in record["cases"]}
    for row in record["rows"]:
        if row["case"].startswith(SWEPT) and row["who"] != AGAIN:
            case = cases[row["case"]]
            curves.setdefault(_curve_name(row["who"], case), {})[case["T"]] = row
    return curves


def sweep_case(record: dict[str, Any]) -> dict[str, Any]:
    """A case that tells what the sweep is about: all but the length is the same for all."""
    return next(case for case in record["cases"] if case["name"].startswith(SWEPT))


def _curve_name(who: str, case: dict[str, Any]) -> str:
    """
    >>> dot = dict(score="dot", tolerance=None, direction="forward+backward")
    >>> _curve_name("jax.nn cudnn", dot)
    'jax.nn cudnn, dot+backward'
    """
    name, tolerance = who, case["tolerance"]
    if who == "regard" and tolerance is not None:
        name += f" {tolerance if isinstance(tolerance, str) else f'{tolerance:g}'}"
    if case["score"] != "additive":
        name += f", {case['score']}"
    return name + (BACKWARD if case["direction"] == "forward+backward" else "")


def median_ms(row: dict[str, Any]) -> float | None:
    """The time of a row; None for one that was not run."""
    return row["ms"]["median"] if row["ms"] else None
