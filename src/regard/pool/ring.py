"""Ring attention: a sequence sharded over the devices of a mesh axis (Liu et al. 2023).

Each device keeps its own queries. Keys and values travel around the ring, one device further at
every step, while the device pools over those that it holds, and partial results are merged: the
kernels of a GPU pool scores with a lift, blockwise.py the others. In the backward pass the same
keys travel again, their gradients with them, so that both are home after one circuit. No device
ever holds more than its shard and one that passes through: memory is linear in the shard.

In causal order the last device would have the most work and the first next to none. There each
device takes two chunks of the sequence, one from the front and its mirror image from the back
("zigzag"), so that all have the same number of pairs.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from regard.dropout import Draw, Seed
from regard.mask import Allowed
from regard.placement import Device, sequence_over, vary_as
from regard.pool.backend import Backend, Problem, Request
from regard.pool.blockwise import TiledPass
from regard.pool.kernels.block_shapes import Blocks, current_blocks
from regard.pool.layout import forced_tiling, pad_rows
from regard.pool.pallas import kernel_for_parts
from regard.pool.ring_shards import ROWS, Shards
from regard.pool.score_plan import Flag, Results, ScorePlan, row_delta
from regard.pool.sequence_axis import SequenceAxis
from regard.pool.xla_tiles import Operands, Tiling, make_operands
from regard.score.contract import accumulation_dtype
from regard.shapes import Axes


class Settings(NamedTuple):
    """The devices that share the sequence, forced tile sizes, and the device of the call.

    Attributes:
        kernel: that pools lifted scores, see `kernel_for_parts`; None: tiles do.
        blocks: the kernel's forced block shapes.
    """

    over: SequenceAxis
    sizes: Tiling | None
    device: Device
    kernel: str | None
    blocks: Blocks | None


class Ring(Backend):
    """A sequence sharded over a mesh axis; memory linear in each device's shard."""

    name = "ring"
    takes_sharded_sequences = True

    def refuses(self, request: Request) -> str | None:
        if request.sequence is None:
            return (
                "ring attention needs sequence_axis=, the mesh axis that shards T and S: "
                'attend(..., mesh=mesh, sequence_axis="seq")'
            )
        if not request.normalize.merges:
            name = type(request.normalize).__name__
            return f"{name} needs whole rows: the parts of two devices cannot be merged"
        if request.bias:
            return "the ring takes no bias= per pair of query and key: it would not be sharded"
        if request.mask.boolean:
            return "the ring takes masks by lengths, causal order, windows and segments only"
        return None

    def describe(self, request: Request) -> str:
        found = "keys and values travel around the mesh axis; memory linear in each device's shard"
        return found if _kernel_of(request) is None else f"{found}; lifted scores by kernels"

    def settings(self, request: Request) -> Settings:
        over = cast(SequenceAxis, request.sequence)
        kernel = _kernel_of(request)
        return Settings(over, forced_tiling(), request.device, kernel, current_blocks())

    def pool(self, problem: Problem, settings: Settings) -> tuple[Array, Array]:
        """What a lift needs to know of all keys (their mean, their range) is found before the ring:
        where arrays are whole, XLA reduces over the devices; inside the caller's shard_map, the
        lift does.
        """
        problem, (over, sizes, device, kernel, blocks) = problem.zeroed(), settings
        axes, band = problem.axes, problem.allowed.facts and problem.allowed.facts.band
        chunks = 2 if band is not None and band.right is not None and over.size > 1 else 1
        if over.inside and (axes.T % 2 or axes.S % 2):
            chunks = 1  # no padding is possible there, so halves must be equal
        axes = over.whole(axes)
        with sequence_over(over.axis if over.inside else None):
            # Another lift would take one shard of the keys for all of them.
            lifted = problem.score.sums_over_shards or not over.inside
            plan = ScorePlan.of(problem, lifted=lifted)
        if plan.taken is not None and over.inside:  # all devices take the same path
            plan = plan._replace(taken=lax.pmax(plan.taken, over.axis))
        shards = Shards.of(axes, over, chunks, device.platform)
        passes = []
        for path in plan.paths:
            tiled = TiledPass.of(problem, path, sizes, device.platform)
            local = shards.local_axes(axes)
            tiled = replace(tiled, axes=local, whole_batch=over.has_other_axes)
            part: Any = tiled
            if kernel is not None and path.lift is not None and path.key_heads == axes.K:
                # Imported when first used: loading Pallas takes a tenth of `import regard`.
                from regard.pool.kernels.feature_tiles import FeatureTiles

                part = FeatureTiles.of(problem, local, kernel, blocks)
            passes.append((RingPass(axes, shards, tiled, part), make_operands(problem, path)))
        problem = replace(problem, allowed=shards.ranges(problem.allowed, axes))
        # What is the same on all devices has a gradient that is the sum of theirs.
        like = lax.axis_index(over.axis) if over.inside else ()
        branch = device.platform != "cpu"
        return plan.pool(problem, passes, device, branch=branch, sharded=False, like=like)


