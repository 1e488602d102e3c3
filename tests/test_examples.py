"""Every example runs as a reader would run it, is short, and leaves what it says it leaves."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import regard

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
SOURCE = Path(regard.__file__).resolve().parent.parent
NOTEBOOK = EXAMPLES / "attention_you_can_look_at.ipynb"
LONGEST = 60  # lines


def run(code_or_file, folder, *arguments):
    """In a process of its own, where JAX has none of this suite's flags; what it printed."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "MPLBACKEND": "Agg"}
    done = subprocess.run(
        [sys.executable, "-W", "error", *code_or_file, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def table(printed):
    """Rows by their name: numbers that stand in columns, percentages as parts of one."""
    rows = {}
    for line in printed.splitlines():
        name, *cells = re.split(r"\s{2,}", line.strip())
        rows[name] = [float(cell.strip("%")) / 100 for cell in cells if cell.endswith("%")]
    return rows


def test_every_example_is_run_here():
    tested = {"generate", "kernel_regression", "long_additive", "score_per_head"}
    tested |= {"your_own_alignments"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_and_says_what_it_shows(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < LONGEST
    assert text.startswith('"""')


def test_generate_counts_on_from_a_ragged_batch(tmp_path):
    lines = run([EXAMPLES / "generate.py"], tmp_path).splitlines()
    assert lines == [
        "[3, 4, 5, 6] -> [7, 8, 9, 0, 1, 2, 3, 4]",
        "[8, 9] -> [0, 1, 2, 3, 4, 5, 6, 7]",
        "[1] -> [2, 3, 4, 5, 6, 7, 8, 9]",
    ]


def test_kernel_regression_draws_every_regime(tmp_path):
    run([EXAMPLES / "kernel_regression.py"], tmp_path)
    picture = (tmp_path / "kernel_regression.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 50_000, "a picture of six curves is larger"


def test_long_additive_agrees_with_the_textbook_in_little_memory(tmp_path):
    printed = run([EXAMPLES / "long_additive.py"], tmp_path, "4096")
    lines = [line.replace(",", "").split() for line in printed.splitlines()[1:]]
    assert [int(line[0]) for line in lines] == [256, 1024, 4096]
    assert all(float(line[-2]) < 1e-5 for line in lines), "apart from the textbook"
    tensor, memory = (float(lines[-1][column]) for column in (1, 3))
    assert tensor == 4096 * 4096 * 16 * 4 / 2**20
    assert memory < tensor / 50


@pytest.mark.slow
def test_heads_of_different_scores_answer_different_questions(tmp_path):
    missed = table(run([EXAMPLES / "score_per_head.py"], tmp_path))
    farthest, nearest, above = missed["one of each score"]
    assert max(farthest, nearest, above) < 0.2
    dots = missed["three dot-product heads"]
    assert dots[0] < 0.2, "a dot product finds the farthest"
    assert dots[1] > 0.4, "and not the nearest"
    assert dots[2] > 2 * above
    for question, score in enumerate(("dot", "gaussian", "additive")):
        without = missed[f"the same without {score}"]
        assert without[question] > 0.9, f"nobody else answers what {score} does"
        for other in {0, 1, 2} - {question}:
            assert without[other] < 0.2


def test_alignments_of_a_sentence_of_ones_own(tmp_path):
    printed = run([EXAMPLES / "your_own_alignments.py"], tmp_path, "She bought a red car.")
    assert re.search(r"voiture +← +car", printed)
    assert re.search(r"rouge +← +red", printed)
    assert (tmp_path / "alignment.png").read_bytes().startswith(b"\x89PNG")
    assert "voiture" in (tmp_path / "alignment.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    """Its cells as one program: this suite has no Jupyter, and the cells use none of it."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 5
    program = "\n".join(cells).replace("    %pip install", "    # %pip install")
    assert "\n%" not in program
    printed = run(["-c", program], tmp_path).splitlines()
    assert printed[0].startswith(f"regard {regard.__version__} on ")
    assert "finite: True   the empty example: [0.0, 0.0, 0.0, 0.0]" in printed


def test_the_notebook_shows_its_pictures_unrun():
    """Saved with its output, so that it can be read where nothing runs."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    outputs = [out for cell in notebook["cells"] for out in cell.get("outputs", [])]
    assert not [out for out in outputs if out["output_type"] == "error"]
    assert sum("image/png" in out.get("data", {}) for out in outputs) == 3
    assert NOTEBOOK.stat().st_size < 500_000
