"""What is done: verbs in tense and negation, their objects, and infinitives.

The two languages build their tenses from different numbers of words: "did not eat" is "n'a pas
mangé". A `Group` holds both until the clause knows where its subject goes.
"""

from dataclasses import dataclass, field

from regard.seq2seq.corpus.grammar import adjuncts
from regard.seq2seq.corpus.grammar.chooser import Chooser
from regard.seq2seq.corpus.grammar.french import agree, conjugate
from regard.seq2seq.corpus.grammar.noun_phrases import (
    PERSON,
    PRONOUNS,
    NounPhrase,
    generic,
    noun_phrase,
)
from regard.seq2seq.corpus.grammar.tree import English, French, Phrase, word
from regard.seq2seq.corpus.grammar.verbs import SAYS_TO, Verb

ANY: frozenset[str] = frozenset()

BE = {0: "am", 2: "is", 3: "are", 4: "are", 5: "are"}
WAS = {0: "was", 2: "was", 3: "were", 4: "were", 5: "were"}
PRESENT_AVOIR, PRESENT_ETRE = conjugate("avoir").present, conjugate("être").present


@dataclass(frozen=True)
class Form:
    """How a verb is said.

    Attributes:
        tense: "present", "progressive", "past", "past progressive" or "future".
        negation: "", "not" or "never".
        adverb: "" or one of `adjuncts.FREQUENCY`, which stand where never does.
        question: English needs an auxiliary, to stand in front of the subject.
    """

    tense: str = "present"
    negation: str = ""
    adverb: str = ""
    question: bool = False


@dataclass
class Group:
    """A verb in both languages, without its subject and what follows.

    Attributes:
        auxiliary: the English words that a question puts in front of the subject.
        main: the English words behind these, or behind the subject.
        before: French words before the finite verb: ne, and an object's pronoun.
        finite: the French verb that has the person.
        after: French words behind it: pas, an adverb, the participle.
    """

    auxiliary: list[English]
    main: list[English]
    before: list[French]
    finite: French
    after: list[French] = field(default_factory=list)

    @property
    def french(self) -> list[French]:
        """All French words, for a sentence that is not a question."""
        return [*self.before, self.finite, *self.after]


@dataclass(frozen=True)
class Complement:
    """What follows a verb.

    Attributes:
        phrase: its words; the English of a pronoun, the French of which is `clitic`.
        clitic: a pronoun that French has before the verb.
        object: what the verb is done to, for the participle to agree with; None, nothing before it.
    """

    phrase: Phrase
    clitic: French | None = None
    object: NounPhrase | None = None


def verb_group(verb: Verb, subject: NounPhrase, form: Form, complement: Complement) -> Group:
    """A verb with a subject, in a form.

    The participle of avoir agrees with an object that stands before it, that of être with the
    subject.
    """
    auxiliary, main = _english(verb, subject.person, form)
    helpers = tuple(auxiliary)
    said = main[0]
    particles = tuple(main[1:])
    mark, negation, adverb = _marks(form)
    before = [French("ne", mark, helpers)] if negation else []
    if complement.clitic is not None:
        before.append(complement.clitic)
    after = [French(negation, mark)] if negation and mark else []
    if adverb:
        after.append(French(adverb, mark))
    forms = verb.conjugation
    if form.tense == "past" and not verb.state:
        auxiliaries = PRESENT_ETRE if verb.with_etre else PRESENT_AVOIR
        helper = helpers[0] if helpers else said
        finite = French(auxiliaries[subject.person], helper, (said,) if helpers else ())
        after.append(French(_participle(verb, subject, complement), said, (*helpers, *particles)))
    else:
        tenses = {
            "present": forms.present,
            "progressive": forms.present,
            "past": forms.imperfect,
            "past progressive": forms.imperfect,
            "future": forms.future,
        }
        finite = French(tenses[form.tense][subject.person], said, (*helpers, *particles))
    marked = [mark] if mark else []
    return Group(auxiliary, marked + main, before, finite, after)


def _english(verb: Verb, person: int, form: Form) -> tuple[list[English], list[English]]:
    """The auxiliary, and the verb with its particle."""
    third = person == 2
    support = form.question or form.negation == "not"
    auxiliary, main = {
        ("present", False): ("", verb.third if third else verb.base),
        ("present", True): ("does" if third else "do", verb.base),
        ("progressive", support): (BE[person], verb.ing),
        ("past", False): ("", verb.past),
        ("past", True): ("did", verb.base),
        ("past progressive", support): (WAS[person], verb.ing),
        ("future", support): ("will", verb.base),
    }[form.tense, support]
    words = [English(main)] + ([English(verb.particle)] if verb.particle else [])
    return ([English(auxiliary)] if auxiliary else []), words


def _marks(form: Form) -> tuple[English | None, str, str]:
    """not, never or an adverb; and in French what goes with ne, or an adverb alone."""
    if form.negation:
        return English(form.negation), {"not": "pas", "never": "jamais"}[form.negation], ""
    if form.adverb:
        return English(form.adverb), "", adjuncts.FREQUENCY[form.adverb]
    return None, "", ""


def _participle(verb: Verb, subject: NounPhrase, complement: Complement) -> str:
    participle = verb.conjugation.participle
    with_whom = subject if verb.with_etre else complement.object
    if with_whom is None:
        return participle
    return agree(participle, feminine=with_whom.feminine, many=with_whom.many)