def _kernel_of(request: Request) -> str | None:
    """The compiler cannot divide a kernel over the other axes of a mesh, and would gather them."""
    over = cast(SequenceAxis, request.sequence)
    return None if over.has_other_axes else kernel_for_parts(request)


@dataclass(frozen=True)
class RingPass:
    """A `Pass` whose arrays are global outside of shard_map and shards inside.

    Attributes:
        part: pools one block of a device's queries over one piece of keys: `tiled`, or kernels.
    """

    axes: Axes
    shards: Shards
    tiled: TiledPass
    part: Any

    def forward(
        self, operands: Operands, allowed: Allowed, seed: Array | None, active: Flag
    ) -> tuple[Array, Any]:
        if self.shards.over.inside:
            return self._local_forward(operands, _with_row_axes(allowed), seed, active)
        rows = PartitionSpec(None, None, self.shards.over.axis)
        inputs = (self._padded(operands), self._padded_ranges(allowed), seed, active)
        specs = (self._specs(inputs[0]), self._range_specs(inputs[1]), None, None)
        out = self._shard(self._local_forward, specs, rows)(*inputs)
        return jax.tree.map(lambda a: a[:, :, : self.axes.T], out)

    def backward(
        self,
        operands: Operands,
        allowed: Allowed,
        seed: Array | None,
        active: Flag,
        results: Results,
    ) -> Operands:
        if self.shards.over.inside:
            mask = _with_row_axes(allowed)
            cotangents = self._local_backward(operands, mask, seed, active, results)
            return jax.tree.map(lambda d, x: d.astype(x.dtype), cotangents, operands)
        rows = PartitionSpec(None, None, self.shards.over.axis)
        padded, pull = jax.vjp(self._padded, operands)
        whole = jax.tree.map(lambda a: pad_rows(a, ROWS, self.shards.all_rows), results)
        inputs = (padded, self._padded_ranges(allowed), seed, active, whole)
        specs = (self._specs(padded), self._range_specs(inputs[1]), None, None, rows)
        cotangents = self._shard(self._local_backward, specs, self._specs(padded))(*inputs)
        return pull(jax.tree.map(lambda d, x: d.astype(x.dtype), cotangents, padded))[0]

    def log_sum(self, stats: Any) -> Array:
        return self.tiled.log_sum(stats)

    def smooth(
        self, operands: Operands, allowed: Allowed, seed: Array | None, stats: Any
    ) -> tuple[Array, Array | None]:
        """On whole arrays; inside the caller's shard_map, this shard of queries and all keys, which
        are gathered: for derivatives beyond the first, memory is linear in the whole sequence.
        """
        over, axes = self.shards.over, self.axes
        draw: Seed = seed
        if over.inside:
            rows = axes.T // over.size
            gather = functools.partial(lax.all_gather, axis_name=over.axis, axis=ROWS, tiled=True)
            key, value = jax.tree.map(gather, (operands.key, operands.value))
            operands, axes = replace(operands, key=key, value=value), replace(axes, T=rows)
            along = functools.partial(lax.all_gather, axis_name=over.axis, axis=1, tiled=True)
            ids = tuple((of_rows, along(of_keys)) for of_rows, of_keys in allowed.segment_ids)
            allowed = replace(allowed, segment_ids=ids)
            if seed is not None:
                own = lax.axis_index(over.axis) * rows + jnp.arange(rows, dtype=jnp.int32)
                draw = Draw(seed, None, own, 0, self.axes.T)
        return replace(self.tiled, axes=axes).smooth(operands, allowed, draw, stats)

    # Inside the ring ---------------------------------------------------------------------------

    def _local_forward(
        self, operands: Operands, allowed: Allowed, seed: Array | None, active: Flag
    ) -> tuple[Array, Any]:
        shards, normalize, axes = self.shards, self.tiled.normalize, self.axes
        operands, allowed, seed, active = self._own(operands, allowed, seed, active)
        pool, wide = self.part, self._wide(operands)
        rows = (axes.B, axes.N, shards.chunks * shards.rows)

        def visit(here: Any, first: Array, results: Any) -> Any:
            def block(index: Array, results: Any) -> Any:
                part = self._part(operands, allowed, seed, here, first, index)
                out, stats = shards.block(results, index)
                found = pool.forward(*part, active)
                stats, share, other = normalize.merge(stats, found[1])
                out = _times(out, share) + _times(found[0], other)
                return shards.with_block(results, (out, stats), index)

            return _repeat(shards.row_blocks, block, results)

        def step(index: Array, carry: Any) -> Any:
            keys, results = carry
            piece, here, first = self._current_piece(keys, index)
            coming = self._pass_on(here)  # in transit while this piece is pooled
            results = visit(here, first, results)
            return _store(keys, coming, piece), results

        keys = shards.cut((operands.key, operands.value, _key_ids(allowed)))
        start = keys, (jnp.zeros((*rows, axes.V), wide), normalize.nothing(rows, wide))
        _, results = lax.fori_loop(0, self._steps(), step, vary_as(start, operands))
        return shards.gather(results)

    def _local_backward(
        self,
        operands: Operands,
        allowed: Allowed,
        seed: Array | None,
        active: Flag,
        results: Results,
    ) -> Operands:
        shards, pool = self.shards, self.part
        operands, allowed, seed, active = self._own(operands, allowed, seed, active)
        wide = self._wide(operands)
        # Once, and not for every piece: then the output need not be kept.
        results = shards.spread((results[0], row_delta(results, wide), results[2]))
        zeros = functools.partial(jax.tree.map, lambda a: jnp.zeros(a.shape, wide))
        add = functools.partial(jax.tree.map, lambda total, d: total + d.astype(wide))

        def visit(here: Any, first: Array, sums: Any) -> Any:
            def block(index: Array, sums: Any) -> Any:
                d_keys, d_query, d_shared = sums
                part = self._part(operands, allowed, seed, here, first, index)
                d_part = pool.backward(*part, active, shards.block(results, index))
                d_rows = add(shards.block(d_query, index), d_part.query)
                d_query = shards.with_block(d_query, d_rows, index)
                d_shared = add(d_shared, (d_part.score, d_part.expansion))
                return add(d_keys, (d_part.key, d_part.value)), d_query, d_shared

            return _repeat(shards.row_blocks, block, sums)

        def step(index: Array, carry: Any) -> Any:
            keys, d_keys, d_query, d_shared = carry
            piece, here, first = self._current_piece(keys, index)
            coming = self._pass_on(here)
            d_here, d_query, d_shared = visit(
                here, first, (_take(d_keys, piece), d_query, d_shared)
            )
            d_keys = _store(d_keys, self._pass_on(d_here), piece)
            return _store(keys, coming, piece), d_keys, d_query, d_shared

        keys = shards.cut((operands.key, operands.value, _key_ids(allowed)))
        shared = (operands.score, operands.expansion)
        start = (keys, zeros(keys[:2]), zeros(operands.query), zeros(shared))
        start = vary_as(start, (operands, results))
        _, d_keys, d_query, d_shared = lax.fori_loop(0, self._steps(), step, start)
        d_key, d_value = shards.join(d_keys)
        if not shards.over.inside:
            d_shared = jax.tree.map(lambda d: lax.psum(d, shards.over.axis), d_shared)
        d_score, d_expansion = d_shared
        d_key, d_value, d_query = shards.gather((d_key, d_value, d_query))
        return Operands(d_score, d_expansion, d_query, d_key, d_value, None)

    def _steps(self) -> int:
        """Every piece of every device comes by once."""
        return self.shards.over.size * self.shards.key_pieces

    def _current_piece(self, keys: Any, index: Array) -> tuple[Array, Any, Array]:
        """A step's piece: its number; its keys, values and segment ids; its first key's index."""
        step, piece = index // self.shards.key_pieces, index % self.shards.key_pieces
        return piece, _take(keys, piece), self.shards.first_key(step, piece)

    def _part(
        self,
        operands: Operands,
        allowed: Allowed,
        seed: Array | None,
        here: Any,
        first: Array,
        index: Array,
    ) -> tuple[Operands, Allowed, Draw | None]:
        """The problem of one block of this device's queries and the piece of keys it holds now."""
        shards = self.shards

        def in_piece(bound: Array | None) -> Array | None:
            if bound is None:
                return None
            return jnp.clip(shards.block(bound, index) - first, 0, shards.piece_keys)

        key, value, of_keys = here
        of_rows = [shards.block(ids, index) for ids, _ in allowed.segment_ids]
        ids = tuple((q[:, 0], k[:, 0]) for q, k in zip(of_rows, of_keys, strict=True))
        ranges = Allowed(in_piece(allowed.start), in_piece(allowed.end), ids, ())
        draw = None
        if seed is not None:
            at = index * shards.block_rows
            queries = lax.dynamic_slice_in_dim(shards.queries(), at, shards.block_rows)
            draw = Draw(seed, None, queries, first, self.axes.T)
        query = shards.block(operands.query, index)
        return replace(operands, query=query, key=key, value=value), ranges, draw

    def _pass_on(self, tree: Any) -> Any:
        """One device further around the ring."""
        size = self.shards.over.size
        onward = [(i, (i + 1) % size) for i in range(size)]
        return jax.tree.map(lambda a: lax.ppermute(a, self.shards.over.axis, onward), tree)

    def _own(
        self, operands: Operands, allowed: Allowed, seed: Array | None, active: Flag
    ) -> tuple[Operands, Allowed, Array | None, Array | None]:
        """What shard_map gave this device, as its pieces, and varying over the ring."""
        given = (operands, allowed, seed, active)
        me = lax.axis_index(self.shards.over.axis)
        operands, allowed, seed, active = vary_as(given, (operands, me))
        mask = (allowed.start, allowed.end, allowed.segment_ids)
        query, key, value, (start, end, ids) = self.shards.spread(
            (operands.query, operands.key, operands.value, mask)
        )
        operands = replace(operands, query=query, key=key, value=value)
        return operands, Allowed(start, end, ids, ()), seed, active

    def _wide(self, operands: Operands) -> Any:
        """The dtype of sums, as the layout has it."""
        return accumulation_dtype(self.tiled.compute, cast(Array, operands.value).dtype)

    # Around the ring ---------------------------------------------------------------------------

    def _padded(self, operands: Operands) -> Operands:
        rows, keys = self.shards.all_rows, self.shards.all_keys
        return replace(
            operands,
            query=jax.tree.map(lambda a: _to_size(a, rows), operands.query),
            key=jax.tree.map(lambda a: _to_size(a, keys), operands.key),
            value=jax.tree.map(lambda a: _to_size(a, keys), operands.value),
        )

    def _padded_ranges(self, allowed: Allowed) -> Allowed:
        """Padded queries have empty rows: their range ends at 0."""
        rows, keys = self.shards.all_rows, self.shards.all_keys
        start, end = jax.tree.map(lambda a: pad_rows(a, ROWS, rows), (allowed.start, allowed.end))
        ids = _with_row_axes(allowed).segment_ids
        ids = tuple((_to_size(q, rows), _to_size(k, keys)) for q, k in ids)
        return Allowed(start, end, ids, ())

    def _specs(self, operands: Operands) -> Any:
        rows = PartitionSpec(None, None, self.shards.over.axis)
        whole = PartitionSpec()
        return Operands(
            jax.tree.map(lambda _: whole, operands.score),
            jax.tree.map(lambda _: whole, operands.expansion),
            jax.tree.map(lambda _: rows, operands.query),
            jax.tree.map(lambda _: rows, operands.key),
            jax.tree.map(lambda _: rows, operands.value),
            None,
        )

    def _range_specs(self, allowed: Allowed) -> Any:
        axis = self.shards.over.axis

        def spec(bound: Array) -> PartitionSpec:
            return PartitionSpec(None, None, axis if bound.shape[ROWS] > 1 else None)

        start, end = jax.tree.map(spec, (allowed.start, allowed.end))
        ids = jax.tree.map(lambda _: PartitionSpec(None, None, axis), allowed.segment_ids)
        return Allowed(start, end, ids, ())

    def _shard(self, local: Any, in_specs: Any, out_specs: Any) -> Any:
        whole = PartitionSpec()
        in_specs = tuple(whole if spec is None else spec for spec in in_specs)
        over = self.shards.over
        return jax.shard_map(
            local,
            mesh=over.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={over.axis},
            check_vma=self.part.checks_varying,
        )


