"""The Transformer in training: it learns, and a run that was stopped ends as one that was not."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx

from regard.seq2seq.decode.search import SearchOptions, beam_search, force, greedy
from regard.seq2seq.model.config import TransformerConfig
from regard.seq2seq.train.recipe import Recipe
from regard.seq2seq.train.training import train
from seq2seq import reversing
from seq2seq.tiny import some_batch

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = TransformerConfig(
    reversing.VOCAB,
    reversing.VOCAB,
    embedding=16,
    heads=2,
    feed_forward=32,
    encoder_layers=1,
    decoder_layers=1,
    attention="dot,gaussian",
    positions="learned",
    max_positions=24,
    tie="all",
    embedding_dropout=0.02,
    target_dropout=0.02,
    layer_dropout=0.02,
    feed_forward_dropout=0.02,
    dtype="float32",
)
RECIPE = Recipe(
    epochs=8, learning_rate=2e-2, warmup_steps=20, schedule="inverse_sqrt", log_every=5, average=2
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run in one go."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    validation = reversing.validation()
    return train(CONFIG, RECIPE, reversing.training_data(400), folder, validation=validation)


def test_it_learns(whole):
    assert whole.loss < 0.5  # log 5 is knowing nothing but the vocabulary
    assert whole.bleu >= 50.0


def test_a_run_that_was_stopped_ends_with_the_same_bits(whole, tmp_path):
    asked = iter(range(10**6))

    def run(**options):
        data, validation = reversing.training_data(400), reversing.validation()
        folder = tmp_path / "run"
        return train(CONFIG, RECIPE, data, folder, validation=validation, **options)

    with pytest.raises(KeyboardInterrupt):
        run(stop=lambda: next(asked) == 130)  # in the third epoch, some validations after
    result = run(resume=True)
    assert result.step == whole.step
    for name, array in whole.params.items():
        assert result.params[name].tobytes() == array.tobytes(), name
    ours, theirs = (jax.tree.leaves(one.model.decoder) for one in (result, whole))
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_another_architecture_is_another_run(whole, tmp_path):
    recipe = dataclasses.replace(RECIPE, max_steps=1)
    train(CONFIG, recipe, reversing.training_data(), tmp_path / "run")
    with pytest.raises(ValueError, match="started with architecture 'transformer', not 'recurr"):
        train(reversing.CONFIG, recipe, reversing.training_data(), tmp_path / "run", resume=True)


@functools.partial(jax.jit, static_argnums=0)
def log_probs(graph, params, source, lens, target_in):
    model = nnx.merge(graph, params)
    readout, _ = model.decode(model.encode(source, lens), target_in)
    return jax.nn.log_softmax(model.logits(readout), axis=-1)


def test_search_finds_what_the_whole_model_gives(whole):
    """Greedy search is a beam of one; what a hypothesis is said to be worth, and where it looked,
    is what teacher forcing says, so that memories followed their hypotheses."""
    batch = some_batch(rows=5, width=6, seed=2)
    source, lens = batch.source, batch.source_lens
    one = SearchOptions(beam=1, dtype="float32", max_ratio=1.0, max_extra=4)
    ours, theirs = (find(whole.model, source, lens, one) for find in (greedy, beam_search))
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    np.testing.assert_allclose(ours.log_probs, theirs.log_probs, rtol=1e-5)
    four = dataclasses.replace(one, beam=4)
    found = beam_search(whole.model, source, lens, four, n_best=4)
    assert len({tuple(row) for row in np.asarray(found.tokens[1]).tolist()}) == 4
    _, K, T = found.tokens.shape
    before = np.pad(found.tokens, ((0, 0), (0, 0), (1, 0)), constant_values=2)[:, :, :-1]
    for place in range(K):
        log_p = np.asarray(log_probs(*nnx.split(whole.model), source, lens, before[:, place]))
        tokens = np.asarray(found.tokens[:, place])[..., None]
        written = np.arange(T)[None] < np.asarray(found.lens)[:, place, None]
        total = np.where(written, np.take_along_axis(log_p, tokens, axis=2)[..., 0], 0.0).sum(1)
        there = np.asarray(found.lens)[:, place] > 0
        np.testing.assert_allclose(
            np.asarray(found.log_probs)[there, place], total[there], atol=1e-4
        )
        looks = np.where(written[..., None], force(whole.model, source, lens, before[:, place]), 0)
        np.testing.assert_allclose(found.attention[:, place], looks, atol=1e-5)
    assert not there[-1]  # a row of padding


def test_the_other_sentences_of_a_batch_change_only_rounding(whole):
    batch = some_batch(rows=10, width=6, seed=4)
    options = SearchOptions(beam=2, dtype="float32", max_ratio=1.0, max_extra=4)
    found = beam_search(whole.model, batch.source, batch.source_lens, options, n_best=1)
    for start in (0, 5):
        part = slice(start, start + 5)
        alone = beam_search(
            whole.model, batch.source[part], batch.source_lens[part], options, n_best=1
        )
        np.testing.assert_array_equal(found.tokens[part], alone.tokens)
        np.testing.assert_allclose(found.scores[part], alone.scores, atol=1e-5)
