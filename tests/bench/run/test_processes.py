"""A process for each framework: what comes back, and what becomes of those that fail."""

import dataclasses
import importlib.util
import json
import sys
import time

import jax
import pytest
import typer
from typer.testing import CliRunner

from regard.bench.cases.case import Case
from regard.bench.run import processes
from regard.bench.run.measure import (
    AGAIN,
    NOT_REACHED,
    Row,
    Settings,
    in_table_order,
    measure_cases,
    measure_groups,
)
from regard.bench.run.processes import (
    environment,
    measure_in_processes,
    read_case,
    read_row,
    write_row,
)
from regard.bench.run.timing import Timing
from regard.cli.commands.bench import command as bench_command

DOT = Case(
    "dot", "dot", B=1, T=8, S=8, D=4, V=4, N=2, group="dots", against=("jax.nn", "torch"), rounds=2
)
LONGER = dataclasses.replace(DOT, name="longer", T=16, S=16, group="longer")
ADDITIVE = Case("additive", "additive", B=1, T=8, S=8, D=4, V=4, group="additive", rounds=2)
SETTINGS = Settings(repeats=2, budget=0.1)


@pytest.fixture(scope="module")
def measured():
    heard = []
    rows, device = measure_in_processes(
        [DOT, ADDITIVE], SETTINGS, lambda what, further: heard.append(what), reading=1e-4
    )
    return rows, device, heard


def test_every_framework_measures_its_own(measured):
    rows, device, _ = measured
    assert [(row.case, row.who) for row in rows] == [
        ("dot", "regard"),
        ("dot", AGAIN),
        ("dot", "jax.nn"),
        ("dot", "torch"),
        ("additive", "regard"),
        ("additive", AGAIN),
    ]
    has_torch = importlib.util.find_spec("torch") is not None
    for row in rows:
        if row.who == "torch" and not has_torch:
            assert "torch is not installed" in row.absent
            continue
        assert row.absent is None
        assert len(row.timing.seconds) == 2
        assert row.error < 1e-4
    assert rows[0].tflops > 0
    assert device["platform"] == "cpu"


def test_what_goes_on_is_reported(measured):
    heard = measured[2]
    assert "jax: dot: preparing jax.nn" in heard
    assert "torch: dot: preparing torch" in heard
    assert any(line.startswith("  dot, regard: ") and "error" in line for line in heard)


def row_of(case, who="regard"):
    return write_row(Row(case.name, who, group=case.group, timing=Timing((1.0,))))


@pytest.fixture
def told(monkeypatch):
    """Processes that say what is written here, one list after the other; what they were asked."""

    def play(*scripts):
        asked, left = [], iter(scripts)

        def converse(request, env, deadline):
            asked.append([case["name"] for case in request["cases"]])
            yield from next(left)

        monkeypatch.setattr(processes, "_converse", converse)
        return asked

    return play


def run(*cases):
    cases = [dataclasses.replace(case, against=()) for case in cases]
    rows, device = measure_in_processes(cases, SETTINGS, lambda what, further: None)
    return {row.case: row.absent for row in rows}, device


READY = ("ready", {"platform": "gpu"})


def test_a_process_that_dies_costs_its_group_and_another_goes_on(told):
    asked = told(
        [READY, ("rows", [row_of(DOT)]), ("ended", "its process ended with code -11")],
        [READY, ("rows", [row_of(ADDITIVE)])],
    )
    absent, device = run(DOT, LONGER, ADDITIVE)
    assert absent == {
        "dot": None,
        "longer": "failed: its process ended with code -11",
        "additive": None,
    }
    assert asked == [["dot", "longer", "additive"], ["additive"]]
    assert device == {"platform": "gpu"}


def test_a_sick_device_is_left_by_the_next_process(told):
    asked = told(
        [READY, ("rows", [row_of(DOT)]), ("sick", None)],
        [READY, ("rows", [row_of(LONGER)])],
    )
    assert run(DOT, LONGER)[0] == {"dot": None, "longer": None}
    assert asked == [["dot", "longer"], ["longer"]]


