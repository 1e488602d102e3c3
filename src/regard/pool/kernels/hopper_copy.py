"""The warpgroup that copies: features, values and bias from memory into the ring, ahead of use."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu

from regard.pool.kernels.hopper_compute import slot_of

if TYPE_CHECKING:
    from regard.pool.kernels.hopper import HopperPlan, Memory, Place

REGISTERS = 40


def copy(plan: "HopperPlan", place: "Place", memory: "Memory", refs: dict[str, Any]) -> None:
    """Copies every key block of this block of queries, chunk by chunk."""
    mgpu.set_max_registers(REGISTERS, action="decrease")
    blocks, (low, _, _, high) = plan.blocks, place.visits
    together = "cluster" if blocks.cluster > 1 else None
    rows = pl.ds(place.first_row, blocks.queries)

    def copy_chunk(ik: Array, c: Array) -> None:
        step = (ik - low) * plan.chunks + c
        slot = slot_of(step, blocks.stages)
        features = pl.ds(c * plan.chunk, plan.chunk)
        pl.when(step >= blocks.stages)(lambda: mgpu.barrier_wait(memory.chunk_consumed.at[slot]))
        if blocks.resident:
            copy_bias(ik, slot)
        else:
            mgpu.copy_gmem_to_smem(
                refs["phi"].at[plan.at(place.example, place.head, rows, features)],
                memory.phi.at[slot],
                memory.chunk_ready.at[slot],
            )
        keys = pl.ds(ik * blocks.keys, blocks.keys)
        mgpu.copy_gmem_to_smem(
            refs["psi"].at[plan.at(place.example, place.key_head, keys, features)],
            memory.psi.at[slot],
            memory.chunk_ready.at[slot],
            collective_axes=together,
        )

    def copy_bias(ik: Array, slot: Any) -> None:
        if "key_bias" in refs:
            mgpu.copy_gmem_to_smem(
                refs["key_bias"].at[
                    place.example, place.key_head, pl.ds(ik * blocks.keys, blocks.keys)
                ],
                memory.bias.at[slot],
                memory.bias_ready.at[slot],
            )

    def copy_key_block(ik: Array, carry: None) -> None:
        keys = pl.ds(ik * blocks.keys, blocks.keys)
        slot = slot_of(ik - low, blocks.value_slots)

        def wait_for_slot() -> None:
            wait = lambda: mgpu.barrier_wait(memory.value_consumed.at[slot])  # noqa: E731
            pl.when(ik - low >= blocks.value_slots)(wait)

        bias_first = "key_bias" in refs and not blocks.resident
        if bias_first:
            wait_for_slot()
            copy_bias(ik, slot)
        lax.fori_loop(0, plan.chunks, lambda c, _: copy_chunk(ik, c), None)
        if not bias_first:
            wait_for_slot()
        mgpu.copy_gmem_to_smem(
            refs["value"].at[plan.at(place.example, place.key_head, keys)],
            memory.value.at[slot],
            memory.value_ready.at[slot],
            collective_axes=together,
        )

    lax.fori_loop(low, high, copy_key_block, None)
    # No block may exit while its neighbor still copies into it or signals its barriers.
    _drain(memory.chunk_consumed, (high - low) * plan.chunks, blocks.stages)
    _drain(memory.value_consumed, high - low, blocks.value_slots)


def _drain(barriers: Any, steps: Any, slots: int) -> None:
    """Waits for the uses of the last slots."""

    def wait(step: Array, carry: None) -> None:
        mgpu.barrier_wait(barriers.at[slot_of(step, slots)])

    lax.fori_loop(jnp.maximum(steps - slots, 0), steps, wait, None)
