"""The wide kernel alone: the adapter between a case of features and `regard.pool.kernels`.

Kernels come and go by name, so they are looked up when a case asks for them: one that is not
there is a row of the table with the reason.
"""

import importlib
from typing import Any

import jax

from regard.bench.cases.case import Case, Inputs
from regard.bench.peers.program import Absent, Program, compile_program

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
    """A name of the wide kernel's package, or of a module in it: `find("Blocks", ".blocks")`.

    Raises:
        Absent: it is not there.
    """
    module = WIDE_KERNEL + submodule
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise Absent(f"{module}.{name} is not there ({error})") from None
