"""The run's log: a CSV file with a line for every report and every validation.

A continued run drops the lines after the step that it continues from, because those steps are
computed again.
"""

import csv
import io
from pathlib import Path

from regard.atomic_file import named_errors, write_atomically

COLUMNS = (
    "step",
    "epoch",
    "learning_rate",
    "train_loss",
    "train_nll",
    "grad_norm",
    "tokens_per_second",
    "valid_loss",
    "valid_bleu",
    "seconds",
)


class Log:
    """A CSV file whose writer may be killed at any moment.

    Example:
        >>> import tempfile
        >>> from regard.seq2seq.train.log import Log, read_log
        >>> path = tempfile.mkdtemp() + "/log.csv"
        >>> log = Log(path)
        >>> log.write(step=1, train_loss=2.5)
        >>> log.write(step=2, train_loss=2.25)
        >>> Log(path, continue_at=1).write(step=2, train_loss=2.0)
        >>> [(row["step"], row["train_loss"]) for row in read_log(path)]
        [('1', '2.5'), ('2', '2.0')]

    Args:
        path: the file.
        continue_at: None starts a new log; a step keeps the lines up to it.
    """

    def __init__(self, path: str | Path, continue_at: int | None = None) -> None:
        self.path = Path(path)
        kept = []
        if continue_at is not None and self.path.exists():
            kept = [row for row in read_log(self.path) if int(row["step"]) <= continue_at]
        lines = [_line(dict(zip(COLUMNS, COLUMNS, strict=True))), *(_line(row) for row in kept)]
        write_atomically(self.path, "".join(lines))

    def write(self, **values: float | int | None) -> None:
        """Appends a line; a column that is not given stays empty."""
        row = {name: "" if value is None else value for name, value in values.items()}
        with named_errors(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(_line(row))


def read_log(path: str | Path) -> list[dict[str, str]]:
    """The lines of a log; an incomplete last line is left out."""
    text = Path(path).read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    return [row for row in csv.DictReader(io.StringIO(whole)) if row["step"].isdigit()]


def _line(row: dict) -> str:
    out = io.StringIO()
    csv.DictWriter(out, COLUMNS, restval="", lineterminator="\n").writerow(row)
    return out.getvalue()
