"""`regard translate --in FILE --out FILE`: in parts, by several processes, killed and gone on with.

How parts fare when processes are killed at every moment is test_parts.py; here they are translated.
"""

import gzip
import json
import os
import random
import re
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from regard.cli.app import app
from regard.cli.corpus import corpus_translation
from regard.cli.corpus.corpus_file import CorpusFile
from regard.cli.corpus.resumable_output import Parts, folder_of
from regard.seq2seq.decode.few_shapes import groups
from seq2seq.small_translator import ENGLISH, save_small

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.sampled(1)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_small(folder)
    return folder


def some_lines(count, seed=0):
    """Sentences of 0 to 12 of the model's words, many of them twice."""
    draw, words = random.Random(seed), ENGLISH.split()
    lines = [" ".join(draw.choices(words, k=draw.randrange(13))) for _ in range(count)]
    return [draw.choice(lines) if draw.random() < 0.3 else line for line in lines]


def arguments(model, source, out, *words):
    given = ["--model", model, "--in", source, "--out", out, "--no-cache", *words]
    return ["translate", *map(str, given)]


def run(model, source, out, *words, beam=1):
    return CliRunner().invoke(app, arguments(model, source, out, "--beam", beam, *words))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "in.txt.gz"
    path.write_bytes(gzip.compress("".join(line + "\n" for line in some_lines(300)).encode()))
    return path


@pytest.mark.parametrize(
    "form", [["--json"], ["--alignment"], ["--n-best", "2"], ["--n-best", "2", "--alignment"]]
)
def test_parts_are_translated_as_the_whole_is(model, corpus, tmp_path, form):
    """The same texts, links and order; scores may differ in their last digit."""
    outs = tmp_path / "whole.txt", tmp_path / "parts.txt"
    for out, size in zip(outs, (300, 70), strict=True):
        result = run(model, corpus, out, "--part-lines", size, *form, beam=2)
        assert result.exit_code == 0, result.stderr
        assert result.stdout == ""
    whole, parts = (re.sub(r"\d+\.\d+", "#", out.read_text()) for out in outs)
    assert whole == parts
    written = outs[1].read_text().splitlines()
    if "--n-best" in form:
        # A sentence without words has one translation; indices go on from part to part.
        indices = [int(line.split(" ||| ")[0]) for line in written]
        assert sorted(set(indices)) == list(range(300))
        assert indices == sorted(indices)
    else:
        assert len(written) == 300
    if "--json" in form:
        sources = [json.loads(line)["source"] for line in written]
        assert sources == some_lines(300)
    assert sorted(os.listdir(tmp_path)) == ["parts.txt", "whole.txt"]


def test_packed_in_packed_out(model, corpus, tmp_path):
    plain, packed = tmp_path / "out.txt", tmp_path / "out.txt.gz"
    for out in (plain, packed):
        assert run(model, corpus, out, "--part-lines", 90).exit_code == 0
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()


def test_lines_that_cannot_be_translated_stay_lines(model, tmp_path):
    strange = [b"one two.", b"", b"   ", b"one\0two", b"six " * 5000, "\U0001f98a".encode(), b"six"]
    source, out = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(strange * 2))
    assert run(model, source, out, "--part-lines", 7).exit_code == 0
    found = out.read_text().split("\n")
    assert len(found) == 15  # the last one is behind the last line's end
    assert found[:7] == found[7:14]
    assert found[1] == found[2] == ""
    assert len(found[4].split()) >= 53  # 5,000 words, at most 95 at a time: none is left out


def test_what_is_there_is_not_made_again(model, corpus, tmp_path):
    out = tmp_path / "out.txt"
    result = run(model, corpus, out, "--part-lines", 100, "--processes", 2, "--process-id", 1)
    assert re.search(
        r"300 lines, complete\. This process translated 300 of them in .* lines/s", result.stderr
    )
    whole = out.read_text()
    again = run(model, corpus, out, "--part-lines", 100, "--processes", 2, "--process-id", 0)
    assert "is complete already" in again.stderr
    # As if it had been killed: one part is there, and has a mark by which to know it.
    manifest = folder_of(out) / "manifest.json"
    told = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**told, "whole": None}))
    lines = whole.splitlines(keepends=True)
    with Parts(out, told["job"]) as parts:
        parts.write(1, "MARK " + "".join(lines[100:200]))
    assert run(model, corpus, out, "--part-lines", 100).exit_code == 0
    assert out.read_text() == "".join([*lines[:100], "MARK ", *lines[100:]])
    assert os.listdir(tmp_path) == ["out.txt"]


def test_other_settings_are_refused_in_words(model, corpus, tmp_path):
    source, out = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("one\ntwo\n")
    assert run(model, source, out, "--processes", 2, "--process-id", 0).exit_code == 0
    manifest = folder_of(out) / "manifest.json"
    told = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**told, "whole": None}))
    other = tmp_path / "other"
    save_small(other, seed=1)

    def refused(said, *given, **options):
        result = run(*given, **options)
        assert result.exit_code == 1
        assert re.search(said, result.stderr), result.stderr
        assert result.stderr.count("\n") == 1
        assert json.loads(manifest.read_text())["job"] == told["job"]

    refused(r"made with beam 1, not 3\. Fix: .* remove the folder", model, source, out, beam=3)
    refused("lines of a part 5000, not 9", model, source, out, "--part-lines", 9)
    refused("longest 95, not 20", model, source, out, "--longest", 20)
    refused("json False, not True", model, source, out, "--json")
    refused("made with model [0-9a-f]{32}, not [0-9a-f]{32}", other, source, out)
    source.write_text("one\nsix\n")
    refused("made with source [0-9a-f]{32}, not [0-9a-f]{32}", model, source, out)
    refused("lines 2, not 300", model, corpus, out)


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("one\n" * 100)
    runs = CorpusFile(path, 10).runs()
    next(runs)
    path.write_text("six\n" * 101)
    with pytest.raises(ValueError, match="was changed while"):
        list(runs)


