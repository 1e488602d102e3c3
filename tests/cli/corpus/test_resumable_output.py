"""Files made in parts: whole and right, whichever process is killed, and whenever."""

import contextlib
import errno
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from regard.cli.corpus import resumable_output as parts_module
from regard.cli.corpus.corpus_file import CorpusFile
from regard.cli.corpus.resumable_output import Parts, folder_of
from regard.seq2seq.distributed.launch import Process

JOB = {"parts": 3, "beam": 5}
WHOLE = "part 0\npart 1\npart 2\n"


def make(parts, indices=range(3)):
    for index in indices:
        parts.write(index, f"part {index}\n")


def listed(out):
    folder = folder_of(out)
    return sorted(os.listdir(folder)) if folder.exists() else None


def test_it_goes_on_where_it_was_and_leaves_nothing_behind(tmp_path):
    out = tmp_path / "out.txt"
    with Parts(out, JOB) as parts:
        make(parts, [1])
        assert parts.missing() == [0, 2]
        assert [parts.needs(index) for index in range(3)] == [True, False, True]
    with Parts(out, JOB) as parts:
        assert parts.missing() == [0, 2]
        make(parts, [0, 2])
        assert not out.exists()
        assert parts.join()
        assert parts.missing() == []
        assert not parts.join()
    assert out.read_text() == WHOLE
    assert os.listdir(tmp_path) == ["out.txt"]


def test_parts_of_another_job_are_refused_in_words(tmp_path):
    out = tmp_path / "out.txt"
    with Parts(out, JOB) as parts:
        make(parts, [0])
    with pytest.raises(ValueError, match=r"made with beam 5, not 1\. Fix: .* remove the folder"):
        Parts(out, {**JOB, "beam": 1})
    with pytest.raises(ValueError, match="longest None, not 95"):
        Parts(out, {**JOB, "longest": 95})
    (folder_of(out) / "manifest.json").write_text("[]")
    with pytest.raises(ValueError, match="not a manifest of regard"):
        Parts(out, JOB)


def test_one_who_comes_late_sees_that_it_is_whole(tmp_path):
    out = tmp_path / "out.txt"
    with Parts(out, JOB, stays=True) as parts:
        make(parts)
        parts.join()
    assert listed(out) == ["claims", "manifest.json"]
    with Parts(out, JOB, stays=True) as parts:
        assert parts.missing() == []
        assert not parts.unfinished()
        assert not parts.needs(0)
    out.unlink()  # then there is something to do again
    with Parts(out, JOB, stays=True) as parts:
        assert parts.missing() == [0, 1, 2]


def test_parts_left_by_an_earlier_job_are_never_taken(tmp_path):
    """It was killed after the whole was there, before its parts were removed."""
    out = tmp_path / "out.txt"
    with Parts(out, JOB, stays=True) as parts:
        make(parts)
        parts.join()
    (folder_of(out) / f"part-000001.{'0' * 32}").write_text("of the earlier job\n")
    with Parts(out, {**JOB, "beam": 1}, stays=True) as parts:
        assert parts.missing() == [0, 1, 2]
        assert out.read_text() == WHOLE  # until there is a new one
    assert listed(out) == ["claims", "manifest.json"]


@pytest.mark.parametrize("dies_at", ["open_atomically", "_write_manifest", "_clear"])
def test_a_join_that_was_cut_short_is_done_again(tmp_path, monkeypatch, dies_at):
    out = tmp_path / "out.txt"

    class Killed(BaseException):
        pass

    def die(*_, **__):
        raise Killed

    with Parts(out, JOB) as parts:
        make(parts)
        (folder_of(out) / ".part-000002.0123456789ab.new").write_text(
            "half a pa"
        )  # of another that died
        with monkeypatch.context() as patch:
            patch.setattr(parts_module if dies_at == "open_atomically" else Parts, dies_at, die)
            with pytest.raises(Killed):
                parts.join()
    with Parts(out, JOB) as parts:
        parts.join()
    assert out.read_text() == WHOLE
    assert listed(out) in (None, ["claims", "manifest.json"])


