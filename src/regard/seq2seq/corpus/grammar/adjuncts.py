"""Where and when: places, days, dates, hours, and adverbs."""

from regard.seq2seq.corpus.grammar.chooser import Chooser
from regard.seq2seq.corpus.grammar.noun_phrases import NUMBERS, noun_phrase, number
from regard.seq2seq.corpus.grammar.tree import English, French, Phrase, table, word

CITIES = table("""
    Paris: Paris, London: Londres, Rome: Rome, Brussels: Bruxelles, Geneva: Genève,
    Amsterdam: Amsterdam, Venice: Venise, Lyon: Lyon, Vienna: Vienne, Athens: Athènes,
    Lisbon: Lisbonne
""")

# Feminine countries take en and de, masculine ones au and du.
COUNTRIES = table("""
    France: France, Canada: le Canada, Italy: Italie, Japan: le Japon, Spain: Espagne,
    Germany: Allemagne, Portugal: le Portugal, Brazil: le Brésil, Switzerland: Suisse,
    Belgium: Belgique, Greece: Grèce, Mexico: le Mexique, China: Chine
""")

DAYS = table("""
    Monday: lundi, Tuesday: mardi, Wednesday: mercredi, Thursday: jeudi, Friday: vendredi,
    Saturday: samedi, Sunday: dimanche
""")

MONTHS = table("""
    January: janvier, February: février, March: mars, April: avril, May: mai, June: juin,
    July: juillet, August: août, September: septembre, October: octobre, November: novembre,
    December: décembre
""")

# Each French word says the English word of the number behind it; without one, the first.
PAST = (
    "yesterday|hier",
    "last night|hier/0 soir/1",
    "last week|la/1 semaine/1 dernière/0",
    "last year|la/1 année/1 dernière/0",
    "last month|le/1 mois/1 dernier/0",
    "this morning|ce/0 matin/1",
)
FUTURE = (
    "tomorrow|demain",
    "next week|la/1 semaine/1 prochaine/0",
    "next year|la/1 année/1 prochaine/0",
    "next month|le/1 mois/1 prochain/0",
    "tonight|ce soir",
    "this afternoon|cet/0 après-midi/1",
)
PRESENT = ("now|maintenant", "today|aujourd'hui")
HABIT = (
    "every day|tous/0 les/0 jours/1",
    "every morning|tous/0 les/0 matins/1",
    "every evening|tous/0 les/0 soirs/1",
    "every week|toutes/0 les/0 semaines/1",
)
HOURS_TO_ELEVEN = tuple(NUMBERS)[:10]
HOURS = ("at noon|à/0 midi/1", "at midnight|à/0 minuit/1")
MANNER = (
    "slowly|lentement",
    "here|ici",
    "quickly|rapidement",
    "quietly|doucement",
    "carefully|soigneusement",
    "there|là-bas",
)
FREQUENCY = table("often: souvent, always: toujours, sometimes: parfois, rarely: rarement")
HOUR_NUMBERS = (("one", "une"), *((said, NUMBERS[said]) for said in HOURS_TO_ELEVEN))
UNITS = {"days": "jours", "weeks": "semaines", "months": "mois", "years": "ans"}


def fixed(entry: str) -> Phrase:
    """A fixed expression of the tables above.

    Example:
        >>> phrase = fixed("last week|la/1 semaine/1 dernière/0")
        >>> [(word.text, word.sure.text) for word in phrase.french]
        [('la', 'week'), ('semaine', 'week'), ('dernière', 'last')]
    """
    said, _, says = entry.partition("|")
    words = [English(text) for text in said.split()]
    french = []
    for part in says.split():
        text, _, index = part.partition("/")
        french.append(French(text, words[int(index or 0)]))
    return Phrase(words, french)


def time(choose: Chooser, tense: str) -> Phrase:
    """When something happens, as the tense allows."""
    make = choose.weighted(
        {
            "past": [("past", 3.0), ("ago", 1.0), ("weekday", 1.0), ("date", 1.0), ("hour", 1.0)],
            "past progressive": [("past", 2.0), ("hour", 1.0)],
            "future": [
                ("future", 3.0),
                ("in", 1.0),
                ("weekday", 1.0),
                ("date", 1.0),
                ("hour", 1.0),
            ],
            "progressive": [("present", 1.0)],
            "present": [("present", 1.0), ("habit", 2.0), ("hour", 1.0), ("every", 1.0)],
        }[tense]
    )
    tables = {"past": PAST, "future": FUTURE, "present": PRESENT, "habit": HABIT}
    if make in tables:
        return fixed(choose.pick(choose.some(tables[make], 3)))
    if make == "hour":
        return hour(choose)
    if make == "date":
        return date(choose)
    if make == "ago":
        return _ago(choose)
    if make == "in":
        count, unit = _span(choose)
        return word("in", "dans") + count + unit
    day = choose.pick(choose.some(tuple(DAYS), 4))
    if make == "every":
        return fixed(f"every {day}|tous/0 les/0 {DAYS[day]}s/1")
    return _weekday(choose, day, "last" if tense == "past" else "next")


