"""Subword dropout: the same words in other pieces, as often as the paper says, and repeatable."""

import dataclasses
import itertools
import json
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.seq2seq.corpus import Grammar, Pair
from regard.seq2seq.text.marks import CAPITAL
from regard.seq2seq.text.subword_dropout import Merges, SubwordDropout
from regard.seq2seq.text.tokenizer import SPECIAL, UNK, Tokenizer
from regard.seq2seq.text.tokenizer_pair import TokenizerPair
from regard.seq2seq.text.words import normalize
from regard.seq2seq.train.batches import Batches
from regard.seq2seq.train.prepare import encode, prepare
from regard.seq2seq.train.progress import Progress
from regard.seq2seq.train.settings import Settings
from regard.seq2seq.train.training import train
from seq2seq import reversing

PAIRS = list(Grammar(80, seed=3))
ODD = [
    Pair("L'ami d'Anne dort-il ?", "Isn't USA's (old) school open!"),
    Pair("🦉 مرحبا the👩‍👩‍👧cat 东京", "⇧ ▁ ￭ <unk> <eos>"),
    Pair("", "ééé ЖЖ Ж a1Ж"),
]
CASES = ["keep", "mark", "lower"]


@pytest.fixture(scope="module")
def tokenizers():
    return {case: TokenizerPair.train(PAIRS, size=260, case=case) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_without_dropout_the_pieces_are_the_tokenizers(tokenizers, case):
    found = SubwordDropout(tokenizers[case], PAIRS + ODD, 0.0, seed=0)(0)
    assert found == encode(tokenizers[case], PAIRS + ODD)
    flat = {token for pair in found for side in pair for token in side}
    pieces = tokenizers[case].source.pieces
    assert UNK in flat, "nothing is unknown: that is not tested"
    assert any(len(pieces[token]) > 4 for token in flat - {UNK})
    assert (case == "mark") == (CAPITAL in pieces)


@given(text=st.one_of(st.text(), st.text(alphabet="aabnoe'T -.?!📚\0\ud800م\u200d▁￭⇧")))
def test_of_any_text(tokenizers, text):
    pairs = [Pair(text, text * 3)]
    for pair in tokenizers.values():
        assert SubwordDropout(pair, pairs, 0.0, seed=0)(0) == encode(pair, pairs)


def test_separate_vocabularies_and_no_accents():
    options = dict(size=150, joint=False, case="lower", strip_accents=True)
    separate = TokenizerPair.train(PAIRS, **options)
    found = SubwordDropout(separate, PAIRS, 0.0, seed=0)(0)
    assert found == encode(separate, PAIRS)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("probability", [0.5, 1.0])
def test_the_words_stay_the_same(tokenizers, case, probability):
    pair = tokenizers[case]
    plain = encode(pair, PAIRS)
    found = SubwordDropout(pair, PAIRS, probability, seed=0)(0)
    for text, line in zip(PAIRS, found, strict=True):
        for side, tokenizer, ids in zip("st", (pair.source, pair.target), line, strict=True):
            wanted = text.source if side == "s" else text.target
            assert tokenizer.decode(ids).text == normalize(wanted, lowercase=case == "lower")
    longer = sum(len(s) + len(t) for s, t in found) / sum(len(s) + len(t) for s, t in plain)
    assert longer > 1.3
    flat = {token for line in found for side in line for token in side}
    assert all(len(pair.source.pieces[token]) == 1 for token in flat) == (probability == 1.0)


def toy(*merges):
    pieces = ["▁", *"abcd"]
    pieces += [left + right for left, right in merges]
    return Tokenizer("bpe", (*SPECIAL, *pieces), merges)


# By hand, with p to skip and q = 1 − p to make a merge. In each step all are asked anew.
TOYS = {
    "one after the other": (
        toy(("▁", "a"), ("▁a", "b")),
        "ab",
        lambda p, q: {"▁ a b": p, "▁a b": q * p, "▁ab": q * q},
    ),
    "one or the other": (
        toy(("a", "b"), ("▁", "a")),
        "ab",
        lambda p, q: {"▁ ab": q, "▁a b": p * q, "▁ a b": p * p},
    ),
    "skipped, and made later": (
        toy(("a", "b"), ("c", "d")),
        "abcd",
        lambda p, q: {
            "▁ ab cd": q * q + p * q * q,
            "▁ ab c d": q * p,
            "▁ a b cd": p * q * p,
            "▁ a b c d": p * p,
        },
    ),
}


@pytest.mark.parametrize("name", TOYS)
@pytest.mark.parametrize("p", [0.1, 0.4])
def test_a_merge_is_skipped_as_often_as_asked_for(name, p):
    tokenizer, word, law = TOYS[name]
    merges, draw, count = Merges(tokenizer), random.Random(5).random, 20_000
    steps = merges.steps(word)
    seen = Counter(
        " ".join(tokenizer.pieces[token] for token in merges.drawn(steps, p, draw))
        for _ in range(count)
    )
    expected = law(p, 1 - p)
    assert sum(expected.values()) == pytest.approx(1.0)
    assert set(seen) == set(expected)
    for pieces, probability in expected.items():
        spread = np.sqrt(probability * (1 - probability) / count)
        assert seen[pieces] / count == pytest.approx(probability, abs=4 * spread)


def test_common_words_too_are_spelled_as_often_as_asked_for():
    """Of a common word only some segmentations are made, and drawn from."""
    tokenizer = TOYS["one after the other"][0]
    pairs = [Pair("ab " * 50, "ab")] * 40
    epochs = SubwordDropout(TokenizerPair(tokenizer, tokenizer), pairs, 0.3, seed=0)
    drawn = Counter(token for epoch in range(30) for source, _ in epochs(epoch) for token in source)
    whole = drawn[tokenizer.pieces.index("▁ab")] / (30 * 40 * 50)
    # 30 epochs of ⌈2√2000⌉ = 90 segmentations, each of them whole with 0.7²
    assert whole == pytest.approx(0.49, abs=4 * np.sqrt(0.49 * 0.51 / (30 * 90)))


def test_an_epoch_is_the_same_whenever_it_is_asked_for(tokenizers):
    first = SubwordDropout(tokenizers["mark"], PAIRS, 0.1, seed=0)
    epochs = [first(epoch) for epoch in range(4)]
    again = SubwordDropout(tokenizers["mark"], PAIRS, 0.1, seed=0)
    assert [again(epoch) for epoch in (3, 0, 2, 1)] == [epochs[epoch] for epoch in (3, 0, 2, 1)]
    other = SubwordDropout(tokenizers["mark"], PAIRS, 0.1, seed=1)
    for one, two in itertools.combinations([*epochs, other(0)], 2):
        alike = [a == b for a, b in zip(one, two, strict=True)]
        assert np.mean(alike) < 0.2
    same = SubwordDropout(
        tokenizers["mark"], [Pair(p.source, p.source) for p in PAIRS], 0.1, seed=0
    )
    assert np.mean([source == target for source, target in same(0)]) < 0.5


SHAPES = dict(tokens=256, buckets=(16, 24, 32, 48, 64))


def batches_of(tokenizers, probability=0.2, seed=0, **options) -> Batches:
    given = SubwordDropout(tokenizers["mark"], PAIRS, probability, seed=seed)
    return Batches(given, **SHAPES, **options)


def numbers(batches):
    return [tuple(array.tolist() for array in vars(batch).values()) for batch in batches]


def test_batches_go_on_in_the_middle_of_an_epoch(tokenizers):
    whole = batches_of(tokenizers)
    epochs, counts = [], []
    for _ in range(4):
        counts.append(len(whole))
        epochs.append(numbers(whole))
    assert [len(epoch) for epoch in epochs] == counts
    shapes = {(len(batch[0]), len(batch[0][0])) for epoch in epochs for batch in epoch}
    assert shapes <= set(whole.shapes)

    killed = batches_of(tokenizers)
    for _ in range(2):
        list(killed)
    for _, _ in zip(range(3), killed, strict=False):
        state = json.loads(json.dumps(killed.state()))
    assert (state["epoch"], state["position"]) == (2, 3)
    again = batches_of(tokenizers)
    assert again.shapes == whole.shapes
    again.restore(state)
    assert numbers(again) == epochs[2][3:]
    assert numbers(again) == epochs[3]


def test_every_epoch_has_every_pair_once_in_its_own_pieces(tokenizers):
    batches = batches_of(tokenizers)
    given = SubwordDropout(tokenizers["mark"], PAIRS, 0.2, seed=0)
    for epoch in range(3):
        found = {}
        for indices, batch in batches.with_indices():
            for row, index in enumerate(indices.tolist()):
                source = batch.source[row, : batch.source_lens[row]].tolist()
                target = batch.target_in[row, : batch.target_lens[row]].tolist()
                if index >= 0:
                    assert index not in found
                    found[index] = source[:-1], target[1:]  # without <eos>, and without <bos>
        assert [found[index] for index in range(len(PAIRS))] == given(epoch)
        assert batches.too_long == []
    small = Batches(SubwordDropout(tokenizers["mark"], PAIRS, 1.0, seed=0), buckets=(16, 30))
    left = np.concatenate([indices for indices, _ in small.with_indices()])
    assert 0 < len(small.too_long) == len(PAIRS) - (left >= 0).sum()


def test_a_state_of_another_dropout_is_refused(tokenizers):
    state = batches_of(tokenizers).state()
    for other in (dict(probability=0.1), dict(probability=0.0), dict(seed=1)):
        with pytest.raises(ValueError, match=r"Got data .* subword dropout"):
            batches_of(tokenizers, **other).restore(state)
    batches = batches_of(tokenizers)
    with pytest.raises(ValueError, match="Got position 1000"):
        batches.restore({**state, "epoch": 3, "position": 1000})
    assert (batches.epoch, batches.position) == (0, 0)


class Killed(Progress):
    def stepped(self, report):
        if report.step == 17:
            raise KeyboardInterrupt


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.slow
def test_a_run_that_was_stopped_ends_as_one_that_was_not(tokenizers, tmp_path):
    size = tokenizers["mark"].source.size
    config = dataclasses.replace(reversing.CONFIG, source_vocab=size, target_vocab=size)
    recipe = dataclasses.replace(reversing.RECIPE, schedule="constant", epochs=3)

    def run(folder, **options):
        given = SubwordDropout(tokenizers["mark"], PAIRS, 0.2, seed=recipe.seed)
        data = Batches(given, tokens=512, buckets=(32, 64))
        return train(config, recipe, data, tmp_path / folder, **options)

    expected = run("whole")
    assert expected.step > 20
    with pytest.raises(KeyboardInterrupt):
        run("stopped", progress=Killed())
    found = run("stopped", resume=True)
    assert (found.step, found.epoch) == (expected.step, expected.epoch)
    for name, array in expected.params.items():
        np.testing.assert_array_equal(found.params[name], array)


def settings(probability: float) -> Settings:
    named = Settings.named("demo")
    data = dataclasses.replace(
        named.data, grammar=200, valid_sentences=20, subword_dropout=probability
    )
    tokenizer = dataclasses.replace(named.tokenizer, kind="bpe", size=400)
    batches = dataclasses.replace(named.batches, buckets=(16, 32, 96))
    return dataclasses.replace(named, data=data, tokenizer=tokenizer, batches=batches)


def test_settings_bring_it_to_the_training_pairs_only():
    lines: list[str] = []
    ready, plain = prepare(settings(0.3), say=lines.append), prepare(settings(0.0))
    assert ready.tokenizers == plain.tokenizers
    assert "in the first epoch" in lines[-1]
    assert "by subword dropout of 0.3" in lines[-1]
    assert ready.batches.target_tokens > 1.1 * plain.batches.target_tokens
    assert numbers(ready.validation.batches) == numbers(plain.validation.batches)
    assert ready.validation.batches.state() == plain.validation.batches.state()
    # The model's seed is the dropout's.
    recipe = dataclasses.replace(settings(0.3).recipe, seed=7)
    other = prepare(dataclasses.replace(settings(0.3), recipe=recipe))
    assert other.batches.state()["data"] != ready.batches.state()["data"]


def test_settings_as_a_file():
    assert Settings.from_json('{"data": {"subword_dropout": 0.1}}').data.subword_dropout == 0.1
    assert Settings.from_json(settings(0.3).to_json()) == settings(0.3)
    with pytest.raises(ValueError, match=r"subword_dropout must be in \[0, 1\]\. Got 1\.5"):
        Settings.from_json('{"data": {"subword_dropout": 1.5}}')
    text = '{"data": {"subword_dropout": 0.1}, "tokenizer": {"kind": "word"}}'
    with pytest.raises(ValueError, match=r'mine.json: .* with kind \'word\'\. Fix: kind "bpe"'):
        Settings.from_json(text, "mine.json")


def test_whole_words_have_no_merges(tokenizers):
    words = TokenizerPair.train(PAIRS, kind="word")
    with pytest.raises(ValueError, match="Got a tokenizer of kind 'word', which has none"):
        SubwordDropout(words, PAIRS, 0.1, seed=0)
    with pytest.raises(ValueError, match=r"the probability must be in \[0, 1\]\. Got -0\.1"):
        SubwordDropout(tokenizers["keep"], PAIRS, -0.1, seed=0)