USERS = {
    "a folder of the same name": lambda folder: (folder / "thesis.txt").write_text("years"),
    "one that looks like ours": lambda folder: (folder / "part-000000").write_text("years"),
    "with a manifest of something else": lambda folder: (folder / "manifest.json").write_text(
        '{"job": {"parts": 3, "beam": 5}, "whole": null}'
    ),
}


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("kind", USERS)
def test_a_folder_of_the_users_is_refused_and_untouched(tmp_path, kind, linked):
    out = tmp_path / "out.txt"
    folder = tmp_path / "elsewhere" if linked else folder_of(out)
    folder.mkdir()
    if linked:
        folder_of(out).symlink_to(folder)
    USERS[kind](folder)
    before = {path: path.read_text() for path in folder.iterdir()}
    for stays in (False, True):
        with pytest.raises(ValueError, match=r"Fix: rename out\.txt\.parts, or .* another --out"):
            Parts(out, JOB, stays=stays)
    assert {path: path.read_text() for path in folder.iterdir()} == before


def test_even_our_own_folder_is_refused_behind_a_link(tmp_path):
    """Somebody may have moved it, or may want us to write elsewhere."""
    with Parts(tmp_path / "other.txt", JOB) as parts:
        make(parts)
    folder_of(tmp_path / "out.txt").symlink_to(folder_of(tmp_path / "other.txt"))
    with pytest.raises(ValueError, match="Fix: rename"):
        Parts(tmp_path / "out.txt", JOB)
    assert len(listed(tmp_path / "other.txt")) == 5


def test_what_the_user_puts_into_our_folder_stays(tmp_path):
    out = tmp_path / "out.txt"
    names = ["part-1", "part-000000.txt", "notes.new"]
    with Parts(out, JOB) as parts:
        make(parts)
        for name in names:
            (folder_of(out) / name).write_text("mine")
        assert parts.join()
    assert out.read_text() == WHOLE
    assert listed(out) == sorted(names)


def test_claims_that_are_a_link_are_not_followed(tmp_path):
    out = tmp_path / "out.txt"
    folder_of(out).mkdir()
    (folder_of(out) / "claims").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="claims"):
        Parts(out, JOB)
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize("damage", ["cut short", "emptied", "a bit is flipped"])
def test_a_damaged_part_is_made_again(tmp_path, damage):
    source, out = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("a\nb\nc\n")
    with Parts(out, JOB) as parts:
        make(parts, [0, 1])
        path = next(folder_of(out).glob("part-000001.*"))
        data = path.read_bytes()
        path.write_bytes(
            {"cut short": data[:-1], "emptied": b"", "a bit is flipped": b"q" + data[1:]}[damage]
        )
        made = []
        assert parts_module.run_corpus(
            CorpusFile(source, 1),
            parts,
            Process(),
            lambda run: f"part {run.index}\n",
            done=lambda run: made.append(run.index),
        )
    assert made == [2, 1]
    assert out.read_text() == WHOLE
    assert sorted(os.listdir(tmp_path)) == ["in.txt", "out.txt"]


def test_packed_parts_are_one_packed_file(tmp_path):
    out = tmp_path / "out.txt.gz"
    with Parts(out, JOB) as parts:
        make(parts)
        parts.join()
    assert gzip.decompress(out.read_bytes()).decode() == WHOLE


def test_what_would_fail_in_the_end_fails_at_once(tmp_path):
    with pytest.raises(IsADirectoryError):
        Parts(tmp_path, JOB)
    with pytest.raises(FileNotFoundError, match=r"none/out\.txt"):
        Parts(tmp_path / "none" / "out.txt", JOB)


def test_a_link_is_followed(tmp_path):
    (tmp_path / "there").mkdir()
    real, link = tmp_path / "there" / "real.txt", tmp_path / "link.txt"
    link.symlink_to(real)
    with Parts(link, JOB) as parts:
        make(parts)
        parts.join()
    assert link.is_symlink()
    assert real.read_text() == WHOLE
    assert os.listdir(real.parent) == ["real.txt"]


def no_locks(*_):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_without_locks_it_is_right_all_the_same(tmp_path, monkeypatch):
    out = tmp_path / "out.txt"
    monkeypatch.setattr(parts_module.fcntl, "lockf", no_locks)
    with Parts(out, JOB, stays=True) as first, Parts(out, JOB, stays=True) as second:
        with first.claim(0) as mine, second.claim(0) as also_mine:
            assert mine
            assert also_mine
        make(first)
        make(second)
        assert first.join()
        assert not second.join()
    assert out.read_text() == WHOLE


HOLDS = """
import sys, time
from pathlib import Path
from regard.cli.corpus.resumable_output import Parts
with Parts(Path(sys.argv[1]), {"parts": 3, "beam": 5}) as parts, parts.claim(1) as mine:
    print(mine, flush=True)
    time.sleep(600)
"""


