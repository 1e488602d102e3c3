"""A tiny run from end to end: rows, JSON, tables, picture, command."""

import dataclasses
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from regard.bench.cases.case import Case
from regard.bench.peers import jax_peers as peers
from regard.bench.peers.program import Absent, Program
from regard.bench.results import pictures, record, report
from regard.bench.results.targets import CPU_TARGETS
from regard.bench.run.measure import AGAIN, Settings, measure_cases, steps
from regard.cli.commands.bench import command as bench_command

SWEEP = Case("sweep_8", "additive", B=1, T=8, S=8, D=4, V=4, group="sweep_8", against=("book",))
TINY = [
    Case("tiny", "additive", B=2, T=6, S=9, D=4, V=5, group="tiny", against=("book",)),
    Case("tiny_loose", "additive", 2, 6, 9, 4, 5, tolerance=1e-3, group="tiny", against=("book",)),
    SWEEP,
    dataclasses.replace(SWEEP, name="sweep_16", T=16, S=16, group="sweep_16"),
    dataclasses.replace(
        SWEEP,
        name="memory_8",
        mask="lengths",
        direction="forward+backward",
        group="memory",
        timed=False,
    ),
]
SCRIPTS = Path(__file__).parents[3] / "benchmarks"
SETTINGS = Settings(repeats=3, budget=0.1)


@pytest.fixture(scope="module")
def rows():
    return measure_cases(TINY, SETTINGS)


@pytest.fixture(scope="module")
def result(rows):
    return record.make_record(
        TINY, rows, SETTINGS, device=record.describe_device(), targets=CPU_TARGETS, partial=True
    )


def test_a_row_for_each_program(rows):
    assert [(row.case, row.who) for row in rows] == [
        ("tiny", "regard"),
        ("tiny", AGAIN),
        ("tiny", "book"),
        ("tiny_loose", "regard"),
        ("tiny_loose", "book"),
        ("sweep_8", "regard"),
        ("sweep_8", AGAIN),
        ("sweep_8", "book"),
        ("sweep_16", "regard"),
        ("sweep_16", AGAIN),
        ("sweep_16", "book"),
        ("memory_8", "regard"),
        ("memory_8", "book"),
    ]
    assert not [row for row in rows if row.absent]


def test_timed_rows_have_time_memory_and_error(rows):
    for row in rows:
        assert row.temp_bytes is not None
        if row.case == "memory_8":
            assert row.timing is None
        else:
            assert row.timing is not None
            assert len(row.timing.seconds) >= 3
            assert row.error is not None
            assert row.error < 1e-3


def test_a_peer_is_timed_once_for_cases_of_one_problem(rows):
    book = {row.case: row.timing for row in rows if row.who == "book"}
    assert book["tiny"] == book["tiny_loose"]


def test_progress_adds_up():
    told = []
    measure_cases(TINY[:2], SETTINGS, lambda what, further: told.append(further))
    np.testing.assert_allclose(sum(told), steps(TINY[:2]))


def fake(outputs, calls=None):
    return lambda case, inputs: Program(run=lambda: calls.append(1), outputs=lambda: outputs)


def test_a_program_that_disagrees_is_not_timed(monkeypatch):
    calls = []
    wrong = {"out": np.ones((2, 6, 5))}
    monkeypatch.setitem(peers.PEERS, "book", fake(wrong, calls))
    rows = measure_cases(TINY[:1], SETTINGS)
    book = next(row for row in rows if row.who == "book")
    assert book.absent is not None
    assert book.absent.startswith("not timed: relative error")
    assert calls == []


def test_nan_is_disagreement(monkeypatch):
    monkeypatch.setitem(peers.PEERS, "book", fake({"out": np.full((2, 6, 5), np.nan)}))
    rows = measure_cases(TINY[:1], SETTINGS)
    assert next(row for row in rows if row.who == "book").absent


@pytest.mark.parametrize(
    ("error", "reason"),
    [(Absent("not here"), "not here"), (RuntimeError("broke\nmore"), "failed: broke")],
)
def test_an_absent_or_failing_program_is_reported_and_the_rest_goes_on(monkeypatch, error, reason):
    def absent(case, inputs):
        raise error

    monkeypatch.setitem(peers.PEERS, "book", absent)
    rows = measure_cases(TINY[:1], SETTINGS)
    assert next(row for row in rows if row.who == "book").absent == reason
    assert next(row for row in rows if row.who == "regard").timing


