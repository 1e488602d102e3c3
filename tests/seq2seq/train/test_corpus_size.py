"""Default settings fit the corpus; named recipes and explicit choices stay what they are."""

import dataclasses

import pytest

from regard.seq2seq.corpus import Pair
from regard.seq2seq.train.corpus_size import fit
from regard.seq2seq.train.pairs import set_aside
from regard.seq2seq.train.prepare import prepare
from regard.seq2seq.train.recipe import Recipe
from regard.seq2seq.train.run_state import RunState
from regard.seq2seq.train.settings import RECIPES, Settings
from regard.seq2seq.train.training import train

DEFAULT = Settings.named("default")


def corpus(words: int) -> list[Pair]:
    return [Pair(f"{n} b c d", f"{n} f g h i j k l m n") for n in range(words // 10)]


def sizes(settings: Settings) -> tuple:
    model = settings.config(100, 100)
    widths = model.embedding, model.encoder, model.decoder
    return settings.tokenizer.size, *widths, settings.batches.tokens, settings.recipe.warmup_steps


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (1_000, (500, 128, 128, 256, 512, 100)),
        (13_000, (900, 128, 128, 256, 512, 152)),
        (70_000, (2100, 128, 128, 256, 1024, 400)),
        (350_000, (4700, 256, 256, 512, 2560, 400)),
        (1_000_000, (8000, 256, 256, 512, 2560, 400)),
    ],
)
def test_sizes_grow_with_the_corpus(words, expected):
    fitted, lines = fit(DEFAULT, corpus(words))
    assert sizes(fitted) == expected
    assert Settings.from_json(fitted.to_json()) == fitted
    assert {type(size) for size in sizes(fitted)} == {int}
    assert fitted.scaled == (), "a continued run chooses nothing again"
    assert [line.split(":")[0] for line in lines] == [
        *([f"sizes for {words:,} target words"] if words < 1_000_000 else []),
        *(["warning"] if words < 50_000 else []),
    ]
    assert fit(fitted, corpus(10)) == (fitted, [])


def test_a_large_corpus_leaves_the_recipe_alone():
    fitted, _ = fit(DEFAULT, corpus(1_000_000))
    assert fitted == dataclasses.replace(DEFAULT, scaled=())


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.json")))
def test_named_recipes_stay_as_they_are(name):
    settings = Settings.named(name)
    if not name.startswith("default"):
        assert fit(settings, corpus(1_000)) == (settings, [])


def test_explicit_choices_stay_and_the_rest_goes_with_them():
    chosen = dataclasses.replace(
        DEFAULT,
        scaled=tuple(set(DEFAULT.scaled) - {"tokenizer.size", "batches.tokens"}),
        batches=dataclasses.replace(DEFAULT.batches, tokens=100),
    )
    fitted, _ = fit(chosen, corpus(13_000))
    assert sizes(fitted) == (8000, 128, 128, 256, 100, 400)
    words = dataclasses.replace(
        DEFAULT, tokenizer=dataclasses.replace(DEFAULT.tokenizer, kind="word")
    )
    assert fit(words, corpus(13_000))[0].tokenizer.size == 8000


def test_a_small_corpus_sets_enough_sentences_aside():
    pairs = [Pair(str(n), "x") for n in range(2000)]
    for fraction, at_least, expected in ((0.02, 0, 40), (0.02, 100, 100), (0.1, 100, 200)):
        assert len(set_aside(pairs, fraction, at_least)[1]) == expected
    assert len(set_aside(pairs[:200], 0.02, 100)[1]) == 20, "a tenth at most"


def test_no_patience_is_spent_during_warm_up():
    recipe = Recipe(
        schedule="plateau", warmup_steps=400, patience=2, plateau_patience=1, plateau_factor=0.5
    )
    state = RunState(step=100)
    assert state.count(3.0, recipe) == (True, True)
    for state.step in (200, 300, 400):
        assert state.count(1.0, recipe)[0] is False
        assert (state.stale, state.plateau, state.limit(recipe)) == (0, 1.0, None)
    for state.step in (500, 600):
        state.count(float("nan"), recipe)
    assert (state.stale, state.plateau) == (2, 0.25)
    assert state.limit(recipe) == "2 validations in a row were no better"


@pytest.mark.slow
def test_the_defaults_learn_from_two_thousand_pairs(tmp_path):
    """With fixed sizes, the patience of five epochs ended such a run at a BLEU of 0."""
    data = dataclasses.replace(DEFAULT.data, grammar=2000, valid_sentences=100)
    said: list[str] = []
    ready = prepare(dataclasses.replace(DEFAULT, data=data), say=said.append)
    assert any(line.startswith("warning: 2,000 pairs are a small corpus") for line in said)
    recipe = dataclasses.replace(ready.settings.recipe, epochs=12)
    result = train(ready.config, recipe, ready.batches, tmp_path, validation=ready.validation)
    assert result.bleu > 5
