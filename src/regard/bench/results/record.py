"""The record of a run: device, versions and every number, as JSON; written and read here only.

A stored record can be shown on any machine: `report` prints it and `pictures` draws it.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

import regard
from regard.atomic_file import write_atomically
from regard.bench.cases.case import Case
from regard.bench.results.targets import Target, judge
from regard.bench.run.measure import AGAIN, NOT_REACHED, Row, Settings

SCHEMA = 1
MIB = 2**20


def make_record(
    cases: Sequence[Case],
    rows: Sequence[Row],
    settings: Settings,
    *,
    device: dict[str, Any],
    targets: Sequence[Target],
    partial: bool = False,
    survey: bool = False,
) -> dict[str, Any]:
    """Everything about a run, ready for `json.dumps`.

    Args:
        cases, rows, settings: what was run, what came out, and how.
        device: what it was run on, from `machine.describe_device`.
        targets: what is promised there.
        partial: not every case was run.
        survey: the cases are those of survey.py.
    """
    times = {(row.case, row.who): row.timing for row in rows}

    def row_record(row: Row) -> dict[str, Any]:
        timing, ours = row.timing, times.get((row.case, "regard"))
        milliseconds = None
        if timing:
            low, high = timing.quartiles
            milliseconds = {
                "median": _ms(timing.median),
                "low_quartile": _ms(low),
                "high_quartile": _ms(high),
                "runs": [_ms(seconds) for seconds in timing.seconds],
            }
        return {
            "case": row.case,
            "who": row.who,
            "ms": milliseconds,
            "ratio": round(timing.median / ours.median, 4) if timing and ours else None,
            "tflops": None if row.tflops is None else round(row.tflops, 3),
            "temp_mib": _mib(row.temp_bytes),
            "peak_mib": _mib(row.peak_bytes),
            "error": row.error,
            "errors": row.errors,
            "lifted": row.lifted,
            "ran": row.ran,
            "absent": row.absent,
        }

    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device,
        "versions": versions(),
        "settings": {
            "repeats": settings.repeats,
            "budget_s": settings.budget,
            "quick": settings.quick,
            "partial": partial or any(row.absent == NOT_REACHED for row in rows),
            "survey": survey,
        },
        "cases": [asdict(case) for case in cases],
        "rows": [row_record(row) for row in rows],
        "verdicts": [
            {
                "promise": verdict.target.promise,
                "goal": verdict.target.goal,
                "measured": verdict.measured,
                "noise": verdict.noise,
                "outcome": verdict.outcome,
            }
            for verdict in judge(rows, targets)
        ],
    }


def file_stem(record: dict[str, Any]) -> str:
    """`<device>-<date>`, with `-quick` or `-partial` for a run that claims nothing.

    >>> device = {"platform": "cpu", "name": "ACME One (R)", "cores": 2}
    >>> settings = {"quick": True, "partial": True}
    >>> file_stem({"device": device, "date": "2025-01-02T03:04:05+00:00", "settings": settings})
    'acme-one-r-2-cores-2025-01-02-quick'
    """
    device, settings = record["device"], record["settings"]
    name = device["name"]
    if device["platform"] == "cpu":
        name = f"{name} {device['cores']} cores"
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    kind = "-survey" if settings.get("survey") else ""
    kind += "-quick" if settings["quick"] else "-partial" if settings["partial"] else ""
    return f"{slug}-{record['date'][:10]}{kind}"


def write(record: dict[str, Any], folder: Path, stem: str | None = None) -> Path:
    """Writes a record as JSON into `folder`, which is made if need be. Every benchmark uses it.

    Args:
        record: what was measured.
        folder: such as benchmarks/results.
        stem: the name of the file without ending; None: `file_stem` of the record.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem or file_stem(record)}.json"
    write_atomically(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return path


def write_script_record(kind: str, result: dict[str, Any], folder: Path) -> Path:
    """Writes what a script in benchmarks/ measured, as `<kind>-<cores>-cores-<day>.json`.

    The date, the device and the versions of everything that is installed come before the result.
    """
    today, device = datetime.date.today().isoformat(), describe_device()
    found = {name: version for name, version in versions().items() if version is not None}
    about = {"date": today, "device": device, "cores": device["cores"], "versions": found}
    return write(about | result, folder, f"{kind}-{device['cores']}-cores-{today}")


def where(record: dict[str, Any]) -> str:
    """Device, versions and day, in one line."""
    device, found = record["device"], record["versions"]
    cores = f", {device['cores']} cores" if device["platform"] == "cpu" else ""
    known = [f"{who} {found[who]}" for who in ("jax", "cudnn", "torch") if found.get(who)]
    return f"{device['name']}{cores}; {', '.join(known)}; {record['date'][:10]}"


def case_words(case: dict[str, Any]) -> str:
    """What a case computes, in words, and its shapes.

    >>> case = dict(score="additive", tolerance="exact", direction="forward+backward", mask="none")
    >>> case_words(case | dict(B=8, T=4096, S=4096, N=None, D=64, V=64, dtype="float32"))
    'additive, exact tanh, with gradients: B=8 T=S=4096 D=V=64'
    """
    names = {"dot": "dot product", "features": "wide kernel alone", "gaussian": "Gaussian"}
    parts = [names.get(case["score"], case["score"])]
    if case["tolerance"] is not None:
        exact = case["tolerance"] == "exact"
        parts.append("exact tanh" if exact else f"tolerance {case['tolerance']:g}")
    masks = {
        "causal": "causal",
        "lengths": "a length per example",
        "full": "a length per example",
        "triangular": "a length per query",
        "segments": "packed",
        "packed": "packed, causal",
        "boolean": "boolean mask",
    }
    parts += [masks[case["mask"]]] if case["mask"] != "none" else []
    parts += ["bias"] if case.get("bias") else []
    parts += [case["normalize"]] if case.get("normalize", "softmax") != "softmax" else []
    parts += [f"dropout {case['dropout']:g}"] if case.get("dropout") else []
    directions = {"backward": "gradients alone", "forward+backward": "with gradients"}
    parts += [directions[case["direction"]]] if case["direction"] in directions else []
    return f"{', '.join(parts)}: {case_shapes(case)}"


def case_shapes(case: dict[str, Any]) -> str:
    """The shapes of a case in one line.

    >>> case_shapes(dict(B=2, T=8, S=8, N=4, D=64, V=64, dtype="float32"))
    'B=2 T=S=8 N=4 D=V=64'
    """
    parts = [
        f"B={case['B']}",
        f"T=S={case['T']}" if case["T"] == case["S"] else f"T={case['T']} S={case['S']}",
        f"N={case['N']}" if case["N"] else "",
        f"K={case['K']}" if case.get("K") else "",
        f"D=V={case['D']}" if case["D"] == case["V"] else f"D={case['D']} V={case['V']}",
        case["dtype"] if case["dtype"] != "float32" else "",
    ]
    return " ".join(filter(None, parts))


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 6)


