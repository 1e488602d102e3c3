"""`regard translate`: what comes out, in which order and form, and what is said of bad input."""

import gzip
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from regard.cli import compile_cache, line_translation, text_lines
from regard.cli.app import app
from regard.cli.commands import translate
from regard.cli.failures import one_line_errors
from regard.cli.terminal.waiting import waiting
from regard.cli.text_lines import output
from regard.seq2seq.alignment import argmax_links, format_links
from regard.seq2seq.decode.hypotheses import SearchOptions
from regard.seq2seq.translator import Translator
from seq2seq.small_translator import save_small

pytestmark = pytest.mark.usefixtures("quick_compilation")

LINES = ["one two three.", "", "six", "four, five."]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_small(folder)
    return folder


@pytest.fixture(scope="module")
def expected(model):
    """What the library says of LINES, two of each."""
    return Translator.load(model).translate(LINES, search=SearchOptions(beam=3), n_best=2)


def run(model, *words, input=None):
    given = ["translate", "--model", str(model), "--beam", "3", "--no-cache", *map(str, words)]
    return CliRunner().invoke(app, given, input=input)


def texts_of(expected):
    return "".join(best.text + "\n" for best, *_ in expected)


def test_arguments_files_and_stdin_say_the_same(model, expected, tmp_path):
    plain, packed = tmp_path / "in.txt", tmp_path / "in.gz"
    plain.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(LINES).encode())  # as Windows writes it
    packed.write_bytes(gzip.compress("\n".join(LINES).encode()))
    for result in (
        run(model, *LINES),
        run(model, "--in", plain),
        run(model, "--in", packed),
        run(model, input="\n".join(LINES) + "\n"),
    ):
        assert result.exit_code == 0, result.stderr
        assert result.stdout == texts_of(expected)


def test_chunks_keep_the_order(model, monkeypatch, tmp_path):
    monkeypatch.setattr(text_lines, "LINES", 3)
    path = tmp_path / "in.txt"
    path.write_text("\n".join(LINES * 3), encoding="utf-8")
    whole = run(model, *LINES * 3)
    assert run(model, "--in", path).stdout == whole.stdout
    assert len(whole.stdout.split("\n")) == 13


def test_long_texts_are_translated_in_sentences(model):
    sentences = ["one two three.", "six five four."]
    apart = run(model, *sentences).stdout.split("\n")
    together = run(model, "--longest", "5", " ".join(sentences)).stdout
    assert together.strip() == " ".join(apart).strip()


def test_n_best_json_and_links(model, expected):
    lines = run(model, "--n-best", "2", *LINES).stdout.splitlines()
    assert lines == [
        f"{index} ||| {one.text} ||| {one.score:.4f}"
        for index, both in enumerate(expected)
        for one in both
    ]
    for line, source, both in zip(
        run(model, "--n-best", "2", "--json", *LINES).stdout.splitlines(),
        LINES,
        expected,
        strict=True,
    ):
        told = json.loads(line)
        assert told["source"] == source
        assert [one["text"] for one in told["translations"]] == [one.text for one in both]
        first = told["translations"][0]
        assert tuple(first["target_words"]) == both[0].target_words
        assert first["weights"] == both[0].weights.round(4).tolist()
    aligned = run(model, "--alignment", *LINES).stdout
    assert aligned == "".join(
        f"{best.text}\t{format_links(best.links())}\n" for best, *_ in expected
    )


def test_alignment_is_drawn_on_a_terminal_of_80_columns(model, expected, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    show = translate._Show(screen, 1, as_json=False, alignment=True)
    for line, both in zip(LINES, expected, strict=True):
        show(line, [both[:1]])
    drawn = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())
    assert max(map(len, drawn.splitlines())) <= 80
    assert expected[0][0].text in drawn
    assert "three" in drawn  # a heading
    assert re.search(r" \.\d\d", drawn)  # a weight


