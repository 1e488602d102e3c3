"""The book's Trainer and its models: NumPy's steps, flags, statistics, and what is drawn."""

import functools
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from regard import d2l
from regard.d2l import plots

pytestmark = pytest.mark.usefixtures("quick_compilation")

RNG = jax.random.PRNGKey(5)
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(12, 3)).astype(np.float32)
Y = RANDOM.normal(size=(12, 1)).astype(np.float32)
KINDS = RANDOM.integers(0, 4, 12).astype(np.int32)


class Rows(d2l.DataModule):
    def __init__(self, *arrays, batch_size=12, validate=True):
        self.save_hyperparameters()

    def get_dataloader(self, train):
        if not train and not self.validate:
            return None
        return self.get_tensorloader(self.arrays, train)


class Line(d2l.Module):
    lr: float = 0.1

    def setup(self):
        self.net = nn.Dense(1)

    def loss(self, params, X, y, state):
        return ((state.apply_fn({"params": params}, *X) - y) ** 2).mean()


class Wide(d2l.Classifier):
    """Running statistics and dropout, by the book's flag."""

    lr: float = 0.1
    dropout: float = 0.0
    training: bool = False

    @nn.compact
    def __call__(self, X):
        X = nn.BatchNorm(use_running_average=not self.training, momentum=0.9)(X)
        X = nn.Dropout(self.dropout, deterministic=not self.training)(X)
        return nn.Dense(4)(X)


def fitted(model, data, epochs=3, **settings):
    model.board.display = False
    trainer = d2l.Trainer(max_epochs=epochs, **settings)
    trainer.fit(model, data, key=RNG)
    return trainer


# ---------------------------------------------------------------------------------------------
# Steps.


@pytest.mark.parametrize("clip", [0, 0.05])
def test_the_steps_are_numpys(clip):
    trainer = fitted(Line(lr=0.1), Rows(X, Y), epochs=4, gradient_clip_val=clip)
    start = Line().init(jax.random.split(RNG)[0], X)["params"]["net"]
    w, b = (np.asarray(start[name], np.float64) for name in ("kernel", "bias"))
    for _ in range(4):
        error = X @ w + b - Y
        dw, db = 2 * X.T @ error / 12, 2 * error.mean(0)
        norm = np.sqrt((dw**2).sum() + (db**2).sum())
        scale = min(1, clip / norm) if clip else 1
        w, b = w - 0.1 * scale * dw, b - 0.1 * scale * db
    found = trainer.state.params["net"]
    np.testing.assert_allclose(found["kernel"], w, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["bias"], b, rtol=1e-4, atol=1e-5)


def test_another_optimizer():
    class Adam(Line):
        def configure_optimizers(self):
            return optax.adamw(optax.linear_schedule(self.lr, 0.0, 3))

    trainer = fitted(Adam(lr=0.01), Rows(X, Y), epochs=3)
    assert int(trainer.state.step) == 3
    start = Line().init(jax.random.split(RNG)[0], X)["params"]["net"]["kernel"]
    moved = np.abs(np.asarray(trainer.state.params["net"]["kernel"]) - np.asarray(start))
    assert moved.max() < 0.021  # 0.01 + 0.0067 + 0.0033


def test_the_same_key_gives_the_same_run_and_another_another():
    runs = [fitted(Line(), Rows(X, Y, batch_size=5)) for _ in range(2)]
    np.testing.assert_array_equal(*(t.state.params["net"]["kernel"] for t in runs))
    other = d2l.Trainer(max_epochs=3)
    model = Line()
    model.board.display = False
    other.fit(model, Rows(X, Y, batch_size=5), key=jax.random.PRNGKey(6))
    assert not np.allclose(
        other.state.params["net"]["kernel"], runs[0].state.params["net"]["kernel"]
    )


