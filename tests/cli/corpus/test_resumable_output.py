"""Files made in parts: whole and right, whenever the process is killed."""

import contextlib
import errno
import gzip
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from regard.cli.corpus import resumable_output
from regard.cli.corpus.resumable_output import Parts, folder_of

JOB = {"beam": 5}
WHOLE = "part 0\npart 1\npart 2\n"


def open_parts(out, job=JOB):
    return Parts(out, job, [(out, 3)])


def make(parts, indices=range(3)):
    for index in indices:
        parts.write(index, f"part {index}\n")


def listed(out):
    folder = folder_of(out)
    return sorted(os.listdir(folder)) if folder.exists() else None


def test_it_goes_on_where_it_was_and_leaves_nothing_behind(tmp_path):
    out = tmp_path / "out.txt"
    with open_parts(out) as parts:
        make(parts, [1])
        assert parts.missing() == [0, 2]
    with open_parts(out) as parts:
        assert parts.missing() == [0, 2]
        make(parts, [0, 2])
        assert not out.exists()
        assert parts.join()
    assert out.read_text() == WHOLE
    assert os.listdir(tmp_path) == ["out.txt"]


def test_a_folder_of_files_is_made_of_the_parts_of_each(tmp_path):
    out = tmp_path / "out"
    files = [(out / "a.txt", 1), (out / "b.txt.gz", 2)]
    with Parts(out, JOB, files) as parts:
        make(parts)
        assert parts.join()
    assert (out / "a.txt").read_text() == "part 0\n"
    assert gzip.decompress((out / "b.txt.gz").read_bytes()) == b"part 1\npart 2\n"
    assert sorted(os.listdir(out)) == ["a.txt", "b.txt.gz"]
    assert os.listdir(tmp_path) == ["out"]


def test_parts_of_another_job_are_refused_in_words(tmp_path):
    out = tmp_path / "out.txt"
    with open_parts(out) as parts:
        make(parts, [0])
    with pytest.raises(ValueError, match=r"made with beam 5, not 1\. Fix: .* remove the folder"):
        open_parts(out, {**JOB, "beam": 1})
    with pytest.raises(ValueError, match="longest None, not 95"):
        open_parts(out, {**JOB, "longest": 95})
    (folder_of(out) / "manifest.json").write_text("[]")
    with pytest.raises(ValueError, match="not a manifest of regard"):
        open_parts(out)


def test_parts_without_a_manifest_are_never_taken(tmp_path):
    """A process was killed while it removed what it had joined."""
    out = tmp_path / "out.txt"
    open_parts(out).__exit__()
    (folder_of(out) / f"part-000001.{'0' * 32}").write_text("of the earlier job\n")
    (folder_of(out) / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"Fix: rename out\.txt\.parts"):
        open_parts(out, {**JOB, "beam": 1})


def test_a_second_process_is_refused(tmp_path):
    out = tmp_path / "out.txt"
    with open_parts(out) as parts:
        with pytest.raises(ValueError, match=r"another process is translating into .*out\.txt"):
            open_parts(out)
        make(parts)
        parts.join()
    assert out.read_text() == WHOLE


@pytest.mark.parametrize("dies_at", ["open_atomically", "_clear"])
def test_a_join_that_was_cut_short_is_done_again(tmp_path, monkeypatch, dies_at):
    out = tmp_path / "out.txt"

    class Killed(BaseException):
        pass

    def die(*_, **__):
        raise Killed

    with open_parts(out) as parts:
        make(parts)
        (folder_of(out) / ".part-000002.0123456789ab.new").write_text(
            "half a pa"
        )  # of another that died
        with monkeypatch.context() as patch:
            patch.setattr(resumable_output if dies_at == "open_atomically" else Parts, dies_at, die)
            with pytest.raises(Killed):
                parts.join()
    with open_parts(out) as parts:
        parts.join()
    assert out.read_text() == WHOLE
    assert listed(out) is None


