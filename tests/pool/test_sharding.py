"""Batch and heads sharded by the compiler: nothing is gathered, and the numbers are the same."""

import pytest

from eight_devices import lines_of

pytestmark = pytest.mark.sampled(1)

RUNS = [
    "dot, lengths / reference",
    "dot, lengths per query, dropout / blockwise",
    "dot, lengths per query, dropout / pallas",
    "dot, causal, one of two key heads / blockwise",
    "gaussian per head, one key head / blockwise",
    "gaussian, lengths per head / pallas",
    "bilinear per head, segments / blockwise",
    "bias, boolean mask / blockwise",
    "by distance / blockwise",
    "by distance / pallas",
    "additive / blockwise",
    "additive / pallas",
    "for a GPU / lowered",
    "explicit / typed",
    "transforms / vmap and jvp",
    "looks / summary and map",
]


@pytest.mark.parametrize("runs", [RUNS[0::2], RUNS[1::2]], ids=["even", "odd"])
def test_each_device_pools_its_own_shard(runs):
    # Most of the time is compiling.
    assert lines_of("sharding_cases.py", runs, "--xla_backend_optimization_level=0") == runs
