"""How the scores of a problem are computed, and one differentiable pooling from it.

There are up to three forms: lifts (inner products of features that equal or approximate the score),
a tile form (an equal score that is faster tile by tile), and the definition; see score/contract.py.
A lift or a tile form may hold only for some data. Then a plan has several paths, the fastest first
and the definition last, and at run time the data takes the first one in whose range it is. A
backend gives `ScorePlan.pool` a `Pass` for each path, which pools forward and backward (tiles in
plain XLA, a kernel over features, a kernel over tanh).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from regard.mask import Allowed
from regard.placement import Device, on_device, vary_as
from regard.score.contract import Lift, Score, repeat_heads
from regard.shapes import Axes

if TYPE_CHECKING:
    from regard.pool.backend import Problem


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScorePath:
    """One way to score; neither a score nor a lift where a regime needs no scores.

    Attributes:
        scored: the definition, or a tile form of it, with its prepared query and key.
        lift: instead of it.
        standing: how the scores relate to the definition, for `explain`.
    """

    scored: tuple[Score, Array, Array] | None = None
    lift: Lift | None = None
    standing: str = field(default="by definition", metadata=dict(static=True))

    @property
    def key_heads(self) -> int:
        """K; N for a score with parameters per head."""
        key = self.lift.key if self.lift is not None else cast(Any, self.scored)[2]
        return key.shape[1]

    def omitted_constant(self, problem: "Problem") -> Array | None:
        """A lift's constant per query, [B, N, T]: softmax cannot see it, so that no pass adds it to
        scores, but a log-sum-exp and a sink can. With a soft cap every pass adds it.
        """
        return None if self.lift is None or problem.softcap is not None else self.lift.query_bias

    def dense_scores(self) -> Array:
        """The scores of every pair, [B, N, T, S]."""
        if self.lift is not None:
            return self.lift.scores()
        score, query, key = cast(Any, self.scored)
        return score.scores(query, repeat_heads(key, query))


class ScorePlan(NamedTuple):
    """The ways to score, the fastest first.

    Attributes:
        paths: one; or several, of which the last holds for all data.
        taken: the index of the path that the data takes, an int32 scalar; None for one path.
    """

    paths: tuple[ScorePath, ...]
    taken: Array | None

    @classmethod
    def of(cls, problem: "Problem", tile_form: bool = True, lifted: bool = True) -> "ScorePlan":
        """The fastest path of this problem's score, and others where the data may forbid it.

        Args:
            tile_form: False for kernels, which take a lift or the definition only.
            lifted: False for the definition only.
        """
        if not problem.normalize.uses_scores:
            return cls((ScorePath(standing="not needed by this regime"),), None)
        query, key, visible = problem.query, problem.key, problem.visible
        if problem.score.per_head():
            key = repeat_heads(key, query)
        score, query, key = problem.score.projected(query, key)
        if visible is not None and visible.shape[1] != key.shape[1]:
            visible = jnp.repeat(visible, key.shape[1] // visible.shape[1], axis=1)
        definition = ScorePath((score, query, key))
        if not lifted:
            return cls((definition,), None)
        paths: list[ScorePath] = []
        ranges: list[Array] = []
        lift = score.lift(query, key, visible=visible)
        form = None
        if lift is None and tile_form:
            form = score.tile_form(query, key, visible=visible)
        while lift is not None:
            paths.append(ScorePath(lift=lift, standing=lift.standing))
            if lift.in_range is None:
                break
            ranges.append(lift.in_range)
            lift = lift.otherwise
        if form is not None:
            paths.append(ScorePath((form.score, form.query, form.key), standing=form.standing))
            ranges.append(form.in_range)
        if len(paths) == len(ranges):
            paths.append(definition)
        return cls(tuple(paths), _first_in_range(ranges))

    def describe(self) -> str:
        """How scores are made, in words that follow "scores"."""
        texts = []
        for path in self.paths:
            text = path.standing
            if path.lift is not None:
                text = f"by an inner product of width {path.lift.width()}, {text}"
                if path.lift.distance_bias is not None:
                    text = f"{text}, and a number per distance"
            texts.append(text)
        return "; where that does not hold, decided on the data at run time, ".join(texts)

    def lift_ran(self) -> Array:
        """A bool scalar: whether the path that was taken is a lift."""
        lifts = sum(path.lift is not None for path in self.paths)
        return jnp.array(lifts > 0) if self.taken is None else self.taken < lifts

    def run(self, function: Callable[[ScorePath], Any]) -> Any:
        """function(the path that is taken)."""
        if self.taken is None:
            return function(self.paths[0])
        return lax.switch(self.taken, [functools.partial(function, path) for path in self.paths])

    def pool(
        self,
        problem: "Problem",
        passes: Sequence[tuple["Pass", Any]],
        device: Device,
        *,
        branch: bool,
        sharded: bool = True,
        like: Any = (),
    ) -> tuple[Any, Array]:
        """Pools by one pass, given with its operands, for each path.

        Args:
            branch, sharded: as in `Passes`.
            like: arrays besides the inputs over whose mesh axes the result varies.

        Returns:
            As `Backend.pool`.
        """
        every = tuple(one for one, _ in passes)
        static = Passes(every, device, problem.out_dtype, branch, sharded, problem.lse)
        operands = tuple(one for _, one in passes)
        inputs = (operands, problem.allowed, problem.seed, self.taken)
        found = pool_by(static, *vary_as(inputs, (inputs, like)))
        if problem.lse:
            out, lse = found
            found = out, self._with_constant(problem, lse)
        return found, self.lift_ran()

    def _with_constant(self, problem: "Problem", lse: Array) -> Array:
        """Adds the constant that the path which is taken omits to the log-sum-exp."""
        biases = [path.omitted_constant(problem) for path in self.paths]
        if all(bias is None for bias in biases):
            return lse
        each = [jnp.zeros_like(lse) if one is None else one.astype(lse.dtype) for one in biases]
        constant = each[0] if self.taken is None else lax.select_n(self.taken, *each)
        return jnp.where(jnp.isfinite(lse), lse + constant, lse)


def _first_in_range(ranges: Sequence[Array]) -> Array | None:
    """The index of the first range that holds, or their number; None for no ranges."""
    if not ranges:
        return None
    taken = jnp.int32(len(ranges))
    for index in reversed(range(len(ranges))):
        taken = jnp.where(ranges[index], jnp.int32(index), taken)
    return taken


Flag = Array | None  # a bool scalar; None is True
Results = tuple[Array, Array, Any]  # what a backward pass starts from, see `Pass.backward`


def row_delta(results: Results, dtype: Any) -> Array:
    """sum_v d_out · out, [B, N, T], of a backward pass; as given, where it was given."""
    d_out, out, _ = results
    return out if out.ndim < d_out.ndim else jnp.sum(d_out.astype(dtype) * out.astype(dtype), -1)


class Pass(Protocol):
    """Pools by one path of a plan, forward and backward; static and hashable.

    Arrays that pad T may come back longer than T: the caller cuts them. Where `active` is given
    and False, the pass may skip all computation and return zeros.
    """

    def forward(
        self, operands: Any, allowed: Allowed, seed: Any, active: Flag
    ) -> tuple[Array, Any]:
        """Output [B, N, T, V] and what the backward pass needs per query, leaves [B, N, T]."""
        ...

    def backward(
        self, operands: Any, allowed: Allowed, seed: Any, active: Flag, results: Results
    ) -> Any:
        """Cotangents of the operands, from (d out, out, the leaves).

        Instead of the output, sum_v d_out · out, [B, N, T], is enough.
        """
        ...

    def log_sum(self, stats: Any) -> Array:
        """The log-sum-exp of each row, [B, N, T], from the leaves; -inf for an empty row."""
        ...

    def smooth(
        self, operands: Any, allowed: Allowed, seed: Any, stats: Any
    ) -> tuple[Array, Array | None]:
        """Output and log-sum-exp (None where the regime has none) as in `forward`, by code that
        JAX differentiates in both modes; `stats` are constants.
        """
        ...


class ShardablePass(Pass, Protocol):
    """A pass that can pool one device's shard of the batch and of the heads by itself."""

    @property
    def axes(self) -> Axes: ...

    def resized(self, axes: Axes) -> "ShardablePass":
        """The same pass for a shard of that size."""
        ...


