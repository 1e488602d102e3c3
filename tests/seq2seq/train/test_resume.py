"""Runs that are killed, damaged or out of disk, and go on: to the same parameters, to the bit."""

import dataclasses
import errno
import gc
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from regard.seq2seq.train.checkpoints import CheckpointError, Store
from regard.seq2seq.train.log import Log, read_log
from regard.seq2seq.train.progress import Progress
from regard.seq2seq.train.run_folder import RunFolder, run_lock
from regard.seq2seq.train.training import train
from seq2seq import reversing

TESTS = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.usefixtures("quick_compilation")


def noisy(test):
    """Orbax's other threads fail a moment later than the one that is waited for."""
    for warning in ("PytestUnhandledThreadExceptionWarning", "PytestUnraisableExceptionWarning"):
        test = pytest.mark.filterwarnings(f"ignore::pytest.{warning}")(test)
    return test


def start(folder: Path, cache: Path, *words: str) -> subprocess.Popen:
    """The short run of reversing.py, in a process of its own."""
    environment = os.environ | {
        "PYTHONPATH": f"{TESTS.parent / 'src'}:{TESTS}",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # it compiles longer than it runs
    }
    return subprocess.Popen(
        [sys.executable, str(TESTS / "seq2seq" / "reversing.py"), str(folder), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def finish(process: subprocess.Popen) -> None:
    out, err = process.communicate(timeout=600)  # a busy machine takes minutes
    assert process.returncode == 0, err
    assert out.endswith("done\n")


def numbers(folder: Path) -> tuple[dict[str, bytes], bytes, list[tuple[str, ...]]]:
    """All that a run comes to: its last state, its model, and its log without the times."""
    store = Store(folder / "checkpoints")
    arrays = store.load(store.steps()[-1]).arrays
    timeless = ("step", "epoch", "learning_rate", "train_loss", "valid_loss")
    log = [tuple(row[name] for name in timeless) for row in read_log(folder / "log.csv")]
    weights = (folder / "model" / "model.safetensors").read_bytes()
    return {name: array.tobytes() for name, array in arrays.items()}, weights, log


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("transformer",)], ids=["recurrent", "transformer"])
def test_a_run_killed_at_random_ends_as_one_that_was_not(tmp_path, words):
    cache = tmp_path / "cache"
    whole = tmp_path / "whole"
    finish(start(whole, cache, *words))
    expected = numbers(whole)
    assert expected[2][-1][0] == "36"  # 4 epochs of 9 steps

    draw = random.Random(int(os.environ.get("KILL_SEED", "0")))
    killed = tmp_path / "killed"
    process = start(killed, cache, *words)
    for kill in range(3):
        # At some line of its report, and a little later: most of its time goes into saving.
        lines = draw.randrange(4, 16) if kill else draw.randrange(0, 6)
        for _ in range(lines):
            process.stdout.readline()
        time.sleep(draw.uniform(0.0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        process = start(killed, cache, *words, "resume")
    finish(process)
    found = numbers(killed)
    assert found[2] == expected[2]
    assert found[0] == expected[0]
    assert found[1] == expected[1]


class Warned(Progress):
    def __init__(self):
        self.messages, self.steps = [], []

    def warned(self, message):
        self.messages.append(message)

    def stepped(self, report):
        self.steps.append(report.step)


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """A finished run of one epoch, with checkpoints of its last two even steps."""
    folder = tmp_path_factory.mktemp("short") / "run"
    recipe = dataclasses.replace(reversing.RECIPE, epochs=1, keep=3)
    result = train(reversing.CONFIG, recipe, reversing.training_data(), folder)
    return folder, recipe, result


def spoil(path: Path) -> None:
    """Flips a byte in the middle of every file that holds numbers."""
    for file in path.glob("arrays/**/d/*"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 0xFF
        file.write_bytes(data)


@noisy
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_taken(short_run, tmp_path):
    source, recipe, expected = short_run
    folder = tmp_path / "run"
    shutil.copytree(source, folder)
    store = Store(folder / "checkpoints")
    assert store.steps() == [6, 8, 9]
    spoil(store.path(9))
    (store.path(8) / "meta" / "metadata").unlink()
    progress = Warned()
    result = train(
        reversing.CONFIG,
        recipe,
        reversing.training_data(),
        folder,
        resume=True,
        progress=progress,
    )
    assert "the checkpoint of step 9" in progress.messages[0]
    assert progress.messages[0].endswith("going back to the one of step 8")
    assert "the checkpoint of step 8" in progress.messages[1]
    assert progress.messages[1].endswith("going back to the one of step 6")
    assert progress.steps == [7, 8, 9]
    assert (folder / "checkpoints" / "9.damaged").exists()
    for name, array in expected.params.items():
        np.testing.assert_array_equal(result.params[name], array)
    gc.collect()


def test_a_finished_run_says_so_at_once(short_run):
    folder, recipe, expected = short_run
    progress = Warned()
    again = train(
        reversing.CONFIG,
        recipe,
        reversing.training_data(),
        folder,
        resume=True,
        progress=progress,
    )
    assert again.reason == expected.reason == "1 epochs are done"
    assert progress.steps == []
    np.testing.assert_array_equal(
        again.params["target_embedding"], expected.params["target_embedding"]
    )


def test_another_run_in_the_folder_is_refused(short_run):
    folder, recipe, _ = short_run
    arguments = (reversing.training_data(), folder)
    with pytest.raises(FileExistsError, match=r"already has a run\. Fix: resume=True"):
        train(reversing.CONFIG, recipe, *arguments)
    other = dataclasses.replace(reversing.CONFIG, decoder=24, attention="bilinear")
    with pytest.raises(ValueError, match="decoder 32, not 24, attention 'additive', not"):
        train(other, recipe, *arguments, resume=True)
    hotter = dataclasses.replace(recipe, learning_rate=1.0)
    with pytest.raises(ValueError, match=r"learning_rate 0\.01, not 1\.0"):
        train(reversing.CONFIG, hotter, *arguments, resume=True)
    with pytest.raises(ValueError, match="the pairs and settings that it was saved with"):
        train(reversing.CONFIG, recipe, reversing.training_data(80), folder, resume=True)
    other = dataclasses.replace(reversing.validation(), bleu=None)
    with pytest.raises(ValueError, match="was started with other validation pairs"):
        train(reversing.CONFIG, recipe, *arguments, validation=other, resume=True)


# ---------------------------------------------------------------------------------------------
# The store alone.

ARRAYS = {"w": np.random.default_rng(0).normal(size=(300, 300)), "n": np.arange(3)}


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def test_a_checkpoint_is_what_was_saved(store):
    store.save(3, ARRAYS, {"a": [1, 2.5, "x"]})
    found = store.load(3)
    assert found.meta == {"a": [1, 2.5, "x"]}
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found.arrays[name], array)
        assert found.arrays[name].dtype == array.dtype


@noisy
def test_a_full_disk_leaves_the_previous_checkpoint_and_no_halves(store):
    """A real one: the process may write no file of more than 100 kB."""
    store.save(1, {"w": np.zeros(3)}, {})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="step 2 could not be written") as caught:
            store.save(2, ARRAYS, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "the one of step 1 is intact" in str(caught.value)
    assert [path.name for path in store.folder.iterdir()] == ["1"]
    np.testing.assert_array_equal(store.load(1).arrays["w"], np.zeros(3))
    store.save(2, ARRAYS, {})  # and when there is room again, it goes on
    assert store.steps() == [1, 2]
    gc.collect()


def test_too_little_room_is_seen_before_anything_is_written(store, monkeypatch):
    usage = shutil.disk_usage(store.folder)._replace(free=5_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"no space left on the device\. It needs 2 MB"):
        store.save(2, ARRAYS, {})
    assert list(store.folder.iterdir()) == []


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), MemoryError()])
def test_a_checkpoint_is_replaced_only_by_a_whole_one(store, error, monkeypatch):
    """The same step again, which fails at the very end of writing: the first one is still there."""
    store.save(5, ARRAYS, {"which": "first"})

    def failing(step):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(store, "_put", failing)
        with pytest.raises(CheckpointError, match=r"of step 5 is intact"):
            store.save(5, {"w": np.zeros(3)}, {"which": "second"})
    assert [path.name for path in store.folder.iterdir()] == ["5"]
    assert store.load(5).meta == {"which": "first"}
    store.save(5, {"w": np.zeros(3)}, {"which": "second"})
    assert store.load(5).meta == {"which": "second"}
    assert [path.name for path in store.folder.iterdir()] == ["5"]


