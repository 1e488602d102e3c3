"""What a backend is, and what it is given.

A backend is one object in one file. It is asked whether it refuses a `Request` (everything known of
a call before any data) and then pools a `Problem` (the checked arrays). choose.py has the registry.
"""

import functools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from regard.mask import Allowed, MaskFacts
from regard.normalize import Normalizer
from regard.placement import Device, device_of, on_device
from regard.pool.problem import Problem
from regard.pool.score_plan import ScorePath, ScorePlan
from regard.pool.sequence_axis import SequenceAxis
from regard.score.additive import LiftPolicy, lift_policy
from regard.score.contract import Lift, Score, accumulation_dtype
from regard.shapes import Axes


@dataclass(frozen=True)
class Request:
    """One call of attend, without its data.

    Attributes:
        dtype: of query and key, after promotion.
        value_dtype: None where only the weights are asked for.
        sequence: the mesh axis that shards the sequence; None: it is whole.
    """

    axes: Axes
    score: Score
    normalize: Normalizer
    dtype: np.dtype
    dropout: bool = False
    value_dtype: np.dtype | None = None
    bias: bool = False
    mask: MaskFacts = field(default_factory=MaskFacts)
    device: Device = field(default_factory=device_of)
    sequence: SequenceAxis | None = None

    @property
    def pairs(self) -> int:
        """Weights in the whole [B, N, T, S] array."""
        axes = self.axes
        return axes.B * axes.N * axes.T * axes.S

    @property
    def lift(self) -> Lift | None:
        """The lift that the kernels would take, its arrays as shapes; None for none."""
        return None if self.axes.empty() else self.plan(tile_form=False).paths[0].lift

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
    """One way to pool; stateless. Subclass it, and add an instance to `choose.REGISTRY`.

    Attributes:
        name: what `implementation=` calls it.
        when: the requests it is preferred for, in words; `prefers` is the same condition.
        measured: the measurement that the preference rests on.
        takes_sharded_sequences: whether it pools where `sequence_axis=` shards the sequence.
    """

    name: ClassVar[str]
    when: ClassVar[str]
    measured: ClassVar[str]
    takes_sharded_sequences: ClassVar[bool] = False

    def prefers(self, request: Request) -> bool:
        """Whether the automatic choice takes this backend unless it refuses."""
        return False

    def refuses(self, request: Request) -> str | None:
        """What this backend lacks for the request, naming the argument; None: it can do it."""
        raise NotImplementedError(f"{type(self).__name__} does not define refuses(request)")

    def describe(self, request: Request) -> str:
        """What runs for a request that is not refused, in one line."""
        raise NotImplementedError(f"{type(self).__name__} does not define describe(request)")

    def settings(self, request: Request) -> Hashable:
        """What the compiled program depends on besides the problem: part of the jit cache's key."""
        return None

    def pool(self, problem: Problem, settings: Any) -> tuple[Array, Array]:
        """The output, [B, N, T, V], and whether the lift ran (bool scalar). No axis is empty."""
        raise NotImplementedError(f"{type(self).__name__} does not define pool(problem, settings)")

    def scores(self, problem: Problem, settings: Any) -> Array:
        """The scores that `pool` uses, dense [B, N, T, S], without bias and mask."""
        if not problem.normalize.uses_scores:
            axes, wide = problem.axes, accumulation_dtype(problem.query.dtype)
            return jnp.zeros((axes.B, axes.N, axes.T, axes.S), wide)
        return ScorePlan.of(problem).run(ScorePath.dense_scores)
