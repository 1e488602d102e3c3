"""The benchmark itself: build and check every program of a group, then time them interleaved."""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from regard.bench.cases.case import Case, Inputs, make_inputs, useful_flops
from regard.bench.cases.expected import allowed_error, expected, relative_errors
from regard.bench.peers import jax_peers as peers
from regard.bench.peers.program import Absent, Program
from regard.bench.run.timing import (
    Clock,
    Queued,
    Run,
    Timing,
    interleave,
    rounds_within,
    wall_clock,
)

NOT_REACHED = "not reached in the time given"
AGAIN = "regard again"  # the same program timed twice: how much equal programs differ
LONG = 1.0  # seconds; a program that takes longer is not warmed up again
SHORT_TERMS = 2**28  # a program of fewer may be so short that it is read in bundles
OURS = ("regard", "unguarded")  # these depend on the case's tolerance; the other peers do not


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to measure, and for how long.

    Attributes:
        repeats: rounds of a group at most, unless one of its cases asks for more.
        budget: seconds for the rounds of a group, at most; at least `case.rounds` are made.
        quick: fewer rounds than the cases ask for: enough for an impression, not for a result.
        clock: measures one run.
        reading: shortest duration of one reading of that clock, in seconds.
        framework: only the peers of this framework take part (see `peers.framework`).
        solvers: threads that compute the expected results.
        builders: threads that build programs.
        batch: groups that are prepared together: their results are computed, and by several
            builders their programs built, before the first of them is timed.
        limit: seconds for everything; groups that are not reached by then are reported as such.
    """

    repeats: int = 20
    budget: float = 60.0
    quick: bool = False
    clock: Clock = wall_clock
    reading: float = 0.0
    framework: str | None = None
    solvers: int = 1
    builders: int = 1
    batch: int = 1
    limit: float | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured of one program on one case; `absent` says why something is missing.

    Attributes:
        case, who, group: the names of the case, of the program and of the case's problem.
        timing: None for a program that was only compiled.
        flops: useful operations of one run; None for a case without a count.
        temp_bytes, peak_bytes: as in `Program`.
        errors: relative, for the output and each gradient.
        lifted: whether the lift ran; None where the program cannot tell.
        ran: regard's implementation; None for every other program.
    """

    case: str
    who: str
    group: str = ""
    timing: Timing | None = None
    flops: float | None = None
    temp_bytes: int | None = None
    peak_bytes: int | None = None
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    lifted: bool | None = None
    ran: str | None = None
    absent: str | None = None

    @property
    def error(self) -> float | None:
        """The worst relative error over the output and the gradients."""
        return max(self.errors.values()) if self.errors else None

    @property
    def tflops(self) -> float | None:
        """Useful operations per second, in units of 10¹²; None for a case without a count."""
        return self.flops / self.timing.median / 1e12 if self.flops and self.timing else None


Watch = Callable[[str, float], None]  # (status, programs completed since the last call)
Answer = dict | None  # a problem's expected results; None: only compile


def steps(cases: Sequence[Case]) -> int:
    """The sum of the numbers that `watch` is called with."""
    return 2 * sum(1 + len(case.against) for case in cases)


def plan(cases: Sequence[Case], framework: str | None = None) -> list[tuple[Case, str]]:
    """The programs to measure and their cases, in the order of the table."""
    return [
        (case, who)
        for case in cases
        for who in ("regard", *case.against)
        if framework in (None, peers.framework(who))
    ]


def measure_cases(
    cases: Sequence[Case],
    settings: Settings | None = None,
    watch: Watch = lambda what, further: None,
) -> list[Row]:
    """Measures the cases, group by group.

    Args:
        cases: what to measure.
        settings: how to measure, and for how long.
        watch: called with the status; the numbers add up to `steps(cases)`.

    Returns:
        A row for every case and every program that is measured on it, in table order, and one
        more (`AGAIN`) for the first case of each timed group that asks for several rounds.
    """
    settings, start, measured = settings or Settings(), time.monotonic(), []
    for rows in measure_groups(cases, settings, watch):
        measured += rows
        if settings.limit is not None and time.monotonic() - start > settings.limit:
            break
    return in_table_order(cases, measured)