def be_group(subject: NounPhrase, form: Form, infinitive: str = "être") -> Group:
    """To be, which French says with être, or with avoir: is hungry, a faim. Its past: était."""
    forms = conjugate(infinitive)
    person = subject.person
    mark, negation, adverb = _marks(form)
    if form.tense == "future":
        auxiliary, main, text = [English("will")], [English("be")], forms.future[person]
        finite = French(text, main[0], tuple(auxiliary))
    else:
        present = form.tense == "present"
        auxiliary, main = [English((BE if present else WAS)[person])], []
        finite = French((forms.present if present else forms.imperfect)[person], auxiliary[0])
    marked = [mark] if mark else []
    before = [French("ne", mark, tuple(auxiliary))] if negation else []
    after = [French(negation or adverb, mark)] if mark else []
    return Group(auxiliary, marked + main, before, finite, after)


MODALS = {
    "can": ("pouvoir", "cannot", "present"),
    "could": ("pouvoir", "could not", "imperfect"),
    "must": ("devoir", "must not", "present"),
}


def modal_group(choose: Chooser, subject: NounPhrase, form: Form) -> Group:
    """Can, could and must. "cannot" is one word, and says all of "ne peut pas"."""
    said = choose.pick(tuple(MODALS))
    infinitive, negative, tense = MODALS[said]
    words = [English(text) for text in (negative if form.negation else said).split()]
    text = getattr(conjugate(infinitive), tense)[subject.person]
    finite = French(text, words[0])
    if not form.negation:
        return Group(words, [], [], finite)
    before = [French("ne", words[-1], tuple(words[:-1]))]
    return Group(words, [], before, finite, [French("pas", words[-1])])


def complement(
    choose: Chooser, verb: Verb, subject: NounPhrase | None, *, negated: bool
) -> Complement:
    """What a verb's frame asks for."""
    if verb.frame == "none":
        return Complement(Phrase())
    if verb.frame == "object":
        return direct_object(choose, verb, subject, negated=negated)
    if verb.frame in ("motion", "origin", "place"):
        return Complement(_where(choose, verb))
    if verb.frame == "to":
        whom = noun_phrase(choose, frozenset({"person"}), definite=True)
        phrase = _to(whom, said=verb.base in SAYS_TO)
        phrase.relations.append((verb.lemma, whom.lemma))
        return Complement(phrase)
    if verb.frame == "give":
        what = noun_phrase(choose, verb.objects, negated=negated)
        whom = noun_phrase(choose, frozenset({"person"}), definite=True)
        phrase = what.phrase + _to(whom, said=True)
        phrase.relations.append((verb.lemma, what.lemma))
        return Complement(phrase)
    kinds = PERSON if subject is None else subject.kinds
    return Complement(infinitive_phrase(choose, kinds, verb.link, to=True, negated=negated))


def direct_object(
    choose: Chooser, verb: Verb, subject: NounPhrase | None, *, negated: bool
) -> Complement:
    """A noun phrase behind the verb, or a pronoun, which French has before it."""
    persons = "person" in verb.objects or "animate" in verb.objects
    if persons and choose.chance(0.25):
        return object_pronoun(choose, subject)
    if verb.generic and choose.chance(0.6):
        what = generic(choose, verb.objects)
    else:
        what = noun_phrase(choose, verb.objects, negated=negated)
    what.phrase.relations.append((verb.lemma, what.lemma))
    return Complement(what.phrase)


def object_pronoun(choose: Chooser, subject: NounPhrase | None) -> Complement:
    """him, her, us: never the subject itself."""
    mine = {0: (0, 3), 3: (0, 3), 4: (4,)}.get(subject.person if subject else -1, ())
    others = [name for name, row in PRONOUNS.items() if row[3] not in mine]
    said, _, says, person, many, feminine = PRONOUNS[choose.pick(others)]
    english = English(said)
    whom = NounPhrase(Phrase(), person, many, feminine, "", ANY)
    return Complement(Phrase([english], []), French(says, english), whom)


def infinitive_phrase(
    choose: Chooser, kinds: frozenset[str], link: str, *, to: bool, negated: bool = False
) -> Phrase:
    """To do something: an infinitive and what follows it.

    Args:
        kinds: of the subject.
        link: what French has between the verbs: "de", "à" or "".
        to: English has "to".
        negated: the verb in front has ne; an object with "any" is "de" still.
    """
    frame = choose.weighted([("object", 3.0), ("none", 1.0), ("motion", 0.5)])
    verb = choose.pick(choose.verbs(frame, kinds))
    what = complement(choose, verb, None, negated=negated)
    said = English(verb.base)
    particle = [English(verb.particle)] if verb.particle else []
    before = [English("to")] if to else []
    linked = [French(link, before[0])] if link else []
    possible = (*([] if link else before), *particle)
    clitic = [what.clitic] if what.clitic is not None else []
    infinitive = French(verb.infinitive, said, tuple(possible))
    return Phrase(
        [*before, said, *particle, *what.phrase.english],
        [*linked, *clitic, infinitive, *what.phrase.french],
        what.phrase.relations,
    )


def _to(whom: NounPhrase, *, said: bool) -> Phrase:
    """To someone; "answers the teacher" has no "to", and French has à all the same."""
    if said:
        return word("to", "à") + whom.phrase
    to = French("à", None, (whom.phrase.english[0],))
    return Phrase(whom.phrase.english, [to, *whom.phrase.french], whom.phrase.relations)


def _where(choose: Chooser, verb: Verb) -> Phrase:
    preposition = {"motion": "to", "origin": "from", "place": "in"}[verb.frame]
    if choose.chance(0.4):
        return adjuncts.region(choose, preposition)
    if verb.frame == "place":
        return adjuncts.place(choose)
    where = noun_phrase(choose, frozenset({"place"}), definite=True)
    where.phrase.relations.append((verb.lemma, where.lemma))
    return word(preposition, {"to": "à", "from": "de"}[preposition]) + where.phrase
