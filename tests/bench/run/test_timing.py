"""The interleaved loop: every program as often, none always first, and the arithmetic of it."""

import gc
import weakref

import pytest

from regard.bench.run.timing import (
    DeviceClock,
    Queued,
    Timing,
    interleave,
    round_order,
    rounds_within,
    wall_clock,
)


def test_each_program_runs_once_a_round():
    calls = []
    runs = {name: lambda name=name: calls.append(name) for name in "abc"}
    timings = interleave(runs, rounds=6, rest=0.0)
    rounds = [calls[start : start + 3] for start in range(0, 18, 3)]
    assert all(sorted(round_) == ["a", "b", "c"] for round_ in rounds)
    assert {name: len(timing.seconds) for name, timing in timings.items()} == dict.fromkeys(
        "abc", 6
    )


@pytest.mark.parametrize("count", [2, 3, 5])
def test_each_program_comes_first_equally_often(count):
    firsts = [round_order(count, number)[0] for number in range(2 * count)]
    assert sorted(firsts) == sorted(list(range(count)) * 2)


def test_no_program_always_follows_the_same_neighbor():
    before = {
        (order[i], order[i - 1])
        for order in (round_order(4, number) for number in range(8))
        for i in range(1, 4)
    }
    assert all(len({previous for who, previous in before if who == me}) >= 2 for me in range(4))


def test_the_clock_is_the_callers():
    ticks = iter([1.0, 2.0, 3.0])
    timings = interleave({"a": lambda: None}, rounds=3, rest=0.0, clock=lambda run: next(ticks))
    assert timings["a"] == Timing((1.0, 2.0, 3.0))
    assert timings["a"].median == 2.0


def test_progress_hears_of_every_run():
    heard = []
    interleave({"a": lambda: None, "b": lambda: None}, rounds=2, rest=0.0, progress=heard.append)
    assert sorted(heard) == ["a", "a", "b", "b"]


def test_wall_clock_runs_once():
    calls = []
    assert wall_clock(lambda: calls.append(1)) >= 0
    assert calls == [1]


def test_no_garbage_is_collected_while_timing_and_it_is_again_after():
    seen = []
    interleave({"a": lambda: seen.append(gc.isenabled())}, rounds=1, rest=0.0)
    assert seen == [False]
    assert gc.isenabled()


def test_garbage_collection_comes_back_after_a_failure():
    def fails():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        interleave({"a": fails}, rounds=1, rest=0.0)
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("budget", "once", "rounds"), [(10.0, [0.99], 10), (10.0, [9.0], 3), (10.0, [0.001], 20)]
)
def test_rounds_fill_the_budget_within_limits(budget, once, rounds):
    assert rounds_within(budget, once, least=3, most=20) == rounds


def test_quartiles():
    assert Timing((4.0, 1.0, 3.0, 2.0, 5.0)).quartiles == (2.0, 4.0)
    assert Timing((4.0,)).quartiles == (4.0, 4.0)


class Device:
    """A device whose runs take `seconds` each and whose launches take `launch`."""

    def __init__(self, seconds, launch=0.0, bundle_fails=False):
        self.bursts, self.bundles = [], []
        self.seconds, self.launch = seconds, launch
        self.bundle_fails = bundle_fails

    def burst(self, runs):
        self.bursts.append(runs)
        return runs * max(self.seconds, self.launch)

    def bundle(self):
        if self.bundle_fails:
            raise RuntimeError("cannot be captured")

        def burst(launches):
            self.bundles.append(launches)
            return launches * max(10 * self.seconds, self.launch)

        return burst

    def queued(self):
        return Queued(lambda: "once", self.burst, self.bundle, bundled=10)


@pytest.mark.parametrize(("seconds", "runs"), [(1e-3, 20), (7e-3, 3), (0.5, 1)])
def test_a_reading_is_as_many_runs_as_fill_it(seconds, runs):
    device = Device(seconds)
    run, clock = device.queued(), DeviceClock(least=0.02)
    assert clock(run) == pytest.approx(seconds)
    assert device.bursts[-1] == runs
    before = len(device.bursts)
    assert clock(run) == pytest.approx(seconds)
    assert device.bursts[before:] == [runs]  # planned once
    assert not device.bundles


def test_runs_shorter_than_a_launch_are_bundled():
    device = Device(seconds=1e-5, launch=5e-5)
    assert DeviceClock()(device.queued()) == pytest.approx(1e-5)
    assert device.bundles


def test_where_bundling_fails_the_plain_reading_is_left():
    device = Device(seconds=1e-5, launch=5e-5, bundle_fails=True)
    assert DeviceClock()(device.queued()) == pytest.approx(5e-5)


def test_a_run_of_no_time_is_not_read_forever():
    device = Device(seconds=0.0)
    assert DeviceClock()(device.queued()) == 0.0
    assert max(device.bursts + device.bundles) <= 8192


def test_the_device_clock_keeps_no_program_alive():
    clock, device = DeviceClock(), Device(1e-3)
    run = device.queued()
    clock(run)
    gone = weakref.ref(run)
    del run
    gc.collect()
    assert gone() is None


def test_the_device_clock_wants_a_queue():
    with pytest.raises(TypeError, match="DeviceClock reads Queued runs"):
        DeviceClock()(lambda: None)


def test_a_queued_run_runs_once_when_called():
    assert Device(1e-3).queued()() == "once"
