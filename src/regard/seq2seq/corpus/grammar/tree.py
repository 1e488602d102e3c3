"""Two sentences grown together: words of both sides, and which came from which.

A rule of the grammar makes a `Phrase`. The French words point at the English ones, so that they may
be put in any order; numbers come last. Here too are the changes that French words bring about in
each other when they meet: elision and contraction.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from regard.seq2seq.alignment import Link, Links
from regard.seq2seq.corpus.grammar.french import vowel_sound
from regard.seq2seq.corpus.pair import Pair
from regard.seq2seq.text.words import Words


@dataclass(eq=False, slots=True)
class English:
    """An English word. Two of the same text are two words."""

    text: str


@dataclass(eq=False, slots=True)
class French:
    """A French word, and the English ones that it says.

    Attributes:
        text: the word, before elision.
        sure: the word that it translates, if there is one.
        possible: others that have a part in it.
        article: le or les that contracts with de and à; the pronouns of that form do not.
    """

    text: str
    sure: English | None = None
    possible: tuple[English, ...] = ()
    article: bool = False


@dataclass(slots=True)
class Phrase:
    """A piece of both sentences.

    Attributes:
        english: its English words, in order.
        french: its French words, in order.
        relations: pairs of content words that stand in a grammatical relation here: an adjective
            and its noun, a verb and its object. What the held-out split is decided by.
    """

    english: list[English] = field(default_factory=list)
    french: list[French] = field(default_factory=list)
    relations: list[tuple[str, str]] = field(default_factory=list)

    def __add__(self, other: Phrase) -> Phrase:
        return Phrase(
            self.english + other.english,
            self.french + other.french,
            self.relations + other.relations,
        )


def word(english: str, french: str) -> Phrase:
    """One word, or a few, that the first word of the other side is sure to say.

    With several English words the first is the sure one and the others are possible; each French
    word is linked to all of them.

    Example:
        >>> phrase = word("in front of", "devant")
        >>> len(phrase.english), phrase.french[0].sure.text, len(phrase.french[0].possible)
        (3, 'in', 2)
    """
    first, *others = [English(text) for text in english.split()]
    says = [French(text, first, tuple(others)) for text in french.split()]
    return Phrase([first, *others], says)


def table(text: str) -> dict[str, str]:
    """English words and their French ones.

    Example:
        >>> table("three: trois, twenty-one: vingt et un")
        {'three': 'trois', 'twenty-one': 'vingt et un'}
    """
    entries = (entry.partition(":") for entry in text.split(","))
    return {english.strip(): french.strip() for english, _, french in entries}


ELIDES = {"le": "l'", "la": "l'", "je": "j'", "me": "m'", "ne": "n'", "de": "d'", "que": "qu'"}
CONTRACTS = {("de", "le"): "du", ("de", "les"): "des", ("à", "le"): "au", ("à", "les"): "aux"}


def meet(words: list[French]) -> list[French]:
    """The changes of words that meet.

    - Elision: `le, la, je, me, ne, de, que` lose their vowel before a vowel or a mute h; `si` only
      before `il` and `ils`. The elided word stays a word of its own, `l'` + `école`, with its own
      links.
    - Contraction: `de` or `à` with the article `le` or `les` is one word, `du`, `des`, `au`,
      `aux`. It is sure to say what the preposition says; what the article says is possible.

    Example:
        >>> article = French("le", article=True)
        >>> [w.text for w in meet([French("de"), article, French("arbre")])]
        ['de', "l'", 'arbre']
        >>> [w.text for w in meet([French("de"), article, French("héros")])]
        ['du', 'héros']
    """
    elided: list[French] = []
    for current, following in zip(words, [*words[1:], None], strict=True):
        text = current.text
        if following is not None and text in ELIDES and vowel_sound(following.text):
            text = ELIDES[text]
        if following is not None and text == "si" and following.text in ("il", "ils"):
            text = "s'"
        elided.append(French(text, current.sure, current.possible, current.article))
    met: list[French] = []
    for current in elided:
        before = met[-1] if met else None
        together = (before.text, current.text) if before is not None and current.article else None
        if before is not None and together in CONTRACTS:
            sure = () if current.sure is None else (current.sure,)
            possible = (*before.possible, *sure, *current.possible)
            met[-1] = French(CONTRACTS[together], before.sure, possible)
        else:
            met.append(current)
    return met


def to_pair(phrase: Phrase, end: str) -> Pair:
    """A phrase as a sentence pair: words met, first letters large, the end mark, gold links."""
    stop = English(end)
    english = [*phrase.english, stop]
    french = [*meet(phrase.french), French(end, stop)]
    place = {id(word): i for i, word in enumerate(english)}
    sure: list[Link] = []
    possible: list[Link] = []
    for j, word in enumerate(french):
        if word.sure is not None:
            sure.append((place[id(word.sure)], j))
        possible += [(place[id(other)], j) for other in word.possible]
    return Pair(
        _text([word.text for word in english], spaced=""),
        _text([word.text for word in french], spaced="?!"),
        Links(sure, possible),
    )


def _text(words: list[str], spaced: str) -> str:
    """One line; `spaced` are the marks that a space goes before."""
    words = [words[0][0].upper() + words[0][1:], *words[1:]]
    glued = [
        i == 0 or words[i - 1].endswith("'") or (word[0] in ".,?!'-" and word not in spaced)
        for i, word in enumerate(words)
    ]
    return Words(tuple(words), tuple(glued)).text
