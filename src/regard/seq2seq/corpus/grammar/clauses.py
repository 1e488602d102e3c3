"""Clauses: a subject with its verb, as a statement, a question, or behind who and that."""

from dataclasses import dataclass, replace

from regard.seq2seq.corpus.grammar import adjuncts
from regard.seq2seq.corpus.grammar.chooser import Chooser
from regard.seq2seq.corpus.grammar.noun_phrases import (
    PERSON,
    NounPhrase,
    both,
    name,
    noun_phrase,
    pronoun,
)
from regard.seq2seq.corpus.grammar.tree import French, Phrase, word
from regard.seq2seq.corpus.grammar.verb_phrases import (
    Complement,
    Form,
    Group,
    complement,
    infinitive_phrase,
    modal_group,
    verb_group,
)
from regard.seq2seq.corpus.grammar.verbs import Verb


@dataclass(frozen=True)
class Clause:
    """A clause whose subject has not found its place yet.

    Attributes:
        subject: who does it.
        group: the verb.
        rest: what follows the verb.
    """

    subject: NounPhrase
    group: Group
    rest: Phrase

    def statement(self) -> Phrase:
        """The subject, then the verb."""
        group = self.group
        return (
            self.subject.phrase + Phrase([*group.auxiliary, *group.main], group.french) + self.rest
        )

    def question(self, asked: Phrase | None = None) -> Phrase:
        """The verb, then the subject; behind a question word, if there is one.

        French turns a pronoun and its verb around (mange-t-il), but not je; for je and for nouns it
        says "est-ce que".

        Args:
            asked: the question word in both languages.
        """
        group, subject = self.group, self.subject
        asked = asked or Phrase()
        english = [*asked.english, *group.auxiliary, *subject.phrase.english, *group.main]
        if subject.pronoun and subject.person != 0:
            french = [*asked.french, *group.before, group.finite, self._behind(), *group.after]
        else:
            says = (*group.auxiliary, *asked.english)
            est_ce_que = [French(text, None, says) for text in ("est", "-ce", "que")]
            french = [*asked.french, *est_ce_que, *subject.phrase.french, *group.french]
        return Phrase(english, french, subject.phrase.relations + asked.relations) + self.rest

    def _behind(self) -> French:
        """The pronoun behind its verb: -il, or -t-il after a vowel."""
        (subject,) = self.subject.phrase.french
        vowel = self.subject.person == 2 and self.group.finite.text[-1] in "ae"
        return French(("-t-" if vowel else "-") + subject.text, subject.sure)


def subject(choose: Chooser, kinds: frozenset[str] = PERSON) -> NounPhrase:
    """Who or what does something."""
    if "person" not in kinds and "animate" not in kinds:
        return noun_phrase(choose, kinds, definite=True)
    make = choose.weighted([("pronoun", 4.0), ("name", 1.5), ("both", 0.5), ("noun", 4.0)])
    if make == "pronoun":
        return pronoun(choose)
    if make == "name":
        return name(choose)
    noun = noun_phrase(choose, kinds, definite=True)
    if make == "both":
        who = name(choose)
        return both(who, noun) if not noun.kinds.isdisjoint(PERSON) else noun
    return noun


FRAMES = [
    ("object", 5.0),
    ("none", 2.0),
    ("motion", 0.7),
    ("origin", 0.4),
    ("place", 0.5),
    ("to", 0.7),
    ("give", 0.8),
    ("infinitive", 0.6),
    ("modal", 0.8),
]
TENSES = [
    ("present", 3.0),
    ("progressive", 1.5),
    ("past", 3.0),
    ("future", 2.0),
    ("past progressive", 0.7),  # not in the demo's scope
]


