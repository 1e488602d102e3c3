"""The benchmark itself: prepare every program of a group, check it, time the group in turns."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Hashable, Sequence

from regard.bench import peers
from regard.bench.cases import Case, Inputs, make_inputs
from regard.bench.expected import allowed_error, expected, relative_errors
from regard.bench.program import Absent, Program
from regard.bench.timing import Clock, Timing, interleave, rounds_within, wall_clock

AGAIN = "regard again"  # the same program a second time: how far apart equals can come out
LONG = 1.0  # seconds of one run past which runs are saved
OURS = ("regard", "unguarded")  # these depend on the tolerance, other peers do not know it


@dataclasses.dataclass(frozen=True)
class Settings:
    """How long to measure.

    Attributes:
        repeats: rounds of a group at most, unless one of its cases asks for more.
        budget: seconds for the rounds of a group, at most; at least `case.rounds` are made.
        quick: fewer rounds than the cases ask for. For a look, not for a claim.
        clock: measures one run.
    """

    repeats: int = 20
    budget: float = 60.0
    quick: bool = False
    clock: Clock = wall_clock


@dataclasses.dataclass(frozen=True)
class Row:
    """What one program did on one case. `absent` says why there is no more than that."""

    case: str
    who: str
    group: str = ""
    timing: Timing | None = None
    temp_bytes: int | None = None
    peak_bytes: int | None = None
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    lifted: bool | None = None
    absent: str | None = None

    @property
    def error(self) -> float | None:
        """The worst relative error over the output and the gradients."""
        return max(self.errors.values()) if self.errors else None


Watch = Callable[[str, float], None]  # what is going on, and how many programs further we are


def steps(cases: Sequence[Case]) -> int:
    """What the numbers given to `watch` add up to."""
    return 2 * sum(1 + len(case.against) for case in cases)


def measure_cases(
    cases: Sequence[Case],
    settings: Settings | None = None,
    watch: Watch = lambda what, further: None,
) -> list[Row]:
    """Measures the cases, group by group.

    Args:
        cases: what to measure.
        settings: how long.
        watch: told what is going on; the numbers add up to `steps(cases)`.

    Returns:
        A row for every case and everybody it is measured against, in table order, and one
        more (`AGAIN`) for the first case of each timed group that asks for several rounds.
    """
    settings = settings or Settings()
    rows = []
    for name in dict.fromkeys(case.group for case in cases):
        rows += _run_group([case for case in cases if case.group == name], settings, watch)
    return rows


def _run_group(cases: list[Case], settings: Settings, watch: Watch) -> list[Row]:
    inputs: dict[Case, Inputs] = {}
    answers: dict[Case, dict] = {}
    programs: dict[Hashable, Program] = {}
    took: dict[Hashable, float] = {}  # seconds of the error check
    measured: dict[Hashable, Row] = {}
    plan = [(case, who) for case in cases for who in ("regard", *case.against)]
    for case, who in plan:
        watch(f"{case.name}: preparing {who}", 0.0)
        key = _key(case, who)
        if key not in measured:
            if case.problem not in inputs:
                inputs[case.problem] = make_inputs(case)
            if case.timed and case.problem not in answers:
                answers[case.problem] = expected(case, inputs[case.problem])
            measured[key], program, took[key] = _prepare(
                case, who, inputs[case.problem], answers.get(case.problem)
            )
            if program is not None and case.timed:
                programs[key] = program
        watch(f"{case.name}: prepared {who}", 1.0)

    runs = {key: program.run for key, program in programs.items()}
    first = _key(cases[0], "regard")
    if first in runs and cases[0].rounds > 1:
        runs[AGAIN] = runs[first]
    timings: dict[Hashable, Timing] = {}
    if runs:
        watch(f"timing {cases[0].group}", 0.0)
        # The error check was a warm-up, so a program that is long at it needs no other.
        once = [
            took[key] if took.get(key, 0.0) > LONG else settings.clock(run)
            for key, run in runs.items()
        ]
        asked = max(case.rounds for case in cases)
        least = min(3, asked) if settings.quick else asked
        budget = min(settings.budget, max(case.seconds for case in cases))
        rounds = rounds_within(budget, once, least, max(settings.repeats, least))
        step = len(plan) / (rounds * len(runs))
        ticks = itertools.count(1)

        def progress(key: Hashable) -> None:
            done = next(ticks)
            watch(f"timing {cases[0].group}, run {done} of {rounds * len(runs)}", step)

        timings = interleave(runs, rounds, clock=settings.clock, progress=progress)
    else:
        watch(f"{cases[0].group}: nothing to time", float(len(plan)))

    rows = []
    for case, who in plan:
        key = _key(case, who)
        row = dataclasses.replace(
            measured[key], case=case.name, group=case.group, timing=timings.get(key)
        )
        rows.append(row)
        if key == first and AGAIN in timings:
            rows.append(dataclasses.replace(row, who=AGAIN, timing=timings[AGAIN]))
    return rows


def _key(case: Case, who: str) -> Hashable:
    """What makes two programs one: a peer is timed once for cases with one problem."""
    return (case.name if who in OURS else case.problem, who)


def _prepare(
    case: Case, who: str, inputs: Inputs, answer: dict | None
) -> tuple[Row, Program | None, float]:
    """Builds a program and checks it; no program comes back when it is not to be timed.

    The number is how many seconds the checked run took.
    """
    try:
        program = peers.build(who, case, inputs)
        row = Row(case.name, who, temp_bytes=program.temp_bytes, peak_bytes=program.peak_bytes)
        if answer is None:
            return row, program, 0.0
        start = time.perf_counter()
        outputs = program.outputs()
        took = time.perf_counter() - start
        errors = relative_errors(outputs, answer)
        lifted = bool(outputs["lifted"]) if "lifted" in outputs else None
        row = dataclasses.replace(row, errors=errors, lifted=lifted)
    except Absent as reason:
        return Row(case.name, who, absent=str(reason)), None, 0.0
    except Exception as error:  # out of memory, a peer's own bug: the others go on
        words = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Row(case.name, who, absent=f"failed: {words[:200]}"), None, 0.0
    worst = max(errors.values())
    if not worst <= allowed_error(case):  # a NaN is not
        absent = f"not timed: relative error {worst:.1e} against float64"
        return dataclasses.replace(row, absent=absent), None, took
    return row, program, took
