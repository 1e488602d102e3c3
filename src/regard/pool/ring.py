"""Ring attention: a sequence sharded over the devices of a mesh axis (Liu et al. 2023).

Each device keeps its own queries. Keys and values travel round the ring, one device further at
every step, while the device pools over those that it holds (blockwise.py does that), and partial
results are merged. On the way back the same keys travel again and their gradients with them, so
that both are home after one round. No device ever holds more than its share and one that passes
through: memory is linear in the share.

In causal order the last device would have the most to do and the first next to nothing. There
each device takes two chunks of the sequence, one from the front and its mirror image from the
back ("zigzag"), which all have the same number of pairs.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, PartitionSpec

from regard.dropout import Draw
from regard.mask import Allowed
from regard.pool.blockwise import TiledPass
from regard.pool.layout import Layout
from regard.pool.passes import Static, pool_by
from regard.pool.problem import Problem
from regard.pool.request import Request, Ring
from regard.pool.tiles import Operands, Tiling, make_operands, pad_rows
from regard.pool.ways import find_ways, lift_ran
from regard.score.contract import accumulation_dtype
from regard.shapes import Axes
from regard.varying import vary_as

ROWS = 2  # the axis of queries and keys in [B, N, T, ...]


def ring_of(mesh: Any, axis: str | None) -> Ring | None:
    """The ring that a caller of `attend` asked for; None: none."""
    if axis is None:
        if mesh is not None:
            raise ValueError(
                "mesh= goes with sequence_axis=, the axis that shards T and S. Got a mesh of "
                f"{dict(mesh.shape)} and no sequence_axis. Fix: name one; for a sharded batch no "
                "argument is needed."
            )
        return None
    if mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
    elif isinstance(mesh, jax.sharding.Mesh):
        # The same devices, with shardings left to XLA: what is not the ring's business, such as a
        # sharded batch, then needs no words here.
        kinds = (AxisType.Auto,) * len(mesh.axis_names)
        mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)
    return Ring(mesh, axis)


def accepts(request: Request) -> str:
    """Why the ring can do this; or NotImplementedError."""
    if not request.normalize.merges:
        name = type(request.normalize).__name__
        raise NotImplementedError(f"{name} needs whole rows: what two devices found cannot merge")
    if request.bias:
        raise NotImplementedError("no bias= per pair of query and key: it would not be sharded")
    if request.mask.segments or request.mask.boolean:
        raise NotImplementedError("masks by lengths, causal order and windows only")
    return "keys and values travel round the mesh axis; memory linear in each device's share"


def ring(problem: Problem, over: Ring, sizes: Tiling | None, platform: str) -> tuple[Array, Array]:
    """The output, [B, N, T, V], in the value's dtype, and whether the lift ran (bool scalar).

    What a lift needs to know of all keys (their mean, their range) is found before the ring, where
    arrays are whole and XLA adds up over the devices.
    """
    axes, band = problem.axes, problem.allowed.facts and problem.allowed.facts.band
    chunks = 2 if band is not None and band.right is not None and over.size > 1 else 1
    ways, in_range = find_ways(problem)
    shares = Shares.of(axes, over, chunks)
    passes, operands = [], []
    for way in ways:
        layout = Layout.of(problem, way.scored, way.lift, sizes, platform)
        layout = replace(layout, axes=shares.local_axes(axes))
        passes.append(RingPass(axes, shares, layout))
        operands.append(make_operands(problem, way.scored, way.lift))
    allowed = (shares.ranges(problem.allowed, axes),) * len(ways)
    static = Static(tuple(passes), platform != "cpu", cast(Array, problem.value).dtype)
    out = pool_by(static, tuple(operands), allowed, problem.seed, in_range)
    return out, lift_ran(ways, in_range)


@dataclass(frozen=True)
class Shares:
    """Who has which part of the sequence.

    Attributes:
        over: the ring.
        chunks: how many pieces of the sequence each device has, 1 or 2.
        rows, keys: of one piece; the last ones may be padding.
    """

    over: Ring
    chunks: int
    rows: int
    keys: int

    @classmethod
    def of(cls, axes: Axes, over: Ring, chunks: int) -> "Shares":
        pieces = over.size * chunks
        return cls(over, chunks, -(-axes.T // pieces), -(-axes.S // pieces))

    @property
    def all_rows(self) -> int:
        return self.over.size * self.chunks * self.rows

    @property
    def all_keys(self) -> int:
        return self.over.size * self.chunks * self.keys

    def local_axes(self, axes: Axes) -> Axes:
        """One device's queries, and the keys of one piece."""
        return replace(axes, T=self.chunks * self.rows, S=self.keys)

    def ranges(self, allowed: Allowed, axes: Axes) -> Allowed:
        """A mask as ranges alone; padding is past every end."""
        end = jnp.full((1, 1, 1), axes.S, jnp.int32) if allowed.end is None else allowed.end
        return Allowed(allowed.start, end, (), ())

    def piece(self, device: Array | int, chunk: int) -> Array | int:
        """The number of a device's piece along the sequence."""
        if chunk == 0:
            return device
        return 2 * self.over.size - 1 - device

    def queries(self) -> Array:
        """Inside the ring: the index in the whole of each of this device's queries."""
        me, own = lax.axis_index(self.over.axis), jnp.arange(self.rows, dtype=jnp.int32)
        return jnp.concatenate([self.piece(me, c) * self.rows + own for c in range(self.chunks)])

    def spread(self, tree: Any) -> Any:
        """Inside the ring: from neighboring rows to the two pieces of the zigzag."""
        return self._exchange(tree, back=False)

    def gather(self, tree: Any) -> Any:
        """The inverse of `spread`."""
        return self._exchange(tree, back=True)

    def _exchange(self, tree: Any, back: bool) -> Any:
        """Each device has the pieces 2i and 2i+1; piece p belongs to device p or its mirror."""
        if self.chunks == 1:
            return tree
        size = self.over.size
        home = [p if p < size else 2 * size - 1 - p for p in range(2 * size)]
        me = lax.axis_index(self.over.axis)
        # A device gets one even and one odd piece; the front one is the even one on even devices.
        gets_even_front = me % 2 == 0

        def exchange(array: Array) -> Array:
            if array.shape[ROWS] == 1:
                return array
            first, second = jnp.split(array, 2, ROWS)
            if back:  # what is held: front, back; sent home by parity
                even = jnp.where(gets_even_front, first, second)
                odd = jnp.where(gets_even_front, second, first)
                pairs = [[(home[2 * i + odd_], i) for i in range(size)] for odd_ in (0, 1)]
            else:
                even, odd = first, second
                pairs = [[(i, home[2 * i + odd_]) for i in range(size)] for odd_ in (0, 1)]
            even = lax.ppermute(even, self.over.axis, pairs[0])
            odd = lax.ppermute(odd, self.over.axis, pairs[1])
            if back:
                return jnp.concatenate([even, odd], ROWS)
            front = jnp.where(gets_even_front, even, odd)
            rear = jnp.where(gets_even_front, odd, even)
            return jnp.concatenate([front, rear], ROWS)

        return jax.tree.map(exchange, tree)


