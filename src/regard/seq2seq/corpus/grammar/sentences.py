"""Whole sentences: every construction of the grammar, by weight; questions have their own file."""

from collections.abc import Callable
from dataclasses import replace

from regard.seq2seq.corpus.grammar import adjuncts, questions
from regard.seq2seq.corpus.grammar.chooser import Chooser
from regard.seq2seq.corpus.grammar.clauses import Clause, clause, subject, with_relative
from regard.seq2seq.corpus.grammar.french import agree
from regard.seq2seq.corpus.grammar.noun_phrases import (
    PERSON,
    NounPhrase,
    bare_noun,
    noun_phrase,
    number,
)
from regard.seq2seq.corpus.grammar.tree import English, French, Phrase, word
from regard.seq2seq.corpus.grammar.verb_phrases import (
    WAS,
    Complement,
    Form,
    Group,
    be_group,
    complement,
    verb_group,
)
from regard.seq2seq.corpus.grammar.verbs import Verb

Sentence = tuple[Phrase, str]

SHORT = [("object", 4.0), ("none", 3.0), ("motion", 0.5)]


def sentence(choose: Chooser) -> Sentence:
    """A sentence in both languages, and its end mark."""
    constructions = CONSTRUCTIONS if choose.scope == "full" else DEMO
    return choose.weighted(constructions)(choose)


def simple(choose: Chooser) -> Sentence:
    """The boy ate an apple yesterday."""
    who = subject(choose)
    described = choose.chance(0.05 if choose.scope == "full" else 0.02)
    if described:
        who = with_relative(choose, noun_phrase(choose, PERSON, definite=True))
    # Behind a relative clause, "often" might belong to either verb.
    made, form = clause(choose, who=who, plain=described)
    phrase = made.statement()
    extra = choose.weighted([("", 5.0), ("time", 3.0), ("place", 1.0), ("manner", 1.0)])
    if extra == "time" and not form.adverb:
        when = adjuncts.time(choose, form.tense)
        if choose.chance(0.25):
            return when + word(",", ",") + phrase, "."
        return phrase + when, "."
    if extra == "place":
        return phrase + adjuncts.place(choose), "."
    if extra == "manner":
        return phrase + adjuncts.manner(choose), "."
    return phrase, "."


def relative(choose: Chooser) -> Sentence:
    """I see the dog that is eating the cake."""
    verb = choose.pick(choose.verbs("object", PERSON))
    who = subject(choose, frozenset({"person"}))
    what = with_relative(choose, noun_phrase(choose, verb.objects))
    tense = choose.pick(("present", "past", "future") if verb.past else ("present", "future"))
    group = verb_group(verb, who, Form(tense), Complement(Phrase()))
    rest = Phrase(relations=[(verb.lemma, what.lemma)]) + what.phrase
    return Clause(who, group, rest).statement(), "."


def command(choose: Chooser) -> Sentence:
    """Open the door! Do not open the door!"""
    verb = choose.pick([v for v in choose.verbs("object", PERSON) if not v.state])
    negated = choose.chance(0.3)
    what = complement(choose, verb, None, negated=negated)
    if what.clitic is not None:  # its place is another in commands: "aidez-le"
        return command(choose)
    said = English(verb.base)
    particle = [English(verb.particle)] if verb.particle else []
    finite = French(verb.conjugation.present[4], said, tuple(particle))
    words = Phrase([said, *particle], [finite])
    if negated:
        do, no = English("do"), English("not")
        ne_pas = [French("ne", no, (do,)), finite, French("pas", no)]
        words = Phrase([do, no, said, *particle], ne_pas)
    return words + what.phrase, "!"


def copula(choose: Chooser) -> Sentence:
    """The cat is not very big."""
    who, said = questions.described(choose)
    if choose.chance(0.2):
        said = choose.pick((word("very", "très"), word("too", "trop"))) + said
    return Clause(who, be_group(who, _being(choose)), said).statement(), "."


