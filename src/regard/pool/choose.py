"""Which backend runs, by measured rules; and why not each of the others.

With implementation=None the rules are tried in order: the first that holds and whose backend does
not refuse decides. A named backend runs or raises.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import jax.numpy as jnp

from regard.pool.backend import Backend, Request
from regard.pool.blockwise import Blockwise
from regard.pool.cudnn import CuDNN
from regard.pool.pallas import Pallas, is_few_on_gpu
from regard.pool.reference import Reference
from regard.pool.ring import Ring
from regard.score.contract import chosen_precision

# Where the whole [B, N, T, S] array has at most this many numbers, its memory does not matter, and
# one dense pass is a small program that any device runs quickly.
DENSE_LIMIT = 1 << 17
# The same on a CPU, where inner products of short sequences stay in its cache. A score that is no
# inner product by its definition holds several numbers per pair, and all of them count.
CPU_PRODUCTS_LIMIT, CPU_NUMBERS_LIMIT = 1 << 20, 1 << 21
# Where queries and keys are so few, a loop over tiles costs more than it saves: up to so many
# numbers of one dense pass.
SHORT, CPU_SHORT_LIMIT, GPU_SHORT_LIMIT = 64, 3 * CPU_PRODUCTS_LIMIT, 1 << 21
CPU_TINY_LIMIT = 1 << 15  # up to which a CPU takes longer to start any program than to run it
# On a GPU, numbers in keys and values from which few queries are not pooled by a dense pass, which
# copies both; not measured.
CACHE_LIMIT = 1 << 20


def _small(request: Request) -> bool:
    """Whether one dense pass by the definition is as fast as tiles are."""
    width = max(1, request.score.tile_width(request.axes.query_width))
    axes, numbers = request.axes, request.pairs * width
    short = max(axes.T, axes.S) <= SHORT
    if request.device.platform != "cpu":
        few = request.pairs <= DENSE_LIMIT or (short and numbers <= GPU_SHORT_LIMIT)
        return few and not _large_cache(request)
    products = CPU_SHORT_LIMIT if short else CPU_PRODUCTS_LIMIT
    if numbers <= CPU_TINY_LIMIT:
        return True
    if not request.normalize.uses_scores:
        return numbers <= CPU_NUMBERS_LIMIT
    if request.pairs > products and numbers > CPU_NUMBERS_LIMIT:
        return False
    lift = request.lift  # asked last: it traces the score
    if lift is None or lift.expansion is not None:
        return numbers <= CPU_NUMBERS_LIMIT
    product = lift.key_bias is None and lift.distance_bias is None
    product = product and request.pairs <= products
    few = request.has_few_queries and axes.S >= 2 * (axes.N // axes.K * axes.T)
    return product and not few


_PALLAS = Pallas()


def _cudnn_copies_more(request: Request) -> bool:
    """Whether a call has few queries and many keys, and cuDNN would get copies of keys or values,
    zeroed where there are lengths or padded where S is odd. The kernel for few queries reads the
    caller's arrays once, and such a call takes as long as it moves bytes.
    """
    axes = request.axes
    copied = request.mask.lens != "none" or axes.S % 2 > 0
    return (
        copied
        and axes.S >= 8 * axes.T
        and is_few_on_gpu(request)
        and _PALLAS.refuses(request) is None
    )


def _large_cache(request: Request) -> bool:
    """Whether few queries meet so many keys that reading these is the work."""
    axes = request.axes
    numbers = axes.B * axes.S * axes.K * (axes.key_width + axes.V)
    return numbers >= CACHE_LIMIT and is_few_on_gpu(request) and _PALLAS.refuses(request) is None


class Rule(NamedTuple):
    """One backend, and when the automatic choice takes it unless it refuses.

    Attributes:
        prefers: the condition; what a backend cannot do is left to its own refusal.
        when: the condition in words.
        measured: the measurement that it rests on.
    """

    backend: Backend
    prefers: Callable[[Request], bool]
    when: str
    measured: str


# In order of preference. A new backend is one rule more.
REGISTRY = [
    Rule(
        Ring(),
        lambda request: request.sequence is not None,
        "where sequence_axis= shards the sequence over a mesh axis",
        "the only one that pools over such shards; docs/scaling.md has its cost",
    ),
    Rule(
        Reference(),
        lambda request: request.axes.symbolic() or _small(request),
        f"at most {DENSE_LIMIT:,} weights; on a GPU, at most {GPU_SHORT_LIMIT:,} of an inner "
        f"product of up to {SHORT} queries and keys; on a CPU, {CPU_PRODUCTS_LIMIT:,} of an inner "
        f"product without few queries ({CPU_SHORT_LIMIT:,} of up to {SHORT} queries and "
        f"keys), or {CPU_NUMBERS_LIMIT:,} numbers of the definition of a score that is none; not "
        f"few queries of {CACHE_LIMIT:,} numbers of keys and values on a GPU; or sizes that "
        "jax.export leaves open",
        "two CPU cores, float32, forward and backward: dot product of B=8, T=S=128, N=8, D=64, "
        "5.4 ms, blockwise 6.5; of B=64, T=S=50, N=8, D=64, 25 ms, blockwise 83; additive score of "
        "B=64, T=S=10, h=256, 2.5 ms, blockwise 4.0; of T=S=30, 207 ms, blockwise 24; Gaussian "
        "score of B=4, T=75, S=100, D=32, 0.76 ms, blockwise 0.20; one query, B=3, S=722, N=4, "
        "K=1, D=64, 0.95 ms, blockwise 0.20; one H200, bfloat16, lengths, forward and backward: "
        "B=256, T=S=16, N=4, D=32, 0.09 ms, cudnn 0.20, pallas 0.12; B=80, T=S=48, N=8, D=64, "
        "0.13 ms, cudnn 0.25, pallas 0.15 (python benchmarks/terms.py --only short)",
    ),
    Rule(
        CuDNN(),
        lambda request: request.device.platform == "gpu" and not _cudnn_copies_more(request),
        "on a GPU, softmax over an exact inner product of 16-bit numbers, masked by no more than "
        "valid lengths per example, causal order or a causal window; a 16-bit bias of every head; "
        "not for few queries where it would need a copy of keys or values (lengths, odd S)",
        "one H200, bfloat16, B=4, T=S=4096, N=16, D=128: cuDNN 628 TFLOP/s, jax.nn by XLA 148",
    ),
    Rule(
        _PALLAS,
        lambda request: request.device.platform == "gpu",
        "on a GPU, softmax, sparsemax, hard, kernels and cones of plain arithmetic, over any score "
        "with a lift, or additive; few queries",
        "one H200, bfloat16: additive, B=8, T=S=4096, h=V=64, 0.6 ms, the book's form 18.4; "
        "per-query lengths, B=4, T=S=4096, N=16, D=64, 0.37 ms, jax.nn by XLA 5.6",
    ),
    Rule(
        Blockwise(),
        lambda request: True,
        "everything else",
        "two CPU cores, float32: dot products 3.2 times as fast as jax.nn, additive scores 6 "
        "times as fast as the book's form (benchmarks/README.md)",
    ),
]


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
        request = self.request
        products = _describe_products(request)
        reason = self.backend.describe(request) + products
        if request.paged:
            in_place = self.backend.reads_pages(request)
            reason += f"; pages {'read in place' if in_place else 'gathered into a copy first'}"
        if self.asked is None:
            return reason
        first = f"first of {list(self.asked)} that can" if len(self.asked) > 1 else "asked for"
        return f"{first}; {reason}"

    def why_not(self) -> dict[str, str]:
        """Every other backend that was considered, and what speaks against it."""
        if self.asked is not None:
            before = self.asked[: self.asked.index(self.backend.name)]
            return {name: cast(str, _refusal(named(name), self.request)) for name in before}
        others = [rule for rule in REGISTRY if rule.backend is not self.backend]
        return {other.backend.name: self._against(other) for other in others}

    def _against(self, other: Rule) -> str:
        refusal = _refusal(other.backend, self.request)
        if refusal is not None:
            return refusal
        if not other.prefers(self.request):
            return f"could, but is preferred only for this: {other.when}"
        [when] = [rule.when for rule in REGISTRY if rule.backend is self.backend]
        return f"could, but {self.backend.name} comes first: {when}"

    def explain(self, verbose: bool) -> str:
        """For `regard.explain`: two lines, or all."""
        first, others = f"{self.backend.name} runs: {self.reason()}", self.why_not()
        heads, request = [first], self.request
        terms = [name for name in ("softcap", "sink") if getattr(request, name)]
        if terms or request.label != type(request.score).__name__:  # of parts, or placed
            heads.append(f"score: {', '.join([request.label, *terms])}")
        if not verbose:
            return "\n".join([*heads, *_in_short(others)])
        lines = [*heads, *(f"not {name}: {reason}" for name, reason in others.items())]
        if self.asked is None:
            lines.append("rules, of which the first that holds and whose backend can decides:")
            lines += [
                f"{'>' if rule.backend is self.backend else ' '} {rule.backend.name}: {rule.when} "
                f"(measured: {rule.measured})"
                for rule in REGISTRY
            ]
        return "\n".join(lines)


def choose(request: Request, implementation: str | Sequence[str] | None) -> Choice:
    """Picks the backend, or raises with every refusal.

    Raises:
        ValueError: for an unknown name.
        NotImplementedError: where every backend asked for refuses; the message has all reasons.
    """
    asked = as_names(implementation)
    candidates = [rule.backend for rule in REGISTRY if rule.prefers(request)]
    fix = "no sequence_axis="  # only a sharded sequence is refused by all that prefer it
    if request.sequence is not None:
        candidates = [backend for backend in candidates if backend.takes_sharded_sequences]
    if asked is not None:
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
    over = f" over mesh axis {request.sequence.axis!r}" if request.sequence is not None else ""
    raise NotImplementedError(f"no {which} can do this{over}.\n{listed}\nFix: {fix}.")


def as_names(implementation: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """The caller's implementation= as names in order of preference; None picks by the rules."""
    if implementation is None:
        return None
    if not isinstance(implementation, Sequence):
        raise TypeError(
            "implementation must be None, a name, or a sequence of names in order of preference. "
            f"Got {implementation!r}. Fix: implementation=None picks one."
        )
    return (implementation,) if isinstance(implementation, str) else tuple(implementation)