def form(choose: Chooser, verb: Verb | None, *, tense: str = "", plain: bool = False) -> Form:
    """Tense, negation and adverb, as the verb allows.

    Args:
        verb: the verb; None for a modal one.
        tense: this one, if the verb has it.
        plain: no negation and no adverb.
    """
    tense = tense or choose.weighted(TENSES if choose.scope == "full" else TENSES[:-1])
    if verb is None:
        tense = "present"
    elif tense.endswith("progressive") and not verb.ing:
        tense = "present" if tense == "progressive" else "past"
    if verb is not None and tense == "past" and not verb.past:
        tense = "future"
    if plain:
        return Form(tense)
    negation = choose.weighted([("", 7.0), ("not", 2.5), ("never", 0.7)])
    simple = not tense.endswith("progressive")
    if negation == "never" and not simple:
        negation = "not"
    adverb = ""
    if simple and not negation and verb is not None and choose.chance(0.12):
        adverb = choose.pick(choose.some(tuple(adjuncts.FREQUENCY), 2))
    return Form(tense, negation, adverb)


def clause(
    choose: Chooser,
    *,
    tense: str = "",
    plain: bool = False,
    question: bool = False,
    who: NounPhrase | None = None,
    frames: list[tuple[str, float]] = FRAMES,
) -> tuple[Clause, Form]:
    """A clause with a verb of any frame.

    Args:
        tense: the tense, if the verb has it.
        plain: no negation, no adverb.
        question: it will be asked.
        who: the subject; None for any.
        frames: the frames to choose from, by weight.
    """
    who = who or subject(choose)
    frame = choose.weighted(frames)
    if frame == "modal":
        manner = form(choose, None, plain=plain or question)
        manner = replace(manner, negation="not" if manner.negation else "", adverb="")
        group = modal_group(choose, who, manner)
        rest = infinitive_phrase(choose, who.kinds, "", to=False, negated=bool(manner.negation))
        return Clause(who, group, rest), manner
    # An animal gives and thinks nothing; it sleeps.
    verb = choose.pick(choose.verbs(frame, who.kinds) or choose.verbs("none", who.kinds))
    manner = replace(form(choose, verb, tense=tense, plain=plain), question=question)
    what = complement(choose, verb, who, negated=bool(manner.negation))
    group = verb_group(verb, who, manner, what)
    relations = [(who.lemma, verb.lemma)] if who.lemma else []
    rest = Phrase(what.phrase.english, what.phrase.french, what.phrase.relations + relations)
    return Clause(who, group, rest), manner


def with_relative(choose: Chooser, noun: NounPhrase) -> NounPhrase:
    """A noun phrase with who, whom or that behind it: qui where it does, que where it is done to.

    An act in the past agrees with what stands before it: les pommes que j'ai mangées.
    """
    done_to = choose.verbs("object", PERSON, noun.kinds)
    does = choose.verbs("object", noun.kinds) + choose.verbs("none", noun.kinds)
    person = "person" in noun.kinds
    if does and (not done_to or choose.chance(0.5)):
        relative = _qui(choose, choose.pick(does), noun, "who" if person else "that")
    elif done_to:
        relative = _que(choose, choose.pick(done_to), noun, "whom" if person else "that")
    else:
        return noun
    return replace(noun, phrase=noun.phrase + relative)


def _qui(choose: Chooser, verb: Verb, noun: NounPhrase, said: str) -> Phrase:
    manner = form(choose, verb, plain=choose.chance(0.8))
    what = complement(choose, verb, noun, negated=bool(manner.negation))
    group = verb_group(verb, noun, manner, what)
    words = Phrase([*group.auxiliary, *group.main], group.french, [(noun.lemma, verb.lemma)])
    return word(said, "qui") + words + what.phrase


def _que(choose: Chooser, verb: Verb, noun: NounPhrase, said: str) -> Phrase:
    who = pronoun(choose) if choose.chance(0.5) else subject(choose, verb.subjects)
    manner = form(choose, verb, plain=True)
    group = verb_group(verb, who, manner, Complement(Phrase(), None, noun))
    words = Phrase([*group.auxiliary, *group.main], group.french, [(verb.lemma, noun.lemma)])
    return word(said, "que") + who.phrase + words
