"""Questions: yes or no, and where, when, why, what, who, how many."""

from regard.seq2seq.corpus.grammar.chooser import Chooser
from regard.seq2seq.corpus.grammar.clauses import Clause, clause, form, subject
from regard.seq2seq.corpus.grammar.noun_phrases import (
    PERSON,
    NounPhrase,
    noun_phrase,
    pronoun,
)
from regard.seq2seq.corpus.grammar.tree import English, French, Phrase, word
from regard.seq2seq.corpus.grammar.verb_phrases import (
    Complement,
    Form,
    be_group,
    verb_group,
)

Sentence = tuple[Phrase, str]

DESCRIBED = (
    frozenset({"person"}),
    frozenset({"person"}),
    frozenset({"animal"}),
    frozenset({"object"}),
    frozenset({"food", "drink"}),
    frozenset({"place"}),
)
ASKING = {"where": "où", "when": "quand", "why": "pourquoi", "how": "comment"}


def described(choose: Chooser) -> tuple[NounPhrase, Phrase]:
    """Someone or something, and an adjective that agrees with it."""
    who = subject(choose, choose.pick(DESCRIBED))
    adjective = choose.describing(who.kinds)
    said = English(adjective.english)
    says = French(adjective.french(feminine=who.feminine, many=who.many), said)
    relations = [(adjective.english, who.lemma)] if who.lemma else []
    return who, Phrase([said], [says], relations)


def yes_or_no(choose: Chooser) -> Sentence:
    """Did he buy the red car? Is she tired?"""
    if choose.chance(0.25):
        who, said = described(choose)
        tense = choose.weighted([("present", 3.0), ("past", 1.5), ("future", 1.0)])
        return Clause(who, be_group(who, Form(tense)), said).question(), "?"
    made, _ = clause(choose, question=True)
    return made.question(), "?"


def about(choose: Chooser) -> Sentence:
    """A question with a question word."""
    kinds = ("where is", "adverb", "adverb", "what", "who", "how many")
    kind = choose.pick(choose.some(kinds, 5))
    return {
        "where is": where_is,
        "adverb": adverb,
        "what": what,
        "who": who_does,
        "how many": how_many,
    }[kind](choose)


def where_is(choose: Chooser) -> Sentence:
    """Where is the cat? Où est le chat ? Where is he? Où est-il ?"""
    form = Form(choose.pick(("present", "past")))
    if choose.chance(0.3):
        who = pronoun(choose)
        return Clause(who, be_group(who, form), Phrase()).question(word("where", "où")), "?"
    what = noun_phrase(choose, frozenset({"animate", "object", "place"}), definite=True)
    group = be_group(what, form)
    return word("where", "où") + Phrase(group.auxiliary, [group.finite]) + what.phrase, "?"


def adverb(choose: Chooser) -> Sentence:
    """Why is she laughing?"""
    asked = choose.pick(choose.some(tuple(ASKING), 3))
    frames = [("object", 2.0), ("none", 2.0)] + ([("motion", 0.5)] if asked != "where" else [])
    made, _ = clause(choose, plain=True, question=True, frames=frames)
    return made.question(word(asked, ASKING[asked])), "?"


def what(choose: Chooser) -> Sentence:
    """What did he eat? Qu'a-t-il mangé ? What is the cat eating? Qu'est-ce que le chat mange ?"""
    who = subject(choose)
    verb = choose.pick(choose.verbs("object", who.kinds))
    chosen = form(choose, verb, plain=True)
    group = verb_group(verb, who, Form(chosen.tense, question=True), Complement(Phrase()))
    return Clause(who, group, Phrase()).question(word("what", "que")), "?"


def who_does(choose: Chooser) -> Sentence:
    """Who bought the red car?"""
    someone = NounPhrase(word("who", "qui"), 2, False, False, "", PERSON)
    made, _ = clause(choose, who=someone, plain=True, frames=[("object", 3.0), ("none", 1.0)])
    return made.statement(), "?"


def how_many(choose: Chooser) -> Sentence:
    """How many apples did he eat? Combien de pommes a-t-il mangées ?"""
    who = subject(choose, frozenset({"person"}))
    verb = choose.pick(choose.verbs("object", who.kinds))
    counted = choose.noun(verb.objects)
    if "mass" in counted.kinds:
        return how_many(choose)
    how, many, said = English("how"), English("many"), English(counted.english[1])
    asked = Phrase(
        [how, many, said],
        [
            French("combien", many, (how,)),
            French("de", None, (many, how)),
            French(counted.french[1], said),
        ],
        [(verb.lemma, counted.lemma)],
    )
    things = NounPhrase(Phrase(), 5, True, counted.feminine, counted.lemma, counted.kinds)
    chosen = form(choose, verb, plain=True)
    done_to = Complement(Phrase(), None, things)
    group = verb_group(verb, who, Form(chosen.tense, question=True), done_to)
    return Clause(who, group, Phrase()).question(asked), "?"
