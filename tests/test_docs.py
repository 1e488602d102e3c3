"""The Python on the pages of docs/ runs, and prints what the page says it prints.

Two kinds of blocks. Those marked exec="on" run when the site is built (`make docs`), which puts
their output on the page and fails if they fail; here they only have to be Python. Plain ones run
here: a section is one program, in a process of its own, for a reader's JAX has none of this suite's
flags.

What else would be noticed by the build alone is noticed here sooner: a page that the menu does not
have, a link to nowhere.
"""

import ast
import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

import regard

DOCS = Path(__file__).resolve().parent.parent / "docs"
SCRIPT = DOCS / "paper_figures.py"
SOURCE = Path(regard.__file__).resolve().parent.parent

SECTION = re.compile(r"^## (.*?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^( *)```python(.*)\n((?s:.*?))^\1```$", re.MULTILINE)
IDENTIFIER = re.compile(r"^::: (\S+)", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
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
@pytest.mark.slow
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


# What a page claims ---------------------------------------------------------------------------

EXECUTED = re.compile(r'^( *)```python exec="on"[^\n]*\n(.*?)^\1```$', re.MULTILINE | re.DOTALL)
LEARN = sorted(page for page in (DOCS / "learn").glob("*.md") if page.stem != "index")


def executed(text):
    """The blocks that the build runs; those of an answer are indented."""
    return [textwrap.dedent(block) for _, block in EXECUTED.findall(text)]


def asserts(blocks):
    return any(
        isinstance(node, ast.Assert) for block in blocks for node in ast.walk(ast.parse(block))
    )


@pytest.mark.parametrize("page", LEARN, ids=lambda page: page.stem)
def test_a_learn_page_asserts_what_it_claims(page):
    """The build runs these asserts; a page without one could say anything."""
    assert asserts(executed(page.read_text().partition("## Exercises")[0]))


@pytest.mark.parametrize("page", LEARN, ids=lambda page: page.stem)
def test_every_exercise_has_an_answer_that_unfolds_and_checks_itself(page):
    questions, *answers = page.read_text().partition("## Exercises")[2].split("\n??? note ")
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", questions, re.MULTILINE)]
    assert numbers == list(range(1, len(answers) + 1))
    assert len(numbers) >= 3
    for number, answer in zip(numbers, answers, strict=True):
        assert answer.startswith(f'"Answer {number}"\n')
        assert asserts(executed(answer)), "an answer is checked by running it"


@pytest.mark.slow
def test_the_additive_page_learns_the_antidiagonal():
    """Its blocks as one program, the asserts among them: each query must find its key."""
    blocks = executed((DOCS / "learn" / "additive.md").read_text())
    assert any("antidiagonal" in block for block in blocks)
    run([f"import sys; sys.path.insert(0, {str(DOCS / 'hooks')!r})", *blocks])


def test_coming_from_covers_everyone():
    titles = list(sections(DOCS / "coming-from.md"))
    assert titles == ["The book", *PEERS]


@pytest.mark.slow
def test_the_paper_figures_are_made_by_their_script(tmp_path):
    """As PDF, as a paper takes them: with TrueType fonts."""
    run([f"import sys; sys.argv[1:] = [{str(tmp_path)!r}, 'pdf']", SCRIPT.read_text()])
    committed = {path.stem for path in (DOCS / "images").glob("paper-*.png")}
    assert {path.stem for path in tmp_path.glob("*.pdf")} == committed
    for path in tmp_path.glob("*.pdf"):
        pdf = path.read_bytes()
        assert b"/CIDFontType2" in pdf
        assert b"/Type3" not in pdf


# The site ------------------------------------------------------------------------------------

EVERY_PAGE = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


def in_menu(entry):
    """The pages of a part of mkdocs.yml's nav."""
    if isinstance(entry, str):
        return [entry]
    parts = entry if isinstance(entry, list) else entry.values()
    return [page for part in parts for page in in_menu(part)]


def test_the_menu_has_every_page_and_no_other():
    settings = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text())
    assert sorted(in_menu(settings["nav"])) == EVERY_PAGE


@pytest.mark.parametrize("name", EVERY_PAGE)
def test_every_block_is_run_by_the_build_or_here(name):
    page = DOCS / name
    run_here = [block for blocks in sections(page).values() for block in blocks]
    for indent, words, block in FENCE.findall(page.read_text()):
        block = textwrap.dedent(block) if indent else block
        if 'exec="on"' in words:
            ast.parse(block)
        else:
            assert page.parent == DOCS, "plain blocks run here on the pages of docs/ itself only"
            assert block in run_here, "a plain block needs a section, ## ..., to be run here"


@pytest.mark.parametrize("name", EVERY_PAGE)
def test_links_lead_to_files(name):
    page = DOCS / name
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = [target for target in LINK.findall(text) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", sorted((DOCS / "api").glob("*.md")), ids=lambda page: page.stem)
def test_what_the_reference_shows_exists(page):
    for name in IDENTIFIER.findall(page.read_text()):
        assert pkgutil.resolve_name(name).__doc__, name
