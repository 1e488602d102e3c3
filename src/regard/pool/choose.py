"""Which backend runs, by measured rules; and why not each of the others.

A backend that cannot do a request refuses with NotImplementedError naming what it lacks. With
implementation=None the rules below are walked, and the first that holds and whose backend does
not refuse decides; a named backend insists.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from regard.pool import cudnn, pallas, ring
from regard.pool.request import Request, Ring

IMPLEMENTATIONS = ("reference", "blockwise", "cudnn", "pallas")

# Where the whole [B, N, T, S] array has at most this many numbers, its memory does not matter, and
# one dense pass is a small program that any device runs quickly.
DENSE_LIMIT = 1 << 17


class Rule(NamedTuple):
    """One line of the automatic choice.

    Attributes:
        when: the condition, in words.
        holds: the condition. What a backend cannot do is left to its own refusal.
        backend: who runs then.
        measured: the measurement that the line rests on.
    """

    when: str
    holds: Callable[[Request], bool]
    backend: str
    measured: str


RULES = (
    Rule(
        f"at most {DENSE_LIMIT:,} weights",
        lambda request: request.pairs <= DENSE_LIMIT,
        "reference",
        "two CPU cores, float32 dot product, 4,096 to 524,288 weights: level with blockwise, and "
        "the smaller program; not measured on a GPU",
    ),
    Rule(
        "on a GPU, softmax over an exact inner product of 16-bit numbers, masked by no more than "
        "valid lengths per example, causal order or a causal window",
        lambda request: request.device.platform == "gpu",
        "cudnn",
        "one H200, bfloat16, B=4, T=S=4096, N=16, D=128: cuDNN 628 TFLOP/s, jax.nn by XLA 148",
    ),
    Rule(
        "on a GPU, softmax over any score with a lift, or additive",
        lambda request: request.device.platform == "gpu",
        "pallas",
        "one H200, bfloat16: additive, B=8, T=S=4096, h=V=64, 0.53 ms, the book's form 18.6; "
        "per-query lengths, B=4, T=S=4096, N=16, D=64, 0.37 ms, jax.nn by XLA 5.6",
    ),
    Rule(
        "whatever is left",
        lambda request: True,
        "blockwise",
        "two CPU cores, float32: dot products 3.2 times as fast as jax.nn, additive scores 6 times "
        "as fast as the book's form (benchmarks/README.md)",
    ),
)


@dataclass(frozen=True)
class Choice:
    """The backend that runs, why, and who was asked before it and refused.

    Attributes:
        rule: the rule that decided; None where the caller named the backend.
    """

    name: str
    reason: str
    refusals: dict[str, str]
    request: Request
    rule: Rule | None = None

    def why_not(self) -> dict[str, str]:
        """Every other backend that comes into question, and what speaks against it."""
        if self.rule is None:
            return self.refusals
        others = [name for name in IMPLEMENTATIONS if name != self.name]
        return {
            name: self.refusals.get(name) or _passed_over(name, self.request, self.rule)
            for name in others
        }

    def rules(self) -> list[str]:
        """The rules in order, each with its measurement; none where the backend was named."""
        if self.rule is None:
            return []
        return [
            f"{'>' if rule is self.rule else ' '} {rule.backend}: {rule.when} "
            f"(measured: {rule.measured})"
            for rule in RULES
        ]


def choose(request: Request, implementation: str | Sequence[str] | None) -> Choice:
    """Picks the backend, or raises with every refusal.

    Raises:
        ValueError: for an unknown name.
        NotImplementedError: where every named backend refuses; the message has all reasons.
    """
    if request.over is not None:
        return _round_the_ring(request, implementation)
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
            reason = ACCEPTS[name](request)
        except NotImplementedError as refusal:
            refusals[name] = str(refusal)
        else:
            asked = "asked for" if len(names) == 1 else f"first of {list(names)} that can"
            return Choice(name, f"{asked}; {reason}", refusals, request)
    listed = "\n".join(f"  {name}: {reason}" for name, reason in refusals.items())
    raise NotImplementedError(
        f"no asked-for implementation can do this.\n{listed}\nFix: implementation=None picks one."
    )


def _round_the_ring(request: Request, implementation: str | Sequence[str] | None) -> Choice:
    """Where the sequence is shared among devices, only the ring can pool."""
    names = (implementation,) if isinstance(implementation, str) else implementation
    if names is not None and "ring" not in names:
        raise ValueError(
            "sequence_axis= pools by ring attention, so implementation must be None or 'ring'. "
            f"Got {implementation!r}."
        )
    try:
        return Choice("ring", ring.accepts(request), {}, request)
    except NotImplementedError as refusal:
        raise NotImplementedError(
            f"ring attention over mesh axis {cast(Ring, request.over).axis!r} cannot do this: "
            f"{refusal}. Fix: no sequence_axis=."
        ) from None


def _automatic(request: Request) -> Choice:
    refusals: dict[str, str] = {}
    for rule in RULES:
        if not rule.holds(request):
            continue
        try:
            reason = ACCEPTS[rule.backend](request)
        except NotImplementedError as refusal:
            refusals[rule.backend] = str(refusal)
        else:
            return Choice(rule.backend, reason, refusals, request, rule)
    raise AssertionError("the last rule holds for every request, and its backend takes them all")


def _passed_over(name: str, request: Request, rule: Rule) -> str:
    """Why a backend that was not asked does not run: it cannot, or `rule` came first."""
    try:
        ACCEPTS[name](request)
    except NotImplementedError as refusal:
        return str(refusal)
    if name == "reference" and request.pairs > DENSE_LIMIT:
        return f"would hold {request.pairs:,} weights at once, over {DENSE_LIMIT:,}"
    return f"could, but {rule.backend} is first: {rule.when}"


def _reference(request: Request) -> str:
    if request.pairs <= DENSE_LIMIT:
        return f"{request.pairs:,} weights, at most {DENSE_LIMIT:,}: dense"
    return f"dense, {request.pairs:,} weights, scores by definition"


def _blockwise(request: Request) -> str:
    if not request.normalize.uses_scores:
        return "memory linear in T and S; this regime uses no scores"
    axes = request.axes
    described = request.score.describe_lift(axes.T, axes.S, request.dtype)
    how = f"scores by {described}" if described else "scores by their definition, tile by tile"
    return f"memory linear in T and S; {how}"


# What each backend says to a request: a reason to run it, or NotImplementedError.
ACCEPTS: dict[str, Callable[[Request], str]] = {
    "reference": _reference,
    "blockwise": _blockwise,
    "cudnn": cudnn.accepts,
    "pallas": pallas.accepts,
}
