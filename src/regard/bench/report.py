"""What a run looks like on the terminal: a progress bar and three tables, drawn by Rich.

Reads the record that goes to JSON, so a stored run can be looked at again.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from regard.bench.measure import AGAIN

SWEPT = ("sweep_", "memory_")  # cases shown as cost against length, not row by row
BACKWARD = "+backward"  # ends the name of a curve of forward+backward


@contextlib.contextmanager
def progress_bar(console: Console, total: int) -> Iterator[Callable[[str, float], None]]:
    """A bar on `console`; gives the function that `measure_cases` wants as `watch`."""
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


def tables(record: dict[str, Any]) -> Group:
    """Every table of a run, for `Console.print`."""
    return Group(
        _title(record), *filter(None, (_times(record), _lengths(record), _verdicts(record)))
    )


def describe_case(case: dict[str, Any]) -> str:
    """The shapes of a case in one line.

    >>> describe_case(dict(B=2, T=8, S=8, N=4, D=64, V=64, dtype="float32", mask="causal"))
    'B=2 T=S=8 N=4 D=V=64 causal'
    """
    same_length, same_width = case["T"] == case["S"], case["D"] == case["V"]
    parts = [
        f"B={case['B']}",
        f"T=S={case['T']}" if same_length else f"T={case['T']} S={case['S']}",
        f"N={case['N']}" if case["N"] else "",
        f"D=V={case['D']}" if same_width else f"D={case['D']} V={case['V']}",
        case["dtype"] if case["dtype"] != "float32" else "",
        case["mask"] if case["mask"] != "none" else "",
    ]
    return " ".join(part for part in parts if part)


def _title(record: dict[str, Any]) -> Text:
    device, found = record["device"], record["versions"]
    installed = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    text = Text(f"\n{device['name']}, {device['cores']} cores", style="bold")
    text.append(f"\n{installed}\n", style="dim")
    if record["settings"]["quick"]:
        text.append("A quick run: for a look, not for a claim.\n", style="yellow")
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
    for heading in ("ms", "±", "× regard", "temp MiB", "error"):
        table.add_column(heading, justify="right")
    cases = {case["name"]: case for case in record["cases"]}
    for name in dict.fromkeys(row["case"] for row in rows):
        table.add_row(Text(name, "bold"))
        table.add_row(Text(describe_case(cases[name]), "dim"))
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
        Text(_number(row["temp_mib"])),
        Text(f"{row['error']:.1e}" if row["error"] is not None else "–"),
    ]


def swept(record: dict[str, Any]) -> dict[str, dict[int, dict[str, Any]]]:
    """The rows of the sweeps as curves: curve name -> length -> row.

    Forward curves have times and memory, those named "…+backward" memory alone.
    """
    curves: dict[str, dict[int, dict[str, Any]]] = {}
    cases = {case["name"]: case for case in record["cases"]}
    for row in record["rows"]:
        if not row["case"].startswith(SWEPT) or row["who"] == AGAIN or row["absent"]:
            continue
        case = cases[row["case"]]
        name = row["who"]
        if name == "regard" and case["tolerance"] is not None:
            name = f"regard {case['tolerance']:g}"
        if case["direction"] == "forward+backward":
            name += BACKWARD
        curves.setdefault(name, {})[case["T"]] = row
    return curves


def _lengths(record: dict[str, Any]) -> Table | None:
    curves = swept(record)
    if not curves:
        return None
    table = _table(
        "Additive attention against length: B=1, T=S, h=V=64, float32",
        "ms: median, forward. MiB: temporaries of the compiled program; forward+backward (+bwd) "
        "is compiled with valid lengths, not run.",
    )
    table.add_column("\nT=S", justify="right")
    timed = [name for name in curves if not name.endswith(BACKWARD)]
    for name in timed:
        table.add_column(f"{name}\nms", justify="right")
    for name in curves:
        unit = "+bwd MiB" if name.endswith(BACKWARD) else "MiB"
        table.add_column(f"{name.removesuffix(BACKWARD)}\n{unit}", justify="right")
    for length in sorted({length for curve in curves.values() for length in curve}):
        found = {name: curve.get(length) for name, curve in curves.items()}
        times = [found[name] for name in timed]
        table.add_row(
            str(length),
            *(f"{row['ms']['median']:.4g}" if row and row["ms"] else "–" for row in times),
            *(_number(row["temp_mib"]) if row else "–" for row in found.values()),
        )
    return table


def _verdicts(record: dict[str, Any]) -> Table | None:
    verdicts: Sequence[dict[str, Any]] = record["verdicts"]
    if all(verdict["outcome"] == "not measured" for verdict in verdicts):
        return None
    table = _table("Promises", f"noise: how far apart '{AGAIN}' came out in the same loop.")
    table.add_column("promise")
    for heading in ("goal", "measured", "noise", "outcome"):
        table.add_column(heading, justify="right")
    styles = {"reached": "green", "short": "bold red", "not measured": "dim"}
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
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}"
