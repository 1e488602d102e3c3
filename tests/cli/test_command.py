"""What all subcommands have in common: closed streams, numbers that cannot be, the help."""

import enum
import inspect
import os
import re
import subprocess
import sys
from typing import get_args

import pytest
from typer.main import get_command
from typer.models import OptionInfo
from typer.testing import CliRunner

from regard.cli.app import app
from regard.cli.command import _parameters
from seq2seq.small_translator import save_small

COMMANDS = {one.name: one.callback for one in app.registered_commands}
REGARD = f'{sys.executable} -c "from regard.cli import main; main()"'


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_small(folder)
    return folder


def shell(line, **options):
    """(exit code of regard, stdout, stderr) of a line of bash in which `regard` is the command."""
    script = f'regard() {{ {REGARD} "$@"; }}; set -o pipefail; {line}'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, **options)
    return done.returncode, done.stdout, done.stderr


# ---------------------------------------------------------------------------------------------
# Streams.


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("translate --model {model} <&-", 1, "error: stdin is closed. Fix: --in FILE, or"),
        ("translate --model {model} one >&-", 2, "error: stdout is closed. Fix: > FILE"),
        ("tour --tokens 8 >&-", 2, "error: stdout is closed. Fix: > FILE"),
        ("--help >&-", 2, "error: stdout is closed. Fix: > FILE"),
        ("translate --model {model} one >&- 2>&-", 2, ""),
        ("translate --model {model} one > /dev/full", 1, "error: No space left on device: stdout"),
        ("tour --tokens 8 > /dev/full", 1, "error: No space left on device: stdout"),
        ("doctor --help > /dev/full", 1, "error: No space left on device: stdout"),
        ("--version > /dev/full", 1, "error: No space left on device: stdout"),
    ],
)
def test_a_stream_that_is_closed_or_full_is_reported_in_one_line(model, line, code, said):
    found, stdout, stderr = shell("regard " + line.format(model=model))
    assert (found, stdout) == (code, ""), stderr
    assert stderr.startswith(said)
    assert stderr.count("\n") == bool(said)


@pytest.mark.parametrize(
    "line",
    ["yes one two | regard translate --model {model} --beam 1 | head -1", "regard tour | head -1"],
)
def test_a_reader_that_leaves_ends_the_command_as_sigpipe_does(model, line):
    script = line.format(model=model).replace("regard tour |", "regard tour --tokens 8 |")
    _, stdout, stderr = shell(script + ' > /dev/null; echo "${PIPESTATUS[@]}"', timeout=300)
    assert "141" in stdout.split(), stderr
    assert stderr == ""


def test_files_that_are_opened_do_not_take_the_place_of_closed_streams(model, tmp_path):
    """Or what is printed to stderr would go into the translation."""
    source, out = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("one\n")
    given = f"translate --model {model} --beam 1 --in {source} --out {out}"
    assert shell(f"regard {given}")[0] == 0
    expected = out.read_text()
    out.unlink()
    assert shell(f"regard {given} <&- 2>&-")[:2] == (0, "")
    assert out.read_text() == expected


@pytest.mark.parametrize("parts", [False, True])
def test_a_full_disk_is_reported_with_the_name_of_the_file(model, tmp_path, parts):
    """The kernel refuses to make a file larger, as it does where there is no space left."""
    source, out = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("one two three\n" * 2000)
    words = f"--in {source}" if parts else f"< {source}"
    given = f"translate --no-cache --model {model} --beam 1 --out {out} {words}"
    code, _, stderr = shell(f"ulimit -f 1; regard {given}")  # KiB
    assert code == 1
    assert re.fullmatch(r"error: File too large: \S*(out\.txt|part-000000\S*)\n", stderr)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    kept = {"out.txt.parts", "out.txt.parts/lock", "out.txt.parts/manifest.json"}  # to resume
    assert left <= {"in.txt", *kept}


# ---------------------------------------------------------------------------------------------
# Numbers.


def given_options(command):
    """(name, types, default, what Typer is told) of each option and argument."""
    for name, one in inspect.signature(COMMANDS[command], eval_str=True).parameters.items():
        kind, info = get_args(one.annotation)
        yield name, get_args(kind) or (kind,), one.default, info


NUMERIC = [
    (command, name)
    for command in COMMANDS
    for name, kinds, *_ in given_options(command)
    if {int, float} & set(kinds)
]


def option_name(command, name):
    for parameter in get_command(app).commands[command].params:
        if parameter.name == name:
            return parameter.opts[0]
    raise LookupError(name)


@pytest.mark.parametrize(("command", "name"), NUMERIC)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e400", "9" * 40, "-" + "9" * 40, "1e38"])
def test_numbers_that_no_option_can_mean_are_usage_errors(command, name, value, tmp_path):
    folders = {"train": [tmp_path / "run"], "export": [tmp_path, tmp_path / "out"]}
    given = [command, *folders.get(command, []), option_name(command, name), value]
    result = CliRunner().invoke(app, list(map(str, given)))
    assert result.exit_code == 2, result.output
    assert "Invalid value for" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_there_are_numeric_options_to_test():
    some = {("train", "seed"), ("train", "learning_rate"), ("align", "threshold")}
    assert some <= set(NUMERIC)


@pytest.mark.parametrize("beam", [1, 7, 256])
@pytest.mark.parametrize("penalty", ["0", "1e-30", "10"])
def test_limits_of_the_search_work(model, beam, penalty):
    given = ["translate", "--model", model, "--beam", beam, "--length-penalty", penalty]
    result = CliRunner().invoke(app, [*map(str, given), "--no-cache", "one two", "", "six"])
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 3


# ---------------------------------------------------------------------------------------------
# The help.


def help_of(*command):
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_fits_80_columns_and_names_every_option(command):
    told = help_of(*([command] if command else []))
    assert max(map(len, told.splitlines())) <= 80
    assert "<bool>" not in told
    assert "<int" not in told
    for parameter in [] if command is None else get_command(app).commands[command].params:
        if not parameter.hidden and parameter.param_type_name == "option":
            for name in (*parameter.opts, *parameter.secondary_opts):
                assert re.search(rf"(^|[\s/]){name}\b", told, re.M), name


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_defaults_limits_and_choices(command):
    told = " ".join(help_of(command).split())
    for name, _, default, info in given_options(command):
        if info.hidden or not isinstance(info, OptionInfo):
            continue
        if default is not None and not isinstance(default, bool):
            default = default.value if isinstance(default, enum.Enum) else default
            assert f"default: {default}" in told, name
        if info.max is not None:
            assert re.search(rf"to {info.max:.0f}\b", told), name


@pytest.mark.parametrize("command", COMMANDS)
def test_every_text_of_the_help_is_a_sentence(command):
    for one in _parameters(get_command(app).commands[command]):
        assert re.match(r"[A-Z0-9]", one.text), one
        assert len(one.text.split()) >= 3, one


def test_help_through_a_pipe_has_no_escapes():
    assert "\x1b" not in shell("regard align --help", env={**os.environ, "FORCE_COLOR": "1"})[1]
