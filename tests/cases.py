"""The tables of the contract suites: scores, regimes, masks, dtypes, backends.

A new score, regime, mask or backend joins every suite by one line here. Nothing runs here; a
`Case` names one line of each table, and problem.py draws it, runs it and calls the oracle.
"""

import contextlib
import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import oracle
import regard
from regard.pool import layout
from regard.pool.kernels.block_shapes import Blocks, forced_blocks
from regard.pool.pallas import interpreted
from regard.score.additive import lift_anywhere

# ---------------------------------------------------------------------------------------------
# Backends: how to call one, and how to make it loop at test sizes.


class Backend(NamedTuple):
    implementation: str
    tiling: Callable = contextlib.nullcontext


@contextlib.contextmanager
def small_tiles():
    """Tiles far smaller than the test shapes, so that every loop runs several times with ragged
    ends; and the lift, which a CPU would pass over (what it runs instead: test_logistic_form.py).
    """
    with layout.tiling(block_q=8, block_k=16, block_b=1), lift_anywhere():
        yield


BACKENDS = {
    "reference": Backend("reference"),
    "blockwise": Backend("blockwise", small_tiles),
}

# The same loops without the lift being forced: what this device runs of its own accord.
AS_RUN = {
    "blockwise as run": Backend(
        "blockwise", partial(layout.tiling, block_q=8, block_k=16, block_b=1)
    )
}


@contextlib.contextmanager
def interpreted_kernels(blocks=Blocks(queries=16, keys=32, chunk=16)):
    """The Pallas kernels on a CPU, in small tiles, and the lift as above. In 64 bits JAX's
    interpreter cannot store: it mixes indices of 32 and of 64.
    """
    with jax.enable_x64(False), interpreted(), forced_blocks(blocks), lift_anywhere():
        yield


# Backends that take some requests only; which, and on what, their own test files say.
CHOOSY = {
    "cudnn": Backend("cudnn"),
    "pallas": Backend("pallas", lift_anywhere),
    "pallas, interpreted": Backend("pallas", interpreted_kernels),
    # Exact additive scores, tile by tile however few they are; and held all at once.
    "pallas in tiles": Backend("pallas", partial(forced_blocks, Blocks(64, 64, warps=4, stages=2))),
    "pallas, short, interpreted": Backend("pallas", partial(interpreted_kernels, blocks=None)),
}

# ---------------------------------------------------------------------------------------------
# Scores: the class here, the class in the oracle, the widths, the parameters.


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Manhattan(regard.Score):
    """-rate . |q - k|: a score that the library does not have and cannot lift, as a user writes it.

    Numbers of 16 bits are often equal: the slope there is 0, as in the oracle; of jnp.abs it is 1.
    """

    rate: Any

    def scores(self, query, key):
        wide = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
        query, key, rate = (x.astype(wide) for x in (query, key, self.rate))
        apart = query[..., :, None, :] - key[..., None, :, :]  # [..., T, S, D]
        apart = apart * jnp.sign(apart)
        return -jnp.einsum("...d,d->...", apart, rate)


class ScoreRow(NamedTuple):
    make: Callable  # keywords: the parameters
    oracle: Callable  # one argument: the dict of parameters
    widths: tuple[int, int]
    draw: Callable  # (normal(*shape), N) -> the dict of parameters
    approximate: bool = False  # the lift is within a tolerance, not exact
    read: Callable = getattr  # (score, name of a parameter) -> the parameter


def _additive(normal, *head):
    # Unit-variance pre-activations from unit-variance inputs, and scores of order one.
    return {
        "query_kernel": normal(*head, 5, 6) / np.sqrt(5),
        "key_kernel": normal(*head, 7, 6) / np.sqrt(7),
        "vector": normal(*head, 6) / np.sqrt(6) * 2,
    }


exact_additive = partial(regard.Additive, tolerance="exact")
projected_additive = partial(regard.Additive, None, None)


