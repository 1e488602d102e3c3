"""The Typer application: its options, and the table of subcommands."""

from typing import Annotated

import typer

import regard
from regard.cli.commands import (
    align,
    bench,
    demo,
    doctor,
    evaluate,
    export,
    serve,
    tour,
    train,
    translate,
)

app = typer.Typer(
    name="regard",
    help="Attention for JAX: every score, every mask, every weight regime, and you can look at it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command("demo")(demo.command)
app.command("tour")(tour.command)
app.command("train")(train.command)
app.command("translate")(translate.command)
app.command("align")(align.command)
app.command("evaluate")(evaluate.command)
app.command("export")(export.command)
app.command("serve")(serve.command)
app.command("bench")(bench.command)
app.command("doctor")(doctor.command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"regard {regard.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Attention for JAX: every score, every mask, every weight regime, and you can look at it."""
