"""The front door: checks every argument once, and brings the arrays to canonical axes.

Whatever passes here is well formed, and inner code does not check again. Each refusal says the
rule, what arrived with every shape, and the fix.
"""

import math
from dataclasses import replace
from typing import Any, TypedDict, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from regard.dropout import seed_words
from regard.mask import Mask, MaskFacts, resolve
from regard.memory import Memory, unpack
from regard.normalize import Normalizer, Softmax
from regard.placement import Device, device_of
from regard.pool.backend import BiasFacts, Pages, Problem, Request
from regard.pool.sequence_axis import SequenceAxis
from regard.score.contract import Score, promote
from regard.score.dot import Dot
from regard.score.positions import Placement, as_int32, default_positions
from regard.score.registration import require_score
from regard.shapes import Axes, as_array, check, shape_error

DOT = Dot()  # the default: known from a dot product that the caller asked for


class Pipeline(TypedDict, total=False):
    """What `attend`, `weights`, `summarize` and `attention_map` have in common; see `attend`."""

    score: Score
    valid_lens: Array | None
    mask: Mask | Array | None
    bias: Array | None
    normalize: Normalizer
    query_positions: Array | None
    key_positions: Array | None
    softcap: float | None
    sink: Array | float | None


def prepare(
    query: Array,
    key: Array | Memory,
    value: Array | Memory | None,
    *,
    score: Score = DOT,
    valid_lens: Array | None = None,
    mask: Mask | Array | None = None,
    bias: Array | None = None,
    normalize: Normalizer = Softmax(),
    softcap: float | None = None,
    sink: Array | float | None = None,
    return_lse: bool = False,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    mesh: Any = None,
    sequence_axis: str | None = None,
    query_positions: Array | None = None,
    key_positions: Array | None = None,
    device: Device | None = None,
) -> tuple[Problem, Request]:
    """A checked problem, and the request that a backend is chosen for; arguments as in `attend`.

    Args:
        device: that of the call; None finds it.
    """
    query, lost, memory_positions = as_array("query", query), None, None
    memory = key if isinstance(key, Memory) else None
    if isinstance(key, Memory):
        if key_positions is not None:
            raise ValueError("a Memory stores its keys' positions. Fix: leave key_positions= out.")
        given = None if score is DOT else score
        held = unpack(key, query, given, mask, valid_lens, query_positions)
        value = None if value is None else held.value
        key, score, lost = held.key, held.score, held.lost
        mask, valid_lens = held.mask, None
        memory_positions = held.at, held.held
    key = as_array("key", key)
    value = None if value is None else as_array("value", value)
    axes = check(query, key, value)
    _check_parts(score, normalize, axes, query, key)
    sequence = None
    if mesh is not None or sequence_axis is not None:
        sequence = SequenceAxis.of(mesh, sequence_axis)
    if sequence is not None and sequence.inside:
        allowed, visible, non_empty = sequence.resolve_shard(mask, valid_lens, axes)
    else:
        allowed, visible, non_empty = resolve(mask, valid_lens, axes), None, None
        if not axes.empty():
            visible, non_empty = allowed.visible_keys(axes), allowed.non_empty_rows(axes)
    bias = None if bias is None else _canonical_bias(as_array("bias", bias), axes)
    softcap, sink = check_terms(softcap, sink, return_lse, normalize, axes)
    lse = return_lse or sink is not None
    seed = _seed(dropout_rate, dropout_rng)
    dtype = promote(query.dtype, key.dtype)
    arrays = (query, key, value, allowed, bias, score)
    device, label = device or device_of(*arrays), score.label()
    query, key = axes.canonical(query.astype(dtype)), axes.canonical(key.astype(dtype))
    given_positions = dict(query_positions=query_positions, key_positions=key_positions)
    unplaced = key
    if score.uses_positions():
        places = memory_positions or positions(given_positions, axes, sequence)
        by_default = memory_positions is None and sequence is None
        by_default = by_default and all(one is None for one in given_positions.values())
        of_query, of_key = (one[:, None] for one in places)
        placement = Placement(query, key, of_query, of_key, by_default)
        score, query, key = score.placed(query, key, placement)
        axes = replace(axes, query_width=query.shape[-1], key_width=key.shape[-1])
    elif memory_positions is None and any(one is not None for one in given_positions.values()):
        raise ValueError(
            f"positions are of a regard.Memory and of scores with positions; {label} has none. "
            "Fix: leave query_positions= and key_positions= out; or score=regard.Rotary(...), or "
            "... + regard.Alibi()."
        )
    pages = _pages(memory, dtype) if key is unplaced and value is not None else None
    request = Request(
        axes if sequence is None else sequence.whole(axes),
        score,
        normalize,
        dtype,
        dropout=seed is not None,
        value_dtype=None if value is None else value.dtype,
        bias=None if bias is None else BiasFacts(bias.shape, bias.dtype),
        mask=cast(MaskFacts, allowed.facts),
        device=device,
        sequence=sequence,
        softcap=softcap is not None,
        sink=sink is not None,
        lse=lse,
        label=label,
        paged=memory is not None and memory.table is not None,
        paged_as_stored=pages is not None,
    )
    problem = Problem(
        query,
        key,
        None if value is None else axes.canonical(value),
        score,
        allowed,
        _per_key_head(visible, axes),
        non_empty,
        bias,
        seed,
        normalize,
        float(dropout_rate) if seed is not None else 0.0,
        axes,
        lost,
        sink=sink,
        softcap=softcap,
        lse=lse,
        pages=pages,
    )
    return problem, request


