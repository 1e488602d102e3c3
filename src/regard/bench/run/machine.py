"""What the numbers were measured on: the device, its driver, and every version that has a part."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax

import regard
from regard.pool import cudnn

_DISTRIBUTIONS = {"cudnn": cudnn.PACKAGES}
_VERSIONS = ("jax", "jaxlib", "numpy", "cudnn", "keras", "torch", "triton")


def describe_device() -> dict[str, Any]:
    """Platform, name and number of cores of what JAX runs on; of a GPU also its driver."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return {"platform": "cpu", "name": _cpu_name(), "cores": _cores()}
    return {
        "platform": device.platform,
        "name": device.device_kind,
        "cores": _cores(),
        "driver": _asked(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
    }


def versions() -> dict[str, str | None]:
    """Of everything that has a part in the numbers; None for what is not installed."""
    found: dict[str, str | None] = {
        "regard": regard.__version__,
        "python": platform.python_version(),
    }
    for name in _VERSIONS:
        found[name] = None
        for distribution in _DISTRIBUTIONS.get(name, (name,)):
            try:
                found[name] = found[name] or importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    asked = None
    if platform.system() == "Darwin":
        asked = _asked(["sysctl", "-n", "machdep.cpu.brand_string"])
    return asked or platform.processor() or platform.machine() or "unknown"


def _asked(command: list[str]) -> str | None:
    """The first line that a command prints; None where there is no such command."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines()[0].strip() if done.stdout.strip() else None
