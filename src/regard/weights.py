"""What `attend` computes on the way: weights, scores, which implementation runs and why."""

import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array

from regard.attend import Program, Static, arrays_of, positions_of, program_of, weigh, weigh_whole
from regard.front_door import DOT, prepare
from regard.mask import Mask, as_lens, resolve
from regard.memory import Memory
from regard.normalize import Normalizer, Softmax
from regard.placement import device_of, on_device
from regard.pool.backend import Problem, Request
from regard.pool.choose import choose
from regard.score.contract import Score, accumulation_dtype
from regard.score.registration import require_score
from regard.shapes import as_array, check_scores


def weights(
    query: Array,
    key: Array | Memory,
    *,
    score: Score = DOT,
    valid_lens: Array | None = None,
    mask: Mask | Array | None = None,
    bias: Array | None = None,
    normalize: Normalizer = Softmax(),
    query_positions: Array | None = None,
    key_positions: Array | None = None,
    softcap: float | None = None,
    sink: Array | float | None = None,
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
    arrays = arrays_of(dict(query=query, key=key, bias=bias), valid_lens, score)
    arrays |= dict(value=None, mask=mask, sink=sink)
    arrays |= positions_of(query_positions, key_positions)
    options: dict[str, Any] = dict(normalize=normalize, softcap=softcap)
    static = Static.of(implementation, options)
    program = program_of(arrays, static)
    if program is not None:
        return weigh_whole(arrays, static, program)
    problem, request = prepare(**arrays, **options)
    return weigh(problem, Program.of(choose(request, implementation)))


def scores(
    query: Array,
    key: Array | Memory,
    *,
    score: Score = DOT,
    query_positions: Array | None = None,
    key_positions: Array | None = None,
) -> Array:
    """a(q, k) by its definition: no lift, no mask.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> regard.scores(jnp.ones((1, 4)), jnp.ones((2, 4))).tolist()
        [[2.0, 2.0]]

    Returns:
        (T, S), (B, T, S) or (B, N, T, S), float32 or wider.
    """
    places: Any = dict(query_positions=query_positions, key_positions=key_positions)
    problem, request = prepare(query, key, None, score=score, **places)
    return _scores(problem, Program.of(choose(request, "reference")))


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
    lens = None if valid_lens is None else as_lens(valid_lens)
    return _masked_softmax(as_array("scores", scores), lens, mask)


@jax.jit
def _masked_softmax(scores: Array, valid_lens: Array | None, mask: Mask | Array | None) -> Array:
    axes = check_scores(scores)
    allowed = resolve(mask, valid_lens, axes).dense(axes)
    wide = scores.astype(accumulation_dtype(scores.dtype)).reshape(axes.B, axes.N, axes.T, axes.S)
    if allowed is not None:
        allowed = jnp.broadcast_to(allowed, wide.shape)
        wide = jnp.where(allowed, wide, -jnp.inf)
    return Softmax()(wide, allowed).reshape(scores.shape).astype(scores.dtype)


def explain(
    query: Array,
    key: Array | Memory,
    value: Array | None = None,
    *,
    verbose: bool = False,
    return_weights: bool = False,
    return_lse: bool = False,
    return_lifted: bool = False,
    implementation: str | Sequence[str] | None = None,
    **options: Any,
) -> str:
    """Which implementation `attend` runs for these arguments, and why.

    Arrays may be jax.ShapeDtypeStruct. The device is where the arrays lie; for shapes, and under
    jax.jit, it is JAX's default device, which `jax.default_device` sets.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> x = jnp.zeros((2, 8, 4))
        >>> print(regard.explain(x, x, x).splitlines()[0])
        reference runs: dense, 128 weights at once; scores by definition

    Args:
        verbose: also say why each of the others does not run, and which measured rules decided.
        implementation, options: all arguments of `attend`.

    Returns:
        Two lines; with `verbose`, one for each implementation and preference.
    """
    found: list[Request] = []
    static = ("normalize", "dropout_rate", "mesh", "sequence_axis", "softcap")
    static_options = {name: options.pop(name) for name in static if name in options}
    static_options["return_lse"] = return_lse
    device = device_of(query, key, value)
    require_score(options.setdefault("score", DOT))
    value = cast(Any, key if isinstance(key, Memory) else value)
    if options["score"] is DOT:  # the very object: known from one that the caller gave
        static_options["score"] = options.pop("score")

    def shapes_only(query: Array, key: Array, value: Array, arrays: dict[str, Any]) -> None:
        found.append(prepare(query, key, value, device=device, **static_options, **arrays)[1])

    jax.eval_shape(shapes_only, query, key, value, options)
    return choose(found[0], implementation).explain(verbose)


@functools.partial(jax.jit, static_argnums=1)
def _scores(problem: Problem, program: Program) -> Array:
    with on_device(program.device):
        found = program.backend.scores(problem, program.settings)
        return problem.axes.callers_pairs(problem.nan_where_lost(found))
