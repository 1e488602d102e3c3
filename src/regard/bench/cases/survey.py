"""The survey: cells of work that no shape was tuned for, drawn by a seed.

A family gives the ranges of its shapes; a cell is one draw of shapes with a score, a dtype, a mask
and a direction. Every cell is a `Case` beside all its peers, checked and timed as any other.
"""

import dataclasses
import itertools
from typing import Any, NamedTuple

import numpy as np

from regard.bench.cases.case import Case, Device, Regime

Range = tuple[int, int]


class Family(NamedTuple):
    """What the shapes of one kind of work are drawn from; on a GPU lengths and batches are longer.

    Attributes:
        B, T: ranges, drawn evenly on a logarithmic scale.
        S: the same; None: as T.
        N: numbers of heads.
        masks: cycled through.
        scores: cycled through; additive cells have no heads, as their peers.
        regimes: cycled through.
        dropout: the rate.
        bias: in every cell; otherwise in one of six.
    """

    B: Range
    T: Range
    S: Range | None
    N: tuple[int, ...]
    masks: tuple[str, ...]
    scores: tuple[str, ...] = ("dot", "dot", "gaussian", "additive", "bilinear")
    regimes: tuple[Regime, ...] = ("softmax",)
    dropout: float = 0.0
    bias: bool = False


FAMILIES = {
    "self-attention": Family((1, 4), (100, 600), None, (2, 4, 8), ("causal", "lengths", "none")),
    "encoder-decoder": Family(
        (2, 16), (20, 200), (20, 300), (1, 4, 8), ("lengths", "boolean", "none")
    ),
    "decode 1": Family((1, 16), (1, 1), (200, 4096), (4, 8, 16), ("lengths", "none")),
    "decode 4": Family((1, 16), (4, 4), (200, 4096), (4, 8, 16), ("lengths", "none")),
    "decode 16": Family((1, 8), (16, 16), (200, 4096), (4, 8, 16), ("none", "lengths")),
    "short": Family((8, 64), (10, 100), None, (2, 4, 8), ("lengths", "none", "boolean")),
    "long": Family((1, 1), (1500, 3000), None, (1, 2, 4), ("none", "causal", "lengths")),
    "packed": Family((1, 4), (256, 1024), None, (2, 4, 8), ("segments",)),
    "regimes": Family(
        (1, 8),
        (20, 400),
        None,
        (2, 4, 8),
        ("lengths", "none", "causal"),
        ("dot", "gaussian", "dot", "additive"),
        regimes=("sparsemax", "hard", "kernel", "cone", "uniform"),
    ),
    "dropout": Family((1, 8), (50, 400), None, (2, 4, 8), ("causal", "lengths"), dropout=0.1),
    "bias": Family((1, 8), (50, 400), None, (2, 4, 8), ("none", "lengths"), bias=True),
}
CELLS = {"cpu": 8, "gpu": 20}  # of each family
LONGER = {"cpu": 1, "gpu": 4}  # lengths, and batches, of a GPU's cells
DTYPES = ("float32", "bfloat16", "float32", "float16")
PEERS = {
    "cpu": ("jax.nn", "book", "torch", "plain"),
    "gpu": ("jax.nn", "jax.nn cudnn", "book", "torch", "flex", "plain"),
}
MOST_TERMS = 3e8  # of an additive cell on a CPU: the book's tensor takes 1.2 GB


def survey(device: Device = "cpu", seed: int = 0) -> tuple[Case, ...]:
    """The cells of a device, one of every family and then the next, should the time run out.

    `group` is "<family>/<number>", so that each is timed by itself.

    >>> cells = survey("cpu")
    >>> len(cells), cells[0].group
    (88, 'self-attention/0')
    """
    rng = np.random.default_rng(seed)
    drawn = [
        [_cell(name, family, number, device, rng) for number in range(CELLS[device])]
        for name, family in FAMILIES.items()
    ]
    return tuple(itertools.chain(*zip(*drawn, strict=True)))


def family_of(group: str) -> str:
    """
    >>> family_of("decode 4/11")
    'decode 4'
    """
    return group.rpartition("/")[0]


def _cell(name: str, family: Family, number: int, device: Device, rng: Any) -> Case:
    def draw(low: int, high: int) -> int:
        high *= LONGER[device] if high > 1 and low != high else 1
        return round(float(np.exp(rng.uniform(np.log(low), np.log(high)))))

    score = family.scores[number % len(family.scores)]
    B, T, N = draw(*family.B), draw(*family.T), int(rng.choice(family.N))
    S = T if family.S is None else draw(*family.S)
    D = int(rng.choice((32, 64, 128)))
    heads: dict[str, Any] = {"N": N}
    if score == "additive":
        heads = {"N": None}
        D = int(rng.choice((32, 64, 256)))
        while device == "cpu" and B * T * S * D > MOST_TERMS:
            D //= 2
    elif name.startswith("decode") and score in ("dot", "bilinear") and number % 2 == 0:
        heads["K"] = N // 4
    backward = number % 3 == 1
    mask = family.masks[number % len(family.masks)]
    mask = "lengths" if score == "additive" and mask == "causal" else mask
    dtype = DTYPES[number // 2 % len(DTYPES)]
    direction = "forward+backward" if backward else "forward"
    words = [name, score, mask, dtype, *(["backward"] if backward else [])]
    case = Case(
        " ".join([*words, str(number)]),
        score,  # type: ignore[arg-type]
        B=B,
        T=T,
        S=S,
        D=D,
        V=D,
        **heads,
        bias=family.bias or (number % 6 == 5 and mask != "causal"),
        normalize=family.regimes[number % len(family.regimes)],
        dropout=family.dropout,
        dtype=dtype,
        mask=mask,  # type: ignore[arg-type]
        direction=direction,  # type: ignore[arg-type]
        device=device,
        group=f"{name}/{number}",
        rounds=5,
        seconds=0.8,
    )
    against = tuple(who for who in PEERS[device] if _takes_part(who, case))
    return dataclasses.replace(case, against=against)


def _takes_part(who: str, case: Case) -> bool:
    """Whether a peer is given a cell: torch's processes spend no time on what they would refuse."""
    if who not in ("torch", "flex"):
        return True
    if case.normalize != "softmax" or case.score not in ("dot", "additive"):
        return False
    plain = case.score == "dot" and not (case.dropout or case.bias or case.K)
    return who == "torch" or (plain and case.mask in ("none", "causal", "lengths"))