def in_table_order(cases: Sequence[Case], rows: Sequence[Row]) -> list[Row]:
    """The rows in the order of the table; those that are missing as `NOT_REACHED`."""
    found = {(row.case, row.who): row for row in rows}
    ordered = []
    for case, who in plan(cases):
        missing = Row(case.name, who, group=case.group, absent=NOT_REACHED)
        ordered.append(found.get((case.name, who), missing))
        if who == "regard" and (case.name, AGAIN) in found:
            ordered.append(found[case.name, AGAIN])
    return ordered


def measure_groups(cases: Sequence[Case], settings: Settings, watch: Watch) -> Iterator[list[Row]]:
    """As `measure_cases`, but yields the rows of each group as soon as they are measured."""
    cases = list(dict.fromkeys(case for case, _ in plan(cases, settings.framework)))
    names = list(dict.fromkeys(case.group for case in cases))
    for start in range(0, len(names), settings.batch):
        together = names[start : start + settings.batch]
        groups = [[case for case in cases if case.group == name] for name in together]
        problems = {case.problem: case for group in groups for case in group}
        watch(f"{', '.join(together)}: computing the expected results", 0.0)
        with ThreadPoolExecutor(settings.solvers) as pool:
            inputs = dict(zip(problems, pool.map(make_inputs, problems.values()), strict=True))
            found = pool.map(_answer, problems.values(), inputs.values())
            programs = _build_all(groups, settings, inputs, watch)  # while answers are computed
            answers = dict(zip(problems, found, strict=True))
        for group in groups:
            yield _run_group(group, programs, settings, answers, watch)


def _build_all(
    groups: list[list[Case]], settings: Settings, inputs: dict[Case, Inputs], watch: Watch
) -> Iterator[Program | Row]:
    """The distinct programs of each group, in order, or rows that say why there is none.

    Several builders finish before any program runs: a compiler may time what it builds. A single
    builder is this thread, and each program is checked before the next is built.
    """

    def build(pair: tuple[Case, str]) -> Program | Row:
        case, who = pair
        watch(f"{case.name}: preparing {who}", 0.0)
        program = _build(case, who, inputs[case.problem])
        if isinstance(program, Program) and settings.builders > 1:
            _build_bundle(case, program)
        return program

    pairs = [pair for group in groups for pair in _distinct(group, settings).values()]
    if settings.builders == 1:
        return map(build, pairs)
    with ThreadPoolExecutor(settings.builders) as pool:
        return iter(list(pool.map(build, pairs)))


def _build_bundle(case: Case, program: Program) -> None:
    """Builds what the clock would ask for later, when nothing else is built beside it."""
    run = program.run
    if isinstance(run, Queued) and run.bundle and case.timed and case.terms < SHORT_TERMS:
        with contextlib.suppress(Exception):  # the clock reads such a program without bundles
            run.bundle()


def _distinct(cases: list[Case], settings: Settings) -> dict[Hashable, tuple[Case, str]]:
    """The programs of a group, each once."""
    distinct: dict[Hashable, tuple[Case, str]] = {}
    for case, who in plan(cases, settings.framework):
        distinct.setdefault(_key(case, who), (case, who))
    return distinct


