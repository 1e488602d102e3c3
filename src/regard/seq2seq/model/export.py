"""A model as a folder that others can read: weights as safetensors, the configuration as JSON."""

import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from regard.seq2seq.model.config import Config
from regard.seq2seq.model.named_arrays import from_named, to_named
from regard.seq2seq.model.translation_model import Model

WEIGHTS, CONFIG = "model.safetensors", "config.json"
FORMAT = "regard.seq2seq 1"


def save_model(folder: str | Path, model: Model, *, float16: bool = False) -> Path:
    """Writes `model.safetensors` and `config.json`.

    Each is written beside its place and then moved there, so that neither is ever half there.

    Example:
        >>> import tempfile
        >>> from flax import nnx
        >>> from regard.seq2seq.model.config import Config
        >>> from regard.seq2seq.model.export import load_model, save_model
        >>> from regard.seq2seq.model.translation_model import Model
        >>> model = Model(Config(20, 30, embedding=8, encoder=8, decoder=16), rngs=nnx.Rngs(0))
        >>> folder = save_model(tempfile.mkdtemp(), model)
        >>> load_model(folder).config == model.config
        True

    Args:
        folder: made where it is not there.
        model: the translator.
        float16: half the size; each weight is rounded to about 3 digits.

    Returns:
        The folder.

    Raises:
        ValueError: a weight is not finite, or too large for float16.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    named = to_named(nnx.state(model))
    if float16:
        with np.errstate(over="ignore"):
            named = {name: array.astype(np.float16) for name, array in named.items()}
    bad = [name for name, array in named.items() if not np.isfinite(array).all()]
    if bad:
        size = "too large for float16, or not finite" if float16 else "not finite"
        raise ValueError(f"a model with weights that are {size} is not written: {', '.join(bad)}.")
    data = _safetensors().numpy.save(named, metadata={"format": FORMAT})
    replace_file(folder / WEIGHTS, data)
    replace_file(folder / CONFIG, model.config.to_json().encode())
    return folder


def load_model(folder: str | Path) -> Model:
    """Reads what `save_model` wrote; weights come back as float32.

    Raises:
        FileNotFoundError: one of the two files is missing.
        ValueError: they do not fit together, or are of another version.
    """
    folder = Path(folder)
    missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"a model folder has {CONFIG} and {WEIGHTS}. {folder} lacks {' and '.join(missing)}."
        )
    config = Config.load(folder / CONFIG)
    path = folder / WEIGHTS
    try:
        named = _safetensors().numpy.load_file(path)
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            format_ = json.loads(file.read(size)).get("__metadata__", {}).get("format")
    except Exception as error:
        raise ValueError(f"{path} is damaged: {error}. Fix: fetch or export it again.") from error
    if format_ != FORMAT:
        raise ValueError(
            f"{path} is not a model of this version of regard: its format is {format_!r}, "
            f"expected {FORMAT!r}."
        )
    graph, like = nnx.split(nnx.eval_shape(lambda: Model(config, rngs=nnx.Rngs(0))))
    params = from_named(like, named, str(path))
    return nnx.merge(graph, jax.tree.map(jnp.asarray, params))


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file that is never seen half-written."""
    draft = path.with_name(path.name + ".new")
    try:
        draft.write_bytes(data)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ModuleNotFoundError as error:
        raise ImportError(
            "Exporting a model needs safetensors, which is not installed.\n"
            'Install it with: pip install "regard[translate]"'
        ) from error
    return safetensors
