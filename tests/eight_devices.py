"""Scripts of this folder on eight virtual devices, and pieces of code on four.

Each in a process of its own: the number of devices cannot be changed later.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax

# On a busy machine the eight threads of a collective may be minutes apart: XLA would abort at 40 s.
PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=600"


def lines_of(script: str, names: list[str], *flags: str) -> list[str]:
    """What `python tests/SCRIPT NAMES...` prints; that it fails is an error which shows it all."""
    kept = {
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),  # see conftest.py
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    path = str(Path(__file__).resolve().parent / script)
    return _printed([path, *names], 8, [PATIENCE, *flags], kept)


def on_four_devices(code: str) -> list[str]:
    """The same of `python -c CODE`, compiled at optimization level 0."""
    unoptimized = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # it compiles longer than it runs
    return _printed(["-c", textwrap.dedent(code)], 4, [PATIENCE], unoptimized)


def _printed(
    arguments: list[str], devices: int, flags: list[str], environment: dict[str, str]
) -> list[str]:
    flags = [f"--xla_force_host_platform_device_count={devices}", *flags]
    flags = [os.environ.get("XLA_FLAGS", ""), *flags]
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, **environment, "XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout.splitlines()
