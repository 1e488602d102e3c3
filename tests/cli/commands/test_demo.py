"""The demo, with a model that learns next to nothing: its parts, its figures, and its pictures."""

import dataclasses
import io
import json
import re
import sys
import types

import numpy as np
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from regard.cli.commands import demo
from regard.seq2seq.alignment import Links
from regard.seq2seq.corpus import Pair
from regard.seq2seq.metrics import AlignmentScore, Score
from regard.seq2seq.text.tokenizer_pair import TokenizerPair
from regard.seq2seq.train import held_out, runtime_options
from regard.seq2seq.train.settings import Settings

pytestmark = pytest.mark.usefixtures("quick_compilation")

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(demo.command)

TINY = {
    "data": {"grammar": 60, "scope": "demo", "valid_sentences": 8},
    "tokenizer": {"kind": "word", "joint": False},
    "batches": {"tokens": 320, "buckets": [18]},
    "model": {"embedding": 8, "encoder": 8, "decoder": 16},
    "recipe": {"epochs": 1, "max_steps": 2, "log_every": 1, "average": 1},
}


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A demo in small, what it printed, and its folder; the bundled model is said to be missing."""
    folder = tmp_path_factory.mktemp("demo")
    recipe = folder / "tiny.json"
    recipe.write_text(json.dumps(TINY), encoding="utf-8")
    Settings.load(recipe).save(folder / "out" / "run")  # an earlier demo's
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime_options, "keep_freed_memory", lambda: False)
        patch.setitem(sys.modules, "regard.seq2seq.translator", missing_bundle())
        words = ["--folder", folder / "out", "--recipe", recipe, "--held-out", "10"]
        return CliRunner().invoke(app, [str(word) for word in words]), folder / "out"


def missing_bundle():
    class Translator:
        @classmethod
        def load(cls, folder):
            raise FileNotFoundError("no bundled model in this build")

    return types.SimpleNamespace(Translator=Translator)


def test_it_says_first_how_long_it_takes(shown):
    result, _ = shown
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    start, _, _ = result.stdout.partition("1  English to French")
    assert "3 minutes on two cores" in start


def test_a_missing_bundled_model_is_reported_and_the_rest_goes_on(shown):
    result, _ = shown
    assert "no bundled model in this build" in " ".join(result.stdout.split())
    assert "2  A small model" in result.stdout
    assert "3  How good it is" in result.stdout


def test_expectations_that_are_not_kept_are_reported_and_fail(shown):
    result, _ = shown
    assert re.search(r"exact match +0\.0 % +at least 95 % +NOT REACHED", result.stdout)
    assert re.search(r"alignment error rate +[\d.]+ % +at most 15 % +NOT REACHED", result.stdout)
    assert re.search(r"BLEU +[\d.]+", result.stdout)
    assert result.exit_code == 1


def test_it_leaves_pictures_and_a_model(shown):
    result, folder = shown
    for name in ("curves.png", "alignment-1.png", "alignment-2.png", "alignment-3.png"):
        assert (folder / name).read_bytes()[:4] == b"\x89PNG"
        assert f"picture: {folder / name}" in result.stdout
    assert TokenizerPair.load(folder / "run" / "model").source.size > 50
    assert Settings.load(folder / "run" / "settings.json").data.grammar == 60


def test_it_fits_the_terminal(shown):
    result, _ = shown
    lines = [line for line in result.stdout.splitlines() if "/" not in line]  # but for paths
    assert max(map(len, lines)) <= 80


def test_a_folder_that_is_no_run_is_left_alone(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work", encoding="utf-8")
    settings = Settings.named("demo")
    with pytest.raises(FileExistsError, match="has files of something else in it"):
        demo._fresh(tmp_path / "run", settings)
    assert (tmp_path / "run" / "thesis.tex").exists()
    # Nor is a run of the user's removed.
    run = tmp_path / "own" / "run"
    dataclasses.replace(settings, beam=5).save(run)
    (run / "tokenizer.json").touch()
    with pytest.raises(FileExistsError, match="has files of something else in it"):
        demo._fresh(run, settings)
    settings.save(run)
    assert not demo._fresh(run, settings).exists()


def test_the_bundled_model_is_shown_with_its_maps(monkeypatch):
    class Translator:
        @classmethod
        def load(cls, folder):
            assert folder is None, "None is the bundled model"
            return cls()

        def translate(self, texts):
            words = dict(source_words=("a", "b"), target_words=("x", "y"))
            weights = np.array([[0.25, 0.75], [1.0, 0.0]])
            return [
                [types.SimpleNamespace(text=f"<{text}>", weights=weights, **words)]
                for text in texts
            ]

    module = types.SimpleNamespace(Translator=Translator)
    monkeypatch.setitem(sys.modules, "regard.seq2seq.translator", module)
    out = io.StringIO()
    demo._show_bundled(Console(file=out, width=80))
    for sentence in demo.SENTENCES:
        assert f"→ <{sentence}>" in out.getvalue()
    assert out.getvalue().count(".75") == len(demo.SENTENCES)


def judged(exact: float, aer: float) -> held_out.Judged:
    links = Links({(0, 1), (1, 0)})
    pair = Pair("a b", "x y", links)
    straight = Pair("a b", "x y", Links({(0, 0), (1, 1)}))
    scores = Score(90.0, ""), exact, AlignmentScore(aer, 80.0, 80.0)
    return held_out.Judged([straight, pair], ["x y", "x y"], [np.eye(2)] * 2, *scores)


@pytest.mark.parametrize(
    ("exact", "aer", "words"),
    [
        (95.0, 15.0, ["reached", "reached"]),
        (94.9, 15.1, ["NOT REACHED"] * 2),
        (99, 16, ["reached", "NOT REACHED"]),
    ],
)
def test_the_figures_are_compared_with_the_expectations(exact, aer, words):
    out = io.StringIO()
    Console(file=out, width=80).print(demo._figures(judged(exact, aer)))
    assert re.findall(r"% +((?:NOT )?(?:REACHED|reached))", out.getvalue()) == words


def test_sentences_whose_words_change_places_are_shown_first():
    assert demo._worth_showing(judged(99, 1)) == [1, 0]


def test_the_expectations_are_those_of_the_issue():
    assert (demo.EXPECTED_MATCH, demo.EXPECTED_AER) == (95, 15)
    recipe = Settings.named("demo")
    assert recipe.data.grammar
    assert recipe.data.scope == "demo"


def test_pairs_without_gold_or_too_long_cannot_be_judged():
    pairs = [Pair("a b", "x y")]
    tokenizers = TokenizerPair.train(pairs, kind="word")
    batches = Settings.named("demo").batches
    with pytest.raises(ValueError, match=r"must have gold links\. Got 'a b'"):
        held_out.judge(None, tokenizers, pairs, batches)
    long = [Pair("a " * 99, "x", Links({(0, 0)})), Pair("a", "x", Links({(0, 0)}))]
    with pytest.raises(ValueError, match=r"must fit into a bucket\. Got 1"):
        held_out.judge(None, tokenizers, long, batches)
