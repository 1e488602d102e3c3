"""Features of the additive lift: sines and cosines of odd multiples of one angle, cheaply.

sine_series.py fits the series; additive.py decides when it may be used.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from regard.score.contract import repeat_heads


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SineExpansion:
    """phi(x) = [c_r w sin ω_r x', c_r w cos ω_r x'], psi(y) = [cos ω_r y', sin ω_r y'].

    With x' = x + shift and y' = y - shift, which have the same sum and smaller angles.

    Attributes:
        frequency: [..., K, 1, h], π/2P of the series that each hidden unit uses.
        shift: [..., K, 1, h].
        amplitude: [..., N, R, h], its coefficients times w.
    """

    frequency: Array
    shift: Array
    amplitude: Array

    def query(self, compact: Float[Array, "... T h"]) -> Float[Array, "... T R2h"]:
        terms = self.amplitude.shape[-2]
        frequency, shift = (repeat_heads(one, compact) for one in (self.frequency, self.shift))
        sin, cos = sines((compact + shift) * frequency, terms)
        amplitude = self.amplitude[..., None, :, :]  # [..., N, 1, R, h]
        return _flatten(amplitude * sin, amplitude * cos)

    def key(self, compact: Float[Array, "... S h"]) -> Float[Array, "... S R2h"]:
        sin, cos = sines((compact - self.shift) * self.frequency, self.amplitude.shape[-2])
        return _flatten(cos, sin)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def sines(angle: Float[Array, "... h"], terms: int) -> tuple[Array, Array]:
    """sin and cos of (2r-1)·angle for r = 1..R, each [..., R, h], from one sine and one cosine.

    (2r-1) = (2a+1) + 2Ab: a few small multiples by angle addition, then all pairs (a, b) of them in
    one step, so that each feature takes three operations and at most a handful of roundings.
    """
    block = max(1, 1 << (max(terms - 1, 1).bit_length() // 2))  # A, about sqrt(R)
    steps = -(-terms // block)
    first = (jnp.sin(angle), jnp.cos(angle))
    double = _turn(first, first)
    near = [first]
    for _ in range(block - 1):
        near.append(_turn(near[-1], double))
    if steps == 1:
        return _stack(near, terms)
    stride = double
    for _ in range(block.bit_length() - 1):
        stride = _turn(stride, stride)  # angle · 2A
    far = [(jnp.zeros_like(angle), jnp.ones_like(angle)), stride]
    for b in range(2, steps):
        far.append(_turn(far[b // 2], far[b - b // 2]))
    near_sin, near_cos = (part[..., None, :, :] for part in _stack(near, block))
    far_sin, far_cos = (part[..., :, None, :] for part in _stack(far, steps))
    shape = (*angle.shape[:-1], steps * block, angle.shape[-1])
    sin = (near_sin * far_cos + near_cos * far_sin).reshape(shape)[..., :terms, :]
    cos = (near_cos * far_cos - near_sin * far_sin).reshape(shape)[..., :terms, :]
    return sin, cos


@sines.defjvp
def _sines_jvp(terms: int, primals: tuple[Array], tangents: tuple[Array]) -> tuple:
    """The slopes are the other ones, times the frequency: nothing else has to be kept."""
    sin, cos = sines(*primals, terms)
    multiples = jnp.asarray(2 * np.arange(terms) + 1, sin.dtype)[:, None]
    multiples = multiples.reshape((1,) * (sin.ndim - 2) + multiples.shape)
    turn = multiples * tangents[0][..., None, :]
    return (sin, cos), (turn * cos, -turn * sin)


def _turn(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """(sin, cos) of the sum of two angles."""
    return a[0] * b[1] + a[1] * b[0], a[1] * b[1] - a[0] * b[0]


def _stack(pairs: list[tuple[Array, Array]], count: int) -> tuple[Array, Array]:
    """Pairs of [..., h] -> two [..., count, h]."""
    sin, cos = zip(*pairs[:count], strict=True)
    return jnp.stack(sin, axis=-2), jnp.stack(cos, axis=-2)


def _flatten(first: Array, second: Array) -> Array:
    """Two [..., R, h] -> [..., 2Rh]."""
    both = jnp.concatenate([first, second], axis=-2)
    return both.reshape(*both.shape[:-2], -1)
