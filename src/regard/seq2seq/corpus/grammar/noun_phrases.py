"""Who and what: pronouns, names, and nouns with determiners, numbers and adjectives.

English "you" is one person, politely: vous, with adjectives in the singular. I, we, you and they
are masculine. So each English sentence has one French one.
"""

from dataclasses import dataclass

from regard.seq2seq.corpus.grammar import english
from regard.seq2seq.corpus.grammar.chooser import Chooser
from regard.seq2seq.corpus.grammar.french import vowel_sound
from regard.seq2seq.corpus.grammar.nouns import Noun
from regard.seq2seq.corpus.grammar.tree import English, French, Phrase, table, word


@dataclass(frozen=True)
class NounPhrase:
    """A noun phrase, and what agrees with it.

    Attributes:
        phrase: its words.
        person: 0 je, 2 il or elle, 3 nous, 4 vous, 5 ils or elles.
        many: adjectives are in the plural.
        feminine: its French gender.
        lemma: its noun, "" for a pronoun.
        kinds: what it is.
        pronoun: it is one, and French may put it behind the verb.
    """

    phrase: Phrase
    person: int
    many: bool
    feminine: bool
    lemma: str
    kinds: frozenset[str]
    pronoun: bool = False


PERSON = frozenset({"person", "animate"})

# English subject and object, French subject and object; person, many, feminine.
PRONOUNS = {
    "I": ("me", "je", "me", 0, False, False),
    "he": ("him", "il", "le", 2, False, False),
    "she": ("her", "elle", "la", 2, False, True),
    "we": ("us", "nous", "nous", 3, True, False),
    "you": ("you", "vous", "vous", 4, False, False),
    "they": ("them", "ils", "les", 5, True, False),
}

# The same in both languages; their gender.
NAMES = table("""
    Marie: f, Paul: m, Claire: f, Pierre: m, Anne: f, Louis: m, Alice: f, Thomas: m, Sophie: f,
    Lucas: m, Julie: f, Antoine: m, Emma: f, Jean: m
""")

NOBODYS = frozenset({"man", "woman"})  # "my woman" is rude; "ma femme" is one's wife

# my, before a masculine, a feminine and a plural noun.
POSSESSIVES = {
    "my": ("mon", "ma", "mes"),
    "his": ("son", "sa", "ses"),
    "her": ("son", "sa", "ses"),
    "our": ("notre", "notre", "nos"),
    "your": ("votre", "votre", "vos"),
    "their": ("leur", "leur", "leurs"),
}

NUMBERS = table("""
    two: deux, three: trois, four: quatre, five: cinq, six: six, seven: sept, eight: huit,
    nine: neuf, ten: dix, eleven: onze, twelve: douze, thirteen: treize, fifteen: quinze,
    sixteen: seize, twenty: vingt, twenty-one: vingt et un, thirty: trente, fifty: cinquante,
    seventy: soixante-dix, eighty: quatre-vingts, ninety: quatre-vingt-dix
""")


def pronoun(choose: Chooser) -> NounPhrase:
    """A pronoun as a subject."""
    return pronoun_named(choose.pick(tuple(PRONOUNS)))


def pronoun_named(name: str) -> NounPhrase:
    """One of `PRONOUNS` as a subject."""
    _, says, _, person, many, feminine = PRONOUNS[name]
    return NounPhrase(word(name, says), person, many, feminine, "", PERSON, pronoun=True)


def name(choose: Chooser) -> NounPhrase:
    """Somebody's name."""
    who = choose.pick(choose.some(tuple(NAMES), 6))
    return NounPhrase(word(who, who), 2, False, NAMES[who] == "f", who, PERSON)


def number(choose: Chooser) -> tuple[str, str]:
    """A number from two on, in both languages."""
    found = choose.pick(choose.some(tuple(NUMBERS), 10))
    return found, NUMBERS[found]


def both(first: NounPhrase, second: NounPhrase) -> NounPhrase:
    """One and the other: plural, and feminine only if both are."""
    return NounPhrase(
        first.phrase + word("and", "et") + second.phrase,
        person=5,
        many=True,
        feminine=first.feminine and second.feminine,
        lemma=first.lemma,
        kinds=first.kinds & second.kinds,
    )


def noun_phrase(
    choose: Chooser,
    kinds: frozenset[str],
    *,
    negated: bool = False,
    definite: bool = False,
    indefinite: bool = False,
) -> NounPhrase:
    """A noun with what belongs to it.

    Args:
        kinds: what it may be.
        negated: it is the object of a verb with ne: "a cat", "any cats" are "de chat(s)".
        definite: it stands behind de or à, or begins a sentence: not "some".
        indefinite: it is new: not "the", "my" or "this".
    """
    noun = choose.noun(kinds)
    mass = "mass" in noun.kinds
    many = not mass and choose.chance(0.3)
    if not (negated or indefinite) and choose.chance(0.1) and noun.kinds & {"object", "animal"}:
        return _owned(choose, noun, many)
    core, relations = _noun_with_adjectives(choose, noun, many)
    kinds_of = _determiners(mass, many, negated, definite)
    if noun.lemma in NOBODYS:
        kinds_of = [(kind, 0.0 if kind == "possessive" else w) for kind, w in kinds_of]
    kind = choose.weighted(kinds_of[3:] if indefinite else kinds_of)
    determiner = _determiner(choose, kind, noun, many, core)
    phrase = Phrase(determiner.english + core.english, determiner.french + core.french, relations)
    if choose.chance(0.04) and kind == "the" and noun.kinds & {"object"}:
        place = noun_phrase(choose, frozenset({"place"}), definite=True)
        phrase = phrase + word("of", "de") + place.phrase
    person = 5 if many else 2
    return NounPhrase(phrase, person, many, noun.feminine, noun.lemma, noun.kinds)


