"""Choices among the words of a scope, reproducible by seed on every machine and Python."""

import functools
import random
from collections.abc import Sequence
from typing import Literal, TypeVar

from regard.seq2seq.corpus.grammar.adjectives import Adjective, adjectives
from regard.seq2seq.corpus.grammar.nouns import Noun, nouns
from regard.seq2seq.corpus.grammar.verbs import Verb, verbs

Scope = Literal["demo", "full"]
T = TypeVar("T")


class Chooser:
    """Picks words and constructions.

    Only `random.Random.random` is used: of all its methods it alone is promised to give the same
    numbers in every version of Python.

    Args:
        seed: anything that `random.Random` takes.
        scope: "full", every word; "demo", the words above the dots of each table.
    """

    def __init__(self, seed: int | str, scope: Scope) -> None:
        self._random = random.Random(seed).random
        self.scope: Scope = scope

    def chance(self, probability: float) -> bool:
        """True with a probability."""
        return self._random() < probability

    def pick(self, choices: Sequence[T]) -> T:
        """One of several, all alike."""
        return choices[int(self._random() * len(choices))]

    def weighted(self, choices: Sequence[tuple[T, float]]) -> T:
        """One of several, by weight."""
        point = self._random() * sum(weight for _, weight in choices)
        for choice, weight in choices:
            point -= weight
            if point < 0:
                return choice
        return choices[-1][0]

    def some(self, words: Sequence[T], core: int) -> Sequence[T]:
        """A list of words, or its beginning in the demo's scope."""
        return words[:core] if self.scope == "demo" else words

    def noun(self, kinds: frozenset[str]) -> Noun:
        """A noun of one of some kinds."""
        return self.pick(_nouns(kinds, self.scope))

    def adjective(self, kinds: frozenset[str], *, in_front: bool) -> Adjective | None:
        """An adjective that can be said of what is of these kinds, if there is one."""
        found = _adjectives(kinds, in_front, self.scope)
        return self.pick(found) if found else None

    def describing(self, kinds: frozenset[str], *, compared: bool = False) -> Adjective:
        """An adjective that can be said of what is of these kinds, on whichever side."""
        front, back = (_adjectives(kinds, side, self.scope) for side in (True, False))
        return self.pick([word for word in front + back if word.comparative or not compared])

    def verbs(
        self, frame: str, subject: frozenset[str], objects: frozenset[str] = frozenset()
    ) -> tuple[Verb, ...]:
        """The verbs of a frame for a subject and an object of given kinds; empty: any kind."""
        return _verbs(frame, subject, objects, self.scope)


@functools.cache
def _nouns(kinds: frozenset[str], scope: Scope) -> tuple[Noun, ...]:
    return tuple(n for n in nouns() if n.kinds & kinds and (n.core or scope == "full"))


@functools.cache
def _adjectives(kinds: frozenset[str], in_front: bool, scope: Scope) -> tuple[Adjective, ...]:
    return tuple(
        word
        for word in adjectives()
        if word.kinds & kinds and word.in_front == in_front and (word.core or scope == "full")
    )


@functools.cache
def _verbs(
    frame: str, subject: frozenset[str], objects: frozenset[str], scope: Scope
) -> tuple[Verb, ...]:
    return tuple(
        verb
        for verb in verbs()
        if verb.frame == frame
        and (verb.core or scope == "full")
        and (not subject or verb.subjects & subject)
        and (not objects or verb.objects & objects)
    )
