"""French endings: how verbs are conjugated, how nouns, adjectives and participles agree.

Only what the grammar uses: present, imperfect, future and past participle. Elision and contraction
join words, and are in `tree.py`.
"""

import functools
from dataclasses import dataclass

# Persons count from 0: je, tu, il or elle, nous, vous, ils or elles.
ENDINGS = {
    "er": "e es e ons ez ent",
    "ir": "is is it issons issez issent",
    "re": "s s  ons ez ent",
}
IMPERFECT = ("ais", "ais", "ait", "ions", "iez", "aient")
FUTURE = ("ai", "as", "a", "ons", "ez", "ont")

# Infinitive: the present; the future's stem; the participle.
IRREGULAR = {
    "acheter": ("achète achètes achète achetons achetez achètent", "achèter", "acheté"),
    "aller": ("vais vas va allons allez vont", "ir", "allé"),
    "appeler": ("appelle appelles appelle appelons appelez appellent", "appeller", "appelé"),
    "avoir": ("ai as a avons avez ont", "aur", "eu"),
    "boire": ("bois bois boit buvons buvez boivent", "boir", "bu"),
    "conduire": ("conduis conduis conduit conduisons conduisez conduisent", "conduir", "conduit"),
    "connaître": (
        "connais connais connaît connaissons connaissez connaissent",
        "connaîtr",
        "connu",
    ),
    "construire": (
        "construis construis construit construisons construisez construisent",
        "construir",
        "construit",
    ),
    "courir": ("cours cours court courons courez courent", "courr", "couru"),
    "croire": ("crois crois croit croyons croyez croient", "croir", "cru"),
    "devoir": ("dois dois doit devons devez doivent", "devr", "dû"),
    "dire": ("dis dis dit disons dites disent", "dir", "dit"),
    "dormir": ("dors dors dort dormons dormez dorment", "dormir", "dormi"),
    "écrire": ("écris écris écrit écrivons écrivez écrivent", "écrir", "écrit"),
    "envoyer": ("envoie envoies envoie envoyons envoyez envoient", "enverr", "envoyé"),
    "espérer": ("espère espères espère espérons espérez espèrent", "espérer", "espéré"),
    "essayer": ("essaie essaies essaie essayons essayez essaient", "essaier", "essayé"),
    "être": ("suis es est sommes êtes sont", "ser", "été"),
    "faire": ("fais fais fait faisons faites font", "fer", "fait"),
    "lire": ("lis lis lit lisons lisez lisent", "lir", "lu"),
    "nettoyer": ("nettoie nettoies nettoie nettoyons nettoyez nettoient", "nettoier", "nettoyé"),
    "offrir": ("offre offres offre offrons offrez offrent", "offrir", "offert"),
    "ouvrir": ("ouvre ouvres ouvre ouvrons ouvrez ouvrent", "ouvrir", "ouvert"),
    "partir": ("pars pars part partons partez partent", "partir", "parti"),
    "peindre": ("peins peins peint peignons peignez peignent", "peindr", "peint"),
    "pleuvoir": ("- - pleut pleuvons - -", "pleuvr", "plu"),
    "pouvoir": ("peux peux peut pouvons pouvez peuvent", "pourr", "pu"),
    "préférer": ("préfère préfères préfère préférons préférez préfèrent", "préférer", "préféré"),
    "prendre": ("prends prends prend prenons prenez prennent", "prendr", "pris"),
    "protéger": ("protège protèges protège protégeons protégez protègent", "protéger", "protégé"),
    "rire": ("ris ris rit rions riez rient", "rir", "ri"),
    "savoir": ("sais sais sait savons savez savent", "saur", "su"),
    "sourire": ("souris souris sourit sourions souriez sourient", "sourir", "souri"),
    "suivre": ("suis suis suit suivons suivez suivent", "suivr", "suivi"),
    "venir": ("viens viens vient venons venez viennent", "viendr", "venu"),
    "voir": ("vois vois voit voyons voyez voient", "verr", "vu"),
    "vouloir": ("veux veux veut voulons voulez veulent", "voudr", "voulu"),
}
IRREGULAR["apprendre"] = (
    "apprends apprends apprend apprenons apprenez apprennent",
    "apprendr",
    "appris",
)
IRREGULAR["comprendre"] = (
    "comprends comprends comprend comprenons comprenez comprennent",
    "comprendr",
    "compris",
)

