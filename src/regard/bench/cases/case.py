"""What a case of the benchmark is: a named problem, its arrays, its masks and its operations.

A case says what is computed; the programs that compute it are in `peers`. The tables of cases,
shared with the tests, are in tables.py.
"""

import dataclasses
import fnmatch
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

Tolerance = float | Literal["exact"] | None
MaskKind = Literal[
    "none", "causal", "lengths", "full", "triangular", "segments", "packed", "boolean"
]
ScoreKind = Literal["dot", "gaussian", "bilinear", "additive", "features"]
Regime = Literal["softmax", "sparsemax", "hard", "uniform", "kernel", "cone"]
Direction = Literal["forward", "backward", "forward+backward"]
Device = Literal["cpu", "gpu"]

# The error check works on this many score terms at most: the largest cases are checked on
# evenly spaced query rows (float64 NumPy takes a second or two per case at this size).
CHECKED_TERMS = 2**24
# And on the gradients of this many keys, over all examples and heads.
CHECKED_KEYS = 2**15
PACKED = 1000  # tokens of each sequence under the mask "packed"


@dataclasses.dataclass(frozen=True)
class Case:
    """One named problem: the shapes, the score, the mask and the direction.

    >>> case = Case("tiny", score="additive", B=2, T=3, S=5, D=4, V=6)
    >>> make_inputs(case).arrays["value"].shape
    (2, 5, 6)

    Args:
        name: what `--case` matches.
        score: "dot", "gaussian", "bilinear", "additive", or "features": query and key are lifted
            features already, and the wide kernel pools them, nothing before it and nothing after.
        B, T, S, V: batch, queries, keys, value width.
        D: width of query and key; for "additive" also the number h of hidden units.
        N: heads. None is the rank-3 form (B, T, D), a number the form (B, T, N, D).
        K: key heads, which divide N; None: as many as N.
        bias: adds a bias (1, N, T, S), or (1, T, S) without heads, which has a gradient too.
        dtype: of every array. The score's parameters have it too.
        mask: "lengths" lets half of the keys take part, "full" all but b of example b, as in a
            ragged cache; "triangular" t + 1 keys at query t; "segments" packs four sequences into
            one, "packed" sequences of PACKED tokens in causal order; "boolean" masks a fifth of
            the pairs.
        tolerance: of the additive lift.
        normalize: the weight regime; the f of "kernel" and "cone" is softplus.
        dropout: the rate.
        direction: "forward+backward" takes the gradient of every array, parameters included;
            "backward" does so after a forward pass that is not counted.
        device: where it is run; peers of other frameworks than JAX are placed there explicitly.
        group: cases of one group are interleaved in one loop, so that their ratios are fair.
        against: names of the peers (see `peers.PEERS`) to run beside regard.
        timed: False measures the memory of the compiled program and never runs it.
        rounds: at least this many interleaved rounds, whatever they take.
        seconds: more rounds than that as long as they take no more than this.
    """

    name: str
    score: ScoreKind
    B: int
    T: int
    S: int
    D: int
    V: int
    N: int | None = None
    K: int | None = None
    bias: bool = False
    dtype: str = "float32"
    mask: MaskKind = "none"
    tolerance: Tolerance = None
    normalize: Regime = "softmax"
    dropout: float = 0.0
    direction: Direction = "forward"
    device: Device = "cpu"
    group: str = ""
    against: tuple[str, ...] = ()
    timed: bool = True
    rounds: int = 3
    seconds: float = 12.0

    @property
    def backward(self) -> bool:
        """Whether there are gradients to check."""
        return self.direction != "forward"

    @property
    def terms(self) -> int:
        """Score terms: tanh evaluations of an additive score, pairs of any other.

        Sixty-four products of wide features count as one: about what a tanh takes.
        """
        per_pair = {"additive": self.D, "features": max(1, self.D // 64)}.get(self.score, 1)
        return self.B * (self.N or 1) * self.T * self.S * per_pair

    @property
    def problem(self) -> "Case":
        """The case without what only regard and the timing loop read: a peer computes two cases
        with the same problem the same way, so it is timed once for both."""
        return dataclasses.replace(
            self,
            name="",
            tolerance=None,
            group="",
            against=(),
            rounds=0,
            seconds=0.0,
        )


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arrays of a case, in NumPy and in the case's dtype.

    Attributes:
        arrays: query, key, value and the score's parameters: all that has a gradient.
        valid_lens: what the mask is made of. (B,) or (B, T) lengths, int32; for "segments" and
            "packed" the (B, T) ids, for "boolean" (B, T, S) bool; None for the other masks.
        cotangent: of the output, for the backward pass.
        rows: the query positions that the error check compares.
        keys: the key positions whose gradients it compares.
    """

    arrays: dict[str, np.ndarray]
    valid_lens: np.ndarray | None
    cotangent: np.ndarray
    rows: np.ndarray
    keys: np.ndarray

    def checked(self, name: str, result: np.ndarray) -> np.ndarray:
        """The part of a result that is checked: "out" and "d_query" at `rows`, "d_key" and
        "d_value" at `keys`, gradients of parameters whole. Any array with positions second."""
        if name in ("out", "d_query"):
            return result[:, self.rows]
        return result[:, self.keys] if name in ("d_key", "d_value") else result

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
    key_heads = () if case.N is None else (case.K or case.N,)

    drawn = np.float64 if dtype == np.float64 else np.float32

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        array = rng.standard_normal(shape, drawn)
        array *= scale
        return array.astype(dtype)

    unit = case.D**-0.5
    arrays = {
        # Features come scaled: their products have unit variance, as lifted scores do.
        "query": normal(
            case.B, case.T, *heads, case.D, scale=unit if case.score == "features" else 1.0
        ),
        "key": normal(case.B, case.S, *key_heads, case.D),
        "value": normal(case.B, case.S, *key_heads, case.V),
    }
    if case.score == "gaussian":
        arrays["width"] = np.asarray(case.D**0.5, dtype)
    elif case.score == "bilinear":
        arrays["kernel"] = normal(case.D, case.D, scale=unit**2)
    elif case.score == "additive":
        arrays["query_kernel"] = normal(case.D, case.D, scale=unit)
        arrays["key_kernel"] = normal(case.D, case.D, scale=unit)
        arrays["vector"] = normal(case.D, scale=unit)

    if case.bias:
        arrays["bias"] = normal(1, *heads, case.T, case.S)

    valid_lens: Any = None
    if case.mask == "segments":
        ids = np.arange(case.T, dtype=np.int32) * 4 // case.T
        valid_lens = np.tile(ids, (case.B, 1))
    elif case.mask == "packed":
        valid_lens = np.tile(np.arange(case.T, dtype=np.int32) // PACKED, (case.B, 1))
    elif case.mask == "full":
        valid_lens = np.maximum(1, case.S - np.arange(case.B, dtype=np.int32))
    elif case.mask == "boolean":
        valid_lens = rng.random((case.B, case.T, case.S)) < 0.8
        valid_lens[..., 0] = True  # no empty row, which peers define otherwise
    elif case.mask == "lengths":
        valid_lens = np.full(case.B, max(1, case.S // 2), np.int32)
    elif case.mask == "triangular":
        valid_lens = np.minimum(np.arange(1, case.T + 1, dtype=np.int32), case.S)
        valid_lens = np.tile(valid_lens, (case.B, 1))  # [B, T]

    cotangent = normal(case.B, case.T, *heads, case.V)
    rows = _spread(case.T, CHECKED_TERMS * case.T // max(1, case.terms))
    keys = _spread(case.S, CHECKED_KEYS // max(1, case.B * (case.N or 1)))
    return Inputs(arrays, valid_lens, cotangent, rows, keys)


def _spread(length: int, affordable: int) -> np.ndarray:
    """Evenly spaced positions, first and last among them; all of them where affordable."""
    count = min(length, max(1, affordable))
    return np.unique(np.linspace(0, length - 1, count).round().astype(int))


def select(cases: Sequence[Case], patterns: Sequence[str] = ()) -> tuple[Case, ...]:
    """The cases whose names match one of the globs (none given: all), in table order.

    >>> table = [Case(name, "dot", B=1, T=2, S=2, D=2, V=2) for name in ("one", "two", "twin")]
    >>> [case.name for case in select(table, ["tw*"])]
    ['two', 'twin']

    Raises:
        ValueError: a pattern matches no case.
    """
    names = [case.name for case in cases]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"no case matches {pattern!r}. Known are {', '.join(names)}.")
    return tuple(
        case
        for case in cases
        if not patterns or any(fnmatch.fnmatch(case.name, p) for p in patterns)
    )


def useful_flops(case: Case) -> float | None:
    """Operations of the matrix products over the pairs that take part; None where no count fits.

    A pair of query and key costs D products for its score and V to pool its value, two
    operations each. The backward pass makes the score again (D), and takes the gradients of
    query (D), key (D), weight (V) and value (V): 3D + 2V, the count that flash attention's
    papers use. Projections and features are not counted: they are overhead, linear in T and S.
    An additive score has no such count, because its work is tanh by one way and matrix products
    of another width by the other.

    >>> useful_flops(Case("full", "dot", B=1, T=2, S=8, D=4, V=4))
    256.0
    >>> useful_flops(Case("causal", "dot", B=1, T=8, S=8, D=4, V=4, mask="causal"))
    576.0
    """
    if case.score == "additive":
        return None
    forward, backward = case.D + case.V, 3 * case.D + 2 * case.V
    per_pair = {
        "forward": forward,
        "backward": backward,
        "forward+backward": forward + backward,
    }[case.direction]
    return 2.0 * _pairs(case) * per_pair


def _pairs(case: Case) -> int:
    """Unmasked pairs of query and key, over examples and heads."""
    if case.mask in ("causal", "triangular"):
        # Query t sees t + 1 keys; the causal diagonal of a wide case ends at its last key.
        first = case.S - case.T if case.mask == "causal" else 0
        seen = sum(min(case.S, max(0, first + t + 1)) for t in range(case.T))
    elif case.mask == "lengths":
        seen = case.T * max(1, case.S // 2)
    elif case.mask == "packed":
        sizes = [min(PACKED, case.T - start) for start in range(0, case.T, PACKED)]
        seen = sum(size * (size + 1) // 2 for size in sizes)
    else:
        seen = case.T * case.S
    return case.B * (case.N or 1) * seen


def dense_mask(case: Case, valid_lens: Any) -> Any:
    """The mask as booleans [B or 1, 1, T or 1, S]; None without one."""
    keys = jnp.arange(case.S, dtype=jnp.int32)
    if case.mask == "causal":
        last = jnp.arange(case.T, dtype=jnp.int32)[:, None] + (case.S - case.T)
        return (keys[None, :] <= last)[None, None]
    if valid_lens is None:
        return None
    lens = jnp.asarray(valid_lens)
    if case.mask in ("segments", "packed"):
        same = (lens[:, :, None] == lens[:, None, :])[:, None]
        return same if case.mask == "segments" else same & jnp.tri(case.T, dtype=bool)
    if case.mask == "boolean":
        return lens[:, None]
    lens = lens[:, None, None, None] if lens.ndim == 1 else lens[:, None, :, None]
    return keys[None, None, None, :] < lens