def test_a_worker_that_cannot_begin_is_not_started_again(told):
    asked = told([("error", "no such device")])
    absent, device = run(DOT, LONGER)
    assert absent == dict.fromkeys(("dot", "longer"), "failed: no such device")
    assert len(asked) == 1
    assert device is None


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_a_worker_says_when_there_is_no_such_device(capfd):
    absent, device = run(dataclasses.replace(DOT, device="gpu"))
    assert device is None
    assert "JAX finds no cuda device" in absent["dot"]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import time; time.sleep(60)", "its process said nothing for 1 s"),
        ("import sys; sys.exit(3)", "its process ended with code 3"),
        ("import os; os.abort()", "its process ended with code -6"),
    ],
)
def test_silence_and_death_are_noticed(code, reason, monkeypatch):
    monkeypatch.setattr(processes, "SILENCE", 1.0)
    monkeypatch.setattr(processes, "WORKER", [sys.executable, "-c", code])
    assert run(DOT)[0] == {"dot": f"failed: {reason}"}


def test_torch_measures_only_what_jax_reached_in_the_time_given(told):
    def first():
        yield READY
        yield "rows", [row_of(DOT)]
        time.sleep(0.6)
        yield "ended", "its process said nothing"

    asked = told(first(), [READY, ("rows", [row_of(DOT, "torch")])])
    cases = [dataclasses.replace(case, against=("torch",)) for case in (DOT, LONGER)]
    settings, saved = Settings(limit=1.0), []
    rows, device = measure_in_processes(
        cases, settings, lambda what, further: None, save=lambda rows, device: saved.append(rows)
    )
    assert asked == [["dot", "longer"], ["dot"]]
    assert {(row.case, row.who): row.absent for row in rows} == {
        ("dot", "regard"): None,
        ("dot", "torch"): None,
        ("longer", "regard"): NOT_REACHED,
        ("longer", "torch"): NOT_REACHED,
    }
    assert device == {"platform": "gpu"}
    assert [[row.absent for row in rows] for rows in saved] == [
        [None, *[NOT_REACHED] * 3],
        [None, None, *[NOT_REACHED] * 2],
    ]


def test_a_process_is_ended_when_its_time_is_up(monkeypatch):
    code = "import time; time.sleep(60)"
    monkeypatch.setattr(processes, "WORKER", [sys.executable, "-c", code])
    start = time.monotonic()
    rows, _ = measure_in_processes([DOT], Settings(limit=0.5), lambda what, further: None)
    assert {row.absent for row in rows} == {NOT_REACHED}
    assert time.monotonic() - start < 10


def test_one_process_stops_when_its_time_is_up():
    cases = [dataclasses.replace(case, against=()) for case in (ADDITIVE, DOT)]
    rows = measure_cases(cases, Settings(repeats=1, limit=0.0))
    assert {row.case: row.absent for row in rows} == {"additive": None, "dot": NOT_REACHED}


def test_a_batch_is_built_before_any_of_it_is_timed():
    heard = []
    cases = [dataclasses.replace(case, against=()) for case in (DOT, LONGER, ADDITIVE)]
    settings = Settings(repeats=1, solvers=2, builders=2, batch=2)
    groups = list(measure_groups(cases, settings, lambda what, further: heard.append(what)))
    assert [rows[0].group for rows in groups] == ["dots", "longer", "additive"]
    assert all(row.timing and not row.absent for rows in groups for row in rows)
    places = [
        heard.index(what)
        for what in (
            "longer: preparing regard",
            "dots: timing 2",
            "longer: timing 2",
            "additive: preparing regard",
        )
    ]
    assert places == sorted(places)


