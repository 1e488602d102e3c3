"""The warpgroups that compute: scores of a tile by wgmma, online softmax, pooling by wgmma."""

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu

if TYPE_CHECKING:
    from regard.pool.kernels.hopper import HopperPlan, Memory, Place

ROWS = 64  # queries of one warpgroup: the rows of one wgmma
COLUMNS = 64  # of the values that are zeroed at a time
APART = 8  # columns of the weights that are summed on their own: threads have two of each eight
REGISTERS = 232
LOWEST = -1e30  # where the running maximum starts: finite, so that -inf - LOWEST is -inf
LOG2_E = 1.4426950408889634
TINY = 1e-37
Accumulator = mgpu.WGMMAAccumulatorRef
PER_ROW, PER_KEY, TILE = (
    mgpu.Layout.WGMMA.reduce(1),
    mgpu.Layout.WGMMA.reduce(0),
    mgpu.Layout.WGMMA,
)


class State(NamedTuple):
    """Of online softmax: the output so far, and the running maximum and sum of each row.

    The sum is [64], or [64, 8], still to be summed: a row's columns lie on four threads, which then
    need not meet at every key block. As measured, 3 % faster, and 1 % slower one product ahead.
    """

    out: Array
    top: Array
    total: Array


class Weighed(NamedTuple):
    """A key block after softmax: its weights, by how much what is there already shrinks, and the
    new maximum of each row.
    """

    weights: Array
    rescale: Array
    top: Array

    def total(self, state: State) -> Array:
        """The new sum of each row."""
        if state.total.ndim == 1:
            return state.total * self.rescale + self.weights.sum(axis=1)
        parts = [self.weights[:, c : c + APART] for c in range(0, self.weights.shape[1], APART)]
        while len(parts) > 1:  # in pairs, so that no addition waits for the one before it
            odd = parts[-1:] if len(parts) % 2 else []
            parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)] + odd
        return state.total * lax.broadcast_in_dim(self.rescale, state.total.shape, [0]) + parts[0]


def slot_of(step: Any, slots: int) -> Any:
    # A loop's index is int64 where JAX counts in 64 bits.
    return lax.rem(jnp.asarray(step, jnp.int32), jnp.int32(slots)) if slots > 1 else 0


def compute(plan: "HopperPlan", place: "Place", memory: "Memory", refs: dict[str, Any]) -> None:
    """Pools 64 queries over every key block they visit, and writes their output."""
    mgpu.set_max_registers(REGISTERS, action="increase")
    worker = _Worker(plan, place, memory, refs)
    shape, layout = ((ROWS,), PER_ROW) if plan.blocks.ahead else ((ROWS, APART), TILE)
    state = State(
        mgpu.layout_cast(jnp.zeros((ROWS, plan.value_width), jnp.float32), TILE),
        mgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), PER_ROW),
        mgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout),
    )
    worker.finish(worker.visit_ahead(state) if plan.blocks.ahead else worker.visit_all(state))


