"""`regard translate --in --out`: files and folders, in parts, on a Ray cluster; killed and resumed.

What happens to parts when the process is killed is test_resumable_output.py.
"""

import gzip
import json
import os
import random
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from regard.cli.app import app
from regard.cli.corpus import corpus_translation
from regard.cli.corpus.corpus_files import CorpusFiles
from regard.cli.corpus.resumable_output import Parts, folder_of
from regard.seq2seq.decode.batch_shapes import groups
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


def run(model, source, out, *words, beam=1, catch=True):
    given = arguments(model, source, out, "--beam", beam, *words)
    return CliRunner().invoke(app, given, catch_exceptions=catch)


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


def interrupted(out, job, texts):
    """As if a process had been killed that had finished some parts."""
    files = [(out, parts) for *_, parts in job["files"]]
    with Parts(out, job, files) as parts:
        for index, text in texts.items():
            parts.write(index, text)


def job_of(model, source, out, monkeypatch, *words):
    """What a command writes into its manifest."""
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(
            corpus_translation, "Parts", lambda out, job, files: seen.append(job) or 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            run(model, source, out, *words, catch=False)
    return seen[0]


def test_what_is_there_is_not_made_again(model, corpus, tmp_path, monkeypatch):
    out = tmp_path / "out.txt"
    result = run(model, corpus, out, "--part-lines", 100)
    assert re.search(r"300 lines, complete, in .* lines/s", result.stderr)
    lines = out.read_text().splitlines(keepends=True)
    job = job_of(model, corpus, out, monkeypatch, "--part-lines", 100)
    interrupted(out, job, {1: "MARK " + "".join(lines[100:200])})
    result = run(model, corpus, out, "--part-lines", 100)
    assert "1 of 3 parts were there before" in result.stderr
    assert out.read_text() == "".join([*lines[:100], "MARK ", *lines[100:]])
    assert os.listdir(tmp_path) == ["out.txt"]


def test_a_part_that_is_damaged_is_translated_again(model, corpus, tmp_path, monkeypatch):
    alone, out = tmp_path / "alone.txt", tmp_path / "out.txt"
    assert run(model, corpus, alone, "--part-lines", 100).exit_code == 0
    job = job_of(model, corpus, out, monkeypatch, "--part-lines", 100)
    interrupted(out, job, {1: "damaged\n"})
    path = next(folder_of(out).glob("part-000001.*"))
    path.write_text("cut")
    assert run(model, corpus, out, "--part-lines", 100).exit_code == 0
    assert out.read_text() == alone.read_text()


def test_a_folder_of_files_is_a_folder_of_their_translations(model, corpus, tmp_path):
    source, out, alone = tmp_path / "in", tmp_path / "out", tmp_path / "alone.txt"
    source.mkdir()
    (source / "b.txt.gz").write_bytes(corpus.read_bytes())
    (source / "a.txt").write_text("one two\nsix\n")
    (source / ".hidden").write_text("not read\n")
    result = run(model, source, out, "--part-lines", 100)
    assert result.exit_code == 0, result.stderr
    assert sorted(os.listdir(out)) == ["a.txt", "b.txt.gz"]
    assert run(model, corpus, alone, "--part-lines", 100).exit_code == 0
    assert gzip.decompress((out / "b.txt.gz").read_bytes()) == alone.read_bytes()
    assert len((out / "a.txt").read_text().splitlines()) == 2
    (source / "deeper").mkdir()
    for to, said in [(out, "no folders"), (alone, "no folders")]:
        result = run(model, source, to)
        assert result.exit_code == 1
        assert said in result.stderr
    (source / "deeper").rmdir()
    for to, said in [(alone, "--out must be one. Got the file"), (source, "must be two folders")]:
        result = run(model, source, to)
        assert result.exit_code == 1
        assert said in result.stderr


def test_other_settings_are_refused_in_words(model, corpus, tmp_path, monkeypatch):
    source, out = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("one\ntwo\n")
    job = job_of(model, source, out, monkeypatch)
    interrupted(out, job, {})
    manifest = folder_of(out) / "manifest.json"
    other = tmp_path / "other"
    save_small(other, seed=1)

    def refused(said, *given, **options):
        result = run(*given, **options)
        assert result.exit_code == 1
        assert re.search(said, result.stderr), result.stderr
        assert result.stderr.count("\n") == 1
        assert json.loads(manifest.read_text())["job"] == job

    refused(r"made with beam 1, not 3\. Fix: .* remove the folder", model, source, out, beam=3)
    refused("lines of a part 5000, not 9", model, source, out, "--part-lines", 9)
    refused("longest 95, not 20", model, source, out, "--longest", 20)
    refused("json False, not True", model, source, out, "--json")
    refused("made with model [0-9a-f]{32}, not [0-9a-f]{32}", other, source, out)
    source.write_text("one\nsix\n")
    refused("made with source [0-9a-f]{32}, not [0-9a-f]{32}", model, source, out)
    refused(r"files \[\['in.txt', 2, 1\]\], not \[\['in.txt.gz', 300, 1\]\]", model, corpus, out)


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("one\n" * 100)
    runs = CorpusFiles([path], 10).runs()
    next(runs)
    path.write_text("six\n" * 101)
    with pytest.raises(ValueError, match="was changed while"):
        list(runs)


def test_an_engine_for_anything_but_files_is_refused(model, tmp_path):
    for words, said in [
        (["--engine", "ray", "one"], "on files only, with --in and --out"),
        (["--address", "host:1", "one"], "only with --engine ray"),
    ]:
        result = CliRunner().invoke(app, ["translate", *words])
        assert result.exit_code == 2
        assert said in " ".join(result.stderr.split())


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
    assert "--out must be one. Got the folder" in result.stderr
    (tmp_path / "link.txt").symlink_to(source)
    for out in (source, tmp_path / "link.txt"):
        result = run(model, source, out)
        assert result.exit_code == 1
        assert "the output would replace the input" in result.stderr
        assert source.read_text() == "one\n"


def test_stopped_by_hand_it_says_how_to_go_on(model, corpus, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(corpus_translation, "RunTranslator", stop)
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


# A process of its own: Ray forks, and JAX here has threads already.
ON_TWO_NODES = """
import os, signal, sys
from pathlib import Path
from ray.cluster_utils import Cluster
from regard.cli import main
from regard.cli.corpus.resumable_output import Parts

def translating(folder):
    try:
        return (folder / "cmdline").read_bytes().startswith(b"ray::MapWorker")
    except OSError:
        return False

def write_and_kill(parts, index, text, write=Parts.write):
    write(parts, index, text)
    written.append(index)
    if len(written) == 10:
        victim = next(filter(translating, Path("/proc").glob("[0-9]*")))
        os.kill(int(victim.name), signal.SIGKILL)
        print("killed")

written, Parts.write = [], write_and_kill
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
try:
    cluster.add_node(num_cpus=1)
    sys.argv += ["--engine", "ray", "--address", cluster.address]
    try:
        main()
    finally:
        print(sorted(written) == list(range(100)))
finally:
    cluster.shutdown()
"""


@pytest.mark.slow
def test_a_cluster_of_which_a_worker_is_killed_writes_what_one_process_writes(model, tmp_path):
    pytest.importorskip("ray", reason="regard[ray] is not installed")
    source, alone, out = (tmp_path / name for name in ("in.txt", "alone.txt", "out.txt"))
    source.write_text("".join(line + "\n" for line in some_lines(2_000, seed=1)))
    size = ("--part-lines", "20")  # 100 parts
    assert run(model, source, alone, *size).exit_code == 0
    given = arguments(model, source, out, "--beam", 1, *size)
    environment = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_ENABLE_X64": "1"}
    result = subprocess.run(
        [sys.executable, "-c", ON_TWO_NODES, *given],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,  # as here, or rounding would differ
    )
    assert result.returncode == 0, result.stderr
    said = result.stdout.splitlines()  # with Ray's own report of the kill
    assert said[0] == "killed"
    assert said[-1] == "True"  # every part was written once
    assert out.read_text() == alone.read_text()


def test_a_cluster_that_cannot_be_reached_is_one_line(model, corpus, tmp_path):
    pytest.importorskip("ray", reason="regard[ray] is not installed")
    words = ("--engine", "ray", "--address", "127.0.0.1:1")
    result = run(model, corpus, tmp_path / "out.txt", *words)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: no Ray cluster answers at 127.0.0.1:1")
    assert result.stderr.count("\n") == 1


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
