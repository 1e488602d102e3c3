"""The doctor: it finds what works, tells what does not and why, and a wrong number is no health."""

import io
import json
import os
import re
import subprocess
import sys

import jax
import pytest
from rich.console import Console
from typer.testing import CliRunner

import regard
from absent_gpu import on_hopper, stand_in
from regard.cli import backend_check
from regard.cli.app import app
from regard.cli.backend_check import SCORES, check_backend, hopper_refusal
from regard.cli.commands import doctor
from regard.cli.commands.doctor import EXTRAS, find_extras
from regard.placement import Device
from regard.pool.pallas import MOSAIC_SINCE, interpreted


@pytest.fixture(scope="module")
def found():
    return doctor.examine()


def told(found, width=80):
    out = io.StringIO()
    doctor.print_findings(found, Console(file=out, width=width, highlight=False))
    return out.getvalue()


def test_here_the_core_works_and_every_backend_is_accounted_for(found):
    assert found["healthy"]
    states = {backend["name"]: backend["state"] for backend in found["backends"]}
    assert states["reference"] == states["blockwise"] == "works"
    assert list(states) == ["reference", "blockwise", "cudnn", "pallas", "hopper"]
    for backend in found["backends"]:
        taken = [probe["score"] for probe in backend["probes"]]
        if backend["state"] == "works":
            assert sorted([*taken, *backend["refusals"]]) == sorted(SCORES)
        else:
            assert backend["refusals"]["dot"], "why not"
    if jax.default_backend() == "cpu":
        assert "NVIDIA GPU" in told(found)
        assert found["first_choice"] == "blockwise"


def test_it_reads_at_80_columns(found):
    text = told(found)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text, "something was cut off"
    for expected in (
        regard.__version__,
        jax.__version__,
        *EXTRAS,
        "blockwise",
        "English to French",
    ):
        assert expected in text


def test_the_command_prints_what_was_found(monkeypatch, found):
    monkeypatch.setattr(doctor, "examine", lambda: found)
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout) == found
    assert "attention works here" in CliRunner().invoke(app, ["doctor"]).stdout


@pytest.mark.parametrize("score", ["dot", "additive"])
def test_a_wrong_number_is_found(monkeypatch, found, score):
    """Half a percent too much, and once only in a gradient."""
    run = backend_check.forward_and_backward
    monkeypatch.setattr(backend_check, "SCORES", {score: SCORES[score]})
    for part in ("out", "gradient of key"):

        def wrong(name, tensors, arguments, part=part):
            out, (query, key, value) = run(name, tensors, arguments)
            if tensors[0].dtype == "float64":  # what it is compared with
                return out, (query, key, value)
            if part == "out":
                return out * 1.005, (query, key, value)
            return out, (query, key * 1.005, value)

        monkeypatch.setattr(backend_check, "forward_and_backward", wrong)
        checked = check_backend("reference")
        assert checked.state == "broken", part
        row = {"name": "reference", "dtype": "float32", "refusals": {}, "state": "broken"}
        row |= {"probes": [vars(probe) for probe in checked.probes]}
        ill = found | {"backends": [row], "healthy": False}
        assert f"{score} is WRONG: off by" in told(ill)
        assert "something is wrong" in told(ill)
        monkeypatch.setattr(doctor, "examine", lambda ill=ill: ill)
        assert CliRunner().invoke(app, ["doctor"]).exit_code == 1


def test_a_backend_that_fails_is_broken_and_says_how(monkeypatch):
    def fails(*arguments):
        raise RuntimeError("CUDNN_STATUS_NOT_INITIALIZED\nand a long stack")

    monkeypatch.setattr(backend_check, "forward_and_backward", fails)
    monkeypatch.setattr(backend_check, "SCORES", {"dot": SCORES["dot"]})
    (probe,) = check_backend("reference").probes
    assert probe.failure == "RuntimeError: CUDNN_STATUS_NOT_INITIALIZED"
    assert not probe.passed


def test_cudnn_is_tried_on_what_it_takes():
    """jax.nn's own attention stands in for a GPU that is not here."""
    with stand_in():
        checked = check_backend("cudnn")
    assert [probe.score for probe in checked.probes] == ["dot", "bilinear"]
    assert checked.state == "works", checked.probes
    assert "number per key" in checked.refusals["gaussian"]


def test_the_kernels_are_tried_on_what_they_take(monkeypatch):
    monkeypatch.setattr(backend_check, "SCORES", {"gaussian": SCORES["gaussian"]})
    with interpreted(), jax.enable_x64(False):  # the interpreter knows 32-bit indices only
        checked = check_backend("pallas")
    assert checked.state == "works", checked.probes


def test_the_kernel_for_hopper_says_what_it_needs():
    assert hopper_refusal(Device("cpu")).endswith("9.0 (running on cpu)")
    assert hopper_refusal(Device("gpu", (8, 0))).endswith("(running on compute capability 8.0)")
    with on_hopper():
        told = hopper_refusal(Device("gpu", (9, 0)))
    if jax.__version_info__ >= MOSAIC_SINCE:
        assert told is None
    else:
        assert told.startswith("needs JAX 0.11 or later (this is ")


def test_a_jax_that_cannot_start_is_reported():
    """In a process of its own, told to run on a GPU that is not there."""
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    done = subprocess.run(
        [sys.executable, "-c", "from regard.cli import main; main()", "doctor"],
        env=os.environ | {"JAX_PLATFORMS": "cuda"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    assert "something is wrong" in done.stdout
    assert re.search(r"devices +none: ", done.stdout)
    assert "set        JAX_PLATFORMS=cuda" in done.stdout
    assert "Traceback" not in done.stderr


def test_extras_are_what_the_package_declares():
    lines = [
        "jax>=0.10.2",
        "pytest>=8.0; extra == 'cli'",
        "pytest>=999.1; extra == 'show'",
        'no-such-package>=1.0; extra == "serve"',
        "pytest[data]>=8.0; extra == 'ray'",
        "hypothesis>=6.0; extra == 'dev'",
    ]
    extras = {extra.name: extra for extra in find_extras(lines)}
    assert list(extras["cli"].installed) == list(extras["ray"].installed) == ["pytest"]
    assert extras["cli"].fix is None
    (old,) = extras["show"].missing
    assert re.fullmatch(r"pytest 999\.1 \(here [\d.]+\)", old)
    assert extras["serve"].missing == ["no-such-package"]
    assert extras["serve"].fix == 'pip install "regard[serve]"'
    assert not any("hypothesis" in extra.installed for extra in extras.values())
    assert all(extra.installed for extra in find_extras()), "nothing was understood"
