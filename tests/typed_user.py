"""A user's file, as the type checker sees it: `mypy --strict` must pass, line by line.

test_package.py runs the checker on it; nobody runs the file. Where a line says `# type: ignore`,
the checker has to object, or --warn-unused-ignores does.
"""

import dataclasses

import jax
import jax.numpy as jnp

import regard
from regard.show import AttentionMap


def pooled(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    lens = jnp.array([3, 0])
    mask = regard.Mask.causal() & regard.Mask.lengths(lens) & regard.Mask.window(4, 0)
    score: regard.Score = regard.Gaussian(width=2.0)
    out: jax.Array = regard.attend(
        query, key, value, score=score, mask=mask, normalize=regard.Sparsemax()
    )
    return out


def looked_at(query: jax.Array, key: jax.Array) -> tuple[jax.Array, str]:
    additive = regard.Additive(None, None, jnp.ones(8), tolerance="exact")
    alpha = regard.weights(query, key, score=additive, valid_lens=jnp.array([2]))
    same = regard.masked_softmax(regard.scores(query, key, score=additive), jnp.array([2]))
    summary: regard.Summary = regard.summarize(query, key)
    return alpha - same + summary.entropy.sum(), regard.explain(query, key, key)


def with_weights(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    out, weights = regard.attend(query, key, value, return_weights=True)
    both: tuple[jax.Array, jax.Array] = regard.attend(query, key, value, return_lifted=True)
    out, weights, lifted = regard.attend(
        query, key, value, score=regard.Dot(0.5), return_weights=True, return_lifted=True
    )
    return out + weights.sum() + jnp.where(lifted & both[1], 1.0, 0.0)


def page(weights: jax.Array, words: list[str]) -> str:
    return AttentionMap(weights, words, words).to_html()


@dataclasses.dataclass(frozen=True)
class Overlap(regard.Score):
    """A score of the user's own."""

    def scores(self, query: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.einsum("bntd,bnsd->bnts", query, key)


def mistakes(query: jax.Array) -> None:
    regard.attend(query, query, query, score="dot")  # type: ignore[call-overload]
    regard.Mask.window("left", 0)  # type: ignore[arg-type]
    one: jax.Array = regard.attend(query, query, query, return_weights=True)  # type: ignore[assignment]
    regard.attend(query, query, query, valid_lengths=one)  # type: ignore[call-overload]
    page(query, "words")  # type: ignore[arg-type]