def test_json_schema(result, tmp_path):
    path = record.write(result, tmp_path / "new")
    assert path.name.endswith("-partial.json")
    assert path.stem == record.file_stem(result)
    read = json.loads(path.read_text())
    assert read == json.loads(json.dumps(result))
    assert set(read) == {
        "schema", "date", "device", "versions", "settings", "cases", "rows", "verdicts",
    }  # fmt: skip
    assert set(read["device"]) == {"platform", "name", "cores"}
    assert set(read["versions"]) == {
        "regard", "python", "jax", "jaxlib", "numpy", "cudnn", "keras", "torch", "triton",
    }  # fmt: skip
    for row in read["rows"]:
        assert set(row) == {
            "case", "who", "ms", "ratio", "tflops", "temp_mib", "peak_mib", "error", "errors",
            "lifted", "ran", "absent",
        }  # fmt: skip
    first = read["rows"][0]
    assert first["ratio"] == 1.0
    assert set(first["ms"]) == {"median", "low_quartile", "high_quartile", "runs"}
    assert first["ms"]["low_quartile"] <= first["ms"]["median"] <= first["ms"]["high_quartile"]


def test_scripts_write_by_the_same_writer(tmp_path):
    path = record.write_script_record("load", {"replies": 7}, tmp_path)
    read = json.loads(path.read_text())
    assert path.name == f"load-{read['cores']}-cores-{read['date']}.json"
    assert read["replies"] == 7
    assert set(read) == {"date", "device", "cores", "versions", "replies"}


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_no_script_has_a_writer_of_its_own(script):
    text = script.read_text(encoding="utf-8")
    if "--record" in text:
        assert "regard.bench.results.record import write" in text
        assert not re.search(r"write_text\(.*dumps", text)


def test_a_ratio_is_over_regards_median(result):
    rows = {(row["case"], row["who"]): row for row in result["rows"]}
    book, ours = rows["tiny_loose", "book"], rows["tiny_loose", "regard"]
    np.testing.assert_allclose(
        book["ratio"], book["ms"]["median"] / ours["ms"]["median"], rtol=1e-2
    )


def printed(result):
    console = Console(file=io.StringIO(), width=160)
    console.print(report.tables(result))
    return console.file.getvalue()


def test_the_tables_hold_every_case(result):
    text = printed(result)
    for words in ("tiny_loose", "B=2 T=6 S=9 D=4 V=5", AGAIN, "book", "× regard", "against length"):
        assert words in text
    assert "Promises" not in text  # none of them measured here


def test_an_absent_peer_is_shown_with_its_reason(result):
    gone = dict(result["rows"][2], absent="torch is not installed", who="torch", ms=None)
    text = printed(result | {"rows": [*result["rows"], gone]})
    assert "torch is not installed" in text


def test_promises_are_shown_when_measured(result):
    verdict = {"promise": "fast enough", "goal": "≥ 4×", "measured": 3.14159, "outcome": "short"}
    verdict["noise"] = 0.07
    text = printed(result | {"verdicts": [verdict]})
    for words in ("fast enough", "≥ 4×", "3.14", "7%", "short"):
        assert words in text


def test_the_picture(result, tmp_path):
    paths = pictures.save_pictures(result, tmp_path)
    assert len(paths) == 2
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_no_picture_of_one_length(result, tmp_path):
    rows = [row for row in result["rows"] if row["case"] != "sweep_16"]
    assert pictures.curves(result | {"rows": rows}) is None


@pytest.fixture
def command(monkeypatch, tmp_path):
    """`regard bench` over the tiny cases, in an empty folder."""
    monkeypatch.setattr("regard.bench.cases.tables.CPU_CASES", tuple(TINY))
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(bench_command)
    return lambda *arguments: CliRunner().invoke(app, arguments)


def files(folder):
    return sorted(path.suffix for path in folder.rglob("*") if path.is_file())


def test_command_json_alone(command, tmp_path):
    done = command("--json", "--case", "tiny*", "--repeats", "1")
    assert done.exit_code == 0
    read = json.loads(done.stdout)
    assert [case["name"] for case in read["cases"]] == ["tiny", "tiny_loose"]
    assert read["settings"]["partial"]
    assert files(tmp_path) == []


def test_command_writes_where_it_is_told(command, tmp_path):
    done = command("--quick", "--case", "sweep*", "--out", "here")
    assert done.exit_code == 0
    assert "against length" in done.stdout
    assert files(tmp_path / "here") == [".json", ".png"]


def test_command_writes_to_the_results_by_default(command, tmp_path):
    done = command("--case", "tiny")
    assert done.exit_code == 0
    assert "Time, memory and error" in done.stdout
    assert files(tmp_path / "benchmarks" / "results") == [".json", ".png"]


def test_command_names_the_cases_when_none_matches(command, tmp_path):
    done = command("--case", "none*")
    assert done.exit_code == 2
    assert "no case matches 'none*'" in " ".join(done.output.split())
    assert files(tmp_path) == []


def test_command_fails_when_regard_fails(command, monkeypatch):
    def fails(case, inputs):
        raise RuntimeError("broke")

    monkeypatch.setitem(peers.PEERS, "regard", fails)
    done = command("--case", "tiny")
    assert done.exit_code == 1
    assert "failed: broke" in done.output
