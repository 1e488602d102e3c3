"""Tuning against a stand-in for the wide kernel: what fails is left out, the fastest is printed."""

import contextlib
import dataclasses
import sys
import types
from contextvars import ContextVar

import jax
import jax.numpy as jnp
import pytest
import typer
from typer.testing import CliRunner

from regard.bench.cases.case import Case
from regard.bench.cases.tables import GPU_CASES
from regard.bench.peers.kernels import SHARED_BYTES, all_candidates, tune
from regard.bench.peers.program import Absent
from regard.cli.commands.bench import command as bench_command

CASE = Case("kernel_16", "features", B=1, T=8, S=8, D=16, V=4, dtype="float32")


@dataclasses.dataclass(frozen=True)
class Blocks:
    queries: int
    keys: int
    chunk: int = 64
    warps: int = 8
    stages: int = 3


@pytest.fixture
def kernel(monkeypatch):
    """A wide kernel whose blocks do nothing, but 7 does not compile and 9 is wrong."""
    forced = ContextVar("forced")

    @contextlib.contextmanager
    def forced_blocks(blocks):
        token = forced.set(blocks)
        yield
        forced.reset(token)

    def pool_features(phi, psi, value):
        if forced.get().queries == 7:
            raise ValueError("7 is no power of two\nand more")
        wrong = 2.0 if forced.get().queries == 9 else 1.0
        weights = jax.nn.softmax(jnp.einsum("bgtr,bsr->bgts", phi, psi))
        return wrong * jnp.einsum("bgts,bsv->bgtv", weights, value)

    package = types.ModuleType("stand_in")
    package.pool_features = pool_features
    blocks = types.ModuleType("stand_in.block_shapes")
    blocks.Blocks, blocks.forced_blocks = Blocks, forced_blocks
    blocks.WIDTHS, blocks.VALUE_WIDTHS = (8, 32), (1, 2)
    monkeypatch.setitem(sys.modules, "stand_in", package)
    monkeypatch.setitem(sys.modules, "stand_in.block_shapes", blocks)
    monkeypatch.setattr("regard.bench.peers.kernels.WIDE_KERNEL", "stand_in")


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_fastest_that_runs_is_printed(kernel, direction):
    told = []
    case = dataclasses.replace(CASE, direction=direction)
    tried = [Blocks(queries, 16) for queries in (7, 8, 9, 64)]
    seconds = iter([3e-3] * 5 + [2e-3] * 5)  # only two of the four are timed
    (line,) = tune([case], tried, told.append, clock=lambda run: next(seconds))
    key, _, rest = line.partition(": ")
    assert eval(key) == (direction, 32, 32, 2)
    assert rest.startswith("Blocks(queries=64, keys=16, chunk=64, warps=8, stages=3),  # kernel_16")
    assert told[0] == "kernel_16: 4 candidates"
    assert "7 is no power of two" in told[1]
    assert "wrong: relative error 1.0e+00" in told[3]


def test_where_nothing_runs_the_line_says_so(kernel):
    (line,) = tune([CASE], [Blocks(7, 16)])
    assert line.startswith("# ('forward', 32, 32, 2): no candidate ran kernel_16")


def test_only_features_are_tuned_for(kernel):
    assert tune([dataclasses.replace(CASE, score="dot")], [Blocks(8, 16)]) == []


def test_without_a_kernel_there_is_nothing_to_tune(monkeypatch):
    monkeypatch.setattr("regard.bench.peers.kernels.WIDE_KERNEL", "regard.pool.no_such_kernel")
    with pytest.raises(Absent, match="no_such_kernel"):
        tune([CASE])


def test_candidates_fit_shared_memory():
    for case in GPU_CASES:
        if case.score == "features":
            candidates = list(all_candidates(case, Blocks))
            assert 10 <= len(candidates) == len(set(candidates)) <= 40
            for b in candidates:
                features = b.stages * b.chunk * (b.queries + b.keys) * 2
                assert features + b.keys * case.V * 2 <= SHARED_BYTES


def test_command(kernel, monkeypatch, tmp_path):
    monkeypatch.setattr("regard.bench.cases.tables.GPU_CASES", (CASE,))
    tried = "regard.bench.peers.kernels.all_candidates"
    monkeypatch.setattr(tried, lambda case, make: [make(8, 16)])
    app = typer.Typer()
    app.command()(bench_command)
    done = CliRunner().invoke(app, ["--tune", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "('forward', 32, 32, 2): Blocks(queries=8, keys=16" in done.stdout
    assert (tmp_path / "blocks.txt").read_text() in done.stdout