def comparison(choose: Chooser) -> Sentence:
    """The lion is stronger than the dog. She is as happy as Paul."""
    kinds = choose.pick((frozenset({"person"}), frozenset({"animal"}), frozenset({"object"})))
    who = subject(choose, kinds)
    adjective = choose.describing(who.kinds, compared=True)
    other = noun_phrase(choose, kinds, definite=True)
    says = adjective.french(feminine=who.feminine, many=who.many)
    if choose.chance(0.3):
        said = English(adjective.english)
        as_big = word("as", "aussi") + Phrase([said], [French(says, said)]) + word("as", "que")
    else:
        words = [English(text) for text in adjective.comparative.split()]
        french = [French("plus", words[0]), French(says, words[-1])]
        as_big = Phrase(words, french) + word("than", "que")
    relations = [(adjective.english, who.lemma)] if who.lemma else []
    rest = as_big + other.phrase + Phrase(relations=relations)
    return Clause(who, be_group(who, replace(_being(choose), negation="")), rest).statement(), "."


PROFESSIONS = {
    "dentist": "dentiste",
    "doctor": "médecin",
    "artist": "artiste",
    "pilot": "pilote",
    "judge": "juge",
}
HAVING = {"hungry": "faim", "thirsty": "soif", "afraid": "peur", "right": "raison", "wrong": "tort"}


def being(choose: Chooser) -> Sentence:
    """She is a dentist. We were hungry. My brother will be twenty years old."""
    who = subject(choose, frozenset({"person"}))
    kind = choose.pick(("profession", "having", "age"))
    if kind == "profession":
        named = choose.pick(choose.some(tuple(PROFESSIONS), 3))
        ending = "s" if who.many else ""
        said = English(named + ending)
        a = [] if who.many else [English("an" if named[0] in "aeiou" else "a")]
        rest = Phrase([*a, said], [French(PROFESSIONS[named] + ending, said, tuple(a))])
        return Clause(who, be_group(who, _being(choose)), rest).statement(), "."
    if kind == "having":
        felt = choose.pick(choose.some(tuple(HAVING), 3))
        rest = word(felt, HAVING[felt])
    else:
        years, old = English("years"), English("old")
        rest = word(*number(choose)) + Phrase([years, old], [French("ans", years, (old,))])
    return Clause(who, be_group(who, _being(choose), "avoir"), rest).statement(), "."


def _being(choose: Chooser) -> Form:
    return Form(
        choose.weighted([("present", 3.0), ("past", 1.5), ("future", 1.0)]),
        choose.weighted([("", 3.0), ("not", 1.0)]),
    )


def born(choose: Chooser) -> Sentence:
    """Paul was born on May 3, 1998."""
    who = subject(choose, frozenset({"person"}))
    was, said = English(WAS[who.person]), English("born")
    être = be_group(who, Form()).finite.text
    né = agree("né", feminine=who.feminine, many=who.many)
    rest = adjuncts.date(choose, year=True) if choose.chance(0.7) else adjuncts.region(choose, "in")
    group = Group([was], [said], [], French(être, was), [French(né, said)])
    return Clause(who, group, rest).statement(), "."


def there_is(choose: Chooser) -> Sentence:
    """There are two cats in the garden. There is no bread."""
    tense = choose.weighted([("present", 3.0), ("past", 1.0), ("future", 0.7)])
    kinds = frozenset({"animate", "object", "food", "drink"})
    there = English("there")
    if choose.chance(0.25):
        core, many = bare_noun(choose, kinds)
        no = English("no")
        what = Phrase(
            [no, *core.english], [French("de", None, (no,)), *core.french], core.relations
        )
        negation = [French("ne", no), French("pas", no)]
    else:
        found = noun_phrase(choose, kinds, indefinite=True)
        what, many, negation = found.phrase, found.many, []
    it = NounPhrase(Phrase(), 5 if many else 2, many, False, "", frozenset())
    group = be_group(it, Form(tense), "avoir")
    finite = _third_person(tense, group.finite)
    french = [French("il", there), *negation[:1], French("y", there), finite, *negation[1:]]
    words = Phrase([there, *group.auxiliary, *group.main], french)
    return words + what + adjuncts.place(choose), "."


def _third_person(tense: str, finite: French) -> French:
    """The verb of "il y a", which is singular whatever there is."""
    return French(
        {"present": "a", "past": "avait", "future": "aura"}[tense], finite.sure, finite.possible
    )


