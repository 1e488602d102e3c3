"""The verbs: their forms, who does it, and what it is done to."""

import functools
from dataclasses import dataclass

from regard.seq2seq.corpus.grammar import french
from regard.seq2seq.corpus.grammar.english import third_person


@dataclass(frozen=True)
class Verb:
    """A verb.

    Attributes:
        base, third, past, ing: the English forms; `past` is "" where it looks like the present.
        particle: what follows the English verb and has no word of its own in French: "for" of
            "look for".
        infinitive: the French verb.
        frame: what follows: "none", "object", "to" (à someone), "give" (something à someone),
            "motion" (to a place), "origin" (from a place), "place" (in a place), "that" (a
            clause), "infinitive".
        subjects: kinds of nouns that do it.
        objects: kinds of nouns that it is done to.
        state: a state rather than an act: its past is the imperfect, and it has no -ing.
        generic: an object in the plural without an article is all of its kind: les pommes.
        link: the word between it and an infinitive: "de", "à" or "".
        core: it belongs to the demo's scope.
    """

    base: str
    past: str
    ing: str
    particle: str
    infinitive: str
    frame: str
    subjects: frozenset[str]
    objects: frozenset[str]
    state: bool
    generic: bool
    link: str
    core: bool

    @property
    def lemma(self) -> str:
        """What the grammar knows it by; "know" is two verbs."""
        return f"{self.base}:{self.frame}"

    @property
    def third(self) -> str:
        """he, she or it with it."""
        return third_person(self.base)

    @property
    def conjugation(self) -> french.Conjugation:
        """Its French forms."""
        return french.conjugate(self.infinitive)

    @property
    def with_etre(self) -> bool:
        """Its past is made with être."""
        return self.infinitive in french.WITH_ETRE


# English base, past and -ing (a particle after an underscore), French; who does it; to what. "-"
# for a past that looks like the present, and for the -ing of a state. "!" before the French: a
# state; "!!": and its object may be generic.
TABLE = """
# object
eat      ate       eating     manger      animate  food
drink    drank     drinking   boire       animate  drink
see      saw       -          voir        animate  animate object place
buy      bought    buying     acheter     person   goods
love     loved     -          !aimer      person   person
like     liked     -          !!aimer     person   goods animal
have     had       -          !avoir      person   animal object
find     found     finding    trouver     person   animal object
open     opened    opening    ouvrir      person   openable
wear     wore      wearing    porter      person   clothes
write    wrote     writing    écrire      person   readable
look_for looked    looking    chercher    person   animate object
visit    visited   visiting   visiter     person   place
help     helped    helping    aider       person   person
...
read     -         reading    lire        person   readable
sell     sold      selling    vendre      person   goods
lose     lost      losing     perdre      person   object
hate     hated     -          !!détester  person   goods animal
want     wanted    -          !vouloir    person   goods animal
prefer   preferred -          !!préférer  person   goods animal
close    closed    closing    fermer      person   openable
break    broke     breaking   casser      person   thing
wash     washed    washing    laver       person   clothes vehicle
repair   repaired  repairing  réparer     person   thing
watch    watched   watching   regarder    person   animate
listen_to listened listening  écouter     person   person
wait_for waited    waiting    attendre    person   person vehicle
paint    painted   painting   peindre     person   place animal thing
draw     drew      drawing    dessiner    person   animate thing place
steal    stole     stealing   voler       person   goods
hide     hid       hiding     cacher      person   goods
know     knew      -          !connaître  person   person place
thank    thanked   thanking   remercier   person   person
follow   followed  following  suivre      animate  animate
meet     met       meeting    rencontrer  person   person
call     called    calling    appeler     person   person
invite   invited   inviting   inviter     person   person
hear     heard     -          entendre    animate  animate
touch    touched   touching   toucher     person   animal object
choose   chose     choosing   choisir     person   goods
prepare  prepared  preparing  préparer    person   food
catch    caught    catching   attraper    animate  animal
feed     fed       feeding    nourrir     person   animal
drive    drove     driving    conduire    person   vehicle
clean    cleaned   cleaning   nettoyer    person   object place
bring    brought   bringing   apporter    person   goods
take     took      taking     prendre     person   object
forget   forgot    -          oublier     person   object
finish   finished  finishing  finir       person   readable
admire   admired   admiring   admirer     person   animate place
protect  protected protecting protéger    person   animate
push     pushed    pushing    pousser     person   animate object
throw    threw     throwing   lancer      person   object
borrow   borrowed  borrowing  emprunter   person   object
use      used      using      utiliser    person   object
understand understood -       comprendre  person   person readable
build    built     building   construire  person   place

# none
sleep    slept     sleeping   dormir      animate
work     worked    working    travailler  person
sing     sang      singing    chanter     person
dance    danced    dancing    danser      person
run      ran       running    courir      animate
laugh    laughed   laughing   rire        person
arrive   arrived   arriving   arriver     animate
...
cry      cried     crying     pleurer     person
smile    smiled    smiling    sourire     person
swim     swam      swimming   nager       animate
walk     walked    walking    marcher     animate
travel   traveled  traveling  voyager     person
leave    left      leaving    partir      animate
fall     fell      falling    tomber      animate
stay     stayed    staying    rester      animate
shout    shouted   shouting   crier       person
jump     jumped    jumping    sauter      animate

# motion
go       went      going      aller       animate  place
...
return   returned  returning  retourner   animate  place

# origin
come     came      coming     venir       animate  place

# place
live     lived     -          !habiter    animate  place

# to
talk     talked    talking    parler      person   person
answer   answered  answering  répondre    person   person
...
obey     obeyed    obeying    obéir       person   person

# give
give     gave      giving     donner      person   goods
show     showed    showing    montrer     person   object
...
send     sent      sending    envoyer     person   object
lend     lent      lending    prêter      person   object
offer    offered   offering   offrir      person   goods

# that
think    thought   -          !penser     person
know     knew      -          !savoir     person
say      said      -          dire        person
...
believe  believed  -          !croire     person
hope     hoped     -          !espérer    person

# infinitive
want     wanted    -          !vouloir    person
try      tried     trying     essayer+de  person
...
hope     hoped     -          !espérer    person
like     liked     -          !aimer      person
begin    began     beginning  commencer+à person
learn    learned   learning   apprendre+à person
decide   decided   -          décider+de  person
"""

# English has a preposition where French has à.
SAYS_TO = {"talk"}


@functools.cache
def verbs() -> tuple[Verb, ...]:
    """Every verb of the grammar, the modal ones and to be apart.

    Example:
        >>> from regard.seq2seq.corpus.grammar.verbs import verbs
        >>> seek = next(verb for verb in verbs() if verb.infinitive == "chercher")
        >>> seek.third, seek.particle, seek.conjugation.future[2]
        ('looks', 'for', 'cherchera')
    """
    found = []
    frame, core = "", True
    for line in TABLE.strip().splitlines():
        if line.startswith("#"):
            frame, core = line[1:].strip(), True
        elif line == "...":
            core = False
        elif line:
            base, past, ing, infinitive, subjects, *objects = line.split()
            base, _, particle = base.partition("_")
            name, _, link = infinitive.lstrip("!").partition("+")
            found.append(
                Verb(
                    base=base,
                    past=past.strip("-"),
                    ing=ing.strip("-"),
                    particle=particle,
                    infinitive=name,
                    frame=frame,
                    subjects=frozenset([subjects]),
                    objects=frozenset(objects),
                    state=infinitive.startswith("!"),
                    generic=infinitive.startswith("!!"),
                    link=link,
                    core=core,
                )
            )
    return tuple(found)
