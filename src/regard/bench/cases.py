"""The named problems of the benchmark, one table shared with the tests.

A case says what is computed, never by whom: peers and timing live in their own files.
"""

import dataclasses
import fnmatch
from typing import Literal

import jax.numpy as jnp
import numpy as np

Tolerance = float | Literal["exact"] | None
MaskKind = Literal["none", "causal", "lengths", "triangular"]
Direction = Literal["forward", "forward+backward"]

SWEEP_LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
BOOK_SWEEP_LENGTHS = SWEEP_LENGTHS[:5]  # at 8192 the book's (T, S, h) tensor takes 16 GiB

# The error check works on this many score terms at most: the largest cases are checked on
# evenly spaced query rows (float64 NumPy takes about a second per case at this size).
CHECKED_TERMS = 2**25


@dataclasses.dataclass(frozen=True)
class Case:
    """One named problem: the shapes, the score, the mask and the direction.

    >>> case = Case("tiny", score="additive", B=2, T=3, S=5, D=4, V=6)
    >>> make_inputs(case).arrays["value"].shape
    (2, 5, 6)

    Args:
        name: what `--case` matches.
        score: "dot", "gaussian", "bilinear" or "additive".
        B, T, S, V: batch, queries, keys, value width.
        D: width of query and key; for "additive" also the number h of hidden units.
        N: heads. None is the rank-3 form (B, T, D), a number the form (B, T, N, D).
        dtype: of every array. The score's parameters have it too.
        mask: "lengths" lets half of the keys take part, "triangular" t + 1 keys at query t.
        tolerance: of the additive lift.
        direction: "forward+backward" takes the gradient of every array, parameters included.
        group: cases of one group are interleaved in one loop, so that their ratios are fair.
        against: names of the peers (see `peers.PEERS`) to run beside regard.
        timed: False measures the memory of the compiled program and never runs it.
        rounds: at least this many interleaved rounds, whatever they take.
        seconds: more rounds than that as long as they take no more than this.
    """

    name: str
    score: Literal["dot", "gaussian", "bilinear", "additive"]
    B: int
    T: int
    S: int
    D: int
    V: int
    N: int | None = None
    dtype: str = "float32"
    mask: MaskKind = "none"
    tolerance: Tolerance = None
    direction: Direction = "forward"
    group: str = ""
    against: tuple[str, ...] = ()
    timed: bool = True
    rounds: int = 3
    seconds: float = 12.0

    @property
    def backward(self) -> bool:
        return self.direction == "forward+backward"

    @property
    def terms(self) -> int:
        """Score terms: tanh evaluations of an additive score, pairs of any other."""
        per_pair = self.D if self.score == "additive" else 1
        return self.B * (self.N or 1) * self.T * self.S * per_pair

    @property
    def problem(self) -> "Case":
        """The case less what only regard and the loop know: a peer does two cases with one
        problem the same way, so it is timed once for both."""
        return dataclasses.replace(
            self,
            name="",
            tolerance=None,
            group="",
            against=(),
            timed=True,
            rounds=0,
            seconds=0.0,
        )


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arrays of a case, in NumPy and in the case's dtype.

    Attributes:
        arrays: query, key, value and the score's parameters: all that has a gradient.
        valid_lens: (B,), (B, T) or None; int32.
        cotangent: of the output, for the backward pass.
        rows: the query positions that the error check looks at.
    """

    arrays: dict[str, np.ndarray]
    valid_lens: np.ndarray | None
    cotangent: np.ndarray
    rows: np.ndarray

    @property
    def checked_cotangent(self) -> np.ndarray:
        """The cotangent, zero outside `rows`: every gradient is then a sum over `rows` only,
        and the float64 answer is affordable at any length. Timed runs use the full one."""
        checked = np.zeros_like(self.cotangent)
        checked[:, self.rows] = self.cotangent[:, self.rows]
        return checked


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Draws the arrays of a case; pre-activations of additive scores have unit variance."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(case.dtype)
    heads = () if case.N is None else (case.N,)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * rng.standard_normal(shape)).astype(dtype)

    arrays = {
        "query": normal(case.B, case.T, *heads, case.D),
        "key": normal(case.B, case.S, *heads, case.D),
        "value": normal(case.B, case.S, *heads, case.V),
    }
    unit = case.D**-0.5
    if case.score == "gaussian":
        arrays["width"] = np.asarray(case.D**0.5, dtype)
    elif case.score == "bilinear":
        arrays["kernel"] = normal(case.D, case.D, scale=unit**2)
    elif case.score == "additive":
        arrays["query_kernel"] = normal(case.D, case.D, scale=unit)
        arrays["key_kernel"] = normal(case.D, case.D, scale=unit)
        arrays["vector"] = normal(case.D, scale=unit)

    valid_lens = None
    if case.mask == "lengths":
        valid_lens = np.full(case.B, max(1, case.S // 2), np.int32)
    elif case.mask == "triangular":
        valid_lens = np.minimum(np.arange(1, case.T + 1, dtype=np.int32), case.S)
        valid_lens = np.tile(valid_lens, (case.B, 1))  # [B, T]

    affordable = max(1, CHECKED_TERMS * case.T // max(1, case.terms))
    rows = np.linspace(0, case.T - 1, min(case.T, affordable)).round().astype(int)
    return Inputs(arrays, valid_lens, normal(case.B, case.T, *heads, case.V), np.unique(rows))


def _additive(name: str, B: int, length: int, **more) -> Case:
    return Case(name, "additive", B=B, T=length, S=length, D=64, V=64, **more)


def _heads(name: str, score: Literal["dot", "gaussian", "bilinear"], **more) -> Case:
    return Case(name, score, B=2, T=1024, S=1024, N=8, D=64, V=64, rounds=10, **more)


def _long(name: str, **more) -> Case:
    return Case(
        name, "dot", B=1, T=4096, S=4096, N=4, D=64, V=64, group="skipping", rounds=5, **more
    )


def _book(suffix: str, **more) -> list[Case]:
    """The book's problem at each tolerance, one group: peers are timed once for all three."""
    return [
        _additive(
            f"additive_book{tolerance_suffix}{suffix}",
            B=4,
            length=512,
            tolerance=tolerance,
            group=f"additive{suffix}",
            against=("book", "keras", "torch"),
            rounds=5,
            **more,
        )
        for tolerance_suffix, tolerance in (("", None), ("_1e-3", 1e-3), ("_exact", "exact"))
    ]


