"""benchmarks/alignment.py: its text, its ways of combining, and a whole run of a tiny size."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from regard.seq2seq.alignment import Links, write_links
from regard.seq2seq.corpus import Grammar

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "alignment.py"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("alignment_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_corpus_takes_the_form_of_gold_text(script, tmp_path):
    (tmp_path / "a.en").write_text("The members of the Senate.\n\nBill C-49\n")
    (tmp_path / "a.fr").write_text("L'avis des sénateurs.\nrien\nLoi C-49\n")
    found = script.corpus(tmp_path / "a.en", tmp_path / "a.fr")
    assert found == [
        ("the members of the senate .", "le avis de les senateurs ."),
        ("bill c - 49", "loi c - 49"),
    ]


def test_joined_pairs_keep_every_word_in_order_and_grow_longer(script):
    rng = np.random.default_rng(0)
    pairs = [
        (" ".join(f"e{k}" for k in range(n)), " ".join(f"f{k}" for k in range(m)))
        for n, m in rng.integers(1, 19, (200, 2))
    ]
    pairs.append(("long " * 40, "longue " * 40))  # alone, however long it is
    found = list(script.joined(pairs))
    for side in (0, 1):
        before = [word for pair in pairs for word in pair[side].split()]
        assert [word for pair in found for word in pair[side].split()] == before
        lengths = [len(pair[side].split()) for pair in found]
        assert max(lengths[:-1]) <= script.LONGEST < lengths[-1]
        assert sum(n > 18 for n in lengths) > 20
    assert found == list(script.joined(pairs))


def test_agreement_is_a_threshold_on_the_geometric_mean(script):
    forward = np.array([[0.9, 0.1], [0.5, 0.5]])  # rows: target words
    backward = np.array([[0.6, 0.4], [0.0, 1.0]])  # rows: source words
    # sqrt(.9 · .6) = .73, sqrt(.5 · .4) = .45, sqrt(.1 · 0) = 0, sqrt(.5 · 1) = .71
    assert script.agreed(forward, backward) == {(0, 0), (0, 1), (1, 1)}
    assert script.agreed(forward, backward, 0.5) == {(0, 0), (1, 1)}


def test_the_table_marks_the_best_way_of_each_aligner(script):
    links = frozenset({(0, 0), (1, 1)})
    one_wrong = frozenset({(0, 0), (1, 0)})
    found = script.combined([links], [one_wrong])
    scores = script.judge({"x": found}, [Links(links)])
    assert scores["x"]["en→fr alone"]["aer"] == 0.0
    assert scores["x"]["fr→en alone"]["aer"] == 50.0
    assert "| x | **0.0** | 50.0 |" in script.table(scores)


@pytest.mark.slow
def test_a_tiny_run_from_text_to_error_rates(tmp_path):
    """Trains both directions for four steps: every way of combining gets a number."""
    train, dev = list(Grammar(80, "train", scope="demo")), list(Grammar(6, "test", scope="demo"))
    for name, pairs in (("train", train), ("dev", dev)):
        (tmp_path / f"{name}.en").write_text("".join(f"{pair.source}\n" for pair in pairs))
        (tmp_path / f"{name}.fr").write_text("".join(f"{pair.target}\n" for pair in pairs))
    write_links(tmp_path / "gold", [pair.links for pair in dev])
    sides = [f"--{part}-{side}" for part in ("train", "dev") for side in ("en", "fr")]
    files = [str(tmp_path / f"{flag[2:].replace('-', '.')}") for flag in sides]
    flags = [word for both in zip(sides, files, strict=True) for word in both]
    flags += ["--gold", str(tmp_path / "gold"), "--folder", str(tmp_path / "runs"), "--quick"]
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), *flags, "--draw", str(tmp_path / "picture.png")],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    rows = {line.split("|")[1].strip(): line for line in ran.stdout.splitlines()}
    for look in ("writing", "reading", "explaining"):
        numbers = rows[f"regard, {look}"].replace("*", "").split("|")[2:-1]
        assert len(numbers) == 7
        assert all(0.0 <= float(number) <= 100.0 for number in numbers)
    assert (tmp_path / "picture.png").stat().st_size > 10_000
