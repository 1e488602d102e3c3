"""The pictures of a stored record: cost against length, and times over regard's.

`regard bench --draw` writes them as files; the documentation draws the same figures on its pages.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.atomic_file import write_atomically
from regard.bench.results.cells import grid
from regard.bench.results.record import (
    BACKWARD,
    SWEPT,
    case_words,
    file_stem,
    median_ms,
    sweep_case,
    swept,
    where,
)
from regard.bench.run.measure import AGAIN

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, LIGHT_BLUE, GRAY = "#3b7dd8", "#4aa5c4", "#8a8f98"
# Peer -> color, name. regard's own variants are not drawn.
PEERS = {
    "book": ("#e07b39", "the book's form"),
    "jax.nn": ("#d9a441", "jax.nn, XLA"),
    "jax.nn cudnn": ("#2a9d7c", "jax.nn, cuDNN"),
    "torch": ("#8b6fc9", "torch"),
    "flex": ("#c74f8a", "FlexAttention"),
    "keras": (GRAY, "Keras"),
}
# Curve -> color, marker, name; other curves are not drawn. Dashes are with the gradients.
CURVES = {
    "book": (PEERS["book"][0], "s", "the book's form"),
    "regard": (BLUE, "o", "regard"),
    "regard 0.001": (LIGHT_BLUE, "^", "regard, tolerance 1e-3"),
    "jax.nn cudnn, dot": (GRAY, "D", "dot product, cuDNN"),
}
STYLE: Any = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.alpha": 0.15,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}


def save_pictures(record: dict[str, Any], folder: Path) -> list[Path]:
    """Draws what a record holds, with a title that says on what it was measured.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    import io

    import matplotlib

    paths = []
    with matplotlib.rc_context(STYLE):
        if record["settings"].get("survey"):
            drawn = [("", grid(record))]
        else:
            drawn = [("", curves(record)), ("-speedups", bars(record))]
        for suffix, figure in drawn:
            if figure is None:
                continue
            title = "How many times as long as regard (right of 1×, regard is faster)"
            if record["settings"].get("survey"):
                title = "The best correct peer's time over regard's (blue: regard is faster)"
            elif not suffix:
                case = sweep_case(record)
                title = (
                    "Additive attention: cost against sequence length\n"
                    f"B={case['B']}, T=S, h=V={case['D']}, {case['dtype']}"
                )
            figure.suptitle(f"{title}\n{where(record)}", fontsize=10)
            picture = io.BytesIO()
            figure.savefig(picture, dpi=160, facecolor="white")
            folder.mkdir(parents=True, exist_ok=True)
            paths.append(folder / f"{file_stem(record)}{suffix}.png")
            write_atomically(paths[-1], picture.getvalue())
    return paths


def curves(record: dict[str, Any]) -> "Figure | None":
    """Time and memory of the sweeps against the length; None with fewer than two lengths."""
    from matplotlib.figure import Figure

    shown = {
        name: curve
        for name, curve in swept(record).items()
        if name.removesuffix(BACKWARD) in CURVES
    }
    if max((len(curve) for curve in shown.values()), default=0) < 2:
        return None
    figure = Figure(figsize=(9.5, 4.2), layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, (title, value_of, unit, ticks) in zip(
        panels,
        (
            ("time", median_ms, milliseconds, 10),
            ("memory for temporaries", lambda row: row["temp_mib"], mebibytes, 32),
        ),
        strict=True,
    ):
        _curve_panel(panel, shown, value_of)
        _logarithmic(panel.yaxis, unit, base=ticks)
        panel.set(title=title, xlabel="queries = keys")
    names: dict[str, Any] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        names |= dict(zip(labels, handles, strict=True))
    figure.legend(names.values(), names.keys(), loc="outside lower center", ncols=3)
    return figure


def bars(record: dict[str, Any], cases: Sequence[str] | None = None) -> "Figure | None":
    """How many times as long as regard each peer takes, from 1 on a logarithmic scale.

    Args:
        record: of a run.
        cases: only these; None: all.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ratios = {
        case: peers for case, peers in speedups(record).items() if cases is None or case in cases
    }
    if not ratios:
        return None
    known = {case["name"]: case for case in record["cases"]}
    count = sum(len(peers) + 1 for peers in ratios.values())
    figure = Figure(figsize=(9.5, 1.4 + 0.2 * count), layout="constrained")
    panel = figure.subplots()
    at, ticks = 0, []
    for case, peers in ratios.items():
        ticks.append((at + (len(peers) - 1) / 2, case_words(known[case]).replace(": ", "\n")))
        for who, ratio in peers.items():
            bar = panel.barh(at, ratio - 1, left=1, height=0.85, color=PEERS[who][0])
            panel.bar_label(bar, [f"{ratio:.3g}×"], padding=4, fontsize=8)
            at += 1
        at += 1
    panel.axvline(1, color=panel.yaxis.label.get_color(), linewidth=1)
    panel.set_xscale("log")
    _logarithmic(panel.xaxis, lambda ratio: f"{ratio:g}×", base=10, subs=(1, 2, 5))
    panel.margins(x=0.12)
    panel.set_yticks(*zip(*ticks, strict=True), fontsize=8)
    panel.set_ylim(at - 0.5, -1)
    panel.tick_params(axis="y", length=0, pad=34)  # room for the numbers left of 1×
    panel.spines["left"].set_visible(False)
    seen = [who for who in PEERS if any(who in peers for peers in ratios.values())]
    figure.legend(
        handles=[Patch(color=PEERS[who][0], label=PEERS[who][1]) for who in seen],
        loc="outside lower center",
        ncols=len(seen),
    )
    return figure


def speedups(record: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By case: by peer, its time over regard's in the same run."""
    found: dict[str, dict[str, float]] = {}
    for row in record["rows"]:
        if row["case"].startswith(SWEPT) or row["who"] == AGAIN:
            continue
        if row["who"] in PEERS and row["ratio"] is not None:
            found.setdefault(row["case"], {})[row["who"]] = row["ratio"]
    return found


def milliseconds(ms: float) -> str:
    """A time with a unit that keeps it short."""
    if ms >= 1000:
        return f"{ms / 1000:.3g} s"
    return f"{ms:.3g} ms" if ms >= 0.1 else f"{1000 * ms:.3g} µs"


def mebibytes(mib: float) -> str:
    """A size with a unit that keeps it short."""
    if mib >= 1024:
        return f"{mib / 1024:.3g} GiB"
    return f"{mib:.3g} MiB" if mib >= 1 else f"{mib * 1024:.3g} KiB"


def _curve_panel(
    panel: Any, shown: dict[str, Any], value_of: Callable[[dict[str, Any]], float | None]
) -> None:
    for name, curve in shown.items():
        backward = name.endswith(BACKWARD)
        color, marker, label = CURVES[name.removesuffix(BACKWARD)]
        # A zero has no logarithm.
        points = [(length, value_of(row)) for length, row in sorted(curve.items()) if value_of(row)]
        if points:
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
    ticks = sorted({length for curve in shown.values() for length in curve})
    ticks = ticks[:: 2 if len(ticks) > 6 else 1]
    panel.set_xticks(ticks, [f"{t // 1024}k" if t >= 1024 else str(t) for t in ticks])
    panel.minorticks_off()
    panel.grid(True)


def _logarithmic(axis: Any, words: Callable[[float], str], **ticks: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    axis.set_major_locator(LogLocator(**ticks))
    axis.set_major_formatter(FuncFormatter(lambda value, _: words(value)))
    axis.axes.minorticks_off()