USERS = {
    "a folder of the same name": lambda folder: (folder / "thesis.txt").write_text("years"),
    "one that looks like ours": lambda folder: (folder / "part-000000").write_text("years"),
    "with a manifest of something else": lambda folder: (folder / "manifest.json").write_text(
        '{"job": {"beam": 5}}'
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
    with pytest.raises(ValueError, match=r"Fix: rename out\.txt\.parts, or .* another --out"):
        open_parts(out)
    assert {path: path.read_text() for path in folder.iterdir()} == before


def test_even_our_own_folder_is_refused_behind_a_link(tmp_path):
    """Somebody may have moved it, or may want us to write elsewhere."""
    with open_parts(tmp_path / "other.txt") as parts:
        make(parts)
    folder_of(tmp_path / "out.txt").symlink_to(folder_of(tmp_path / "other.txt"))
    with pytest.raises(ValueError, match="Fix: rename"):
        open_parts(tmp_path / "out.txt")
    assert len(listed(tmp_path / "other.txt")) == 5


def test_what_the_user_puts_into_our_folder_stays(tmp_path):
    out = tmp_path / "out.txt"
    names = ["part-1", "part-000000.txt", "notes.new"]
    with open_parts(out) as parts:
        make(parts)
        for name in names:
            (folder_of(out) / name).write_text("mine")
        assert parts.join()
    assert out.read_text() == WHOLE
    assert listed(out) == sorted(names)


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    out = tmp_path / "out.txt"
    folder_of(out).mkdir()
    (folder_of(out) / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="lock"):
        open_parts(out)
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize("damage", ["cut short", "emptied", "a bit is flipped"])
def test_a_damaged_part_is_missing_again(tmp_path, damage):
    out = tmp_path / "out.txt"
    with open_parts(out) as parts:
        make(parts)
        path = next(folder_of(out).glob("part-000001.*"))
        data = path.read_bytes()
        path.write_bytes(
            {"cut short": data[:-1], "emptied": b"", "a bit is flipped": b"q" + data[1:]}[damage]
        )
        assert not parts.join()
        assert parts.missing() == [1]
        make(parts, [1])
        assert parts.join()
    assert out.read_text() == WHOLE
    assert os.listdir(tmp_path) == ["out.txt"]


def test_packed_parts_are_one_packed_file(tmp_path):
    out = tmp_path / "out.txt.gz"
    with open_parts(out) as parts:
        make(parts)
        parts.join()
    assert gzip.decompress(out.read_bytes()).decode() == WHOLE


def test_what_would_fail_in_the_end_fails_at_once(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none/out\.txt"):
        open_parts(tmp_path / "none" / "out.txt")


def test_a_link_is_followed(tmp_path):
    (tmp_path / "there").mkdir()
    real, link = tmp_path / "there" / "real.txt", tmp_path / "link.txt"
    link.symlink_to(real)
    with open_parts(link) as parts:
        make(parts)
        parts.join()
    assert link.is_symlink()
    assert real.read_text() == WHOLE
    assert os.listdir(real.parent) == ["real.txt"]


def no_locks(*_):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_without_locks_it_is_right_all_the_same(tmp_path, monkeypatch):
    out = tmp_path / "out.txt"
    monkeypatch.setattr(resumable_output.fcntl, "flock", no_locks)
    with open_parts(out) as first, open_parts(out) as second:
        make(first)
        make(second)
        assert first.join()
    assert out.read_text() == WHOLE


# Writes lines backwards, with their numbers. It imports once and then forks for each order on
# stdin, so that many processes can be started and killed in a few seconds.
FORKS = """
import os, signal, sys, time, warnings
from pathlib import Path
from regard.cli.corpus.corpus_files import CorpusFiles
from regard.cli.corpus.resumable_output import Parts
warnings.simplefilter("ignore")  # JAX, which is only imported, warns of forks
source, out = map(Path, sys.argv[1:3])

def work():
    signal.alarm(120)  # whoever hangs, dies
    corpus = CorpusFiles([source], 7)
    with Parts(out, {}, [(out, corpus.count()[0][1])]) as parts:
        for run in corpus.runs(set(parts.missing())):
            time.sleep(0.001)
            lines = (f"{n} {line[::-1]}" for n, line in enumerate(run.lines, run.first))
            parts.write(run.index, "".join(line + "\\n" for line in lines))
        parts.join()

for order in sys.stdin:
    process = os.fork()
    if process == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    print(process, flush=True)
    killed = sys.stdin.readline().startswith("kill")
    if killed:
        os.kill(process, 9)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


@contextlib.contextmanager
def forks(folder, lines):
    """The file that is written, and a function that gives orders."""
    source, out = folder / "in.txt.gz", folder / "out.txt"
    source.write_bytes(gzip.compress("".join(line + "\n" for line in lines).encode()))
    command = [sys.executable, "-c", FORKS, str(source), str(out)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def order(word):
            print(word, file=process.stdin, flush=True)
            return int(process.stdout.readline())

        yield out, order
        process.stdin.close()


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_moment_every_line_is_there_once_and_in_order(tmp_path, seed):
    lines = [f"line {number}" for number in range(1000)]  # 143 parts, the last one shorter
    draw = random.Random(seed)
    killed = 0
    with forks(tmp_path, lines) as (out, order):
        for _ in range(12):
            order("start")
            time.sleep(draw.uniform(0.0, 0.08))
            killed += order("kill") == -signal.SIGKILL
        order("start")
        assert order("wait") == 0
    assert killed >= 3  # or this was no test
    assert out.read_text().splitlines() == [f"{n} {line[::-1]}" for n, line in enumerate(lines)]
    assert listed(out) is None
