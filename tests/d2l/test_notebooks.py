"""The eight notebooks, one for each section of the book's chapter: their form; they run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import regard

FOLDER = Path(regard.__file__).resolve().parents[2] / "examples" / "book"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SECTIONS = [f"11.{number}" for number in range(1, 9)]
LINES = 160  # of code, at most


def code_of(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(path, folder, epochs=None):
    """The cells as one program: this suite has no Jupyter, and the cells use none of it."""
    program = "\n".join(code_of(path)).replace("    %pip install", "    # %pip install")
    if epochs:
        program = re.sub(r"max_epochs=\d+", f"max_epochs={epochs}", program)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=folder,
        env=os.environ
        | {
            "PYTHONPATH": str(FOLDER.parents[1] / "src"),
            "MPLBACKEND": "Agg",
            "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_is_one_for_each_section():
    titles = [json.loads(path.read_text())["cells"][0]["source"][0] for path in NOTEBOOKS]
    assert [re.match(r"# (11\.\d) \w", title)[1] for title in titles] == SECTIONS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_form_is_colabs(path):
    """The first code cell installs where regard is missing, and does nothing elsewhere."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert "colab" in notebook["metadata"]
    first, *others = code_of(path)
    assert re.match(
        r"try:\n    from regard import d2l\nexcept ModuleNotFoundError:.*\n"
        r'    %pip install -q "regard\[flax,show\]"\n    from regard import d2l\n',
        first,
    )
    assert "\n%" not in "\n".join(others)
    assert len("\n".join([first, *others]).splitlines()) < LINES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_was_saved_with_what_it_shows(path):
    """So that it can be read where nothing runs."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    outputs = [out for cell in cells for out in cell.get("outputs", [])]
    assert not [out for out in outputs if out["output_type"] == "error"]
    assert any(out.get("data", {}).keys() & {"image/png", "image/svg+xml"} for out in outputs)
    assert path.stat().st_size < 500_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_from_top_to_bottom(path, tmp_path):
    """Models are trained for one epoch only; what the cells compare, they find equal."""
    printed = run(path, tmp_path, epochs=1)
    assert "False" not in printed
    assert (tmp_path / "progress.png").exists() == ("d2l.Trainer(" in path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS[3:7:3], ids=lambda path: path.stem)
def test_its_translators_learn(path, tmp_path):
    scores = [float(score) for score in re.findall(r"  bleu ([\d.]+)", run(path, tmp_path))]
    assert len(scores) == 4 * path.read_text().count("d2l.Seq2Seq(")
    assert sum(scores) / len(scores) > 0.7


@pytest.mark.slow
def test_its_vision_transformer_learns(tmp_path):
    assert float(re.search(r"accuracy ([\d.]+)", run(NOTEBOOKS[7], tmp_path))[1]) > 0.8