SINGLE_SCORES = {
    "dot": ScoreRow(regard.Dot, oracle.Dot, (8, 8), lambda normal, N: {}),
    "scaled dot": ScoreRow(
        regard.Dot, oracle.Dot, (8, 8), lambda normal, N: {"scale": np.float64(0.4)}
    ),
    "gaussian": ScoreRow(
        regard.Gaussian, oracle.Gaussian, (6, 6), lambda normal, N: {"width": np.float64(1.3)}
    ),
    "gaussian per head": ScoreRow(
        regard.Gaussian,
        oracle.Gaussian,
        (6, 6),
        lambda normal, N: {"width": np.linspace(0.8, 2.0, N)},
    ),
    "bilinear": ScoreRow(
        regard.Bilinear, oracle.Bilinear, (5, 7), lambda normal, N: {"kernel": normal(5, 7) / 5}
    ),
    "bilinear per head": ScoreRow(
        regard.Bilinear, oracle.Bilinear, (7, 5), lambda normal, N: {"kernel": normal(N, 7, 5) / 5}
    ),
    "additive": ScoreRow(
        regard.Additive, oracle.Additive, (5, 7), lambda normal, N: _additive(normal), True
    ),
    "additive per head": ScoreRow(
        regard.Additive, oracle.Additive, (5, 7), lambda normal, N: _additive(normal, N), True
    ),
    "additive, projected": ScoreRow(
        projected_additive, oracle.Additive, (6, 6), lambda normal, N: {"vector": normal(6)}, True
    ),
    "additive, exact": ScoreRow(
        exact_additive, oracle.Additive, (5, 7), lambda normal, N: _additive(normal)
    ),
    "a user's own": ScoreRow(
        Manhattan, oracle.Manhattan, (5, 5), lambda normal, N: {"rate": normal(5) ** 2 / 2}
    ),
}


def summed(*terms):
    """The row of Σ_i c_i a_i, from (row, None, "one" or "per head") each: what c_i is, None for 1.

    Parameters are named as in oracle.Sum.
    """
    rows, kinds = zip(*terms, strict=True)

    def make(**parameters):
        made = []
        for i, row in enumerate(rows):
            start = f"{i} "
            own = {n.removeprefix(start): x for n, x in parameters.items() if n.startswith(start)}
            term = row.make(**own)
            made.append(term if kinds[i] is None else parameters[str(i)] * term)
        return functools.reduce(operator.add, made)

    def draw(normal, N):
        found = {}
        for i, row in enumerate(rows):
            found |= {f"{i} {name}": x for name, x in row.draw(normal, N).items()}
            if kinds[i] is not None:
                factors = np.linspace(0.7, -0.4, N)
                found[str(i)] = factors if kinds[i] == "per head" else factors[0]
        return found

    def read(score, name):
        i, *own = name.split(" ", 1)
        term = score.terms[int(i)]
        if not own:
            return term.factor
        return rows[int(i)].read(term if kinds[int(i)] is None else term.score, own[0])

    oracles, approximate = [row.oracle for row in rows], any(row.approximate for row in rows)
    return ScoreRow(make, partial(oracle.Sum, oracles), rows[0].widths, draw, approximate, read)


ALIBI = ScoreRow(
    regard.Alibi, oracle.Alibi, (8, 8), lambda normal, N: {"slopes": np.linspace(0.1, 0.5, N)}
)
RELATIVE = ScoreRow(
    regard.RelativeBias, oracle.RelativeBias, (8, 8), lambda normal, N: {"table": normal(N, 9)}
)
TWO_SIDED = ScoreRow(
    partial(regard.Alibi, two_sided=True), oracle.TwoSidedAlibi, (6, 6), ALIBI.draw
)


def _row(name, widths):
    """A row of the table above for inputs of these widths."""
    return SINGLE_SCORES[name]._replace(widths=widths)


SCORES = SINGLE_SCORES | {
    "dot + gaussian": summed(
        (_row("scaled dot", (6, 6)), None), (SINGLE_SCORES["gaussian"], "one")
    ),
    "bilinear + c additive": summed(
        (SINGLE_SCORES["bilinear"], None), (SINGLE_SCORES["additive"], "one")
    ),
    "dot + alibi per head": summed((_row("dot", (8, 8)), None), (ALIBI, None)),
    "dot + c relative bias per head": summed((_row("dot", (8, 8)), None), (RELATIVE, "one")),
    "gaussian + two-sided alibi per head": summed(
        (SINGLE_SCORES["gaussian"], None), (TWO_SIDED, None)
    ),
    "rotary gaussian, half rotated": ScoreRow(
        lambda **parameters: regard.Rotary(regard.Gaussian(**parameters), 100.0, 0.5),
        lambda parameters: oracle.Rotary(oracle.Gaussian, parameters, 0.5, base=100.0),
        (8, 8),
        lambda normal, N: {"width": np.float64(2.5)},
        read=lambda score, name: getattr(score.inner, name),
    ),
    "rotary dot": ScoreRow(
        lambda: regard.Rotary(interleaved=True),
        lambda parameters: oracle.Rotary(oracle.Dot, parameters, interleaved=True),
        (8, 8),
        lambda normal, N: {},
    ),
    "dot + c gaussian per head + a user's own": summed(
        (_row("dot", (5, 5)), None),
        (_row("gaussian per head", (5, 5)), "per head"),
        (SINGLE_SCORES["a user's own"], None),
    ),
}

