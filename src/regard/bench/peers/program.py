"""One attention, ready to be run: what a peer gives to the timing loop.

`compile_program` makes one from a JAX function; a peer of another framework makes its own.
"""

import contextlib
import dataclasses
import functools
import importlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.bench.cases.case import Case, Inputs
from regard.bench.run.timing import Burst, Queued, Run

BUNDLED = 10  # runs in one launch: a launch of 50 µs no longer hides runs of 10 µs


class Absent(Exception):
    """A peer that is not here, or cannot do a case: the message says why."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A prepared attention.

    Attributes:
        run: runs once on the case's inputs and blocks until the result is there; a `Queued`,
            where it can be read by a device's clock.
        outputs: runs once and returns what is checked of "out", and for a backward case of
            "d_<name>" for every array, as `expected.expected` does; and "lifted", where the
            program can tell whether the lift ran.
        temp_bytes: temporaries of the compiled program; None where they cannot be known.
        peak_bytes: arguments, results and temporaries together, at the highest point.
        text: the compiled program, to compare two of them.
        ran: regard's implementation.
    """

    run: Run
    outputs: Callable[[], dict[str, np.ndarray]]
    temp_bytes: int | None = None
    peak_bytes: int | None = None
    text: str = ""
    ran: str | None = None


def import_peer(name: str) -> Any:
    """The module of that name.

    Raises:
        Absent: it is not installed.
    """
    # Keras reads its backend once, when first imported.
    os.environ.setdefault("KERAS_BACKEND", "jax")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Absent(f"{name} is not installed ({error})") from None


def compile_program(
    attention: Callable[..., Any],
    case: Case,
    inputs: Inputs,
    *,
    tells_lifted: bool = False,
) -> Program:
    """Compiles `attention(arrays, valid_lens)` in the direction of the case.

    Nothing is closed over: every array is an argument, so the compiler cannot fold one.

    Args:
        attention: from the dict of arrays and the valid lengths (or None) to the output.
        case, inputs: what to run on.
        tells_lifted: attention returns (output, lifted) instead.
    """

    def with_pullback(arrays, valid_lens):
        def results(arrays):
            result = attention(arrays, valid_lens)
            return result if tells_lifted else (result, True)

        return jax.vjp(results, arrays, has_aux=True)

    def forward(cotangent, arrays, valid_lens):
        result = attention(arrays, valid_lens)
        out, lifted = result if tells_lifted else (result, True)
        return {"out": out}, lifted

    def backward(cotangent, out, pullback, lifted):
        (grads,) = pullback(cotangent)
        return {"out": out} | {f"d_{name}": grad for name, grad in grads.items()}, lifted

    def forward_backward(cotangent, arrays, valid_lens):
        return backward(cotangent, *with_pullback(arrays, valid_lens))

    cotangent, arguments = jax.tree.map(
        on_device, (inputs.cotangent, (inputs.arrays, inputs.valid_lens))
    )
    steps: dict[str, Callable[..., Any]] = {
        "forward": forward,
        "backward": backward,
        "forward+backward": forward_backward,
    }
    step = steps[case.direction]
    if case.direction == "backward":
        arguments = jax.jit(with_pullback)(*arguments)
    jitted = jax.jit(step)  # traced once, for its bundle too
    compiled = jitted.lower(cotangent, *arguments).compile()

    def outputs():
        results, lifted = compiled(jnp.asarray(inputs.checked_cotangent), *arguments)
        checked = {n: inputs.checked(n, np.asarray(result)) for n, result in results.items()}
        return checked | ({"lifted": np.asarray(lifted)} if tells_lifted else {})

    @functools.cache
    def bundle():
        bundled = jax.jit(chain(jitted)).lower(cotangent, *arguments).compile()
        return _burst(bundled, cotangent, arguments)

    temp_bytes, peak_bytes = memory_of(compiled)
    return Program(
        Queued(
            once=lambda: jax.block_until_ready(compiled(cotangent, *arguments)),
            burst=_burst(compiled, cotangent, arguments),
            bundle=bundle if _can_turn(case) and case.direction != "backward" else None,
            bundled=BUNDLED,
        ),
        outputs,
        temp_bytes=temp_bytes,
        peak_bytes=peak_bytes,
        text=compiled.as_text() or "",
    )