class Passes(NamedTuple):
    """One pass for each path of a plan; static.

    Attributes:
        dtype: of the output.
        branch: whether paths not taken are skipped by a branch (`lax.switch`), or run with
            `active` False, as loops of no iterations.
        sharded: whether each pass may be divided among devices by batch and heads (sharded.py).
        lse: whether the log-sum-exp of each row is an output too.
    """

    passes: tuple[Pass, ...]
    device: Device
    dtype: Any
    branch: bool
    sharded: bool
    lse: bool = False

    def run(self, path: int, direction: str, *inputs: Any) -> Any:
        return run_pass(self.passes[path], direction, inputs, self.device, sharded=self.sharded)

    def backward(self, residuals: Any, cotangents: tuple[Array, ...]) -> tuple[Any, ...]:
        """Cotangents of the operands, by each pass's own backward pass."""
        operands, allowed, seed, taken, outs, (out, stats) = residuals
        d_out = cotangents[0]
        if self.lse:  # delta, the sum of d out · out, may stand for the output
            wide = outs[1].dtype
            out = jnp.sum(d_out.astype(wide) * out.astype(wide), -1) - cotangents[1]

        def run(path: int, active: Flag) -> Any:
            results = (d_out, out, stats)
            return self.run(path, "backward", operands[path], allowed, seed, active, results)

        if taken is None:
            return (run(0, None),)
        every = range(len(self.passes))
        if not self.branch:
            return tuple(run(path, taken == path) for path in every)
        zeros = jax.tree.map(jnp.zeros_like, operands)

        def alone(path: int) -> tuple[Any, ...]:
            """Every branch of lax.switch must return cotangents of all operands."""
            return tuple(run(path, None) if path == other else zeros[other] for other in every)

        return lax.switch(taken, [functools.partial(alone, path) for path in every])

    def smooth(self, residuals: Any) -> tuple[Array, ...]:
        """The outputs by code that JAX differentiates in both modes; equal to the passes' own."""
        operands, allowed, seed, taken, outs, (_, stats) = residuals

        def run(path: int) -> tuple[Array, ...]:
            out, lse = self.passes[path].smooth(operands[path], allowed, seed, stats)
            more = (cast(Array, lse).astype(outs[1].dtype),) if self.lse else ()
            return (out.astype(self.dtype), *more)

        with on_device(self.device):
            if taken is None:
                return run(0)
            every = range(len(self.passes))
            return lax.switch(taken, [functools.partial(run, path) for path in every])


