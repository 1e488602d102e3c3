"""Pictures from a stored record, as one brought from another machine."""

import dataclasses
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from regard.bench.cases.tables import GPU_CASES
from regard.bench.results.pictures import bars, save_pictures, speedups
from regard.bench.results.record import make_record, swept
from regard.bench.results.targets import GPU_TARGETS
from regard.bench.run.measure import Row, Settings
from regard.bench.run.timing import Timing
from regard.cli.commands.bench import command as bench_command

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def gpu_record():
    """A run of every case of the GPU's table, with made-up numbers."""
    rows = []
    for case in GPU_CASES:
        for rank, who in enumerate(("regard", *case.against)):
            if who == "book" and case.T > 16384:
                rows.append(Row(case.name, who, case.group, absent="would take about 128 GiB"))
                continue
            seconds = 1e-13 * case.terms * (1 + 20 * rank if who == "book" else 1 + 0.1 * rank)
            row = Row(
                case.name,
                who,
                case.group,
                Timing((seconds, 1.01 * seconds)) if case.timed else None,
                temp_bytes=case.terms * 2 if who == "book" else case.T * 4096,
                peak_bytes=case.T * 8192,
                errors={"out": 3e-3} if case.timed else {},
            )
            rows.append(dataclasses.replace(row))
    device = {"platform": "gpu", "name": "NVIDIA H200", "cores": 16, "driver": "580.1"}
    return make_record(GPU_CASES, rows, Settings(), device=device, targets=GPU_TARGETS)


def test_the_curves_of_a_gpu_run(gpu_record):
    curves = swept(gpu_record)
    assert set(curves) == {
        "regard", "regard+backward", "book", "book+backward", "regard exact+backward",
        "regard, dot", "regard, dot+backward", "jax.nn cudnn, dot", "jax.nn cudnn, dot+backward",
    }  # fmt: skip
    assert sorted(curves["regard+backward"]) == [2**power for power in range(10, 18)]


def test_speedups_are_of_each_peer(gpu_record):
    ratios = speedups(gpu_record)
    assert set(ratios["dot_128"]) == {"jax.nn", "jax.nn cudnn", "torch", "flex"}
    assert ratios["additive"]["book"] == pytest.approx(21.0)
    assert not any(case.startswith("sweep") for case in ratios)


def test_both_pictures_of_a_gpu_run(gpu_record, tmp_path):
    record = json.loads(json.dumps(gpu_record))
    lengths, ratios = save_pictures(record, tmp_path)
    assert lengths.name == f"nvidia-h200-{record['date'][:10]}.png"
    assert ratios.name == f"nvidia-h200-{record['date'][:10]}-speedups.png"
    for path in (lengths, ratios):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_no_picture_of_no_ratio(gpu_record, tmp_path):
    rows = [row for row in gpu_record["rows"] if row["who"] == "regard"]
    assert bars(gpu_record | {"rows": rows}) is None


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_command_draws_every_stored_run(path, tmp_path):
    app = typer.Typer()
    app.command()(bench_command)
    done = CliRunner().invoke(app, ["--draw", str(path), "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    settings = json.loads(path.read_text())["settings"]
    pictures = 1 if settings.get("survey") or settings["partial"] else 2  # no lengths in a part
    assert len(list(tmp_path.glob("*.png"))) == pictures
    assert done.output.count("picture: ") == pictures


def test_command_draws_beside_the_numbers(gpu_record, tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(gpu_record))
    app = typer.Typer()
    app.command()(bench_command)
    assert CliRunner().invoke(app, ["--draw", str(path)]).exit_code == 0
    assert len(list(tmp_path.glob("nvidia-h200-*.png"))) == 2


@pytest.mark.parametrize("text", ["{}", "[1]", "not JSON", '{"cases": []}'])
def test_command_refuses_what_is_no_run(text, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    app = typer.Typer()
    app.command()(bench_command)
    done = CliRunner().invoke(app, ["--draw", str(path)])
    assert done.exit_code == 1
    assert "regard bench leaves" in done.output
    assert "other.json" in done.output
