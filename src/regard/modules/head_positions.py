"""`positions=` of MultiHeadAttention: what it makes of the score of a group of heads."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.nn import initializers

from regard.mask import Mask
from regard.memory import Memory
from regard.modules.parameters import Parameter, Tree
from regard.score import Alibi, RelativeBias, Rotary, Score
from regard.score.positions import alibi_slopes

KINDS = ("rotary", "alibi", "relative")
BUCKETS, MAX_DISTANCE = 32, 128  # T5's


@dataclass(frozen=True)
class HeadPositions:
    """The positions of N heads: "rotary", "alibi", "relative" or None."""

    kind: str | None
    num_heads: int

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in KINDS:
            raise ValueError(
                f"unknown positions {self.kind!r}: known are {', '.join(map(repr, KINDS))} and "
                "None. Fix: one of them; or score=regard.Rotary(regard.Dot(), base=...), "
                "regard.Dot() + regard.Alibi(slopes) or regard.Dot() + regard.RelativeBias(table), "
                "with settings of your own."
            )

    def check(self, query_width: int, key_width: int) -> None:
        """Raises ValueError where heads of these widths cannot have such positions."""
        if self.kind == "rotary":
            Rotary().check(query_width, key_width)

    def parameters(self) -> dict[str, dict[str, Parameter]]:
        """A table of T5's buckets for each head; it starts at zero, as other biases do."""
        if self.kind != "relative":
            return {}
        shape = (self.num_heads, BUCKETS)
        return {"relative": {"table": Parameter(shape, ("heads", None), initializers.zeros)}}

    def placed(
        self, score: Score, params: Tree, heads: tuple[int, ...], causal: bool = False
    ) -> Score:
        """The score of these heads with positions.

        Args:
            causal: no query attends to a key after it, so that ALiBi's two forms are equal. The
                one-sided form has an exact lift.
        """
        if self.kind == "rotary":
            return Rotary(score)
        if self.kind == "alibi":
            slopes: Any = alibi_slopes(self.num_heads)[np.array(heads)]
            return score + Alibi(slopes, two_sided=not causal)
        if self.kind == "relative":
            table = params["relative"]["table"]
            return score + RelativeBias(table[np.array(heads)], MAX_DISTANCE)
        return score


def flat_positions(options: dict[str, Any], batch: tuple[int, ...]) -> None:
    """Brings query_positions= and key_positions=, (T,) or (batch..., T), to one batch axis."""
    for name in ("query_positions", "key_positions"):
        given = options.get(name)
        if given is not None and len(batch) != 1 and jnp.ndim(given) > 1:
            given = jnp.asarray(given)
            options[name] = given.reshape(-1, given.shape[-1])


def places(
    held: Memory | tuple[Array, Array], mask: Mask, count: int, options: dict[str, Any]
) -> tuple[dict[str, Array | None], bool]:
    """query_positions and key_positions, taken out of the options of a call with `count` queries,
    and whether the mask is known to let no query attend to a key after it.

    Where none were given, and a mask puts the first query at the first key, positions do too.
    """
    at: dict[str, Any] = {
        name: options.pop(name, None) for name in ("query_positions", "key_positions")
    }
    causal = {band.align for band in mask.bands if band.right is not None and band.right <= 0}
    if isinstance(held, Memory):  # masks refer to its positions
        return at, bool(causal)
    if any(given is not None for given in at.values()):
        return at, False
    if count == held[0].shape[1]:
        return at, bool(causal)
    if any(band.align == "start" for band in mask.bands):
        at["query_positions"] = jnp.arange(count, dtype=jnp.int32)
        return at, "start" in causal
    return at, "end" in causal


def require_positions(score: Score, memory: Memory, query: Array, at: Array | None) -> None:
    """Raises where queries on a memory of another text need positions and none were given."""
    if at is None and score.uses_positions():
        raise ValueError(
            f"{score.label()} has positions, and with memory= nothing says where the queries "
            f"stand. Got query {list(query.shape)}, memory.key {list(memory.key.shape)}. Fix: "
            "query_positions= (T,) or (B, T), counted as the keys are, from 0; or positions=None "
            "for cross-attention."
        )