class _Worker:
    """One warpgroup."""

    def __init__(self, plan: "HopperPlan", place: "Place", memory: "Memory", refs: dict[str, Any]):
        self.plan, self.place, self.memory, self.refs = plan, place, memory, refs
        self.rows = pl.ds(place.first_row + place.warpgroup * ROWS, ROWS)
        self.start, self.end = self._per_row("start"), self._per_row("end")
        self.ranged = self.start is not None or self.end is not None
        if plan.blocks.resident:
            ready = memory.phi_ready.at[place.warpgroup]
            own = refs["phi"].at[plan.at(place.example, place.head, self.rows)]
            mgpu.copy_gmem_to_smem(own, memory.phi.at[place.warpgroup], ready)
            mgpu.barrier_wait(ready)

    # -- the loop over key blocks ---------------------------------------------------------------

    def visit_all(self, state: State) -> State:
        """Key block after key block: those that need a mask, those that do not, and the rest."""
        low, full_low, full_high, high = self.place.visits

        def visit(ik: Array, state: State, masked: bool) -> State:
            return self.absorb(ik, self.scores(ik), state, masked)

        with_mask = functools.partial(visit, masked=True)
        self._await_features(low)
        pl.when(self.place.warpgroup == 1)(self._take_turn)
        if self.start is not None:
            state = lax.fori_loop(low, full_low, with_mask, state)
        state = lax.fori_loop(full_low, full_high, functools.partial(visit, masked=False), state)
        if self.ranged:
            state = lax.fori_loop(full_high, high, with_mask, state)
        pl.when(self.place.warpgroup == 0)(self._take_turn)
        return state

    def visit_ahead(self, state: State) -> State:
        """The same, one product ahead: a key block's scores and the pooling of the block before it
        are started together, and its softmax runs under that pooling (the order of
        FlashAttention-3: Shah et al. 2024, section 3.2).
        """
        low, full_low, full_high, high = self.place.visits

        def step(ik: Array, carry: tuple[Array, State], masked: bool) -> tuple[Array, State]:
            operand, state = carry

            def overlapped(tile: Any, pooled: Any) -> tuple[Array, State]:
                pooled[...] = state.out
                bias = self._bias(ik)
                if bias is not None:
                    tile[...] = bias
                self._await_turn()
                self._multiply(ik, tile)
                self._pool(ik - 1, operand, pooled, masked=masked)
                self._pass_turn()
                scores = mgpu.wgmma_accumulator_load(tile, wait_n=1)
                self._release(ik)
                found = self._softmax(ik, scores, state, masked)
                found, total = lax.optimization_barrier((found, found.total(state)))
                return self._after_pooling(ik, found, total, pooled[...])

            if self.plan.interpret:  # it knows no product with an operand in registers
                self._await_turn()
                scores = self.scores(ik)
                pooled = self._pool_plainly(ik - 1, operand, state.out, masked)
                self._pass_turn()
                found = self._softmax(ik, scores, state, masked)
                return self._after_pooling(ik, found, found.total(state), pooled)
            shapes = (ROWS, self.plan.blocks.keys), (ROWS, self.plan.value_width)
            return pl.run_scoped(overlapped, *(Accumulator(one, jnp.float32) for one in shapes))

        with_mask = functools.partial(step, masked=True)
        pl.when(self.place.warpgroup == 1)(self._pass_turn)
        found = self._softmax(low, self.scores(low), state, masked=self.ranged)
        first = State(state.out, found.top, found.total(state))
        carry = found.weights.astype(self.plan.dtype), first
        full_low, full_high = (jnp.maximum(bound, low + 1) for bound in (full_low, full_high))
        if self.start is not None:
            carry = lax.fori_loop(low + 1, full_low, with_mask, carry)
        carry = lax.fori_loop(full_low, full_high, functools.partial(step, masked=False), carry)
        if self.ranged:
            carry = lax.fori_loop(full_high, high, with_mask, carry)
        pl.when(self.place.warpgroup == 0)(self._await_turn)  # the last turn, not taken
        operand, state = carry
        if self.plan.interpret:
            out = self._pool_plainly(high - 1, operand, state.out, masked=self.ranged)
        else:
            pool = functools.partial(self._pool, high - 1, operand, masked=self.ranged)
            out = pl.run_state(pool)(Accumulator.init(state.out))
        self._release_values(high - 1)
        return State(out, state.top, state.total)

    def _after_pooling(
        self, ik: Array, found: Weighed, total: Array, pooled: Array
    ) -> tuple[Array, State]:
        """The weights of a block as an operand, and the state that they will be pooled into.

        Weights are rounded when the product has ended: their registers are those of the weights
        that it multiplies, and to write them earlier would be to wait for it earlier.
        """
        out, weights = lax.optimization_barrier((pooled, found.weights))
        self._release_values(ik - 1)
        out = out * lax.broadcast_in_dim(found.rescale, out.shape, [0])
        return weights.astype(self.plan.dtype), State(out, found.top, total)

    # -- one tile -------------------------------------------------------------------------------

    def scores(self, ik: Array) -> Array:
        """phi · psi + key_bias of one key block, [64, keys]."""
        tile = (ROWS, self.plan.blocks.keys)
        bias = self._bias(ik)
        if bias is not None and not self.plan.interpret:
            # The accumulator begins with the bias, so that adding it costs nothing.
            scores = pl.run_state(functools.partial(self._multiply, ik))(Accumulator.init(bias))
        else:

            def from_zero(accumulator: Any) -> Array:
                self._multiply(ik, accumulator)
                return accumulator[...]

            scores = pl.run_scoped(from_zero, Accumulator(tile, jnp.float32))
            scores = scores if bias is None else scores + bias
        self._release(ik)
        return scores

    def absorb(self, ik: Array, scores: Array, state: State, masked: bool) -> State:
        """Online softmax, and the values of one key block."""
        plan, memory = self.plan, self.memory
        # In this order: with the sum first, additive attention by few features took a tenth longer.
        found = self._softmax(ik, scores, state, masked)
        out = state.out * lax.broadcast_in_dim(found.rescale, state.out.shape, [0])
        operand = found.weights.astype(plan.dtype)
        total, top = found.total(state), found.top
        if plan.blocks.turns:
            # Everything above before the turn: the compiler would move it past the barrier.
            out, total, top, operand = lax.optimization_barrier((out, total, top, operand))
            mgpu.barrier_arrive(memory.turn)
        slot = self._await_values(ik, masked)
        if plan.blocks.turns:
            mgpu.barrier_wait(memory.turn)
        if plan.interpret:  # it knows no product with an operand in registers
            out = out + self._plain_product(operand, slot)
            self._await_features(ik + 1)
        else:

            def pool(accumulator: Any) -> None:
                mgpu.wgmma(accumulator, operand, memory.value.at[slot])
                self._await_features(ik + 1)

            out = pl.run_state(pool)(Accumulator.init(out))
        self._release_values(ik)
        return State(out, top, total)

    def finish(self, state: State) -> None:
        """Writes output and log-sum-exp; an empty row is 0 and -inf."""
        plan, place = self.plan, self.place
        own = self.refs["out"].at[plan.at(place.part, place.head, self.rows)]
        summed = state.total if state.total.ndim == 1 else state.total.sum(axis=1)
        total = jnp.maximum(summed, TINY)
        out = state.out * lax.broadcast_in_dim(1.0 / total, state.out.shape, [0])
        same = self.memory.phi.dtype == plan.out_dtype  # sines are float16, beside bfloat16
        if plan.blocks.resident and same and plan.width == plan.value_width:
            # The query's features are done with: their place, and the copy engine.
            rows = self.memory.phi.at[place.warpgroup]
            rows[...] = out.astype(plan.out_dtype)
            mgpu.commit_smem()
            mgpu.copy_smem_to_gmem(rows, own)
        else:
            _store(own, out.astype(plan.out_dtype))
        lse = state.top + jnp.log(total) * LOG2_E
        lse = jnp.where(summed > 0, lse, -jnp.inf)
        self.refs["lse"][place.part, place.head, self.rows] = lse
        mgpu.wait_smem_to_gmem(0, wait_read_only=True)  # written it is without us

    # -- parts ----------------------------------------------------------------------------------

    def _multiply(self, ik: Array, accumulator: Any) -> None:
        """Adds phi · psi to the accumulator; the last product may still be running."""
        blocks, memory, warpgroup = self.plan.blocks, self.memory, self.place.warpgroup
        low = self.place.visits[0]
        if blocks.resident:
            slot = slot_of(ik - low, blocks.stages)
            if blocks.ahead:
                mgpu.barrier_wait(memory.chunk_ready.at[slot])
            mgpu.wgmma(accumulator, memory.phi.at[warpgroup], memory.psi.at[slot].transpose((1, 0)))
            if not blocks.ahead:
                self._take_turn()
            return

        def multiply_chunk(c: Array, carry: None) -> None:
            step = (ik - low) * self.plan.chunks + c
            slot = slot_of(step, blocks.stages)
            mgpu.barrier_wait(memory.chunk_ready.at[slot])
            own = memory.phi.at[slot, pl.ds(warpgroup * ROWS, ROWS)]
            mgpu.wgmma(accumulator, own, memory.psi.at[slot].transpose((1, 0)))
            mgpu.wgmma_wait(1)  # the chunk before this one is done with
            before = memory.chunk_consumed.at[slot_of(step - 1, blocks.stages)]
            pl.when(c > 0)(lambda: mgpu.barrier_arrive(before))

        lax.fori_loop(0, self.plan.chunks, multiply_chunk, None)

    def _await_features(self, ik: Array) -> None:
        """Waits for a key block's features while the matrix unit is busy with something else."""
        if not self.plan.blocks.resident or self.plan.blocks.ahead:
            return
        low, *_, high = self.place.visits
        ready = self.memory.chunk_ready.at[slot_of(ik - low, self.plan.blocks.stages)]
        pl.when(ik < high)(lambda: mgpu.barrier_wait(ready))

    def _release(self, ik: Array) -> None:
        """The last chunk of a key block is done with."""
        step = (ik - self.place.visits[0] + 1) * self.plan.chunks - 1
        slot = slot_of(step, self.plan.blocks.stages)
        mgpu.barrier_arrive(self.memory.chunk_consumed.at[slot])

    def _softmax(self, ik: Array, scores: Array, state: State, masked: bool) -> Weighed:
        if masked:
            scores = self._mask(ik, scores)
        top = jnp.maximum(state.top, scores.max(axis=1) * self.plan.scale)
        rescale = jnp.exp2(state.top - top)
        weights = jnp.exp2(scores * self.plan.scale - lax.broadcast_in_dim(top, scores.shape, [0]))
        return Weighed(weights, rescale, top)

    def _pool(self, ik: Array, operand: Array, pooled: Any, *, masked: bool) -> None:
        """Adds the values of a key block; the product may still be running."""
        slot = self._await_values(ik, masked)
        mgpu.wgmma(pooled, operand, self.memory.value.at[slot])

    def _pool_plainly(self, ik: Array, operand: Array, out: Array, masked: bool) -> Array:
        """The same in the interpreter."""
        return out + self._plain_product(operand, self._await_values(ik, masked))

    def _plain_product(self, operand: Array, slot: Any) -> Array:
        return jnp.dot(operand.astype(jnp.float32), self.memory.value[slot].astype(jnp.float32))

    def _await_values(self, ik: Array, masked: bool) -> Any:
        """The slot of a key block's values, once they are there."""
        slot = slot_of(ik - self.place.visits[0], self.plan.blocks.value_slots)
        mgpu.barrier_wait(self.memory.value_ready.at[slot])
        if masked:
            self._zero_values(ik, slot)
        return slot

    def _release_values(self, ik: Array) -> None:
        slot = slot_of(ik - self.place.visits[0], self.plan.blocks.value_slots)
        mgpu.barrier_arrive(self.memory.value_consumed.at[slot])

    def _bias(self, ik: Array) -> Array | None:
        """Of one key block, [64, keys]."""
        if "key_bias" not in self.refs:
            return None
        low, *_, high = self.place.visits
        slot = slot_of(ik - low, self.plan.bias_slots)
        # It always is. As a branch it keeps the compiler from moving things past the wait.
        pl.when(ik < high)(lambda: mgpu.barrier_wait(self.memory.bias_ready.at[slot]))
        bias = mgpu.load(self.memory.bias.at[slot], layout=PER_KEY)  # type: ignore[call-arg]
        tile = lax.broadcast_in_dim(bias, (ROWS, self.plan.blocks.keys), [1])
        return mgpu.layout_cast(tile, TILE)

    def _mask(self, ik: Array, scores: Array) -> Array:
        keys = mgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=TILE)
        keys = keys + ik * self.plan.blocks.keys
        if self.end is not None:
            ends = lax.broadcast_in_dim(self.end, scores.shape, [0])
            scores = jnp.where(keys < ends, scores, -jnp.inf)
        if self.start is not None:
            starts = lax.broadcast_in_dim(self.start, scores.shape, [0])
            scores = jnp.where(keys >= starts, scores, -jnp.inf)
        return scores

    def _zero_values(self, ik: Array, slot: Any) -> None:
        """Zeroes the values that every query of this block masks: 0 times NaN is NaN.

        Both warpgroups do it, neither waits for the other: they write the same.
        """
        if self.place.last_key is not None:
            masked = (ik + 1) * self.plan.blocks.keys > self.place.last_key
            pl.when(masked)(lambda: self._write_zeros(ik, slot))

    def _write_zeros(self, ik: Array, slot: Any) -> None:
        shape = (self.plan.blocks.keys, COLUMNS)
        for first in range(0, self.plan.value_width, COLUMNS):
            part = self.memory.value.at[slot, :, pl.ds(first, COLUMNS)]
            values = mgpu.load(part, layout=TILE)  # type: ignore[call-arg]
            keys = mgpu.broadcasted_iota(jnp.int32, shape, 0, layout=TILE)
            kept = keys + ik * self.plan.blocks.keys < self.place.last_key
            part[...] = jnp.where(kept, values, jnp.zeros_like(values))
        mgpu.commit_smem()

    def _per_row(self, name: str) -> Array | None:
        """start or end of the warpgroup's own rows."""
        if name not in self.refs:
            return None
        shape = self.plan.shapes[name]
        example = 0 if shape[0] == 1 else self.place.example
        head = 0 if shape[1] == 1 else self.place.head
        own = self.refs[name].at[example, head, self.rows]
        return mgpu.load(own, layout=PER_ROW, optimized=False)  # type: ignore[call-arg]

    def _take_turn(self) -> None:
        if self.plan.blocks.turns:
            mgpu.barrier_arrive(self.memory.turn)
            mgpu.barrier_wait(self.memory.turn)

    def _await_turn(self) -> None:
        if self.plan.blocks.turns:
            mgpu.barrier_wait(self.memory.turn.at[self.place.warpgroup])

    def _pass_turn(self) -> None:
        if self.plan.blocks.turns:
            mgpu.barrier_arrive(self.memory.turn.at[1 - self.place.warpgroup])


def _store(rows: Any, value: Array) -> None:
    """Straight from the accumulator's registers, 16 bytes of a 32-byte sector at a time.

    JAX 0.12 requires optimized=False for this store; 0.11 has no such argument.
    """
    if hasattr(mgpu, "store"):
        mgpu.store(rows, value, optimized=False)
    else:
        rows[...] = value
