"""A score of one's own, in one file, and its formula in NumPy loops. pool/test_toys.py adds it."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import regard
from regard.score.contract import accumulation_dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scaled(regard.Score):
    """a(q, k) = Σ_d q_d g_d k_d, with a learned g per coordinate. Lift: exact."""

    gain: jax.Array

    def scores(self, query, key):
        wide = accumulation_dtype(query.dtype)
        query, key, gain = (x.astype(wide) for x in (query, key, self.gain))
        return jnp.einsum("...td,d,...sd->...ts", query, gain, key, precision="highest")

    def lift(self, query, key, *, visible=None):
        wide = accumulation_dtype(query.dtype)
        query, gain = query.astype(wide), self.gain.astype(wide)
        return regard.Lift(jnp.einsum("...td,d->...td", query, gain), key)


@dataclasses.dataclass
class OracleScaled:
    parameters: dict
    ranks: ClassVar = {"gain": 1}

    def scores(self, p, q, k):
        return k @ (q * p["gain"])

    def pull(self, p, q, k, da):
        pulled = da @ k
        return p["gain"] * pulled, np.outer(da, q * p["gain"]), {"gain": q * pulled}
