"""`regard export`: a model as a folder that others can read, checked before it is called done."""

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.failures import one_line_errors
from regard.cli.terminal.waiting import waiting

if TYPE_CHECKING:
    from regard.seq2seq.translator import Translator

CARD = "README.md"  # the model card: what a licence asks to be named travels with the model


def command(
    model: Annotated[Path, typer.Argument(help="Folder of a model or of a training run.")],
    out: Annotated[
        Path, typer.Argument(help="Folder to write; it must not be there, or be empty.")
    ],
    float16: Annotated[
        bool, typer.Option("--float16", help="Half the size; weights rounded to about 3 digits.")
    ] = False,
) -> None:
    """Write a model as safetensors, config and tokenizer, and read it back to be sure."""
    with one_line_errors(), waiting("loading the model") as wait:
        _check_free(out)
        from regard.seq2seq.model.export import save_model
        from regard.seq2seq.model.model_folder import model_folder
        from regard.seq2seq.translator import Translator

        given = Translator.load(model)
        wait.says("writing")
        out.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            save_model(draft, given.model, float16=float16)
            given.tokenizers.save(draft)
            card = model_folder(model) / CARD
            if card.is_file():
                shutil.copyfile(card, draft / CARD)
            wait.says("reading it back")
            compare(given, Translator.load(draft), float16)
            draft.chmod(0o755)  # mkdtemp's are for nobody else
            if out.is_dir():
                out.rmdir()
            draft.rename(out)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    size = sum(path.stat().st_size for path in out.iterdir())
    typer.echo(f"wrote {out} ({size / 1e6:.1f} MB), read it back, and it is the same")


def compare(given: "Translator", written: "Translator", float16: bool) -> None:
    """That what was read back is what was written.

    Args:
        given: the model to export.
        written: what was read from the export.
        float16: whether weights were rounded, and may differ by that.

    Raises:
        ValueError: something differs.
    """
    import numpy as np
    from flax import nnx

    from regard.seq2seq.model.named_arrays import to_named

    different = [
        name
        for name, same in (
            ("config", written.model.config == given.model.config),
            ("tokenizers", written.tokenizers == given.tokenizers),
        )
        if not same
    ]
    theirs = to_named(nnx.state(written.model))
    for name, array in to_named(nnx.state(given.model)).items():
        expected = array.astype(np.float16).astype(array.dtype) if float16 else array
        if name not in theirs or not np.array_equal(theirs[name], expected):
            different.append(name)
    if different:
        raise ValueError(
            f"what was read back differs in {', '.join(different)}; nothing was exported. "
            "Fix: try another disk."
        )


def _check_free(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"{out} is a file. Fix: name a folder that is not there.")
    if out.is_dir() and any(out.iterdir()):
        raise FileExistsError(f"{out} has something in it. Fix: another folder, or empty it.")
