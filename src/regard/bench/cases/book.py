"""What every spelling of the book's additive form shares: its mask, and how much it would take."""

import contextlib

import jax
import jax.numpy as jnp

from regard.bench.cases.case import Case
from regard.bench.peers.program import Absent

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
