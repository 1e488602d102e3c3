"""Training in several processes: real ones on loopback, killed ones, and what is told of them.

Every process here is `regard train` itself. Two begin a run, and one of them is killed; from what
they leave, one, two and four go on, and all must come to the losses of a run in one process.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from regard.cli.app import app
from regard.seq2seq.distributed.devices import DataParallel
from regard.seq2seq.distributed.hosts import Hosts, is_gone, is_known_to_all
from regard.seq2seq.distributed.launch import Launch, find_launch
from regard.seq2seq.model.dropout import ShardOfRows, drop
from regard.seq2seq.train import runtime_options
from regard.seq2seq.train.checkpoints import Store
from regard.seq2seq.train.log import read_log

SOURCE = Path(__file__).resolve().parents[3] / "src"
SECONDS = 30.0  # from a process's death to the others' end, at most
WAIT = 1800  # a busy machine takes many minutes

pytestmark = pytest.mark.usefixtures("quick_compilation")

TINY = {
    "about": "As small as it gets, and with dropout: the same losses mean the same draws.",
    "data": {"valid_sentences": 6},
    "tokenizer": {"kind": "bpe", "size": 60, "joint": True},
    "batches": {"tokens": 128, "buckets": [16]},
    "model": {"embedding": 8, "encoder": 8, "decoder": 16, "annotation_dropout": 0.3},
    "recipe": {
        "epochs": 10_000,
        "learning_rate": 0.01,
        "validate_every": 4,
        "checkpoint_every": 2,
        "log_every": 1,
        "average": 2,
        "keep": 3,
    },
}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Launcher:
    """Starts `regard train` in processes of one CPU device, which share compiled programs."""

    def __init__(self, cache: Path) -> None:
        launchers = ("SLURM_", "OMPI_", "MASTER_", "RANK", "WORLD_SIZE")
        ours = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
        self.environment = ours | {
            "PYTHONPATH": str(SOURCE),
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # it compiles longer than it runs
            "XLA_FLAGS": "",
        }

    def start(self, code: str, *words: object, **variables: object) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-c", code, *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment | {name: str(value) for name, value in variables.items()},
        )

    def by_torchrun(self, count: int, *words: object) -> list[subprocess.Popen]:
        """As torchrun does it, by environment variables."""
        meet = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(), WORLD_SIZE=count)
        return [self.start(COMMAND, "train", *words, **meet, RANK=rank) for rank in range(count)]

    def by_options(self, count: int, *words: object) -> list[subprocess.Popen]:
        meet = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", count, "--process-id"]
        return [self.start(COMMAND, "train", *words, *meet, number) for number in range(count)]


COMMAND = "from regard.cli import main; main()"


def losses(folder: Path) -> dict[tuple[int, str], float]:
    """Every loss in a run's log, by step and kind."""
    return {
        (int(row["step"]), kind): float(row[kind])
        for row in read_log(folder / "log.csv")
        for kind in ("train_nll", "valid_loss")
        if row[kind]
    }


