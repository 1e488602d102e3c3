"""`regard train`: a run from text to a model's folder, one continued, and everything refused."""

import errno
import io
import json
import re
import shutil

import numpy as np
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from regard.cli import train_run
from regard.cli.commands import train
from regard.cli.terminal import train_progress
from regard.seq2seq.corpus import Pair
from regard.seq2seq.model.architectures import ARCHITECTURES
from regard.seq2seq.model.export import load_model
from regard.seq2seq.text.tokenizer_pair import TokenizerPair
from regard.seq2seq.train import checkpoints, runtime_options, training
from regard.seq2seq.train.corpus_size import WIDTHS
from regard.seq2seq.train.log import read_log
from regard.seq2seq.train.non_finite import NonFiniteError
from regard.seq2seq.train.progress import Plan, Sample, StepReport, ValidationReport
from regard.seq2seq.train.settings import Settings

pytestmark = pytest.mark.usefixtures("quick_compilation", "usual_memory")

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(train.command)

TINY = {
    "about": "As small as it gets.",
    "data": {"valid_sentences": 6},
    "tokenizer": {"kind": "word", "joint": False},
    "batches": {"tokens": 128, "buckets": [8]},
    "model": {"embedding": 8, "encoder": 8, "decoder": 16},
    "recipe": {
        "epochs": 9,
        "max_steps": 6,
        "learning_rate": 0.01,
        "validate_every": 3,
        "log_every": 1,
        "average": 2,
    },
}


@pytest.fixture(scope="module")
def usual_memory():
    """The tests' process goes on after a run: it keeps the C library's own settings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime_options, "keep_freed_memory", lambda: False)
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A corpus and a recipe, in a folder."""
    folder = tmp_path_factory.mktemp("files")
    lines = [f"cat {n % 7} {n}\tchat {n % 7} {n}\n" for n in range(60)]
    (folder / "pairs.tsv").write_text("".join(lines) + "no tab\n", encoding="utf-8")
    (folder / "tiny.json").write_text(json.dumps(TINY), encoding="utf-8")
    return folder


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def options(files):
    return ("--tsv", files / "pairs.tsv", "--recipe", files / "tiny.json")


@pytest.fixture(scope="module")
def whole(files, usual_memory):
    """A run of six steps in one go."""
    folder = files / "whole"
    return folder, invoke(folder, *options(files))


