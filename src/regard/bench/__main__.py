"""`python -m regard.bench`: the same as `regard bench`."""

import sys


def main() -> None:
    """Run the benchmark, or say how to install what it needs."""
    try:
        import typer

        from regard.cli.commands.bench import command
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        sys.exit(
            f"The benchmark needs {error.name}, which is not installed.\n"
            'Install it with: pip install "regard[bench]"'
        )
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    app()


if __name__ == "__main__":
    main()
