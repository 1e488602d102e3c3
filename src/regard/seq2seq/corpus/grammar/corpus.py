"""The grammar as a corpus: distinct sentences by seed, and splits that share no combination."""

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from regard.seq2seq.corpus.grammar.chooser import Chooser, Scope
from regard.seq2seq.corpus.grammar.sentences import sentence
from regard.seq2seq.corpus.grammar.tree import Phrase, to_pair
from regard.seq2seq.corpus.pair import CorpusError, Pair, Progress, Report

Split = Literal["train", "valid", "test"]
SPLITS = ("train", "valid", "test")

GIVE_UP = 100_000  # candidates in a row without a new sentence
EVERY = 1000


@dataclass
class Grammar:
    """English–French sentences with gold word alignments, made as they are asked for.

    Adjectives on both sides of the noun, agreement in gender and number, elision (`l'école`),
    contraction (`du`, `aux`), ne ... pas, questions with est-ce que and with inversion, relative
    and subordinate clauses, object pronouns before the verb, numbers, dates and hours, past,
    imperfect and future. Every English sentence has one French one, so a translation is right or
    wrong. What English leaves open is settled: "you" is vous, one person; I, we, you and they are
    masculine.

    The splits are of unseen combinations. Two content words that stand in a grammatical relation,
    an adjective and its noun, a subject or an object and its verb, are a combination; a hash
    decides which split it belongs to. A training sentence has combinations of training only; a
    test sentence has at least one of the test, which no training sentence has, whatever the seed.
    The words themselves occur everywhere.

    Gold links: a French word has at most one sure link, to the English word that it translates,
    and possible links to others that have a part in it: "will" in "mangera", the article in "du".

    Example:
        >>> from regard.seq2seq.corpus import Grammar
        >>> for pair in Grammar(2, seed=6):
        ...     print(pair.source, "|", pair.target)
        ...     print(pair.links)
        He does not buy a small red ticket. | Il n'achète pas de petit billet rouge.
        0-0 1p1 1p2 2-1 2-3 3-2 4-4 5-5 6-7 7-6 8-8
        She is not weak. | Elle n'est pas faible.
        0-0 1p1 1-2 2-1 2-3 3-4 4-5

    Args:
        count: how many sentences.
        split: "train", "valid" or "test".
        seed: another seed, another sample; the same seed, the same sentences on every machine.
        scope: "full", every word; "demo", fewer words, for a model that learns them in minutes.
        max_words: the longest sentence on either side, its end mark included.
        progress: called now and then.

    Attributes:
        report: an account of the last iteration: `read` counts candidates.

    Raises:
        CorpusError: when it is iterated: the scope has not so many sentences.
    """

    count: int
    split: Split = "train"
    seed: int = 0
    scope: Scope = "full"
    max_words: int = 15
    progress: Progress | None = None
    report: Report = field(default_factory=Report, init=False)

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ValueError(f"a split is one of {', '.join(SPLITS)}. Got {self.split!r}.")

    def __iter__(self) -> Iterator[Pair]:
        report = self.report = Report()
        choose = Chooser(f"{self.seed} {self.split}", self.scope)
        seen: set[str] = set()
        last = 0
        while report.kept < self.count:
            report.read += 1
            if report.read - last > GIVE_UP:
                raise CorpusError(
                    f"the grammar made no new sentence in {GIVE_UP:,} tries. Got {report.kept:,} "
                    f"of {self.count:,}. Fix: a smaller count, or scope='full'."
                )
            phrase, end = sentence(choose)
            if split_of(phrase) != self.split:
                report.dropped["of another split"] += 1
                continue
            pair = to_pair(phrase, end)
            if not self._fits(phrase):
                report.dropped["too long"] += 1
            elif pair.source in seen:
                report.dropped["duplicate"] += 1
            else:
                seen.add(pair.source)
                report.kept += 1
                last = report.read
                if self.progress is not None and report.kept % EVERY == 0:
                    self.progress(report.kept, report.kept / self.count)
                yield pair

    def _fits(self, phrase: Phrase) -> bool:
        # Contraction makes French shorter still.
        return max(len(phrase.english), len(phrase.french)) < self.max_words


def split_of(phrase: Phrase) -> str:
    """The split that a sentence belongs to: test if any combination is, else valid, else train."""
    found = {_split_of(*relation) for relation in phrase.relations}
    return next((split for split in ("test", "valid") if split in found), "train")


@functools.cache
def _split_of(first: str, second: str) -> str:
    """A combination's split: 5 % are for the test, 5 % for validation."""
    digest = hashlib.blake2b(f"{first} {second}".encode(), digest_size=8).digest()
    percent = int.from_bytes(digest, "big") % 100
    return "test" if percent < 5 else "valid" if percent < 10 else "train"
