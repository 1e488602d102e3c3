"""Runs a small problem on every backend that does not refuse it, and compares with float64.

What a backend says comes from the table that `attend` chooses by (pool/choose.py). The forward
pass is held to the formulas below, written out in NumPy; the backward pass to the derivative of
the reference in float64.
"""

import functools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import regard
from regard.front_door import prepare
from regard.placement import Device, device_of
from regard.pool.choose import choose, named
from regard.pool.pallas import HOPPER, MOSAIC_SINCE, kernel_for
from regard.score.contract import accumulation_dtype

# Several blocks of every backend. The last keys are padding, and NaN: whatever reads them shows.
T = S = 384
REAL = 300
WIDTH, HIDDEN = 64, 16

# Where a backend is meant to run: kernels for matrix units want 16 bits.
DTYPES = {"reference": "float32", "blockwise": "float32", "cudnn": "bfloat16", "pallas": "bfloat16"}

# Relative errors in norm that pass, forward and backward. In 16 bits, additive scores may be off
# by 2^-8 for each of the vector's weights, and the rest is rounding.
TOLERANCES = {"float32": (1e-5, 1e-4), "bfloat16": (2**-6, 2**-3)}


@dataclass(frozen=True)
class Probe:
    """The result of one score on one backend.

    Attributes:
        error, gradient_error: relative, in norm; None where it did not run to the end.
        failure: the exception it ended with.
    """

    score: str
    passed: bool
    error: float | None = None
    gradient_error: float | None = None
    failure: str | None = None


@dataclass
class Backend:
    """One backend on this device.

    Attributes:
        probes: of the scores that it takes.
        refusals: score -> what it lacks.
    """

    name: str
    dtype: str
    probes: list[Probe] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """ "works", "broken" (it said it could, and could not), or "absent" (it takes nothing)."""
        if not self.probes:
            return "absent"
        return "works" if all(probe.passed for probe in self.probes) else "broken"


def check_backends() -> list[Backend]:
    """Every backend that pools whole sequences, in the order of `DTYPES`.

    Example:
        >>> from regard.cli.backend_check import check_backends
        >>> [one.name for one in check_backends() if one.state == "works"][:2]
        ['reference', 'blockwise']
    """
    # In threads, which no context of the caller reaches: nearly all of it is compiling, over half
    # a minute on a GPU if each score waited for the one before.
    with ThreadPoolExecutor(len(SCORES)) as pool:
        return [check_backend(name, pool.map) for name in DTYPES]


def check_backend(name: str, run_all: Callable[..., Iterable[Probe]] = map) -> Backend:
    """Tries each score that a backend does not refuse.

    Args:
        run_all: `map`, or one that runs them at the same time.
    """
    found, taken = Backend(name, DTYPES[name]), []
    for score in SCORES:
        tensors, arguments = problem(score, found.dtype)
        _, request = prepare(*tensors, **arguments)
        refusal = named(name).refuses(request)
        if refusal is None:
            taken.append(score)
        else:
            found.refusals[score] = refusal
    found.probes += run_all(lambda score: _probe(name, score, found.dtype), taken)
    return found


def _probe(name: str, score: str, dtype: str) -> Probe:
    tensors, arguments = problem(score, dtype)
    try:
        out, gradients = forward_and_backward(name, tensors, arguments)
    except Exception as failure:  # any: what a broken installation raises is not known
        lines = str(failure).strip().splitlines() or [""]
        return Probe(score, False, failure=f"{type(failure).__name__}: {lines[0]}")
    expected, expected_gradients = answers(score, dtype)
    error = relative_error(out, expected)
    gradient_error = max(map(relative_error, gradients, expected_gradients))
    forward, backward = TOLERANCES[dtype]
    passed = error <= forward and gradient_error <= backward  # NaN passes neither
    return Probe(score, passed, error, gradient_error)


def forward_and_backward(
    implementation: str, tensors: list[Array], arguments: dict[str, Any]
) -> tuple[Array, tuple[Array, ...]]:
    """The output, and the gradients of its sum of squares in query, key and value."""

    @jax.jit
    def run(tensors: list[Array], arguments: dict[str, Any]) -> Any:
        def pool(*tensors: Array) -> tuple[Array, Array]:
            out = regard.attend(*tensors, **arguments, implementation=implementation)
            return (out.astype(wide) ** 2).sum(), out

        wide = accumulation_dtype(tensors[0].dtype)
        gradients, out = jax.grad(pool, argnums=(0, 1, 2), has_aux=True)(*tensors)
        return out, gradients

    return jax.block_until_ready(run(tensors, arguments))


