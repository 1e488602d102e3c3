"""What a backend is, and what it is given.

A backend is one object in one file. It may refuse a `Request` (everything known of a call before
any data); if it does not, it pools a `Problem` (the checked arrays). choose.py has the registry.
"""

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from regard.dropout import Seed
from regard.mask import Allowed, MaskFacts
from regard.normalize import Normalizer
from regard.placement import Device, device_of, on_device
from regard.pool.score_plan import ScorePath, ScorePlan
from regard.pool.sequence_axis import SequenceAxis
from regard.score.additive import LiftPolicy, lift_policy
from regard.score.contract import Lift, Score, accumulation_dtype
from regard.shapes import Axes


class Pages(NamedTuple):
    """Keys and values of a paged memory as they lie in its pool; without gradients.

    Attributes:
        key, value: [1, K, pages · page, F] and [1, K, pages · page, V].
        table: int32 [B, 1, P], the pages of each example; none of them is masked.
    """

    key: Array
    value: Array
    table: Array

    @classmethod
    def of(cls, key: Array, value: Array, table: Array) -> "Pages":
        """From [pages, page, K, F], [pages, page, K, V] and [B, P]."""

        def in_a_row(held: Array) -> Array:
            held = jax.lax.stop_gradient(held)
            return held.reshape(1, -1, *held.shape[2:]).swapaxes(1, 2)

        return cls(in_a_row(key), in_a_row(value), table[:, None])

    def page(self, S: int) -> int:
        """Tokens of a page."""
        return S // self.table.shape[2]

    def keys(self, at: Array, S: int) -> Array:
        """Some of the S keys of each example, by number: [B, K, n] -> [B, K, n, F]."""
        page, (_, K, slots, _) = self.page(S), self.key.shape
        number = jnp.take_along_axis(self.table, at // page, axis=-1)
        slot = jnp.clip(number, 0, slots // page - 1) * page + at % page
        heads = jnp.arange(K, dtype=jnp.int32)[:, None]
        return self.key.swapaxes(1, 2)[0, slot, heads]  # in the pool's layout: no copy


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Problem:
    """One call of attend, checked, on axes [B, N, T, Hq], [B, K, S, Hk] and [B, K, S, V].

    Padding in the arrays is as the caller gave it, and may be NaN. Backends zero it with
    `zeroed()`, unless their kernels ignore it.

    Attributes:
        value: None where only the weights are computed.
        visible: [B, K, S] bool, keys that some query may attend to; None means all.
        non_empty: [B|1, N|1, T|1] bool, queries with at least one key; None means all.
        bias: [B|1, N|1, T|1, S|1]; None is zero.
        seed: two uint32 words for dropout, or those of a part of the heads; None means none.
        lost: [B, T] bool, queries whose keys a memory could not keep; None means none.
        sink: a logit [N], or one number; None means none. attend.py applies it to a backend's
            output and log-sum-exp.
        softcap: see `attend`; None means none.
        lse: whether `pool` returns the log-sum-exp of each row too.
        pages: where `key` and `value` were gathered from, for a backend that reads pages itself:
            what nothing reads, XLA does not gather. None where no pool holds them as they are.
    """

    query: Array
    key: Array
    value: Array | None
    score: Score
    allowed: Allowed
    visible: Array | None
    non_empty: Array | None
    bias: Array | None
    seed: Seed
    normalize: Normalizer = field(metadata=dict(static=True))
    dropout_rate: float = field(metadata=dict(static=True))
    axes: Axes = field(metadata=dict(static=True))
    lost: Array | None = None
    sink: Array | None = None
    softcap: float | None = field(default=None, metadata=dict(static=True))
    lse: bool = field(default=False, metadata=dict(static=True))
    pages: Pages | None = None

    def nan_where_lost(self, found: Array) -> Array:
        """[B, N, T, ...], NaN for queries that lost keys."""
        if self.lost is None:
            return found
        B, T = self.lost.shape
        return jnp.where(self.lost.reshape(B, 1, T, *(1,) * (found.ndim - 3)), jnp.nan, found)

    @property
    def out_dtype(self) -> np.dtype:
        """Of a backend's output: the value's, or wide where a sink is still to be applied."""
        assert self.value is not None
        if self.sink is None:
            return self.value.dtype
        return accumulation_dtype(self.query.dtype, self.value.dtype)

    def zeroed(self) -> "Problem":
        """A copy in which keys and values that every query masks (not `visible`) are zero, and so
        are queries with no key at all (not `non_empty`): NaN in padding cannot propagate, where
        0 · NaN would be NaN.
        """
        query, key = _zero_rows(self.non_empty, self.query), _zero_rows(self.visible, self.key)
        return replace(self.with_zeroed_values(), query=query, key=key)

    def with_zeroed_values(self) -> "Problem":
        """A copy in which the values that every query masks are zero."""
        value = None if self.value is None else _zero_rows(self.visible, self.value)
        return replace(self, value=value)

    def with_keys_and_values_zeroed_forward(self) -> "Problem":
        """A copy in which keys and values that every query masks are zero, for a backend whose
        gradients are zero there by themselves: the backward pass does not zero them again.
        """
        if self.visible is None:
            return self
        value = None if self.value is None else _zero_rows_forward(self.visible, self.value)
        return replace(self, key=_zero_rows_forward(self.visible, self.key), value=value)


def _zero_rows(keep: Array | None, array: Array) -> Array:
    return array if keep is None else jnp.where(keep[..., None], array, 0)


@jax.custom_jvp
def _zero_rows_forward(keep: Array, array: Array) -> Array:
    """`_zero_rows` in the forward pass; tangents and cotangents pass unchanged."""
    return _zero_rows(keep, array)


_zero_rows_forward.defjvp(lambda primals, tangents: (_zero_rows_forward(*primals), tangents[1]))


Pool = Callable[[Problem], tuple[Any, Array]]  # to the output, and whether the lift ran


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def zero_for_gradient(forward_only: Pool, differentiable: Pool, problem: Problem) -> Any:
    """forward_only(problem); where the call is differentiated, differentiable(problem).

    A kernel that replaces masked scores does not depend on what they were computed from, so a
    forward pass alone needs no zeroed copy of queries and keys: on a GPU each copy would take a
    twentieth of the kernel's own time. The backward pass does need it: it multiplies d scores of 0
    by queries and keys, and 0 · NaN is NaN.

    Args:
        forward_only: pools; NaN in the padding does not reach its output.
        differentiable: equals it, and has a backward pass. Both are static: they close over no
            array.
    """
    return forward_only(problem)


@zero_for_gradient.defjvp
def _(forward_only: Pool, differentiable: Pool, primals: Any, tangents: Any) -> Any:
    return jax.jvp(differentiable, primals, tangents)


# Per key head (two CPU cores, B=2, T=64, S=2,000, N=8, D=64: 6.9 ms of processor time, tile by tile
# 9.5; with gradients 27 and 40; with lengths 6.1 and 4.4, since tiles past the end are skipped).
FEW_QUERIES = 64


class BiasFacts(NamedTuple):
    """Shape, [B|1, N|1, T|1, S|1], and dtype of a bias."""

    shape: tuple[int, ...]
    dtype: np.dtype


@dataclass(frozen=True)
class Request:
    """One call of attend, without its data.

    Attributes:
        dtype: of query and key, after promotion.
        value_dtype: None where only the weights are asked for.
        sequence: the mesh axis that shards the sequence; None: it is whole.
        softcap, sink, lse: whether scores are capped, there is a sink, and the log-sum-exp of each
            row is needed, for a sink or for the caller.
        label: the caller's score in words.
        paged: whether keys and values are pages of a memory; paged_as_stored: and no other arrays
            are made of them before they are scored and pooled, `Problem.pages`.
    """

    axes: Axes
    score: Score
    normalize: Normalizer
    dtype: np.dtype
    dropout: bool = False
    value_dtype: np.dtype | None = None
    bias: BiasFacts | None = None
    mask: MaskFacts = field(default_factory=MaskFacts)
    device: Device = field(default_factory=device_of)
    sequence: SequenceAxis | None = None
    softcap: bool = False
    sink: bool = False
    lse: bool = False
    label: str = ""
    paged: bool = False
    paged_as_stored: bool = False

    @property
    def pairs(self) -> int:
        """Weights in the whole [B, N, T, S] array."""
        axes = self.axes
        return axes.B * axes.N * axes.T * axes.S

    @property
    def lift(self) -> Lift | None:
        """The lift that the kernels would take, its arrays as shapes; None for none."""
        return None if self.axes.empty() else self.plan(tile_form=False).paths[0].lift

    @property
    def has_few_queries(self) -> bool:
        """Whether few_queries.py pools it best: few queries per key head on one CPU device, and a
        score that is an inner product with no range.
        """
        axes = self.axes
        if axes.symbolic() or axes.empty() or axes.N // axes.K * axes.T > FEW_QUERIES:
            return False
        if self.device.platform != "cpu" or jax.device_count() > 1:
            return False
        if not self.normalize.uses_scores:
            return True
        plan = self.plan(tile_form=False)
        lift = plan.paths[0].lift
        return lift is not None and lift.expansion is None and plan.taken is None

    def plan(self, tile_form: bool = True) -> ScorePlan:
        """How the scores would be made, arrays as shapes; arguments as in `ScorePlan.of`."""
        leaves, structure = jax.tree.flatten(self.score)
        kinds = [jax.typeof(leaf) for leaf in leaves]
        kinds = [(kind.shape, kind.dtype, getattr(kind, "weak_type", False)) for kind in kinds]
        masked, device = self.mask != MaskFacts(), self.device._replace(varies=False)
        return _plan_of_shapes(
            structure,
            tuple(kinds),
            self.axes,
            self.normalize,
            jnp.dtype(self.dtype),
            masked,
            tile_form,
            lift_policy(),
            device,
        )


@functools.lru_cache(maxsize=512)
def _plan_of_shapes(
    structure: Any,
    leaves: tuple[tuple[tuple[int, ...], np.dtype, bool], ...],
    axes: Axes,
    normalize: Normalizer,
    dtype: np.dtype,
    masked: bool,
    tile_form: bool,
    policy: LiftPolicy,
    device: Device,
) -> ScorePlan:
    """Traces the plan on shapes alone, once per kind of call; a lift may depend on the last two."""
    shapes = [jax.ShapeDtypeStruct(shape, kind, weak_type=weak) for shape, kind, weak in leaves]
    query = jax.ShapeDtypeStruct((axes.B, axes.N, axes.T, axes.query_width), dtype)
    key = jax.ShapeDtypeStruct((axes.B, axes.K, axes.S, axes.key_width), dtype)
    visible = jax.ShapeDtypeStruct((axes.B, axes.K, axes.S), jnp.bool_) if masked else None

    def plan(parameters: list, query: Array, key: Array, visible: Array | None) -> ScorePlan:
        score, everything = jax.tree.unflatten(structure, parameters), Allowed(None, None, (), ())
        problem = Problem(
            query, key, None, score, everything, visible, *(None,) * 3, normalize, 0.0, axes
        )
        return ScorePlan.of(problem, tile_form=tile_form)

    with on_device(device):
        return jax.eval_shape(plan, shapes, query, key, visible)


class Backend:
    """One way to pool; stateless. Subclass it, and add a rule to `choose.REGISTRY`.

    Attributes:
        name: what `implementation=` calls it.
        takes_sharded_sequences: whether it pools where `sequence_axis=` shards the sequence.
        takes_symbolic_sizes: whether it pools where jax.export leaves B, T or S open.
    """

    name: ClassVar[str]
    takes_sharded_sequences: ClassVar[bool] = False
    takes_symbolic_sizes: ClassVar[bool] = False

    def refuses(self, request: Request) -> str | None:
        """What this backend lacks for the request, naming the argument; None: it can do it."""
        raise NotImplementedError(f"{type(self).__name__} does not define refuses(request)")

    def describe(self, request: Request) -> str:
        """What runs for a request that is not refused, in one line."""
        raise NotImplementedError(f"{type(self).__name__} does not define describe(request)")

    def reads_pages(self, request: Request) -> bool:
        """Whether the forward pass reads the pages of a memory where they lie. Else they are
        gathered first, a copy of every key and value.
        """
        return False

    def settings(self, request: Request) -> Hashable:
        """What the compiled program depends on besides the problem: part of the jit cache's key."""
        return None

    def pool(self, problem: Problem, settings: Any) -> tuple[Any, Array]:
        """The output, [B, N, T, V], and whether the lift ran (bool scalar). No axis is empty.

        Where `problem.lse`, instead of the output: (output in `problem.out_dtype`, log-sum-exp
        [B, N, T], -inf for an empty row), without the sink.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define pool(problem, settings)")

    def scores(self, problem: Problem, settings: Any) -> Array:
        """The scores that `pool` uses, dense [B, N, T, S], without bias and mask."""
        if not problem.normalize.uses_scores:
            axes, wide = problem.axes, accumulation_dtype(problem.query.dtype)
            return jnp.zeros((axes.B, axes.N, axes.T, axes.S), wide)
        return ScorePlan.of(problem).run(ScorePath.dense_scores)