def named(name: str) -> Backend:
    """The backend of that name; ValueError where there is none."""
    for rule in REGISTRY:
        if rule.backend.name == name:
            return rule.backend
    raise ValueError(f"unknown implementation {name!r}: known are {_known()}.")


def _refusal(backend: Backend, request: Request) -> str | None:
    if request.sequence is not None and not backend.takes_sharded_sequences:
        return "pools whole sequences; sequence_axis= pools by ring attention"
    if request.axes.symbolic() and not backend.takes_symbolic_sizes:
        axes = request.axes
        return f"needs sizes that are numbers (here B = {axes.B}, T = {axes.T}, S = {axes.S})"
    return backend.refuses(request)


def _describe_products(request: Request) -> str:
    """How float32 is multiplied on a GPU; "" elsewhere."""
    if request.device.platform != "gpu" or request.dtype != jnp.float32:
        return ""
    chosen = chosen_precision()
    how = "in TF32, JAX's default" if chosen is None else f"by the setting {chosen!r}"
    return f"; float32 products {how} (jax.default_matmul_precision)"


def _in_short(others: dict[str, str]) -> list[str]:
    return [f"not: {', '.join(others)} (verbose=True says why)"] if others else []


def _known() -> str:
    return ", ".join(repr(rule.backend.name) for rule in REGISTRY)
