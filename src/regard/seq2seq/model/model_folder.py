"""Finds a model's folder: one that is named, a training run's, or the one in the package."""

from importlib import resources
from pathlib import Path

from regard.seq2seq.text import tokenizer_pair

FILES = ("config.json", "model.safetensors", tokenizer_pair.FILE)
LANGUAGES = "en-fr"


def model_folder(folder: str | Path | None = None) -> Path:
    """The folder that has a model's files.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as run:
        ...     model = Path(run) / "model"
        ...     model.mkdir()
        ...     for name in ("config.json", "model.safetensors", "tokenizer.json"):
        ...         (model / name).touch()
        ...     model_folder(run) == model
        True

    Args:
        folder: one with config.json, model.safetensors and tokenizer.json; or the folder of a
            training run, which has these in `model/`; None: the English-French model of the
            package.

    Raises:
        FileNotFoundError: the folder or one of its files is missing; the message says which.
    """
    if folder is None:
        found = bundled_folder()
        if not found.is_dir():
            raise FileNotFoundError(
                f"this installation of regard comes without its English-French model: {found} is "
                "not there. Fix: install regard again, or name the folder of a trained model."
            )
    else:
        found = Path(folder)
        if not found.is_dir():
            what = "is a file" if found.exists() else "is not there"
            raise FileNotFoundError(f"a model is a folder with {_list(FILES)}. {found} {what}.")
        if (found / "checkpoints").is_dir() and not (found / "model").is_dir():
            raise FileNotFoundError(
                f"the run in {found} has not come to its end, and only then has a folder model. "
                f"Fix: continue it with regard train {found} --resume."
            )
        if (found / "model").is_dir():
            found = found / "model"
    missing = [name for name in FILES if not (found / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"a model is a folder with {_list(FILES)}. {found} lacks {_list(missing)}."
        )
    return found


def bundled_folder() -> Path:
    """The folder of the package's own model."""
    return Path(str(resources.files("regard.seq2seq"))) / "bundled" / LANGUAGES


def _list(names: list[str] | tuple[str, ...]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
