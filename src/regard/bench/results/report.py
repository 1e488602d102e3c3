"""A run on the terminal: its progress, and its tables, drawn by Rich.

Reads the record that goes to JSON, so a stored run can be shown again.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from regard.bench.results.record import (
    BACKWARD,
    SWEPT,
    Curves,
    case_words,
    median_ms,
    sweep_case,
    swept,
)
from regard.bench.run.measure import AGAIN


@contextlib.contextmanager
def progress_bar(console: Console, total: int) -> Iterator[Callable[[str, float], None]]:
    """A bar on `console`; gives the function that `measure_cases` takes as `watch`."""
    with Progress(
        SpinnerColumn(),
        BarColumn(bar_width=30),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.description}"),
        console=console,
        transient=True,
        auto_refresh=False,  # a thread that redraws in the middle of a run would be timed with it
    ) as progress:
        task = progress.add_task("starting", total=total)

        def watch(what: str, further: float) -> None:
            progress.update(task, description=what, advance=further)
            progress.refresh()

        yield watch


def progress_lines(console: Console) -> Callable[[str, float], None]:
    """Prints a line for each step, with the seconds since the start: for a run that may be
    cut off, or watched from afar."""
    start = time.perf_counter()

    def watch(what: str, further: float) -> None:
        since = time.perf_counter() - start
        console.print(f"{since:6.1f} s  {what}", highlight=False, markup=False)

    return watch


def tables(record: dict[str, Any]) -> Group:
    """Every table of a run, for `Console.print`; the promises last."""
    return Group(
        _title(record), *filter(None, (_times(record), *_lengths(record), _verdicts(record)))
    )


def _title(record: dict[str, Any]) -> Text:
    device, found = record["device"], record["versions"]
    installed = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    text = Text(f"\n{device['name']}, {device['cores']} cores", style="bold")
    if device.get("driver"):
        text.append(f", driver {device['driver']}")
    text.append(f"\n{installed}\n", style="dim")
    if record["settings"]["quick"]:
        text.append("A quick run: only an impression.\n", style="yellow")
    return text


def _table(title: str, caption: str | None = None) -> Table:
    return Table(
        title=title,
        caption=caption,
        box=SIMPLE_HEAD,
        pad_edge=False,
        title_style="bold",
        title_justify="left",
        caption_justify="left",
    )


def _times(record: dict[str, Any]) -> Table | None:
    rows = [row for row in record["rows"] if not row["case"].startswith(SWEPT)]
    if not rows:
        return None
    table = _table(
        "Time, memory and error",
        "× regard: its time over regard's, same run; above 1, regard is faster. ±: half the "
        f"distance of the quartiles. '{AGAIN}': the same program twice, the noise. "
        "error: the largest over output and gradients, against float64.",
    )
    table.add_column("case", min_width=30)
    for heading in ("ms", "±", "× regard", "TFLOP/s", "temp MiB", "error"):
        table.add_column(heading, justify="right")
    cases = {case["name"]: case for case in record["cases"]}
    for name in dict.fromkeys(row["case"] for row in rows):
        table.add_row(Text(name, "bold"))
        table.add_row(Text(case_words(cases[name]), "dim"))
        for row in rows:
            if row["case"] == name:
                table.add_row(*_cells(row))
        table.add_section()
    return table


def _cells(row: dict[str, Any]) -> list[Text]:
    who = Text(f"  {row['who']}", "bold cyan" if row["who"] == "regard" else "")
    if row["absent"]:
        who.append(f": {row['absent']}", "red" if row["who"] == "regard" else "dim")
        return [who]
    if row["lifted"] is not None:
        who.append(", lifted" if row["lifted"] else ", by definition", "dim")
    spread, ms = "", row["ms"]
    if ms:
        spread = f"{50 * (ms['high_quartile'] - ms['low_quartile']) / ms['median']:.0f}%"
    return [
        who,
        Text(f"{ms['median']:.4g}" if ms else "–"),
        Text(spread, "dim"),
        Text(f"{row['ratio']:.2f}" if row["ratio"] is not None else "–"),
        Text(_rate(row.get("tflops"))),
        Text(_number(row["temp_mib"])),
        Text(f"{row['error']:.1e}" if row["error"] is not None else "–"),
    ]


def _lengths(record: dict[str, Any]) -> list[Table]:
    """Time and memory against length, a column for each curve."""
    curves = swept(record)
    if not curves:
        return []
    case = sweep_case(record)
    shapes = f"B={case['B']}, T=S, h=V={case['D']}, {case['dtype']}"
    timed = {
        name: curve for name, curve in curves.items() if any(row["ms"] for row in curve.values())
    }
    rows = [row for curve in curves.values() for row in curve.values()]
    worst = max((row["error"] or 0.0 for row in rows if row["ms"]), default=0.0)
    absent = [f"{row['case']}, {row['who']}: {row['absent']}" for row in rows if row["absent"]]
    return [
        _against_length(
            f"Time against length, ms: {shapes}",
            f"{BACKWARD}: forward and backward. Largest error against float64: {worst:.1e}.",
            timed,
            median_ms,
        ),
        _against_length(
            f"Memory against length, MiB of temporaries: {shapes}",
            "\n".join(["What has no time was compiled, not run.", *absent]),
            curves,
            lambda row: row["temp_mib"],
        ),
    ]


def _against_length(
    title: str,
    caption: str | None,
    curves: Curves,
    value: Callable[[dict[str, Any]], float | None],
) -> Table:
    table = _table(title, caption)
    table.add_column("T=S", justify="right")
    for name in curves:
        table.add_column(name.replace(BACKWARD, f"\n{BACKWARD}"), justify="right")
    for length in sorted({length for curve in curves.values() for length in curve}):
        rows = [curve.get(length) for curve in curves.values()]
        table.add_row(str(length), *(_number(value(row)) if row else "–" for row in rows))
    return table


def _verdicts(record: dict[str, Any]) -> Table | None:
    verdicts: Sequence[dict[str, Any]] = record["verdicts"]
    if all(verdict["outcome"] == "not measured" for verdict in verdicts):
        return None
    table = _table("Promises", f"noise: how far apart '{AGAIN}' came out in the same loop.")
    table.add_column("promise")
    for heading in ("goal", "measured", "noise", "outcome"):
        table.add_column(heading, justify="right")
    styles = {
        "reached": "green",
        "short": "bold red",
        "failed": "bold red",
        "not measured": "dim",
    }
    for verdict in verdicts:
        style = styles[verdict["outcome"]]
        measured, noise = verdict["measured"], verdict["noise"]
        table.add_row(
            verdict["promise"],
            verdict["goal"],
            "–" if measured is None else f"{measured:.3g}",
            "" if noise is None else f"{noise:.0%}",
            Text(verdict["outcome"], style),
        )
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _rate(tflops: float | None) -> str:
    return "–" if tflops is None else f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.2g}"
