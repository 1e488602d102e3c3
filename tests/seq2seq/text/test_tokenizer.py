"""Text to numbers and back: nothing lost, words kept, and a file that says when it is damaged."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.seq2seq.corpus import Pair
from regard.seq2seq.text.tokenizer import BOS, EOS, PAD, UNK, Tokenizer
from regard.seq2seq.text.tokenizer_pair import FILE, TokenizerPair
from regard.seq2seq.text.words import normalize

ENGLISH = ["The cat isn't eating the apple.", "Where's the old school?", "I see Mary's cats!"]
FRENCH = ["Le chat ne mange pas la pomme.", "Où est la vieille école ?", "Je vois l'ami d'Anne !"]
TEXTS = ENGLISH + FRENCH
KINDS = [(kind, case) for kind in ("bpe", "word") for case in ("keep", "mark", "lower")]


@pytest.fixture(scope="module")
def tokenizers():
    return {
        (kind, case): Tokenizer.train(TEXTS * 5, kind=kind, case=case, size=300)
        for kind, case in KINDS
    }


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_what_was_seen_comes_back(tokenizers, kind):
    tokenizer = tokenizers[kind]
    for text in TEXTS:
        decoded = tokenizer.decode(tokenizer.encode(text).ids)
        assert decoded.text == normalize(text, lowercase=kind[1] == "lower")
        assert decoded.unknown == ()


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@given(text=st.one_of(st.text(), st.text(alphabet="aéT' -.?!l📚\0\ud800م\u200d")))
def test_any_text_is_encoded(tokenizers, kind, text):
    tokenizer = tokenizers[kind]
    encoded = tokenizer.encode(text)
    assert len(encoded.ids) == len(encoded.word_of_token)
    assert all(token == UNK or EOS < token < tokenizer.size for token in encoded.ids)
    # Every word has a token, and tokens are in the order of the words.
    assert sorted(set(encoded.word_of_token)) == list(range(len(encoded.words)))
    assert list(encoded.word_of_token) == sorted(encoded.word_of_token)
    # What can be known comes back to the letter; and words to the word in any case.
    decoded = tokenizer.decode(encoded.ids)
    assert len(decoded.words) == len(encoded.words)
    assert decoded.word_of_token == encoded.word_of_token
    if not decoded.unknown and kind == ("bpe", "keep"):
        assert decoded.text == normalize(text)


def test_words_without_tokens_of_their_own():
    """Emoji, another script and what is in no vocabulary at all are one <unk> each."""
    tokenizer = Tokenizer.train(TEXTS, kind="bpe", size=200)
    encoded = tokenizer.encode("🦉 مرحبا cat")
    decoded = tokenizer.decode(encoded.ids)
    assert encoded.words == ("🦉", "مرحبا", "cat")
    assert decoded.words[:2] == ("<unk>", "<unk>")
    assert decoded.unknown == (0, 1)
    assert decoded.split.with_words({0: "🦉", 1: "مرحبا"}).text == "🦉 مرحبا cat"


def test_given_words_are_the_words():
    """A file with gold alignments has words of its own; they are not split for the reader."""
    tokenizer = Tokenizer.train(TEXTS, kind="bpe", size=200)
    encoded = tokenizer.encode(["Where's", "the", "", "aujourd'hui?"])
    assert encoded.words == ("Where's", "the", "", "aujourd'hui?")
    assert sorted(set(encoded.word_of_token)) == [0, 1, 2, 3]


def test_case_is_one_token():
    tokenizer = Tokenizer.train(TEXTS, kind="word", case="mark")
    small, large = tokenizer.encode("le chat"), tokenizer.encode("Le chat")
    assert large.ids[1:] == small.ids
    assert large.word_of_token == (0, 0, 1)
    assert tokenizer.decode([large.ids[0]]).text == ""
    assert tokenizer.decode([large.ids[0], large.ids[0], *small.ids]).words[-1] == "chat"


def test_other_spaces_are_no_other_word():
    tokenizer = Tokenizer.train(["Où est-il ?"], kind="word")
    assert UNK not in tokenizer.encode("Où est-il?").ids


def test_decoding_stops_at_eos_and_skips_padding():
    tokenizer = Tokenizer.train(["un deux trois"], kind="word")
    un, deux, trois = tokenizer.encode("un deux trois").ids
    decoded = tokenizer.decode([BOS, un, PAD, deux, EOS, trois, PAD])
    assert decoded.text == "un deux"
    assert decoded.word_of_token == (-1, 0, -1, 1)
    assert tokenizer.decode([]).text == ""


def test_special_ids():
    tokenizer = Tokenizer.train(["<pad> <eos>"], kind="bpe", size=60)
    assert (PAD, UNK, BOS, EOS) == (0, 1, 2, 3)
    assert tokenizer.pieces[:4] == ("<pad>", "<unk>", "<bos>", "<eos>")
    assert min(tokenizer.encode("<pad> <eos> <bos>").ids) >= 1
    assert tokenizer.decode(tokenizer.encode("<pad> <eos>").ids).text == "<pad> <eos>"


@pytest.mark.parametrize("kind", ["bpe", "word"])
def test_training_is_reproducible_and_keeps_to_the_size(kind):
    first, second = (Tokenizer.train(TEXTS * 3, kind=kind, size=60) for _ in range(2))
    assert first == second
    assert first.size <= 60


def test_min_count_leaves_out_the_rare():
    tokenizer = Tokenizer.train(["oui oui non"], kind="word", min_count=2)
    assert tokenizer.pieces[4:] == ("oui",)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tokenizer.train([]), "a vocabulary is learned from text. Got none"),
        (lambda: Tokenizer.train(["", "\0"]), "a vocabulary is learned from text. Got none"),
        (lambda: Tokenizer.train(["a"], size=4), "room for more than its 4 special entries"),
        (lambda: Tokenizer("letters", ()), 'the kind of a tokenizer is "bpe" or "word"'),
        (lambda: Tokenizer("word", ("a",)), "a vocabulary begins with <pad>, <unk>"),
        (lambda: Tokenizer.train(["a"], kind="word").decode([9]), "has 5 entries, 0 to 4. Got 9."),
        (lambda: Tokenizer.train(["a"], kind="word").decode([-1]), "0 to 4. Got -1."),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        make()


PAIRS = [Pair(source, target) for source, target in zip(ENGLISH, FRENCH, strict=True)]


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("kind", ["bpe", "word"])
def test_saved_and_loaded(tmp_path, joint, kind):
    pair = TokenizerPair.train(PAIRS, kind=kind, joint=joint, case="mark", size=120)
    pair.save(tmp_path / "model")
    loaded = TokenizerPair.load(tmp_path / "model")
    assert loaded == pair
    assert loaded.joint == joint
    assert loaded.source.encode(ENGLISH[0]) == pair.source.encode(ENGLISH[0])
    assert [file.name for file in (tmp_path / "model").iterdir()] == [FILE]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "is damaged: it is not JSON"),
        (lambda text: "", "is damaged: it is not JSON"),
        (lambda text: "[]", "is no tokenizer"),
        (lambda text: text.replace("regard tokenizer", "tokenizer"), "is no tokenizer: its form"),
        (lambda text: text.replace('"version": 1', '"version": 7'), "is of version 7, and this"),
        (lambda text: text.replace('"pieces"', '"peaces"'), "is damaged: no 'pieces'"),
        (lambda text: text.replace('"<unk>"', '"<uhm>"'), "is damaged: a vocabulary begins with"),
        (lambda text: text.replace('"bpe"', '"bpf"'), "is damaged: the kind of a tokenizer"),
        (
            lambda text: text.replace('"\u2581"', '"x\u2581"'),
            "is damaged: a merge is of two pieces",
        ),
        (
            lambda text: text.replace('"\u2581"', "7"),
            "is damaged: a piece of the vocabulary is not",
        ),
    ],
)
def test_a_damaged_file_is_named(tmp_path, damage, message):
    TokenizerPair.train(PAIRS, size=120).save(tmp_path)
    path = tmp_path / FILE
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(ValueError, match=message) as caught:
        TokenizerPair.load(tmp_path)
    assert str(path) in str(caught.value)


def test_a_folder_without_tokenizer_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"a model's folder has a file {FILE}"):
        TokenizerPair.load(tmp_path)


def test_an_older_file_is_still_read(tmp_path):
    """Version 1, as it was written at first: what is on disk may not become unreadable."""
    words = {"kind": "word", "case": "keep", "strip_accents": False, "merges": []}
    words["pieces"] = ["<pad>", "<unk>", "<bos>", "<eos>", "oui"]
    content = {"format": "regard tokenizer", "version": 1, "source": words, "target": words}
    (tmp_path / FILE).write_text(json.dumps(content))
    assert TokenizerPair.load(tmp_path).target.encode("oui").ids == (4,)
