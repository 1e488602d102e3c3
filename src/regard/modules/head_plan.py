"""The sizes of a multi-head attention: defaults filled in, checked, heads grouped by score."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import Array

from regard.modules.head_positions import HeadPositions
from regard.modules.multi_head import Group, MultiHead
from regard.modules.parameters import (
    Fixed,
    Learned,
    LearnedAdditive,
    LearnedBilinear,
    LearnedGaussian,
    LearnedScore,
)
from regard.score import Dot, Score

SCORES = ("dot", "gaussian", "bilinear", "additive")
KNOWN = ", ".join(repr(name) for name in SCORES)


def plan(arguments: Any, inputs: Sequence[Array | None] = (None, None, None)) -> MultiHead:
    """Fills in the defaults and checks what can be checked before any parameter is there.

    Args:
        arguments: a MultiHeadArguments, or a linen module that has its fields.
        inputs: of the first call, in linen: query, key and value, whose widths stand in for those
            that were not given.
    """
    query, key, value = (None if array is None else array.shape[-1] for array in inputs)
    key = query if key is None else key
    value = key if value is None else value
    a = arguments
    in_features = _same("in_features", a.in_features, "query_features", a.query_features)
    key_heads = _same("num_kv_heads", a.num_kv_heads, "key_heads", a.key_heads) or a.num_heads
    query_features = in_features or query
    key_features = a.key_features or a.in_kv_features or key or query_features
    value_features = a.value_features or a.in_kv_features or value or key_features
    if a.num_heads < 1 or key_heads < 1 or a.num_heads % key_heads:
        raise ValueError(
            f"num_kv_heads must divide num_heads. Got num_heads {a.num_heads}, num_kv_heads "
            f"{key_heads}. Fix: num_kv_heads a divisor of num_heads, or None for one key head per "
            "query head."
        )
    query_width, value_width = a.query_head_features, a.value_head_features
    if query_width is None or value_width is None:
        shared = _head_width(a.num_heads, a.qkv_features, query_features)
        query_width = shared if query_width is None else query_width
        value_width = shared if value_width is None else value_width
    key_width = query_width if a.key_head_features is None else a.key_head_features
    positions = HeadPositions(a.positions, a.num_heads)
    positions.check(query_width, key_width)
    return MultiHead(
        a.num_heads,
        key_heads,
        query_features or 0,  # 0: only a cache is wanted
        key_features or 0,
        value_features or 0,
        query_width,
        key_width,
        value_width,
        a.out_features or query_features or 0,
        _groups(a, query_width, key_width),
        a.use_bias,
        a.normalize_qk,
        positions,
        a.kernel_init,
        a.bias_init,
        a.out_kernel_init or a.kernel_init,
        a.out_bias_init or a.bias_init,
    )


def _same(name: str, one: int | None, other_name: str, other: int | None) -> int | None:
    """The one that was given, of two names of one number."""
    if None not in (one, other) and one != other:
        raise ValueError(
            f"{name} and {other_name} are two names of one number. Got {name} {one}, "
            f"{other_name} {other}. Fix: one of the two."
        )
    return other if one is None else one


def _head_width(num_heads: int, qkv_features: int | None, query_features: int | None) -> int:
    total = query_features if qkv_features is None else qkv_features
    if total is None:
        raise ValueError(
            "the width of a head is not known before the first call. Got no qkv_features, no "
            "in_features, and not both query_head_features and value_head_features. "
            "Fix: give one of them to the constructor."
        )
    if total % num_heads:
        name = "in_features" if qkv_features is None else "qkv_features"
        raise ValueError(
            f"num_heads must divide {name}, which the heads share. Got num_heads {num_heads}, "
            f"{name} {total}. Fix: another head count, or query_head_features and "
            "value_head_features, which are free."
        )
    return total // num_heads


def _groups(arguments: Any, query_width: int, key_width: int) -> tuple[Group, ...]:
    score, num_heads = arguments.score, arguments.num_heads
    one_for_all = isinstance(score, str | Score) or callable(score)
    per_head = [score] * num_heads if one_for_all else list(score)
    if len(per_head) != num_heads:
        raise ValueError(
            f"score must be one for all heads, or one per head. Got {len(per_head)} for num_heads "
            f"{num_heads}: {score!r}."
        )
    # Equal scores share a group; a score with arrays, which are not hashable, is equal to itself.
    together: dict[Any, tuple[Any, list[int]]] = {}
    for head, one in enumerate(per_head):
        identity = id(one) if isinstance(one, Score) and _has_arrays(one) else one
        together.setdefault(identity, (one, []))[1].append(head)
    groups: list[Group] = []
    for one, heads in together.values():
        _check_score(one, query_width, key_width, arguments.hidden_features)
        learned = _learned(one, len(heads), query_width, key_width, arguments)
        name = one if isinstance(one, str) else None
        if isinstance(learned, LearnedScore):
            taken = {"query", "key", "value", "out", "relative", *filter(_is_name, per_head)}
            taken |= {group.name for group in groups if group.name is not None}
            numbered = (f"{learned.name}_{count}" for count in range(1, num_heads + len(taken)))
            name = next(free for free in (learned.name, *numbered) if free not in taken)
        groups.append(Group(name, tuple(heads), learned))
    return tuple(groups)


def _is_name(score: Any) -> bool:
    return isinstance(score, str)


def _has_arrays(score: Score) -> bool:
    return any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(score))


def _check_score(score: Any, query_width: int, key_width: int, hidden_features: int | None) -> None:
    if isinstance(score, Score):
        score.check(query_width, key_width)
    elif callable(score):
        return
    elif score not in SCORES:
        raise ValueError(f"unknown score {score!r}: known are {KNOWN}, or a regard.Score.")
    elif query_width != key_width and (
        score in ("dot", "gaussian") or (score == "additive" and hidden_features is None)
    ):
        fix = "hidden_features=h" if score == "additive" else 'score="bilinear" or "additive"'
        raise ValueError(
            f'score "{score}" compares queries and keys of one width. Got query_head_features '
            f"{query_width}, key_head_features {key_width}. Fix: equal widths, or {fix}."
        )


def _learned(score: Any, heads: int, query_width: int, key_width: int, arguments: Any) -> Learned:
    if callable(score) or (isinstance(score, Score) and _has_arrays(score)):
        return LearnedScore.of(score)
    if isinstance(score, Score):
        return Fixed(score)
    if score == "gaussian":
        # exp(-|q-k|²/2w²) with w² = √D weighs q.k by 1/√D, as the scaled dot product does.
        return LearnedGaussian(float(max(query_width, 1)) ** 0.25, heads=heads)
    if score == "bilinear":
        return LearnedBilinear(query_width, key_width, heads=heads)
    if score == "additive":
        return LearnedAdditive(
            query_width,
            key_width,
            arguments.hidden_features,
            tolerance=arguments.tolerance,
            kernel_init=arguments.kernel_init,
            heads=heads,
        )
    return Fixed(Dot())