def test_out_is_written_whole_or_not_at_all(model, expected, tmp_path):
    out = tmp_path / "out.txt"
    result = run(model, "--out", out, *LINES)
    assert result.stdout == ""
    assert out.read_text(encoding="utf-8") == texts_of(expected)
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"one\n" * 5 + "été".encode("latin-1"))
    out.unlink()
    result = run(model, "--in", bad, "--out", out)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {bad}:6: not UTF-8: byte 0xE9 at column 1.")
    assert sorted(os.listdir(tmp_path)) == ["bad.txt"]
    # Nor is anything printed before the last line has been read.
    assert run(model, "--in", bad).stdout == ""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--in", "{tmp}/none.txt"], 1, r"error: No such file or directory: \S+none\.txt"),
        (["--in", "{tmp}/empty.txt"], 1, r"error: \S+empty\.txt: the file is empty\."),
        (["--in", "{tmp}/broken.gz"], 1, r"error: \S+broken\.gz:\d+: the gzip file is broken"),
        (["--model", "{tmp}/none", "one"], 1, r"error: a model is a folder .* is not there"),
        (["--model", "{tmp}/half", "one"], 1, r"lacks model\.safetensors and tokenizer\.json"),
        (["--model", "{tmp}/other", "one"], 1, r"of this version of regard: unknown fields"),
        (["--out", "{tmp}/none/out.txt", "one"], 1, r"error: No such file .*none/out\.txt$"),
        (["--n-best", "4", "one"], 2, "at most the beam"),
        (["--beam", "0", "one"], 2, "--beam"),
        (["--in", "{tmp}/empty.txt", "one"], 2, "not both"),
    ],
)
def test_bad_input_is_reported_in_one_line(model, tmp_path, words, code, said):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "broken.gz").write_bytes(gzip.compress(b"one\n" * 99)[:-9])
    save_small(tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text('{"heads": 8}')
    (tmp_path / "other" / "SHA256SUMS").unlink()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").touch()
    result = run(model, *(word.format(tmp=tmp_path) for word in words))
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    if code == 1:
        assert re.search(said, result.stderr.strip())
        assert result.stderr.count("\n") == 1
    else:
        assert said in result.stderr


def test_strange_bytes_pass(model):
    result = run(model, input=b"one\0two\n\xf0\x9f\xa6\x8a\n\xd7\xa9\xd7\x9c\xd7\x95\xd7\x9d\n")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("\n") == 3
    assert run(model, input="").stdout == ""
    assert json.loads(run(model, "--json", "caf\udce9").stdout)["source"] == "caf\ufffd"


def test_a_line_in_a_foreign_script_is_copied_with_a_note(model):
    foreign = ["Привет", "one two.", "你好世界", *["мир"] * 9]
    result = run(model, *foreign)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [lines[i] for i in (0, 2, 3)] == ["Привет", "你好世界", "мир"]
    assert "line 1: copied: the model knows no Cyrillic letters" in result.stderr
    assert "line 3: copied: the model knows no Chinese letters" in result.stderr
    assert "line 2:" not in result.stderr
    assert result.stderr.count("\n") == 6  # five lines are named, not all eleven
    assert json.loads(run(model, "--json", "мир").stdout)["translations"][0]["note"]


def test_a_broken_pipe_is_left_to_typer():
    with pytest.raises(BrokenPipeError), one_line_errors():
        raise BrokenPipeError


def test_faults_of_regard_keep_their_traceback():
    with pytest.raises(KeyError), one_line_errors():
        raise KeyError("a bug")


def test_chunks_are_small_where_lines_are_long(monkeypatch):
    monkeypatch.setattr(text_lines, "CHARACTERS", 10)
    lines = ["x" * 4] * 5 + ["y" * 40] + ["z"]
    found = list(text_lines.chunks(lines, 100))
    assert [line for chunk in found for line in chunk] == lines
    assert [len(chunk) for chunk in found] == [3, 3, 1]


def test_output_leaves_the_old_file_alone_when_it_fails(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("old")

    def fail():
        with output(path) as file:
            file.write("new")
            raise ValueError("failed on the way")

    with pytest.raises(ValueError, match="on the way"):
        fail()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.txt"]


def test_output_to_a_pipe_or_a_link_goes_where_it_leads(tmp_path):
    real, link = tmp_path / "real.txt", tmp_path / "link.txt"
    real.write_text("old")
    link.symlink_to(real)
    with output(link) as file:
        file.write("new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    device = Path(os.devnull)
    with output(device) as file:
        file.write("gone")
    assert not device.is_file()


def test_the_bar_counts_lines_over_chunks(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with waiting("loading") as wait:
        wait.says("translating", total=6)
        for size in (4, 2):
            with wait.chunk(size):
                wait.done(1, 2)
                wait.done(2, 2)  # parts; the bar counts lines
            with wait.aside():
                pass
        (task,) = wait._bar.tasks
        assert (task.completed, task.total) == (6, 6)
    assert "translating" in screen.getvalue()


@pytest.mark.usefixtures("programs_not_kept")
def test_compiled_programs_are_kept_only_where_that_can_be(tmp_path, monkeypatch):
    told = {}
    monkeypatch.setattr(jax.config, "update", lambda name, value: told.update({name: value}))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = compile_cache.keep_compiled_programs()
    assert folder.parent == tmp_path / "regard" / "xla"
    assert told["jax_compilation_cache_dir"] == str(folder)
    assert told["jax_persistent_cache_min_compile_time_secs"] == 0
    told.clear()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compile_cache.keep_compiled_programs() is None
    assert not told


def test_long_lines_are_translated_in_pieces_and_joined(model, monkeypatch):
    """As if each sentence had been a line of its own."""
    sentences = ["one two three.", "six five four.", "two two."]
    line = " ".join(sentences)
    apart = [run(model, "--n-best", "2", "--json", text).stdout for text in sentences]
    apart = [json.loads(text)["translations"] for text in apart]
    monkeypatch.setattr(line_translation, "LONG_LINE", 20)
    lines = ["six", line, ""]
    assert run(model, *lines).stdout.split("\n")[1] == " ".join(
        best["text"] for best, _ in apart if best["text"]
    )
    ranked = run(model, "--n-best", "2", *lines).stdout.splitlines()
    assert [text.split(" ||| ")[0] for text in ranked] == list("00112")
    mean = sum(second["score"] for _, second in apart) / 3
    assert float(ranked[3].split(" ||| ")[2]) == pytest.approx(mean, abs=2e-4)
    told = json.loads(run(model, "--n-best", "2", "--json", *lines).stdout.splitlines()[1])
    assert told["source"] == line
    for rank, one in enumerate(told["translations"]):
        assert one["pieces"] == [both[rank] for both in apart]
        assert one["weights"] is None
        assert one["source_words"] == [w for piece in one["pieces"] for w in piece["source_words"]]
    text, links = run(model, "--alignment", *lines).stdout.splitlines()[1].split("\t")
    best = told["translations"][0]
    assert text == best["text"]
    read = written = 0
    expected = set()
    for piece in best["pieces"]:
        weights = np.array(piece["weights"]).reshape(len(piece["target_words"]), -1)
        expected |= {(read + i, written + j) for i, j in argmax_links(weights)}
        read, written = read + len(piece["source_words"]), written + len(piece["target_words"])
    assert links == format_links(expected)


# Not getrusage: its maximum counts the process that started this one.
MEASURED = """
import re, resource, sys
from regard.cli import main
resource.setrlimit(resource.RLIMIT_AS, (24 << 30, 24 << 30))
try:
    main()
finally:
    peak = re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())
    print(int(peak[1]) >> 10, file=sys.stderr)
"""


@pytest.mark.parametrize("form", [["--json"], ["--alignment"], []])
@pytest.mark.slow
def test_a_line_of_a_megabyte_takes_little_memory(model, tmp_path, form):
    """Its weights as one matrix would take 512 GiB."""
    if form:
        path, out = tmp_path / "in.txt", ["--out", tmp_path / "out.txt"]
        path.write_text("one two.\n" + "four five six one two three. " * 36_000 + "\nsix.\n")
    else:  # nowhere to cut, and a word of letters that the model has never seen; to stdout
        path, out = tmp_path / "in.txt", []
        path.write_text("one two.\n" + "six " * 125_000 + "z" * 500_000 + "\nsix.\n")
    given = ["translate", "--model", model, "--beam", 1, "--no-cache", "--in", path, *out, *form]
    result = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, given)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    written = (tmp_path / "out.txt").read_text() if out else result.stdout
    lines = written.split("\n")
    assert len(lines) == 4
    assert len(lines[1]) > 20_000
    peak = int(result.stderr.split()[-1])
    assert peak < 1000, peak  # MiB


def test_a_file_without_line_ends_is_refused_by_name(model, tmp_path, monkeypatch):
    monkeypatch.setattr(text_lines, "LONGEST_LINE", 1 << 10)
    path = tmp_path / "in.txt"
    path.write_bytes(b"one\n" + b"x" * (1 << 10) + b"\n")
    result = run(model, "--in", path)
    assert result.exit_code == 1
    assert f"{path}:2: a line must not be longer than" in result.stderr
    path.write_bytes(b"one\n" + b"x" * ((1 << 10) - 1) + b"\n")
    assert run(model, "--in", path).exit_code == 0


def test_groups_of_lines_are_bounded_in_number_and_weights(monkeypatch):
    monkeypatch.setattr(line_translation, "TOGETHER", 3)
    monkeypatch.setattr(line_translation, "WEIGHTS", 10_000)
    lines = ["a", "", "b", "c", "d" * 40, "e" * 40, "f" * 100, "g"]
    groups = list(line_translation._groups(lines, 1))
    assert [text for group in groups for text, _ in group] == lines
    assert [len(group) for group in groups] == [3, 3, 1, 1]
    assert [len(group) for group in line_translation._groups(lines, 2)] == [3, 2, 1, 1, 1]


@pytest.mark.slow
def test_a_file_may_be_a_pipe(model, expected, tmp_path):
    (tmp_path / "in.txt").write_text("\n".join(LINES) + "\n")
    words = [sys.executable, "-c", "from regard.cli import main; main()", "translate"]
    words += ["--model", str(model), "--beam", "3", "--no-cache"]
    regard = " ".join(map(shlex.quote, words))
    for line in (
        f"{regard} --in <(cat in.txt)",
        f"{regard} --in <(gzip < in.txt)",
        f"cat in.txt | {regard} --in -",
        f"cat in.txt | {regard} --in /dev/stdin",
        f"cat in.txt | {regard} --in - --out out.txt; cat out.txt",
        f"{regard} --in in.txt --out >(cat); sleep 1",
    ):
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=tmp_path)
        assert done.stdout == texts_of(expected), (line, done.stderr)
        assert done.stderr == ""


def test_the_bar_shows_what_is_compiled_and_for_how_long_in_80_columns(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with waiting("loading the model") as wait:
        wait.says("translating", 12_345_678, compiles="the search")
        (task,) = wait._bar.tasks
        task.start_time -= 215  # seconds
        wait._bar.refresh()
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).split("\r")[-1]
        assert "translating: compiling the search" in shown
        assert "0:03:35" in shown
        assert "12345678" not in shown  # nothing is counted yet
        wait.at(12_000_000, "translating, 12,345 lines/s")
        screen.truncate(0)
        wait._bar.refresh()
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).strip("\0\r\n")
        assert "translating, 12,345 lines/s" in shown
        assert "12000000/12345678" in shown
        assert "compiling" not in shown
        assert "…" not in shown
        assert max(map(len, shown.splitlines())) <= 80
