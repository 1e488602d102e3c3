"""`regard align`: links as the library finds them, every option's error, and refusals."""

import re
import shlex
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from regard.cli.app import app
from regard.seq2seq.alignment import format_links, parse_links, symmetrize
from regard.seq2seq.decode import programs
from regard.seq2seq.metrics import alignment_error
from regard.seq2seq.translator import Translator
from seq2seq.small_translator import save_small

pytestmark = pytest.mark.usefixtures("quick_compilation")

SOURCES = ["one two, three", "six five", "", "four two."]
TARGETS = ["un deux trois", "cinq, six", "un", "deux."]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with two models and the texts."""
    folder = tmp_path_factory.mktemp("align")
    save_small(folder / "there")
    save_small(folder / "back", seed=1, turned=True)
    (folder / "source.txt").write_text("\n".join(SOURCES) + "\n")
    (folder / "target.txt").write_text("\n".join(TARGETS) + "\n")
    pairs = zip(SOURCES, TARGETS, strict=True)
    (folder / "pairs.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in pairs))
    (folder / "gold.txt").write_text("0-0 1-1 3-2\n0-2 1-0\n\n1-0 0p0 2-1\n")
    return folder


def run(place, *words):
    """The command, {} being the folder."""
    given = ["align", "--model", "{}/there", "--no-cache", *words]
    return CliRunner().invoke(app, [word.format(place) for word in given])


FILES = ("--source", "{}/source.txt", "--target", "{}/target.txt")


def links(place, look="explaining", model="there", threshold=0.0, split=False):
    pairs = list(zip(SOURCES, TARGETS, strict=True))
    if split:
        pairs = [(source.split(), target.split()) for source, target in pairs]
    if model == "back":
        pairs = [pair[::-1] for pair in pairs]
    found = Translator.load(place / model).align(pairs, look=look)
    return [one.links(threshold) for one in found]


def counted(program, calls):
    """A program that also writes down its name when it is called."""
    run = getattr(programs, program)

    def noted(*arrays, **options):
        calls.append(program)
        return run(*arrays, **options)

    return noted


def lines(alignments):
    return "".join(format_links(one) + "\n" for one in alignments)


def test_links_are_the_librarys(place):
    expected = links(place)
    assert len(expected[0]) == 3
    for words in (FILES, ("--tsv", "{}/pairs.tsv")):
        result = run(place, *words)
        assert result.exit_code == 0, result.stderr
        assert result.stdout == lines(expected)
    others = {look: run(place, *FILES, "--look", look).stdout for look in ("writing", "reading")}
    for look, written in others.items():
        assert written == lines(links(place, look))
    assert others["reading"] != others["writing"] != lines(expected)
    assert run(place, *FILES, "--tokenized").stdout == lines(links(place, split=True))
    assert run(place, *FILES, "--threshold", "0.5").stdout == lines(links(place, threshold=0.5))


@pytest.mark.parametrize("way", ["intersection", "union", "grow-diag", None])
def test_both_directions_are_combined(place, way):
    turned = [frozenset((i, j) for j, i in one) for one in links(place, model="back")]
    expected = [
        symmetrize(there, back, way or "grow-diag-final-and")
        for there, back in zip(links(place), turned, strict=True)
    ]
    words = () if way is None else ("--symmetrize", way)
    result = run(place, *FILES, "--reverse-model", "{}/back", *words)
    assert result.stdout == lines(expected), result.stderr


def test_gold_links_score_every_option(place, monkeypatch):
    decoded = []
    for program in ("forced", "explained"):
        monkeypatch.setattr(programs, program, counted(program, decoded))
    result = run(place, *FILES, "--reverse-model", "{}/back", "--gold", "{}/gold.txt")
    assert result.exit_code == 0, result.stderr
    # A batch for each model: writing and reading are rows of one decoding.
    assert sorted(decoded) == ["explained", "explained", "forced", "forced"]
    rows = re.findall(
        r"^(explaining|writing|reading) +(\S.*?) {2,}([\d.]+) +([\d.]+) +([\d.]+)\s*$",
        result.stderr,
        re.MULTILINE,
    )
    assert len(rows) == 18  # three looks, six ways
    table = {(look, way): (aer, precision, recall) for look, way, aer, precision, recall in rows}
    gold = [parse_links(line) for line in (place / "gold.txt").read_text().splitlines()]
    for look in ("explaining", "writing", "reading"):
        score = alignment_error(links(place, look), gold)
        numbers = (score.aer, score.precision, score.recall)
        assert table[look, "none"] == tuple(f"{number:.1f}" for number in numbers)
    # The links that are written stay those that were asked for.
    assert result.stdout == run(place, *FILES, "--reverse-model", "{}/back").stdout


def test_no_input_is_replaced(place):
    for name in ("source", "target", "gold"):
        result = run(place, *FILES, "--gold", "{}/gold.txt", "--out", f"{{}}/{name}.txt")
        assert result.exit_code == 1
        assert f"the output would replace the input {place}/{name}.txt" in result.stderr
    assert (place / "source.txt").read_text().splitlines() == SOURCES


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--source", "{}/source.txt", "--target", "{}/short.txt"), 1, r"4 lines, \S+ with 3"),
        (("--source", "{}/source.txt", "--target", "{}/latin.txt"), 1, r"latin\.txt:2: not UTF-8"),
        (("--tsv", "{}/notab.tsv"), 1, r"notab\.tsv:2: no tab"),
        (("--tsv", "{}/empty.tsv"), 1, r"empty\.tsv: the file is empty"),
        ((*FILES, "--gold", "{}/short.txt"), 1, r"short\.txt:1: a link is written i-j"),
        ((*FILES, "--gold", "{}/few.txt"), 1, r"Got 1 lines, 4 pairs"),
        ((*FILES, "--gold", "{}/gold.txt", "--tokenized"), 1, r"gold\.txt:1: .* Got 3-2, source"),
        ((*FILES, "--reverse-model", "{}/nowhere"), 1, r"nowhere is not there"),
        ((), 2, "name one corpus"),
        ((*FILES, "--tsv", "{}/pairs.tsv"), 2, "name one corpus"),
        (("--source", "{}/source.txt"), 2, "go together"),
        ((*FILES, "--symmetrize", "union"), 2, "--reverse-model"),
    ],
)
def test_bad_input_is_reported_and_nothing_is_written(place, words, code, said):
    (place / "short.txt").write_text("un\ndeux\ntrois\n")
    (place / "latin.txt").write_bytes("un\nété\nun\nun\n".encode("latin-1"))
    (place / "notab.tsv").write_text("one\tun\ntwo deux\n")
    (place / "empty.tsv").touch()
    (place / "few.txt").write_text("0-0\n")
    result = run(place, *words, "--out", "{}/links.txt")
    assert result.exit_code == code, result.output
    assert re.search(said, result.stderr)
    assert not (place / "links.txt").exists()
    if code == 1:
        assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_pairs_come_from_a_pipe_as_from_a_file(place, tmp_path):
    expected = run(place, "--tsv", "{}/pairs.tsv").stdout
    assert expected.count("\n") == 4
    pairs = (place / "pairs.tsv").read_text()
    command = [sys.executable, "-c", "from regard.cli import main; main()"]
    given = ["align", "--model", f"{place}/there", "--no-cache"]
    shell = {
        "-": f"cat {place}/pairs.tsv | regard --tsv -",
        "/dev/stdin": f"cat {place}/pairs.tsv | regard --tsv /dev/stdin",
        "gzip": f"gzip < {place}/pairs.tsv | regard --tsv -",
        "process substitution": f"regard --tsv <(cat {place}/pairs.tsv)",
        "two": f"regard --source <(cat {place}/source.txt) --target - < {place}/target.txt",
        "gold": f"regard --tsv - --gold <(cat {place}/gold.txt) < {place}/pairs.tsv",
    }
    words = " ".join(map(shlex.quote, [*command, *given]))
    for how, line in shell.items():
        script = f'regard() {{ {words} "$@"; }}; {line}'
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, (how, done.stderr)
        assert ("AER" in done.stderr) is (how == "gold")
        if how != "gold":
            assert done.stderr == ""
    found = CliRunner().invoke(app, [*given, "--tsv", "-"], input=pairs)
    assert found.stdout == expected
    bad = CliRunner().invoke(app, [*given, "--tsv", "-"], input=pairs + "no tab\n")
    assert bad.exit_code == 1
    assert bad.stderr.startswith("error: stdin:5: no tab. Fix")
    both = CliRunner().invoke(app, [*given, "--source", "-", "--target", "/dev/stdin"], input="a")
    assert both.exit_code == 1
    assert "only one file can be read from stdin" in both.stderr
    empty = CliRunner().invoke(app, [*given, "--tsv", "-"], input="")
    assert empty.exit_code == 1
    assert empty.stderr == "error: stdin: the file is empty.\n"


def test_a_sentence_too_long_to_align_is_named_before_any_work(place, tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("one\tun\n" + "one " * 5000 + "\tun\n")
    found = run(place, "--tsv", str(path))
    assert found.exit_code == 1
    assert found.stdout == ""
    assert re.match(rf"error: {path}:2: a sentence of more than 16,384 characters", found.stderr)
