"""The wide kernel alone: its program for a case of features, and the search for its block shapes.

The only file of the benchmark that uses the internals of `regard.pool`. Kernels come and go by
name, so they are looked up when a case asks for them; a missing one is a row with the reason.
`regard bench --tune` prints lines for the table `regard.pool.kernels.block_shapes.TABLE`: every
candidate is compiled, checked against float64 and timed, in one process; failures are left out.
"""

import importlib
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from regard.bench.cases.case import Case, Inputs, make_inputs, useful_flops
from regard.bench.cases.expected import allowed_error, expected, relative_errors
from regard.bench.cases.tables import GPU_CASES
from regard.bench.peers.program import Absent, Program, compile_program
from regard.bench.run.timing import Clock, DeviceClock

WIDE_KERNEL = "regard.pool.kernels"


def build(case: Case, inputs: Inputs) -> Program:
    """The program of a case of features: `forward`, and its gradient by `jax.vjp`.

    Raises:
        Absent: there is no wide kernel.
    """
    find("pool_features")

    def attention(arrays, valid_lens):
        return forward(arrays["query"], arrays["key"], arrays["value"])

    return compile_program(attention, case, inputs)


def forward(phi: jax.Array, psi: jax.Array, value: jax.Array) -> jax.Array:
    """softmax(phi psiᵀ) value by the wide kernel, whatever `attend` would have chosen.

    Args:
        phi: query features, [B, T, R].
        psi: key features, [B, S, R].
        value: [B, S, V].

    Returns:
        [B, T, V].
    """
    out = find("pool_features")(phi[:, None], psi, value)  # [B, 1, T, V]: a group of one head
    return out[:, 0]


def find(name: str, submodule: str = "") -> Any:
    """A name of the wide kernel's package, or of a module in it: `find("Blocks", ".block_shapes")`.

    Raises:
        Absent: it is not there.
    """
    module = WIDE_KERNEL + submodule
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise Absent(f"{module}.{name} is not there ({error})") from None


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
        watch: called with every result.
        clock: reads a program.

    Returns:
        For each case a line of Python: its key in the table, the best blocks, and what they
        reach. A comment instead where no candidate ran.

    Raises:
        Absent: there is no wide kernel, or it has no block shapes to force.
    """
    make_blocks = find("Blocks", BLOCKS)
    find("pool_features")
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
    forced_blocks = find("forced_blocks", BLOCKS)

    def compile_one(blocks: Any) -> Program | str:
        try:
            with forced_blocks(blocks):
                return build(case, inputs)
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
        limits = find(name, BLOCKS)
        classes.append(next((limit for limit in limits if width <= limit), limits[-1]))
    return case.direction, bits, *classes


def _words(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:120]
