"""French endings and the words that change when they meet, against forms from a grammar book."""

import pytest

from regard.seq2seq.corpus.grammar import english, french
from regard.seq2seq.corpus.grammar.adjectives import adjectives
from regard.seq2seq.corpus.grammar.french import conjugate
from regard.seq2seq.corpus.grammar.nouns import nouns
from regard.seq2seq.corpus.grammar.tree import English, French, Phrase, meet, to_pair, word
from regard.seq2seq.corpus.grammar.verbs import verbs

# Present of je, il, nous, vous, ils; imperfect of il and nous; future of il; participle.
CONJUGATIONS = """
aimer      aime aime aimons aimez aiment              aimait aimions          aimera     aimé
manger     mange mange mangeons mangez mangent        mangeait mangions       mangera    mangé
lancer     lance lance lançons lancez lancent           lançait lancions        lancera    lancé
étudier    étudie étudie étudions étudiez étudient    étudiait étudiions      étudiera   étudié
acheter    achète achète achetons achetez achètent    achetait achetions      achètera   acheté
appeler    appelle appelle appelons appelez appellent appelait appelions      appellera  appelé
espérer    espère espère espérons espérez espèrent    espérait espérions      espérera   espéré
protéger   protège protège protégeons protégez protègent protégeait protégions protégera protégé
nettoyer   nettoie nettoie nettoyons nettoyez nettoient nettoyait nettoyions  nettoiera  nettoyé
envoyer    envoie envoie envoyons envoyez envoient    envoyait envoyions      enverra    envoyé
finir      finis finit finissons finissez finissent     finissait finissions    finira     fini
vendre     vends vend vendons vendez vendent          vendait vendions        vendra     vendu
répondre   réponds répond répondons répondez répondent répondait répondions   répondra   répondu
être       suis est sommes êtes sont                  était étions            sera       été
avoir      ai a avons avez ont                        avait avions            aura       eu
aller      vais va allons allez vont                  allait allions          ira        allé
faire      fais fait faisons faites font              faisait faisions        fera       fait
dire       dis dit disons dites disent                disait disions          dira       dit
voir       vois voit voyons voyez voient              voyait voyions          verra      vu
vouloir    veux veut voulons voulez veulent           voulait voulions        voudra     voulu
pouvoir    peux peut pouvons pouvez peuvent           pouvait pouvions        pourra     pu
devoir     dois doit devons devez doivent             devait devions          devra      dû
savoir     sais sait savons savez savent              savait savions          saura      su
venir      viens vient venons venez viennent          venait venions          viendra    venu
prendre    prends prend prenons prenez prennent       prenait prenions        prendra    pris
boire      bois boit buvons buvez boivent             buvait buvions          boira      bu
croire     crois croit croyons croyez croient         croyait croyions        croira     cru
écrire     écris écrit écrivons écrivez écrivent      écrivait écrivions      écrira     écrit
lire       lis lit lisons lisez lisent                lisait lisions          lira       lu
rire       ris rit rions riez rient                   riait riions            rira       ri
suivre     suis suit suivons suivez suivent           suivait suivions        suivra     suivi
peindre    peins peint peignons peignez peignent      peignait peignions      peindra    peint
conduire   conduis conduit conduisons conduisez conduisent conduisait conduisions conduira conduit
courir     cours court courons courez courent         courait courions        courra     couru
dormir     dors dort dormons dormez dorment           dormait dormions        dormira    dormi
ouvrir     ouvre ouvre ouvrons ouvrez ouvrent         ouvrait ouvrions        ouvrira    ouvert
"""


@pytest.mark.parametrize(
    "line", CONJUGATIONS.strip().splitlines(), ids=lambda line: line.split()[0]
)
def test_conjugations(line):
    infinitive, *expected = line.split()
    verb = conjugate(infinitive)
    present = [verb.present[person] for person in (0, 2, 3, 4, 5)]
    imperfect = [verb.imperfect[2], verb.imperfect[3]]
    assert [*present, *imperfect, verb.future[2], verb.participle] == expected


def test_every_verb_has_six_persons_and_distinct_forms_in_english():
    for verb in verbs():
        forms = verb.conjugation
        assert len(forms.present) == len(forms.imperfect) == len(forms.future) == 6
        # "I read": were its past the same word, the tense could not be told.
        assert verb.past != verb.base