@dataclass(frozen=True)
class RingPass:
    """A `Pass` whose arrays are whole outside and shares inside."""

    axes: Axes
    shares: Shares
    layout: Layout

    def forward(
        self, operands: Operands, allowed: Allowed, seed: Array | None, active: Array | None
    ) -> tuple[Array, Any]:
        rows = PartitionSpec(None, None, self.shares.over.axis)
        inputs = (self._padded(operands), self._padded_ranges(allowed), seed, active)
        specs = (self._specs(inputs[0]), self._range_specs(inputs[1]), None, None)
        out = self._shard(self._local_forward, specs, rows)(*inputs)
        return jax.tree.map(lambda a: a[:, :, : self.axes.T], out)

    def backward(
        self,
        operands: Operands,
        allowed: Allowed,
        seed: Array | None,
        active: Array | None,
        results: tuple[Array, Array, Any],
    ) -> Operands:
        rows = PartitionSpec(None, None, self.shares.over.axis)
        padded, pull = jax.vjp(self._padded, operands)
        whole = jax.tree.map(lambda a: pad_rows(a, ROWS, self.shares.all_rows), results)
        inputs = (padded, self._padded_ranges(allowed), seed, active, whole)
        specs = (self._specs(padded), self._range_specs(inputs[1]), None, None, rows)
        cotangents = self._shard(self._local_backward, specs, self._specs(padded))(*inputs)
        return pull(jax.tree.map(lambda d, x: d.astype(x.dtype), cotangents, padded))[0]

    # Inside the ring ---------------------------------------------------------------------------

    def _local_forward(
        self, operands: Operands, allowed: Allowed, seed: Array | None, active: Array | None
    ) -> tuple[Array, Any]:
        shares, normalize = self.shares, self.layout.normalize
        operands, allowed, seed, active = self._own(operands, allowed, seed, active)
        axes = self.layout.axes
        rows, wide = (axes.B, axes.N, axes.T), self._wide(operands)

        def step(carry: Any, number: Array) -> tuple[Any, None]:
            key_side, out, stats = carry
            coming = self._pass_on(key_side)  # under way while this one is worked on
            for chunk in range(shares.chunks):
                part, ranges, draw = self._part(operands, allowed, seed, key_side, number, chunk)
                plan, laid, laid_ranges = self.layout.lay(part, ranges)
                found = TiledPass(axes, plan).forward(laid, laid_ranges, draw, active)
                stats, share, other = normalize.merge(stats, found[1])
                out = _times(out, share) + _times(found[0], other)
            return (coming, out, stats), None

        start = (
            (operands.key, operands.value),
            jnp.zeros((*rows, axes.V), wide),
            normalize.nothing(rows, wide),
        )
        steps = jnp.arange(shares.over.size, dtype=jnp.int32)
        (_, out, stats), _ = lax.scan(step, vary_as(start, operands), steps)
        return shares.gather((out, stats))

    def _local_backward(
        self,
        operands: Operands,
        allowed: Allowed,
        seed: Array | None,
        active: Array | None,
        results: tuple[Array, Array, Any],
    ) -> Operands:
        shares, axes = self.shares, self.layout.axes
        operands, allowed, seed, active = self._own(operands, allowed, seed, active)
        results = shares.spread(results)
        wide = self._wide(operands)
        zeros = functools.partial(jax.tree.map, lambda a: jnp.zeros(a.shape, wide))
        add = functools.partial(jax.tree.map, lambda total, d: total + d.astype(wide))

        def step(carry: Any, number: Array) -> tuple[Any, None]:
            key_side, d_keys, d_query, d_shared = carry
            coming = self._pass_on(key_side)
            for chunk in range(shares.chunks):
                part, ranges, draw = self._part(operands, allowed, seed, key_side, number, chunk)
                plan, _, laid_ranges = self.layout.lay(part, ranges)
                laid, pull = jax.vjp(lambda part: self.layout.lay(part, ranges)[1], part)  # noqa: B023
                tiled = TiledPass(axes, plan)
                d_laid = tiled.backward(laid, laid_ranges, draw, active, results)
                (d_part,) = pull(d_laid)
                d_query = add(d_query, d_part.query)
                d_shared = add(d_shared, (d_part.score, d_part.expansion))
                d_keys = self._add_chunk(d_keys, (d_part.key, d_part.value), chunk)
            return (coming, self._pass_on(d_keys), d_query, d_shared), None

        key_side = (operands.key, operands.value)
        shared = (operands.score, operands.expansion)
        start = (key_side, zeros(key_side), zeros(operands.query), zeros(shared))
        steps = jnp.arange(shares.over.size, dtype=jnp.int32)
        carry, _ = lax.scan(step, vary_as(start, (operands, results)), steps)
        _, (d_key, d_value), d_query, d_shared = carry
        d_score, d_expansion = jax.tree.map(lambda d: lax.psum(d, shares.over.axis), d_shared)
        d_key, d_value, d_query = shares.gather((d_key, d_value, d_query))
        return Operands(d_score, d_expansion, d_query, d_key, d_value, None)

    def _part(
        self,
        operands: Operands,
        allowed: Allowed,
        seed: Array | None,
        key_side: Any,
        number: Array,
        chunk: int,
    ) -> tuple[Operands, Allowed, Draw | None]:
        """The problem of this device's queries and one piece of the keys that it holds."""
        shares = self.shares
        size, me = shares.over.size, lax.axis_index(shares.over.axis)
        owner = (me - number) % size
        first = jnp.asarray(shares.piece(owner, chunk) * shares.keys, jnp.int32)
        key, value = jax.tree.map(
            lambda a: lax.slice_in_dim(
                a, chunk * shares.keys, (chunk + 1) * shares.keys, axis=ROWS
            ),
            key_side,
        )

        def seen_from_here(bound: Array | None) -> Array | None:
            return None if bound is None else jnp.clip(bound - first, 0, shares.keys)

        ranges = Allowed(seen_from_here(allowed.start), seen_from_here(allowed.end), (), ())
        draw = None if seed is None else Draw(seed, shares.queries(), first, self.axes.T)
        return replace(operands, key=key, value=value), ranges, draw

    def _pass_on(self, tree: Any) -> Any:
        """One device further round the ring."""
        size = self.shares.over.size
        onward = [(i, (i + 1) % size) for i in range(size)]
        return jax.tree.map(lambda a: lax.ppermute(a, self.shares.over.axis, onward), tree)

    def _add_chunk(self, totals: Any, parts: Any, chunk: int) -> Any:
        keys = self.shares.keys
        here = slice(chunk * keys, (chunk + 1) * keys)
        return jax.tree.map(
            lambda total, d: total.at[:, :, here].add(d.astype(total.dtype)), totals, parts
        )

    def _own(
        self, operands: Operands, allowed: Allowed, seed: Array | None, active: Array | None
    ) -> tuple[Operands, Allowed, Array | None, Array | None]:
        """What shard_map gave this device, as its pieces, and varying over the ring."""
        given = (operands, allowed, seed, active)
        me = lax.axis_index(self.shares.over.axis)
        operands, allowed, seed, active = vary_as(given, (operands, me))
        query, key, value, start, end = self.shares.spread(
            (operands.query, operands.key, operands.value, allowed.start, allowed.end)
        )
        operands = replace(operands, query=query, key=key, value=value)
        return operands, Allowed(start, end, (), ()), seed, active

    def _wide(self, operands: Operands) -> Any:
        """The dtype of sums, as the layout has it."""
        return accumulation_dtype(self.layout.compute, cast(Array, operands.value).dtype)

    # Around the ring ---------------------------------------------------------------------------

    def _padded(self, operands: Operands) -> Operands:
        rows, keys = self.shares.all_rows, self.shares.all_keys
        return replace(
            operands,
            query=jax.tree.map(lambda a: _to_size(a, rows), operands.query),
            key=jax.tree.map(lambda a: _to_size(a, keys), operands.key),
            value=jax.tree.map(lambda a: _to_size(a, keys), operands.value),
        )

    def _padded_ranges(self, allowed: Allowed) -> Allowed:
        """Padded queries see nothing: their range ends at 0."""
        rows = self.shares.all_rows
        start, end = jax.tree.map(lambda a: pad_rows(a, ROWS, rows), (allowed.start, allowed.end))
        return Allowed(start, end, (), ())

    def _specs(self, operands: Operands) -> Any:
        rows = PartitionSpec(None, None, self.shares.over.axis)
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
        axis = self.shares.over.axis

        def spec(bound: Array) -> PartitionSpec:
            return PartitionSpec(None, None, axis if bound.shape[ROWS] > 1 else None)

        start, end = jax.tree.map(spec, (allowed.start, allowed.end))
        return Allowed(start, end, (), ())

    def _shard(self, local: Any, in_specs: Any, out_specs: Any) -> Any:
        whole = PartitionSpec()
        in_specs = tuple(whole if spec is None else spec for spec in in_specs)
        over = self.shares.over
        return jax.shard_map(
            local,
            mesh=over.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={over.axis},
        )


def _times(out: Array, share: Array | None) -> Array:
    return out if share is None else out * share[..., None]


def _to_size(array: Array, rows: int) -> Array:
    """Zeros behind the last row; also where there is one row only."""
    missing = rows - array.shape[ROWS]
    return jnp.pad(array, [(0, 0), (0, 0), (0, missing), (0, 0)]) if missing else array