def assert_same_losses(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    keys = sorted(expected)
    np.testing.assert_allclose([found[k] for k in keys], [expected[k] for k in keys], atol=1e-4)


def last_checkpoint(folder: Path) -> int:
    """Looked at from outside, while it is written to."""
    if not (folder / "checkpoints").is_dir():
        return 0
    names = [path.name for path in (folder / "checkpoints").iterdir()]
    return max((int(name) for name in names if name.isdigit()), default=0)


def end_of(process: subprocess.Popen) -> SimpleNamespace:
    """How a process ends that has lost another one a moment ago."""
    begun = time.monotonic()
    _, err = process.communicate(timeout=WAIT)
    return SimpleNamespace(code=process.returncode, err=err, seconds=time.monotonic() - begun)


def assert_told(end: SimpleNamespace, folder: Path | str) -> None:
    assert end.seconds < SECONDS
    assert end.code != 0
    said = [line for line in end.err.splitlines() if line.startswith("error: ")]
    assert said, end.err
    assert said[-1].startswith("error: another process of this run is gone, so this one stops too.")
    assert f"regard train {folder} --resume" in said[-1]


@pytest.fixture(scope="module")
def launcher(tmp_path_factory) -> Launcher:
    return Launcher(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> list[str]:
    """The options of a run that goes on until it is killed."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = [f"cat {n % 7} {n}\tchat {n % 7} {n}\n" for n in range(60)]
    (folder / "pairs.tsv").write_text("".join(lines), encoding="utf-8")
    (folder / "tiny.json").write_text(json.dumps(TINY), encoding="utf-8")
    return ["--tsv", str(folder / "pairs.tsv"), "--recipe", str(folder / "tiny.json")]


@pytest.fixture(scope="module")
def killed(launcher, corpus, tmp_path_factory) -> SimpleNamespace:
    """A run by two processes, the second of which is killed after the second checkpoint.

    Returns:
        Its folder; how the first process ended; the step of the last checkpoint; and the step
        that those who go on with it shall come to, which is one that is validated anyway.
    """
    folder = tmp_path_factory.mktemp("killed") / "run"
    running = launcher.by_torchrun(2, folder, *corpus)
    limit = time.monotonic() + WAIT
    while last_checkpoint(folder) < 4:
        assert time.monotonic() < limit, "no checkpoint"
        assert all(process.poll() is None for process in running), running[0].communicate()[1]
        time.sleep(0.02)
    running[1].send_signal(signal.SIGKILL)
    end = end_of(running[0])
    running[1].communicate()
    step = Store(folder / "checkpoints").steps()[-1]
    return SimpleNamespace(folder=folder, end=end, step=step, goal=step // 4 * 4 + 8)


def run_here(*words: object) -> None:
    """`regard train` in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime_options, "keep_freed_memory", lambda: False)
        done = CliRunner().invoke(app, ["train", *map(str, words)])
    assert done.exit_code == 0, done.output


@pytest.fixture(scope="module")
def alone(corpus, killed, tmp_path_factory) -> Path:
    """The same run, by one process from beginning to end."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    run_here(folder, *corpus, "--max-steps", killed.goal)
    return folder


@pytest.mark.slow
def test_a_killed_process_stops_the_other_with_a_clear_message(killed):
    assert_told(killed.end, killed.folder)
    assert "2 processes, found in torchrun's environment variables" in killed.end.err


def test_two_processes_do_what_one_does(killed, alone):
    """As far as they came: to the last checkpoint, and a step or two more."""
    expected = losses(alone)
    begun = {key: loss for key, loss in losses(killed.folder).items() if key in expected}
    assert {(1, "train_nll"), (killed.step, "train_nll"), (4, "valid_loss")} <= begun.keys()
    assert_same_losses(begun, {key: expected[key] for key in begun})
    ours, theirs = ((run / "tokenizer.json").read_text() for run in (killed.folder, alone))
    assert ours == theirs


def test_one_process_goes_on_with_it(killed, alone, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(killed.folder, folder)
    run_here(folder, "--resume", "--max-steps", killed.goal)
    assert_same_losses(losses(folder), losses(alone))


@pytest.mark.parametrize(("count", "model_axis"), [(2, 2), (4, 1)])
@pytest.mark.slow
def test_several_processes_go_on_with_it(killed, alone, launcher, tmp_path, count, model_axis):
    """Two that have half of each matrix each, and four that have all of them."""
    folder = tmp_path / "run"
    shutil.copytree(killed.folder, folder)
    words = [folder, "--resume", "--max-steps", killed.goal, "--model-axis", model_axis]
    running = launcher.by_options(count, *words)
    (out, err), *others = [process.communicate(timeout=WAIT) for process in running]
    assert [process.returncode for process in running] == [0] * count, err
    assert f"{count} processes, found in the options" in err
    assert f"parameters on {count} devices" in err
    assert f"continued from step {killed.step}" in err
    assert f"finished: {killed.goal} steps are done" in err
    assert f"model: {folder / 'model'}" in out
    assert [err for _, err in others] == [""] * (count - 1), "only process 0 speaks"
    assert_same_losses(losses(folder), losses(alone))
    found, expected = (
        Store(run / "checkpoints").load(killed.goal).arrays for run in (folder, alone)
    )
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=1e-4, err_msg=name)


def test_when_the_first_process_is_gone_the_others_say_the_same(launcher):
    """With it goes JAX's coordinator, and JAX aborts the others where they stand."""
    code = """
import sys, time
from pathlib import Path
from regard.cli.train_hosts import launch_of, taking_part
port, number = map(int, sys.argv[1:])
with taking_part(launch_of(f"127.0.0.1:{port}", 2, number, False), Path("the-run")) as hosts:
    print("here", flush=True)
    hosts.first(lambda: time.sleep(600))
"""
    port = free_port()
    first, second = (launcher.start(code, port, number) for number in range(2))
    for process in (first, second):
        assert process.stdout.readline() == "here\n"
    first.send_signal(signal.SIGTERM)  # JAX would catch it, and go on
    assert_told(end_of(second), "the-run")
    first.communicate(timeout=WAIT)
    assert first.returncode == -signal.SIGTERM


# ---------------------------------------------------------------------------------------------
# The pieces.


def test_the_launcher_is_found():
    torchrun = dict(MASTER_ADDR="node1", MASTER_PORT="1234", WORLD_SIZE="4", RANK="2")
    slurm = dict(SLURM_STEP_NODELIST="n[1-2]", SLURM_NTASKS="2", SLURM_PROCID="0")
    options = dict(coordinator="node2:99", processes=2, process=0)
    assert find_launch({}) is None
    assert find_launch(torchrun | dict(WORLD_SIZE="1", RANK="0")) is None
    assert find_launch(slurm | dict(SLURM_STEP_NUM_TASKS="1")) is None, "a batch script alone"
    assert find_launch(torchrun) == Launch("torchrun's environment variables", "node1:1234", 4, 2)
    beside = find_launch(torchrun | dict(LOCAL_RANK="2", LOCAL_WORLD_SIZE="4"))
    assert beside.local_device == 2
    inside = find_launch(torchrun | dict(TORCHELASTIC_USE_AGENT_STORE="True"))
    assert inside.coordinator == "node1:1235", "torchrun itself listens on 1234"
    assert find_launch(slurm).found_in.startswith("Slurm")
    assert find_launch(slurm).coordinator is None
    mpi = dict(
        OMPI_MCA_orte_hnp_uri="1.0;tcp://10.0.0.1:5",
        OMPI_COMM_WORLD_SIZE="2",
        OMPI_COMM_WORLD_RANK="1",
    )
    assert find_launch(mpi).found_in.startswith("Open MPI")
    assert find_launch({}, distributed=True) == Launch("JAX's own cluster detection")
    assert find_launch(torchrun | slurm, **options) == Launch("the options", "node2:99", 2, 0)


def test_the_innermost_launcher_that_can_connect_is_asked():
    slurm = dict(SLURM_STEP_NODELIST="n[1-2]", SLURM_NTASKS="8", SLURM_PROCID="3")
    torchrun = dict(MASTER_ADDR="n1", MASTER_PORT="1234", WORLD_SIZE="2", RANK="1")
    mpi = dict(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="4")
    pmi = dict(PMI_RANK="3", PMI_SIZE="8")  # srun sets these too, and JAX connects by Slurm's
    hydra = dict(OMPI_MCA_orte_hnp_uri="1.0;tcp://10.0.0.1:5")
    for environment, found_in in [
        (slurm, "Slurm"),
        (slurm | torchrun, "torchrun"),
        (slurm | mpi | hydra, "Open MPI"),
        (slurm | pmi, "Slurm"),
        (pmi, None),
        ({"SLURM_NTASKS": "8"}, None),
        # A batch script runs in a step of one task, whatever the job has.
        (slurm | dict(SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="1"), None),
    ]:
        launch = find_launch(environment)
        assert (launch and launch.found_in.split("'")[0]) == found_in, environment


@pytest.mark.parametrize("number", ["x", "8", "-1", ""])
def test_ranks_that_cannot_be_are_refused(number):
    environment = dict(SLURM_STEP_NODELIST="n1", SLURM_NTASKS="8", SLURM_PROCID=number)
    if not number:
        assert find_launch(environment) is None
        return
    message = "Got SLURM_PROCID=x" if number == "x" else f"Got process {number} of 8"
    with pytest.raises(ValueError, match=message):
        find_launch(environment)


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        ({}, dict(coordinator="a:1"), "Got no --processes and no --process-id"),
        ({}, dict(coordinator="a", processes=2, process=0), "HOST:PORT.* Got 'a'"),
        ({}, dict(coordinator="a:70000", processes=2, process=0), "HOST:PORT.* Got 'a:70000'"),
        ({}, dict(coordinator="a:1", processes=2, process=2), "Got process 2 of 2"),
        (
            dict(MASTER_ADDR="a", MASTER_PORT="x", WORLD_SIZE="2", RANK="0"),
            {},
            "whole numbers. Got MASTER_ADDR=a, MASTER_PORT=x",
        ),
    ],
)
def test_a_launch_that_cannot_be_is_refused(environment, options, message):
    with pytest.raises(ValueError, match=message):
        find_launch(environment, **options)


