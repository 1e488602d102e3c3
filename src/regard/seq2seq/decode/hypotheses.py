"""Options and results of a search, the scores that rank hypotheses, and the candidate tokens."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from regard.seq2seq.decode.top_k import best_of
from regard.seq2seq.model.config import DTYPES
from regard.seq2seq.text.vocabulary import BOS, EOS, PAD, UNK


@dataclass(frozen=True)
class SearchOptions:
    """How to search.

    Attributes:
        beam: how many hypotheses are kept alive; 1 is greedy search.
        length_penalty: α. Hypotheses are ranked by log p / ((5 + length) / 6)^α, <eos> counted (Wu
            et al. 2016, equation 14): 0 favors short ones, 1 about the best average token.
        max_ratio, max_extra: a translation has at most max_ratio · source length + max_extra
            tokens, <eos> counted; the last of them can only be <eos>.
        early_stop: True: a sentence is done as soon as `n_best` hypotheses are finished and no live
            one can get a better score than the worst of those; False: only when `beam` are
            finished. It saves steps and does not change the best.
        forbid_unknown: never write <unk>.
        dtype: of the matrix products: "float32", "bfloat16", or "auto": bfloat16 where the machine
            is faster with it, which changes a log-probability by about 0.01.
    """

    beam: int = 5
    length_penalty: float = 1.0
    max_ratio: float = 1.5
    max_extra: int = 10
    early_stop: bool = True
    forbid_unknown: bool = False
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.beam < 1:
            raise ValueError(f"beam must be at least 1. Got {self.beam}.")
        if self.dtype not in DTYPES:
            listed = ", ".join(repr(name) for name in DTYPES)
            raise ValueError(f"dtype must be one of {listed}. Got {self.dtype!r}.")
        if self.max_ratio < 0 or self.max_extra < 1:
            raise ValueError(
                "max_ratio must not be negative and max_extra at least 1: room for <eos>. "
                f"Got max_ratio {self.max_ratio}, max_extra {self.max_extra}."
            )

    def longest(self, source_len: int) -> int:
        """How many tokens a translation of so long a source may have."""
        return int(self.max_ratio * source_len) + self.max_extra


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Hypotheses:
    """Translations of a batch, for each sentence the best first.

    Attributes:
        tokens: [B, K, T] int32, ended by <eos>, then padding.
        lens: [B, K], how many tokens, <eos> counted; 0 where there is no hypothesis.
        scores: [B, K], what they are ranked by; -inf where there is no hypothesis.
        log_probs: [B, K], log p(target | source).
        attention: [B, K, T, S], for each token the weights it was written with.
    """

    tokens: Array
    lens: Array
    scores: Array
    log_probs: Array
    attention: Array


def penalized(options: SearchOptions, log_prob: Array, length: Array) -> Array:
    """The scores by which hypotheses are ranked."""
    return by_length(log_prob, length.astype(jnp.float32), options.length_penalty)


def by_length(log_prob: Any, length: Any, penalty: float) -> Any:
    """log p / ((5 + length) / 6)^α, of arrays or numbers."""
    return log_prob / ((5.0 + length) / 6.0) ** penalty


def best_possible(options: SearchOptions, log_prob: Array, length: Array, limit: Array) -> Array:
    """An upper bound on the score of whatever a live hypothesis can still become.

    A log-probability only falls. What divides it is largest, or smallest, at an end of the range.

    Args:
        options: with the length penalty.
        log_prob: of the live hypothesis.
        length: the tokens that it has at least when it ends.
        limit: the tokens that it may have at most.
    """
    shortest, longest = penalized(options, log_prob, length), penalized(options, log_prob, limit)
    return jnp.maximum(shortest, longest)


def candidates(
    options: SearchOptions, logits: Array, k: int, before: Array, last: Array
) -> tuple[Array, Array]:
    """For each hypothesis its best tokens: log p [B, K, k] and ids [B, K, k].

    A translation is not empty: <eos> does not follow <bos>, but where nothing else may be written.

    Args:
        options: what else may not be written.
        logits: [B, K, V].
        k: how many.
        before: [B, K], the token before.
        last: [B], where nothing but <eos> may be written.
    """
    never = (PAD, BOS, UNK) if options.forbid_unknown else (PAD, BOS)
    # So many more, because the tokens in `never` may be among them.
    k = min(k + len(never), logits.shape[-1])
    values, tokens, log_total = best_of(logits, k)
    tokens, log_total = tokens.astype(jnp.int32), log_total[..., None]
    end = logits[..., EOS : EOS + 1] - log_total
    crossed = (tokens == EOS) & (before == BOS)[..., None]
    crossed = functools.reduce(jnp.logical_or, [tokens == token for token in never], crossed)
    scores = jnp.where(crossed, -jnp.inf, values - log_total)
    first = (jnp.arange(k) == 0).reshape(1, 1, k)
    last = last[:, None, None]
    scores = jnp.where(last, jnp.where(first, end, -jnp.inf), scores)
    return scores, jnp.where(last, jnp.where(first, EOS, PAD), tokens)