def test_a_run_leaves_all_that_is_promised(whole):
    folder, result = whole
    assert result.exit_code == 0, result.output
    names = {path.name for path in folder.iterdir()}
    assert names >= {"settings.json", "tokenizer.json", "log.csv", "curves.png", "model"}
    assert {path.name for path in (folder / "model").iterdir()} == {
        "SHA256SUMS",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert "tokenizer.json" in (folder / "model" / "SHA256SUMS").read_text()
    config = load_model(folder / "model").config
    tokenizers = TokenizerPair.load(folder / "model")
    assert (config.source_vocab, config.target_vocab) == (
        tokenizers.source.size,
        tokenizers.target.size,
    )
    assert config.decoder == 16


def test_it_says_what_was_read_and_what_comes_next(whole):
    folder, result = whole
    assert "read 61, kept 60, dropped 1" in result.stderr
    assert "no tab: 1" in result.stderr
    assert "vocabulary: " in result.stderr
    assert "step 3, epoch" in result.stderr
    assert "→ " in result.stderr  # the sample
    assert "finished: 6 steps are done" in result.stderr
    assert f"model: {folder / 'model'}" in result.stdout
    assert "regard translate" in result.stdout
    assert "step 3" not in result.stdout, "progress belongs on standard error"


def test_a_run_is_continued_with_its_own_settings(whole, files):
    folder, _ = whole
    halves = files / "halves"
    first = invoke(halves, *options(files), "--max-steps", 3)
    assert first.exit_code == 0, first.output
    shutil.rmtree(halves / "model")
    second = invoke(halves, "--resume", "--max-steps", 6)
    assert second.exit_code == 0, second.output
    assert "continued from step 3" in second.stderr
    assert [row["train_nll"] for row in read_log(halves / "log.csv")] == [
        row["train_nll"] for row in read_log(folder / "log.csv")
    ]
    ours, theirs = ((run / "model" / "model.safetensors").read_bytes() for run in (halves, folder))
    assert ours == theirs


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--resume"], "--resume needs a folder with a run, which has a settings.json"),
        (["--tsv", "missing.tsv"], "missing.tsv"),
        (["--tsv", "BAD"], "bad.tsv:2"),
        (["--tsv", "/dev/null"], "which a pipe does not allow. Got /dev/null. Fix: a file"),
        (["--tsv", "EMPTY"], "empty"),
        (["--source", "TSV"], "need both source and target. Got no target"),
        (["--tsv", "TSV", "--grammar"], "from one source. Got tsv and grammar"),
        (["--tsv", "TSV", "--recipe", "nobody"], "one of default, demo"),
        (["--tsv", "TSV", "--attention", "multi"], "attention must be one of 'additive'"),
        (["--tsv", "TSV", "--heads", "4"], "of the architecture 'recurrent' has .* Got heads. Fix"),
        (
            ["--tsv", "TSV", "--architecture", "transformer", "--cell", "lstm"],
            "of the architecture 'transformer' has .* Got cell. Fix: leave it out",
        ),
        (["--tsv", "TSV", "--architecture", "cnn"], "one of 'recurrent', 'transformer'. Got 'cnn'"),
        (
            ["--tsv", "TSV", "--architecture", "transformer", "--recipe", "hansards"],
            "or for the architecture 'transformer' one of default, demo, multi30k, tatoeba. Got",
        ),
        (
            ["--tsv", "TSV", "--architecture", "transformer", "--recipe", "TINY"],
            "tiny.json is for the architecture 'recurrent'. Got architecture 'transformer'. Fix",
        ),
        (["--tsv", "TSV", "--vocab", "3"], ""),
        (["--tsv", "TSV", "--tie", "all", "--separate"], "tie='all' needs one vocabulary"),
        ([], "a run needs a corpus"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_1(tmp_path, files, words, message):
    (tmp_path / "bad.tsv").write_bytes(b"a\tb\n\xff\xfe\xff\tb\n")
    (tmp_path / "empty.tsv").write_bytes(b"")
    stand_in = {
        "BAD": str(tmp_path / "bad.tsv"),
        "EMPTY": str(tmp_path / "empty.tsv"),
        "TSV": str(files / "pairs.tsv"),
        "TINY": str(files / "tiny.json"),
    }
    result = invoke(tmp_path / "run", *(stand_in.get(word, word) for word in words))
    assert result.exit_code == 1, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert re.search(".*".join(map(re.escape, message.split(".*"))), line), line
    assert "Traceback" not in result.output
    assert not (tmp_path / "run" / "model").exists()


def test_a_folder_with_a_run_is_not_written_over(whole, files):
    folder, _ = whole
    before = (folder / "log.csv").read_bytes()
    result = invoke(folder, *options(files))
    assert result.exit_code == 1
    assert "--resume continues it" in result.stderr
    assert (folder / "log.csv").read_bytes() == before


def test_resume_takes_no_other_settings(whole, files):
    folder, _ = whole
    result = invoke(folder, "--resume", *options(files), "--decoder", 32)
    assert result.exit_code == 1
    assert "Got recipe, tsv, decoder" in result.stderr


@pytest.mark.parametrize("name", ["tokenizer.json", "settings.json"])
def test_a_damaged_run_folder_is_reported(whole, tmp_path, name):
    folder = tmp_path / "copy"
    shutil.copytree(whole[0], folder)
    (folder / name).write_text("{", encoding="utf-8")
    result = invoke(folder, "--resume")
    assert result.exit_code == 1
    assert f"error: {folder / name} is" in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (NonFiniteError("training stopped at step 4"), 1, "error: training stopped at step 4"),
        (checkpoints.CheckpointError("disk is full"), 1, "error: disk is full"),
        (OSError(errno.ENOSPC, "No space left on device", "x/log.csv"), 1, "on device: x/log.csv"),
        (KeyboardInterrupt(), 130, "--resume"),
    ],
)
def test_what_happens_on_the_way_is_reported_in_a_line(
    tmp_path, files, monkeypatch, error, code, message
):
    def failing(*args, **options):
        raise error

    monkeypatch.setattr(training, "train", failing)
    result = invoke(tmp_path / "run", *options(files))
    assert result.exit_code == code
    assert message in result.stderr
    # All that --resume needs is there.
    assert (tmp_path / "run" / "settings.json").exists()
    assert (tmp_path / "run" / "tokenizer.json").exists()


