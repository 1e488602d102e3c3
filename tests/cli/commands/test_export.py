"""`regard export`: what is written is what was there, and nothing half-written is left."""

import dataclasses
import os

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from regard.cli.app import app
from regard.cli.commands import export
from regard.seq2seq.model.model_folder import FILES, bundled_folder
from regard.seq2seq.translator import Translator
from seq2seq.small_translator import save_small, small_translator


def run(*words):
    return CliRunner().invoke(app, ["export", *map(str, words)])


@pytest.mark.parametrize("float16", [False, True])
def test_an_export_is_the_model(tmp_path, float16):
    saved = save_small(tmp_path / "run" / "model")
    for name in ("CARD.md", "README.md"):
        (tmp_path / "run" / "model" / name).write_text(f"{name}: CC-BY 2.0")
    out = tmp_path / "new" / "out"
    result = run(tmp_path / "run", out, *(["--float16"] if float16 else []))
    assert result.exit_code == 0, result.stderr
    assert "it is the same" in result.stdout
    loaded = Translator.load(out)
    assert loaded.tokenizers == saved.tokenizers
    for name in ("CARD.md", "README.md"):
        assert (out / name).read_text() == f"{name}: CC-BY 2.0"
    assert {line.split()[1] for line in (out / "SHA256SUMS").read_text().splitlines()} == set(FILES)
    given, found = saved.model.target_embedding[...], loaded.model.target_embedding[...]
    np.testing.assert_allclose(found, given, rtol=1e-3 if float16 else 0)
    assert bool((found == given).all()) is not float16
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]


def test_the_bundled_model_keeps_its_attribution(tmp_path):
    result = run(bundled_folder(), tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert "CC-BY 2.0" in (tmp_path / "out" / "CARD.md").read_text()


def test_an_export_has_the_permissions_of_the_umask(tmp_path):
    save_small(tmp_path / "model")
    before = os.umask(0o027)
    try:
        assert run(tmp_path / "model", tmp_path / "out").exit_code == 0
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750


def test_an_export_that_reads_back_differently_is_not_made(tmp_path, monkeypatch):
    save_small(tmp_path / "model")
    load = Translator.load

    def changed(folder):
        found = load(folder)
        if folder != tmp_path / "model":
            found.model.output_bias[...] = found.model.output_bias[...] + jax.numpy.float32(1e-3)
        return found

    monkeypatch.setattr(Translator, "load", changed)
    result = run(tmp_path / "model", tmp_path / "out")
    assert result.exit_code == 1
    assert "differs in output_bias; nothing was exported" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_compare_sees_config_and_tokenizers():
    given, other = small_translator(), small_translator(turned=True)
    with pytest.raises(ValueError, match="differs in tokenizers"):
        export.compare(given, other, False)
    other = small_translator()
    other.model.config = dataclasses.replace(other.model.config, output_dropout=0.25)
    with pytest.raises(ValueError, match="differs in config"):
        export.compare(given, other, False)


def test_what_is_there_is_left_alone(tmp_path):
    save_small(tmp_path / "model")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    (tmp_path / "empty").mkdir()
    for out, code, said in (
        ("full", 1, "is not empty"),
        ("model/config.json", 1, "is a file"),
        ("empty", 0, ""),
    ):
        result = run(tmp_path / "model", tmp_path / out)
        assert result.exit_code == code, result.output
        assert said in result.stderr
    result = run(tmp_path / "none", tmp_path / "out")
    assert result.exit_code == 1
    assert "none is not there" in result.stderr
