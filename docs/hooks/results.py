"""The committed benchmark results as tables and pictures, for the pages that tell of them.

Everything is read from benchmarks/results/*.json while the site is built, so that a page cannot
say anything that no run has said.
"""

import json
import re
from pathlib import Path
from typing import Any

from pictures import INK  # noqa: F401  (its import sets the site's style)

from regard.bench.results.cells import grid, summary
from regard.bench.results.pictures import PEERS, bars, curves, milliseconds
from regard.bench.results.record import case_words, where

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
__all__ = ["bars", "curves", "grid", "summary", "where"]  # of a record; the pages draw with them


def newest(platform: str, survey: bool = False) -> dict[str, Any]:
    """The last full run of the named cases, or of the survey, on a "gpu" or "cpu"."""
    runs = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    full = [
        run
        for run in runs
        if run.get("schema") == 1
        and run["device"]["platform"] == platform
        and not (run["settings"]["quick"] or run["settings"]["partial"])
        and run["settings"].get("survey", False) == survey
    ]
    return max(full, key=lambda run: run["date"])


def row_of(run: dict[str, Any], case: str, who: str = "regard") -> dict[str, Any]:
    return next(row for row in run["rows"] if row["case"] == case and row["who"] == who)


def promises(run: dict[str, Any], fallen_short: bool = False) -> str:
    """What was aimed for, what was measured, and whether it was enough.

    Args:
        run: a record.
        fallen_short: only the promises that were not kept.
    """
    # Long names first: "dot_128" is a part of "dot_128_backward".
    known = sorted(run["cases"], key=lambda case: -len(case["name"]))
    lines = ["| promise | goal | measured | |", "| --- | --- | --- | --- |"]
    for verdict in run["verdicts"]:
        goal, promise, outcome = verdict["goal"], verdict["promise"], verdict["outcome"]
        if fallen_short and outcome == "reached":
            continue
        for case in known:
            name = re.escape(case["name"])
            promise = re.sub(rf"\b{name} over", f"{case_words(case)} over", promise)
        unit = goal.lstrip("≤≥ ").lstrip("0123456789.")
        shown = f"**{outcome}**" if outcome != "reached" else outcome
        lines.append(f"| {promise} | {goal} | {verdict['measured']:.3g}{unit} | {shown} |")
    return "\n".join(lines)


def tally(run: dict[str, Any]) -> str:
    """How many promises were kept."""
    outcomes = [verdict["outcome"] for verdict in run["verdicts"]]
    return f"{outcomes.count('reached')} of {len(outcomes)}"


def times(run: dict[str, Any], cases: list[str]) -> str:
    """The cases' times, regard's beside everyone else's."""
    rows = {(row["case"], row["who"]): row for row in run["rows"] if row["ms"]}
    known = {case["name"]: case for case in run["cases"]}
    peers = [who for who in PEERS if any((case, who) in rows for case in cases)]
    lines = [
        f"| | regard | {' | '.join(PEERS[who][1] for who in peers)} |",
        "| --- |" + " --- |" * (len(peers) + 1),
    ]
    for case in cases:
        found = [rows.get((case, who)) for who in ("regard", *peers)]
        cells = [milliseconds(row["ms"]["median"]) if row else "–" for row in found]
        words = case_words(known[case]).replace(": ", "<br>")
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return numbers(lines)


def numbers(lines: list[str]) -> str:
    """A table whose cells do not wrap: it scrolls where the page is narrow."""
    return "\n".join(['<div class="numbers" markdown>', "", *lines, "", "</div>"])


def translator() -> str:
    """regard's translator beside Joey NMT."""
    path = max((RESULTS / "translator").glob("joey-*.json"), key=lambda path: path.stat().st_size)
    run = json.loads(path.read_text())
    names = {"train": "training", "decode": "beam search"}
    lines = [
        "| work | Joey NMT | regard | ratio (lowest to highest) | goal |",
        "| --- | --- | --- | --- | --- |",
    ]
    for part, words in names.items():
        one = run["summary"][part]
        reached = "reached" if one["ratio"] >= one["goal"] else "**short**"
        lines.append(
            f"| {words}, {one['unit']} | {one['joey']:,.0f} | {one['regard']:,.0f} | "
            f"{one['ratio']:.2f}× ({one['lowest']:.2f} to {one['highest']:.2f}) | "
            f"≥ {one['goal']:g}×, {reached} |"
        )
    device = run["device"]
    return "\n".join(lines) + f"\n\n{device['name']}, {run['cores']} cores; {run['date'][:10]}."
