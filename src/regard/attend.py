"""attend and weights: check the shapes, then score -> mask -> normalize -> pool.

`prepare` is the front door: whatever passes it is well formed, and nothing behind it checks
again. `_run` is the pipeline.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from regard import shapes
from regard.dropout import seed_words
from regard.mask import Mask, resolve
from regard.normalize import Normalizer, Softmax
from regard.pool.blockwise import blockwise, forced_tiling, guarded, score_or_lift
from regard.pool.choose import Choice, Request, choose
from regard.pool.problem import Problem, hide_padding
from regard.pool.reference import dense_weights, pool_dense, reference_scores
from regard.score.additive import is_guarded
from regard.score.contract import Score, accumulation_dtype, promote, repeat_heads
from regard.score.dot import Dot
from regard.shapes import Axes


def attend(
    query: Array,
    key: Array,
    value: Array,
    *,
    score: Score = Dot(),
    valid_lens: Array | None = None,
    mask: Mask | Array | None = None,
    bias: Array | None = None,
    normalize: Normalizer = Softmax(),
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    implementation: str | Sequence[str] | None = None,
    return_weights: bool = False,
    return_lifted: bool = False,
) -> Any:
    """Attention pooling: out_t = sum_s alpha(q_t, k_s) v_s.

    The weights alpha come from a score a(q, k), a mask, and a normalizer (the weight regime).
    A query that may look at nothing gets weights 0, output 0 and gradient 0, never NaN; NaN
    and Inf in keys and values that nobody may look at reach nothing.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> keys = jnp.array([[[1.0, 0.0], [0.0, 1.0], [9.0, 9.0]]])  # [B, S, D]
        >>> values = jnp.array([[[10.0], [20.0], [999.0]]])
        >>> query = jnp.array([[[5.0, 0.0]]])
        >>> out = regard.attend(query, keys, values, valid_lens=jnp.array([2]))
        >>> out.round(2).tolist()
        [[[10.28...]]]

    Args:
        query: (T, Hq), (B, T, Hq) or (B, T, N, Hq).
        key: (S, Hk), (B, S, Hk) or (B, S, K, Hk); K divides N (grouped queries).
        value: (S, V), (B, S, V) or (B, S, K, V).
        score: Dot, Gaussian, Bilinear, Additive, or your own Score.
        valid_lens: integers (), (B,), (B, T) or (B, N, T); (T,) for rank 2. Keys s < valid_lens
            take part; clipped to [0, S].
        mask: a Mask, or bool broadcastable to the weights; True takes part.
        bias: added to the scores, broadcastable to the weights, differentiable.
        normalize: Softmax, Sparsemax, Hard, Uniform, Kernel(f) or Cone(f).
        dropout_rate: inverted dropout on the weights, in [0, 1).
        dropout_rng: a JAX key; needed when dropout_rate > 0.
        implementation: None picks; "reference", "blockwise", "cudnn", "pallas", or a sequence of
            them in order of preference. `explain` tells which and why.
        return_weights: also return the weights, (T, S), (B, T, S) or (B, N, T, S), before
            dropout. Looking never changes the output.
        return_lifted: also return a bool scalar: whether the score's lift ran (True) or its
            definition (False), which for Additive is decided on the data.

    Returns:
        The output, (T, V), (B, T, V) or (B, T, N, V), in the value's dtype; a tuple with the
        weights and the flag appended where asked for.

    Raises:
        ValueError, TypeError: the rule, every array with its shape, the fix.
        NotImplementedError: a named implementation cannot do this; the message says what.
    """
    problem, choice = prepare(
        query,
        key,
        value,
        score=score,
        valid_lens=valid_lens,
        mask=mask,
        bias=bias,
        normalize=normalize,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        implementation=implementation,
    )
    out, alpha, lifted = _run(problem, *_settings(choice), True, return_weights)
    asked = [out] + [alpha] * return_weights + [lifted] * return_lifted
    return asked[0] if len(asked) == 1 else tuple(asked)


def weights(
    query: Array,
    key: Array,
    *,
    score: Score = Dot(),
    valid_lens: Array | None = None,
    mask: Mask | Array | None = None,
    bias: Array | None = None,
    normalize: Normalizer = Softmax(),
    implementation: str | Sequence[str] | None = None,
) -> Array:
    """The weights alpha(q, k) that `attend` pools with, as a dense array.

    Scores come by the same path as in `attend` (lifted or not), so these are the weights it
    used, up to rounding. For lengths whose T×S does not fit, see `summarize` and
    `attention_map`.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> x = jnp.zeros((2, 1))
        >>> regard.weights(x, x, mask=regard.Mask.causal()).tolist()
        [[1.0, 0.0], [0.5, 0.5]]

    Returns:
        (T, S), (B, T, S) or (B, N, T, S), float32 or wider.
    """
    problem, choice = prepare(
        query,
        key,
        None,
        score=score,
        valid_lens=valid_lens,
        mask=mask,
        bias=bias,
        normalize=normalize,
        implementation=implementation,
    )
    return _run(problem, *_settings(choice), False, True)[1]


def scores(query: Array, key: Array, *, score: Score = Dot()) -> Array:
    """a(q, k) by its definition: no lift, no mask.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> regard.scores(jnp.ones((1, 4)), jnp.ones((2, 4))).tolist()
        [[2.0, 2.0]]

    Returns:
        (T, S), (B, T, S) or (B, N, T, S), float32 or wider.
    """
    problem, _ = prepare(query, key, None, score=score)
    return problem.axes.callers_pairs(jax.jit(reference_scores)(problem))


def masked_softmax(
    scores: Array, valid_lens: Array | None = None, mask: Mask | Array | None = None
) -> Array:
    """Softmax over the keys that take part; a row without any is 0, never NaN.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> x = jnp.zeros((2, 2, 4))
        >>> regard.masked_softmax(x, jnp.array([2, 0]))[:, 0].tolist()
        [[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]

    Args:
        scores: (T, S), (B, T, S) or (B, N, T, S).
        valid_lens: as in `attend`.
        mask: as in `attend`.

    Returns:
        The weights, in the scores' shape and dtype; the softmax itself is float32 or wider.
    """
    scores = jnp.asarray(scores)
    axes = shapes.check_scores(scores)
    allowed = resolve(mask, valid_lens, axes).dense(axes)
    wide = scores.astype(accumulation_dtype(scores.dtype)).reshape(
        axes.B, axes.N, axes.T, axes.S
    )
    if allowed is not None:
        allowed = jnp.broadcast_to(allowed, wide.shape)
        wide = jnp.where(allowed, wide, -jnp.inf)
    return Softmax()(wide, allowed).reshape(scores.shape).astype(scores.dtype)


def explain(query: Array, key: Array, value: Array, **keywords: Any) -> str:
    """Which implementation `attend` would run for these arguments, and why not the others.

    Takes what `attend` takes; arrays may be jax.ShapeDtypeStruct.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> x = jnp.zeros((2, 8, 4))
        >>> print(regard.explain(x, x, x).splitlines()[0])
        reference runs: 128 weights, at most 131,072: dense
    """
    for flag in ("return_weights", "return_lifted"):
        keywords.pop(flag, None)
    implementation = keywords.pop("implementation", None)
    found: list[Choice] = []

    def shapes_only(query: Array, key: Array, value: Array, arrays: dict[str, Any]) -> None:
        options = static | arrays
        found.append(prepare(query, key, value, **options, implementation=implementation)[1])

    static = {
        name: keywords.pop(name)
        for name in ("normalize", "dropout_rate")
        if name in keywords
    }
    jax.eval_shape(shapes_only, query, key, value, keywords)
    choice = found[0]
    lines = [f"{choice.name} runs: {choice.reason}"]
    lines += [f"not {name}: {reason}" for name, reason in choice.refusals.items()]
    return "\n".join(lines)


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
) -> tuple[Problem, Choice]:
    """The front door: checks everything, and brings it to canonical axes."""
    query, key = jnp.asarray(query), jnp.asarray(key)
    value = None if value is None else jnp.asarray(value)
    axes = shapes.check(query, key, value)
    _check_parts(score, normalize, axes, query, key)
    allowed = resolve(mask, valid_lens, axes)
    bias = None if bias is None else _canonical_bias(jnp.asarray(bias), axes)
    seed = _seed(dropout_rate, dropout_rng)
    dtype = promote(query.dtype, key.dtype)
    choice = choose(Request(axes, score, normalize, dtype, seed is not None), implementation)
    query, key = axes.canonical(query.astype(dtype)), axes.canonical(key.astype(dtype))
    value = None if value is None else axes.canonical(value)
    query, key, value, visible = hide_padding(query, key, value, allowed, axes)
    problem = Problem(
        query,
        key,
        value,
        score,
        allowed,
        visible,
        bias,
        seed,
        normalize,
        float(dropout_rate) if seed is not None else 0.0,
        axes,
    )
    return problem, choice


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5, 6))
def _run(
    problem: Problem,
    name: str,
    tiling: Any,
    platform: str,
    guard: bool,
    want_out: bool,
    want_weights: bool,
) -> tuple[Array | None, Array | None, Array]:
    """score -> mask -> normalize -> pool. Returns output, weights and whether the lift ran."""
    axes, out, alpha = problem.axes, None, None
    if 0 in (axes.B, axes.T, axes.S, axes.N):  # nothing to look at, or nobody to look
        out = jnp.zeros((axes.B, axes.N, axes.T, axes.V), _value_dtype(problem))
        alpha = jnp.zeros((axes.B, axes.N, axes.T, axes.S), jnp.float32)
        return axes.callers(out), axes.callers_pairs(alpha), jnp.array(False)
    if name == "reference":
        lifted = jnp.array(False)
        alpha = dense_weights(problem, reference_scores(problem))
        if want_out:
            out = pool_dense(problem, alpha).astype(_value_dtype(problem))
    else:
        if want_out:
            out, lifted = blockwise(problem, tiling, platform)
        if want_weights:
            alpha, lifted = _weights_as_pooled(problem)
    return (
        None if out is None else axes.callers(out),
        axes.callers_pairs(alpha) if want_weights else None,
        lifted,
    )


def _weights_as_pooled(problem: Problem) -> tuple[Array, Array]:
    """Dense weights from the scores that blockwise pooling uses: lifted where it lifts."""
    scored, lift = score_or_lift(problem)
    if scored is None:
        shape = (problem.axes.B, problem.axes.N, problem.axes.T, problem.axes.S)
        return dense_weights(problem, jnp.zeros(shape, jnp.float32)), jnp.array(False)
    score, query, key = scored

    def run(lift: Any) -> Array:
        dense = lift.scores() if lift else score.scores(query, repeat_heads(key, query))
        return dense_weights(problem, dense)

    return guarded(lift, run)


def _settings(choice: Choice) -> tuple[str, Any, str, bool]:
    """What a trace depends on besides its arguments: part of the jit cache's key."""
    return choice.name, forced_tiling(), jax.default_backend(), is_guarded()


def _value_dtype(problem: Problem) -> Any:
    return jnp.float32 if problem.value is None else problem.value.dtype


def _check_parts(
    score: Score, normalize: Normalizer, axes: Axes, query: Array, key: Array
) -> None:
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