def bare_noun(choose: Chooser, kinds: frozenset[str]) -> tuple[Phrase, bool]:
    """A noun with its adjectives and no determiner; and whether it is in the plural."""
    noun = choose.noun(kinds)
    many = "mass" not in noun.kinds and choose.chance(0.5)
    core, relations = _noun_with_adjectives(choose, noun, many)
    return Phrase(core.english, core.french, relations), many


def generic(choose: Chooser, kinds: frozenset[str]) -> NounPhrase:
    """All of a kind: apples, les pommes; bread, le pain."""
    noun = choose.noun(kinds)
    many = "mass" not in noun.kinds
    english_noun = English(noun.english[many])
    le = French(_le(noun.feminine, many), None, (english_noun,), article=True)
    phrase = Phrase([english_noun], [le, French(noun.french[many], english_noun)])
    return NounPhrase(phrase, 5 if many else 2, many, noun.feminine, noun.lemma, noun.kinds)


def _noun_with_adjectives(
    choose: Chooser, noun: Noun, many: bool
) -> tuple[Phrase, list[tuple[str, str]]]:
    """The noun, often with an adjective on one of its French sides, or on both."""
    front = back = None
    if choose.chance(0.25):
        front = choose.adjective(noun.kinds, in_front=True)
    if choose.chance(0.25):
        back = choose.adjective(noun.kinds, in_front=False)
    head = English(noun.english[many])
    french_head = French(noun.french[many], head)
    words, says, relations = [head], [french_head], []
    # English has both in front: the big black dog, le grand chien noir.
    for adjective in (back, front):
        if adjective is None:
            continue
        said = English(adjective.english)
        following = french_head.text if adjective.in_front else ""
        form = adjective.french(feminine=noun.feminine, many=many, following=following)
        words.insert(0, said)
        says.insert(0 if adjective.in_front else len(says), French(form, said))
        relations.append((adjective.english, noun.lemma))
    return Phrase(words, says), relations


def _determiners(mass: bool, many: bool, negated: bool, definite: bool) -> list[tuple[str, float]]:
    """What may stand before the noun, by weight."""
    found = [("the", 4.0), ("possessive", 2.0), ("this", 1.0)]
    if negated:
        return [*found, ("any" if many or mass else "not a", 3.0)]
    if mass:
        return found if definite else [*found, ("some mass", 3.0)]
    if not many:
        return [*found, ("a", 3.0)]
    found += [("number", 2.0)]
    return found if definite else [*found, ("some", 2.0), ("many", 1.0), ("several", 1.0)]


def _determiner(choose: Chooser, kind: str, noun: Noun, many: bool, core: Phrase) -> Phrase:
    """A determiner; its French form looks at the noun and at the next word."""
    feminine, following = noun.feminine, core.french[0].text
    vowel = vowel_sound(following)
    if kind == "the":
        the = English("the")
        return Phrase([the], [French(_le(feminine, many), the, article=True)])
    if kind == "possessive":
        owner = choose.pick(tuple(POSSESSIVES))
        masculine, feminine_form, plural = POSSESSIVES[owner]
        if many:
            return word(owner, plural)
        # mon école: a feminine that begins with a vowel takes the masculine form.
        return word(owner, feminine_form if feminine and not vowel else masculine)
    if kind == "this":
        if many:
            return word("these", "ces")
        return word("this", "cette" if feminine else "cet" if vowel else "ce")
    if kind == "a":
        return word(english.article(core.english[0].text), "une" if feminine else "un")
    if kind == "not a":
        return word(english.article(core.english[0].text), "de")
    if kind == "some":
        # de belles fleurs: des is de before an adjective.
        adjective_first = core.french[0].text != noun.french[many]
        return word("some", "de" if adjective_first else "des")
    if kind == "some mass":
        some = English("some")
        le = French(_le(feminine, False), None, (some,), article=True)
        return Phrase([some], [French("de", some), le])
    if kind == "any":
        return word("any", "de")
    if kind == "many":
        return word("many", "beaucoup de")
    if kind == "several":
        return word("several", "plusieurs")
    return _counted(*number(choose), feminine=feminine)


def _counted(said: str, says: str, *, feminine: bool) -> Phrase:
    """A number before a noun: vingt et une pommes."""
    return word(said, says[:-2] + "une" if feminine and says.endswith(" un") else says)


def _owned(choose: Chooser, noun: Noun, many: bool) -> NounPhrase:
    """Somebody's something: the boy's red bike, le vélo rouge du garçon."""
    owner = name(choose) if choose.chance(0.5) else _one_person(choose)
    core, relations = _noun_with_adjectives(choose, noun, many)
    of = English("'s")
    le = French(_le(noun.feminine, many), None, (of, core.english[-1]), article=True)
    phrase = Phrase(
        [*owner.phrase.english, of, *core.english],
        [le, *core.french, French("de", of), *owner.phrase.french],
        relations,
    )
    person = 5 if many else 2
    return NounPhrase(phrase, person, many, noun.feminine, noun.lemma, noun.kinds)


def _one_person(choose: Chooser) -> NounPhrase:
    """The boy, my aunt."""
    noun = choose.noun(frozenset({"person"}))
    head = English(noun.english[0])
    core = Phrase([head], [French(noun.french[0], head)])
    kind = choose.pick(("the", "the" if noun.lemma in NOBODYS else "possessive"))
    determiner = _determiner(choose, kind, noun, False, core)
    return NounPhrase(determiner + core, 2, False, noun.feminine, noun.lemma, noun.kinds)


def _le(feminine: bool, many: bool) -> str:
    return "les" if many else "la" if feminine else "le"