def test_a_clipping_changed_between_two_runs_is_used():
    model, data = Line(), Rows(X, Y)
    trainer = fitted(model, data)
    trainer.gradient_clip_val = 1e-6
    trainer.fit(model, data, key=RNG)
    start = Line().init(jax.random.split(RNG)[0], X)["params"]["net"]["kernel"]
    np.testing.assert_allclose(trainer.state.params["net"]["kernel"], start, atol=1e-6)


def test_without_validation_data():
    model = Line()
    trainer = fitted(model, Rows(X, Y, validate=False))
    assert trainer.num_val_batches == trainer.val_batch_idx == 0
    assert list(model.board.data) == ["train_loss"]


# ---------------------------------------------------------------------------------------------
# Flags, statistics, random keys.


def test_running_statistics_are_of_the_training_batches():
    """One batch for an epoch: the statistics move a tenth of the way three times."""
    trainer = fitted(Wide(), Rows(X, KINDS))
    stats = trainer.state.batch_stats["BatchNorm_0"]
    np.testing.assert_allclose(stats["mean"], (1 - 0.9**3) * X.mean(0), rtol=1e-4, atol=1e-6)
    expected = 0.9**3 + (1 - 0.9**3) * X.var(0)
    np.testing.assert_allclose(stats["var"], expected, rtol=1e-4)


def test_the_flag_is_set_in_training_and_not_in_validation_nor_afterwards():
    seen = []

    class Watched(Wide):
        def training_step(self, params, batch, state):
            seen.append(("train", self.training))
            return super().training_step(params, batch, state)

        def validation_step(self, params, batch, state):
            seen.append(("val", self.training))
            super().validation_step(params, batch, state)

    model = Watched(training=True)
    trainer = fitted(model, Rows(X, KINDS, batch_size=6), epochs=1)
    assert seen == [("train", True)] * 2 + [("val", False)] * 2
    assert not model.training
    variables = {"params": trainer.state.params, "batch_stats": trainer.state.batch_stats}
    assert model.apply(variables, X).shape == (12, 4)  # needs no key for dropout


def test_each_step_has_its_own_dropout():
    """Nothing is learned at rate 0, so the losses differ by their dropout alone."""
    model = Wide(lr=0.0, dropout=0.5)
    model.__class__.plot_train_per_epoch = 12
    fitted(model, Rows(X, KINDS), epochs=3)
    train, val = ([y for _, y in model.board.data[k]] for k in ("train_loss", "val_loss"))
    assert len(set(train)) == 3
    # Without dropout only the running statistics move.
    assert np.ptp(train) > np.ptp(val)


def test_loss_and_accuracy_of_each_row():
    trainer = fitted(Wide(), Rows(X, KINDS))
    model, state = trainer._enter(training=False), trainer.state
    logits = np.asarray(
        state.apply_fn({"params": state.params, "batch_stats": state.batch_stats}, X)
    )
    each, _ = model.loss(state.params, (X,), KINDS, state, averaged=False)
    expected = np.log(np.exp(logits).sum(-1)) - logits[np.arange(12), KINDS]
    np.testing.assert_allclose(each, expected, rtol=1e-4, atol=1e-5)
    right = model.accuracy(state.params, (X,), KINDS, state, averaged=False)
    np.testing.assert_array_equal(right, logits.argmax(-1) == KINDS)
    mean = model.accuracy(state.params, (X,), KINDS, state)
    np.testing.assert_allclose(mean, right.mean(), rtol=1e-6)


def test_labels_of_another_shape():
    with pytest.raises(ValueError, match=r"logits \[12, 4\], labels \[12, 1\]"):
        fitted(Wide(), Rows(X, KINDS[:, None]))


def test_a_model_without_a_loss():
    class Empty(d2l.Module):
        @nn.compact
        def __call__(self, X):
            return nn.Dense(1)(X)

        def configure_optimizers(self):
            return optax.sgd(0.1)

    with pytest.raises(NotImplementedError, match=r"Empty has no loss\(self, params"):
        fitted(Empty(), Rows(X, Y))


