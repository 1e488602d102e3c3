"""Timing: all programs interleaved in one process, in rotating order; medians.

What is run is in `program.py`, and where the numbers go in `report.py`.
On a GPU `DeviceClock` takes the place of `wall_clock`, without touching the loop.
"""

import contextlib
import dataclasses
import gc
import math
import statistics
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

Run = Callable[[], Any]
Clock = Callable[[Run], float]
Burst = Callable[[int], float]  # from a number of runs to the seconds that all of them took

# Threads of one framework spin for a few milliseconds after its work is done; without a rest
# they would take a core from the next program.
REST_SECONDS = 0.01


@dataclasses.dataclass(frozen=True)
class Timing:
    """The seconds of every run, in the order they were made."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Lower and upper quartile; of a single run, that run twice.

        >>> Timing((1.0, 2.0, 3.0, 4.0, 5.0)).quartiles
        (2.0, 4.0)
        """
        if len(self.seconds) < 2:
            return self.seconds[0], self.seconds[0]
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high


def wall_clock(run: Run) -> float:
    """Seconds from the call to the finished result; `run` must block."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@dataclasses.dataclass(frozen=True, eq=False)
class Queued:
    """A run on a device with a queue: a call runs it once and waits for the result.

    Attributes:
        once: what a call does.
        burst: queues n runs back to back, waits once, and returns the seconds.
        bundle: makes one launch of `bundled` runs, and gives its burst; None where it cannot.
        bundled: how many runs a launch of the bundle makes.
    """

    once: Run
    burst: Burst
    bundle: Callable[[], Burst] | None = None
    bundled: int = 1

    def __call__(self) -> Any:
        return self.once()


class DeviceClock:
    """Device seconds per run of a `Queued`, without the time that the host takes to launch it.

    A reading is one burst, long enough that its launch and the wait at its end are negligible.
    While the device works on one run, the host queues the next; launches then cost no time as long
    as a run takes longer than its launch. Shorter runs are read as bundles, many in one launch.

    Args:
        least: seconds of a reading.
        short: runs that take no longer than this are bundled, where possible: a host needed
            0.25 ms to launch a program with gradients that takes 0.09 ms.
    """

    def __init__(self, least: float = 0.02, short: float = 4e-4):
        self.least, self.short = least, short
        # Weak, so that a clock does not keep the arrays of every program that it ever read.
        self._plans: weakref.WeakKeyDictionary[Queued, _Plan] = weakref.WeakKeyDictionary()

    def __call__(self, run: Run) -> float:
        if not isinstance(run, Queued):
            raise TypeError(f"DeviceClock reads Queued runs. Got {run!r}. Fix: wall_clock.")
        if run not in self._plans:
            self._plans[run] = self._plan(run)
        plan = self._plans[run]
        return plan.burst(plan.launches) / (plan.launches * plan.runs)

    def _plan(self, run: Queued) -> "_Plan":
        run.burst(1)  # the first is slower: it loads code and allocates
        plan = self._fill(run.burst, 1)
        if run.bundle is None or self.least / plan.launches > self.short:
            return plan
        try:
            burst = run.bundle()
            burst(1)
        except Exception:  # it does not fit, or cannot be captured: read without bundles
            return plan
        return self._fill(burst, run.bundled)

    def _fill(self, burst: Burst, runs: int) -> "_Plan":
        """As many launches as fill a reading, found by doubling."""
        launches, seconds = 1, burst(1)
        while seconds < self.least / 2 and launches < 4096:
            launches *= 2
            seconds = burst(launches)
        filled = math.ceil(launches * self.least / max(seconds, 1e-9))
        return _Plan(burst, max(1, min(filled, 2 * launches)), runs)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How a run is read: the number of launches of `burst`, and of runs in each."""

    burst: Burst
    launches: int
    runs: int


def round_order(count: int, number: int) -> list[int]:
    """The order of the programs in a round.

    Forwards and backwards, then rotated by one, so that no program always comes first, nor always
    after the same neighbor.

    >>> [round_order(3, number) for number in range(4)]
    [[0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 2, 1]]
    """
    order = [(number // 2 + position) % count for position in range(count)]
    return order[::-1] if number % 2 else order


def interleave(
    runs: Mapping[Hashable, Run],
    rounds: int,
    *,
    clock: Clock = wall_clock,
    rest: float = REST_SECONDS,
    progress: Callable[[Hashable], None] = lambda who: None,
) -> dict[Hashable, Timing]:
    """Runs every program `rounds` times, interleaved.

    >>> timings = interleave({"a": lambda: None, "b": lambda: None}, rounds=3, rest=0)
    >>> len(timings["a"].seconds)
    3

    Args:
        runs: by name, zero-argument callables that block.
        rounds: how often each is run.
        clock: measures one run.
        rest: seconds to wait before each run.
        progress: called with a name after its run.
    """
    names = list(runs)
    seconds: dict[Hashable, list[float]] = {name: [] for name in names}
    with _no_garbage_collection():
        for number in range(rounds):
            for index in round_order(len(names), number):
                time.sleep(rest)
                seconds[names[index]].append(clock(runs[names[index]]))
                progress(names[index])
    return {name: Timing(tuple(taken)) for name, taken in seconds.items()}


def rounds_within(budget: float, once: Sequence[float], least: int, most: int) -> int:
    """How many rounds fit in `budget` seconds when one takes `sum(once)`, within the limits.

    >>> rounds_within(10.0, [0.2, 0.3], least=3, most=15)
    15
    >>> rounds_within(10.0, [20.0], least=3, most=15)
    3
    """
    one_round = sum(once) + REST_SECONDS * len(once)
    return max(least, min(most, int(budget / one_round) if one_round > 0 else most))


@contextlib.contextmanager
def _no_garbage_collection():
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