def test_the_claims_of_a_killed_process_are_free(tmp_path):
    out = tmp_path / "out.txt"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(out)], stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout.readline() == "True\n"
            with Parts(out, JOB) as parts:
                assert [parts.is_free(index) for index in range(3)] == [True, False, True]
                with parts.claim(1) as mine:
                    assert not mine
                other.kill()
                other.wait()
                assert parts.is_free(1)
        finally:
            other.kill()


# Imports once and then forks, so that many processes can be started and killed in a few seconds.
# Each writes lines backwards, with their numbers. Orders: "start N I", "kill PID" and "wait PID".
FORKS = """
import os, signal, sys, time, warnings
from pathlib import Path
from regard.cli.corpus import resumable_output
from regard.cli.corpus.corpus_file import CorpusFile
from regard.cli.corpus.resumable_output import Parts
from regard.seq2seq.distributed.launch import Process
warnings.simplefilter("ignore")  # JAX, which is only imported, warns of forks
resumable_output.POLL = 0.01
source, out = map(Path, sys.argv[1:3])

def note(what):
    with open(sys.argv[3], "a") as notes:
        notes.write(f"{what}\\n")

def backwards(run):
    note(f"made {run.index}")
    time.sleep(0.005)
    return "".join(f"{n} {line[::-1]}\\n" for n, line in enumerate(run.lines, run.first))

def work(count, number):
    signal.alarm(120)  # whoever hangs, dies
    file = CorpusFile(source, 7)
    with Parts(out, {"parts": file.count()[1]}, stays=True) as parts:
        if resumable_output.run_corpus(file, parts, Process(number, count), backwards):
            note("joined")

for order in sys.stdin:
    what, *numbers = order.split()
    numbers = [int(number) for number in numbers]
    if what == "start":
        answer = os.fork()
        if answer == 0:
            code = 1
            try:
                work(*numbers)
                code = 0
            finally:
                os._exit(code)
    else:
        if what == "kill":
            os.kill(numbers[0], 9)
        answer = os.waitstatus_to_exitcode(os.waitpid(numbers[0], 0)[1])
    print(answer, flush=True)
"""


@contextlib.contextmanager
def forks(folder, lines):
    """The file that is written, and a function that gives orders."""
    source, out = folder / "in.txt.gz", folder / "out.txt"
    source.write_bytes(gzip.compress("".join(line + "\n" for line in lines).encode()))
    command = [sys.executable, "-c", FORKS, str(source), str(out), str(folder / "notes")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def order(*words):
            print(*words, file=process.stdin, flush=True)
            return int(process.stdout.readline())

        yield out, order
        process.stdin.close()


def backwards(lines):
    return [f"{number} {line[::-1]}" for number, line in enumerate(lines)]


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_moment_every_line_is_there_once_and_in_order(tmp_path, seed):
    lines = [f"line {number}" for number in range(1000)]  # 143 parts, the last one shorter
    draw = random.Random(seed)
    with forks(tmp_path, lines) as (out, order):
        count = draw.choice([2, 3])
        running = {number: order("start", count, number) for number in range(count)}
        killed = 0
        while killed < 12 and not out.exists():
            time.sleep(draw.uniform(0.0, 0.06))
            number = draw.randrange(count)
            killed += order("kill", running.pop(number)) == -signal.SIGKILL
            if draw.random() < 0.2:  # all of them, and as many others as it may be
                for pid in running.values():
                    order("kill", pid)
                count = draw.choice([1, 2, 3])
                running = {number: order("start", count, number) for number in range(count)}
            else:
                running[number] = order("start", count, number)
        assert [order("wait", pid) for pid in running.values()] == [0] * count
    assert killed >= 3  # or this was no test
    assert out.read_text().splitlines() == backwards(lines)
    assert listed(out) == ["claims", "manifest.json"]
    manifest = json.loads((folder_of(out) / "manifest.json").read_text())
    assert manifest["whole"] == len(out.read_bytes())


def test_no_part_is_made_twice_and_one_process_joins_them(tmp_path):
    lines = [f"line {number}" for number in range(500)]
    with forks(tmp_path, lines) as (out, order):
        # The second of three is never there, and two say that they are the first.
        pids = [order("start", 3, number) for number in (0, 0, 2)]
        assert [order("wait", pid) for pid in pids] == [0, 0, 0]
    assert out.read_text().splitlines() == backwards(lines)
    notes = (tmp_path / "notes").read_text().splitlines()
    assert sorted(notes) == sorted(["joined", *(f"made {index}" for index in range(72))])