def _run_group(
    cases: list[Case],
    built: Iterator[Program | Row],
    settings: Settings,
    answers: dict[Case, Answer],
    watch: Watch,
) -> list[Row]:
    """Checks and times the programs of a group, which come next in `built`."""
    pairs = plan(cases, settings.framework)
    programs: dict[Hashable, Program] = {}
    took: dict[Hashable, float] = {}  # seconds of the error check
    measured: dict[Hashable, Row] = {}
    distinct = _distinct(cases, settings)
    for (key, (case, who)), program in zip(distinct.items(), built, strict=False):
        if isinstance(program, Row):
            measured[key] = program
        else:
            measured[key], took[key] = _check(case, who, program, answers[case.problem])
            if case.timed and not measured[key].absent:
                programs[key] = program
        watch(f"{case.name}: prepared {who}", len(pairs) / len(distinct))

    runs: dict[Hashable, Run] = {key: program.run for key, program in programs.items()}
    first = _key(cases[0], "regard")
    if first in runs and cases[0].rounds > 1:
        runs[AGAIN] = runs[first]
    timings = _time(cases, runs, took, measured, settings, len(pairs), watch)

    rows = []
    for case, who in pairs:
        key = _key(case, who)
        row = dataclasses.replace(
            measured[key],
            case=case.name,
            group=case.group,
            timing=timings.get(key),
            flops=useful_flops(case),
        )
        rows.append(row)
        if key == first and AGAIN in timings:
            rows.append(dataclasses.replace(row, who=AGAIN, timing=timings[AGAIN]))
    return rows


def _time(
    cases: list[Case],
    runs: dict[Hashable, Run],
    took: dict[Hashable, float],
    measured: dict[Hashable, Row],
    settings: Settings,
    share: int,
    watch: Watch,
) -> dict[Hashable, Timing]:
    """Times the runs of a group, interleaved; a failure is recorded in `measured`."""
    watch(f"{cases[0].group}: timing {len(runs)}", 0.0)
    once = {}
    for key, run in list(runs.items()):
        try:
            # The error check has warmed up a program that takes long; on a device, where a first
            # run may load a library, it is run once more.
            long = took.get(key, 0.0) > LONG and not settings.reading
            once[key] = took[key] if long else max(settings.reading, settings.clock(run))
        except Exception as error:  # out of memory, now that runs are queued
            del runs[key]
            if key in measured:
                measured[key] = dataclasses.replace(measured[key], absent=_failure(error))
    if not runs:
        watch(f"{cases[0].group}: nothing to time", float(share))
        return {}
    asked = max(case.rounds for case in cases)
    least = min(3, asked) if settings.quick else asked
    budget = min(settings.budget, max(case.seconds for case in cases))
    rounds = rounds_within(budget, list(once.values()), least, max(settings.repeats, least))
    ticks = itertools.count(1)

    def progress(key: Hashable) -> None:
        done = next(ticks)
        every = rounds * len(runs)
        watch(f"timing {cases[0].group}, run {done} of {every}", share / every)

    return interleave(runs, rounds, clock=settings.clock, progress=progress)


def _key(case: Case, who: str) -> Hashable:
    """Equal for equal programs: a peer is timed once for all cases of a problem."""
    return (case.name if who in OURS else case.problem, who)


def _answer(case: Case, inputs: Inputs) -> Answer:
    return expected(case, inputs) if case.timed else None


def _build(case: Case, who: str, inputs: Inputs) -> Program | Row:
    """The program, or a row that says why there is none."""
    try:
        return peers.build(who, case, inputs)
    except Absent as reason:
        return Row(case.name, who, absent=str(reason))
    except Exception as error:  # out of memory, a peer's own bug: the others go on
        return Row(case.name, who, absent=_failure(error))


def _check(case: Case, who: str, program: Program, answer: Answer) -> tuple[Row, float]:
    """The row of a program before timing (`absent` if it is wrong), and the seconds it ran."""
    row = Row(
        case.name,
        who,
        temp_bytes=program.temp_bytes,
        peak_bytes=program.peak_bytes,
        ran=program.ran,
    )
    if answer is None:
        return row, 0.0
    try:
        start = time.perf_counter()
        outputs = program.outputs()
        took = time.perf_counter() - start
        errors = relative_errors(outputs, answer)
    except Exception as error:
        return dataclasses.replace(row, absent=_failure(error)), 0.0
    lifted = bool(outputs["lifted"]) if "lifted" in outputs else None
    row = dataclasses.replace(row, errors=errors, lifted=lifted)
    worst = max(errors.values())
    if not worst <= allowed_error(case):  # a NaN is not
        absent = f"not timed: relative error {worst:.1e} against float64"
        row = dataclasses.replace(row, absent=absent)
    return row, took


def _failure(error: Exception) -> str:
    words = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"failed: {words[:200]}"