def on_device(array: np.ndarray) -> jax.Array:
    """The array where programs run: one copy for all of them, as long as one of them has it.

    One call of cuDNN in two programs, each with arrays of its own, took the same time or up to 20 %
    more in one of them, for a whole run on an H200.
    """
    with _placing:
        found = _placed.get(id(array))
        if found is None:
            found = _placed[id(array)] = jnp.asarray(array)
            weakref.finalize(array, _placed.pop, id(array), None)
        return found


_placing = threading.Lock()  # programs are built by several threads
_placed: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()


def chain(step: Callable[..., Any]) -> Callable[..., Any]:
    """`BUNDLED` runs of a step in one program, each beginning when the one before has ended.

    Arrays change places between two runs, see `turned`. So no run can begin early, and nothing is
    made once for all of them, as features of keys that stay the same would be.
    """

    def steps(cotangent, arrays, valid_lens):
        kept = []
        for _ in range(BUNDLED):
            results, lifted = step(cotangent, arrays, valid_lens)
            kept.append((results, lifted))
            arrays = turned(arrays, results["out"])
        return kept  # all results: XLA removes a gradient that is not used

    return steps


def turned(arrays: dict[str, Any], out: Any) -> dict[str, Any]:
    """The arrays of the next run: the output is its query, and every key is another than before.

    Where query and key have one shape the query is the next key, elsewhere the value is; an output
    that is wider than a query is cut.
    """
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    one_shape = key.shape == value.shape
    if query.shape == key.shape:
        others = {"key": query} | ({"value": key} if one_shape else {})
    else:
        others = {"key": value, "value": key}
    return arrays | {"query": out[..., : query.shape[-1]]} | others


def _can_turn(case: Case) -> bool:
    one_shape = (case.S, case.K or case.N) == (case.T, case.N)
    return case.V == case.D or (case.V > case.D and one_shape)


def memory_of(compiled: Any) -> tuple[int | None, int | None]:
    """Bytes of temporaries, and of everything at the highest point, as the compiler planned."""
    memory = compiled.memory_analysis()
    if memory is None:
        return None, None
    together = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
    # Not every backend reports its peak; the sum is never less.
    return memory.temp_size_in_bytes, getattr(memory, "peak_memory_in_bytes", 0) or together


def _burst(compiled: Any, cotangent: jax.Array, arguments: Any) -> Burst:
    def burst(runs: int) -> float:
        start = time.perf_counter()
        for _ in range(runs):
            result = compiled(cotangent, *arguments)
        jax.block_until_ready(result)
        return time.perf_counter() - start

    return burst


MASKED = -1e6  # what the book writes over masked scores


def needs_memory(case: Case) -> None:
    """Refuses a (B, T, S, h) tensor that would not fit; on a CPU the system would kill us instead.

    Raises:
        Absent: with what it would take. Only for a case that is run.
    """
    if not case.timed:
        return
    needed = case.terms * jnp.dtype(case.dtype).itemsize * _copies(case)
    there = _device_memory() if case.device == "gpu" else _free_memory()
    if there is not None and needed > 0.8 * there:
        raise Absent(f"would take about {needed / 2**30:.0f} GiB of {there / 2**30:.0f}")


def _copies(case: Case) -> int:
    """How many tensors of that size are held at once: on a GPU the sum is fused into the tanh."""
    if case.backward:
        return 3
    return 1 if case.device == "gpu" else 2


def _free_memory() -> int | None:
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _device_memory() -> int | None:
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