@pytest.mark.parametrize(
    ("shape", "shares", "partitionable"),
    [((5, 8, 12), 4, True), ((8, 6), 2, True), ((5, 8, 12), 2, False)],
)
def test_devices_drop_together_what_one_alone_drops(shape, shares, partitionable):
    """Also where a row is no whole number of words, and where JAX draws another way."""
    with jax.threefry_partitionable(partitionable):
        rng = jax.random.key(7)
        whole = drop(jnp.ones(shape, jnp.float32), 0.4, rng)
        parts = [
            drop(part, 0.4, ShardOfRows(rng, jnp.int32(index), shares))
            for index, part in enumerate(jnp.split(jnp.ones(shape, jnp.float32), shares, axis=-2))
        ]
    np.testing.assert_array_equal(jnp.concatenate(parts, axis=-2), whole)
    assert 0 < (np.asarray(whole) == 0).mean() < 1


def test_a_model_axis_must_divide_the_devices():
    with pytest.raises(ValueError, match=r"model axis 2, 1 devices. Fix: a divisor of 1"):
        DataParallel(jax.devices()[:1], 2)


def test_one_process_alone_needs_no_settings():
    hosts, arrays = Hosts.of(jax.devices()), {"a": np.arange(3)}
    assert (hosts.processes, hosts.leads) == (1, True)
    assert hosts.first(lambda: (1, "two")) == (1, "two")
    assert hosts.first_arrays(lambda: arrays) is arrays
    with pytest.raises(KeyError) as caught:
        hosts.first(lambda: {}["missing"])
    assert not is_known_to_all(caught.value)


def test_what_means_that_a_process_is_gone():
    assert is_gone(RuntimeError("UNAVAILABLE: Socket closed"))
    assert is_gone(ValueError("UNKNOWN: Gloo all-reduce failed: [..] Connection closed by peer"))
    assert not is_gone(ValueError("a corpus needs a connection: --tsv"))
    assert not is_gone(OSError("UNKNOWN: Gloo"))
    assert not is_gone(RuntimeError("RESOURCE_EXHAUSTED: Out of memory"))