def test_options_reach_the_settings(tmp_path, files, monkeypatch):
    seen = {}

    def caught(settings, folder, console, **where):
        seen["settings"] = settings
        raise ValueError("enough")

    monkeypatch.setattr(train_run, "run_training", caught)
    invoke(
        tmp_path, "--source", "a.en", "--target", "a.fr", "--recipe", "demo", "--reverse",
        "--layers", 2, "--cell", "lstm", "--attention", "bilinear", "--dropout", 0.25,
        "--vocab", 123, "--joint", "--case", "lower", "--tokens", 99, "--learning-rate", 0.5,
        "--epochs", 4, "--warmup", 7, "--languages", "en-de",
    )  # fmt: skip
    settings = seen["settings"]
    assert settings.data.source.endswith("a.en")
    assert settings.data.source.startswith("/"), "a run is continued from anywhere"
    assert settings.data.grammar is None, "the recipe's own corpus gives way"
    assert settings.data.reverse
    assert settings.data.languages == ("en", "de")
    config = settings.config(200, 200)
    assert (config.encoder_layers, config.decoder_layers, config.cell) == (2, 2, "lstm")
    assert (config.attention, config.annotation_dropout) == ("bilinear", 0.25)
    assert (settings.tokenizer.size, settings.tokenizer.joint) == (123, True)
    assert settings.tokenizer.case == "lower"
    assert settings.batches.tokens == 99
    assert (settings.recipe.learning_rate, settings.recipe.epochs) == (0.5, 4)
    assert settings.recipe.warmup_steps == 7


def test_a_transformer_has_settings_of_its_own(tmp_path, files, monkeypatch):
    seen = []

    def caught(settings, folder, console, **where):
        seen.append(settings.config(200, 200))
        raise ValueError("enough")

    monkeypatch.setattr(train_run, "run_training", caught)
    asked = ("--tsv", files / "pairs.tsv", "--architecture", "transformer")
    scores = "dot,additive,gaussian,bilinear"
    invoke(
        tmp_path, *asked, "--attention", scores, "--heads", 4, "--layers", 2, "--dropout", 0.25,
        "--feed-forward", 48, "--positions", "learned", "--embedding", 32,
    )  # fmt: skip
    invoke(tmp_path, *asked, "--recipe", "multi30k")
    mine, recipes = seen
    assert (mine.scores, mine.heads) == (tuple(scores.split(",")), 4)
    assert (mine.encoder_layers, mine.decoder_layers, mine.positions) == (2, 2, "learned")
    assert (mine.embedding, mine.feed_forward) == (32, 48)
    rates = ("embedding", "target", "layer", "feed_forward")
    assert {getattr(mine, f"{name}_dropout") for name in rates} == {0.25}
    assert (recipes.embedding, recipes.decoder_layers, recipes.scores) == (256, 4, "dot")


def test_every_option_sets_a_field_that_there_is_and_is_explained_alone():
    known = json.loads(Settings.named("default").to_json())
    both = [Settings.named("default", name) for name in ARCHITECTURES]
    known["model"] = {"dropout"}.union(*(vars(one.config(100, 100)) for one in both))
    for rows in train._OPTIONS.values():
        for flag, _, _, fields, text in rows:
            for field in fields.split():
                part, key = field.split(".")
                assert key in known[part], flag
            assert text[0].isupper(), flag
            assert text.endswith("."), flag
    patience = "Stop after this many validations without improvement (0 = never)."
    help_text = " ".join(invoke("--help").output.replace("│", " ").split())
    assert patience in help_text


def test_what_is_asked_for_is_not_scaled(files, tmp_path, monkeypatch):
    seen = []

    def caught(settings, folder, console, **where):
        seen.append(settings)
        raise ValueError("enough")

    monkeypatch.setattr(train_run, "run_training", caught)
    tsv = ("--tsv", files / "pairs.tsv")
    invoke(tmp_path, *tsv)
    invoke(tmp_path, *tsv, "--encoder", 64, "--vocab", 4000, "--valid-fraction", 0.01)
    invoke(tmp_path, *tsv, "--recipe", "tatoeba")
    default, chosen, named = seen
    recurrent = set(WIDTHS) - {"model.feed_forward"}
    assert {"tokenizer.size", *recurrent, "recipe.warmup_steps"} <= set(default.scaled)
    assert default.data.valid_at_least == 100
    assert not set(chosen.scaled) & {"tokenizer.size", *recurrent}, "the widths go together"
    assert "recipe.warmup_steps" in chosen.scaled
    assert (chosen.tokenizer.size, chosen.model["encoder"]) == (4000, 64)
    assert (chosen.data.valid_fraction, chosen.data.valid_at_least) == (0.01, 0)
    assert named.scaled == ()


