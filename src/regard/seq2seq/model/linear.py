"""Affine maps for mixed precision, and the initial values of the recurrent kernels."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.nn import initializers

from regard.modules.parameters import default_kernel_init
from regard.seq2seq.model.recurrence import multiply


class Linear(nnx.Module):
    """x W + b: the product in `dtype`, sums and result in float32.

    Parameters: `kernel` (in, out), `bias` (out,), float32.

    Args:
        inputs: the width in.
        outputs: the width out.
        use_bias: whether there is a b.
        dtype: of the product.
        rngs: random numbers for the kernel.
    """

    def __init__(
        self, inputs: int, outputs: int, *, use_bias: bool = True, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        self.dtype = dtype
        self.kernel: Any = nnx.Param(
            default_kernel_init(rngs.params(), (inputs, outputs), jnp.float32)
        )
        self.bias: Any = nnx.data(nnx.Param(jnp.zeros(outputs, jnp.float32)) if use_bias else None)

    def __call__(self, x: Array) -> Array:
        product = multiply({"kernel": self.kernel[...].astype(self.dtype)}, "kernel", x)
        if self.bias is None:
            return product
        bias = self.bias[...]
        return product + bias.reshape((1,) * (product.ndim - 1) + bias.shape)


def orthogonal_gates(rng: Array, width: int, gates: int) -> Array:
    """(width, gates · width): an orthogonal matrix for each gate, side by side.

    Such a kernel neither blows a state up nor shrinks it (Saxe et al. 2014).
    """
    rngs = jax.random.split(rng, gates)
    init = initializers.orthogonal()
    return jnp.concatenate([init(rng, (width, width), jnp.float32) for rng in rngs], axis=1)
