"""attend and weights: check the arguments, then score -> mask -> normalize -> pool.

The checks are in front_door.py; `_pool` and `_weights` below are the pipeline.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array

from regard.explicit import explicit_mesh, lie_as_queries
from regard.front_door import prepare
from regard.mask import Mask, resolve
from regard.normalize import Normalizer, Softmax
from regard.pool.blockwise import blockwise
from regard.pool.choose import Choice
from regard.pool.cudnn import cudnn, skips_padding, static_scale
from regard.pool.layout import forced_tiling
from regard.pool.pallas import Target, pallas
from regard.pool.problem import Problem
from regard.pool.reference import dense_weights, reference, reference_scores
from regard.pool.request import Ring
from regard.pool.ring import ring, ring_of
from regard.pool.tiles import Tiling
from regard.pool.ways import blockwise_weights
from regard.score.additive import LiftPolicy, lift_policy
from regard.score.contract import Score, accumulation_dtype
from regard.score.dot import Dot
from regard.shapes import check, check_scores


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
    mesh: Any = None,
    sequence_axis: str | None = None,
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
        mesh, sequence_axis: shards T and S over this axis of the mesh and pools by ring
            attention, whatever T and S are; for masks by lengths, causal order and windows.
            Without a mesh, the one of jax.set_mesh. Inside your own shard_map over that axis,
            the arrays are the device's shares and masks speak of the whole sequence.
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
    explicit = explicit_mesh(query, key, value)
    if explicit is not None:
        check(query, key, value)
        call = functools.partial(
            attend,
            normalize=normalize,
            dropout_rate=dropout_rate,
            implementation=implementation,
            mesh=mesh,
            sequence_axis=sequence_axis,
            return_weights=return_weights,
            return_lifted=return_lifted,
        )
        arrays = dict(query=query, key=key, value=value, score=score, bias=bias)
        arrays |= dict(valid_lens=valid_lens, mask=mask, dropout_rng=dropout_rng)
        shapes = ("out", *("weights",) * return_weights, *("flag",) * return_lifted)
        return lie_as_queries(explicit, query, key, call, arrays, shapes)
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
        over=ring_of(mesh, sequence_axis),
    )
    settings = _Settings.of(choice, problem)
    out, lifted = _pool(problem, settings)
    if not return_weights and not return_lifted:
        return out
    # A program of its own, so that looking cannot change what is pooled.
    alpha = (_weights(problem, settings),) if return_weights else ()
    return out, *alpha, *((lifted,) if return_lifted else ())


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
    return _weights(problem, _Settings.of(choice, problem))


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
    axes = check_scores(scores)
    allowed = resolve(mask, valid_lens, axes).dense(axes)
    wide = scores.astype(accumulation_dtype(scores.dtype)).reshape(axes.B, axes.N, axes.T, axes.S)
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
    over = ring_of(keywords.pop("mesh", None), keywords.pop("sequence_axis", None))
    found: list[Choice] = []

    def shapes_only(query: Array, key: Array, value: Array, arrays: dict[str, Any]) -> None:
        options = static | arrays
        options |= dict(implementation=implementation, over=over)
        found.append(prepare(query, key, value, **options)[1])

    static = {
        name: keywords.pop(name) for name in ("normalize", "dropout_rate") if name in keywords
    }
    jax.eval_shape(shapes_only, query, key, value, keywords)
    choice = found[0]
    lines = [f"{choice.name} runs: {choice.reason}"]
    lines += [f"not {name}: {reason}" for name, reason in choice.why_not().items()]
    if choice.rules():
        lines += ["rules, of which the first that holds and whose backend can decides:"]
        lines += choice.rules()
    return "\n".join(lines)


@dataclass(frozen=True)
class _Settings:
    """What a trace depends on besides its arguments: part of the jit cache's key."""

    implementation: str
    tiling: Tiling | None
    platform: str
    policy: LiftPolicy
    scale: float | None  # a number among the score's parameters, which inside jit is an array
    target: Target | None  # of the kernels
    skips: bool  # padding: what cuDNN does on its device
    over: Ring | None  # the devices that share the sequence

    @classmethod
    def of(cls, choice: Choice, problem: Problem) -> "_Settings":
        scale = None
        if choice.name in ("cudnn", "pallas"):
            scale = static_scale(problem.score, problem.axes.query_width)
        target = Target.of(choice.request.device) if choice.name == "pallas" else None
        skips = choice.name == "cudnn" and skips_padding(choice.request.device)
        return cls(
            choice.name,
            forced_tiling(),
            jax.default_backend(),
            lift_policy(),
            scale,
            target,
            skips,
            choice.request.over,
        )


@functools.partial(jax.jit, static_argnums=1)
def _pool(problem: Problem, settings: _Settings) -> tuple[Array, Array]:
    """score -> mask -> normalize -> pool. Returns the output and whether the lift ran."""
    axes, value = problem.axes, cast(Array, problem.value)
    lifted = jnp.array(False)
    if axes.empty():
        out = jnp.zeros((axes.B, axes.N, axes.T, axes.V), value.dtype)
    elif settings.implementation == "reference":
        out = reference(problem.hidden()).astype(value.dtype)
    elif settings.implementation == "cudnn":
        out, lifted = cudnn(problem, settings.scale, settings.skips)
    elif settings.over is not None:
        out, lifted = ring(problem.hidden(), settings.over, settings.tiling, settings.platform)
    elif settings.target is not None:
        out, lifted = pallas(problem, settings.target, settings.scale)
    else:
        out, lifted = blockwise(problem.hidden(), settings.tiling, settings.platform)
    return axes.callers(out), lifted


@functools.partial(jax.jit, static_argnums=1)
def _weights(problem: Problem, settings: _Settings) -> Array:
    """score -> mask -> normalize, dense; scores as `_pool` makes them, lifted where it lifts."""
    axes, problem = problem.axes, problem.hidden()
    if axes.empty():
        alpha = jnp.zeros((axes.B, axes.N, axes.T, axes.S), jnp.float32)
    elif settings.implementation == "reference":
        alpha = dense_weights(problem, reference_scores(problem))
    else:
        alpha = blockwise_weights(problem)
    return axes.callers_pairs(alpha)
