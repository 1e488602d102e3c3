"""The table on docs/scaling.md is what its script computes from the committed run."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def test_the_page_has_the_table_of_its_script():
    spec = importlib.util.spec_from_file_location("scaling", DOCS / "scaling.py")
    scaling = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scaling)
    page = (DOCS / "scaling.md").read_text().splitlines()
    start = page.index(scaling.table()[0])
    assert page[start : start + len(scaling.table())] == scaling.table()
    # Where everything hides, n devices are n times as fast; past it, more of them are no faster.
    additive, dot = scaling.WORKS[-1], scaling.WORKS[0]
    assert scaling.speedup(additive, 1 << 20, 256) > 250
    assert scaling.speedup(dot, 1 << 17, 256) <= scaling.speedup(dot, 1 << 17, 16) < 16
