"""The named problems of the CPU benchmark: float32, sized for two cores.

The case itself is in cases.py, the GPU's table in gpu_table.py.
"""

from typing import Literal

from regard.bench.cases.case import Case

SWEEP_LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
BOOK_SWEEP_LENGTHS = SWEEP_LENGTHS[:5]  # at 8192 the book's (T, S, h) tensor takes 16 GiB


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
CPU_CASES = (
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
