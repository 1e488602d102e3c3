"""The Typer application: its options, and the table of subcommands."""

from typing import Annotated

import typer

import regard
from regard.cli.command import Command, Commands
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
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

for module in (demo, tour, train, translate, align, evaluate, export, serve, bench, doctor):
    app.command(module.__name__.rpartition(".")[2], cls=Command)(module.command)


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