# ---------------------------------------------------------------------------------------------
# Regimes: the normalizer here and in the oracle.


class RegimeRow(NamedTuple):
    normalize: Any
    oracle: Any


def _softplus(a):
    return np.logaddexp(0.0, a)


def _sigmoid(a):
    return 1 / (1 + np.exp(-a))


def _epanechnikov(a):  # f of a score, with compact support: some rows see no key inside it
    return np.maximum(0.0, 1.0 - a**2)


def _epanechnikov_slope(a):
    return np.where(np.abs(a) < 1, -2 * a, 0.0)


REGIMES = {
    "softmax": RegimeRow(regard.Softmax(), oracle.Softmax()),
    "sparsemax": RegimeRow(regard.Sparsemax(), oracle.Sparsemax()),
    "kernel": RegimeRow(regard.Kernel(jax.nn.softplus), oracle.Kernel(_softplus, _sigmoid)),
    "compact kernel": RegimeRow(
        regard.Kernel(lambda a: jnp.maximum(jnp.zeros_like(a), 1 - a * a)),
        oracle.Kernel(_epanechnikov, _epanechnikov_slope),
    ),
    "cone": RegimeRow(regard.Cone(jax.nn.softplus), oracle.Cone(_softplus, _sigmoid)),
    "hard": RegimeRow(regard.Hard(), oracle.Hard()),
    "hard, straight through": RegimeRow(
        regard.Hard(straight_through=True), oracle.Hard(straight_through=True)
    ),
    "uniform": RegimeRow(regard.Uniform(), oracle.Uniform()),
}

# ---------------------------------------------------------------------------------------------
# Masks: what the oracle's `allowed` takes; problem.py builds the library's arguments from it.
# Each is drawn for rank 4. "as_mask" hands the lengths over as Mask.lengths instead of valid_lens.

