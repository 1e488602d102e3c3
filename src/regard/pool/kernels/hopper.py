"""The forward pass for Hopper GPUs: Pallas's Mosaic GPU lowering (wgmma, TMA, specialized warps).

After FlashAttention-3 (Shah et al. 2024) and JAX's own `pallas.ops.gpu.attention_mgpu`, for
features of any width.

Two warpgroups compute (hopper_compute.py), 64 queries each; a third only copies (hopper_copy.py).
Features stream through a ring buffer of chunks; a cluster of two blocks shares the key side of
every chunk, which halves the traffic from the L2 cache. Narrow features (a plain dot product)
stay in shared memory instead.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu

from regard.pool.kernels.hopper_compute import ROWS, compute
from regard.pool.kernels.hopper_copy import copy

WARPGROUPS = 2  # that compute
MULTIPROCESSORS = 132  # of an H100 or H200
CACHE = 32 << 20  # bytes of features that stay in the L2 cache beside what streams through it


@dataclass(frozen=True)
class HopperBlocks:
    """Block shapes.

    Attributes:
        keys: keys of a tile, a multiple of 64.
        chunk: features per step of the ring.
        stages: steps of the ring; of key blocks, where the query features are resident.
        value_slots: blocks of values held at a time; two where there is a key bias.
        cluster: blocks of queries that share the key side, 1 or 2.
        resident: keep the query features in shared memory (narrow features).
        ahead: start a tile's scores before the tile before it is pooled (narrow features).
        turns: the two warpgroups take turns at the matrix unit.
    """

    keys: int
    chunk: int = 64
    stages: int = 4
    value_slots: int = 1
    cluster: int = 1
    resident: bool = False
    ahead: bool = False
    turns: bool = False

    @property
    def queries(self) -> int:
        return WARPGROUPS * ROWS


def pick(width: int, value_width: int, biased: bool) -> HopperBlocks:
    """Block shapes by the widths, as measured on an H200."""
    if width <= 128 and value_width <= 128:
        ahead = max(width, value_width) > 64  # as measured: faster at 128, slower at 64
        return HopperBlocks(128, stages=2, value_slots=2, resident=True, ahead=ahead, turns=True)
    slots = 2 if biased else 1
    if value_width <= 64:
        return HopperBlocks(256, stages=4 if slots == 1 else 3, cluster=2, value_slots=slots)
    if value_width <= 128 and not biased:
        return HopperBlocks(256, stages=3, cluster=2)
    return HopperBlocks(128, stages=4 if slots == 1 else 2, cluster=2, value_slots=slots)


def pick_splits(blocks: HopperBlocks, shape: tuple[int, ...], key_blocks: int) -> int:
    """Split factor of the keys: how many thread blocks share one block of queries.

    Every block of queries reads its features again for each block of keys, from the L2 cache as
    long as those of all running blocks fit it. Wide features do not fit: then several thread blocks
    take different keys for the same queries, and their outputs are merged. The same helps where
    there are too few queries to fill the GPU.

    Args:
        shape: B, N, T, R of phi, whatever the order of its axes.
    """
    B, N, T, R = shape
    programs = B * N * (T // blocks.queries)
    features = min(programs, MULTIPROCESSORS) * blocks.queries * R * 2
    for_cache = -(-features // CACHE) if features > 1.25 * CACHE else 1
    for_work = max(1, MULTIPROCESSORS // programs)
    return max(1, min(max(for_cache, for_work), key_blocks // 4, 8))


class HopperPlan(NamedTuple):
    """What is static about a kernel, for both kinds of warpgroup."""

    blocks: HopperBlocks
    splits: int
    group: int
    width: int
    value_width: int
    tiles: int
    key_blocks: int
    scale: float
    dtype: Any  # of the values, and of the weights they are multiplied by
    shapes: dict[str, tuple[int, ...]]  # of the arrays that may be there or not
    tokens_first: bool
    interpret: bool

    @property
    def out_dtype(self) -> Any:
        """Parts are merged before they are rounded."""
        return self.dtype if self.splits == 1 else jnp.float32

    @property
    def chunk(self) -> int:
        return self.width if self.blocks.resident else self.blocks.chunk

    @property
    def chunks(self) -> int:
        return self.width // self.chunk

    @property
    def bias_slots(self) -> int:
        """A key block's bias comes and goes with its features, or, where those come in chunks, with
        its values.
        """
        return self.blocks.stages if self.blocks.resident else self.blocks.value_slots

    def at(self, example: Any, head: Any, rows: Any, *features: Any) -> tuple[Any, ...]:
        """The index of one head's rows in phi, psi, value or out; TMA strides over other heads."""
        first = (example, rows, head) if self.tokens_first else (example, head, rows)
        return (*first, *features)


