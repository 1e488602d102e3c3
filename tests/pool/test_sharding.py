"""Batch and heads sharded by the compiler: nothing is gathered, and the numbers are the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent.parent
RUNS = [
    "dot, lengths / reference",
    "dot, lengths per query, dropout / blockwise",
    "dot, lengths per query, dropout / pallas",
    "dot, causal, one of two key heads / blockwise",
    "gaussian per head, one key head / blockwise",
    "gaussian, lengths per head / pallas",
    "bilinear per head, segments / blockwise",
    "bias, boolean mask / blockwise",
    "additive / blockwise",
    "additive / pallas",
    "for a GPU / lowered",
    "explicit / typed",
    "transforms / vmap and jvp",
]


@pytest.mark.parametrize("runs", [RUNS[0::2], RUNS[1::2]], ids=["even", "odd"])
def test_each_device_pools_its_own_share(runs):
    """In a process of its own: the number of devices cannot be changed later."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    flags += " --xla_backend_optimization_level=0"  # most of the time is compiling
    done = subprocess.run(
        [sys.executable, str(HERE / "sharding_cases.py"), *runs],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.splitlines() == runs
