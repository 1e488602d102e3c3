"""Evaluates a model on pairs with gold alignments: BLEU, exact match and AER."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np

from regard.seq2seq.alignment import Links, argmax_links, word_weights
from regard.seq2seq.corpus import Pair
from regard.seq2seq.decode.search import SearchOptions, force, greedy
from regard.seq2seq.metrics import AlignmentScore, Score, alignment_error, bleu, exact_match
from regard.seq2seq.model.translation_model import Model
from regard.seq2seq.text.tokenizer_pair import TokenizerPair
from regard.seq2seq.train.batches import Batches
from regard.seq2seq.train.settings import BatchSettings
from regard.seq2seq.train.validation import ids_of


@dataclass(frozen=True)
class Judged:
    """The result of `judge`.

    Attributes:
        pairs: the sentences and their references.
        texts: its translations, by greedy search.
        weights: for each pair, the attention between words under forced decoding of the
            reference: (target words, source words).
        bleu: of the texts.
        exact: how many equal their reference exactly, in percent.
        alignment: of the largest weight of each row against the gold links.
    """

    pairs: list[Pair]
    texts: list[str]
    weights: list[np.ndarray]
    bleu: Score
    exact: float
    alignment: AlignmentScore


def judge(
    model: Model,
    tokenizers: TokenizerPair,
    pairs: Sequence[Pair],
    batches: BatchSettings,
    *,
    shift: Literal[0, 1] = 0,
) -> Judged:
    """Translates pairs, and aligns them by the attention under forced decoding.

    Example:
        >>> from flax import nnx
        >>> from regard.seq2seq.model.config import Config
        >>> from regard.seq2seq.corpus import Grammar
        >>> from regard.seq2seq.train.held_out import judge
        >>> from regard.seq2seq.model.translation_model import Model
        >>> from regard.seq2seq.train.settings import BatchSettings
        >>> from regard.seq2seq.text.tokenizer_pair import TokenizerPair
        >>> pairs = list(Grammar(4, "test", seed=1))
        >>> tokenizers = TokenizerPair.train(pairs, kind="word", joint=False)
        >>> sizes = tokenizers.source.size, tokenizers.target.size
        >>> model = Model(Config(*sizes, embedding=8, encoder=8, decoder=16), rngs=nnx.Rngs(0))
        >>> found = judge(model, tokenizers, pairs, BatchSettings(tokens=64, buckets=(20,)))
        >>> found.exact, len(found.texts)  # the model is untrained
        (0.0, 4)

    Args:
        model: the translator.
        tokenizers: its own.
        pairs: with gold links.
        batches: the shapes to translate in, such as those of training.
        shift: which step stands for a word, as for `word_weights`.

    Raises:
        ValueError: a pair has no gold links, or does not fit into the longest bucket.
    """
    pairs = list(pairs)
    gold = [_links_of(pair) for pair in pairs]
    sources = tokenizers.source.encode_batch(pair.source for pair in pairs)
    targets = tokenizers.target.encode_batch(pair.target for pair in pairs)
    ids = [(s.ids, t.ids) for s, t in zip(sources, targets, strict=True)]
    ready = Batches(ids, **{**vars(batches), "shuffle": False})
    if ready.too_long:
        first = pairs[ready.too_long[0]].source
        raise ValueError(
            f"every pair must fit into a bucket. Got {len(ready.too_long)} that do "
            f"not fit into {max(batches.buckets)} tokens, the first being {first!r}."
        )
    texts = [""] * len(pairs)
    weights = [np.zeros((0, 0))] * len(pairs)
    for indices, batch in ready.with_indices():
        given = jnp.asarray(batch.source), jnp.asarray(batch.source_lens)
        found = ids_of(greedy(model, *given, SearchOptions(beam=1)))
        attention = np.asarray(force(model, *given, jnp.asarray(batch.target_in)))  # [B, T, S]
        for row, index in enumerate(indices):
            if index < 0:
                continue  # a row of padding
            texts[index] = tokenizers.target.decode(found[row]).text
            words = sources[index].word_of_token, targets[index].word_of_token
            weights[index] = word_weights(attention[row], *words, shift=shift)
    references = [pair.target for pair in pairs]
    return Judged(
        pairs,
        texts,
        weights,
        bleu(texts, references),
        exact_match(texts, references),
        alignment_error([argmax_links(one) for one in weights], gold),
    )


def _links_of(pair: Pair) -> Links:
    if pair.links is None:
        raise ValueError(f"every pair must have gold links. Got {pair.source!r} with none.")
    return pair.links
