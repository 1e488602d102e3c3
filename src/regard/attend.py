"""attend: check, choose, run. No backend is named here.

front_door.py checks the arguments, pool/choose.py picks a backend, and `_pool` runs it:
score -> mask -> normalize -> pool. weights.py computes the weights by the same pipeline.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Required, Unpack, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import SingleDeviceSharding

from regard.front_door import DOT, Pipeline, prepare
from regard.mask import Mask, as_lens
from regard.memory import Memory
from regard.normalize import Normalizer, Softmax
from regard.placement import Device, device_of, explicit_mesh, in_force, on_device, shard_as_queries
from regard.pool import choose as registry
from regard.pool.backend import Backend, Problem, Request
from regard.pool.choose import Choice, as_names, choose
from regard.pool.merge import finish_with_sink
from regard.pool.reference import dense_weights
from regard.score.additive import LiftPolicy, lift_policy
from regard.score.contract import Score, accumulation_dtype
from regard.score.positions import as_int32
from regard.score.registration import classes_in
from regard.shapes import as_array, check


class Options(Pipeline, total=False):
    """The keywords of `attend` that do not change what it returns."""

    dropout_rate: float
    dropout_rng: Array | None
    implementation: str | Sequence[str] | None
    mesh: Any
    sequence_axis: str | None


class OutputOnly(Options, total=False):
    return_weights: Literal[False]
    return_lse: Literal[False]
    return_lifted: Literal[False]


class WithWeights(Options, total=False):
    return_weights: Required[Literal[True]]
    return_lse: Literal[False]
    return_lifted: Literal[False]


class WithLse(Options, total=False):
    return_weights: Literal[False]
    return_lse: Required[Literal[True]]
    return_lifted: Literal[False]


class WithLifted(Options, total=False):
    return_weights: Literal[False]
    return_lse: Literal[False]
    return_lifted: Required[Literal[True]]


class WithWeightsAndLifted(Options, total=False):
    return_weights: Required[Literal[True]]
    return_lse: Literal[False]
    return_lifted: Required[Literal[True]]


class WithAnything(Options, total=False):
    return_weights: bool
    return_lse: bool
    return_lifted: bool


Pair = tuple[Array, Array]


@overload
def attend(
    query: Array, key: Array | Memory, value: Array | None = None, **options: Unpack[OutputOnly]
) -> Array: ...
@overload
def attend(
    query: Array, key: Array | Memory, value: Array | None = None, **options: Unpack[WithWeights]
) -> Pair: ...
@overload
def attend(
    query: Array, key: Array | Memory, value: Array | None = None, **options: Unpack[WithLse]
) -> Pair: ...
@overload
def attend(
    query: Array, key: Array | Memory, value: Array | None = None, **options: Unpack[WithLifted]
) -> Pair: ...
@overload
def attend(
    query: Array,
    key: Array | Memory,
    value: Array | None = None,
    **options: Unpack[WithWeightsAndLifted],
) -> tuple[Array, Array, Array]: ...
@overload
def attend(
    query: Array, key: Array | Memory, value: Array | None = None, **options: Unpack[WithAnything]
) -> Any: ...
def attend(
    query: Array,
    key: Array | Memory,
    value: Array | None = None,
    *,
    score: Score = DOT,
    valid_lens: Array | None = None,
    mask: Mask | Array | None = None,
    bias: Array | None = None,
    normalize: Normalizer = Softmax(),
    softcap: float | None = None,
    sink: Array | float | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    implementation: str | Sequence[str] | None = None,
    mesh: Any = None,
    sequence_axis: str | None = None,
    query_positions: Array | None = None,
    key_positions: Array | None = None,
    return_weights: bool = False,
    return_lse: bool = False,
    return_lifted: bool = False,
) -> Any:
    """Attention pooling: out_t = sum_s alpha(q_t, k_s) v_s.

    The weights alpha come from a score a(q, k), a mask, and a normalizer (the weight regime).
    A query whose row is empty (every key is masked) gets weights 0, output 0 and gradient 0, never
    NaN; NaN and Inf in keys and values that every query masks reach no output and no gradient.

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
        key: (S, Hk), (B, S, Hk) or (B, S, K, Hk); K divides N (grouped queries). Or a Memory,
            which has the values and the score as well.
        value: (S, V), (B, S, V) or (B, S, K, V); none with a Memory.
        score: Dot, Gaussian, Bilinear, Additive, or your own Score; with positions, Rotary, Alibi
            or RelativeBias; or a sum of scores, a + c * b.
        valid_lens: integers (), (B,), (B, T) or (B, N, T); (T,) for rank 2. Keys s < valid_lens
            take part; clipped to [0, S].
        mask: a Mask, or bool broadcastable to the weights; True takes part.
        bias: added to the scores, broadcastable to the weights, differentiable.
        normalize: Softmax, Sparsemax, Hard, Uniform, Kernel(f) or Cone(f).
        softcap: c, a positive number: scores become c · tanh(a / c), within ±c. Before the bias
            and the mask, after everything that is part of the score.
        sink: a logit per head, (N,), or one for all: one more key, without a value, that takes
            part in every row. With Softmax only; differentiable. An empty row is still 0.
        dropout_rate: inverted dropout on the weights, in [0, 1).
        dropout_rng: a JAX key; needed when dropout_rate > 0.
        implementation: None picks; "reference", "blockwise", "cudnn", "pallas", "ring", or a
            sequence of them in order of preference. `explain` tells which and why.
        mesh, sequence_axis: shards T and S over this axis of the mesh and pools by ring
            attention, whatever T and S are; for masks by lengths, bands and segments.
            Without a mesh, the one of jax.set_mesh. Inside your own shard_map over that axis,
            the arrays are the device's shards, and masks count positions in the whole sequence.
        query_positions: integers (T,) or (B, T): where the queries stand in their text, for
            scores with positions (Rotary, Alibi, RelativeBias) and for masks of a Memory. None:
            the last query stands where the last key does, as masks are aligned.
        key_positions: integers (S,) or (B, S), for scores with positions; None: 0, 1, …. A Memory
            stores its own. Masks of plain arrays count indices, whatever the positions are.
        return_weights: also return the weights, (T, S), (B, T, S) or (B, N, T, S), before
            dropout. Returning them never changes the output.
        return_lse: also return the log-sum-exp of each row's scores, (T,), (B, T) or (B, N, T),
            float32 or wider, differentiable; with Softmax only. The sink is in it; -inf for an
            empty row without one. `merge` puts parts together by it.
        return_lifted: also return a bool scalar: whether the score's lift ran (True) or its
            definition (False), which for Additive is decided on the data.

    Returns:
        The output, (T, V), (B, T, V) or (B, T, N, V), in the value's dtype; a tuple with the
        weights, the log-sum-exp and the flag appended where asked for, in this order.

    Raises:
        ValueError, TypeError: the rule, every array with its shape, the fix.
        NotImplementedError: a named implementation cannot do this; the message says what.
    """
    if isinstance(key, Memory):
        if value is not None:
            raise ValueError("a Memory has its own values. Fix: attend(query, memory, ...).")
        value = cast(Any, key)
    elif value is None:
        raise ValueError("attend needs query, key and value, or a query and a regard.Memory.")
    options: dict[str, Any] = dict(normalize=normalize, dropout_rate=dropout_rate)
    options |= dict(mesh=mesh, sequence_axis=sequence_axis, softcap=softcap, return_lse=return_lse)
    arrays = arrays_of(dict(query=query, key=key, value=value, bias=bias), valid_lens, score)
    arrays |= dict(mask=mask, sink=sink, dropout_rng=dropout_rng)
    arrays |= positions_of(query_positions, key_positions)
    asked = dict(out=True, weights=return_weights, lse=return_lse, flag=return_lifted)
    wanted = tuple(name for name, given in asked.items() if given)
    static = Static.of(implementation, options)
    program = program_of(arrays, static) if mesh is sequence_axis is None else None
    if program is not None:
        return _collect(
            wanted,
            _pool_whole(arrays, static, program),
            functools.partial(weigh_whole, arrays, static, program),
        )
    call = functools.partial(_attend, implementation=implementation, wanted=wanted, **options)
    held = [key.key] if isinstance(key, Memory) else [key, value]
    explicit = explicit_mesh(query, *held)
    if explicit is None:
        return call(**arrays)
    if not isinstance(key, Memory):
        check(query, key, value)
    return shard_as_queries(explicit, call, arrays, wanted)


def arrays_of(given: dict[str, Any], valid_lens: Array | None, score: Score) -> dict[str, Any]:
    """The arrays of a call, each of them one array: a list would be traced number by number."""
    arrays = {n: as_array(n, x) if isinstance(x, list | tuple) else x for n, x in given.items()}
    arrays |= {} if score is DOT else dict(score=score)
    return arrays | dict(valid_lens=None if valid_lens is None else as_lens(valid_lens))


def positions_of(query_positions: Any, key_positions: Any) -> dict[str, Any]:
    """Both, checked to fit int32 while their numbers are known: jit would wrap larger ones."""
    given = dict(query_positions=query_positions, key_positions=key_positions)
    return {name: None if x is None else as_int32(name, x) for name, x in given.items()}


class Program(NamedTuple):
    """What a trace depends on besides its arguments: the static part of the jit cache's key."""

    backend: Backend
    settings: Hashable
    device: Device
    policy: LiftPolicy
    classes: tuple[type, ...]

    @classmethod
    def of(cls, choice: Choice) -> "Program":
        request, settings = choice.request, choice.backend.settings(choice.request)
        classes = classes_in(request.score)
        return cls(choice.backend, settings, request.device, lift_policy(), classes)


