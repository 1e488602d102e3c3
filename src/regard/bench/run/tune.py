"""`regard bench --tune`: the fastest block shapes of the wide kernel on this device.

Prints lines for the table `regard.pool.kernels.block_shapes.TABLE`. Every candidate is compiled,
checked against float64 and timed, one process and one device; who fails is left out.
"""

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp

from regard.bench.cases.case import Case, make_inputs
from regard.bench.cases.expected import allowed_error, expected, relative_errors
from regard.bench.cases.flops import useful_flops
from regard.bench.cases.gpu_table import GPU_CASES
from regard.bench.peers import kernels
from regard.bench.peers.program import Program
from regard.bench.run.timing import Clock, DeviceClock

BLOCKS = ".block_shapes"
READINGS = 5  # of each candidate; their median counts
WORKERS = 8  # compilations at a time
SHARED_BYTES = 227 * 1024  # what a block of threads may have on Hopper: more is sure to fail

Tell = Callable[[str], None]


def tune(
    cases: Sequence[Case] = GPU_CASES,
    candidates: Sequence[Any] | None = None,
    watch: Tell = lambda what: None,
    clock: Clock | None = None,
) -> list[str]:
    """Times block shapes on the cases of features.

    Args:
        cases: those of features among them are tuned for.
        candidates: the `Blocks` to try on every case; by default those of `all_candidates`.
        watch: told every result.
        clock: reads a program.

    Returns:
        For each case a line of Python: its key in the table, the best blocks, and what they
        reach. A comment instead where no candidate ran.

    Raises:
        Absent: there is no wide kernel, or it has no block shapes to force.
    """
    make_blocks = kernels.find("Blocks", BLOCKS)
    kernels.find("pool_features")
    clock = clock or DeviceClock()
    lines = []
    for case in (case for case in cases if case.score == "features"):
        tried = list(all_candidates(case, make_blocks) if candidates is None else candidates)
        watch(f"{case.name}: {len(tried)} candidates")
        rates = {}
        for blocks, program in zip(tried, _programs(case, tried), strict=True):
            result = program if isinstance(program, str) else _rate(case, program, clock)
            if isinstance(result, str):
                watch(f"  {blocks}: {result}")
            else:
                rates[blocks] = result
                watch(f"  {blocks}: {result:.4g} TFLOP/s")
        lines.append(_line(case, rates))
    return lines


def all_candidates(case: Case, make_blocks: Callable[..., Any]) -> Iterator[Any]:
    """The block shapes worth a try: tiles that fill the matrix unit and fit shared memory."""
    for queries, keys, chunk, stages in itertools.product(
        (64, 128), (64, 128, 256), (64, 128), (2, 3, 4)
    ):
        features = stages * chunk * (queries + keys) * 2
        if features + keys * case.V * 2 > SHARED_BYTES:
            continue
        # A warp holds its part of the tile in registers: large tiles want more of them.
        warps = 8 if queries * keys >= 128 * 128 else 4
        yield make_blocks(queries=queries, keys=keys, chunk=chunk, warps=warps, stages=stages)


def _programs(case: Case, tried: Sequence[Any]) -> Iterator[Program | str]:
    """The checked program of every candidate, or why there is none."""
    inputs = make_inputs(case)
    answer = expected(case, inputs)
    forced_blocks = kernels.find("forced_blocks", BLOCKS)

    def compile_one(blocks: Any) -> Program | str:
        try:
            with forced_blocks(blocks):
                return kernels.build(case, inputs)
        except Exception as error:  # too many registers, a shape that the compiler refuses
            return _words(error)

    def check(program: Program | str) -> Program | str:
        if isinstance(program, str):
            return program
        try:
            worst = max(relative_errors(program.outputs(), answer).values())
        except Exception as error:
            return _words(error)
        return program if worst <= allowed_error(case) else f"wrong: relative error {worst:.1e}"

    with ThreadPoolExecutor(WORKERS) as pool:
        compiled = list(pool.map(compile_one, tried))
    return map(check, compiled)


def _rate(case: Case, program: Program, clock: Clock) -> str | float:
    """TFLOP/s, or why it was not timed."""
    try:
        seconds = statistics.median(clock(program.run) for _ in range(READINGS))
    except Exception as error:
        return _words(error)
    return (useful_flops(case) or 0.0) / seconds / 1e12


def _line(case: Case, rates: dict[Any, float]) -> str:
    key = table_key(case)
    if not rates:
        return f"# {key}: no candidate ran {case.name}"
    best = max(rates, key=lambda blocks: rates[blocks])
    return f"{key}: {best},  # {case.name}: {rates[best]:.4g} TFLOP/s"


def table_key(case: Case) -> tuple[str, int, int, int]:
    """Where a case stands in the table: direction, bits, and the classes of both widths."""
    bits = 8 * jnp.dtype(case.dtype).itemsize
    classes = []
    for name, width in (("WIDTHS", case.D), ("VALUE_WIDTHS", case.V)):
        limits = kernels.find(name, BLOCKS)
        classes.append(next((limit for limit in limits if width <= limit), limits[-1]))
    return case.direction, bits, *classes


def _words(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:120]
