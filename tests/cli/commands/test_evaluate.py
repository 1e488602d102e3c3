"""`regard evaluate`: its numbers are the metrics', on files and on the grammar."""

import json
import re

import pytest
from typer.testing import CliRunner

from regard.cli.app import app
from regard.seq2seq.corpus import Grammar
from regard.seq2seq.decode.hypotheses import SearchOptions
from regard.seq2seq.metrics import alignment_error, bleu, chrf, exact_match
from regard.seq2seq.translator import Translator
from seq2seq.small_translator import save_small

pytestmark = pytest.mark.usefixtures("quick_compilation")

SOURCES = ["one two, three", "six five", "four two.", "two " * 12]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, and a reference that it writes itself, in capitals."""
    folder = tmp_path_factory.mktemp("evaluate")
    translator = save_small(folder / "model")
    (own, *_), *_ = translator.translate(SOURCES[1:2], search=SearchOptions(beam=1))
    targets = ["un deux trois quatre", own.text.upper(), "deux.", "deux " * 12]
    (folder / "source.txt").write_text("\n".join(SOURCES) + "\n")
    (folder / "target.txt").write_text("\n".join(targets) + "\n")
    pairs = zip(SOURCES, targets, strict=True)
    (folder / "pairs.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in pairs))
    (folder / "gold.txt").write_text("0-0 1-1 2-2\n0-0\n0-0\n0-0 1-1 2-2\n")
    return folder


FILES = ("--source", "{}/source.txt", "--target", "{}/target.txt")


def run(place, *words):
    """The command, {} being the folder."""
    given = ["evaluate", "--model", "{}/model", "--beam", "1", "--no-cache", *words]
    return CliRunner().invoke(app, [word.format(place) for word in given])


def test_numbers_are_the_metrics(place):
    references = (place / "target.txt").read_text().splitlines()
    translator = Translator.load(place / "model")
    texts = [one.text for one, *_ in translator.translate(SOURCES, search=SearchOptions(beam=1))]
    found = json.loads(run(place, "--tsv", "{}/pairs.tsv", "--json").stdout)
    assert found["sentences"] == 4
    assert found["bleu"]["value"] == pytest.approx(bleu(texts, references).value)
    assert found["chrf"]["value"] == pytest.approx(chrf(texts, references).value)
    assert found["exact_match"] == exact_match(texts, references) == 0
    assert found["alignment"] is None
    assert [one["sentences"] for one in found["bleu_by_length"]] == [3, 1, 0, 0, 0, 0]
    lower = json.loads(run(place, *FILES, "--json", "--lowercase", "--tokenize", "none").stdout)
    expected = bleu(texts, references, lowercase=True, tokenize="none")
    assert lower["bleu"]["value"] == pytest.approx(expected.value)
    assert "case:lc" in lower["bleu"]["signature"]
    assert "tok:none" in lower["bleu"]["signature"]
    assert lower["chrf"]["value"] == pytest.approx(chrf(texts, references, lowercase=True).value)
    assert lower["chrf"]["value"] != pytest.approx(found["chrf"]["value"])
    assert lower["exact_match"] == 25


def test_the_table_is_for_people(place, tmp_path):
    picture = tmp_path / "length.png"
    result = run(place, *FILES, "--gold-links", "{}/gold.txt", "--plot", str(picture))
    assert result.exit_code == 0, result.stderr
    gold = [one.links for one in _gold_pairs(place)]
    pairs = [(one.source.split(), one.target.split()) for one in _gold_pairs(place)]
    translator = Translator.load(place / "model")
    for look in ("writing", "reading", "explaining"):
        aligned = translator.align(pairs, look=look)
        aer = alignment_error([one.links() for one in aligned], gold).aer
        line = rf"^AER +{aer:.1f}  precision .*\(--look {look}\)$"
        assert re.search(line, result.stdout, re.MULTILINE)
    assert re.search(r"^BLEU +[\d.]+  nrefs:1\|case:mixed\|", result.stdout, re.MULTILINE)
    assert re.search(r"^1-10 +3 +[\d.]+$", result.stdout, re.MULTILINE)
    assert re.search(r"^51\+ +0 +-$", result.stdout, re.MULTILINE)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"picture: {picture}" in result.stderr


def _gold_pairs(place):
    from regard.seq2seq.corpus import Cleaning, ParallelFiles

    files = (place / name for name in ("source.txt", "target.txt", "gold.txt"))
    return list(ParallelFiles(*files, cleaning=Cleaning.nothing()))


def test_the_grammar_comes_with_its_links(place):
    result = run(place, "--grammar", "demo", "--count", "3", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    pairs = list(Grammar(3, "test", scope="demo"))
    aligned = Translator.load(place / "model").align((one.source, one.target) for one in pairs)
    expected = alignment_error([one.links() for one in aligned], [one.links for one in pairs])
    assert found["sentences"] == 3
    assert found["alignment"]["aer"] == pytest.approx(expected.aer)
    assert found["alignment_by_look"]["writing"] == found["alignment"]
    assert list(found["alignment_by_look"]) == ["writing", "reading", "explaining"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((*FILES, "--gold-links", "{}/few.txt"), 1, "1 lines"),
        ((*FILES, "--out", "{}/target.txt"), 1, "the output would replace the input"),
        ((*FILES, "--plot", "{}/source.txt"), 1, "the output would replace the input"),
        ((*FILES, "--tokenize", "no such"), 2, "no such"),
        ((*FILES, "--plot", "{}/none/length.png"), 1, "the folder of the plot does not exist"),
        (("--tsv", "{}/none.tsv"), 1, r"none\.tsv"),
        (("--tsv", "{}/pairs.tsv", "--gold-links", "{}/gold.txt"), 2, "--source and --target"),
        (("--tsv", "{}/pairs.tsv", "--grammar", "demo"), 2, "name one corpus"),
    ],
)
def test_bad_input_is_reported_in_one_line(place, words, code, said):
    (place / "few.txt").write_text("0-0\n")
    result = run(place, *words)
    assert result.exit_code == code, result.output
    assert re.search(said, result.stderr)
    assert result.stdout == ""
    if code == 1:
        assert result.stderr.count("\n") == 1
