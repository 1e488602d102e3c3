"""Speedups as a picture: for each case, how many times as long as regard each peer takes."""

from pathlib import Path
from typing import Any

from regard.bench.results.curves import SWEPT
from regard.bench.results.plot import FAINT, INK, title
from regard.bench.results.record import file_stem
from regard.bench.run.measure import AGAIN

# Who -> color, label. Peers not named here (regard's own variants) are not drawn.
_STYLES = {
    "book": ("#b5523b", "the book's form"),
    "jax.nn": ("#d9a441", "jax.nn, XLA"),
    "jax.nn cudnn": ("#6b8e4e", "jax.nn, cuDNN"),
    "torch": ("#7a5ea8", "torch"),
    "flex": ("#b58fc9", "FlexAttention"),
    "keras": ("#8b929a", "Keras"),
}
_BAR = 0.2  # inches


def draw_speedups(record: dict[str, Any], folder: Path) -> Path | None:
    """Draws the ratios of a record; None when it holds none.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator

    bars = speedups(record)
    if not bars:
        return None
    count = sum(len(ratios) for ratios in bars.values()) + len(bars)
    height = 2.2 + _BAR * count
    figure = Figure(figsize=(10, height), dpi=160, facecolor="white")
    axes = figure.subplots()
    # The margins are the same in inches, however many bars there are.
    figure.subplots_adjust(left=0.25, right=0.93, bottom=0.5 / height, top=1 - 1.3 / height)
    position, ticks = 0.0, []
    for case, ratios in bars.items():
        ticks.append((position + (len(ratios) - 1) / 2, case))
        for who, ratio in ratios.items():
            # From 1, where both take the same time: to the right regard is faster.
            axes.barh(position, ratio - 1, left=1, height=0.85, color=_STYLES[who][0])
            axes.annotate(
                f"{ratio:.3g}×",
                (ratio, position),
                xytext=(4 if ratio >= 1 else -4, 0),
                textcoords="offset points",
                va="center",
                ha="left" if ratio >= 1 else "right",
                fontsize=7.5,
                color=INK,
            )
            position += 1
        position += 1
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}×"))
    axes.minorticks_off()
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_yticks(*zip(*ticks, strict=True), fontsize=9)
    axes.set_ylim(position - 0.5, -1)
    axes.margins(x=0.12)
    axes.tick_params(colors=INK, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(FAINT)
    _legend(axes, [who for who in _STYLES if any(who in ratios for ratios in bars.values())])
    title(
        figure,
        record,
        "How many times as long as regard",
        "Right of 1×, regard is faster.",
        inches=height,
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{file_stem(record)}-speedups.png"
    figure.savefig(path)
    return path


def speedups(record: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By case: by peer, its time over regard's in the same run."""
    found: dict[str, dict[str, float]] = {}
    for row in record["rows"]:
        if row["case"].startswith(SWEPT) or row["who"] == AGAIN:
            continue
        if row["who"] in _STYLES and row["ratio"] is not None:
            found.setdefault(row["case"], {})[row["who"]] = row["ratio"]
    return found


def _legend(axes: Any, peers: list[str]) -> None:
    from matplotlib.patches import Patch

    axes.legend(
        handles=[Patch(color=_STYLES[who][0], label=_STYLES[who][1]) for who in peers],
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=len(peers),
        frameon=False,
        fontsize=8.5,
        handlelength=1.0,
        columnspacing=1.2,
    )