def test_a_trainer_that_has_not_trained_has_no_state():
    trainer = d2l.Trainer(max_epochs=1)
    with pytest.raises(AttributeError, match=r"no attribute 'state' before fit\(model, data\)"):
        _ = trainer.state
    assert not hasattr(trainer, "other")


def test_equal_models_are_equal_whatever_was_drawn():
    assert Line(lr=0.1) == Line(lr=0.1)
    assert hash(Line(lr=0.1)) == hash(Line(lr=0.1))
    assert Line(lr=0.1).board is not Line(lr=0.1).board


# ---------------------------------------------------------------------------------------------
# Seq2Seq: what padding does to the loss.


@functools.cache
def seq2seq():
    return d2l.Seq2Seq(
        d2l.Seq2SeqEncoder(7, 8, 8, 1, 0.1),
        d2l.Seq2SeqAttentionDecoder(7, 8, 8, 1, 0.1),
        tgt_pad=3,
        lr=0.01,
        training=True,
    )


def sentences(seed=0):
    random = np.random.default_rng(seed)
    source, target = (random.integers(0, 7, (12, 5)).astype(np.int32) for _ in range(2))
    target[:6, 3:] = 3
    lens = random.integers(1, 6, 12).astype(np.int32)
    return source, np.roll(target, 1, axis=1), lens, target


def test_padding_is_not_in_the_loss():
    batch = sentences()
    trainer = fitted(seq2seq(), Rows(*batch), epochs=1)
    model, state = trainer._enter(training=False), trainer.state
    loss, _ = model.loss(state.params, batch[:3], batch[3], state)
    logits = np.asarray(model.apply({"params": state.params}, *batch[:3]), np.float64)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    each = -np.take_along_axis(logs, batch[3][..., None].astype(np.int64), -1)[..., 0]
    np.testing.assert_allclose(loss, each[batch[3] != 3].mean(), rtol=1e-4)


def test_the_books_arguments():
    model = seq2seq()
    assert d2l.EncoderDecoder(model.encoder, model.decoder, True).training
    with pytest.raises(TypeError, match="'lr'"):
        d2l.Seq2Seq(model.encoder, model.decoder, tgt_pad=3)


def test_the_call_says_training_too():
    model, (source, target, lens, _) = seq2seq().clone(training=False), sentences()
    variables = model.init(RNG, source, target, lens)
    calm = model.apply(variables, source, target, lens)
    with pytest.raises(ValueError, match=r'rngs=\{"dropout": key\}|needs PRNG for "dropout"'):
        model.apply(variables, source, target, lens, training=True)
    noisy = model.apply(variables, source, target, lens, training=True, rngs={"dropout": RNG})
    assert not np.allclose(calm, noisy)


# ---------------------------------------------------------------------------------------------
# Loaders.


def test_a_loader_gives_every_row_once_in_a_new_order_each_time():
    loader = Rows(np.arange(10), np.arange(10) * 2, batch_size=4).train_dataloader()
    epochs = [list(loader) for _ in range(2)]
    assert len(loader) == 3
    for batches in epochs:
        rows, doubles = (np.concatenate(column) for column in zip(*batches, strict=True))
        np.testing.assert_array_equal(np.sort(rows), np.arange(10))
        np.testing.assert_array_equal(doubles, rows * 2)
        assert [len(batch[0]) for batch in batches] == [4, 4, 2]
    first, second = (np.concatenate([b[0] for b in batches]) for batches in epochs)
    assert (first != second).any()
    again = Rows(np.arange(10), batch_size=10).train_dataloader()
    np.testing.assert_array_equal(next(iter(again))[0], first)


@pytest.mark.parametrize(
    ("arrays", "batch_size"),
    [((X, Y[:5]), 4), ((X[:0], Y[:0]), 4), ((X, Y), 0)],
)
def test_a_loader_of_nothing_or_of_unequal_arrays(arrays, batch_size):
    with pytest.raises(ValueError, match=rf"arrays \[.*\], \[.*\], batch_size {batch_size}"):
        Rows(*arrays, batch_size=batch_size).val_dataloader()


