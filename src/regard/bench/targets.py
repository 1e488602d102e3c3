"""What is promised, and whether a run kept it: ratios of one run, never absolute times."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from regard.bench.measure import AGAIN, Row

Place = tuple[str, str]  # a case and who


@dataclasses.dataclass(frozen=True)
class Target:
    """`over` divided by `under` must be at least, or at most, `reach`.

    Without `under`, the MiB of temporaries of `over` themselves.
    """

    promise: str
    over: Place
    under: Place | None
    reach: float
    at_least: bool
    measure: Literal["time", "memory"] = "time"

    @property
    def goal(self) -> str:
        unit = "×" if self.under else " MiB"
        return f"{'≥' if self.at_least else '≤'} {self.reach:g}{unit}"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A target and what was measured; None when the run did not hold both of its places.

    `noise` is how far apart the same program came out twice in the same loop: 0.03 is 3 %.
    """

    target: Target
    measured: float | None
    noise: float | None = None

    @property
    def outcome(self) -> Literal["reached", "short", "not measured"]:
        if self.measured is None:
            return "not measured"
        if self.target.at_least:
            return "reached" if self.measured >= self.target.reach else "short"
        return "reached" if self.measured <= self.target.reach else "short"


def _faster(promise: str, case: str, peer: str, reach: float) -> Target:
    return Target(promise, (case, peer), (case, "regard"), reach, at_least=True)


def _cheaper(promise: str, case: str, than: Place, reach: float, **measure) -> Target:
    return Target(promise, (case, "regard"), than, reach, at_least=False, **measure)


TARGETS = (
    _faster("additive 1e-3 vs book, forward", "additive_book_1e-3", "book", 4.0),
    _faster("additive 1e-3 vs book, forward+backward", "additive_book_1e-3_backward", "book", 4.0),
    _faster("additive default vs book, forward", "additive_book", "book", 2.0),
    _faster("additive default vs book, forward+backward", "additive_book_backward", "book", 2.0),
    _faster("dot product vs jax.nn, forward", "dot_heads", "jax.nn", 2.5),
    _faster("dot product vs jax.nn, forward+backward", "dot_heads_backward", "jax.nn", 2.5),
    _faster("dot product vs torch, forward", "dot_heads", "torch", 0.9),
    _faster("dot product vs torch, forward+backward", "dot_heads_backward", "torch", 0.9),
    _cheaper("causal over unmasked, T=4096", "causal_4096", ("full_4096", "regard"), 0.65),
    Target(
        "guarded lift over bare",
        ("additive_guard", "lift"),
        ("additive_guard", "unguarded"),
        1.05,
        at_least=False,
    ),
    _cheaper("Gaussian over dot product", "gaussian_heads", ("dot_heads", "regard"), 1.1),
    _cheaper("bilinear over dot product", "bilinear_heads", ("dot_heads", "regard"), 1.1),
    Target(
        "additive training at 16384, temporaries",
        ("memory_16384", "regard"),
        None,
        1024.0,
        at_least=False,
        measure="memory",
    ),
    _cheaper(
        "additive training, 16384 over 8192",
        "memory_16384",
        ("memory_8192", "regard"),
        2.3,
        measure="memory",
    ),
)


def judge(rows: Sequence[Row], targets: Sequence[Target] = TARGETS) -> list[Verdict]:
    """Measures every target on the rows of one run."""
    found = {(row.case, row.who): row for row in rows}

    def value(place: Place, measure: str) -> float | None:
        row = found.get(place)
        if row is None or row.absent:
            return None
        if measure == "memory":
            return row.temp_bytes / 2**20 if row.temp_bytes is not None else None
        return row.timing.median if row.timing else None

    noise: dict[str | None, float | None] = {}
    for row in rows:
        if row.who == AGAIN and row.timing:
            first = found[row.case, "regard"].timing
            noise[row.group] = abs(row.timing.median / first.median - 1) if first else None

    verdicts = []
    for target in targets:
        measured = value(target.over, target.measure)
        if measured is not None and target.under is not None:
            under = value(target.under, target.measure)
            measured = measured / under if under else None
        timed = measured is not None and target.measure == "time"
        group = found[target.over].group if timed else None
        verdicts.append(Verdict(target, measured, noise.get(group)))
    return verdicts
