"""One attention, ready to be run: what a peer hands to the timing loop.

`compile_program` makes one from a JAX function; a peer of another framework makes its own.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.bench.cases import Case, Inputs


class Absent(Exception):
    """A peer that is not here, or cannot do a case: the message says why."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A prepared attention.

    Attributes:
        run: runs once on the case's inputs and blocks until the result is there.
        outputs: runs once and returns "out" at the checked rows, and for a backward case
            "d_<name>" for every array, as `expected.expected` does; and "lifted", where the
            program can tell whether the lift ran.
        temp_bytes: temporaries of the compiled program; None where they cannot be known.
        peak_bytes: arguments, results and temporaries together, at the highest point.
        text: the compiled program, to compare two of them.
    """

    run: Callable[[], Any]
    outputs: Callable[[], dict[str, np.ndarray]]
    temp_bytes: int | None = None
    peak_bytes: int | None = None
    text: str = ""


def compile_program(
    attention: Callable[..., jax.Array],
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

    def forward(arrays, valid_lens, cotangent):
        result = attention(arrays, valid_lens)
        out, lifted = result if tells_lifted else (result, True)
        return {"out": out}, lifted

    def forward_backward(arrays, valid_lens, cotangent):
        def results(arrays):
            out, lifted = forward(arrays, valid_lens, cotangent)
            return out["out"], lifted

        out, pullback, lifted = jax.vjp(results, arrays, has_aux=True)
        (grads,) = pullback(cotangent)
        return {"out": out} | {f"d_{name}": g for name, g in grads.items()}, lifted

    step = forward_backward if case.backward else forward
    to_device = jax.tree.map(jnp.asarray, (inputs.arrays, inputs.valid_lens, inputs.cotangent))
    compiled = jax.jit(step).lower(*to_device).compile()
    memory = compiled.memory_analysis()

    def run():
        return jax.block_until_ready(compiled(*to_device))

    def outputs():
        checked = (*to_device[:2], jnp.asarray(inputs.checked_cotangent))
        results, lifted = compiled(*checked)
        results = {name: np.asarray(result) for name, result in results.items()}
        results["out"] = results["out"][:, inputs.rows]
        return results | ({"lifted": np.asarray(lifted)} if tells_lifted else {})

    return Program(
        run,
        outputs,
        temp_bytes=memory.temp_size_in_bytes if memory is not None else None,
        peak_bytes=getattr(memory, "peak_memory_in_bytes", None),
        text=compiled.as_text() or "",
    )
