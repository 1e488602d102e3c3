"""Which backend runs, by the registry's order and measured preferences; why not each of the others.

With implementation=None the registry is walked, and the first backend that prefers the request and
does not refuse it runs; a named backend insists.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from regard.pool.backend import Backend, Request
from regard.pool.blockwise import Blockwise
from regard.pool.cudnn import CuDNN
from regard.pool.pallas import Pallas
from regard.pool.reference import Reference
from regard.pool.ring import Ring

# In order of preference. A new backend is one object more.
REGISTRY: list[Backend] = [Ring(), Reference(), CuDNN(), Pallas(), Blockwise()]


@dataclass(frozen=True)
class Choice:
    """The backend that runs. Why, and why no other does, is found out when it is asked for.

    Attributes:
        asked: the names that the caller gave; None for the automatic choice.
    """

    backend: Backend
    request: Request
    asked: tuple[str, ...] | None

    def reason(self) -> str:
        """What runs, in one line."""
        reason = self.backend.describe(self.request)
        if self.asked is None:
            return reason
        first = f"first of {list(self.asked)} that can" if len(self.asked) > 1 else "asked for"
        return f"{first}; {reason}"

    def why_not(self) -> dict[str, str]:
        """Every other backend that was considered, and what speaks against it."""
        if self.asked is not None:
            before = self.asked[: self.asked.index(self.backend.name)]
            return {name: cast(str, _refusal(named(name), self.request)) for name in before}
        others = [backend for backend in REGISTRY if backend is not self.backend]
        return {other.name: self._against(other) for other in others}

    def _against(self, other: Backend) -> str:
        refusal = _refusal(other, self.request)
        if refusal is not None:
            return refusal
        if not other.prefers(self.request):
            return f"could, but is preferred only for this: {other.when}"
        return f"could, but {self.backend.name} comes first: {self.backend.when}"

    def explain(self, verbose: bool) -> str:
        """For `regard.explain`: two lines, or all."""
        first, others = f"{self.backend.name} runs: {self.reason()}", self.why_not()
        if not verbose:
            considered = ", ".join(others) or "none"
            return f"{first}\nnot: {considered} (verbose=True says why)"
        lines = [first, *(f"not {name}: {reason}" for name, reason in others.items())]
        if self.asked is None:
            lines.append("preferences; the first that applies and whose backend can runs:")
            lines += [
                f"{'>' if backend is self.backend else ' '} {backend.name}: {backend.when} "
                f"(measured: {backend.measured})"
                for backend in REGISTRY
            ]
        return "\n".join(lines)


def choose(request: Request, implementation: str | Sequence[str] | None) -> Choice:
    """Picks the backend, or raises with every refusal.

    Raises:
        ValueError: for an unknown name.
        NotImplementedError: where every backend asked for refuses; the message has all reasons.
    """
    asked = None
    candidates = [backend for backend in REGISTRY if backend.prefers(request)]
    fix = "no sequence_axis="  # only a sharded sequence is refused by all that prefer it
    if implementation is not None:
        asked = (implementation,) if isinstance(implementation, str) else tuple(implementation)
        candidates, fix = [named(name) for name in asked], "implementation=None picks one"
        if not asked:
            raise ValueError(f"implementation names no backend: known are {_known()}.")
    refusals = {}
    for backend in candidates:
        refusal = _refusal(backend, request)
        if refusal is None:
            return Choice(backend, request, asked)
        refusals[backend.name] = refusal
    listed = "\n".join(f"  {name}: {reason}" for name, reason in refusals.items())
    which = "implementation" if asked is None else "asked-for implementation"
    raise NotImplementedError(f"no {which} can do this.\n{listed}\nFix: {fix}.")


def named(name: str) -> Backend:
    """The backend of that name; ValueError where there is none."""
    for backend in REGISTRY:
        if backend.name == name:
            return backend
    raise ValueError(f"unknown implementation {name!r}: known are {_known()}.")


def _refusal(backend: Backend, request: Request) -> str | None:
    if request.sequence is not None and not backend.takes_sharded_sequences:
        return "pools whole sequences; sequence_axis= pools by ring attention"
    return backend.refuses(request)


def _known() -> str:
    return ", ".join(repr(backend.name) for backend in REGISTRY)