class Place(NamedTuple):
    """Where a block of threads works."""

    example: Array
    part: Array  # of the output: one per example and split
    head: Array
    key_head: Array
    first_row: Array
    warpgroup: Array
    visits: tuple[Any, Any, Any, Any]  # key blocks: low, full_low, full_high, high
    last_key: Any  # values past it are masked by every query of this block; None: nothing to zero


class Memory(NamedTuple):
    """Shared memory and its barriers; `ready` after a copy, `consumed` after the last use."""

    phi: Any
    psi: Any
    value: Any
    bias: Any
    phi_ready: Any
    chunk_ready: Any
    value_ready: Any
    bias_ready: Any
    chunk_consumed: Any
    value_consumed: Any
    turn: Any


def forward(
    phi: Array,
    psi: Array,
    value: Array,
    key_bias: Array | None,
    ranges: tuple[Array | None, Array | None],
    bounds: Array | None,
    *,
    scale: float,
    blocks: HopperBlocks,
    splits: int = 1,
    tokens_first: bool = False,
    interpret: Any = None,
) -> tuple[Array, Array]:
    """Softmax pooling over features.

    Args:
        phi: [B, N, T, R], T whole clusters of query blocks, R whole chunks.
        psi: [B, K, S, R], S whole key blocks.
        value: [B, K, S, V], V a multiple of 64.
        key_bias: [B, K, S] float32.
        ranges: start and end, [B|1, N|1, T] int32: the visible keys of each query.
        bounds: [B|1, N|1, T / (cluster · queries), 4] int32, see pool/tile.py; every block of
            queries visits at least one block of keys. None: all of them, none masked. With a fifth
            number, values past it are zeroed here: they may be NaN.
        scale: positive; scores are scale · (phi · psi + key_bias), in units of log2.
        splits: see `pick_splits`.
        tokens_first: phi, psi, value and the output have their second and third axis the other way
            round: [B, T, N, R], as callers of attend keep them; so does the output. All else stays.
        interpret: InterpretGPUParams, to run on a CPU.

    Returns:
        Output [B, N, T, V] in the value's dtype, and log2-sum-exp2 [B, N, T] float32.
    """
    (B, N, T, R), (_, K, S, _) = phi.shape, psi.shape
    if tokens_first:
        (B, T, N, R), (_, S, K, _) = phi.shape, psi.shape
    V = value.shape[-1]
    optional = dict(key_bias=key_bias, start=ranges[0], end=ranges[1], bounds=bounds)
    arrays = {name: array for name, array in optional.items() if array is not None}
    shapes = {name: array.shape for name, array in arrays.items()}
    plan = HopperPlan(
        blocks,
        splits,
        N // K,
        R,
        V,
        T // (blocks.queries * blocks.cluster),
        S // blocks.keys,
        scale,
        value.dtype,
        shapes,
        tokens_first,
        interpret is not None,
    )

    def body(*refs: Any) -> None:
        named = dict(zip(("phi", "psi", "value", *arrays), refs, strict=False))
        named["out"], named["lse"] = refs[-2:]
        place = _find_place(plan, named)

        def work(**scratch: Any) -> None:
            memory = Memory(**scratch)
            pl.when(place.warpgroup < WARPGROUPS)(lambda: compute(plan, place, memory, named))
            pl.when(place.warpgroup == WARPGROUPS)(lambda: copy(plan, place, memory, named))

        pl.run_scoped(work, **_scratch(plan, phi.dtype), collective_axes="warpgroup")

    clustered = blocks.cluster > 1
    call = mgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(plan.at(B * splits, N, T, V), plan.out_dtype),
            jax.ShapeDtypeStruct((B * splits, N, T), jnp.float32),
        ),
        grid=(plan.tiles, N, B * splits),
        grid_names=("tile", "head", "part"),
        cluster=(blocks.cluster,) if clustered else (),
        cluster_names=("cluster",) if clustered else (),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=mgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    out, lse = call(phi, psi, value, *arrays.values())
    return (out, lse) if splits == 1 else _merge(plan, out, lse)


