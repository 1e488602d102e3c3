"""The scores of one tile inside a kernel: sum_h w_h tanh(x_h + y_h), hidden unit by hidden unit.

The reciprocal is the expensive instruction (16 per clock and multiprocessor, against 128 products),
so a group of units shares one: 1/a + 1/b = (a + b) / (a b). Per element and unit, in instructions,
and in clocks of one of a multiprocessor's four schedulers:

| group | products, sums | reciprocals | loads, addresses | clocks |
| --- | --- | --- | --- | --- |
| 1 | 2 | 1 | 0.5 | 8 |
| 2 | 2.5 | 1/2 | 0.5 | 4 |
| 3 (a step of 8 is 3, 3, 2) | 2.6 | 3/8 | 0.5 | 3.5 |
| 4 | 3 | 1/4 | 0.5 | 3.8 |

(jaxlib 0.11.2 for an H200). At B=8, T=S=4096, h=64 a clock is 0.26 ms on its 132
multiprocessors at 1.98 GHz: 0.9 ms for groups of 3 at best, where tanh itself could not go below
2.05. Data past the reach of products take an exponential each besides: 12 clocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import triton as plt

from regard.pool.kernels.tanh_operands import CLIP, STEP, TWO_LOG2_E


@dataclass(frozen=True)
class Float32:
    """Arithmetic on float32 tiles, one PTX instruction each.

    XLA's Triton lowering keeps a * b + c as two instructions, and surrounds a division or an
    exponential with code for subnormal numbers, which do not occur here. Interpret mode, which
    has no PTX, gets the plain expression. Relative errors: 2^-24 for `fma`, 2^-22 for the
    other two.
    """

    interpret: bool

    def fma(self, a: Any, b: Any, c: Any) -> Array:
        """a b + c, for shapes that broadcast."""
        if self.interpret:
            return a * b + c
        return _ptx("fma.rn.ftz.f32 $0, $1, $2, $3;", a, b, c)

    def take(self, a: Any, b: Any, c: Any) -> Array:
        """c - a b. A minus sign of its own would cost an instruction."""
        if self.interpret:
            return c - a * b
        return _ptx("{.reg .f32 n; neg.f32 n, $1; fma.rn.ftz.f32 $0, n, $2, $3;}", a, b, c)

    def reciprocal(self, a: Array) -> Array:
        """1 / a; 0 where abs(a) > 2^126."""
        return 1.0 / a if self.interpret else _ptx("rcp.approx.ftz.f32 $0, $1;", a)

    def exp2(self, a: Array) -> Array:
        """2^a; 0 below 2^-126, and inf above 2^128."""
        return jnp.exp2(a) if self.interpret else _ptx("ex2.approx.ftz.f32 $0, $1;", a)


def _ptx(instruction: str, *operands: Any) -> Array:
    # In float32 whatever JAX's default: a 1.0 of float64 in a register of 32 bits reads as 0.
    arrays = [jnp.asarray(operand, jnp.float32) for operand in operands]
    shape = jnp.broadcast_shapes(*(array.shape for array in arrays))
    [result] = plt.elementwise_inline_asm(
        instruction,
        args=[jnp.broadcast_to(array, shape) for array in arrays],
        constraints=",".join(["=f"] + ["f"] * len(operands)),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.float32)],
    )
    return result


@dataclass(frozen=True)
class TanhScore:
    """Scores of a tile from `tanh_operands` under the names query, key and terms."""

    group: int = 3
    interpret: bool = False

    def tile(self, refs: dict[str, Any], rows: Any, keys: Any, flipped: bool) -> Array:
        return tanh_scores(
            refs["query"],
            refs["key"],
            refs["terms"],
            rows,
            keys,
            group=self.group,
            flipped=flipped,
            interpret=self.interpret,
        )


def tanh_scores(
    query_ref: Any,
    key_ref: Any,
    terms_ref: Any,
    rows: Any,
    keys: Any,
    *,
    group: int = 3,
    flipped: bool = False,
    interpret: bool = False,
) -> Array:
    """float32 [rows, keys], flipped [keys, rows]: the scores of a tile, in the units of `vector`.

    Exact to float32, for data of any range. Fast with 64 × 64 tiles and 4 warps, or 128 × 64 and 8:
    fewer tokens on a side than threads (else Triton sends each load through shared memory), and
    16 rows per warp (else warps repeat each other's work).

    Args:
        query_ref: [query blocks, h, block] of one example and head, of `operands`.
        key_ref: [key blocks, h, block].
        terms_ref: [h + 8].
        rows, keys: `pl.ds` of queries and of keys, whole blocks.
        group: hidden units that share a reciprocal, 1 to 4, the one given to `operands`.
        interpret: whether the kernel runs in interpret mode.
    """
    hidden = query_ref.shape[1]
    unit = Float32(interpret)
    first, second = (key_ref, query_ref) if flipped else (query_ref, key_ref)
    down, across = (keys, rows) if flipped else (rows, keys)

    def load(i: Any) -> tuple[Array, Array, Array]:
        one = plt.load(first.at[_block(down), i, :])
        other = plt.load(second.at[_block(across), i, :])
        return plt.load(terms_ref.at[i]), one[:, None], other[None, :]

    def by_product(i: Any) -> Array:
        inverse, one, other = load(i)
        return unit.fma(one, other, inverse)  # c / w (1 + E F)

    def by_sum(i: Any) -> Array:
        inverse, one, other = load(i)
        power = unit.exp2(jnp.minimum((one + other) * TWO_LOG2_E, CLIP))
        return unit.fma(inverse, power, inverse)

    def sum_of_inverses(term: Callable[[Any], Array], zero: Array, step: int, group: int) -> Array:
        def add(i: Any, total: Array) -> Array:
            for start in range(0, step, group):
                units = range(start, min(start + group, step))
                total = _add_inverses(unit, [term(i * step + j) for j in units], total)
            return total

        return lax.fori_loop(0, hidden // step, add, zero)

    constant, factor, in_reach = (terms_ref[hidden + i] for i in range(3))
    total = lax.cond(
        in_reach > 0.0,
        lambda zero: sum_of_inverses(by_product, zero, STEP, group),
        lambda zero: sum_of_inverses(by_sum, zero, 2, 2),  # short, for the sake of registers
        _zeros(down, across, interpret),
    )
    return unit.fma(total, factor, constant)


def _add_inverses(unit: Float32, terms: Sequence[Array], total: Array) -> Array:
    """total + sum 1 / t, with one reciprocal."""
    above, below = _fraction(unit, terms)
    inverse = unit.reciprocal(below)
    return total + inverse if above is None else unit.fma(above, inverse, total)


def _fraction(unit: Float32, terms: Sequence[Array]) -> tuple[Array | None, Array]:
    """sum 1 / t as one fraction, above and below the bar; None above is 1."""
    if len(terms) == 1:
        return None, terms[0]
    half = (len(terms) + 1) // 2
    above, below = _fraction(unit, terms[:half])
    more, other = _fraction(unit, terms[half:])
    if above is None:
        joined = below + other
    elif more is None:
        joined = unit.fma(above, other, below)
    else:
        joined = unit.fma(above, other, more * below)
    return joined, below * other


def _block(tokens: Any) -> Array:
    return lax.div(jnp.asarray(tokens.start, jnp.int32), jnp.int32(tokens.size))


def _zeros(down: Any, across: Any, interpret: bool) -> Array:
    """Zeros in the layout of a matrix product's result.

    A tile takes the layout of where it starts. In that of a product a thread has 2 rows and 16
    keys, two by two, so that it loads 10 times for 32 elements; in Triton's own, 32 rows and one
    key: 33 times, and twice as many instructions in all. The operands are zero too, but only the
    index of the block knows, or the product would be made once and held in registers.
    """
    shape = (down.size, across.size)
    if interpret:
        return jnp.zeros(shape, jnp.float32)
    nothing = (jnp.asarray(across.start, jnp.int32) < 0).astype(jnp.bfloat16)
    return lax.dot_general(
        jnp.broadcast_to(nothing, (shape[0], 16)),
        jnp.broadcast_to(nothing, (16, shape[1])),
        (((1,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
