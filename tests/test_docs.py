"""The Python on the pages of docs/ runs, and prints what the page says it prints.

A section is one program, in a process of its own: a reader's JAX has none of this suite's flags.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import regard

DOCS = Path(__file__).resolve().parent.parent / "docs"
SOURCE = Path(regard.__file__).resolve().parent.parent

SECTION = re.compile(r"^## (.*?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^print\(.*\) *# (.*)$", re.MULTILINE)
IMPORTED = re.compile(r"^(?:import|from) (\w+)", re.MULTILINE)


def sections(page):
    """title -> its blocks."""
    found = {title: BLOCK.findall(text) for title, text in SECTION.findall(page.read_text())}
    return {title: blocks for title, blocks in found.items() if blocks}


def run(blocks):
    """One program of the blocks; what it printed."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "MPLBACKEND": "Agg"}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


PEERS = ("Flax", "Keras", "PyTorch", "Equinox")

PAGES = [
    pytest.param(
        page,
        title,
        marks=pytest.mark.peers if title in PEERS else (),
        id=f"{page.stem}-{title}",
    )
    for page in sorted(DOCS.glob("*.md"))
    for title in sections(page)
]


@pytest.mark.parametrize(("page", "title"), PAGES)
def test_a_section_runs_and_prints_what_it_says(page, title):
    blocks = sections(page)[title]
    missing = {name for name in IMPORTED.findall("\n".join(blocks)) if not installed(name)}
    if "d2l" in missing:  # the book's own package: the line to change, and nothing else
        blocks = [block for block in blocks if block != "from d2l import jax as d2l\n"]
        missing.remove("d2l")
    if missing:
        pytest.skip(f"needs {', '.join(sorted(missing))}")
    stated = PRINTED.findall("\n".join(blocks))
    assert stated, "the section shows no output"
    assert run(blocks) == stated


def installed(name):
    # A folder of this suite without an __init__.py is no package to import.
    found = importlib.util.find_spec(name)
    return found is not None and found.origin is not None


def test_coming_from_covers_everyone():
    titles = list(sections(DOCS / "coming-from.md"))
    assert titles == ["The book", *PEERS]
