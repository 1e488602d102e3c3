"""The sizes of a multi-head attention: defaults filled in, checked, heads grouped by score."""

from collections.abc import Sequence
from typing import Any

from regard.modules.multi_head import Group, MultiHead
from regard.modules.parameters import (
    Fixed,
    Initializer,
    Learned,
    LearnedAdditive,
    LearnedBilinear,
    LearnedGaussian,
    default_bias_init,
    default_kernel_init,
)
from regard.score import Dot, Score

SCORES = ("dot", "gaussian", "bilinear", "additive")


def plan(
    num_heads: int,
    query_features: int | None,
    key_features: int | None = None,
    value_features: int | None = None,
    *,
    qkv_features: int | None = None,
    query_head_features: int | None = None,
    key_head_features: int | None = None,
    value_head_features: int | None = None,
    out_features: int | None = None,
    key_heads: int | None = None,
    score: str | Score | Sequence[str | Score] = "dot",
    hidden_features: int | None = None,
    tolerance: float | str | None = None,
    use_bias: bool = True,
    kernel_init: Initializer = default_kernel_init,
    bias_init: Initializer = default_bias_init,
) -> MultiHead:
    """Fills in the defaults and checks what can be checked before any array is there."""
    key_heads = num_heads if key_heads is None else key_heads
    if num_heads < 1 or key_heads < 1 or num_heads % key_heads:
        raise ValueError(
            f"key_heads must divide num_heads. Got num_heads {num_heads}, key_heads {key_heads}. "
            "Fix: key_heads a divisor of num_heads, or None for one key head a query head."
        )
    if query_head_features is None or value_head_features is None:
        total = query_features if qkv_features is None else qkv_features
        if total is None:
            raise ValueError(
                "the width of a head is not known before the first call. Got no qkv_features, no "
                "query_features, and not both query_head_features and value_head_features. "
                "Fix: give one of them to the constructor."
            )
        if total % num_heads:
            name = "query_features" if qkv_features is None else "qkv_features"
            raise ValueError(
                f"num_heads must divide {name}, which the heads share. Got num_heads {num_heads}, "
                f"{name} {total}. Fix: another head count, or query_head_features and "
                "value_head_features, which are free."
            )
        if query_head_features is None:
            query_head_features = total // num_heads
        if value_head_features is None:
            value_head_features = total // num_heads
    if key_head_features is None:
        key_head_features = query_head_features
    query_features = -1 if query_features is None else query_features  # only a cache is wanted
    key_features = query_features if key_features is None else key_features
    learned = dict(kernel_init=kernel_init, hidden_features=hidden_features, tolerance=tolerance)
    return MultiHead(
        num_heads,
        key_heads,
        query_features,
        key_features,
        key_features if value_features is None else value_features,
        query_head_features,
        key_head_features,
        value_head_features,
        query_features if out_features is None else out_features,
        _groups(score, num_heads, query_head_features, key_head_features, learned),
        use_bias,
        kernel_init,
        bias_init,
    )


def _groups(
    score: str | Score | Sequence[str | Score],
    num_heads: int,
    query_width: int,
    key_width: int,
    learned: dict[str, Any],
) -> tuple[Group, ...]:
    per_head = [score] * num_heads if isinstance(score, str | Score) else list(score)
    if len(per_head) != num_heads:
        raise ValueError(
            f"score must be one for all heads, or one per head. Got {len(per_head)} for num_heads "
            f"{num_heads}: {score!r}."
        )
    together: dict[Any, list[int]] = {}
    for head, one in enumerate(per_head):
        _check_score(one, query_width, key_width, learned["hidden_features"])
        together.setdefault(one, []).append(head)
    groups = []
    for one, heads in together.items():
        name = one if isinstance(one, str) else None
        makes = _learned(one, len(heads), query_width, key_width, learned)
        groups.append(Group(name, tuple(heads), makes))
    return tuple(groups)


def _check_score(score: Any, query_width: int, key_width: int, hidden_features: int | None) -> None:
    if isinstance(score, Score):
        try:
            hash(score)
        except TypeError:
            raise ValueError(
                f"a score given as an object is fixed, so its fields must be numbers, not arrays. "
                f"Got {type(score).__name__} with arrays. Fix: its name, one of {_known()}; the "
                "module then makes the arrays and learns them."
            ) from None
        score.check(query_width, key_width)
    elif score not in SCORES:
        raise ValueError(f"unknown score {score!r}: known are {_known()}, or a regard.Score.")
    elif query_width != key_width and (
        score in ("dot", "gaussian") or (score == "additive" and hidden_features is None)
    ):
        fix = "hidden_features=h" if score == "additive" else 'score="bilinear" or "additive"'
        raise ValueError(
            f'score "{score}" compares queries and keys of one width. Got query_head_features '
            f"{query_width}, key_head_features {key_width}. Fix: equal widths, or {fix}."
        )


def _known() -> str:
    return ", ".join(repr(name) for name in SCORES)


def _learned(
    score: str | Score, heads: int, query_width: int, key_width: int, given: dict[str, Any]
) -> Learned:
    if isinstance(score, Score):
        return Fixed(score)
    if score == "gaussian":
        # exp(-|q-k|²/2w²) with w² = √D weighs q.k by 1/√D, as the scaled dot product does.
        return LearnedGaussian(float(max(query_width, 1)) ** 0.25, heads=heads)
    if score == "bilinear":
        return LearnedBilinear(query_width, key_width, heads=heads)
    if score == "additive":
        return LearnedAdditive(query_width, key_width, heads=heads, **given)
    return Fixed(Dot())