def test_plurals():
    found = {noun.lemma: noun.french[1] for noun in nouns()}
    assert found["horse"] == "chevaux"
    assert found["newspaper"] == "journaux"
    assert found["hospital"] == "hôpitaux"
    assert found["bird"] == "oiseaux"
    assert found["cake"] == "gâteaux"
    assert found["mouse"] == "souris"
    assert found["owl"] == "hiboux"
    assert found["hero"] == "héros"
    assert found["key"] == "clés"
    told = {noun.lemma: noun.english[1] for noun in nouns()}
    assert (told["man"], told["child"], told["wolf"]) == ("men", "children", "wolves")
    assert (told["box"], told["baby"], told["key"]) == ("boxes", "babies", "keys")


# Masculine, feminine, masculine plural, feminine plural, masculine before a vowel.
ADJECTIVES = """
beautiful beau belle beaux belles bel
old       vieux vieille vieux vieilles vieil
new       nouveau nouvelle nouveaux nouvelles nouvel
white     blanc blanche blancs blanches blanc
blue      bleu bleue bleus bleues bleu
gray      gris grise gris grises gris
happy     heureux heureuse heureux heureuses heureux
French    français française français françaises français
Italian   italien italienne italiens italiennes italien
long      long longue longs longues long
expensive cher chère chers chères cher
fresh     frais fraîche frais fraîches frais
kind      gentil gentille gentils gentilles gentil
sad       triste triste tristes tristes triste
"""


@pytest.mark.parametrize("line", ADJECTIVES.strip().splitlines(), ids=lambda line: line.split()[0])
def test_adjectives(line):
    name, *expected = line.split()
    adjective = next(word for word in adjectives() if word.english == name)
    forms = [
        adjective.french(feminine=feminine, many=many)
        for many in (False, True)
        for feminine in (False, True)
    ]
    assert [*forms, adjective.french(feminine=False, many=False, following="arbre")] == expected


def le(text="le"):
    return French(text, article=True)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("je aime", "j' aime"),
        ("je habite", "j' habite"),
        ("je hais", "j' hais"),
        ("ne est", "n' est"),
        ("il ne y a pas de eau", "il n' y a pas d' eau"),
        ("que il", "qu' il"),
        ("que Anne", "qu' Anne"),
        ("parce que elle", "parce qu' elle"),
        ("me aide", "m' aide"),
        ("si il", "s' il"),
        ("si ils", "s' ils"),
        ("si elle", "si elle"),
        ("si un", "si un"),
        ("de huit", "de huit"),
        ("que onze", "que onze"),
        ("le 8", "le 8"),
        ("la œuvre", "l' œuvre"),
        ("essaie de le voir", "essaie de le voir"),
    ],
)
def test_elision(words, text):
    assert " ".join(w.text for w in meet([French(text) for text in words.split()])) == text


@pytest.mark.parametrize(
    ("before", "article", "noun", "text"),
    [
        ("de", "le", "roi", "du roi"),
        ("de", "le", "arbre", "de l' arbre"),
        ("de", "la", "reine", "de la reine"),
        ("de", "la", "école", "de l' école"),
        ("de", "les", "amis", "des amis"),
        ("à", "le", "marché", "au marché"),
        ("à", "le", "hôtel", "à l' hôtel"),
        ("à", "le", "héros", "au héros"),
        ("à", "la", "hache", "à la hache"),
        ("à", "les", "enfants", "aux enfants"),
        ("sur", "le", "toit", "sur le toit"),
    ],
)
def test_contraction(before, article, noun, text):
    met = meet([French(before), le(article), French(noun)])
    assert " ".join(w.text for w in met) == text


def test_links_through_contraction_and_elision():
    """of -> de, the -> le: "du" says "of" for sure, and "the" possibly."""
    of, the, king = English("of"), English("the"), English("king")
    phrase = Phrase(
        [of, the, king], [French("de", of), French("le", the, article=True), French("roi", king)]
    )
    pair = to_pair(phrase, ".")
    assert (pair.source, pair.target) == ("Of the king.", "Du roi.")
    assert str(pair.links) == "0-0 1p0 2-1 3-2"


def test_spaces_of_both_languages():
    pair = to_pair(word("is", "est") + word("it", "-ce") + word("he", "que il"), "?")
    assert pair.source == "Is it he?"
    assert pair.target == "Est-ce qu'il ?"


@pytest.mark.parametrize(
    ("word", "article"),
    [
        ("apple", "an"),
        ("old", "an"),
        ("university", "a"),
        ("useful", "a"),
        ("Italian", "an"),
        ("English", "an"),
        ("honest", "an"),
        ("umbrella", "an"),
        ("hotel", "a"),
    ],
)
def test_a_and_an(word, article):
    assert english.article(word) == article


def test_agreement():
    assert french.agree("vu", feminine=True, many=False) == "vue"
    assert french.agree("pris", feminine=False, many=True) == "pris"
    assert french.agree("pris", feminine=True, many=True) == "prises"
