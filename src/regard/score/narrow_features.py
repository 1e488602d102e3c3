"""The narrow features of the additive lift: polynomials of a squashed number.

narrow_table.py says where they come from; narrow_lift.py picks an entry of the table for each
hidden unit and measures the error.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float
from numpy.polynomial import chebyshev as numpy_chebyshev

from regard.score.contract import repeat_heads


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NarrowExpansion:
    """phi_j(x) = w p_j(t(x)) and psi_j(y) = q_j(t(y)), with t(x) = tanh(scale x + shift).

    Leading axes of size 1 broadcast over examples.

    Attributes:
        query_squash: (scale, shift), each [..., K, 1, h].
        key_squash: the same for keys.
        query_polynomials: [..., K, rank, DEGREE + 1, h], p_j of each hidden unit.
        key_polynomials: the same shape, q_j.
        amplitude: [..., N, 1, h], w.
    """

    query_squash: tuple[Array, Array]
    key_squash: tuple[Array, Array]
    query_polynomials: Array
    key_polynomials: Array
    amplitude: Array

    def query(self, compact: Float[Array, "... T h"]) -> Float[Array, "... T Rh"]:
        scale, shift = (repeat_heads(one, compact) for one in self.query_squash)
        polynomials = self.query_polynomials
        if compact.ndim > 2:
            group = compact.shape[-3] // polynomials.shape[-4]
            polynomials = jnp.repeat(polynomials, group, axis=-4)
        found = chebyshev(polynomials, squash(compact, scale, shift))  # [..., T, rank, h]
        return _flatten(found * self.amplitude[..., None, :])

    def key(self, compact: Float[Array, "... S h"]) -> Float[Array, "... S Rh"]:
        return _flatten(chebyshev(self.key_polynomials, squash(compact, *self.key_squash)))


def squash(x: Float[Array, "... h"], scale: Array, shift: Array) -> Float[Array, "... h"]:
    """tanh(scale x + shift)."""
    return jnp.tanh(x * scale + shift)


@jax.custom_jvp
def chebyshev(
    coefficients: Float[Array, "... r terms h"], t: Float[Array, "... T h"]
) -> Float[Array, "... T r h"]:
    """Σ_m coefficients_m T_m(t), polynomials of each hidden unit's own; tables, without gradients.

    Example:
        >>> import jax.numpy as jnp
        >>> chebyshev(jnp.ones((1, 3, 1)), jnp.array([[0.5]])).tolist()  # 1 + t + (2t² - 1)
        [[[1.0]]]
    """
    at_least = coefficients[..., None, :, :, :]  # [..., 1, r, terms, h]
    before, here = jnp.ones_like(t), t
    total = at_least[..., 0, :] * before[..., None, :]
    for m in range(1, coefficients.shape[-2]):
        total = total + at_least[..., m, :] * here[..., None, :]
        before, here = here, 2.0 * t * here - before
    return total


@chebyshev.defjvp
def _chebyshev_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple:
    """By the polynomials of the slopes: nothing but t has to be kept."""
    coefficients, t = primals
    slopes = jnp.einsum("...mh,mn->...nh", coefficients, _slopes(coefficients))
    return chebyshev(coefficients, t), chebyshev(slopes, t) * tangents[1][..., None, :]


def _slopes(coefficients: Array) -> Array:
    return jnp.asarray(slope_matrix(coefficients.shape[-2]), coefficients.dtype)


@functools.cache
def slope_matrix(terms: int) -> np.ndarray:
    """[terms, terms]: coefficients of a polynomial @ this = those of its derivative."""
    rows = [numpy_chebyshev.chebder(one) for one in np.eye(terms)]
    return np.array([np.pad(row, (0, terms - len(row))) for row in rows])


def _flatten(features: Array) -> Array:
    """[..., r, h] -> [..., rh]."""
    return features.reshape(*features.shape[:-2], -1)
