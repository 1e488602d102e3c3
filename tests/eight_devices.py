"""Scripts of this folder on eight virtual devices.

Each in a process of its own: the number of devices cannot be changed later.
"""

import os
import subprocess
import sys
from pathlib import Path

import jax

DEVICES = "--xla_force_host_platform_device_count=8"
# On a busy machine the eight threads of a collective may be minutes apart: XLA would abort at 40 s.
PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=600"


def lines_of(script: str, names: list[str], *flags: str) -> list[str]:
    """What `python tests/SCRIPT NAMES...` prints; that it fails is an error which shows it all."""
    flags = (os.environ.get("XLA_FLAGS", ""), DEVICES, PATIENCE, *flags)
    kept = {
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),  # see conftest.py
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve().parent / script), *names],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, **kept, "XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout.splitlines()