# These make their past with être, and their participle agrees with the subject.
WITH_ETRE = frozenset({"aller", "arriver", "partir", "rester", "retourner", "tomber", "venir"})

# A first letter h that keeps le and la whole; as if it were a consonant. So with onze and huit.
ASPIRATED = frozenset(
    {"hache", "haches", "haricot", "haricots", "héros", "hibou", "hiboux", "huit", "onze"}
)


@dataclass(frozen=True)
class Conjugation:
    """The forms of a verb, by person.

    Example:
        >>> from regard.seq2seq.corpus.grammar.french import conjugate
        >>> verb = conjugate("manger")
        >>> verb.present[3], verb.imperfect[2], verb.imperfect[3], verb.future[5], verb.participle
        ('mangeons', 'mangeait', 'mangions', 'mangeront', 'mangé')
    """

    present: tuple[str, ...]
    imperfect: tuple[str, ...]
    future: tuple[str, ...]
    participle: str


@functools.cache
def conjugate(infinitive: str) -> Conjugation:
    """The forms of a verb."""
    if infinitive in IRREGULAR:
        forms, future_stem, participle = IRREGULAR[infinitive]
        present = tuple(forms.split())
    else:
        stem, ending = infinitive[:-2], infinitive[-2:]
        present = tuple(_soft(stem, end) + end for end in ENDINGS[ending].split(" "))
        future_stem = infinitive.removesuffix("e")
        participle = stem + {"er": "é", "ir": "i", "re": "u"}[ending]
    past_stem = "ét" if infinitive == "être" else present[3].removesuffix("ons")
    return Conjugation(
        present,
        tuple(_imperfect(past_stem, end) for end in IMPERFECT),
        tuple(future_stem + end for end in FUTURE),
        participle,
    )


def _soft(stem: str, ending: str) -> str:
    """manger, nous mangeons; lancer, nous lançons: the consonant sounds as it did."""
    if ending.startswith("o") and stem.endswith("g"):
        return stem + "e"
    if ending.startswith("o") and stem.endswith("c"):
        return stem[:-1] + "ç"
    return stem


def _imperfect(stem: str, ending: str) -> str:
    if ending.startswith("i") and stem.endswith("ge"):
        stem = stem[:-1]
    if ending.startswith("i") and stem.endswith("ç"):
        stem = stem[:-1] + "c"
    return stem + ending


def plural(word: str) -> str:
    """The plural of a noun or an adjective that has no irregular one.

    Example:
        >>> [plural(word) for word in ("chat", "bois", "oiseau", "cheval", "feu", "nez", "bleu")]
        ['chats', 'bois', 'oiseaux', 'chevaux', 'feux', 'nez', 'bleus']
    """
    if word[-1] in "sxz":
        return word
    if word.endswith("al"):
        return word[:-1] + "ux"
    if word.endswith(("au", "eu")) and word != "bleu":
        return word + "x"
    return word + "s"


def agree(participle: str, *, feminine: bool, many: bool) -> str:
    """A participle's form for what it agrees with.

    Example:
        >>> agree("allé", feminine=True, many=True), agree("pris", feminine=False, many=True)
        ('allées', 'pris')
        >>> agree("dû", feminine=True, many=False)
        'due'
    """
    if (feminine or many) and participle == "dû":
        participle = "du"
    word = participle + "e" if feminine else participle
    return plural(word) if many else word


def vowel_sound(word: str) -> bool:
    """Whether a word begins with a vowel that le, de, que and others elide before.

    Example:
        >>> [vowel_sound(word) for word in ("école", "homme", "héros", "yeux", "11", "chat")]
        [True, True, False, True, False, False]
    """
    word = word.lower()
    return word[0] in "aeiouyàâäéèêëîïôöûüœæh" and word not in ASPIRATED
