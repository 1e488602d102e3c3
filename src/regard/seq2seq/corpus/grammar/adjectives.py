"""The adjectives: their forms, the side of the noun they stand on, and what they can be said of."""

import functools
from dataclasses import dataclass

from regard.seq2seq.corpus.grammar.french import plural, vowel_sound


@dataclass(frozen=True)
class Adjective:
    """An adjective.

    Attributes:
        english: the word.
        comparative: "bigger", "more modern"; "" where there is none.
        masculine, feminine: the French singulars.
        before_vowel: the masculine singular before a vowel: bel, vieil, nouvel.
        in_front: stands in front of the French noun; the others follow it.
        kinds: the kinds of nouns that it is said of.
        core: it belongs to the demo's scope.
    """

    english: str
    comparative: str
    masculine: str
    feminine: str
    before_vowel: str
    in_front: bool
    kinds: frozenset[str]
    core: bool

    def french(self, *, feminine: bool, many: bool, following: str = "") -> str:
        """Its form beside a noun.

        Example:
            >>> from regard.seq2seq.corpus.grammar.adjectives import adjectives
            >>> old = next(word for word in adjectives() if word.english == "old")
            >>> old.french(feminine=False, many=False, following="arbre")
            'vieil'
            >>> old.french(feminine=False, many=True), old.french(feminine=True, many=True)
            ('vieux', 'vieilles')

        Args:
            feminine: the noun's gender.
            many: the noun's number.
            following: the word behind it, where it stands in front of the noun.
        """
        if not feminine and not many and following and vowel_sound(following):
            return self.before_vowel
        word = self.feminine if feminine else self.masculine
        return plural(word) if many else word


# English/comparative, masculine/before a vowel, feminine, side, kinds.
TABLE = """
big/bigger         grand           grande        front  animate thing place
small/smaller      petit           petite        front  animate thing clothes place
beautiful/more     beau/bel        belle         front  person animal thing clothes place
old/older          vieux/vieil     vieille       front  animate thing clothes place
new/newer          nouveau/nouvel  nouvelle      front  thing clothes place
young/younger      jeune           jeune         front  animate
good/better        bon             bonne         front  food drink
bad/worse          mauvais         mauvaise      front  food drink
red                rouge           rouge         back   thing clothes
black              noir            noire         back   animal thing clothes
white              blanc           blanche       back   animal thing clothes
green              vert            verte         back   thing clothes
blue               bleu            bleue         back   thing clothes
happy/happier      heureux         heureuse      back   person
sad/sadder         triste          triste        back   person
tired/more         fatigué         fatiguée      back   animate
intelligent/more   intelligent     intelligente  back   animate
rich/richer        riche           riche         back   person
strong/stronger    fort            forte         back   animate
expensive/more     cher            chère         back   thing clothes
cold/colder        froid           froide        back   food drink
French             français        française     back   food drink thing
...
pretty/prettier    joli            jolie         front  thing clothes place
long/longer        long            longue        front  readable
yellow             jaune           jaune         back   thing clothes
gray               gris            grise         back   animal thing clothes
pink               rose            rose          back   clothes
purple             violet          violette      back   clothes
brown              brun            brune         back   animal thing clothes
poor/poorer        pauvre          pauvre        back   person
weak/weaker        faible          faible        back   animate
brave/braver       courageux       courageuse    back   person
kind/kinder        gentil          gentille      back   person
polite/more        poli            polie         back   person
shy                timide          timide        back   person
famous/more        célèbre         célèbre       back   person place
honest/more        honnête         honnête       back   person
serious/more       sérieux         sérieuse      back   person
funny/funnier      drôle           drôle         back   person
curious/more       curieux         curieuse      back   animate
sick               malade          malade        back   animate
calm/calmer        calme           calme         back   animate place
patient/more       patient         patiente      back   person
elegant/more       élégant         élégante      back   person clothes
heavy/heavier      lourd           lourde        back   object
clean/cleaner      propre          propre        back   clothes place
dirty/dirtier      sale            sale          back   clothes place
empty              vide            vide          back   openable place
modern/more        moderne         moderne       back   thing place
hot/hotter         chaud           chaude        back   food drink
fresh/fresher      frais           fraîche       back   food
sweet/sweeter      sucré           sucrée        back   food drink
Italian            italien         italienne     back   food thing clothes
English            anglais         anglaise      back   food thing clothes
German             allemand        allemande     back   thing
Spanish            espagnol        espagnole     back   food thing
Japanese           japonais        japonaise     back   thing
American           américain       américaine    back   thing
strange/stranger   étrange         étrange       back   animate thing place
dangerous/more     dangereux       dangereuse    back   animal vehicle
interesting/more   intéressant     intéressante  back   readable
difficult/more     difficile       difficile     back   readable
useful/more        utile           utile         back   object
broken             cassé           cassée        back   thing
wild/wilder        sauvage         sauvage       back   animal
noisy/noisier      bruyant         bruyante      back   animal vehicle place
round/rounder      rond            ronde         back   thing
"""


@functools.cache
def adjectives() -> tuple[Adjective, ...]:
    """Every adjective of the grammar."""
    found = []
    core = True
    for line in TABLE.strip().splitlines():
        if line == "...":
            core = False
            continue
        names, masculine, feminine, side, *kinds = line.split()
        name, _, comparative = names.partition("/")
        alone, _, before_vowel = masculine.partition("/")
        found.append(
            Adjective(
                english=name,
                comparative=f"more {name}" if comparative == "more" else comparative,
                masculine=alone,
                feminine=feminine,
                before_vowel=before_vowel or alone,
                in_front=side == "front",
                kinds=frozenset(kinds),
                core=core,
            )
        )
    return tuple(found)
