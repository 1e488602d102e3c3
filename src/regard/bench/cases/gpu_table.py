"""The named problems of the GPU benchmark: bfloat16, sized for one data-center card.

The case itself is in cases.py. Design section 7 and the table of promises (gpu_targets.py) say
why each of these is here.
"""

from typing import Any

from regard.bench.cases.case import Case, ScoreKind

SWEEP_LENGTHS = tuple(2**power for power in range(10, 18))  # 1k to 128k
LONG = 32768  # from here on a run is long enough to be its own average
LINEAR_LENGTHS = (8192, 16384)  # the exact kernel's memory is compared at these

ADDITIVE_PEERS = ("book",)
JAX_PEERS = ("jax.nn", "jax.nn cudnn")
TORCH_PEERS = ("torch", "flex")

BACKWARD: dict[str, Any] = {"direction": "forward+backward"}


def _case(name: str, score: ScoreKind, B: int, length: int, width: int, **more: Any) -> Case:
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


def _additive() -> list[Case]:
    """Additive attention at three tolerances, both directions, and with many hidden units."""

    def case(suffix: str, width: int = 64, **more: Any) -> Case:
        more |= {"against": ADDITIVE_PEERS}
        return _case(f"additive{suffix}", "additive", 8, 4096, width, **more)

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
        _case(
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


def _heads() -> list[Case]:
    """Sixteen heads: every score at width 128, every mask at width 64, dot products at both."""

    def both(name: str, width: int, against: tuple[str, ...], **more: Any) -> list[Case]:
        return [
            _case(f"{name}_{width}", "dot", 4, 4096, width, N=16, group=f"heads_{width}",
                  against=against, **more),
            _case(f"{name}_{width}_backward", "dot", 4, 4096, width, N=16,
                  group=f"heads_{width}_backward", against=against, **BACKWARD, **more),
        ]  # fmt: skip

    def other(score: ScoreKind) -> Case:
        return _case(f"{score}_128", score, 4, 4096, 128, N=16, group="heads_128")

    everybody = JAX_PEERS + TORCH_PEERS
    return [
        *both("dot", 128, everybody),
        *both("causal", 128, everybody, mask="causal"),
        other("gaussian"),
        other("bilinear"),
        *both("dot", 64, (*JAX_PEERS, "torch")),
        *both("causal", 64, (*JAX_PEERS, "torch"), mask="causal"),
        *both("lengths", 64, (*JAX_PEERS, "torch"), mask="lengths"),
        *both("triangular", 64, everybody, mask="triangular"),
    ]


def _other_dots() -> list[Case]:
    """Dot products of other shapes: short ones that a launch outlasts, and long ones."""
    return [
        _case(
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
        return _case(
            name, "features", 8, 4096, width, V=value_width, group=f"kernel{suffix}", **more
        )

    widths = (768, 896, 1024)
    return [
        *(case(width, 64) for width in widths),
        *(case(width, 256) for width in (3072, 3584)),
        *(case(width, 64, "_backward", direction="backward") for width in widths),
    ]


def _sweep() -> list[Case]:
    """Additive attention against length, and a dot product by cuDNN beside it for scale."""
    cases = []
    for length in SWEEP_LENGTHS:
        for suffix, more in (("", {}), ("_backward", BACKWARD)):
            more = more | {"group": f"sweep_{length}", "rounds": 3 if length >= LONG else 5}
            cases += [
                _case(f"sweep_{length}{suffix}", "additive", 1, length, 64,
                      against=ADDITIVE_PEERS, **more),
                _case(f"sweep_dot_{length}{suffix}", "dot", 1, length, 64, N=1,
                      against=("jax.nn cudnn",), **more),
            ]  # fmt: skip
    return cases


def _linear() -> list[Case]:
    """The exact additive kernel at two lengths, compiled and not run: its memory is linear."""
    return [
        _case(
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
    *_additive(),
    *_errors(),
    *_heads(),
    *_other_dots(),
    *_kernels(),
    *_sweep(),
    *_linear(),
)
