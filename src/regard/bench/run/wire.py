"""Cases and rows as JSON, between the process that asks and the one that measures."""

from typing import Any

from regard.bench.cases.case import Case
from regard.bench.run.measure import Row
from regard.bench.run.timing import Timing


def read_case(fields: dict[str, Any]) -> Case:
    """A case from JSON; `dataclasses.asdict` writes it."""
    return Case(**fields | {"against": tuple(fields["against"])})


def write_row(row: Row) -> dict[str, Any]:
    """A row for JSON.

    >>> read_row(write_row(Row("case", "book", timing=Timing((1.0, 2.0))))).timing
    Timing(seconds=(1.0, 2.0))
    """
    return vars(row) | {"timing": row.timing and row.timing.seconds}


def read_row(fields: dict[str, Any]) -> Row:
    """A row from JSON."""
    seconds = fields["timing"]
    return Row(**fields | {"timing": Timing(tuple(seconds)) if seconds else None})
