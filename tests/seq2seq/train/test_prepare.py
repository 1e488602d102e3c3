"""From files to batches: what is read, split, turned, counted and refused; settings as files."""

import dataclasses
import json

import numpy as np
import pytest

from regard.seq2seq.corpus import CorpusError, Grammar, Pair
from regard.seq2seq.model.config import HEAD_SCORES
from regard.seq2seq.text.words import split_words
from regard.seq2seq.train.curves import curve, draw_curves
from regard.seq2seq.train.log import Log
from regard.seq2seq.train.pairs import read_pairs, set_aside
from regard.seq2seq.train.prepare import encode, prepare
from regard.seq2seq.train.settings import RECIPES, DataSettings, Settings

NAMES = sorted(path.stem for path in RECIPES.glob("*.json"))
TSV = "".join(f"{n} cats sleep.\t{n} chats dorment.\n" for n in range(40))


@pytest.fixture
def tsv(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text(TSV + "no tab\n\n", encoding="utf-8")
    return str(path)


def small(**data) -> Settings:
    settings = Settings.named("demo")
    given = dataclasses.replace(settings.data, **{"grammar": None, **data})
    return dataclasses.replace(settings, data=given)


@pytest.mark.parametrize("name", NAMES)
def test_every_named_recipe_is_whole(name):
    settings = Settings.named(name)
    assert settings.about.endswith(".")
    attentions = ["additive", "bilinear", "none"]
    if name.endswith("transformer"):
        attentions = HEAD_SCORES
    elif name != "multi30k":  # its widths, which were measured, suit no score that compares states
        attentions += ["dot", "gaussian"]
    for attention in attentions:
        other = dataclasses.replace(settings, model={**settings.model, "attention": attention})
        assert other.config(100, 100).attention == attention
    assert Settings.from_json(settings.to_json()) == settings
    # What a recipe leaves out is a default; what it says must arrive.
    said = json.loads((RECIPES / f"{name}.json").read_text(encoding="utf-8"))
    assert vars(settings.recipe) | said["recipe"] == vars(settings.recipe)
    assert settings.model == said["model"]


def test_the_recipes_that_there_should_be():
    recurrent = {"default", "demo", "hansards", "multi30k", "tatoeba"}
    others = {f"{name}-transformer" for name in recurrent - {"hansards"}}
    assert set(NAMES) == recurrent | others
    assert Settings.named("demo", "transformer") == Settings.named("demo-transformer")
    multi30k = Settings.named("multi30k")
    assert (multi30k.model["embedding"], multi30k.model["encoder"]) == (512, 512)
    assert multi30k.recipe.stop_on == "bleu"
    assert Settings.named("hansards").data.expand


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 1}, "unknown fields ['colour']"),
        ({"recipe": {"epoch": 1}}, "'recipe' of some.json does not describe"),
        ({"model": {"decoders": 1}}, "some.json: .*decoders"),
        ({"model": {"attention": "dot", "decoder": 8}}, "decoder must be 2 · encoder"),
        ({"recipe": {"epochs": 0}}, "some.json: epochs must be at least 1. Got 0."),
        ({"data": {"tsv": "a", "grammar": 3}}, "from one source. Got tsv and grammar"),
        ({"data": {"source": "a"}}, "need both source and target. Got no target"),
        ({"data": {"valid_fraction": 0}}, "valid_fraction must be in (0, 1). Got 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(change, message):
    pattern = (
        message if ".*" in message else message.translate({ord(c): "\\" + c for c in "[]().'"})
    )
    with pytest.raises(ValueError, match=pattern):
        Settings.from_json(json.dumps(change), "some.json")


def test_a_recipe_that_is_not_there_names_those_that_are():
    with pytest.raises(FileNotFoundError, match=r"default, demo, .*tatoeba\. Got 'demos'"):
        Settings.named("demos")


def test_pairs_are_counted_and_split_by_source(tsv):
    lines = []
    train, valid = read_pairs(DataSettings(tsv=tsv, valid_fraction=0.1), say=lines.append)
    assert (len(train), len(valid)) == (36, 4)
    assert not {p.source for p in train} & {p.source for p in valid}
    assert "read 42, kept 40, dropped 2" in lines[0]
    assert "no tab: 1" in lines[0]
    assert "pairs.tsv:41" in lines[0]
    assert "4 of these set aside, 36" in lines[1]
    assert read_pairs(DataSettings(tsv=tsv, valid_fraction=0.1)) == (train, valid)


def test_what_is_set_aside_does_not_depend_on_the_order():
    pairs = [Pair(f"{n}", "x") for n in range(50)]
    _, chosen = set_aside(pairs, 0.2)
    _, again = set_aside(pairs[::-1], 0.2)
    assert sorted(p.source for p in chosen) == sorted(p.source for p in again)
    assert len(chosen) == 10
    with pytest.raises(CorpusError, match=r"two different source sentences\. Got 1"):
        set_aside([Pair("a", "b"), Pair("a", "c")], 0.5)


def test_validation_files_and_a_sample_of_them(tsv):
    _, valid = read_pairs(DataSettings(tsv=tsv, valid_tsv=tsv, valid_sentences=7))
    assert len(valid) == 7
    _, everything = read_pairs(DataSettings(tsv=tsv, valid_tsv=tsv, valid_sentences=0))
    assert len(everything) == 40


def test_reverse_turns_text_and_links():
    data = DataSettings(grammar=30, valid_sentences=5)
    there, _ = read_pairs(data)
    back, _ = read_pairs(dataclasses.replace(data, reverse=True))
    for one, other in zip(there, back, strict=True):
        assert (one.source, one.target) == (other.target, other.source)
        assert {(j, i) for i, j in one.links.sure} == other.links.sure
        assert {(j, i) for i, j in one.links.possible} == other.links.possible


def test_expanded_text_has_no_links_left():
    data = DataSettings(grammar=40, valid_sentences=5, expand=True)
    train, _ = read_pairs(data)
    assert all(pair.links is None for pair in train)
    assert not any("'" in pair.target and "d'" in pair.target.split() for pair in train)
    assert any(" de " in pair.target or " le " in pair.target for pair in train)


def test_no_corpus_is_an_error():
    with pytest.raises(ValueError, match="a run needs a corpus"):
        read_pairs(DataSettings())


def test_prepared_batches_hold_the_corpus():
    lines = []
    settings = small(grammar=200, valid_sentences=20)
    ready = prepare(settings, say=lines.append)
    sizes = ready.config.source_vocab, ready.config.target_vocab
    assert sizes == (ready.tokenizers.source.size, ready.tokenizers.target.size)
    seen = sum(int((np.asarray(batch.source_lens) > 0).sum()) for batch in ready.batches)
    assert seen == 200 - len(ready.batches.too_long)
    assert [line.split(":")[0] for line in lines] == [
        "train",
        "validation",
        "vocabulary",
        "batches",
    ]


def test_the_validation_scores_its_own_references_in_its_own_order():
    ready = prepare(small(grammar=2000, valid_sentences=30))
    targets = [list(ready.tokenizers.target.encode(pair.target).ids) for pair in ready.valid]
    assert ready.validation.bleu(targets) > 95  # a held-out word or two may be <unk>
    assert ready.validation.bleu(targets[1:] + targets[:1]) < 50
    # The sample is the longest of the shortest bucket.
    first = next(iter(ready.validation.batches))
    lens = np.asarray(first.source_lens)
    assert lens[0] == lens.max()
    assert (
        ready.tokenizers.source.decode(first.source[0]).words
        == split_words(ready.valid[0].source).words
    )


def test_sentences_too_long_to_validate_on_are_counted(tmp_path):
    path = tmp_path / "valid.tsv"
    path.write_text(f"a b\ta b\n{'a ' * 60}\t{'b ' * 60}\nb\tb\n", encoding="utf-8")
    lines = []
    ready = prepare(small(tsv=str(path), valid_tsv=str(path)), say=lines.append)
    assert len(ready.valid) == 2
    assert any("1 of them are longer than" in line for line in lines)
    assert any("1 pairs longer than" in line for line in lines)


def test_lowercased_and_stripped_references():
    pairs = [Pair("A", "L'Été"), Pair("B", "Où ?"), Pair("C d e f", "Une île à la mer")]
    settings = small(tsv="unused")
    shorter = dataclasses.replace(settings.tokenizer, case="lower", strip_accents=True)
    settings = dataclasses.replace(settings, tokenizer=shorter)
    from regard.seq2seq.text.tokenizer_pair import TokenizerPair
    from regard.seq2seq.train.prepare import _validation

    tokenizers = TokenizerPair.train(pairs, **vars(shorter))
    validation, order = _validation(settings, tokenizers, pairs, print)
    ids = [target for _, target in encode(tokenizers, order)]
    assert validation.bleu(ids) == pytest.approx(100)


def test_curves_are_of_the_log(tmp_path):
    log = Log(tmp_path / "log.csv")
    log.write(step=20, train_nll=2.0)
    log.write(step=20, valid_loss=3.0, valid_bleu=10.0)
    log.write(step=40, train_nll=1.0)
    rows = [{"step": "20", "train_nll": "2.0"}, {"step": "20", "train_nll": ""}]
    assert curve(rows, "train_nll") == ([20], [2.0])
    path = draw_curves(log.path, tmp_path / "curves.png")
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["curves.png", "log.csv"]
    with pytest.raises(ValueError, match="must have a loss"):
        draw_curves(Log(tmp_path / "empty.csv").path, tmp_path / "none.png")


def test_the_grammar_is_read_as_the_settings_say():
    train, valid = read_pairs(DataSettings(grammar=25, scope="demo", valid_sentences=3))
    assert train == list(Grammar(25, "train", scope="demo"))
    assert valid == list(Grammar(3, "valid", scope="demo"))