def _pages(memory: Memory | None, dtype: Any) -> Pages | None:
    """The pages of a memory, where the call reads what they hold as it is stored: in its dtype,
    values of as many heads as keys, and of some width.
    """
    if memory is None or memory.table is None or memory.key.dtype != dtype:
        return None
    if memory.key.shape[2] != memory.value.shape[2] or memory.value.shape[3] == 0:
        return None
    return Pages.of(memory.key, memory.value, memory.table)


def positions(
    given: dict[str, Array | None], axes: Axes, sequence: SequenceAxis | None
) -> tuple[Array, Array]:
    """query_positions= and key_positions= as int32 [B|1, T] and [B|1, S]; None: by index."""
    found: list[Array] = list(default_positions(axes.T, axes.S))
    if sequence is not None and sequence.inside:  # the arrays are one device's shard
        whole = default_positions(axes.T * sequence.size, axes.S * sequence.size)
        device = jax.lax.axis_index(sequence.axis)
        found = [
            jax.lax.dynamic_slice_in_dim(one, device * size, size)
            for one, size in zip(whole, (axes.T, axes.S), strict=True)
        ]
    for number, ((name, array), size) in enumerate(
        zip(given.items(), (axes.T, axes.S), strict=True)
    ):
        if array is None:
            continue
        array = as_int32(name, array)
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(
                f"{name} must be integers. Got {list(array.shape)} of dtype {array.dtype}."
            )
        if array.shape != (size,) and (axes.rank == 2 or array.shape != (axes.B, size)):
            letter = "T" if number == 0 else "S"
            forms = f"({letter},)" if axes.rank == 2 else f"({letter},) or (B, {letter})"
            raise shape_error(f"{name} must have shape {forms}", {name: array}, axes, "")
        found[number] = array.astype(jnp.int32)
    at, held = (jnp.atleast_2d(array) for array in found)
    return at, held


def _check_parts(score: Score, normalize: Normalizer, axes: Axes, query: Array, key: Array) -> None:
    require_score(score)
    for leaf in jax.tree.leaves(score):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, int | float | complex):
            raise TypeError(f"{score.label()}'s parameters are numbers and arrays. Got {leaf!r}.")
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
            f"{score.label()}'s parameters may carry a leading axis of N heads, one set per "
            f"head, for inputs of rank 4, (B, T, N, D). Got {listed} for query "
            f"{list(query.shape)}, key {list(key.shape)}. Fix: a first axis of "
            f"{axes.N if axes.rank == 4 else 'no heads'}, or parameters shared by all heads."
        )


def check_terms(
    softcap: float | None,
    sink: Array | float | None,
    return_lse: bool,
    normalize: Normalizer,
    axes: Axes,
) -> tuple[float | None, Array | None]:
    """softcap= as a number and sink= as an array, () or (N,); both checked, and return_lse= too."""
    if softcap is not None:
        number = isinstance(softcap, int | float | np.number) and not isinstance(softcap, bool)
        if not number or not 0 < softcap < math.inf:
            raise ValueError(
                "softcap must be a positive number, known before the call is traced. Got "
                f"{softcap!r}. Fix: softcap=30.0, or None for none."
            )
        if not normalize.uses_scores:
            name = type(normalize).__name__
            raise ValueError(f"softcap caps scores, and {name} uses none. Fix: drop softcap=.")
        softcap = float(softcap)
    asked = [name for name, given in (("sink", sink), ("return_lse", return_lse)) if _given(given)]
    if asked and type(normalize) is not Softmax:
        raise ValueError(
            f"{' and '.join(asked)}: a sink and a log-sum-exp exist for normalize=Softmax() only. "
            f"Got {normalize!r}."
        )
    if sink is None:
        return softcap, None
    sink = as_array("sink", float(sink) if type(sink) is int else sink)
    if not jnp.issubdtype(sink.dtype, jnp.floating):
        raise TypeError(
            f"sink must be floating point: it is a score. Got sink {list(sink.shape)} of dtype "
            f"{sink.dtype}. Fix: sink.astype(jnp.float32)."
        )
    if sink.shape not in ((), (axes.N,)):
        arrays = dict(sink=sink)
        raise shape_error(
            f"sink must be one number, or one for each of the N = {axes.N} heads", arrays, axes, ""
        )
    return softcap, sink


def _given(value: Any) -> bool:
    return value is not None and value is not False


def _per_key_head(visible: Array | None, axes: Axes) -> Array | None:
    """[B|1, N|1, S] -> [B, K, S]: visible to any of the query heads that share a key head."""
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
    if isinstance(rate, jax.core.Tracer) or not isinstance(
        rate, int | float | np.number | np.ndarray | Array
    ):
        raise TypeError(
            f"dropout_rate must be a number known before the call is traced. Got {rate!r}. Fix: a "
            "static argument of jax.jit, or dropout_rate=0.0 for none."
        )
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout_rate must be in [0, 1). Got {rate!r}.")
    if rate == 0.0:
        return None
    if rng is None:
        raise ValueError(
            f"dropout_rate {rate} needs dropout_rng. Got None. "
            "Fix: dropout_rng=jax.random.key(seed), or dropout_rate=0.0."
        )
    try:
        return seed_words(rng)
    except (TypeError, ValueError) as error:
        raise TypeError(
            "dropout_rng must be one JAX key, jax.random.key(seed); a key array of several needs "
            f"jax.vmap. Got {rng!r}. Fix: dropout_rng=jax.random.key(seed), or rngs.dropout() of a "
            f"flax.nnx.Rngs. ({error})"
        ) from None
