"""The committed benchmark results as tables and pictures, for the pages that tell of them.

Everything is read from benchmarks/results/*.json while the site is built, so that a page cannot
say anything that no run has said.
"""

import json
from pathlib import Path
from typing import Any

from pictures import INK

from regard.bench.results.bars import speedups
from regard.bench.results.curves import BACKWARD, median_ms, swept

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"

CURVES = {
    "book": ("#e07b39", "s", "the book's form"),
    "regard": ("#3b7dd8", "o", "regard"),
    "jax.nn cudnn, dot": ("#8a8f98", "D", "dot product, cuDNN"),
}
BARS = {
    "book": ("#e07b39", "the book's form"),
    "jax.nn": ("#d9a441", "jax.nn, XLA"),
    "jax.nn cudnn": ("#2a9d7c", "jax.nn, cuDNN"),
    "torch": ("#8b6fc9", "torch"),
    "flex": ("#c74f8a", "FlexAttention"),
    "keras": ("#8a8f98", "Keras"),
}


def newest(platform: str) -> dict[str, Any]:
    """The last full run on a "gpu" or "cpu"."""
    runs = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    full = [
        run
        for run in runs
        if run.get("schema") == 1
        and run["device"]["platform"] == platform
        and not (run["settings"]["quick"] or run["settings"]["partial"])
    ]
    return max(full, key=lambda run: run["date"])


def where(run: dict[str, Any]) -> str:
    """Device, versions and day, in one line."""
    device, versions = run["device"], run["versions"]
    name = device["name"]
    if device["platform"] == "cpu":
        name += f", {device['cores']} cores"
    known = [f"{who} {versions[who]}" for who in ("jax", "cudnn", "torch") if versions.get(who)]
    return f"{name}; {', '.join(known)}; {run['date'][:10]}"


def row_of(run: dict[str, Any], case: str, who: str = "regard") -> dict[str, Any]:
    return next(row for row in run["rows"] if row["case"] == case and row["who"] == who)


def promises(run: dict[str, Any]) -> str:
    """What was aimed for, what was measured, and whether it was enough."""
    lines = ["| promise | goal | measured | |", "| --- | --- | --- | --- |"]
    for verdict in run["verdicts"]:
        goal = verdict["goal"]
        unit = goal.lstrip("≤≥ ").lstrip("0123456789.")
        outcome = verdict["outcome"]
        shown = f"**{outcome}**" if outcome != "reached" else outcome
        lines.append(
            f"| {verdict['promise']} | {goal} | {verdict['measured']:.3g}{unit} | {shown} |"
        )
    return "\n".join(lines)


def tally(run: dict[str, Any]) -> str:
    """How many promises were kept."""
    outcomes = [verdict["outcome"] for verdict in run["verdicts"]]
    return f"{outcomes.count('reached')} of {len(outcomes)}"


def times(run: dict[str, Any], cases: dict[str, str]) -> str:
    """The cases' times, regard's beside everyone else's."""
    peers = [
        who
        for who in BARS
        if any(row["who"] == who and row["ms"] and row["case"] in cases for row in run["rows"])
    ]
    names = ["regard", *(BARS[who][1] for who in peers)]
    lines = [f"| | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for case, words in cases.items():
        cells = []
        for who in ("regard", *peers):
            found = [r for r in run["rows"] if r["case"] == case and r["who"] == who and r["ms"]]
            cells.append(_milliseconds(found[0]["ms"]["median"]) if found else "–")
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines)


def against_length(run: dict[str, Any]) -> Any:
    """Additive attention's time and memory against the length; dashes are with the gradients."""
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, LogLocator

    figure, panels = pyplot.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained")
    measures = [
        ("time", median_ms, _milliseconds, 10),
        ("memory for temporaries", _memory_of, _memory, 32),
    ]
    for panel, (title, value_of, words, base_of_ticks) in zip(panels, measures, strict=True):
        for name, curve in swept(run).items():
            base = name.removesuffix(BACKWARD)
            if base not in CURVES:
                continue
            color, marker, label = CURVES[base]
            points = [(n, value_of(row)) for n, row in sorted(curve.items()) if value_of(row)]
            if not points:
                continue
            backward = name.endswith(BACKWARD)
            panel.plot(
                *zip(*points, strict=True),
                color=color,
                marker=marker,
                markersize=4,
                linestyle="--" if backward else "-",
                label=label + (", with gradients" if backward else ""),
            )
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        ticks = sorted({n for curve in swept(run).values() for n in curve})[::2]
        panel.set_xticks(ticks, [f"{n // 1024}k" if n >= 1024 else str(n) for n in ticks])
        panel.yaxis.set_major_locator(LogLocator(base=base_of_ticks))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _, words=words: words(value)))
        panel.minorticks_off()
        panel.grid(True)
        panel.set(title=title, xlabel="queries = keys")
    handles = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
    handles |= dict(zip(*reversed(panels[1].get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize=8)
    return figure


def bars(run: dict[str, Any], cases: dict[str, str]) -> Any:
    """How many times as long as regard the others take, on a logarithmic scale from 1."""
    from matplotlib import pyplot
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, LogLocator

    ratios = {case: peers for case, peers in speedups(run).items() if case in cases}
    count = sum(len(peers) + 1 for peers in ratios.values())
    figure, panel = pyplot.subplots(figsize=(8.5, 0.9 + 0.2 * count), layout="constrained")
    at, ticks, seen = 0, [], []
    for case, peers in ratios.items():
        ticks.append((at + (len(peers) - 1) / 2, cases[case]))
        for who, ratio in peers.items():
            panel.barh(at, ratio - 1, left=1, height=0.85, color=BARS[who][0])
            panel.annotate(
                f"{ratio:.3g}×",
                (ratio, at),
                xytext=(4 if ratio >= 1 else -4, 0),
                textcoords="offset points",
                ha="left" if ratio >= 1 else "right",
                va="center",
                fontsize=8,
            )
            seen.append(who)
            at += 1
        at += 1
    panel.axvline(1, color=INK, linewidth=1)
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}×"))
    panel.minorticks_off()
    panel.margins(x=0.12)
    panel.set_yticks(*zip(*ticks, strict=True))
    panel.set_ylim(at - 0.5, -1)
    panel.tick_params(length=0)
    panel.tick_params(axis="y", pad=34)  # room for the numbers left of 1×
    panel.spines["left"].set_visible(False)
    known = [who for who in BARS if who in seen]
    figure.legend(
        handles=[Patch(color=BARS[who][0], label=BARS[who][1]) for who in known],
        loc="outside upper center",
        ncols=len(known),
        fontsize=8,
    )
    return figure


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


def _memory_of(row: dict[str, Any]) -> float | None:
    return row["temp_mib"]


def _milliseconds(ms: float) -> str:
    if ms >= 1000:
        return f"{ms / 1000:.3g} s"
    return f"{ms:.3g} ms" if ms >= 0.1 else f"{1000 * ms:.3g} µs"


def _memory(mib: float) -> str:
    if mib >= 1024:
        return f"{mib / 1024:.3g} GiB"
    return f"{mib:.3g} MiB" if mib >= 1 else f"{mib * 1024:.3g} KiB"
