"""The front door: checks every argument once, and brings the arrays to canonical axes.

Whatever passes here is well formed, and nothing behind it checks again. Each refusal says the
rule, what arrived with every shape, and the fix.
"""

from collections.abc import Sequence
from typing import cast

import jax.numpy as jnp
from jax import Array

from regard.dropout import seed_words
from regard.mask import Mask, MaskFacts, resolve
from regard.normalize import Normalizer, Softmax
from regard.pool.choose import Choice, choose
from regard.pool.inside import resolve_share, whole_axes
from regard.pool.problem import Problem
from regard.pool.request import Request, Ring, device_of
from regard.score.contract import Score, promote
from regard.score.dot import Dot
from regard.shapes import Axes, check


def prepare(
    query: Array,
    key: Array,
    value: Array | None,
    *,
    score: Score = Dot(),
    valid_lens: Array | None = None,
    mask: Mask | Array | None = None,
    bias: Array | None = None,
    normalize: Normalizer = Softmax(),
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    implementation: str | Sequence[str] | None = None,
    over: Ring | None = None,
) -> tuple[Problem, Choice]:
    """A checked problem, and the backend chosen for it; arguments as in `regard.attend`."""
    query, key = jnp.asarray(query), jnp.asarray(key)
    value = None if value is None else jnp.asarray(value)
    axes = check(query, key, value)
    _check_parts(score, normalize, axes, query, key)
    if over is not None and over.inside:
        allowed, visible, seeing = resolve_share(mask, valid_lens, axes, over)
    else:
        allowed = resolve(mask, valid_lens, axes)
        visible, seeing = allowed.visible_keys(axes), allowed.seeing_queries(axes)
    bias = None if bias is None else _canonical_bias(jnp.asarray(bias), axes)
    seed = _seed(dropout_rate, dropout_rng)
    dtype = promote(query.dtype, key.dtype)
    request = Request(
        whole_axes(axes, over),
        score,
        normalize,
        dtype,
        dropout=seed is not None,
        value_dtype=None if value is None else value.dtype,
        bias=bias is not None,
        mask=cast(MaskFacts, allowed.facts),
        device=device_of(query, key, value, allowed, bias, score),
        over=over,
    )
    choice = choose(request, implementation)
    query, key = axes.canonical(query.astype(dtype)), axes.canonical(key.astype(dtype))
    value = None if value is None else axes.canonical(value)
    visible = _per_key_head(visible, axes)
    seeing = None if axes.empty() else seeing
    problem = Problem(
        query,
        key,
        value,
        score,
        allowed,
        visible,
        seeing,
        bias,
        seed,
        normalize,
        float(dropout_rate) if seed is not None else 0.0,
        axes,
    )
    return problem, choice


def _check_parts(score: Score, normalize: Normalizer, axes: Axes, query: Array, key: Array) -> None:
    if not isinstance(score, Score):
        raise TypeError(
            "score must be a regard.Score: Dot(), Gaussian(), Bilinear(kernel), "
            f"Additive(query_kernel, key_kernel, vector), or your own subclass. Got {score!r}."
        )
    if not isinstance(normalize, Normalizer):
        raise TypeError(
            "normalize must be one of Softmax(), Sparsemax(), Kernel(f), Cone(f), Hard(), "
            f"Uniform(). Got {normalize!r}."
        )
    try:
        score.check(axes.query_width, axes.key_width)
    except ValueError as error:
        arrays = f"query {list(query.shape)}, key {list(key.shape)}"
        raise ValueError(f"{error} The arrays: {arrays}.") from None
    per_head = score.head_axes()
    if per_head and (axes.rank != 4 or {shape[0] for shape in per_head.values()} != {axes.N}):
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in per_head.items())
        raise ValueError(
            f"{type(score).__name__}'s parameters may carry a leading axis of N heads, one set per "
            f"head, for inputs of rank 4, (B, T, N, D). Got {listed} for query "
            f"{list(query.shape)}, key {list(key.shape)}. Fix: a first axis of "
            f"{axes.N if axes.rank == 4 else 'no heads'}, or parameters shared by all heads."
        )


def _per_key_head(visible: Array | None, axes: Axes) -> Array | None:
    """[B|1, N|1, S] -> [B, K, S]: what any of the query heads that share a key head may look at."""
    if visible is None or axes.empty():
        return None
    if visible.shape[1] not in (1, axes.K):
        visible = visible.reshape(visible.shape[0], axes.K, -1, axes.S).any(2)
    return jnp.broadcast_to(visible, (axes.B, axes.K, axes.S))


def _canonical_bias(bias: Array, axes: Axes) -> Array:
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(
            f"bias must be floating point: it is added to the scores. Got bias {list(bias.shape)} "
            f"of dtype {bias.dtype}. Fix: bias.astype(jnp.float32), or mask= for a bool."
        )
    return axes.canonical_pairs("bias", bias)


def _seed(rate: float, rng: Array | None) -> Array | None:
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout_rate must be in [0, 1). Got {rate!r}.")
    if rate == 0.0:
        return None
    if rng is None:
        raise ValueError(
            f"dropout_rate {rate} needs dropout_rng. Got None. "
            "Fix: dropout_rng=jax.random.key(seed), or dropout_rate=0.0."
        )
    return seed_words(rng)
