"""The warpgroups that compute: scores of a tile by wgmma, online softmax, pooling by wgmma."""

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu

if TYPE_CHECKING:
    from regard.pool.wide_kernel.hopper import Memory, Place, Plan

ROWS = 64  # queries of one warpgroup: the rows of one wgmma
COLUMNS = 64  # of the values that are hidden at a time
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
    """Of online softmax: the output so far, and the running maximum and sum of each row."""

    out: Array
    top: Array
    total: Array


def slot_of(step: Any, slots: int) -> Any:
    # A loop's index is int64 where JAX counts in 64 bits.
    return lax.rem(jnp.asarray(step, jnp.int32), jnp.int32(slots)) if slots > 1 else 0


def compute(plan: "Plan", place: "Place", memory: "Memory", refs: dict[str, Any]) -> None:
    """Pools 64 queries over every key block they visit, and writes their output."""
    mgpu.set_max_registers(REGISTERS, action="increase")
    worker = _Worker(plan, place, memory, refs)
    state = State(
        mgpu.layout_cast(jnp.zeros((ROWS, plan.value_width), jnp.float32), TILE),
        mgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), PER_ROW),
        mgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), PER_ROW),
    )
    worker.finish(worker.visit_ahead(state) if plan.blocks.ahead else worker.visit_all(state))


class _Worker:
    """One warpgroup."""

    def __init__(self, plan: "Plan", place: "Place", memory: "Memory", refs: dict[str, Any]):
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
        """The same, with the product of the next key block under way during each softmax."""
        low, full_low, full_high, high = self.place.visits
        tile = Accumulator((ROWS, self.plan.blocks.keys), jnp.float32)

        def step(ik: Array, carry: tuple[Array, State], masked: bool) -> tuple[Array, State]:
            scores, state = carry

            def overlapped(accumulator: Any) -> tuple[Array, State]:
                self._multiply(ik + 1, accumulator)
                pooled = self.absorb(ik, self._add_bias(ik, scores), state, masked)
                return accumulator[...], pooled

            following, pooled = pl.run_scoped(overlapped, tile)
            self._release(ik + 1)
            return following, pooled

        carry = self.scores(low, biased=False), state
        last = high - 1
        with_mask = functools.partial(step, masked=True)
        full_low, full_high = jnp.minimum(full_low, last), jnp.minimum(full_high, last)
        if self.start is not None:
            carry = lax.fori_loop(low, full_low, with_mask, carry)
        carry = lax.fori_loop(full_low, full_high, functools.partial(step, masked=False), carry)
        if self.ranged:
            carry = lax.fori_loop(full_high, last, with_mask, carry)
        scores, state = carry
        return self.absorb(last, self._add_bias(last, scores), state, masked=self.ranged)

    # -- one tile -------------------------------------------------------------------------------

    def scores(self, ik: Array, biased: bool = True) -> Array:
        """phi · psi + key_bias of one key block, [64, keys]."""
        tile = (ROWS, self.plan.blocks.keys)
        bias = self._bias(ik) if biased and "key_bias" in self.refs else None
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
        if masked:
            scores = self._mask(ik, scores)
        top = jnp.maximum(state.top, scores.max(axis=1) * plan.scale)
        rescale = jnp.exp2(state.top - top)
        weights = jnp.exp2(scores * plan.scale - lax.broadcast_in_dim(top, scores.shape, [0]))
        out = state.out * lax.broadcast_in_dim(rescale, state.out.shape, [0])
        operand = weights.astype(plan.dtype)
        total = state.total * rescale + weights.sum(axis=1)
        slot = slot_of(ik - self.place.visits[0], plan.blocks.value_slots)
        if plan.blocks.turns:
            # Everything above before the turn: the compiler would move it past the barrier.
            out, total, top, operand = lax.optimization_barrier((out, total, top, operand))
            mgpu.barrier_arrive(memory.turn)
        mgpu.barrier_wait(memory.value_ready.at[slot])
        if masked and self.place.last_key is not None:
            hidden = (ik + 1) * plan.blocks.keys > self.place.last_key
            pl.when(hidden)(lambda: self._hide_values(ik, slot))
        if plan.blocks.turns:
            mgpu.barrier_wait(memory.turn)
        if plan.interpret:  # it knows no product with an operand in registers
            values = memory.value[slot].astype(jnp.float32)
            out = out + jnp.dot(operand.astype(jnp.float32), values)
            self._await_features(ik + 1)
        else:

            def pool(accumulator: Any) -> None:
                mgpu.wgmma(accumulator, operand, memory.value.at[slot])
                self._await_features(ik + 1)

            out = pl.run_state(pool)(Accumulator.init(out))
        mgpu.barrier_arrive(memory.value_consumed.at[slot])
        return State(out, top, total)

    def finish(self, state: State) -> None:
        """Writes output and log-sum-exp; a row that saw nothing is 0 and -inf."""
        plan, place = self.plan, self.place
        own = self.refs["out"].at[plan.at(place.part, place.head, self.rows)]
        total = jnp.maximum(state.total, TINY)
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
        lse = jnp.where(state.total > 0, lse, -jnp.inf)
        self.refs["lse"][place.part, place.head, self.rows] = lse
        mgpu.wait_smem_to_gmem(0, wait_read_only=True)  # written it is without us

    # -- parts ----------------------------------------------------------------------------------

    def _multiply(self, ik: Array, accumulator: Any) -> None:
        """Adds phi · psi to the accumulator; the last product may still be under way."""
        blocks, memory, warpgroup = self.plan.blocks, self.memory, self.place.warpgroup
        low = self.place.visits[0]
        if blocks.resident:
            slot = slot_of(ik - low, blocks.stages)
            if blocks.ahead:
                mgpu.barrier_wait(memory.chunk_ready.at[slot])
            mgpu.wgmma(accumulator, memory.phi.at[warpgroup], memory.psi.at[slot].transpose((1, 0)))
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

    def _add_bias(self, ik: Array, scores: Array) -> Array:
        return scores + self._bias(ik) if "key_bias" in self.refs else scores

    def _bias(self, ik: Array) -> Array:
        slot = slot_of(ik - self.place.visits[0], self.plan.blocks.value_slots)
        mgpu.barrier_wait(self.memory.bias_ready.at[slot])
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

    def _hide_values(self, ik: Array, slot: Any) -> None:
        """Zeros for the values that nobody of this block may look at: 0 times NaN is NaN.

        Both warpgroups do it, neither waits for the other: they write the same.
        """
        shape = (self.plan.blocks.keys, COLUMNS)
        for first in range(0, self.plan.value_width, COLUMNS):
            part = self.memory.value.at[slot, :, pl.ds(first, COLUMNS)]
            values = mgpu.load(part, layout=TILE)  # type: ignore[call-arg]
            keys = mgpu.broadcasted_iota(jnp.int32, shape, 0, layout=TILE)
            seen = keys + ik * self.plan.blocks.keys < self.place.last_key
            part[...] = jnp.where(seen, values, jnp.zeros_like(values))
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


def _store(rows: Any, value: Array) -> None:
    """Straight from the accumulator's registers, 16 bytes of a 32-byte sector at a time.

    JAX 0.12 asks to be told that this is meant; 0.11 has no way to say it.
    """
    if hasattr(mgpu, "store"):
        mgpu.store(rows, value, optimized=False)
    else:
        rows[...] = value
