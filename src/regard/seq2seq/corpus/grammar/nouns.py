"""The nouns: what they are called in both languages, and what they may take part in.

One line each: English, French, gender, further kinds. An irregular plural follows a slash. Above
the dots are the words of the demo's scope.
"""

import functools
from dataclasses import dataclass

from regard.seq2seq.corpus.grammar import english, french


@dataclass(frozen=True)
class Noun:
    """A noun.

    Attributes:
        lemma: the English singular, by which the grammar knows it.
        english: singular and plural.
        french: singular and plural.
        feminine: its French gender.
        kinds: what it is: "person", "food", "readable", ...
        core: it belongs to the demo's scope.
    """

    lemma: str
    english: tuple[str, str]
    french: tuple[str, str]
    feminine: bool
    kinds: frozenset[str]
    core: bool


TABLE = """
# person
boy          garçon      m
girl         fille       f
man/men      homme       m
woman/women  femme       f
child/children enfant    m
teacher      professeur  m
doctor       médecin     m
king         roi         m
queen        reine       f
mother       mère        f
father       père        m
sister       sœur        f
brother      frère       m
neighbor     voisin      m
friend       ami         m
nurse        infirmière  f
...
student      étudiant    m
uncle        oncle       m
aunt         tante       f
cousin       cousin      m
baker        boulanger   m
farmer       fermier     m
lawyer       avocat      m
engineer     ingénieur   m
actor        acteur      m
actress      actrice     f
singer       chanteur    m
writer       écrivain    m
soldier      soldat      m
policeman/policemen policier m
judge        juge        m
prince       prince      m
princess     princesse   f
baby         bébé        m
artist       artiste     m
dentist      dentiste    m
painter      peintre     m
gardener     jardinier   m
waiter       serveur     m
waitress     serveuse    f
driver       chauffeur   m
hero/heroes  héros       m
tourist      touriste    m
pilot        pilote      m
mayor        maire       m
witness      témoin      m
thief/thieves voleur     m
guest        invité      m

# animal
cat          chat        m
dog          chien       m
horse        cheval      m
cow          vache       f
bird         oiseau      m
mouse/mice   souris      f
lion         lion        m
elephant     éléphant    m
...
rabbit       lapin       m
tiger        tigre       m
monkey       singe       m
wolf/wolves  loup        m
bear         ours        m
owl          hibou/hiboux m
duck         canard      m
goat         chèvre      f
fox          renard      m
bee          abeille     f
butterfly    papillon    m
spider       araignée    f
frog         grenouille  f
turtle       tortue      f
donkey       âne         m
squirrel     écureuil    m
pig          cochon      m
hen          poule       f
swan         cygne       m

# food
apple        pomme       f
cake         gâteau      m
egg          œuf         m
carrot       carotte     f
lemon        citron      m
strawberry   fraise      f
...
pear         poire       f
tomato/tomatoes tomate   f
cherry       cerise      f
banana       banane      f
onion        oignon      m
sandwich     sandwich    m
cookie       biscuit     m
peach        pêche       f
salad        salade      f
croissant    croissant   m
pancake      crêpe       f
omelet       omelette    f
pizza        pizza       f
bean         haricot     m

# food mass
bread        pain        m
cheese       fromage     m
meat         viande      f
soup         soupe       f
...
butter       beurre      m
chocolate    chocolat    m
rice         riz         m
honey        miel        m
ham          jambon      m
jam          confiture   f

# drink mass
water        eau         f
milk         lait        m
coffee       café        m
tea          thé         m
...
wine         vin         m
juice        jus         m
beer         bière       f
lemonade     limonade    f

# thing
book         livre       m  readable
letter       lettre      f  readable openable
table        table       f
chair        chaise      f
key          clé         f
door         porte       f  openable
window       fenêtre     f  openable
box          boîte       f  openable
clock        horloge     f
flower       fleur       f
tree         arbre       m
car          voiture     f  vehicle
bike         vélo        m
boat         bateau      m  vehicle
...
newspaper    journal     m  readable
novel        roman       m  readable
poem         poème       m  readable
story        histoire    f  readable
magazine     magazine    m  readable
lamp         lampe       f
knife/knives couteau     m
bag          sac         m  openable
bottle       bouteille   f  openable
cup          tasse       f
plate        assiette    f
pen          stylo       m
pencil       crayon      m
ball         ballon      m
toy          jouet       m
umbrella     parapluie   m
computer     ordinateur  m
phone        téléphone   m
mirror       miroir      m
picture      tableau     m
bed          lit         m
basket       panier      m
gift         cadeau      m  openable
suitcase     valise      f  openable
ladder       échelle     f
tool         outil       m
ticket       billet      m
map          carte       f
candle       bougie      f
blanket      couverture  f
guitar       guitare     f
piano        piano       m
violin       violon      m
axe          hache       f
train        train       m  vehicle
plane        avion       m  vehicle
truck        camion      m  vehicle
bus          bus         m  vehicle
ship         navire      m  vehicle
tractor      tracteur    m  vehicle
helicopter   hélicoptère m  vehicle

# clothes
hat          chapeau     m
dress        robe        f
shirt        chemise     f
coat         manteau     m
shoe         chaussure   f
...
skirt        jupe        f
scarf/scarves écharpe    f
jacket       veste       f
sweater      pull        m
tie          cravate     f
boot         botte       f
sock         chaussette  f
glove        gant        m
ring         bague       f

# place
house        maison      f
school       école       f
garden       jardin      m
market       marché      m
park         parc        m
church       église      f
kitchen      cuisine     f
hotel        hôtel       m
...
station      gare        f
hospital     hôpital     m
library      bibliothèque f
museum       musée       m
restaurant   restaurant  m
office       bureau      m
theater      théâtre     m
castle       château     m
village      village     m
city         ville       f
forest       forêt       f
factory      usine       f
airport      aéroport    m
shop         magasin     m
bakery       boulangerie f
pharmacy     pharmacie   f
bank         banque      f
tower        tour        f
university   université  f
stadium      stade       m
zoo          zoo         m
"""

# Kinds that are made of others.
ALSO = {
    "person": "animate",
    "animal": "animate",
    "food": "goods",
    "drink": "goods",
    "thing": "goods object",
    "clothes": "goods object",
    "place": "",
}


@functools.cache
def nouns() -> tuple[Noun, ...]:
    """Every noun of the grammar.

    Example:
        >>> from regard.seq2seq.corpus.grammar.nouns import nouns
        >>> horse = next(noun for noun in nouns() if noun.lemma == "horse")
        >>> horse.english, horse.french
        (('horse', 'horses'), ('cheval', 'chevaux'))
    """
    found = []
    header: list[str] = []
    core = True
    for line in TABLE.strip().splitlines():
        if line.startswith("#"):
            header, core = line[1:].split(), True
            header += ALSO[header[0]].split()
        elif line == "...":
            core = False
        elif line:
            names, translations, gender, *kinds = line.split()
            one, _, many = names.partition("/")
            un, _, des = translations.partition("/")
            found.append(
                Noun(
                    lemma=one,
                    english=(one, many or english.plural(one)),
                    french=(un, des or french.plural(un)),
                    feminine=gender == "f",
                    kinds=frozenset(header + kinds),
                    core=core,
                )
            )
    return tuple(found)
