"""A command's translator, and the compiled programs that are kept on disk for the next command.

A command of a few seconds spends most of them compiling. Only the command line sets this up: a
library should not write into a home directory because it was imported.
"""

import hashlib
import importlib.util
import os
import platform
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.seq2seq.translator import Translator

LIMIT = 256 * 2**20  # bytes; the least recently used programs are removed first


def load_translator(model: Path | None, no_cache: bool, **options: Any) -> "Translator":
    """Reads a model.

    Args:
        model: its folder; None: the one that comes with regard.
        no_cache: do not keep compiled programs.
        options: of `Translator.load`.
    """
    from regard.seq2seq.translator import Translator

    if not no_cache:
        keep_compiled_programs()
    return Translator.load(model, **options)


def keep_compiled_programs() -> Path | None:
    """Makes JAX keep what it compiles in the user's cache folder.

    The folder is $XDG_CACHE_HOME/regard/xla or ~/.cache/regard/xla, with a folder for each kind of
    processor: a program of one may not run on another. Where it cannot be written, nothing is
    kept, without a message. $JAX_COMPILATION_CACHE_DIR takes precedence.

    Returns:
        The folder; None where nothing is kept, or JAX's own setting says where.
    """
    import jax

    if getattr(jax.config, "jax_compilation_cache_dir", None) is not None:
        return None
    try:
        folder = _cache_home() / "regard" / "xla" / _machine()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # read-only, full, or no home
        return None
    if not os.access(folder, os.W_OK):
        return None
    # Nor does a full disk need a message.
    warnings.filterwarnings("ignore", message="Error (writing|reading) persistent compilation")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    if importlib.util.find_spec("filelock") is not None:  # JAX needs it for a size limit
        jax.config.update("jax_compilation_cache_max_size", LIMIT)
    return folder


def _cache_home() -> Path:
    named = os.environ.get("XDG_CACHE_HOME", "")
    return Path(named) if named else Path.home() / ".cache"


def _machine() -> str:
    """A name for the instruction set of this processor."""
    flags = ""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        pass
    what = f"{platform.machine()} {platform.processor()} {flags}"
    return hashlib.blake2b(what.encode(), digest_size=6).hexdigest()
