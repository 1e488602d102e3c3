"""Which backend runs, and why not each of the others.

A backend that cannot do a request refuses with NotImplementedError naming what it lacks. With
implementation=None the first of the order below that does not refuse runs; a named one insists.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from regard.normalize import Normalizer
from regard.score.contract import Score
from regard.shapes import Axes

IMPLEMENTATIONS = ("reference", "blockwise", "cudnn", "pallas")

# Where the whole [B, N, T, S] array has at most this many numbers, one dense pass is quicker
# than any loop, and its memory does not matter.
DENSE_LIMIT = 1 << 17


@dataclass(frozen=True)
class Request:
    """What the choice depends on; all of it static."""

    axes: Axes
    score: Score
    normalize: Normalizer
    dtype: jnp.dtype
    dropout: bool


@dataclass(frozen=True)
class Choice:
    """The backend that runs, why, and why not each of the others."""

    name: str
    reason: str
    refusals: dict[str, str]


def choose(request: Request, implementation: str | Sequence[str] | None) -> Choice:
    """Picks the backend, or raises with every refusal.

    Raises:
        ValueError: for an unknown name.
        NotImplementedError: where every named backend refuses; the message has all reasons.
    """
    if implementation is None:
        return _automatic(request)
    names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    known = ", ".join(repr(name) for name in IMPLEMENTATIONS)
    for name in names:
        if name not in IMPLEMENTATIONS:
            raise ValueError(f"unknown implementation {name!r}: known are {known}.")
    if not names:
        raise ValueError(f"implementation names no backend: known are {known}.")
    refusals: dict[str, str] = {}
    for name in names:
        try:
            reason = _ACCEPT[name](request)
        except NotImplementedError as refusal:
            refusals[name] = str(refusal)
        else:
            asked = "asked for" if len(names) == 1 else f"first of {list(names)} that can"
            return Choice(name, f"{asked}; {reason}", refusals)
    listed = "\n".join(f"  {name}: {reason}" for name, reason in refusals.items())
    raise NotImplementedError(
        f"no asked-for implementation can do this.\n{listed}\nFix: implementation=None picks one."
    )


def _automatic(request: Request) -> Choice:
    refusals: dict[str, str] = {}
    for name in ("pallas", "cudnn"):
        try:
            reason = _ACCEPT[name](request)
        except NotImplementedError as refusal:
            refusals[name] = str(refusal)
        else:
            return Choice(name, reason, refusals)
    size = _pairs(request.axes)
    if size <= DENSE_LIMIT:
        refusals["blockwise"] = f"slower than one dense pass over {size:,} weights"
        return Choice("reference", f"{size:,} weights, at most {DENSE_LIMIT:,}: dense", refusals)
    refusals["reference"] = f"would hold {size:,} weights at once, over {DENSE_LIMIT:,}"
    return Choice("blockwise", _blockwise(request), refusals)


def _reference(request: Request) -> str:
    return f"dense, {_pairs(request.axes):,} weights, scores by definition"


def _blockwise(request: Request) -> str:
    if not request.normalize.uses_scores:
        return "memory linear in T and S; this regime uses no scores"
    axes = request.axes
    described = request.score.describe_lift(axes.T, axes.S, request.dtype)
    how = f"scores by {described}" if described else "scores by their definition, tile by tile"
    return f"memory linear in T and S; {how}"


def _cudnn(request: Request) -> str:
    raise NotImplementedError(f"regard has no cuDNN backend yet (running on {_platform()})")


def _pallas(request: Request) -> str:
    raise NotImplementedError(f"regard has no Pallas kernel yet (running on {_platform()})")


_ACCEPT: dict[str, Callable[[Request], str]] = {
    "reference": _reference,
    "blockwise": _blockwise,
    "cudnn": _cudnn,
    "pallas": _pallas,
}


def _pairs(axes: Axes) -> int:
    return axes.B * axes.N * axes.T * axes.S


def _platform() -> str:
    return jax.default_backend()
