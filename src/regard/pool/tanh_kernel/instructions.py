"""Float32 instructions that XLA's Triton lowering would not choose by itself.

It keeps a * b + c as two instructions, and surrounds a division or an exponential with care for
subnormal numbers, which do not occur here. One PTX instruction each is what this package counts
on; interpret mode, which knows no PTX, gets the plain expression.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import triton as plt


@dataclass(frozen=True)
class Float32:
    """Arithmetic on float32 tiles. Relative errors: 2^-24 for `fma`, 2^-22 for the other two."""

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