def hopper_refusal(device: Device | None = None) -> str | None:
    """Why the kernel written for Hopper does not run here; None where it does."""
    device = device or device_of()
    if kernel_for(device) == "hopper":
        return None
    if device.capability != HOPPER:
        on = device.platform
        if device.capability is not None:
            on = f"compute capability {'.'.join(map(str, device.capability))}"
        return f"needs an NVIDIA GPU of compute capability 9.0 (running on {on})"
    oldest = ".".join(map(str, MOSAIC_SINCE))
    return f"needs JAX {oldest} or later (this is {jax.__version__}); Triton's runs instead"


def first_choice() -> str:
    """The backend that `attend` picks on this device for a dot product of some size."""
    dtype = "bfloat16" if device_of().platform == "gpu" else "float32"
    tokens = jnp.zeros((1, 16 * T, WIDTH), dtype)  # more than fit in a cache
    return choose(prepare(tokens, tokens, tokens)[1], None).backend.name


# ---------------------------------------------------------------------------------------------
# The problem: drawn by NumPy, so that it is the same on every device.


@functools.cache
def drawn() -> dict[str, np.ndarray]:
    """Unit normal query, key and value, and parameters that make scores of about unit size."""
    rng = np.random.default_rng(0)
    shapes = {
        "query": (1, T, WIDTH),
        "key": (1, S, WIDTH),
        "value": (1, S, WIDTH),
        "kernel": (WIDTH, WIDTH),
        "query_kernel": (WIDTH, HIDDEN),
        "key_kernel": (WIDTH, HIDDEN),
        "vector": (HIDDEN,),
    }
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    arrays["kernel"] /= WIDTH
    arrays["query_kernel"] /= np.sqrt(WIDTH)
    arrays["key_kernel"] /= np.sqrt(WIDTH)
    return arrays


def problem(
    score: str, dtype: str | None = None, *, poisoned: bool = True
) -> tuple[list[Array], dict[str, Any]]:
    """Query, key and value, and the other arguments of `attend`."""
    dtype = dtype or "float32"
    arrays = {name: jnp.asarray(array, dtype) for name, array in drawn().items()}
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    if poisoned:
        key, value = (rows.at[:, REAL:].set(jnp.nan) for rows in (key, value))
    arguments = {"score": SCORES[score].make(arrays), "valid_lens": jnp.array([REAL], jnp.int32)}
    return [query, key, value], arguments


@functools.cache
def answers(score: str, dtype: str) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """The output and the gradients in float64, for inputs rounded to `dtype`."""
    tensors, _ = problem(score, dtype, poisoned=False)
    rounded = {
        name: np.asarray(jnp.asarray(array, dtype)).astype(np.float64)
        for name, array in drawn().items()
    }
    query, key, value = (rounded[name][0] for name in ("query", "key", "value"))
    logits = SCORES[score].formula(query, key[:REAL], rounded)  # [T, S]
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    out = powers @ value[:REAL] / powers.sum(axis=1, keepdims=True)  # [T, V]
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(array) for name, array in rounded.items()}
        tensors = [wide[name] for name in ("query", "key", "value")]
        lens = jnp.array([REAL], jnp.int32)
        arguments = {"score": SCORES[score].make(wide), "valid_lens": lens}
        gradients = forward_and_backward("reference", tensors, arguments)[1]
        return out[None], tuple(np.asarray(gradient) for gradient in gradients)


def relative_error(got: Any, expected: np.ndarray) -> float:
    """|got - expected| / |expected|, in norm."""
    apart = np.asarray(got).astype(np.float64) - expected
    return float(np.linalg.norm(apart) / np.linalg.norm(expected))


@dataclass(frozen=True)
class _Score:
    """A score of the library, and its formula over query [T, D] and key [S, D] -> [T, S]."""

    make: Callable[[dict[str, Any]], regard.Score]
    formula: Callable[[np.ndarray, np.ndarray, dict[str, np.ndarray]], np.ndarray]


def _gaussian(query: np.ndarray, key: np.ndarray, arrays: dict[str, np.ndarray]) -> np.ndarray:
    return -((query[:, None] - key[None]) ** 2).sum(axis=-1) / (2 * 8.0**2)


def _additive(query: np.ndarray, key: np.ndarray, arrays: dict[str, np.ndarray]) -> np.ndarray:
    x, y = query @ arrays["query_kernel"], key @ arrays["key_kernel"]
    return np.tanh(x[:, None] + y[None]) @ arrays["vector"]


SCORES = {
    "dot": _Score(
        lambda arrays: regard.Dot(),
        lambda query, key, arrays: query @ key.T / np.sqrt(WIDTH),
    ),
    "gaussian": _Score(lambda arrays: regard.Gaussian(8.0), _gaussian),
    "bilinear": _Score(
        lambda arrays: regard.Bilinear(arrays["kernel"]),
        lambda query, key, arrays: query @ arrays["kernel"] @ key.T,
    ),
    "additive": _Score(
        lambda arrays: regard.Additive(
            arrays["query_kernel"], arrays["key_kernel"], arrays["vector"]
        ),
        _additive,
    ),
}
