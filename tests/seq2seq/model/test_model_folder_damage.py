"""A model's folder that was damaged or tampered with: every change is noticed, in words."""

import json
import random
import shutil
import time

import numpy as np
import pytest
from flax import nnx

from regard.seq2seq.model.config import Config
from regard.seq2seq.model.export import (
    CONFIG,
    FORMAT,
    SUMS,
    WEIGHTS,
    add_checksums,
    load_model,
    save_model,
)
from regard.seq2seq.model.model_folder import FILES, bundled_folder
from regard.seq2seq.model.named_arrays import to_named
from regard.seq2seq.text.tokenizer import Tokenizer
from regard.seq2seq.text.tokenizer_pair import FILE, TokenizerPair
from seq2seq.small_translator import save_small


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    save_small(folder)
    add_checksums(folder, FILE)
    return folder


@pytest.fixture
def folder(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "model")


def rewrite(folder, arrays=None, **config):
    """A folder whose checksums are right, and whose contents are not."""
    given = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(given | config))
    if arrays is not None:
        import safetensors.numpy

        data = safetensors.numpy.save(arrays, metadata={"format": FORMAT})
        (folder / WEIGHTS).write_bytes(data)
    add_checksums(folder, CONFIG, WEIGHTS)


def test_every_flipped_bit_is_noticed(folder, sound):
    draw = random.Random(0)
    for _ in range(60):
        name = draw.choice(FILES)
        data = bytearray((sound / name).read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        (folder / name).write_bytes(data)
        with pytest.raises(ValueError, match=rf"{name} is damaged: it is not the file that {SUMS}"):
            load_model(folder)
        (folder / name).write_bytes((sound / name).read_bytes())
    load_model(folder)


def test_the_checksums_are_those_of_coreutils(folder):
    lines = (folder / SUMS).read_text().splitlines()
    assert [line[64:66] for line in lines] == ["  "] * 3
    assert sorted(line[66:] for line in lines) == sorted(FILES)


@pytest.mark.parametrize("text", ["", "x", "0" * 64 + "  ../secret", "\0" * 64 + " a"])
def test_damaged_checksums_are_refused_or_say_nothing(folder, text):
    (folder / SUMS).write_text(text)
    if text:
        with pytest.raises(ValueError, match=f"{SUMS} is damaged"):
            load_model(folder)
    else:
        load_model(folder)


def test_a_folder_without_checksums_loads(folder):
    (folder / SUMS).unlink()
    load_model(folder)


def test_the_bundled_model_has_checksums_that_hold():
    assert (bundled_folder() / SUMS).is_file()
    load_model(bundled_folder())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(encoder_layers=999), "999 encoder layers .* only .* arrays"),
        (dict(encoder_layers=10**9), "encoder_layers must be between 1 and 1,000"),
        (dict(decoder=2**31), "decoder must be between 1 and 16,777,216"),
        (dict(target_vocab=2**70), "target_vocab must be between"),
        (dict(attention_width=-3), "attention_width must be between"),
        (dict(attention_width=2**24), "the arrays of .* are not this model's"),
        (dict(embedding=-1), "embedding must be between"),
        (dict(encoder=2**24, decoder=2**24), "the arrays of .* are not this model's"),
    ],
)
def test_sizes_that_cannot_be_are_refused_at_once(folder, config, message):
    rewrite(folder, **config)
    begun = time.monotonic()
    with pytest.raises(ValueError, match=message):
        load_model(folder)
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(folder, value):
    arrays = to_named(nnx.state(load_model(folder)))
    arrays["output_bias"] = arrays["output_bias"] + np.float32(value)
    rewrite(folder, arrays)
    with pytest.raises(ValueError, match=r"weights that are not finite: output_bias\. Fix"):
        load_model(folder)


@pytest.mark.parametrize("bad", ["\x1b[2J", "\x9b", "\x07", "\u202e", "\u2028", "a\nb"])
def test_no_control_character_of_a_vocabulary_reaches_a_terminal(folder, bad):
    path = folder / FILE
    content = json.loads(path.read_text())
    content["source"]["pieces"][-1] = "x" + bad
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="a vocabulary has no control characters") as caught:
        TokenizerPair.load(folder)
    assert bad not in str(caught.value)


def test_a_vocabulary_may_have_joiners_and_any_script():
    pieces = ("<pad>", "<unk>", "<bos>", "<eos>", "\u05d0", "\u0645", "👩\u200d🔬", "é", "▁a")
    assert Tokenizer("word", pieces).size == 9


def test_a_configuration_may_be_as_small_as_it_gets():
    Config(5, 5, embedding=1, encoder=1, decoder=1, attention_width=1)


def test_saving_again_renews_the_checksums(folder):
    model = load_model(folder)
    save_model(folder, model, float16=True)
    load_model(folder)
    assert FILE not in (folder / SUMS).read_text(), "until it is written again, too"
