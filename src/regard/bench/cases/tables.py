"""The named problems of the benchmark: float32 for two CPU cores, bfloat16 for one GPU.

The promises in results/targets.py say why each of them is here.
"""

from typing import Any, Literal

from regard.bench.cases.case import Case, ScoreKind
from regard.bench.cases.cliffs import cliff_cases

CPU_SWEEP_LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
BOOK_SWEEP_LENGTHS = CPU_SWEEP_LENGTHS[:5]  # at 8192 the book's (T, S, h) tensor takes 16 GiB


def _cpu_additive(name: str, B: int, length: int, **more) -> Case:
    return Case(name, "additive", B=B, T=length, S=length, D=64, V=64, **more)


def _cpu_heads(name: str, score: Literal["dot", "gaussian", "bilinear"], **more) -> Case:
    return Case(name, score, B=2, T=1024, S=1024, N=8, D=64, V=64, rounds=10, **more)


def _long(name: str, **more) -> Case:
    return Case(
        name, "dot", B=1, T=4096, S=4096, N=4, D=64, V=64, group="skipping", rounds=5, **more
    )


def _book(suffix: str, **more) -> list[Case]:
    """The book's problem at each tolerance, one group: peers are timed once for all three."""
    return [
        _cpu_additive(
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


def _cpu_sweep() -> list[Case]:
    """Additive attention against length: timed forward, and the memory of training, compiled
    but not run, with valid lengths given."""
    cases = []
    for length in CPU_SWEEP_LENGTHS:
        against = ("book",) if length in BOOK_SWEEP_LENGTHS else ()
        timed = {
            "group": f"sweep_{length}",
            "against": against,
            "rounds": 3 if length <= 4096 else 1,  # long enough to be its own average
            "seconds": 5.0,
        }
        cases += [
            _cpu_additive(f"sweep_{length}", B=1, length=length, **timed),
            _cpu_additive(f"sweep_{length}_1e-3", B=1, length=length, tolerance=1e-3, **timed),
            _cpu_additive(
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
    _cpu_additive(
        "additive_lengths",
        B=4,
        length=512,
        mask="lengths",
        group="additive_lengths",
        against=("book", "keras", "torch"),
    ),
    # 5 % must be told from noise, so many more rounds than elsewhere.
    _cpu_additive(
        "additive_guard",
        B=4,
        length=512,
        group="guard",
        against=("lift", "unguarded"),
        rounds=30,
    ),
    _cpu_heads("dot_heads", "dot", group="heads", against=_DOT_PEERS),
    _cpu_heads("gaussian_heads", "gaussian", group="heads"),
    _cpu_heads("bilinear_heads", "bilinear", group="heads"),
    _cpu_heads(
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
    *_cpu_sweep(),
)


GPU_SWEEP_LENGTHS = tuple(2**power for power in range(10, 18))  # 1k to 128k
LONG = 32768  # from here on a run is long enough to be its own average
LINEAR_LENGTHS = (8192, 16384)  # the exact kernel's memory is compared at these

ADDITIVE_PEERS = ("book",)
JAX_PEERS = ("jax.nn", "jax.nn cudnn")
TORCH_PEERS = ("torch", "flex")

BACKWARD: dict[str, Any] = {"direction": "forward+backward"}


def _gpu_case(name: str, score: ScoreKind, B: int, length: int, width: int, **more: Any) -> Case:
    return Case(
        name,
        score,
        B=B,
        T=length,
        S=length,
        D=width,
        dtype="bfloat16",
        device="gpu",
        **{"V": width, "rounds": 7, "seconds": 3.0} | more,
    )


def _gpu_additive() -> list[Case]:
    """Additive attention at three tolerances, both directions, and with many hidden units."""

    def case(suffix: str, width: int = 64, **more: Any) -> Case:
        more |= {"against": ADDITIVE_PEERS}
        return _gpu_case(f"additive{suffix}", "additive", 8, 4096, width, **more)

    return [
        case("", group="additive"),
        case("_2e-2", tolerance=2e-2, group="additive"),
        case("_exact", tolerance="exact", group="additive"),
        case("_backward", group="additive_backward", **BACKWARD),
        case("_exact_backward", tolerance="exact", group="additive_backward", **BACKWARD),
        case("_256", width=256, group="additive_256"),
    ]


def _errors() -> list[Case]:
    """Additive attention of a length at which more rows are affordable in float64."""
    return [
        _gpu_case(
            f"error_1024{suffix}",
            "additive",
            8,
            1024,
            64,
            tolerance=tolerance,
            group="error_1024",
            against=ADDITIVE_PEERS,
        )
        for suffix, tolerance in (("", None), ("_2e-2", 2e-2), ("_exact", "exact"))
    ]


def _gpu_heads() -> list[Case]:
    """Sixteen heads: every score at width 128, every mask at width 64, dot products at both."""

    def both(name: str, width: int, against: tuple[str, ...], **more: Any) -> list[Case]:
        return [
            _gpu_case(f"{name}_{width}", "dot", 4, 4096, width, N=16, group=f"heads_{width}",
                  against=against, **more),
            _gpu_case(f"{name}_{width}_backward", "dot", 4, 4096, width, N=16,
                  group=f"heads_{width}_backward", against=against, **BACKWARD, **more),
        ]  # fmt: skip

    def other(score: ScoreKind) -> Case:
        return _gpu_case(f"{score}_128", score, 4, 4096, 128, N=16, group="heads_128")

    all_peers = JAX_PEERS + TORCH_PEERS
    return [
        *both("dot", 128, all_peers),
        *both("causal", 128, all_peers, mask="causal"),
        other("gaussian"),
        other("bilinear"),
        *both("dot", 64, (*JAX_PEERS, "torch")),
        *both("causal", 64, (*JAX_PEERS, "torch"), mask="causal"),
        *both("lengths", 64, (*JAX_PEERS, "torch"), mask="lengths"),
        *both("triangular", 64, all_peers, mask="triangular"),
    ]


def _other_dots() -> list[Case]:
    """Dot products of other shapes: short ones that a launch outlasts, and long ones."""
    return [
        _gpu_case(
            f"dot_{name}{suffix}",
            "dot",
            B,
            length,
            width,
            N=8,
            group=f"dot_{name}{suffix}",
            against=(*JAX_PEERS, "torch"),
            **more,
        )
        for name, B, length, width in (("short", 8, 512, 64), ("long", 1, 16384, 128))
        for suffix, more in (("", {}), ("_backward", BACKWARD))
    ]


def _kernels() -> list[Case]:
    """The wide kernel alone, on features of the widths that the additive lift makes."""

    def case(width: int, value_width: int, suffix: str = "", **more: Any) -> Case:
        name = f"kernel_{width}{suffix}"
        return _gpu_case(
            name, "features", 8, 4096, width, V=value_width, group=f"kernel{suffix}", **more
        )

    widths = (768, 896, 1024)
    return [
        *(case(width, 64) for width in widths),
        *(case(width, 256) for width in (3072, 3584)),
        *(case(width, 64, "_backward", direction="backward") for width in widths),
    ]


def _gpu_sweep() -> list[Case]:
    """Additive attention against length, and a dot product by cuDNN beside it for scale."""
    cases = []
    for length in GPU_SWEEP_LENGTHS:
        for suffix, more in (("", {}), ("_backward", BACKWARD)):
            more = more | {"group": f"sweep_{length}", "rounds": 3 if length >= LONG else 5}
            cases += [
                _gpu_case(f"sweep_{length}{suffix}", "additive", 1, length, 64,
                      against=ADDITIVE_PEERS, **more),
                _gpu_case(f"sweep_dot_{length}{suffix}", "dot", 1, length, 64, N=1,
                      against=("jax.nn cudnn",), **more),
            ]  # fmt: skip
    return cases


def _linear() -> list[Case]:
    """The exact additive kernel at two lengths, compiled and not run: its memory is linear."""
    return [
        _gpu_case(
            f"memory_exact_{length}",
            "additive",
            1,
            length,
            64,
            tolerance="exact",
            group="memory",
            timed=False,
            **BACKWARD,
        )
        for length in LINEAR_LENGTHS
    ]


GPU_CASES = (
    *_gpu_additive(),
    *_errors(),
    *_gpu_heads(),
    *_other_dots(),
    *_kernels(),
    *_gpu_sweep(),
    *_linear(),
    *cliff_cases(),
)