def test_what_a_killed_process_left_is_cleared_away(store):
    """Killed between the renamings, in the middle of writing, and in the middle of removing."""
    store.save(5, ARRAYS, {"which": "first"})
    store.path(5).rename(store.folder / "5.old")
    for name in ("5.new", "6.new.orbax-checkpoint-tmp-1", "4.removed"):
        (store.folder / name).mkdir()
    again = Store(store.folder)
    assert [path.name for path in store.folder.iterdir()] == ["5"]
    assert again.load(5).meta == {"which": "first"}


def test_a_full_disk_stops_the_run_and_resume_ends_the_same(short_run, tmp_path, monkeypatch):
    """The disk is full at the third checkpoint; with room again, it goes on from the second."""
    _, recipe, expected = short_run
    folder, arguments = tmp_path / "run", (reversing.CONFIG, recipe, reversing.training_data)
    usage, calls = shutil.disk_usage(tmp_path), iter(range(100))

    def filling(path):
        return usage._replace(free=usage.free if next(calls) < 2 else 5_000)

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", filling)
        with pytest.raises(CheckpointError, match=r"step 6 .* no space left .* step 4 is intact"):
            train(*arguments[:2], arguments[2](), folder)
    assert Store(folder / "checkpoints").steps() == [2, 4]
    result = train(*arguments[:2], arguments[2](), folder, resume=True)
    for name, array in expected.params.items():
        np.testing.assert_array_equal(result.params[name], array)