def _attend(
    query: Array,
    key: Array | Memory,
    value: Array | Memory,
    *,
    implementation: str | Sequence[str] | None,
    wanted: tuple[str, ...],
    **options: Any,
) -> Any:
    problem, request = prepare(query, key, value, **options)
    program = Program.of(choose(request, implementation))
    pooled = _pool(problem, program)
    return _collect(wanted, pooled, functools.partial(weigh, problem, program))


def _collect(
    wanted: tuple[str, ...], pooled: tuple[Array, Array | None, Array], weights: Callable[[], Array]
) -> Any:
    """What the caller asked for, of the results of `_pool` and of a program for the weights: one
    of its own, so that returning weights cannot change the output.
    """
    if len(wanted) == 1:
        return pooled[0]
    results = dict(zip(("out", "lse", "flag"), pooled, strict=True))
    if "weights" in wanted:
        results["weights"] = weights()
    return tuple(results[name] for name in wanted)


class Static(NamedTuple):
    """The keywords of a call that are no arrays."""

    implementation: tuple[str, ...] | None
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, implementation: str | Sequence[str] | None, options: dict[str, Any]) -> "Static":
        return cls(as_names(implementation), tuple(options.items()))

    def prepare(self, arrays: dict[str, Any], device: Device) -> tuple[Problem, Request]:
        return prepare(**arrays, **dict(self.options), device=device)


