"""Programs that XLA has compiled, kept on disk from one command to the next.

A command of a few seconds spends most of them compiling. Only the command line sets this up: a
library that writes into a home directory because it was imported would be a nuisance.
"""

import hashlib
import importlib.util
import os
import platform
import warnings
from pathlib import Path

LIMIT = 256 * 2**20  # bytes; what was not used for the longest time goes first


def keep_compiled_programs() -> Path | None:
    """Tells JAX to keep what it compiles in the user's cache folder.

    The folder is $XDG_CACHE_HOME/regard/xla or ~/.cache/regard/xla, in it one for each kind of
    processor: a program of one may not run on another. Where it cannot be written, nothing is
    kept, and nobody need know. $JAX_COMPILATION_CACHE_DIR is obeyed.

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
    # A full disk is no reason to bother anyone either.
    warnings.filterwarnings("ignore", message="Error (writing|reading) persistent compilation")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    if importlib.util.find_spec("filelock") is not None:  # JAX needs it to keep to a size
        jax.config.update("jax_compilation_cache_max_size", LIMIT)
    return folder


def _cache_home() -> Path:
    named = os.environ.get("XDG_CACHE_HOME", "")
    return Path(named) if named else Path.home() / ".cache"


def _machine() -> str:
    """A name for what this processor can do."""
    flags = ""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        pass
    what = f"{platform.machine()} {platform.processor()} {flags}"
    return hashlib.blake2b(what.encode(), digest_size=6).hexdigest()
