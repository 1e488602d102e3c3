"""`regard bench`: time regard against every other library that is installed.

Also draws the pictures of a run that another machine made, and tunes the wide kernel's blocks.
"""

import dataclasses
import enum
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from regard.bench import Case, Row, Settings
    from regard.bench.run.processes import Save

RESULTS = Path("benchmarks/results")
BATCH = 4  # groups that are compiled together on a GPU; of a survey, a cell of each family
WIDTH = 150  # of the tables where there is no terminal
QUICK_SWEEP = {"cpu": 1024, "gpu": 8192}  # the longest sequence of a sweep in a quick run


class Device(enum.StrEnum):
    """Where to run: each has its own table of cases, and its own promises."""

    cpu = "cpu"
    gpu = "gpu"


def command(
    device: Annotated[Device, typer.Option(help="Whose cases to run.")] = Device.cpu,
    case: Annotated[
        list[str] | None,
        typer.Option("--case", help="Run the cases with this name; may be a glob."),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Few repeats, short sequences: quick, and too noisy to quote."
        ),
    ] = False,
    survey: Annotated[
        bool,
        typer.Option("--survey", help="Run cells drawn by a seed instead of the named cases."),
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of a group of cases, at most.")] = 20,
    minutes: Annotated[
        float | None,
        typer.Option(min=0, help="Stop after this time; what was not reached is listed."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder for the JSON and the pictures.",
            show_default=str(RESULTS),
        ),
    ] = None,
    json_only: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the JSON and nothing else; write files only where --out says."
        ),
    ] = False,
    draw: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Draw the pictures of this JSON, and stop."),
    ] = None,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune", help="Find block shapes for the wide kernel (of these --case), and stop."
        ),
    ] = False,
) -> None:
    """Time regard against its peers: about three minutes on two cores, a few more on a GPU."""
    if draw is not None:
        _draw(_stored_run(draw), out or draw.parent)
    elif tune:
        _tune(case or ["kernel_*"], out)
    else:
        _bench(device.value, case or [], quick, survey, repeats, minutes, out, json_only)


def _bench(
    device: str,
    patterns: list[str],
    quick: bool,
    survey: bool,
    repeats: int,
    minutes: float | None,
    out: Path | None,
    json_only: bool,
) -> None:
    from rich.console import Console

    from regard.bench.results import record, report
    from regard.bench.run.measure import NOT_REACHED, Settings

    table, targets = _of(device, survey)
    cases = _select(table, patterns)
    settings = Settings(
        repeats=repeats, quick=quick, limit=None if minutes is None else 60 * minutes
    )
    if quick:
        settings = dataclasses.replace(settings, budget=1.5)
        if not patterns:
            longest = QUICK_SWEEP[device]
            cases = tuple(c for c in cases if "sweep" not in c.group or longest >= c.T)

    folder = out or RESULTS
    writes = out is not None or not json_only
    saved: set[Path] = set()

    def made(rows: list["Row"], described: dict[str, Any]) -> dict[str, Any]:
        partial = len(cases) < len(table)
        about: Any = dict(device=described, targets=targets, partial=partial, survey=survey)
        return record.make_record(cases, rows, settings, **about)

    def save(rows: list["Row"], described: dict[str, Any] | None) -> None:
        """Keeps what is measured, should this process be ended."""
        if writes and described is not None:
            saved.add(record.write(made(rows, described), folder))

    if device == "cpu":
        rows, described = _on_cpu(cases, settings)
    else:
        rows, described = _on_gpu(cases, settings, save)
    result = made(rows, described)
    if json_only:
        typer.echo(json.dumps(result, indent=1))
    else:
        # In a file, lines need not be shortened.
        Console(width=None if sys.stdout.isatty() else WIDTH).print(report.tables(result))
        if survey:
            from regard.bench.results.cells import summary

            typer.echo(summary(result))
    if writes:
        path = record.write(result, folder)
        for earlier in saved - {path}:
            earlier.unlink(missing_ok=True)
        typer.echo(f"numbers: {path}", err=True)
        _draw(result, folder)
    if any(row.who == "regard" and row.absent not in (None, NOT_REACHED) for row in rows):
        typer.echo("regard failed a case: see the table", err=True)
        raise typer.Exit(1)


