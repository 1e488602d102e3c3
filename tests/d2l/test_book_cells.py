"""The book's own code cells run after the one changed import, and its models learn to translate.

The cells are not part of this project. REGARD_BOOK_CELLS names a file of them: section -> a list
of {"src": code}, in order. Each section runs in a process of its own, with JAX's defaults.
"""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from regard import d2l

FILE = os.environ.get("REGARD_BOOK_CELLS", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FILE, reason="REGARD_BOOK_CELLS names no file of the book's cells"),
]

# Section -> how many code cells its JAX edition has.
SECTIONS = {
    "queries-keys-values": 3,
    "attention-pooling": 10,
    "attention-scoring-functions": 11,
    "bahdanau-attention": 7,
    "multihead-attention": 5,
    "self-attention-and-positional-encoding": 7,
    "transformer": 21,
    "vision-transformer": 8,
}
TRAINED = ("bahdanau-attention", "transformer", "vision-transformer")
TRANSLATING = TRAINED[:2]

RUNNER = """
import json, sys, types
section, file = sys.argv[1:]
page = {"tab": types.SimpleNamespace(selected=lambda *names: "jax" in names)}
for number, cell in enumerate(json.load(open(file))[section]):
    lines = [line for line in cell["src"].splitlines() if not line.startswith("%%")]
    code = "\\n".join(lines).replace("from d2l import jax as d2l", "from regard import d2l")
    code = code.replace("max_epochs=10", "max_epochs=2")  # on pictures
    exec(compile(code, f"{section}, cell {number}", "exec"), page)
print("cells run:", number + 1)
"""


@functools.cache
def run(section, folder):
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, section, str(Path(FILE).resolve())],
        capture_output=True,
        text=True,
        timeout=1200,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(d2l.__file__).parents[2]), "MPLBACKEND": "Agg"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_file_has_every_section():
    cells = json.loads(Path(FILE).read_text())
    assert {section: len(cells[section]) for section in SECTIONS} == SECTIONS


@pytest.mark.parametrize("section", SECTIONS)
def test_every_cell_runs(section, tmp_path_factory):
    """The shapes are checked by the cells' own assertions. Of ten epochs on pictures, two."""
    folder = tmp_path_factory.getbasetemp() / section
    folder.mkdir(exist_ok=True)
    printed = run(section, folder)
    assert f"cells run: {SECTIONS[section]}" in printed
    assert (folder / "progress.png").exists() == (section in TRAINED)


@pytest.mark.parametrize("section", TRANSLATING)
def test_the_four_sentences_are_translated(section, tmp_path_factory):
    """BLEU of each, as the page prints it: words without it would be near 0."""
    folder = tmp_path_factory.getbasetemp() / section
    folder.mkdir(exist_ok=True)
    scores = [float(score) for score in re.findall(r"bleu,([\d.]+)", run(section, folder))]
    assert len(scores) == 4
    assert sum(scores) / 4 > 0.7