def _mib(size: int | None) -> float | None:
    return None if size is None else round(size / MIB, 3)


SWEPT = ("sweep_", "memory_")  # cases shown as cost against length, not row by row
BACKWARD = "+backward"  # ends the name of a curve of forward+backward

Curves = dict[str, dict[int, dict[str, Any]]]  # name of the curve -> length -> row


def swept(record: dict[str, Any]) -> Curves:
    """The curves of a record.

    A row without "ms" was compiled for its memory and not run; one that is "absent" has neither.
    """
    curves: Curves = {}
    cases = {case["name"]: case for case in record["cases"]}
    for row in record["rows"]:
        if row["case"].startswith(SWEPT) and row["who"] != AGAIN:
            case = cases[row["case"]]
            curves.setdefault(_curve_name(row["who"], case), {})[case["T"]] = row
    return curves


def sweep_case(record: dict[str, Any]) -> dict[str, Any]:
    """A case of the sweep: all but the length is the same in every case."""
    return next(case for case in record["cases"] if case["name"].startswith(SWEPT))


def _curve_name(who: str, case: dict[str, Any]) -> str:
    """
    >>> dot = dict(score="dot", tolerance=None, direction="forward+backward")
    >>> _curve_name("jax.nn cudnn", dot)
    'jax.nn cudnn, dot+backward'
    """
    name, tolerance = who, case["tolerance"]
    if who == "regard" and tolerance is not None:
        name += f" {tolerance if isinstance(tolerance, str) else f'{tolerance:g}'}"
    if case["score"] != "additive":
        name += f", {case['score']}"
    return name + (BACKWARD if case["direction"] == "forward+backward" else "")


def median_ms(row: dict[str, Any]) -> float | None:
    """The time of a row; None for one that was not run."""
    return row["ms"]["median"] if row["ms"] else None


# cuDNN is packaged once for each CUDA.
_DISTRIBUTIONS = {"cudnn": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")}
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