def _sweep() -> list[Case]:
    """Additive attention against length: timed forward, and the memory of training, compiled
    but not run, with valid lengths given."""
    cases = []
    for length in SWEEP_LENGTHS:
        against = ("book",) if length in BOOK_SWEEP_LENGTHS else ()
        timed = {
            "group": f"sweep_{length}",
            "against": against,
            "rounds": 3 if length <= 4096 else 1,  # long enough to be its own average
            "seconds": 5.0,
        }
        cases += [
            _additive(f"sweep_{length}", B=1, length=length, **timed),
            _additive(f"sweep_{length}_1e-3", B=1, length=length, tolerance=1e-3, **timed),
            _additive(
                f"memory_{length}",
                B=1,
                length=length,
                mask="lengths",
                direction="forward+backward",
                group="memory",
                against=against,
                timed=False,
            ),
        ]
    return cases


_DOT_PEERS = ("jax.nn", "keras", "torch")
CASES = (
    *_book(""),
    *_book("_backward", direction="forward+backward"),
    _additive(
        "additive_lengths",
        B=4,
        length=512,
        mask="lengths",
        group="additive_lengths",
        against=("book", "keras", "torch"),
    ),
    # 5 % must be told from noise, so many more rounds than elsewhere.
    _additive(
        "additive_guard",
        B=4,
        length=512,
        group="guard",
        against=("lift", "unguarded"),
        rounds=30,
    ),
    _heads("dot_heads", "dot", group="heads", against=_DOT_PEERS),
    _heads("gaussian_heads", "gaussian", group="heads"),
    _heads("bilinear_heads", "bilinear", group="heads"),
    _heads(
        "dot_heads_backward",
        "dot",
        direction="forward+backward",
        group="heads_backward",
        against=_DOT_PEERS,
    ),
    _long("full_4096", against=("jax.nn", "torch")),
    _long("causal_4096", mask="causal", against=("jax.nn", "torch")),
    _long("lengths_4096", mask="lengths", against=("jax.nn", "torch")),
    _long("triangular_4096", mask="triangular", against=("jax.nn",)),
    *_sweep(),
)


def select(patterns: tuple[str, ...] = ()) -> tuple[Case, ...]:
    """The cases whose names match one of the globs (none given: all), in table order.

    >>> [case.name for case in select(("additive_g*", "full_4096"))]
    ['additive_guard', 'full_4096']

    Raises:
        ValueError: a pattern matches no case.
    """
    for pattern in patterns:
        if not fnmatch.filter([case.name for case in CASES], pattern):
            raise ValueError(
                f"no case matches {pattern!r}. Known are {', '.join(case.name for case in CASES)}."
            )
    return tuple(
        case
        for case in CASES
        if not patterns or any(fnmatch.fnmatch(case.name, p) for p in patterns)
    )