def test_a_data_module_leaves_the_loader_to_you():
    with pytest.raises(NotImplementedError, match="DataModule has no get_dataloader"):
        d2l.DataModule().train_dataloader()


def test_hyperparameters():
    class Kept(d2l.HyperParameters):
        def __init__(self, a, b=2, _c=3, **others):
            self.save_hyperparameters(ignore=["b"])

    kept = Kept(1, d=4)
    assert kept.hparams == {"a": 1, "others": {"d": 4}}
    assert kept.a == 1
    assert not hasattr(kept, "b")


# ---------------------------------------------------------------------------------------------
# The board.


def test_the_board_has_two_training_points_and_one_validation_point_for_an_epoch():
    model = Line()
    fitted(model, Rows(X, Y, batch_size=3), epochs=3)
    train, val = (np.array(model.board.data[k]) for k in ("train_loss", "val_loss"))
    np.testing.assert_allclose(train[:, 0], [0.125, 0.625, 1.125, 1.625, 2.125, 2.625])
    np.testing.assert_allclose(val[:, 0], [1, 2, 3])
    assert model.board.xlim == [0, 3]
    assert model.board.xlabel == "epoch"


def test_another_run_of_a_model_starts_its_curves_anew():
    model, data = Line(), Rows(X, Y)
    fitted(model, data, epochs=3)
    fitted(model, data, epochs=2)
    assert [x for x, _ in model.board.data["val_loss"]] == [1, 2]


def test_a_point_is_the_mean_of_every_n():
    board = d2l.ProgressBoard(display=False)
    for x in range(7):
        board.draw(x, jnp.float32(10 * x), "all", every_n=1)
        board.draw(x, 10 * x, "some", every_n=3)
    assert board.data["all"] == [(x, 10 * x) for x in range(7)]
    assert board.data["some"] == [(1, 10), (4, 40)]


def test_outside_a_notebook_the_curves_are_a_png_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = Line()
    d2l.Trainer(max_epochs=2).fit(model, Rows(X, Y), key=RNG)
    assert (tmp_path / "progress.png").read_bytes().startswith(b"\x89PNG")
    figure = model.board.fig
    assert [line.get_label() for line in figure.axes[0].lines] == ["train_loss", "val_loss"]
    assert len(figure.axes[0].lines[0].get_xdata()) == 2
    before = (tmp_path / "progress.png").stat().st_mtime_ns
    model.board.save()  # nothing new
    assert (tmp_path / "progress.png").stat().st_mtime_ns == before


def test_in_a_notebook_one_output_is_updated_and_a_new_run_has_its_own(monkeypatch):
    """A kernel's display is a stand-in here: it gives a handle for each new output."""
    shown = []

    class Handle:
        def __init__(self, figure, display_id):
            assert display_id is True
            shown.append([figure])

        def update(self, figure):
            shown[-1].append(figure)

    display = types.ModuleType("IPython.display")
    display.display = Handle
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(plots, "in_notebook", lambda: True)
    monkeypatch.setattr(plots, "use_svg_display", lambda: None)
    board = d2l.ProgressBoard("x")
    for _ in range(2):
        for x in range(3):
            board.draw(x, x, "line")
        board.clear()
    assert [len(figures) for figures in shown] == [3, 3]


def test_with_display_off_there_is_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fitted(Line(), Rows(X, Y))
    assert not list(tmp_path.iterdir())


def test_a_board_used_by_itself_is_saved_when_python_exits(tmp_path):
    code = "from regard import d2l\n" + "board = d2l.ProgressBoard('x', path='curve.png')\n"
    code += "for x in range(30): board.draw(x, x * x, 'square')"
    source = str(Path(d2l.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": source, "JAX_PLATFORMS": "cpu", "PATH": "", "HOME": "/nonexistent"},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "curve.png").exists()
