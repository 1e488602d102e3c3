"""Which words the model could have written instead: the most probable next ones at each word."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from regard.seq2seq.model.translation_model import Model
from regard.seq2seq.text.marks import CAPITAL, JOINER, START
from regard.seq2seq.text.tokenizer import Encoded
from regard.seq2seq.text.tokenizer_pair import TokenizerPair
from regard.seq2seq.text.vocabulary import BOS, EOS, PAD, UNK
from regard.seq2seq.train.batches import Batch

END = ""  # how the end of the sentence is written among next words
MOST = 10  # alternatives
# Programs have one row for each of 8 translations, and few widths, so that few are compiled.
ROWS, WIDTHS = 8, (32, 64, 160)

NextWords = list[list[tuple[str, float]]]


def next_words(
    model: Model,
    tokenizers: TokenizerPair,
    text: str,
    translations: Sequence[Any],
    count: int,
    longest: int,
) -> list[NextWords]:
    """What the model could have written instead of each word of each translation.

    The translations are decoded again with each word given (forced decoding). A word of several
    pieces is judged by its first one.

    Args:
        model, tokenizers: the translator's.
        text: the source.
        translations: of it, with `text` and `target_words`; 8 at most.
        count: how many alternatives.
        longest: tokens that the model reads at once.

    Returns:
        For each translation, for each of its words and then for its end, the `count` most probable
        next words with their probabilities, the best first; END stands for the end. Empty for a
        text without words, for one that the model cannot read at once, and for a translation whose
        <unk> was replaced.
    """
    read = tokenizers.source.encode(text)
    written = [tokenizers.target.encode(one.text) for one in translations]
    needed = max((len(one.ids) for one in (read, *written)), default=0) + 1
    if not written or not read.ids or len(read.ids) > longest or needed > WIDTHS[-1]:
        return [[] for _ in translations]
    width = next(width for width in WIDTHS if width >= needed)
    batch = Batch.of([(read.ids, one.ids) for one in written], rows=ROWS, width=width)
    arrays = (jnp.asarray(x) for x in (batch.source, batch.source_lens, batch.target_in))
    graph, params = nnx.split(model)
    probabilities, ids = map(np.asarray, _next_tokens(graph, params, *arrays))  # [B, T, k]
    return [
        _alternatives(one, tokenizers.target.pieces, ids[row], probabilities[row], count)
        if one.words == translation.target_words
        else []
        for row, (one, translation) in enumerate(zip(written, translations, strict=True))
    ]


def _alternatives(
    written: Encoded, pieces: Sequence[str], ids: np.ndarray, probabilities: np.ndarray, count: int
) -> NextWords:
    words = []
    for step, capital in _first_steps(written, pieces):
        shares: dict[str, float] = {}  # two pieces may differ in the space before them only
        for token, share in zip(ids[step], probabilities[step], strict=True):
            name = END if token == EOS else _readable(pieces[token], capital)
            if step < len(written.ids) and token == written.ids[step]:
                name = written.words[written.word_of_token[step]]
            shares[name] = shares.get(name, 0.0) + float(share)
        words.append(sorted(shares.items(), key=lambda item: -item[1])[:count])
    return words


def _first_steps(written: Encoded, pieces: Sequence[str]) -> list[tuple[int, bool]]:
    """For each word and the end, the step that decides it, and whether it has a capital letter.

    A capital letter is a token of its own in front of the word, and decides little.
    """
    steps: list[tuple[int, bool]] = []
    of_token = written.word_of_token
    for step, word in enumerate(of_token):
        if word < len(steps):
            continue
        capital = pieces[written.ids[step]] == CAPITAL
        more = step + 1 < len(of_token) and of_token[step + 1] == word
        steps.append((step + 1, True) if capital and more else (step, False))
    return [*steps, (len(written.ids), False)]


def _readable(piece: str, capital: bool) -> str:
    piece = piece.removeprefix(START).strip(JOINER) or piece
    return piece[:1].upper() + piece[1:] if capital else piece


@functools.partial(jax.jit, static_argnums=0)
def _next_tokens(
    graph: Any, params: Any, source: Array, lens: Array, target_in: Array
) -> tuple[Array, Array]:
    """Probabilities and ids [B, T, k] of the most probable tokens after each given one."""
    model = nnx.merge(graph, params)
    readout, _ = model.decode(model.encode(source, lens), target_in)
    probabilities = jax.nn.softmax(model.logits(readout), axis=-1)
    never = jnp.array([PAD, UNK, BOS])
    probabilities = probabilities.at[:, :, never].set(0.0)
    return jax.lax.top_k(probabilities, min(MOST, probabilities.shape[-1]))