def _repeat(count: int, body: Any, carry: Any) -> Any:
    return body(jnp.int32(0), carry) if count == 1 else lax.fori_loop(0, count, body, carry)


def _take(tree: Any, index: Array) -> Any:
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, 0, keepdims=False), tree)


def _store(tree: Any, parts: Any, index: Array) -> Any:
    return jax.tree.map(
        lambda a, part: lax.dynamic_update_index_in_dim(a, part, index, 0), tree, parts
    )


def _times(out: Array, share: Array | None) -> Array:
    return out if share is None else out * share[..., None]


def _to_size(array: Array, rows: int) -> Array:
    """Zeros behind the last row; also where there is one row only."""
    missing = rows - array.shape[ROWS]
    widths = [(0, missing if axis == ROWS else 0) for axis in range(array.ndim)]
    return jnp.pad(array, widths) if missing else array


def _with_row_axes(allowed: Allowed) -> Allowed:
    """Segment ids, [B|1, T] and [B|1, S], with rows as their third axis, as other arrays."""
    ids = jax.tree.map(lambda array: array[:, None], allowed.segment_ids)
    return replace(allowed, segment_ids=ids)


def _key_ids(allowed: Allowed) -> tuple[Array, ...]:
    return tuple(of_keys for _, of_keys in allowed.segment_ids)
