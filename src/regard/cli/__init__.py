"""The `regard` command: one file per subcommand.

The command is an extra, so that the library itself stays small. This file imports nothing outside
the standard library: it must be able to say what to install when the extra is missing.
"""

import sys

__all__ = ["main"]

#: What the command line itself is made of, and comes with every extra that has a subcommand.
_CLI_PACKAGES = ("rich", "typer")

_EXTRAS = {
    "bench": "bench",
    "serve": "serve",
    **dict.fromkeys(("demo", "train", "translate", "align", "evaluate", "export"), "translate"),
}


def main() -> None:
    """Run the `regard` command, or say how to install what it needs."""
    try:
        from regard.cli.app import app
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in _CLI_PACKAGES:
            raise
        # A subcommand that needs more than the bare command has an extra of its own.
        extra = _EXTRAS.get("".join(sys.argv[1:2]), "cli")
        sys.exit(
            f"The regard command needs {package}, which is not installed.\n"
            f'Install it with: pip install "regard[{extra}]"'
        )
    app()