def _program(arrays: dict[str, Any], static: Static, device: Device) -> Program:
    """The program of a call outside of jit, from what its arrays look like; raises what it does."""
    found: list[Request] = []
    jax.eval_shape(lambda arrays: found.append(static.prepare(arrays, device)[1]), arrays)
    request = found[0]
    if "score" in arrays and not isinstance(arrays["key"], Memory):  # whose numbers are known
        request = replace(request, score=arrays["score"])
    return Program.of(choose(request, static.implementation))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _pool_whole(
    arrays: dict[str, Any], static: Static, program: Program
) -> tuple[Array, Array | None, Array]:
    """`_pool` from the caller's own arrays."""
    return _pool(static.prepare(arrays, program.device)[0], program)


@functools.partial(jax.jit, static_argnums=(1, 2))
def weigh_whole(arrays: dict[str, Any], static: Static, program: Program) -> Array:
    """`weigh` from the caller's own arrays."""
    return weigh(static.prepare(arrays, program.device)[0], program)


@functools.partial(jax.jit, static_argnums=1)
def _pool(problem: Problem, program: Program) -> tuple[Array, Array | None, Array]:
    """score -> mask -> normalize -> pool. Returns the output, the log-sum-exp where it is needed,
    and whether the lift ran.
    """
    axes, value = problem.axes, cast(Array, problem.value)
    rows, lifted = (axes.B, axes.N, axes.T), jnp.array(False)
    out: Any = jnp.zeros((*rows, axes.V), value.dtype)
    if problem.lse:
        out = (out, jnp.full(rows, -jnp.inf, accumulation_dtype(problem.query.dtype)))
    if not axes.empty() and (axes.V > 0 or problem.lse):
        if axes.V == 0:  # backends pool at least one column
            column = jnp.zeros((*value.shape[:3], 1), value.dtype)
            problem = replace(problem, value=column, axes=replace(axes, V=1))
        with on_device(program.device):
            out, lifted = program.backend.pool(problem, program.settings)
    if not problem.lse:
        return axes.callers(problem.nan_where_lost(out)), None, lifted
    out, lse = finish_with_sink(out, problem.sink, value.dtype)
    out, lse = problem.nan_where_lost(out[..., : axes.V]), problem.nan_where_lost(lse)
    return axes.callers(out), axes.callers_pairs(lse), lifted