WEATHER = tuple(
    Verb(
        base=base,
        past=f"{base}ed",
        ing=f"{base}ing",
        particle="",
        infinitive=infinitive,
        frame="none",
        subjects=frozenset(),
        objects=frozenset(),
        state=False,
        generic=False,
        link="",
        core=True,
    )
    for base, infinitive in (("rain", "pleuvoir"), ("snow", "neiger"))
)


def impersonal(choose: Chooser) -> Sentence:
    """It is raining in Paris. It was cold yesterday. It is three o'clock."""
    it = NounPhrase(word("it", "il"), 2, False, False, "", frozenset(), pronoun=True)
    kind = choose.weighted([("rain", 2.0), ("cold", 1.0), ("hour", 0.7)])
    if kind == "hour":
        said, says = choose.pick(adjuncts.HOUR_NUMBERS)
        rest = word(said, says) + word("o'clock", "heure" if says == "une" else "heures")
        return Clause(it, be_group(it, Form()), rest).statement(), "."
    where = adjuncts.region(choose, "in") if choose.chance(0.6) else Phrase()
    tense = choose.pick(("present", "past", "future"))
    negation = choose.weighted([("", 3.0), ("not", 1.0)])
    when = adjuncts.time(choose, tense) if choose.chance(0.5) else Phrase()
    if kind == "cold":
        rest = word(*choose.pick((("cold", "froid"), ("hot", "chaud"), ("nice", "beau"))))
        group = be_group(it, Form(tense, negation), "faire")
        return Clause(it, group, rest + where + when).statement(), "."
    tense = "progressive" if tense == "present" and choose.chance(0.6) else tense
    when = when if tense != "progressive" else Phrase()
    question = choose.chance(0.2)
    group = verb_group(
        choose.pick(WEATHER), it, Form(tense, negation, "", question), Complement(Phrase())
    )
    made = Clause(it, group, where + when)
    return (made.question(), "?") if question else (made.statement(), ".")


def two_clauses(choose: Chooser) -> Sentence:
    """He is not eating because he is tired. If it rains, we will stay."""
    kinds = ("because", "if", "while", "and", "but", "when")
    kind = choose.pick(choose.some(kinds, 5))
    if kind == "if":
        condition = word("if", "si") + _short(choose, "present")
        result = clause(choose, tense="future", frames=SHORT)[0].statement()
        if choose.chance(0.5):
            return condition + word(",", ",") + result, "."
        return result + condition, "."
    if kind == "when":
        scene = _short(choose, "past progressive")
        return scene + word("when", "quand") + _short(choose, "past"), "."
    if kind == "while":
        scene = _short(choose, "progressive")
        return scene + word("while", "pendant que") + _short(choose, "progressive"), "."
    first = clause(choose, frames=SHORT)[0].statement()
    if kind == "because" and choose.chance(0.3):
        who, said = questions.described(choose)
        second = Clause(who, be_group(who, Form()), said).statement()
    else:
        second = _short(choose, "")
    says = {"because": "parce que", "and": "et", "but": "mais"}[kind]
    return first + word(kind, says) + second, "."


def _short(choose: Chooser, tense: str) -> Phrase:
    return clause(choose, tense=tense, plain=True, frames=SHORT)[0].statement()


def that_clause(choose: Chooser) -> Sentence:
    """My sister thinks that the dog is sleeping."""
    who = subject(choose, frozenset({"person"}))
    verb = choose.pick(choose.verbs("that", who.kinds))
    group = verb_group(verb, who, Form(), Complement(Phrase()))
    outer = Clause(who, group, word("that", "que")).statement()
    tense = "future" if verb.base == "hope" else ""
    inner, _ = clause(choose, tense=tense, plain=choose.chance(0.7), frames=SHORT)
    return outer + inner.statement(), "."


CONSTRUCTIONS: list[tuple[Callable[[Chooser], Sentence], float]] = [
    (simple, 42.0),
    (relative, 6.0),
    (command, 3.0),
    (copula, 8.0),
    (comparison, 3.0),
    (being, 3.0),
    (born, 1.5),
    (there_is, 3.0),
    (impersonal, 2.5),
    (two_clauses, 9.0),
    (that_clause, 4.0),
    (questions.yes_or_no, 9.0),
    (questions.about, 6.0),
]

# The demo's scope has fewer relative clauses: what agrees across them takes longest to learn.
DEMO = [(make, weight) for make, weight in CONSTRUCTIONS if make is not relative]
