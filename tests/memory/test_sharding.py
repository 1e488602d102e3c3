"""A memory whose batch and heads lie on eight devices: a step gathers nothing."""

import pytest

from eight_devices import lines_of

CASES = ["dot, fixed", "additive, fixed", "dot, window"]


@pytest.mark.slow
def test_a_step_of_a_sharded_memory_gathers_nothing():
    lines = lines_of("memory_on_eight_devices.py", CASES)
    assert lines == [f"{case}: gathers [], sharding kept True" for case in CASES]
