"""Reads the pairs of a run from the corpora that its settings name."""

import hashlib
import random
from collections.abc import Callable

from regard.seq2seq.alignment import Links
from regard.seq2seq.corpus import (
    Cleaning,
    Corpus,
    CorpusError,
    Grammar,
    HuggingFace,
    Pair,
    ParallelFiles,
    TabSeparated,
)
from regard.seq2seq.corpus.expanded import expanded
from regard.seq2seq.corpus.pair import Progress
from regard.seq2seq.train.settings import DataSettings

GRAMMAR_WORDS = 15  # the grammar's longest sentence
GRAMMAR_VALID = 200  # sentences to validate on by default

Say = Callable[[str], None]


def read_pairs(
    data: DataSettings, *, say: Say = lambda line: None, progress: Progress | None = None
) -> tuple[list[Pair], list[Pair]]:
    """The pairs to train on and the pairs to validate on, in the form that `data` asks for.

    Where no validation pairs are named, a part of the training pairs is set aside: by source, so
    that a sentence with several translations is in one of the two only.

    Example:
        >>> from regard.seq2seq.train.pairs import read_pairs
        >>> from regard.seq2seq.train.settings import DataSettings
        >>> train, valid = read_pairs(DataSettings(grammar=5, valid_sentences=2, reverse=True))
        >>> len(train), len(valid)
        (5, 2)

    Args:
        data: which corpora.
        say, progress: as for `prepare`.

    Raises:
        CorpusError: a file cannot be read as pairs; the message has file and line.
        ValueError: data names no corpus.
    """
    strict = Cleaning(max_words=data.max_words, max_ratio=data.max_ratio)
    # Validation pairs are left out only where they cannot be scored.
    lenient = Cleaning(duplicates=False, max_words=None)
    train = _read(_training(data, strict), "train", say, progress)
    held_out = _held_out(data, lenient)
    if held_out is not None:
        valid = _read(held_out, "validation", say, progress)
    else:
        train, valid = set_aside(train, data.valid_fraction, data.valid_at_least)
        say(f"validation: {len(valid):,} of these set aside, {len(train):,} are left to train on")
    if 0 < data.valid_sentences < len(valid):
        chosen = random.Random(0).sample(range(len(valid)), data.valid_sentences)
        valid = [valid[i] for i in sorted(chosen)]
        say(f"validation: {len(valid):,} of them, drawn at random")
    return [_formed(pair, data) for pair in train], [_formed(pair, data) for pair in valid]


def set_aside(
    pairs: list[Pair], fraction: float, at_least: int = 0
) -> tuple[list[Pair], list[Pair]]:
    """Splits pairs in two by their source sentences: what is left, and about `fraction` of them.

    Example:
        >>> from regard.seq2seq.corpus import Pair
        >>> pairs = [Pair(f"{n // 2} cats", f"{n} chats") for n in range(20)]
        >>> train, valid = set_aside(pairs, 0.2)
        >>> len(train), len(valid), {p.source for p in train} & {p.source for p in valid}
        (16, 4, set())

    Args:
        pairs: with at least two different sources.
        fraction: of the distinct sources; at least one is set aside, and one is left.
        at_least: the smallest number, unless it is more than a tenth of the distinct sources.
    """
    # By hash, not by position: the same sentences in any order of the file.
    sources = sorted({pair.source for pair in pairs}, key=_hash)
    if len(sources) < 2:
        raise CorpusError(
            "to set pairs aside for validation, the corpus must have two different source "
            f"sentences. Got {len(sources)}. Fix: more pairs, or validation pairs of their own."
        )
    at_least = max(min(at_least, len(sources) // 10), 1)
    count = min(max(round(fraction * len(sources)), at_least), len(sources) - 1)
    chosen = set(sources[:count])
    left = [pair for pair in pairs if pair.source not in chosen]
    return left, [pair for pair in pairs if pair.source in chosen]


def _training(data: DataSettings, cleaning: Cleaning) -> Corpus:
    if data.tsv:
        return TabSeparated(data.tsv, cleaning=cleaning)
    if data.source and data.target:
        return ParallelFiles(data.source, data.target, cleaning=cleaning)
    if data.hf:
        return HuggingFace(data.hf, *data.languages, config=data.hf_config, cleaning=cleaning)
    if data.grammar:
        words = min(data.max_words, GRAMMAR_WORDS)
        return Grammar(data.grammar, "train", scope=data.scope, max_words=words)
    raise ValueError("a run needs a corpus: tsv, source and target, hf, or grammar. Got none.")


def _held_out(data: DataSettings, cleaning: Cleaning) -> Corpus | None:
    if data.valid_tsv:
        return TabSeparated(data.valid_tsv, cleaning=cleaning)
    if data.valid_source and data.valid_target:
        return ParallelFiles(data.valid_source, data.valid_target, cleaning=cleaning)
    if data.grammar:
        words = min(data.max_words, GRAMMAR_WORDS)
        count = data.valid_sentences or GRAMMAR_VALID
        return Grammar(count, "valid", scope=data.scope, max_words=words)
    return None


def _read(corpus: Corpus, name: str, say: Say, progress: Progress | None) -> list[Pair]:
    if isinstance(corpus, Grammar | TabSeparated | ParallelFiles | HuggingFace):
        corpus.progress = progress
    pairs = list(corpus)
    if isinstance(corpus, Grammar):
        say(f"{name}: {len(pairs):,} sentences of the embedded grammar")
    else:
        say(f"{name}: {corpus.report}")
    return pairs


def _formed(pair: Pair, data: DataSettings) -> Pair:
    if data.expand:
        first, second = data.languages
        # Without links, which would refer to the words before the expansion.
        pair = Pair(expanded(pair.source, first), expanded(pair.target, second))
    if data.reverse:
        links = pair.links
        if links is not None:
            turned = [{(j, i) for i, j in each} for each in (links.sure, links.possible)]
            links = Links(*turned)
        pair = Pair(pair.target, pair.source, links)
    return pair


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
