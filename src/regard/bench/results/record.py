"""The record of a run: device, versions and every number, as JSON."""

import datetime
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from regard.bench.cases.case import Case
from regard.bench.results.targets import Target, judge
from regard.bench.run.machine import versions
from regard.bench.run.measure import Row, Settings

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
) -> dict[str, Any]:
    """Everything about a run, ready for `json.dumps`.

    Args:
        cases, rows, settings: what was run, what came out, and how.
        device: what it was run on, from `machine.describe_device`.
        targets: what is promised there.
        partial: not every case was run.
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
            "partial": partial,
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
    kind = "-quick" if settings["quick"] else "-partial" if settings["partial"] else ""
    return f"{slug}-{record['date'][:10]}{kind}"


def write(record: dict[str, Any], folder: Path) -> Path:
    """Writes the record as JSON into `folder`, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{file_stem(record)}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 6)


def _mib(size: int | None) -> float | None:
    return None if size is None else round(size / MIB, 3)
