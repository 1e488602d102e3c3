"""A command's translator, and the compiled programs that are kept for the next time."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.seq2seq.translator import Translator


def load_translator(model: Path | None, no_cache: bool, **options: Any) -> "Translator":
    """Reads a model.

    Args:
        model: its folder; None: the one that comes with regard.
        no_cache: whether compiled programs are not to be kept.
        options: of `Translator.load`.
    """
    from regard.cli.compile_cache import keep_compiled_programs
    from regard.seq2seq.translator import Translator

    if not no_cache:
        keep_compiled_programs()
    return Translator.load(model, **options)
