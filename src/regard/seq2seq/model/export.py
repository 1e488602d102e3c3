"""A model as a folder that others can read: weights as safetensors, the configuration as JSON.

SHA256SUMS has the checksums of the folder's files; `sha256sum -c SHA256SUMS` verifies them, too.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from regard.atomic_file import write_atomically
from regard.seq2seq.model.architectures import load_config
from regard.seq2seq.model.named_arrays import from_named, to_named
from regard.seq2seq.model.translation_model import Model

WEIGHTS, CONFIG, SUMS = "model.safetensors", "config.json", "SHA256SUMS"
FORMAT = "regard.seq2seq 1"


def save_model(folder: str | Path, model: Model, *, float16: bool = False) -> Path:
    """Writes `model.safetensors`, `config.json`, and their checksums as `SHA256SUMS`.

    Each file appears only when it is complete.

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
        folder: made if it does not exist.
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
    (folder / SUMS).unlink(missing_ok=True)  # those of the files that are replaced now
    write_atomically(folder / WEIGHTS, data)
    write_atomically(folder / CONFIG, model.config.to_json())
    add_checksums(folder, WEIGHTS, CONFIG)
    return folder


def add_checksums(folder: str | Path, *names: str) -> None:
    """Adds files to the folder's SHA256SUMS, or renews their lines in it."""
    path = Path(folder) / SUMS
    lines = {} if not path.exists() else _read_checksums(path)
    lines |= {name: _sha256(Path(folder) / name) for name in names}
    text = "".join(f"{digest}  {name}\n" for name, digest in sorted(lines.items()))
    write_atomically(path, text)


def verify_checksums(folder: str | Path) -> None:
    """Compares files with the folder's SHA256SUMS; a folder without one is not verified.

    Raises:
        ValueError: a file is missing or was changed; the message has its name.
    """
    path = Path(folder) / SUMS
    if not path.is_file():
        return
    for name, expected in _read_checksums(path).items():
        file = path.parent / name
        if not file.is_file() or _sha256(file) != expected:
            raise ValueError(
                f"{file} is damaged: it is not the file that {SUMS} has the checksum of. Fix: "
                f"fetch or export the model again; if you changed {name} on purpose, remove {path}."
            )


def _read_checksums(path: Path) -> dict[str, str]:
    lines = [line.split("  ", 1) for line in path.read_text("utf-8", "replace").splitlines()]
    for line in lines:
        # A plain name, so that nothing outside of the folder is read.
        if len(line) != 2 or len(line[0]) != 64 or Path(line[1]).name != line[1]:
            raise ValueError(
                f"{path} is damaged: {'  '.join(line)[:80]!r} is no checksum and file name. Fix: "
                "fetch or export the model again."
            )
    return {name: digest for digest, name in lines}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_model(folder: str | Path) -> Model:
    """Reads what `save_model` wrote; weights come back as float32.

    Raises:
        FileNotFoundError: one of the two files is missing.
        ValueError: they are damaged, do not fit together, or are of another version; or a weight
            is not finite.
    """
    folder = Path(folder)
    missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"a model folder has {CONFIG} and {WEIGHTS}. {folder} lacks {' and '.join(missing)}."
        )
    verify_checksums(folder)
    config = load_config(folder / CONFIG)
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
    if config.encoder_layers + config.decoder_layers > len(named):
        # Without building a model of so many layers, which would take hours.
        raise ValueError(
            f"{folder / CONFIG} has {config.encoder_layers:,} encoder layers and "
            f"{config.decoder_layers:,} decoder layers, and {path} only {len(named)} arrays. "
            "Fix: fetch or export the model again."
        )
    graph, like = nnx.split(nnx.eval_shape(lambda: Model(config, rngs=nnx.Rngs(0))))
    params = from_named(like, named, str(path))
    bad = [name for name, array in named.items() if not np.isfinite(array).all()]
    if bad:
        raise ValueError(
            f"{path} has weights that are not finite: {', '.join(bad[:4])}"
            f"{f' and {len(bad) - 4} more' if bad[4:] else ''}. Fix: fetch or train it again."
        )
    # Not jnp.asarray, which compiles a program for each shape: a tenth of the time of a first call.
    return nnx.merge(graph, jax.device_put(params, may_alias=False))


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ModuleNotFoundError as error:
        raise ImportError(
            "Exporting a model needs safetensors, which is not installed.\n"
            'Install it with: pip install "regard[translate]"'
        ) from error
    return safetensors