def run_pass(
    one: Any, direction: str, inputs: tuple[Any, ...], device: Device, *, sharded: bool
) -> Any:
    """one.forward(*inputs) or one.backward(*inputs), of a pass or of a summary of the weights.

    Args:
        sharded: as in `Passes`.
    """
    # A backward pass is traced after the call that it belongs to.
    with on_device(device):
        # Inside shard_map the caller says which device has what, elsewhere the compiler.
        inside = jax.sharding.get_abstract_mesh().manual_axes
        if sharded and jax.device_count() > 1 and not inside:
            from regard.pool.sharded import run_sharded  # needed on several devices only

            return run_sharded(one, direction, inputs)
        return getattr(one, direction)(*inputs)


def pool_by(
    static: Passes,
    operands: tuple[Any, ...],
    allowed: Allowed,
    seed: Array | None,
    taken: Array | None,
) -> Any:
    """Pools by the only pass; with several, by the one whose index is `taken`.

    Returns:
        The output; where `static.lse`, the output and the log-sum-exp of each row.
    """
    outs, _ = _outputs(static, operands, allowed, seed, taken)
    return outs if static.lse else outs[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _outputs(
    static: Passes,
    operands: tuple[Any, ...],
    allowed: Allowed,
    seed: Array | None,
    taken: Array | None,
) -> tuple[tuple[Array, ...], Any]:
    """The outputs; and the output before it is rounded, with the stats of its rows, for the
    backward pass: these have no derivative.
    """

    def run(path: int, active: Flag) -> tuple[Array, Any]:
        return static.run(path, "forward", operands[path], allowed, seed, active)

    every = range(len(static.passes))
    if taken is None:
        out, stats = run(0, None)
    elif static.branch:
        out, stats = lax.switch(taken, [functools.partial(run, path, None) for path in every])
    else:
        found = [run(path, taken == path) for path in every]
        out, stats = jax.tree.map(functools.partial(lax.select_n, taken), *found)
    lse = (static.passes[0].log_sum(stats),) if static.lse else ()
    return (out.astype(static.dtype), *lse), (out, stats)


@_outputs.defjvp
def _outputs_with_tangents(static: Passes, primals: Any, tangents: Any) -> Any:
    # Imported when first used: a call that is not differentiated does not need it.
    from regard.pool.derivatives import Residuals, tangents_of, zero_tangents

    outs, saved = _outputs(static, *primals)
    found = tangents_of(static, Residuals._make((*primals, outs, saved)), tangents[0])
    return (outs, saved), (tuple(found), zero_tangents(saved))