def _merge(plan: HopperPlan, out: Array, lse: Array) -> tuple[Array, Array]:
    """[B · splits, ...] -> [B, ...]: each part counts by its share of the sum of exponentials."""
    out, lse = (a.reshape(-1, plan.splits, *a.shape[1:]) for a in (out, lse))
    top = lse.max(1, keepdims=True)
    some = top > -jnp.inf
    share = jnp.where(some, jnp.exp2(lse - jnp.where(some, top, 0.0)), 0.0)  # [B, splits, N, T]
    total = jnp.where(some, share.sum(1, keepdims=True), 1.0)
    share = share / total
    if plan.tokens_first:
        share = share.swapaxes(2, 3)  # [B, splits, T, N]
    merged = (out * share[..., None]).sum(1)
    return merged.astype(plan.dtype), (top + jnp.log2(total))[:, 0]


def _find_place(plan: HopperPlan, refs: dict[str, Any]) -> Place:
    blocks = plan.blocks
    tile, head, part = (lax.axis_index(name) for name in ("tile", "head", "part"))
    # The last queries first: under a causal mask they have the most to do, and what is started last
    # should be short.
    tile = plan.tiles - 1 - tile
    query_block = tile
    if blocks.cluster > 1:
        query_block = tile * blocks.cluster + lax.axis_index("cluster")
    example = part if plan.splits == 1 else lax.div(part, jnp.int32(plan.splits))
    visits: tuple[Any, Any, Any, Any] = (0, 0, plan.key_blocks, plan.key_blocks)
    last_key = None
    if "bounds" in refs:
        shape = plan.shapes["bounds"]
        where = (0 if shape[0] == 1 else example, 0 if shape[1] == 1 else head, tile)
        low, full_low, full_high, high = (refs["bounds"][(*where, i)] for i in range(4))
        visits = (low, full_low, full_high, high)
        last_key = refs["bounds"][(*where, 4)] if shape[3] == 5 else None
    if plan.splits > 1:
        visits = _own_visits(plan, lax.rem(part, jnp.int32(plan.splits)), visits)
    return Place(
        example,
        part,
        head,
        lax.div(head, jnp.int32(plan.group)),
        query_block * blocks.queries,
        lax.axis_index("warpgroup"),
        visits,
        last_key,
    )


def _own_visits(
    plan: HopperPlan, split: Array, visits: tuple[Any, ...]
) -> tuple[Any, Any, Any, Any]:
    """The visits that fall into one part of the keys; one masked key block where none do."""
    low, full_low, full_high, high = visits
    first = lax.div(split * plan.key_blocks, jnp.int32(plan.splits))
    last = lax.div((split + 1) * plan.key_blocks, jnp.int32(plan.splits))
    low = jnp.minimum(jnp.maximum(low, first), last - 1)
    high = jnp.maximum(jnp.minimum(high, last), low + 1)
    full_low = jnp.minimum(jnp.maximum(full_low, low), high)
    full_high = jnp.minimum(jnp.maximum(full_high, full_low), high)
    return low, full_low, full_high, high


def _scratch(plan: HopperPlan, dtype: Any) -> dict[str, Any]:
    """Shared memory in the tiling and swizzle that wgmma and TMA agree on, and the barriers."""
    blocks, slots = plan.blocks, plan.blocks.value_slots
    swizzled = functools.partial(
        mgpu.SMEM, transforms=(mgpu.TilingTransform((8, 64)), mgpu.SwizzleTransform(128))
    )
    phi_shape = (blocks.stages, blocks.queries, plan.chunk)
    if blocks.resident:
        phi_shape = (WARPGROUPS, ROWS, plan.width)
    consumed: Any = mgpu.Barrier
    if blocks.cluster > 1:  # a neighbor's copies land here too
        consumed = functools.partial(mgpu.ClusterBarrier, collective_axes=("cluster",))
    bias = "key_bias" in plan.shapes
    return dict(
        phi=swizzled(phi_shape, dtype),
        psi=swizzled((blocks.stages, blocks.keys, plan.chunk), dtype),
        value=swizzled((slots, blocks.keys, plan.value_width), plan.dtype),
        bias=mgpu.SMEM((plan.bias_slots, blocks.keys), jnp.float32) if bias else None,
        phi_ready=mgpu.Barrier(num_barriers=WARPGROUPS),
        chunk_ready=mgpu.Barrier(
            num_arrivals=1 if blocks.resident else 2, num_barriers=blocks.stages
        ),
        value_ready=mgpu.Barrier(num_barriers=slots),
        bias_ready=mgpu.Barrier(num_barriers=plan.bias_slots),
        chunk_consumed=consumed(num_arrivals=WARPGROUPS, num_barriers=blocks.stages),
        value_consumed=consumed(num_arrivals=WARPGROUPS, num_barriers=slots),
        turn=mgpu.Barrier(num_barriers=WARPGROUPS)
        if blocks.ahead
        else mgpu.Barrier(num_arrivals=WARPGROUPS),
    )
