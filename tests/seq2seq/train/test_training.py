"""Training: that it learns, stops, chooses, tells, shares and refuses as its recipe says."""

import dataclasses
import inspect
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from regard.seq2seq.decode.search import SearchOptions
from regard.seq2seq.model.export import load_model, save_model
from regard.seq2seq.train.checkpoints import Store
from regard.seq2seq.train.log import read_log
from regard.seq2seq.train.non_finite import NonFiniteError, cause_of
from regard.seq2seq.train.progress import Progress
from regard.seq2seq.train.recipe import Recipe
from regard.seq2seq.train.training import train
from regard.seq2seq.train.validation import (
    Validation,
    Validator,
    indexed_batches,
    translate_batches,
)
from seq2seq import reversing
from seq2seq.tiny import CONFIGS, random_model, some_batch

TESTS = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.usefixtures("quick_compilation")


class Heard(Progress):
    """Everything that a run tells, in order."""

    def __init__(self):
        self.events = []

    def started(self, plan):
        self.events.append(plan)

    def stepped(self, report):
        self.events.append(report)

    def validated(self, report):
        self.events.append(report)

    def sampled(self, sample):
        self.events.append(sample)

    def of(self, kind):
        return [event for event in self.events if type(event).__name__ == kind]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 12 epochs that learns to reverse, its folder, and what it told."""
    folder = tmp_path_factory.mktemp("run") / "run"
    recipe = Recipe(
        epochs=12, learning_rate=1e-2, stop_on="bleu", average=3, log_every=20, warmup_steps=10
    )
    heard = Heard()
    result = train(
        reversing.CONFIG,
        recipe,
        reversing.training_data(400),
        folder,
        validation=reversing.validation(),
        progress=heard,
    )
    return folder, recipe, heard, result


def test_it_learns(run):
    _, _, heard, result = run
    first = heard.of("StepReport")[0]
    # Of its first 20 steps: log 5 is to know which tokens there are, and nothing of their order.
    assert first.nll > np.log(5)
    assert result.loss < 0.25
    assert result.bleu >= 70.0
    assert result.step == 12 * 50
    assert result.reason == "12 epochs are done"


def test_it_reports(run):
    folder, _, heard, _ = run
    (plan,) = heard.of("Plan")
    assert (plan.steps_per_epoch, plan.total_steps, plan.step) == (50, 600, 0)
    assert [report.step for report in heard.of("StepReport")] == list(range(20, 601, 20))
    assert all(report.tokens_per_second > 0 for report in heard.of("StepReport"))
    rows = read_log(folder / "log.csv")
    assert [row["step"] for row in rows if row["valid_loss"]] == [str(50 * e) for e in range(1, 13)]
    assert [row["step"] for row in rows if row["train_loss"]] == [
        str(s) for s in range(20, 601, 20)
    ]
    best = max(float(row["valid_bleu"]) for row in rows if row["valid_bleu"])
    assert heard.of("ValidationReport")[-1].best == best


def test_it_shows_a_translation_with_its_attention(run):
    samples = run[2].of("Sample")
    assert len(samples) == 12
    last = samples[-1]
    assert last.source[::-1][1:] == last.target[:-1]  # the task; both end with <eos>
    assert last.attention.shape == (len(last.hypothesis), len(last.source))
    np.testing.assert_allclose(last.attention.sum(-1), 1.0, rtol=1e-5)


def test_the_best_are_averaged_if_that_is_better(run):
    folder, recipe, heard, result = run
    reports = sorted(heard.of("ValidationReport"), key=lambda r: (-r.bleu, r.step))
    best = sorted(report.step for report in reports[: recipe.average])
    store = Store(folder / "best")
    assert set(best) <= set(store.steps())
    assert result.averaged in (best, [reports[0].step])
    found = [store.load(step).arrays for step in result.averaged]
    mean = np.mean([arrays["decoder.input.kernel"] for arrays in found], axis=0, dtype=np.float64)
    np.testing.assert_allclose(result.model.decoder.input.kernel[...], mean, rtol=1e-6)
    assert result.bleu >= reports[0].bleu


def test_the_model_that_is_left_is_the_one_returned(run):
    folder, _, _, result = run
    left = load_model(folder / "model")
    ours, theirs = (jax.tree.leaves(nnx.state(model)) for model in (result.model, left))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


def test_translations_come_in_the_order_of_the_pairs(run):
    """From buckets of several widths, and from plain lists of batches."""
    result = run[3]
    held_out = reversing.pairs(30, seed=2)
    one = SearchOptions(beam=1, dtype="float32")
    shapes = [dict(buckets=(8,), tokens=64), dict(buckets=(5, 8), tokens=64)]
    batches = [reversing.Batches(held_out, shuffle=False, **shape) for shape in shapes]
    every = (*batches, list(batches[0]))
    first, second, third = (
        translate_batches(result.model, indexed_batches(given), one) for given in every
    )
    assert len(first) == 30
    assert first == second == third


# ---------------------------------------------------------------------------------------------


def test_it_stops_when_it_gets_no_better_and_lowers_the_rate_before(tmp_path):
    scores = iter([10.0, 30.0, 20.0, 30.0, 5.0, 99.0, 99.0])
    heard = Heard()
    recipe = Recipe(
        epochs=20,
        learning_rate=0.008,
        schedule="plateau",
        plateau_patience=2,
        patience=3,
        stop_on="bleu",
        average=1,
        validate_every=4,
        log_every=1,
    )
    validation = dataclasses.replace(reversing.validation(), bleu=lambda found: next(scores))
    data = reversing.training_data()
    result = train(
        reversing.CONFIG, recipe, data, tmp_path / "run", validation=validation, progress=heard
    )
    assert result.reason == "3 validations in a row were no better"
    assert [report.step for report in heard.of("ValidationReport")] == [4, 8, 12, 16, 20]
    assert [report.is_best for report in heard.of("ValidationReport")] == [1, 1, 0, 0, 0]
    rates = [report.learning_rate for report in heard.of("StepReport")]
    assert rates == [0.008] * 16 + [0.004] * 4
    assert result.averaged == [8]
    assert result.bleu == 99.0
    assert result.step == 20


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(tmp_path):
    recipe = Recipe(epochs=2, learning_rate=1e37, checkpoint_every=1, log_every=4)
    with pytest.raises(NonFiniteError) as caught:
        train(reversing.CONFIG, recipe, reversing.training_data(), tmp_path / "run")
    message = str(caught.value)
    assert "training stopped at step 1, epoch 0: loss per token" in message
    assert "not finite; the largest parameter is 1e+37, in " in message
    assert "the last good checkpoint is of step 1" in message
    assert "a lower learning_rate (it was 1e+37)" in message
    store = Store(tmp_path / "run" / "checkpoints")
    assert all(np.isfinite(array).all() for array in store.load(1).arrays.values())


def test_the_cause_is_the_first_array_that_is_not_finite():
    batch = some_batch()

    def spoiled(name, value):
        graph, params = nnx.split(random_model(CONFIGS["additive"]))
        params[name][...] = params[name][...].at[..., -1].set(value)
        return nnx.merge(graph, params)

    assert cause_of(spoiled("output_bias", np.nan), batch, 0.0) == (
        "parameters are not finite: output_bias"
    )
    cause = cause_of(spoiled("output_bias", 3e38), batch, 0.0)
    assert cause.startswith("the loss of finite logits is inf; the largest parameter is 3e+38")
    cause = cause_of(spoiled("target_embedding", 3e38), batch, 0.0)
    assert cause.startswith("the loss is finite, its gradient is not: decoder.")
    assert cause_of(random_model(), batch, 0.0).startswith("without dropout, loss and gradient are")


@pytest.mark.slow
def test_two_devices_do_what_one_does(tmp_path):
    """In a process of its own with two: the same losses, and every batch on both, read twice."""
    code = f"""
        import dataclasses, sys
        sys.path.insert(0, {str(TESTS)!r})
        import jax, numpy as np
        from regard.seq2seq.train.training import train
        from seq2seq import reversing
        assert jax.local_device_count() == 2
        noisy = dict(embedding_dropout=0.1, annotation_dropout=0.1, output_dropout=0.1)
        config = dataclasses.replace(reversing.CONFIG, **noisy)
        recipe = dataclasses.replace(reversing.RECIPE, epochs=1, consistency=1.0)
        validation = dataclasses.replace(reversing.validation(), bleu=None)
        for name, devices in ("two", None), ("one", jax.local_devices()[:1]):
            result = train(
                config, recipe, reversing.training_data(70), {str(tmp_path)!r} + "/" + name,
                validation=validation, devices=devices,
            )
            print(name, result.loss, float(np.abs(result.params["output_bias"]).sum()))
    """
    flags = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": str(TESTS.parent / "src"),
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", inspect.cleandoc(code)], capture_output=True, text=True, env=flags
    )
    assert done.returncode == 0, done.stderr
    two, one = (line.split() for line in done.stdout.splitlines())
    assert (two[0], one[0]) == ("two", "one")
    np.testing.assert_allclose([float(x) for x in two[1:]], [float(x) for x in one[1:]], rtol=1e-4)


# ---------------------------------------------------------------------------------------------


def test_learning_rates():
    flat = Recipe(learning_rate=0.1, warmup_steps=4)
    rates = [flat.learning_rate_at(step) for step in range(6)]
    np.testing.assert_allclose(rates, [0.025, 0.05, 0.075, 0.1, 0.1, 0.1])
    root = Recipe(learning_rate=0.1, warmup_steps=4, schedule="inverse_sqrt")
    np.testing.assert_allclose(root.learning_rate_at(15), 0.1 / 2)
    cosine = Recipe(learning_rate=0.1, schedule="cosine", max_steps=100, learning_rate_floor=0.01)
    np.testing.assert_allclose(cosine.learning_rate_at(49), 0.055)
    np.testing.assert_allclose([cosine.learning_rate_at(s) for s in (99, 500)], 0.01)
    plateau = Recipe(learning_rate=0.1, schedule="plateau", learning_rate_floor=0.04)
    np.testing.assert_allclose([plateau.learning_rate_at(9, f) for f in (0.5, 0.25)], [0.05, 0.04])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(schedule="linear"), "schedule must be one of 'constant', 'inverse_sqrt'"),
        (dict(schedule="inverse_sqrt"), "needs warmup_steps of at least 1. Got 0"),
        (dict(schedule="cosine"), "needs max_steps, where it ends. Got None"),
        (dict(label_smoothing=1.0), r"label_smoothing must be in \[0, 1\). Got 1.0"),
        (dict(clip_norm=0.0), "positive and finite. Got learning_rate 0.001, clip_norm 0.0"),
        (dict(learning_rate=float("nan")), "positive and finite. Got learning_rate nan"),
        (dict(seed=2**70), "seed must be between 0 and"),
        (dict(average=0), "average must be at least 1. Got 0"),
        (dict(validate_every=0), "validate_every must be at least 1, or None. Got 0"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**values)


def test_stopping_on_bleu_needs_bleu(tmp_path):
    recipe = Recipe(stop_on="bleu")
    with pytest.raises(ValueError, match=r"needs a validation with a bleu function\. Got no"):
        train(reversing.CONFIG, recipe, reversing.training_data(), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=r"a validation needs batches\. Got none"):
        Validator(None, Validation([]), None)


# ---------------------------------------------------------------------------------------------
# Models as files.


@pytest.mark.parametrize("name", ["additive", "deep lstm, fixed", "lstm, tied"])
def test_a_model_is_read_as_it_was_written(name, tmp_path):
    model = random_model(CONFIGS[name])
    save_model(tmp_path, model)
    again = load_model(tmp_path)
    assert again.config == model.config
    for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (model, again)), strict=True):
        np.testing.assert_array_equal(a, b)
    names = ["SHA256SUMS", "config.json", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_float16_is_half_the_size_and_nearly_the_same(tmp_path):
    model = random_model()
    sizes = []
    for float16 in (False, True):
        save_model(tmp_path, model, float16=float16)
        sizes.append((tmp_path / "model.safetensors").stat().st_size)
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    np.testing.assert_allclose(sizes[0] - sizes[1], 2 * count, atol=100)  # and the header's names
    models = (model, load_model(tmp_path))
    for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in models), strict=True):
        assert b.dtype == a.dtype
        np.testing.assert_allclose(a, b, rtol=2**-10)


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"lacks config\.json and model\.safetensors"):
        load_model(tmp_path)
    save_model(tmp_path, random_model())
    other = save_model(tmp_path / "other", random_model(CONFIGS["deep"]))
    (tmp_path / "SHA256SUMS").unlink()  # it notices all that follows, too
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_bytes((other / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"upper\.0\.bias: expected \[24\], got nothing"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(config.replace('"cell"', '"cells"'))
    with pytest.raises(ValueError, match=r"unknown fields \['cells'\]"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(config)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_model(tmp_path)
    graph, params = nnx.split(random_model())
    params["output_bias"][...] = params["output_bias"][...].at[0].set(1e6)
    with pytest.raises(ValueError, match=r"too large for float16, or not finite .* output_bias"):
        save_model(tmp_path, nnx.merge(graph, params), float16=True)