def hour(choose: Chooser) -> Phrase:
    """At two o'clock: à deux heures."""
    if choose.chance(0.2):
        return fixed(choose.pick(HOURS))
    at, oclock = English("at"), English("o'clock")
    said, says = choose.pick(HOUR_NUMBERS)
    count = English(said)
    heures = "heure" if says == "une" else "heures"
    return Phrase(
        [at, count, oclock], [French("à", at), French(says, count), French(heures, oclock)]
    )


def date(choose: Chooser, *, year: bool = False) -> Phrase:
    """On May 3: le 3 mai. With a year: on May 3, 1998: le 3 mai 1998."""
    named = choose.pick(choose.some(tuple(MONTHS), 6))
    on, month = English("on"), English(named)
    day = English(str(1 + choose.pick(range(31 if choose.scope == "full" else 12))))
    day = English("28") if day.text in ("29", "30", "31") and named == "February" else day
    day = English("30") if day.text == "31" and named in SHORT_MONTHS else day
    says = [
        French("le", on),
        French("1er" if day.text == "1" else day.text, day),
        French(MONTHS[named], month),
    ]
    if not year:
        return Phrase([on, month, day], says)
    comma = English(",")
    number = English(str(1960 + choose.pick(range(60 if choose.scope == "full" else 20))))
    return Phrase([on, month, day, comma, number], [*says, French(number.text, number)])


SHORT_MONTHS = frozenset({"April", "June", "September", "November"})


def manner(choose: Chooser) -> Phrase:
    """How, or here and there."""
    return fixed(choose.pick(choose.some(MANNER, 3)))


def place(choose: Chooser) -> Phrase:
    """Somewhere: in the garden, near the church, in Rome, in Japan."""
    if choose.chance(0.3):
        return region(choose, "in")
    near = [("near|près de", 1.0), ("behind|derrière", 1.0), ("in front of|devant", 1.0)]
    preposition = choose.weighted([("in|dans", 3.0), *near])
    said, _, says = preposition.partition("|")
    where = noun_phrase(choose, frozenset({"place"}), definite=True)
    return word(said, says) + where.phrase


def region(choose: Chooser, preposition: str) -> Phrase:
    """In, to or from a city or a country."""
    if choose.chance(0.5):
        city = choose.pick(choose.some(tuple(CITIES), 4))
        return word(preposition, "de" if preposition == "from" else "à") + word(city, CITIES[city])
    country = choose.pick(choose.some(tuple(COUNTRIES), 4))
    says = COUNTRIES[country]
    masculine = says.startswith("le ")
    there = English(country)
    article = [French("le", None, (there,), article=True)] if masculine else []
    named = Phrase([there], [*article, French(says.removeprefix("le "), there)])
    if preposition == "from":
        return word("from", "de") + named
    return word(preposition, "à" if masculine else "en") + named


def _weekday(choose: Chooser, day: str, which: str) -> Phrase:
    """On Monday: lundi. Last Monday: lundi dernier."""
    if choose.chance(0.5):
        on, named = English("on"), English(day)
        return Phrase([on, named], [French(DAYS[day], named, (on,))])
    says = {"last": "dernier", "next": "prochain"}[which]
    return fixed(f"{which} {day}|{DAYS[day]}/1 {says}/0")


def _span(choose: Chooser) -> tuple[Phrase, Phrase]:
    unit = choose.pick(tuple(UNITS))
    said, says = number(choose)
    return word(said, says), word(unit, UNITS[unit])


def _ago(choose: Chooser) -> Phrase:
    """Two days ago: il y a deux jours."""
    count, unit = _span(choose)
    ago = English("ago")
    there_is = [French(text, ago) for text in ("il", "y", "a")]
    return Phrase([*count.english, *unit.english, ago], [*there_is, *count.french, *unit.french])
