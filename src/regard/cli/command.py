"""What all subcommands have in common: how their help is formatted, and which numbers they accept.

The help is plain text for 80 columns: an option with the kind of its value, what it does, its
default and its limits; flags have no value. A usage error is exit code 2.
"""

import enum
import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import OptionInfo

LARGEST_INTEGER, LARGEST_FLOAT = 2**31 - 1, 1e30  # what int32 and float32 can hold


class Command(TyperCommand):
    """A subcommand; pass it as `cls=` to `app.command`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the command line, and refuses numbers that no option can mean."""
        rest = super().parse_args(ctx, args)
        for param in self.params:
            given = ctx.params.get(param.name)
            for value in given if isinstance(given, Sequence) else [given]:
                reason = _refusal(value)
                if reason is not None:
                    message = f"{reason} Got {value}."
                    raise typer.BadParameter(message, param_hint=f"'{param.opts[0]}'")
        return rest

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words after the command's name in the line `Usage:`."""
        return ["[OPTIONS]", *(one.names for one in _parameters(self) if not one.is_option)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes arguments and options, panel by panel."""
        _write_parameters(self, formatter)


class Commands(TyperGroup):
    """The command `regard`, which lists its subcommands in full sentences."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the options, then the subcommands in their order."""
        _write_parameters(self, formatter)
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            help = (command.help or "") if command is not None else ""
            rows.append((name, " ".join(help.split("\n\n")[0].split())))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _refusal(value: Any) -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return "it must be a finite number."
    if isinstance(value, float) and abs(value) > LARGEST_FLOAT:
        return f"it must be at most {LARGEST_FLOAT:g}."
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        return f"it must be at most {LARGEST_INTEGER}."
    return None


# ---------------------------------------------------------------------------------------------
# The help, from the signature of the function that a command calls.

KINDS = {int: "N", float: "X", Path: "FILE"}  # of values, where an option does not name its own


@dataclass(frozen=True)
class _Parameter:
    """An option or an argument as the help shows it.

    Attributes:
        panel: the heading that it stands under.
        names: the option's names and the kind of its value: `--beam N`, `--joint/--separate`.
        text: what it does, its choices, its limits and its default.
    """

    panel: str
    names: str
    text: str
    is_option: bool


def _parameters(command: Any) -> Iterator[_Parameter]:
    function = inspect.unwrap(command.callback, stop=lambda one: hasattr(one, "__signature__"))
    for name, given in inspect.signature(function, eval_str=True).parameters.items():
        kind, info = get_args(given.annotation)
        if info.hidden:
            continue
        kinds = [one for one in get_args(kind) or (kind,) if one is not type(None)]
        plural = get_origin(kinds[0]) is list or get_origin(kind) is list
        kind = (get_args(kinds[0]) or kinds)[0]
        is_option = isinstance(info, OptionInfo)
        required = given.default is inspect.Parameter.empty
        if is_option:
            # Typer takes the first name of an annotated option for its default.
            given_names = [one for one in (info.default, *(info.param_decls or ())) if one]
            names = "/".join(one for one in given_names if str(one).startswith("-"))
            names = names or f"--{name.replace('_', '-')}"
            default = KINDS.get(kind, "ONE" if issubclass(kind, enum.Enum) else "TEXT")
            names += "" if kind is bool else f" {info.metavar or default}"
        else:
            names = (info.metavar or name).upper() + "..." * plural
            names = names if required else f"[{names}]"
        notes = []
        if issubclass(kind, enum.Enum):
            notes.append("one of " + ", ".join(str(one.value) for one in kind))
        if info.max is not None:
            notes.append(f"from {_plain(info.min or 0)} to {_plain(info.max)}")
        elif info.min is not None:
            notes.append(f"at least {_plain(info.min)}")
        if plural and is_option:
            notes.append("may be repeated")
        if isinstance(info.show_default, str):
            notes.append(f"default: {info.show_default}")
        elif not required and given.default is not None and given.default is not False:
            notes.append(f"default: {getattr(given.default, 'value', given.default)}")
        notes_text = f" [{'; '.join(notes)}]" if notes else ""
        panel = info.rich_help_panel or ("Options" if is_option else "Arguments")
        yield _Parameter(panel, names, f"{info.help or ''}{notes_text}", is_option)
    yield _Parameter("Options", "--help", "Show this message and exit.", True)


def _plain(number: float) -> str:
    return str(int(number) if number == int(number) else number)


def _write_parameters(command: Any, formatter: Any) -> None:
    panels: dict[str, list[tuple[str, str]]] = {}
    for one in _parameters(command):
        panels.setdefault(one.panel, []).append((one.names, one.text))
    for panel in sorted(panels, key=lambda name: name != "Arguments"):
        with formatter.section(panel):
            formatter.write_dl(panels[panel], col_max=26)
