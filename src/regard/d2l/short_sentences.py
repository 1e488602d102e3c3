"""Short everyday sentences from the translator's grammar, for a page that has no file to read.

The grammar's own sentences are of up to fifteen words; the book's data are its file's shortest.
Here are its pronouns with one verb, one adjective or one adverb, by its own tables and endings, in
the form that the book's file has: "I'm", "he's", and commands to a friend (tu).
"""

import itertools
from collections.abc import Iterator

from regard.seq2seq.corpus import Grammar, Pair
from regard.seq2seq.corpus.grammar.adjectives import adjectives
from regard.seq2seq.corpus.grammar.clauses import Clause
from regard.seq2seq.corpus.grammar.noun_phrases import PRONOUNS, NounPhrase, pronoun_named
from regard.seq2seq.corpus.grammar.tree import Phrase, to_pair, word
from regard.seq2seq.corpus.grammar.verb_phrases import Complement, Form, be_group, verb_group
from regard.seq2seq.corpus.grammar.verbs import verbs

CONTRACTED = {"I am": "I'm", "We are": "We're", "You are": "You're", "They are": "They're"}
CONTRACTED |= {"He is": "He's", "She is": "She's"}

# Verbs with an object that are said without one too.
ALONE = frozenset(("eat", "drink", "see", "read", "write", "sell", "lose", "help", "paint"))
ALONE |= {"draw", "steal", "call", "understand", "follow", "drive", "wash", "clean", "choose"}
ALONE |= {"forget", "finish", "watch", "go", "come", "return", "talk", "answer", "obey", "begin"}
AT_HOME = dict(I="moi", he="lui", she="elle", we="nous", you="vous", they="eux")


def short_sentences(count: int) -> list[Pair]:
    """English–French pairs, the shortest first; past 750, the grammar's longer sentences.

    Example:
        >>> from regard.d2l.short_sentences import short_sentences
        >>> pairs = {pair.source: pair.target for pair in short_sentences(640)}
        >>> pairs["Go."], pairs["I lost."], pairs["She's calm."], pairs["They're home."]
        ('Va !', "J'ai perdu.", 'Elle est calme.', 'Ils sont chez eux.')
    """
    short = sorted((*_commands(), *_statements()), key=lambda pair: len(pair.source))
    distinct: dict[str, Pair] = {}
    for pair in itertools.chain(short, Grammar(count, max_words=8)):
        distinct.setdefault(pair.source, pair)
        if len(distinct) >= count:
            break
    return list(distinct.values())[:count]


def _alone() -> Iterator:
    return (v for v in verbs() if not v.particle and (v.frame == "none" or v.base in ALONE))


def _commands() -> Iterator[Pair]:
    for verb in _alone():
        says = verb.conjugation.present[1]
        says = says.removesuffix("s") if says.endswith(("es", "as")) else says
        for now, maintenant in (("", ""), (" now", " maintenant")):
            yield Pair(f"{verb.base.capitalize()}{now}.", f"{says.capitalize()}{maintenant} !")


def _statements() -> Iterator[Pair]:
    for name in PRONOUNS:
        who = pronoun_named(name)
        for verb in _alone():
            for tense in ("past", "progressive"):
                if verb.past if tense == "past" else verb.ing:
                    group = verb_group(verb, who, Form(tense), Complement(Phrase()))
                    yield _said(Clause(who, group, Phrase()))
        for adjective in adjectives():
            if "person" in adjective.kinds or "animate" in adjective.kinds:
                says = adjective.french(feminine=who.feminine, many=who.many)
                yield _is(who, adjective.english, says)
        for english, french in (("home", f"chez {AT_HOME[name]}"), ("here", "ici")):
            yield _is(who, english, french)
            yield _is(who, english, french, "past")


def _is(who: NounPhrase, english: str, french: str, tense: str = "present") -> Pair:
    return _said(Clause(who, be_group(who, Form(tense)), word(english, french)))


def _said(clause: Clause) -> Pair:
    pair = to_pair(clause.statement(), ".")
    for long, short in CONTRACTED.items():
        if pair.source.startswith(long + " "):
            return Pair(short + pair.source.removeprefix(long), pair.target)
    return Pair(pair.source, pair.target)
