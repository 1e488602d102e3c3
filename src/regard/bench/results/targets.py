"""What is promised, and whether a run kept it.

The mechanism is here; the promises are in cpu_targets.py and gpu_targets.py. A ratio is always one
of a single run. Absolute numbers are promised for one named GPU only.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from regard.bench.run.measure import AGAIN, Row

Place = tuple[str, str]  # a case and who
Measure = Literal["ms", "MiB", "peak GiB", "TFLOP/s", "error"]


@dataclasses.dataclass(frozen=True)
class Target:
    """What is measured at `over`, divided by the same at `under`, must be at least, or at most,
    `reach`.

    Several places in `over` stand for the least of them, such as the best of several peers'
    times. Without `under`, what is measured at `over` itself counts.
    """

    promise: str
    over: tuple[Place, ...]
    under: Place | None
    reach: float
    at_least: bool
    measure: Measure = "ms"

    @property
    def goal(self) -> str:
        unit = "×" if self.under else f" {self.measure.removeprefix('peak ')}"
        return f"{'≥' if self.at_least else '≤'} {self.reach:g}{unit}"

    @property
    def places(self) -> tuple[Place, ...]:
        """Every place that is looked at."""
        return self.over + ((self.under,) if self.under else ())


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A target and what was measured; None when the run did not hold its places.

    `noise` is how far apart the same program came out twice in the same loop: 0.03 is 3 %.
    `failed`: it was regard that did not get there.
    """

    target: Target
    measured: float | None
    noise: float | None = None
    failed: bool = False

    @property
    def outcome(self) -> Literal["reached", "short", "failed", "not measured"]:
        if self.measured is None:
            return "failed" if self.failed else "not measured"
        if self.target.at_least:
            return "reached" if self.measured >= self.target.reach else "short"
        return "reached" if self.measured <= self.target.reach else "short"


def faster(promise: str, case: str, peer: str | tuple[str, ...], reach: float) -> Target:
    """A peer's time, or the best of several, over regard's."""
    peers = (peer,) if isinstance(peer, str) else peer
    over = tuple((case, who) for who in peers)
    return Target(promise, over, (case, "regard"), reach, at_least=True)


def cheaper(promise: str, case: str, than: Place, reach: float, measure: Measure = "ms") -> Target:
    """What regard takes over what another place takes."""
    return Target(promise, ((case, "regard"),), than, reach, at_least=False, measure=measure)


def within(promise: str, case: str, reach: float, measure: Measure = "ms") -> Target:
    """What regard takes, at most."""
    return Target(promise, ((case, "regard"),), None, reach, at_least=False, measure=measure)


def judge(rows: Sequence[Row], targets: Sequence[Target]) -> list[Verdict]:
    """Measures every target on the rows of one run."""
    found = {(row.case, row.who): row for row in rows}
    noise = _noise(rows, found)
    verdicts = []
    for target in targets:
        there = [found[place] for place in target.over if place in found]
        values = [value for row in there if (value := _value(row, target.measure)) is not None]
        measured = min(values, default=None)
        if measured is not None and target.under is not None:
            under = _value(found.get(target.under), target.measure)
            measured = measured / under if under else None
        timed = measured is not None and target.measure in ("ms", "TFLOP/s")
        ours = [found[place] for place in target.places if place in found and place[1] == "regard"]
        verdicts.append(
            Verdict(
                target,
                measured,
                noise.get(there[0].group) if timed else None,
                failed=any(row.absent for row in ours),
            )
        )
    return verdicts


def _value(row: Row | None, measure: Measure) -> float | None:
    if row is None or row.absent:
        return None
    if measure == "MiB":
        return row.temp_bytes / 2**20 if row.temp_bytes is not None else None
    if measure == "peak GiB":
        return row.peak_bytes / 2**30 if row.peak_bytes is not None else None
    if measure == "TFLOP/s":
        return row.tflops
    if measure == "error":
        return row.errors.get("out")
    return 1e3 * row.timing.median if row.timing else None


def _noise(rows: Sequence[Row], found: Mapping[Place, Row]) -> dict[str, float]:
    """By group: how far apart the same program came out."""
    noise = {}
    for row in rows:
        first = found.get((row.case, "regard"))
        if row.who == AGAIN and row.timing and first and first.timing:
            noise[row.group] = abs(row.timing.median / first.timing.median - 1)
    return noise