def test_numbers_of_processes_that_cannot_be_are_refused(model, corpus, tmp_path):
    out = tmp_path / "out.txt"
    for words, said in [
        (["--processes", 2], "both or neither. Got --processes 2, --process-id None."),
        (
            ["--processes", 2, "--process-id", 2],
            "Got process 2 of 2 (--processes and --process-id)",
        ),
    ]:
        result = run(model, corpus, out, *words)
        assert result.exit_code == 1
        assert said in result.stderr
    result = CliRunner().invoke(app, ["translate", "--processes", "2", "one"])
    assert result.exit_code == 2
    assert "processes share the work on files" in result.stderr
    assert os.listdir(tmp_path) == []


def test_bad_input_leaves_no_folder_behind(model, tmp_path):
    source = tmp_path / "in.txt"
    for bad, said in [
        (b"one\n" * 9 + b"caf\xe9\n", ":10: not UTF-8"),
        (b"", "the file is empty"),
        (gzip.compress(b"one\n" * 99)[:-9], "the gzip file is broken"),
    ]:
        source.write_bytes(bad)
        result = run(model, source, tmp_path / "out.txt")
        assert result.exit_code == 1
        assert said in result.stderr
        assert os.listdir(tmp_path) == ["in.txt"]
    source.write_text("one\n")
    result = run(model, source, tmp_path)
    assert result.exit_code == 1
    assert "Is a directory" in result.stderr


def test_stopped_by_hand_it_says_how_to_go_on(model, corpus, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(corpus_translation, "run_corpus", stop)
    result = run(model, corpus, tmp_path / "out.txt")
    assert result.exit_code == 130
    assert "the same command resumes" in result.stderr


def test_whole_batches_have_one_shape_for_each_width():
    draw = random.Random(0)
    for _ in range(50):
        lengths = [draw.randrange(1, 96) for _ in range(draw.randrange(1, 400))]
        found = groups(lengths, tokens=512, known=[(1, 16), (4, 96)], whole=True)
        assert {(group.rows, group.width) for group in found} <= {
            (32, 16),
            (16, 32),
            (8, 64),
            (4, 96),
        }
        assert sorted(i for group in found for i in group.members) == list(range(len(lengths)))


REGARD = "from regard.cli import main; main()"


def start(model, source, out, *words):
    command = [sys.executable, "-c", REGARD, *arguments(model, source, out, "--beam", 1, *words)]
    environment = {
        **os.environ,
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # as here, or rounding would differ
        "JAX_ENABLE_X64": "1",
        "JAX_COMPILATION_CACHE_DIR": str(out.parent / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )


def parts_in(out):
    folder = folder_of(out)
    names = os.listdir(folder) if folder.exists() else []
    return sum(name.startswith("part-") and not name.endswith(".new") for name in names)


@pytest.mark.slow
def test_two_processes_of_which_one_is_killed_write_what_one_writes(model, tmp_path):
    """Killed with SIGKILL when a random number of parts is there, and started again."""
    source, alone, out = (tmp_path / name for name in ("in.txt", "alone.txt", "out.txt"))
    lines = some_lines(2_000, seed=1)
    source.write_text("".join(line + "\n" for line in lines))
    size = ("--part-lines", 20)  # 100 parts
    assert run(model, source, alone, *size).exit_code == 0
    draw = random.Random(5)
    running = {
        number: start(model, source, out, *size, "--processes", 2, "--process-id", number)
        for number in range(2)
    }
    try:
        for kill_at in sorted(draw.sample(range(3, 60), 2)):
            victim = draw.randrange(2)
            while parts_in(out) < kill_at and running[victim].poll() is None:
                time.sleep(0.002)
            running[victim].kill()
            running[victim].communicate()
            assert not out.exists()  # or this was no test
            running[victim] = start(
                model, source, out, *size, "--processes", 2, "--process-id", victim
            )
        said = [process.communicate(timeout=600)[1] for process in running.values()]
        assert [process.returncode for process in running.values()] == [0, 0], said
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    assert out.read_text().split("\n") == alone.read_text().split("\n")
    assert len(out.read_text().splitlines()) == len(lines)
    assert parts_in(out) == 0


# Not getrusage: its maximum counts the process that started this one.
MEASURED = """
import re, sys
from regard.cli import main
try:
    main()
finally:
    peak = re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())
    print(peak[1], file=sys.stderr)
"""


@pytest.mark.slow
def test_sixty_times_the_lines_take_the_same_memory(model, tmp_path):
    draw = random.Random(0)
    distinct = [line + "\n" for line in some_lines(50)]
    peaks = []
    for count in (5_000, 300_000):
        source, out = tmp_path / f"{count}.gz", tmp_path / f"{count}.txt"
        with gzip.open(source, "wt", compresslevel=1) as file:
            for _ in range(count // 1000):
                file.writelines(draw.choices(distinct, k=1000))
        result = subprocess.run(
            [sys.executable, "-c", MEASURED, *arguments(model, source, out, "--beam", 1)],
            capture_output=True,
            text=True,
            timeout=600,
            check=True,
        )
        with open(out) as file:
            assert sum(1 for _ in file) == count
        peaks.append(int(result.stderr.split()[-1]))
    # As Python's strings they would take 25 MB, as tokens and translations much more.
    assert peaks[1] - peaks[0] < 12 * 1024, peaks  # KiB