MASKS = {
    "none": lambda rng, B, N, T, S: {},
    "one length": lambda rng, B, N, T, S: {"valid_lens": np.int32(S - S // 3)},
    "lengths per example": lambda rng, B, N, T, S: {"valid_lens": _lens(rng, S, B)},
    "lengths per query": lambda rng, B, N, T, S: {"valid_lens": _lens(rng, S, B, T)},
    "lengths per head": lambda rng, B, N, T, S: {"valid_lens": _lens(rng, S, B, N, T)},
    "no keys at all": lambda rng, B, N, T, S: {"valid_lens": np.zeros(B, np.int32)},
    "lengths out of range": lambda rng, B, N, T, S: {
        "valid_lens": np.resize([-3, S + 5], B).astype(np.int64)
    },
    "causal": lambda rng, B, N, T, S: {"causal": "end"},
    "causal from the start": lambda rng, B, N, T, S: {"causal": "start"},
    "window": lambda rng, B, N, T, S: {"window": (3, 2, "end")},
    "window from the start": lambda rng, B, N, T, S: {"window": (5, 1, "start")},
    "window to the left": lambda rng, B, N, T, S: {"window": (4, None, "end")},
    "window to the right": lambda rng, B, N, T, S: {"window": (None, 7, "start")},
    "segments": lambda rng, B, N, T, S: {"segments": (_segments(rng, B, T), _segments(rng, B, S))},
    "shared segments": lambda rng, B, N, T, S: {"segments": (_segments(rng, T), _segments(rng, S))},
    "boolean": lambda rng, B, N, T, S: {"boolean": rng.random((B, N, T, S)) < 0.5},
    "shared boolean": lambda rng, B, N, T, S: {"boolean": rng.random((T, S)) < 0.3},
    "boolean with an empty row": lambda rng, B, N, T, S: {
        "boolean": _lonely(rng.random((B, N, T, S)) < 0.5)
    },
    "segments without partners": lambda rng, B, N, T, S: {
        "segments": (_segments(rng, B, T) + 1, _segments(rng, B, S))  # keys of 0, queries of 3
    },
    "masked only by both": lambda rng, B, N, T, S: {"causal": "end", "boolean": _against(T, S)},
    "causal and lengths": lambda rng, B, N, T, S: {
        "causal": "end",
        "valid_lens": _lens(rng, S, B),
        "as_mask": True,
    },
    "causal window and lengths per query": lambda rng, B, N, T, S: {
        "causal": "end",
        "window": (9, None, "end"),
        "valid_lens": _lens(rng, S, B, T),
    },
    "everything": lambda rng, B, N, T, S: {
        "causal": "start",
        "window": (20, 3, "start"),
        "segments": (_segments(rng, B, T), _segments(rng, B, S)),
        "boolean": rng.random((B, 1, T, S)) < 0.8,
        "valid_lens": _lens(rng, S, B),
    },
}


def _lens(rng, S, *shape):
    """Lengths from 0 to about 3/4 of S: padding everywhere, the first example (or query) empty."""
    lens = rng.integers(0, max(1, S - S // 4), shape).astype(np.int32)
    if len(shape) == 1:
        lens[1:] = np.maximum(lens[1:], min(S, 2))
        lens[:1] = 0
    else:
        lens[..., :1] = 0
    return lens


def _lonely(table):
    """A query that sees no key, and a key that no query sees."""
    table[..., 1, :] = table[..., :, 2] = False
    return table


def _against(T, S):
    """A table that masks the last keys for the only queries that a causal mask leaves them to, and
    for the first query all its causal keys: no row is empty and no key unseen by one mask alone.
    """
    t, s = np.arange(T)[:, None], np.arange(S)[None, :]
    return ~((t >= T - 5) & (s >= S - 5)) & ~((t == 0) & (s <= S - T))


def _segments(rng, *shape):
    return np.sort(rng.integers(0, 3, shape), axis=-1).astype(np.int32)


# ---------------------------------------------------------------------------------------------
# Dtypes, and what they allow. Errors are relative, in norm, against the oracle on the same
# (already rounded) inputs. Half precisions are dominated by the rounding of what is stored, eps/2;
# float32 and float64 by some tens of rounded operations, in both passes.


class Tolerance(NamedTuple):
    forward: float
    gradient: float


def _tolerance(dtype, forward, gradient):
    eps = float(ml_dtypes.finfo(dtype).eps)
    return Tolerance(forward * eps, gradient * eps)


DTYPES = {
    "float16": _tolerance(np.float16, 0.5, 1.0),
    "bfloat16": _tolerance(ml_dtypes.bfloat16, 0.5, 1.0),
    "float32": _tolerance(np.float32, 16, 64),  # 1.9e-6 and 7.6e-6
    "float64": _tolerance(np.float64, 16, 64),
}

# ---------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """B=None: rank 2; N=None: rank 3. T = 19 and S = 37 leave ragged ends in tiles of 8 and 16."""

    B: int | None = 2
    T: int = 19
    N: int | None = 4
    K: int | None = 2
    S: int = 37
    V: int = 5


@dataclass(frozen=True)
class Case:
    """One line of each table."""

    backend: str = "reference"
    score: str = "dot"
    regime: str = "softmax"
    mask: str = "lengths per example"
    dtype: str = "float32"  # or "query, key, value", three of them
    sizes: Sizes = field(default_factory=Sizes)
    bias: tuple[int, ...] | None = None
    softcap: float | None = None
    sink: bool = False
    seed: int = 0

    def __str__(self):
        plain = Case()
        said = [self.backend]
        for name in ("score", "regime", "mask", "dtype"):
            if getattr(self, name) != getattr(plain, name):
                said.append(getattr(self, name))
        if self.sizes != plain.sizes:
            said.append(
                " ".join(
                    f"{k}={v}"
                    for k, v in self.sizes._asdict().items()
                    if v != getattr(plain.sizes, k)
                )
            )
        if self.bias is not None:
            said.append(f"bias {list(self.bias)}")
        if self.softcap is not None:
            said.append(f"softcap {self.softcap}")
        if self.sink:
            said.append("sink")
        return ", ".join(said)


def tiered(cases):
    """The cases as pytest's parameters; those of `make test-all` alone are marked slow.

    `make test` keeps as few cases as have every row of every table: each score, regime, mask,
    dtype, size and shape of bias is in one. Backends are assigned to them cyclically.
    """
    cases, groups = list(cases), {}
    for case in cases:
        groups.setdefault(replace(case, backend=""), []).append(case)
    rows = {plain: {(name, str(row)) for name, row in vars(plain).items()} for plain in groups}
    order, missing, kept = list(BACKENDS), set().union(*rows.values()), []
    while missing:
        plain = max(rows, key=lambda plain: len(rows[plain] & missing))  # the first of equals
        missing -= rows[plain]
        of_backend = {case.backend: case for case in groups[plain]}
        backend = order[len(kept) % len(order)]
        kept.append(of_backend.get(backend, groups[plain][0]))
    slow = set(cases) - set(kept)
    return [
        pytest.param(case, marks=pytest.mark.slow if case in slow else (), id=str(case))
        for case in cases
    ]


def on_every_backend(cases):
    """Each case on each backend, without repetition, in an order that keeps a case's backends
    together.
    """
    return list(
        dict.fromkeys(replace(case, backend=backend) for case in cases for backend in BACKENDS)
    )
