"""The weights of every layer and head of a translator, collected while it runs."""

from dataclasses import dataclass, field

import jax.numpy as jnp
from jax import Array


@dataclass(frozen=True)
class Recorder:
    """Lists that an encoder and a decoder append to, a layer at a time.

    Attributes:
        encoder: [B, N, S, S], of the source to itself.
        decoder: [B, N, T, T], of the target to itself.
        cross: [B, N, T, S], of the target to the source.
    """

    encoder: list[Array] = field(default_factory=list)
    decoder: list[Array] = field(default_factory=list)
    cross: list[Array] = field(default_factory=list)

    def stacked(self) -> dict[str, Array]:
        """By name, [B, layers, N, T, S], what there is any layer of."""
        return {name: jnp.stack(found, axis=1) for name, found in vars(self).items() if found}