def _of(device: str, survey: bool) -> tuple[Sequence["Case"], Sequence[Any]]:
    """The cases and the promises of a device; a survey has cells and promises nothing."""
    if survey:
        from regard.bench.cases.survey import survey as drawn

        return drawn("gpu" if device == "gpu" else "cpu"), ()
    from regard.bench.cases import tables
    from regard.bench.results import targets

    if device == "gpu":
        return tables.GPU_CASES, targets.GPU_TARGETS
    return tables.CPU_CASES, targets.CPU_TARGETS


def _select(table: Sequence["Case"], patterns: list[str]) -> tuple["Case", ...]:
    from regard.bench.cases.case import select

    try:
        return select(table, patterns)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--case") from None


def _on_cpu(cases: Sequence["Case"], settings: "Settings") -> tuple[list["Row"], dict[str, Any]]:
    """All frameworks in this process, which compete for nothing but the cores."""
    import jax
    from rich.console import Console

    from regard.bench.results import record, report
    from regard.bench.run import measure

    jax.config.update("jax_platforms", "cpu")  # also where there is a GPU
    with report.progress_bar(Console(stderr=True), measure.steps(cases)) as watch:
        return measure.measure_cases(cases, settings, watch), record.describe_device()


def _on_gpu(
    cases: Sequence["Case"], settings: "Settings", save: "Save"
) -> tuple[list["Row"], dict[str, Any]]:
    """In a process for each framework; this one leaves the device alone."""
    from rich.console import Console

    from regard.bench.cases.survey import family_of
    from regard.bench.results import report
    from regard.bench.run import processes

    families = {family_of(case.group) for case in cases}  # of named cases, ""
    settings = dataclasses.replace(settings, batch=max(BATCH, len(families)))
    watch = report.progress_lines(Console(stderr=True, soft_wrap=True))
    reading = processes.READING / (2 if len(families) > 1 else 1)
    rows, described = processes.measure_in_processes(cases, settings, watch, reading, save)
    if described is None:
        typer.echo(f"no GPU to run on: {rows[0].absent}", err=True)
        raise typer.Exit(1)
    return rows, described


def _stored_run(path: Path) -> dict[str, Any]:
    """The record in a file that a run of this command left."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # not JSON, or not UTF-8
        record = None
    if not isinstance(record, dict) or not {"cases", "rows", "device", "date"} <= record.keys():
        rule = "--draw takes the JSON that a run of regard bench leaves"
        typer.echo(f"error: {rule}, and {path} is something else", err=True)
        raise typer.Exit(1)
    return record


def _draw(record: dict[str, Any], folder: Path) -> None:
    """The pictures of a record, where matplotlib is."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        fix = 'pip install "regard[bench]", or regard bench --draw FILE on a machine that has it'
        typer.echo(f"no picture: {error}. Fix: {fix}", err=True)
        return
    from regard.bench.results.pictures import save_pictures

    for picture in save_pictures(record, folder):
        typer.echo(f"picture: {picture}", err=True)


def _tune(patterns: list[str], out: Path | None) -> None:
    """Lines for the tuned table, on the terminal and, with --out, in a file there."""
    from regard.bench.cases import tables
    from regard.bench.peers import kernels
    from regard.bench.peers.program import Absent

    cases = _select(tables.GPU_CASES, patterns)
    try:
        lines = kernels.tune(cases, watch=lambda what: typer.echo(what, err=True))
    except Absent as reason:
        typer.echo(f"nothing to tune: {reason}", err=True)
        raise typer.Exit(1) from None
    typer.echo("\n".join(lines))
    if out is not None:
        from regard.atomic_file import write_atomically

        out.mkdir(parents=True, exist_ok=True)
        path = out / "blocks.txt"
        write_atomically(path, "\n".join(lines) + "\n")
        typer.echo(f"lines: {path}", err=True)
