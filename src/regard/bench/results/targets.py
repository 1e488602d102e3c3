"""What is promised, and whether a run kept it.

A promised ratio is always one of a single run. Absolute numbers are promised for one NVIDIA H200
in bfloat16 only (design section 7); elsewhere they are for information.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from regard.bench.cases.tables import GPU_CASES, JAX_PEERS, LIMITS, LINEAR_LENGTHS
from regard.bench.run.measure import AGAIN, NOT_REACHED, Row

Place = tuple[str, str]  # a case and a program
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
        """Every place that is compared."""
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
        # The best of several peers is not known before each of them has run.
        late = any(found[place].absent == NOT_REACHED for place in target.places if place in found)
        measured = None if late else min(values, default=None)
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
                failed=any(row.absent not in (None, NOT_REACHED) for row in ours),
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


CPU_TARGETS = (
    faster(
        "additive, tolerance 1e-3, over the book's form, forward", "additive_book_1e-3", "book", 4.0
    ),
    faster(
        "additive, tolerance 1e-3, over the book's form, forward+backward",
        "additive_book_1e-3_backward",
        "book",
        4.0,
    ),
    faster(
        "additive, default tolerance, over the book's form, forward", "additive_book", "book", 2.0
    ),
    faster(
        "additive, default tolerance, over the book's form, forward+backward",
        "additive_book_backward",
        "book",
        2.0,
    ),
    faster("dot product over jax.nn, forward", "dot_heads", "jax.nn", 2.5),
    faster("dot product over jax.nn, forward+backward", "dot_heads_backward", "jax.nn", 2.5),
    faster("dot product over torch, forward", "dot_heads", "torch", 0.9),
    faster("dot product over torch, forward+backward", "dot_heads_backward", "torch", 0.9),
    cheaper("causal over unmasked, T=4096", "causal_4096", ("full_4096", "regard"), 0.65),
    Target(
        "the lift with its range check over the lift without",
        (("additive_guard", "lift"),),
        ("additive_guard", "unguarded"),
        1.05,
        at_least=False,
    ),
    cheaper("Gaussian over dot product", "gaussian_heads", ("dot_heads", "regard"), 1.1),
    cheaper("bilinear over dot product", "bilinear_heads", ("dot_heads", "regard"), 1.1),
    within("additive training at 16384, temporaries", "memory_16384", 1024.0, "MiB"),
    cheaper(
        "additive training, 16384 over 8192",
        "memory_16384",
        ("memory_8192", "regard"),
        2.3,
        "MiB",
    ),
)


def _additive(what: str, case: str, ms: float, times: float) -> tuple[Target, Target]:
    """All in: features, guard and kernel. As time, and over the book's form in the same run."""
    return (
        within(f"additive, {what}", case, ms),
        faster(f"additive, {what}, over the book's form", case, "book", times),
    )


def _kernel_rate(case: str, reach: float) -> Target:
    """Useful operations of the wide kernel alone."""
    width, _, backward = case.removeprefix("kernel_").partition("_")
    promise = f"wide kernel alone, width {width}, {backward or 'forward'}"
    return Target(promise, ((case, "regard"),), None, reach, at_least=True, measure="TFLOP/s")


_SHORT, _LONG = LINEAR_LENGTHS

GPU_TARGETS = (
    *_additive("default tolerance, forward", "additive", 0.65, 28.0),
    *_additive("tolerance 2e-2, forward", "additive_2e-2", 0.45, 40.0),
    *_additive("default tolerance, forward+backward", "additive_backward", 2.9, 12.0),
    *_additive("h=V=256, forward", "additive_256", 2.9, 25.0),
    *(_kernel_rate(f"kernel_{width}", 600.0) for width in (768, 896, 1024)),
    _kernel_rate("kernel_3072", 550.0),
    *(_kernel_rate(f"kernel_{width}_backward", 450.0) for width in (768, 896, 1024)),
    cheaper(
        "additive, error of the output over the book's form's",
        "error_1024",
        ("error_1024", "book"),
        0.6,
        "error",
    ),
    within("additive training at 131072, memory", "sweep_131072_backward", 40.0, "peak GiB"),
    cheaper(
        "triangular lengths over cuDNN unmasked",
        "triangular_64",
        ("dot_64", "jax.nn cudnn"),
        0.6,
    ),
    cheaper("Gaussian over dot product", "gaussian_128", ("dot_128", "regard"), 1.1),
    cheaper("bilinear over dot product", "bilinear_128", ("dot_128", "regard"), 1.1),
    *(
        faster(f"{case.name} over the best of jax.nn", case.name, JAX_PEERS, 0.97)
        for case in GPU_CASES
        if set(JAX_PEERS) <= set(case.against) and case.name not in LIMITS
    ),
    # What section 7 of the design requires of the cases that were slow in round 1.
    *(within(name.replace("_", " "), name, limit) for name, limit in LIMITS.items()),
    faster("additive, exact, forward, over the book's form", "additive_exact", "book", 4.0),
    faster(
        "additive, exact, forward+backward, over the book's form",
        "additive_exact_backward",
        "book",
        4.0,
    ),
    cheaper(
        f"additive, exact, memory of {_LONG} over {_SHORT}",
        f"memory_exact_{_LONG}",
        (f"memory_exact_{_SHORT}", "regard"),
        2.3,
        "peak GiB",
    ),
)
