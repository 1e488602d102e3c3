"""Pooling over features, forward and backward: pads, picks the kernels, and computes d features.

Forward: hopper.py where it can, else forward.py. Backward: backward_narrow.py for narrow features;
else backward_wide.py writes d scores, a stripe of queries at a time so that memory stays linear,
and matrix products (cuBLAS) do the rest.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array

from regard.dropout import Seed
from regard.mask import Allowed
from regard.normalize.contract import Normalizer
from regard.pool.kernels.backward_narrow import Cotangents, backward_narrow
from regard.pool.kernels.backward_wide import d_scores
from regard.pool.kernels.bias_gradient import bias_gradient, distance_gradient
from regard.pool.kernels.block_shapes import Blocks, pick_blocks
from regard.pool.kernels.features import make_features
from regard.pool.kernels.forward import forward
from regard.pool.kernels.padding import (
    KernelDerivatives,
    KernelMask,
    pad,
    pad_bias,
    pad_dropout,
    pad_mask,
    pad_results,
    round_up,
    run_stripes,
    stripe_rows,
    with_delta,
)
from regard.pool.kernels.tile import LOG2_E, NO_ENTRY, OF_TOKENS, FeatureScore, KernelPlan
from regard.pool.layout import pad_distances
from regard.pool.score_plan import Flag, Results
from regard.pool.xla_tiles import Operands
from regard.score.contract import (
    Expansion,
    Lift,
    RawQueries,
    matmul_precision,
    multiplies_in_float32,
)
from regard.shapes import Axes

NARROW = 128  # 16-bit features and values up to this width have backward_narrow.py
# Of the gradient of a bias: a tile of sums stays in registers beside a tile of scores.
BIAS_BLOCKS = {16: Blocks(64, 64, 64, 4, 2), 32: Blocks(32, 32, 32, 4, 1)}
NARROW_TF32 = 64  # and float32 ones where products are in TF32: tiles take twice the memory


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FeatureOperands:
    """Compact rows of a lift, and the values.

    Attributes:
        expansion: makes features from the rows; None where the rows are the features.
        query: [B, N, T, F].
        key: [B, K, S, F].
        key_bias: [B, K, S]; None is zero.
        value: [B, K, S, V].
        query_bias: [B, N, T], where a soft cap or the regime can see it; None is zero.
        bias: [B|1, N|1, T|1, S|1]; None is zero.
        distance_bias: the lift's, [1, N|1, T + S - 1]; None is zero.
        raw_queries: the lift's; hopper.py takes its query and bias. Gradients go through the
            others, so that its own cotangents are 0.
    """

    expansion: Expansion | None
    query: Array
    key: Array
    key_bias: Array | None
    value: Array
    raw_queries: RawQueries | None = None
    query_bias: Array | None = None
    bias: Array | None = None
    distance_bias: Array | None = None

    def width(self) -> int:
        """Of the features."""
        return Lift(self.query, self.key, expansion=self.expansion).width()


@dataclass(frozen=True)
class FeaturePass(KernelDerivatives):
    """Pooling with the scores scale · phi(q) · psi(k) + key_bias, soft cap, + bias.

    key_bias stands for the numbers per query and per distance too.

    Attributes:
        softcap: see `attend`; regime: how scores become weights, None is softmax.
        dtype: of the features.
        scale: positive.
        device: "hopper", "gpu" (Ampere and later) or "interpret" (a CPU, for tests).
        forced: block shapes; None looks them up.
        raw_values: values that every query masks are not zeroed; only for a forward pass of which
            `zeroes_values` is true.
        bends: the lift's.
    """

    axes: Axes
    dtype: Any
    scale: float
    dropout_rate: float
    device: str
    forced: Blocks | None
    raw_values: bool = False
    softcap: float | None = None
    regime: Normalizer | None = None
    bends: int = 0

    def resized(self, axes: Axes) -> "FeaturePass":
        return replace(self, axes=axes)

    def as_tiles(self, operands: FeatureOperands) -> Operands:
        biases = (operands.query_bias, operands.key_bias)
        of_query, of_key = (None if bias is None else bias[..., None] for bias in biases)
        query = (operands.query.astype(jnp.float32) * self.scale, of_query)
        key, biases = (operands.key, of_key), (operands.bias, operands.distance_bias)
        return Operands(None, operands.expansion, query, key, operands.value, *biases)

    def forward(
        self, operands: FeatureOperands, allowed: Allowed, seed: Seed, active: Flag
    ) -> tuple[Array, Any]:
        dtype = self._forward_dtype(operands)
        plain = self.softcap is None and operands.bias is None and self.regime is None
        plain = plain and operands.distance_bias is None
        if plain and _fits_hopper(self.device, (dtype, operands.value.dtype), allowed, seed):
            out, stats = self._on_hopper(dtype, operands, allowed)
        else:
            static, arrays, mask = self.prepared(operands, allowed, seed, "forward")
            bounds = mask.bounds(static.tile, static.T, static.S)
            out, stats = forward(static, arrays | {"bounds": bounds})
            out = _swapped(static, out)
        T, V = self.axes.T, self.axes.V
        return out[:, :, :T, :V], jax.tree.map(lambda stat: stat[:, :, :T], stats)

    def prepared(
        self, operands: FeatureOperands, allowed: Allowed, seed: Seed, kernel: str
    ) -> tuple[KernelPlan, dict[str, Array], KernelMask]:
        """What a Triton-lowered kernel of the forward pass takes, without bounds; in the caller's
        layout where rows are features.

        Args:
            kernel: whose block shapes, as in block_shapes.py.
        """
        static, sizes = self._static(operands, kernel)
        rows = operands.expansion, operands.query, operands.key
        phi, psi = self._features(self._forward_dtype(operands), sizes, *rows)
        mask = pad_mask(allowed, self.axes, static.T, static.S)
        static = replace(static, tokens_first=operands.expansion is None)
        arrays = self._arrays(static, phi, psi, operands, mask, seed)
        return static, _as_kernels_read(static, arrays), mask

    def _forward_dtype(self, operands: FeatureOperands) -> Any:
        if operands.expansion is not None and self.dtype == jnp.bfloat16:
            # Sines, times a weight that the lift has checked to be small enough: three bits more.
            # Not in the backward pass, where gradients may be too small for float16.
            return jnp.dtype(jnp.float16)
        return self.dtype

    def backward(
        self,
        operands: FeatureOperands,
        allowed: Allowed,
        seed: Seed,
        active: Flag,
        results: Results,
    ) -> FeatureOperands:
        narrow = self._narrow_blocks(operands)
        static, sizes = self._static(operands, "backward", narrow)
        features, pull = jax.vjp(
            functools.partial(self._features, self.dtype, sizes),
            operands.expansion,
            operands.query,
            operands.key,
        )
        mask = pad_mask(allowed, self.axes, static.T, static.S)
        arrays = self._arrays(static, *features, operands, mask, seed)
        arrays |= pad_results(static, results, operands.value.dtype)
        arrays = _as_kernels_read(static, with_delta(static, arrays, mask))
        if narrow is not None:
            found = self._backward_narrow(static, arrays, mask, narrow)
        else:
            bounds = mask.bounds(static.tile, static.T, static.S)
            found = self._backward_wide(static, arrays | {"bounds": bounds})
        width = features[0].shape[-1]
        d_expansion, d_query, d_key = pull((found.phi[..., :width], found.psi[..., :width]))
        T, S, V = self.axes.T, self.axes.S, self.axes.V
        bias, of_query = operands.key_bias, operands.query_bias
        return FeatureOperands(
            d_expansion,
            d_query,
            d_key,
            _cut(found.key_bias, S, bias),
            found.value[:, :, :S, :V].astype(operands.value.dtype),
            jax.tree.map(jnp.zeros_like, operands.raw_queries),
            _cut(found.query_bias, T, of_query),
            *self._d_biases(static, arrays, mask, operands, found.lines),
        )

    def _d_biases(
        self,
        static: KernelPlan,
        arrays: dict[str, Array],
        mask: KernelMask,
        operands: FeatureOperands,
        lines: tuple[list[Array], Blocks] | None,
    ) -> tuple[Array | None, Array | None]:
        """Of the bias, and of the numbers per distance."""
        bias, numbers = operands.bias, operands.distance_bias
        if bias is None and numbers is None:
            return None, None
        blocks = self.forced or BIAS_BLOCKS[8 * jnp.dtype(self.dtype).itemsize]
        size = math.gcd(blocks.queries, blocks.keys, static.T, static.S)
        blocks = replace(blocks, queries=size, keys=size)
        static = replace(static, blocks=blocks)
        arrays = arrays | {"bounds": mask.bounds(static.tile, static.T, static.S)}
        if bias is not None:
            found = bias_gradient(static, arrays, arrays["bias"].shape)
            bias = found[tuple(slice(size) for size in bias.shape)].astype(bias.dtype)
        if numbers is not None:
            found = distance_gradient(static, arrays, numbers.shape[1], lines)
            first = static.T - self.axes.T  # padded queries' come first, padded keys' last
            numbers = found[..., first : first + numbers.shape[2]].astype(numbers.dtype)
        return bias, numbers

    def _backward_wide(self, static: KernelPlan, arrays: dict[str, Array]) -> Cotangents:
        """Of psi, value and key bias summed over a group's heads. Sums over stripes are in float32
        and in a fixed order.
        """
        key, lead = arrays["key"], (static.B, static.K, static.group)
        rows = stripe_rows(self.axes, static.blocks.queries, static.S, self.dtype)
        sums = self.dtype if rows == static.T else jnp.dtype(jnp.float32)
        assert isinstance(static.score, FeatureScore)
        exact = static.score.precision

        def stripe(part: KernelPlan, arrays: dict[str, Array]) -> tuple[list[Array], Any]:
            arrays.pop("visits")
            found = d_scores(part, arrays, self.dtype)
            tiles = found.scores.reshape(*lead, part.S, part.T)
            query = arrays["query"].reshape(*lead, part.T, -1)
            d_phi = self._product("bkgsq,bksr->bkgqr", tiles, key, self.dtype, exact)
            d_psi = self._product("bkgsq,bkgqr->bksr", tiles, query, sums, exact)
            d_value, d_bias = map(static.over_groups, found[1:])
            per_query = [d_phi.reshape(static.B, static.N, part.T, -1)]
            if "query_bias" in arrays:
                per_query.append(found.scores.sum(2, dtype=jnp.float32))
            return per_query, (d_psi, d_value, d_bias)

        (d_phi, *more), (d_psi, d_value, d_bias) = run_stripes(static, arrays, rows, stripe)
        of_query = more[0] if more else None
        return Cotangents(d_phi, d_psi.astype(self.dtype), d_value, of_query, d_bias)

    def _narrow_blocks(self, operands: FeatureOperands) -> tuple[Blocks, Blocks] | None:
        """Block shapes of d keys and d queries; None for wider features, and for products of
        float32, which are cuBLAS's.
        """
        side = max(operands.width(), self.axes.V)
        dtypes = jnp.dtype(self.dtype), jnp.dtype(operands.value.dtype)
        if {dtype.itemsize for dtype in dtypes} != {2}:
            exact = operands.expansion is not None
            in_float32 = any(multiplies_in_float32(dtype, exact=exact) for dtype in dtypes)
            if set(dtypes) != {jnp.dtype(jnp.float32)} or in_float32 or side > NARROW_TF32:
                return None
        if side > NARROW:
            return None
        if self.forced is not None:
            return self.forced, self.forced
        of_keys, of_queries = (
            pick_blocks(kernel, side, side, self.dtype) for kernel in ("d keys", "d queries")
        )
        if self.regime is not None:  # its pieces take registers
            of_keys = replace(of_keys, queries=of_keys.queries // 2, stages=2)
        return of_keys, of_queries

    def _backward_narrow(
        self,
        static: KernelPlan,
        arrays: dict[str, Array],
        mask: KernelMask,
        blocks: tuple[Blocks, Blocks],
    ) -> Cotangents:
        """As `_backward_wide`."""

        callers = functools.partial(_swapped, static)
        found = backward_narrow(static, arrays, mask, blocks, self.dtype)
        d_bias = found.key_bias
        return Cotangents(
            callers(found.phi),
            static.over_groups(callers(found.psi)).astype(self.dtype),
            static.over_groups(callers(found.value)),
            found.query_bias,
            None if d_bias is None else static.over_groups(d_bias),
            found.lines,
        )

    def _product(
        self, subscripts: str, left: Array, right: Array, dtype: Any, precision: Any
    ) -> Array:
        """Accumulated in float32, times the scale, in `dtype`."""
        wide = dtype if self.scale == 1.0 else jnp.dtype(jnp.float32)
        product = jnp.einsum(
            subscripts, left, right, precision=precision, preferred_element_type=wide
        )
        return product if self.scale == 1.0 else (product * self.scale).astype(dtype)

    def _features(
        self,
        dtype: Any,
        sizes: tuple[int, int],
        expansion: Expansion | None,
        query: Array,
        key: Array,
    ) -> tuple[Array, Array]:
        """phi [B, N, T, R] and psi [B, K, S, R] of rows padded to T and S."""
        query, key = pad(query, {2: sizes[0]}), pad(key, {2: sizes[1]})
        return make_features(expansion, query, key, dtype, self.device == "interpret")

    def _on_hopper(
        self, dtype: Any, operands: FeatureOperands, allowed: Allowed
    ) -> tuple[Array, Array]:
        from regard.pool.kernels import hopper  # its lowering is for Hopper GPUs alone

        axes, query, bias = self.axes, operands.query, operands.key_bias
        if operands.raw_queries is not None:
            query, bias = operands.raw_queries
        blocks = hopper.pick(operands.width(), axes.V, bias is not None)
        tile = blocks.queries * blocks.cluster
        T, S = round_up(axes.T, tile), round_up(axes.S, blocks.keys)
        tokens_first = operands.expansion is None  # rows that are features already
        sizes, rows = ((axes.T, axes.S), 1) if tokens_first else ((T, S), 2)
        phi, psi = self._features(dtype, sizes, operands.expansion, query, operands.key)
        value = operands.value
        if tokens_first:
            # The caller's layout, [B, T, N, D]: a pair of transposes that XLA cancels, where it
            # would otherwise copy query, key, value and output.
            phi, psi, value = (side.swapaxes(1, 2) for side in (phi, psi, value))
        width = round_up(phi.shape[-1], 64)
        mask = pad_mask(allowed, axes, T, S)
        bounds = None
        if mask.arrays():
            more = dict(at_least_one=True, last_key=self.raw_values)
            bounds = mask.bounds((tile, blocks.keys), T, S, **more)
        out, lse = hopper.forward(
            pad(phi, {rows: T, 3: width}),
            pad(psi, {rows: S, 3: width}),
            pad(value, {rows: S, 3: round_up(axes.V, 64)}),
            None if bias is None else pad(bias.astype(jnp.float32) / self.scale, {2: S}),
            (mask.start, mask.end),
            bounds,
            scale=self.scale * LOG2_E,
            blocks=blocks,
            splits=hopper.pick_splits(blocks, (axes.B, axes.N, T, width), S // blocks.keys),
            tokens_first=tokens_first,
        )
        return out.swapaxes(1, 2) if tokens_first else out, lse

    def _static(
        self,
        operands: FeatureOperands,
        direction: str,
        narrow: tuple[Blocks, Blocks] | None = None,
    ) -> tuple[KernelPlan, tuple[int, int]]:
        """The arguments of the Triton-lowered kernels, and the padded T and S."""
        axes, width = self.axes, operands.width()
        picked = self.forced or pick_blocks(direction, width, axes.V, self.dtype)
        if self.regime is not None and self.forced is None:  # its pieces take registers
            picked = replace(picked, warps=8, stages=min(picked.stages, 2))
        shapes = narrow or (picked,)
        blocks, whole = shapes[0], round_up(width, 16, power=True)
        T = round_up(axes.T, max(one.queries for one in shapes))
        S = round_up(axes.S, max(one.keys for one in shapes))
        if direction == "backward" and narrow is None:
            T = round_up(axes.T, stripe_rows(axes, blocks.queries, S, self.dtype))
        chunk = min(blocks.chunk, whole) if narrow is None else whole
        precision = matmul_precision(self.dtype, exact=operands.expansion is not None)
        width = round_up(max(width, 1), chunk)  # numbers per key or per distance alone: zeros
        score = FeatureScore(width, chunk, self.scale * LOG2_E, precision)
        static = KernelPlan(
            score,
            blocks,
            axes.B,
            axes.N,
            axes.K,
            T,
            S,
            round_up(axes.V, 16, power=True),
            dropout_rate=self.dropout_rate,
            precision=matmul_precision(operands.value.dtype),
            interpret=self.device == "interpret",
            tokens_first=narrow is not None and operands.expansion is None,
            softcap=self.softcap,
            precise_cap=jnp.dtype(self.dtype).itemsize > 2,
            regime=self.regime,
            bent=self._bent(T),
        )
        return static, (T, S)

    def _bent(self, T: int) -> tuple[int, int]:
        """`KernelPlan.bent`, for T padded queries. A straight line needs two numbers."""
        axes, more = self.axes, T - self.axes.T
        zero = more + axes.S - 1
        first, last = zero - self.bends, zero + self.bends
        return (
            first if first > more else 0,
            last if last + 1 < more + axes.T + axes.S - 1 else NO_ENTRY,
        )

    def _arrays(
        self,
        static: KernelPlan,
        phi: Array,
        psi: Array,
        operands: FeatureOperands,
        mask: KernelMask,
        seed: Seed,
    ) -> dict[str, Array]:
        """What kernels read, by name, but for their bounds."""
        assert isinstance(static.score, FeatureScore)
        S, width = static.S, static.score.width
        arrays = dict(
            query=pad(phi, {3: width}),
            key=pad(psi, {3: width}),
            value=pad(operands.value, {2: S, 3: static.V}),
            **mask.arrays(),
        )
        if operands.key_bias is not None:
            arrays["key_bias"] = pad(operands.key_bias.astype(jnp.float32) * LOG2_E, {2: S})
        if operands.query_bias is not None:
            of_query = operands.query_bias.astype(jnp.float32) * LOG2_E
            arrays["query_bias"] = pad(of_query, {2: static.T})
        arrays |= pad_bias(operands.bias, static.T, S)
        if operands.distance_bias is not None:
            numbers = operands.distance_bias.astype(jnp.float32) * LOG2_E
            sizes = (self.axes.T, self.axes.S), (static.T, S)
            arrays["distance_bias"] = cast(Array, pad_distances(numbers, *sizes))
        return arrays | pad_dropout(seed, self.axes, static.T, static.S)


def _swapped(static: KernelPlan, array: Array) -> Array:
    """[B, N, T, ...] in the layout of the kernel's arrays, or back: where that is the caller's, a
    pair of transposes that XLA cancels, as in `_on_hopper`.
    """
    return array.swapaxes(1, 2) if static.tokens_first else array


def _as_kernels_read(static: KernelPlan, arrays: dict[str, Array]) -> dict[str, Array]:
    return {
        name: _swapped(static, array) if name in OF_TOKENS else array
        for name, array in arrays.items()
    }


def _cut(found: Array | None, size: int, like: Array | None) -> Array | None:
    """A cotangent [B, N, padded] of a number per token, as the operand is; None for none."""
    if found is None or like is None:
        return None
    return found[:, :, :size].astype(like.dtype)


def zeroes_values(device: str, dtypes: tuple[Any, Any], allowed: Allowed, seed: Seed) -> bool:
    """Whether a forward pass itself zeroes the values that every query masks: hopper.py does, where
    these lie past every query's end.

    Args:
        dtypes: of features and of values.
    """
    return allowed.start is None and _fits_hopper(device, dtypes, allowed, seed)


def _fits_hopper(device: str, dtypes: tuple[Any, Any], allowed: Allowed, seed: Seed) -> bool:
    """16-bit numbers, ranges and no other mask, no dropout; forward.py does the rest."""
    half = all(dtype in (jnp.bfloat16, jnp.float16) for dtype in dtypes)
    ranges_only = not allowed.segment_ids and not allowed.arrays
    return device == "hopper" and half and ranges_only and seed is None
