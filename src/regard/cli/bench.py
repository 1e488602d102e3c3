"""`regard bench`: time regard against everybody else who is installed."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

RESULTS = Path("benchmarks/results")
QUICK_SWEEP = 1024  # the longest sequence of the sweep's times in a quick run


def command(
    case: Annotated[
        list[str] | None,
        typer.Option("--case", help="Run the cases with this name; may be a glob and repeated."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few rounds, short sequences: a look, not a claim.")
    ] = False,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Rounds of a group of cases, at most.")
    ] = 20,
    out: Annotated[
        Path | None,
        typer.Option("--out", help=f"Folder for the JSON and the picture.  [default: {RESULTS}]"),
    ] = None,
    json_only: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the JSON and nothing else; write files only where --out says."
        ),
    ] = False,
) -> None:
    """Time regard against its peers: about three minutes on two cores, --quick about one."""
    from rich.console import Console

    from regard.bench import record, report
    from regard.bench.cases import CASES, select
    from regard.bench.measure import Settings, measure_cases, steps

    try:
        cases = select(tuple(case or ()))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--case") from None
    settings = Settings(repeats=repeats, quick=quick)
    if quick:
        settings = dataclasses.replace(settings, budget=1.5)
        if not case:
            cases = tuple(c for c in cases if "sweep" not in c.group or c.T <= QUICK_SWEEP)

    with report.progress_bar(Console(stderr=True), steps(cases)) as watch:
        rows = measure_cases(cases, settings, watch)
    result = record.make_record(cases, rows, settings, partial=len(cases) < len(CASES))

    if json_only:
        typer.echo(json.dumps(result, indent=1))
    else:
        Console().print(report.tables(result))
    if out is not None or not json_only:
        folder = out or RESULTS
        typer.echo(f"numbers: {record.write(result, folder)}", err=True)
        try:
            from regard.bench import plot

            picture = plot.draw(result, folder)
            if picture is not None:
                typer.echo(f"picture: {picture}", err=True)
        except ModuleNotFoundError as error:
            typer.echo(f'no picture: {error}. Fix: pip install "regard[bench]"', err=True)
    if any(row.who == "regard" and row.absent for row in rows):
        typer.echo("regard failed a case: see the table", err=True)
        raise typer.Exit(1)
