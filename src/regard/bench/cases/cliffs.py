"""Cases beside the benchmark's own: where round 1 was several times slower than plain JAX.

Design section 7 has what was measured then, and what is to be reached.
"""

from typing import Any, Literal, NamedTuple

from regard.bench.cases.case import Case

JAX = ("jax.nn", "jax.nn cudnn")


class Cliff(NamedTuple):
    """A case, forward and with gradients, and its limits in ms on one H200.

    Attributes:
        forward, both: reach; None: not timed in that direction.
    """

    name: str
    score: Literal["dot", "gaussian", "additive"]
    sizes: dict[str, Any]
    forward: float | None
    both: float | None
    against: tuple[str, ...] = JAX
    more: dict[str, Any] = {}  # noqa: RUF012 (read only)


_HEADS = dict(B=2, T=4096, S=4096, N=16, D=64, V=64)
_CACHES = (
    ("", dict(B=8, T=1, S=32768, N=32, K=8, D=128, V=128), 0.28),
    ("_long", dict(B=1, T=1, S=131072, N=32, K=8, D=128, V=128), 0.15),
    ("_short", dict(B=64, T=1, S=2048, N=16, K=16, D=64, V=64), 0.145),
)
CLIFFS = (
    *(
        Cliff(f"one_query{name}", "dot", sizes, reach, None, JAX, dict(mask="full"))
        for name, sizes, reach in _CACHES
    ),
    *(
        Cliff(
            f"one_query{name}_gaussian",
            "gaussian",
            sizes,
            1.15 * reach,
            None,
            (),
            dict(mask="full"),
        )
        for name, sizes, reach in _CACHES
    ),
    Cliff(
        "one_query_additive",
        "additive",
        dict(B=64, T=1, S=4096, D=256, V=256),
        0.10,
        0.35,
        ("book",),
    ),
    Cliff(
        "sentences_additive",
        "additive",
        dict(B=64, T=50, S=50, D=256, V=512),
        0.09,
        0.25,
        ("book",),
    ),
    Cliff(
        "float32_additive",
        "additive",
        dict(B=8, T=2048, S=2048, D=64, V=64),
        1.0,
        5.0,
        ("book",),
        dict(dtype="float32"),
    ),
    Cliff("float32_dot", "dot", _HEADS, 1.0, 3.5, ("jax.nn",), dict(dtype="float32")),
    Cliff("bias", "dot", _HEADS, 0.58, 3.5, JAX, dict(bias=True)),
    Cliff(
        "packed",
        "dot",
        dict(B=2, T=8192, S=8192, N=16, D=64, V=64),
        0.25,
        0.9,
        ("flex",),
        dict(mask="packed"),
    ),
    Cliff("dropout", "dot", _HEADS, 0.64, 2.4, ("torch",), dict(dropout=0.1)),
    Cliff("sparsemax", "dot", _HEADS, 2.5, 6.0, (), dict(normalize="sparsemax")),
    Cliff("hard", "dot", _HEADS, 0.6, 1.5, (), dict(normalize="hard")),
)


def cliff_cases() -> tuple[Case, ...]:
    """Each cliff forward, and with gradients where it has a limit.

    >>> cases = cliff_cases()
    >>> cases[0].name, cases[0].mask
    ('one_query', 'full')
    """
    cases = []
    for cliff in CLIFFS:
        directions = (("", cliff.forward, "forward"), ("_backward", cliff.both, "forward+backward"))
        for suffix, limit, direction in directions:
            if limit is not None:
                options: dict[str, Any] = dict(dtype="bfloat16") | cliff.more
                cases.append(
                    Case(
                        cliff.name + suffix,
                        cliff.score,
                        **cliff.sizes,
                        direction=direction,  # type: ignore[arg-type]
                        device="gpu",
                        group=cliff.name + suffix,
                        against=cliff.against,
                        rounds=5,
                        seconds=1.0,
                        **options,
                    )
                )
    return tuple(cases)