@functools.partial(jax.jit, static_argnums=1)
def weigh(problem: Problem, program: Program) -> Array:
    """score -> mask -> normalize, dense; scores as `_pool` makes them."""
    axes = problem.axes
    if axes.empty():
        return axes.callers_pairs(jnp.zeros((axes.B, axes.N, axes.T, axes.S), jnp.float32))
    with on_device(program.device):
        problem = problem.zeroed()
        scores = program.backend.scores(problem, program.settings)
        return axes.callers_pairs(problem.nan_where_lost(dense_weights(problem, scores)))


# ---------------------------------------------------------------------------------------------
# Calls outside of jax.jit: the whole call is one compiled program, checks and all, found again by
# what the arguments look like. Operation by operation, a small call takes longer in Python than on
# the device, and bringing keys and values to canonical axes copies them. Arguments that are traced
# already, that lie on several devices, or that are no arrays are run step by step, as is every call
# that is refused.

MOST = 4096  # signatures remembered
_UNKNOWN = object()
_programs: OrderedDict[Hashable, Any] = OrderedDict()


class Signature(NamedTuple):
    """What a call is compiled for: everything but the numbers in its arrays.

    Attributes:
        tree: the structure of the arguments, with what is static in a score or mask.
        kinds: shape and dtype of each array; of a number, its type, and on a GPU, where a kernel
            may be compiled for it, its value.
        static: the keywords that are no arrays.
        settings: the backends, and context variables and settings of JAX that a choice depends on.
    """

    tree: Any
    kinds: tuple[Any, ...]
    device: Device
    static: Static
    settings: Hashable


def program_of(arrays: dict[str, Any], static: Static) -> Program | None:
    """`_program`, found once for each signature.

    None where the call has to be run step by step, and where it is refused: the call itself then
    says why.
    """
    try:
        found = _signature(arrays, static)
        program = _programs.get(found, _UNKNOWN)
    except TypeError:  # a part of it that is no array of JAX, or that cannot be hashed
        return None
    if found is None:
        return None
    if program is _UNKNOWN:
        try:
            program = _program(arrays, static, found.device)
        except Exception:
            program = None
        _programs[found] = program
        if len(_programs) > MOST:
            _programs.popitem(last=False)
    return program


def _signature(arrays: dict[str, Any], static: Static) -> Signature | None:
    """The signature of a call on these arrays; None where it has to be run step by step."""
    leaves, tree = jax.tree.flatten(arrays)
    if not all(_can_be_compiled_for(leaf) for leaf in leaves):
        return None
    device = device_of(leaves)
    by_value = device.platform != "cpu"
    kinds = tuple(
        leaf.aval
        if isinstance(leaf, jax.Array)
        else (leaf.shape, leaf.dtype)
        if isinstance(leaf, np.ndarray | np.generic)
        else (type(leaf), leaf if by_value else None)
        for leaf in leaves
    )
    config: Any = jax.config
    numbers = config.jax_default_matmul_precision, config.jax_enable_x64
    return Signature(tree, kinds, device, static, (*registry.REGISTRY, *numbers, *in_force()))


def _can_be_compiled_for(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array):
        traced = isinstance(leaf, jax.core.Tracer)
        return not traced and type(leaf.sharding) is SingleDeviceSharding
    if type(leaf) is int:  # larger ones do not fit the type that jit gives them
        return abs(leaf) < 2**31
    return type(leaf) is float or isinstance(leaf, np.ndarray | np.generic)