def told(terminal: bool) -> str:
    """What the bar prints of a short run."""
    tokenizers = TokenizerPair.train([Pair("the [red] cat", "le chat rouge")], kind="word")
    source = [*tokenizers.source.encode("the [red] cat").ids, 3]
    target = list(tokenizers.target.encode("le chat rouge").ids)
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=terminal, color_system=None)
    attention = np.eye(3, len(source))
    with train_progress.TrainingBar(console, tokenizers) as bar:
        bar.started(Plan(2, 50, None, 1234, 1, 10))
        bar.stepped(StepReport(20, 0, 2.5, 2.25, 1.0, 1e-3, 4321.0))
        bar.validated(ValidationReport(20, 0, 2.0, 33.3, True, 33.3, 1.0))
        bar.sampled(Sample(20, 0, source, [*target, 3], target, attention))
        bar.sampled(Sample(20, 0, source, [*target, 3], [], attention[:0]))  # wrote nothing
        bar.stepped(StepReport(40, 0, 2.0, 1.75, 1.0, 1e-3, 4321.0))
        bar.warned("a checkpoint is damaged")
        bar.finished("2 epochs are done")
    return out.getvalue()


def test_the_bar_has_loss_speed_time_and_best():
    text = told(terminal=True)
    assert "loss 1.750" in text
    assert "4,321 tokens/s" in text
    assert "left" in text
    assert "BLEU 33.3" in text
    assert "40/100" in text


def test_the_bar_says_what_is_compiled_and_for_how_long(monkeypatch):
    now = iter(range(0, 10_000, 65))
    monkeypatch.setattr(train_progress.time, "monotonic", lambda: float(next(now)))
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    bar = train_progress.TrainingBar(console, None)
    bar.started(Plan(2, 50, None, 1234, 1, 0))
    bar.doing("compiling batches of 64 × 8 (1 of 3)")
    console.print(bar.bar)
    assert "0/100 compiling batches of 64 × 8 (1 of 3), 1:05" in out.getvalue()
    bar.doing("training")
    out.truncate(0)
    console.print(bar.bar)
    assert "compiling" not in out.getvalue()


def test_the_bar_fits_80_columns(monkeypatch):
    """With the largest figures that occur."""
    now = iter([0.0, 0.0, 1.0, *[19001.0] * 20])
    monkeypatch.setattr(train_progress.time, "monotonic", lambda: next(now))
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    bar = train_progress.TrainingBar(console, None)
    bar.started(Plan(30, 9_999, None, 1234, 1, 0))
    bar.best = 33.33
    bar.stepped(StepReport(1_000, 0, 12.5, 12.25, 1.0, 1e-3, 123_456.0))
    bar.stepped(StepReport(101_000, 0, 12.5, 12.25, 1.0, 1e-3, 123_456.0))
    console.print(bar.bar)
    bar.doing("compiling batches of 2048 × 128 (10 of 10)")
    console.print(bar.bar)
    lines = [line for line in out.getvalue().splitlines() if line.startswith("step ━")]
    assert len(lines) == 2
    assert all(len(line.rstrip()) <= 80 and "…" not in line for line in lines), lines
    assert "101000/299970 loss 12.250 123,456 tokens/s" in lines[0]
    assert lines[0].rstrip().endswith("10:30:04 left BLEU 33.3")


@pytest.mark.parametrize("terminal", [False, True])
def test_the_sample_is_drawn_in_words(terminal):
    text = told(terminal)
    assert "1,234 parameters" in text
    assert "continued from step 10" in text
    assert "the [red] cat" in text
    assert "→ le chat rouge (as the reference)" in text
    assert "1.0" in text  # a cell of its map
    assert "warning: a checkpoint is damaged" in text
    if not terminal:
        assert "/s" not in text, "no bar where there is no terminal"