def test_the_rows_of_two_processes_are_merged_in_table_order():
    rows = [
        Row("dot", "regard"),
        Row("dot", AGAIN),
        Row("dot", "jax.nn"),
        Row("longer", "regard"),
        Row("longer", "jax.nn"),
        Row("dot", "torch"),
        Row("longer", "torch"),
    ]
    merged = in_table_order([DOT, LONGER], rows)
    assert [(row.case, row.who) for row in merged] == [
        ("dot", "regard"),
        ("dot", AGAIN),
        ("dot", "jax.nn"),
        ("dot", "torch"),
        ("longer", "regard"),
        ("longer", "jax.nn"),
        ("longer", "torch"),
    ]


def test_only_jax_has_the_gpu_in_jax_and_no_process_takes_it_all():
    assert environment("jax", "gpu")["JAX_PLATFORMS"] == "cuda"
    assert environment("torch", "gpu")["JAX_PLATFORMS"] == "cpu"
    assert environment("jax", "cpu")["JAX_PLATFORMS"] == "cpu"
    assert environment("jax", "gpu")["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


def test_cases_and_rows_survive_the_wire():
    case = dataclasses.replace(ADDITIVE, tolerance="exact", mask="lengths", against=("book",))
    assert read_case(json.loads(json.dumps(dataclasses.asdict(case)))) == case
    row = Row("a", "b", "c", Timing((0.5, 0.25)), 1e9, 3, 4, {"out": 1e-3}, True, None)
    assert read_row(json.loads(json.dumps(write_row(row)))) == row


@pytest.fixture
def command(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(bench_command)
    return lambda *arguments: CliRunner().invoke(app, arguments)


def test_command_says_when_there_is_no_gpu(command, told):
    told([("error", "Unable to initialize backend 'cuda'")])
    done = command("--device", "gpu", "--case", "kernel_768")
    assert done.exit_code == 1
    assert "no GPU to run on: failed: Unable to initialize backend 'cuda'" in done.output


def test_command_that_is_ended_leaves_what_it_measured(command, told, tmp_path):
    device = {"platform": "gpu", "name": "NVIDIA H200", "cores": 16, "driver": "580.1"}
    timed = Row("additive_256", "regard", "additive_256", Timing((2e-3,)))

    def killed():
        yield "ready", device
        yield "rows", [write_row(timed)]
        raise KeyboardInterrupt

    told(killed())
    assert command("--device", "gpu", "--out", "here").exit_code != 0
    (path,) = (tmp_path / "here").glob("nvidia-h200-*-partial.json")
    read = json.loads(path.read_text())
    reached = {row["case"] for row in read["rows"] if row["absent"] != NOT_REACHED}
    assert reached == {"additive_256"}
    assert {v["outcome"] for v in read["verdicts"]} <= {"reached", "not measured"}
    assert command("--draw", str(path)).exit_code == 0


def test_command_makes_a_record_of_the_gpu(command, told, tmp_path):
    device = {"platform": "gpu", "name": "NVIDIA H200", "cores": 16, "driver": "580.1"}
    timed = Row("additive_256", "regard", "additive_256", Timing((2e-3,)), None, 2**20, 2**21)
    book = dataclasses.replace(timed, who="book", timing=Timing((60e-3,)))
    told([("ready", device), ("rows", [write_row(timed), write_row(book)])])
    done = command("--device", "gpu", "--case", "additive_256", "--out", "here")
    assert done.exit_code == 0, done.output
    for words in ("NVIDIA H200", "driver 580.1", "≤ 2.9 ms", "≥ 25×", "reached"):
        assert words in done.output
    (path,) = (tmp_path / "here").glob("nvidia-h200-*-partial.json")
    read = json.loads(path.read_text())
    assert read["device"] == device
    reached = {v["promise"]: v["measured"] for v in read["verdicts"] if v["measured"]}
    assert reached == {
        "additive, h=V=256, forward": pytest.approx(2.0),
        "additive, h=V=256, forward, over the book's form": pytest.approx(30.0),
    }