def test_an_old_checkpoint_that_is_damaged_does_not_stop_a_run(short_run, tmp_path):
    """It is looked at whenever old ones are removed, to see which parameters it counts on."""
    source, recipe, _ = short_run
    folder = tmp_path / "run"
    shutil.copytree(source, folder)
    (folder / "checkpoints" / "8" / "meta" / "metadata").unlink()
    run = RunFolder(folder, reversing.CONFIG, recipe, resume=True)
    run.prune(keep=3)
    run.close()
    assert Store(folder / "checkpoints").steps() == [6, 8, 9]


@noisy
def test_any_damaged_file_of_a_checkpoint_means_the_one_before(store):
    """Every file of it, the metadata too: cut, emptied, hit, replaced by other JSON, or removed."""
    store.save(1, ARRAYS, {"which": "first"})
    store.save(2, ARRAYS, {"which": "second", "place": {"step": 2}})
    files = sorted(path for path in store.path(2).rglob("*") if path.is_file())
    sound = {path: path.read_bytes() for path in files}
    assert {"metadata", "_METADATA"} <= {path.name for path in files}
    for path in files:
        data = sound[path]
        middle = bytes([data[len(data) // 2] ^ 1]) if data else b"x"
        hit = data[: len(data) // 2] + middle + data[len(data) // 2 + 1 :]
        for damaged in (data[: len(data) // 2], b"", hit, b"[1, 2]", b'{"checksum": 0}', None):
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            messages = []
            found = store.load_latest(messages.append)
            if found.step == 1:
                assert "going back to the one of step 1" in messages[0]
                (store.folder / "2.damaged").rename(store.path(2))
            else:  # a file that nothing depends on
                assert found.meta == {"which": "second", "place": {"step": 2}}
                assert path.name not in ("metadata", "_METADATA") or path.parent.name != "meta"
            path.write_bytes(data)
    gc.collect()


def test_two_trainings_in_one_folder_are_refused(short_run, tmp_path):
    """The lock goes with its process: one that was killed is not in the way."""
    _, recipe, _ = short_run
    folder = tmp_path / "run"
    code = (
        "import sys, time; from regard.seq2seq.train.run_folder import run_lock\n"
        "with run_lock(sys.argv[1]): print('locked', flush=True); time.sleep(600)"
    )
    environment = os.environ | {"PYTHONPATH": str(TESTS.parent / "src")}
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, env=environment
    )
    try:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(FileExistsError, match=rf"another training .* \(process {other.pid}\)"):
            RunFolder(folder, reversing.CONFIG, recipe, resume=False)
        assert not (folder / "config.json").exists()
    finally:
        other.kill()
        other.communicate()
    RunFolder(folder, reversing.CONFIG, recipe, resume=False).close()
    with run_lock(folder), run_lock(folder):  # `regard train` holds it, and `train` takes it
        RunFolder(folder, reversing.CONFIG, recipe, resume=True).close()


def test_a_full_disk_names_the_log(tmp_path):
    log = Log(tmp_path / "log.csv")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match=r"log\.csv"):
            log.write(step=1, train_loss=1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_stop_between_steps_saves_and_the_run_ends_the_same(short_run, tmp_path):
    """Asked at every step: each call of `train` makes one step."""
    _, recipe, expected = short_run
    folder, told = tmp_path / "run", Warned()
    for step in range(1, 4):
        asked = iter([False, True])
        with pytest.raises(KeyboardInterrupt):
            train(
                reversing.CONFIG,
                recipe,
                reversing.training_data(),
                folder,
                resume=True,
                stop=lambda asked=asked: next(asked),
            )
        assert Store(folder / "checkpoints").steps()[-1] == step
    arguments = (reversing.CONFIG, recipe, reversing.training_data(), folder)
    result = train(*arguments, resume=True, progress=told)
    assert told.steps[0] == 4
    for name, array in expected.params.items():
        np.testing.assert_array_equal(result.params[name], array)


@noisy
def test_where_every_checkpoint_is_damaged_it_says_so(store):
    store.save(1, ARRAYS, {})
    spoil(store.path(1))
    with pytest.raises(CheckpointError, match=r"step 1 .* no older one to go back to"):
        store.load_latest(lambda message: None)
    assert Store(store.folder.parent / "empty").load_latest(print) is None
    gc.collect()


def test_a_log_is_continued_where_the_checkpoint_was(tmp_path):
    path = tmp_path / "log.csv"
    log = Log(path)
    for step in range(1, 5):
        log.write(step=step, train_loss=float(step))
    with open(path, "a") as file:
        file.write("5,0,0.1")  # killed in the middle of a line
    Log(path, continue_at=2).write(step=3, train_loss=9.0)
    rows = [(row["step"], row["train_loss"]) for row in read_log(path)]
    assert rows == [("1", "1.0"), ("2", "2.0"), ("3", "9.0")]
    Log(path)
    assert read_log(path) == []
