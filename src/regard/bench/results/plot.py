"""Cost against sequence length as a picture: time and memory, both axes logarithmic."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from regard.bench.results.curves import BACKWARD, Curves, median_ms, sweep_case, swept
from regard.bench.results.record import file_stem

# Curve -> color, marker, label; other curves are not drawn. Dashes mean forward+backward.
_STYLES = {
    "book": ("#b5523b", "s", "the book's form"),
    "regard": ("#1f5fa8", "o", "regard"),
    "regard 0.001": ("#4aa5c4", "^", "regard, 1e-3"),
    "jax.nn cudnn, dot": ("#8b929a", "D", "dot, cuDNN"),
}
INK, FAINT = "#22262b", "#8b929a"
_LABEL_GAP = 13  # points between two labels
WITH_BACKWARD = " + backward"


def draw_lengths(record: dict[str, Any], folder: Path) -> Path | None:
    """Draws the sweeps of a record; None when it holds fewer than two lengths.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # no global state, no display
    from matplotlib.ticker import FuncFormatter, LogLocator

    curves = {
        name: curve
        for name, curve in swept(record).items()
        if name.removesuffix(BACKWARD) in _STYLES
    }
    if max((len(curve) for curve in curves.values()), default=0) < 2:
        return None
    figure = Figure(figsize=(12.6, 5.4), dpi=160, facecolor="white")
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.07, right=0.855, bottom=0.12, top=0.8, wspace=0.62)
    trained = any(
        row["ms"] for name in curves if name.endswith(BACKWARD) for row in curves[name].values()
    )
    _panel(left, curves, median_ms, "Time" if trained else "Time, forward", crowded=True)
    left.yaxis.set_major_locator(LogLocator(base=10))
    left.yaxis.set_major_formatter(FuncFormatter(_time))
    _panel(right, curves, lambda row: row["temp_mib"], "Memory for temporaries")
    right.yaxis.set_major_locator(LogLocator(base=4))
    right.yaxis.set_major_formatter(FuncFormatter(_memory))
    title(figure, record, "Additive attention: cost against sequence length", _what(record))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{file_stem(record)}.png"
    figure.savefig(path)
    return path


def title(figure: Any, record: dict[str, Any], words: str, what: str, inches: float = 5.4) -> None:
    """Writes what a picture of that height shows, and below that what was measured, and where."""
    device = record["device"]
    where = f"{device['name']}, {device['cores']} cores"
    if device["platform"] != "cpu":
        where = device["name"]
    fine = f"{what} {where}, jax {record['versions']['jax']}, {record['date'][:10]}."
    figure.text(0.07, 1 - 0.32 / inches, words, fontsize=15, fontweight="bold", color=INK)
    figure.text(0.07, 1 - 0.6 / inches, fine, fontsize=9.5, color=FAINT)


def _what(record: dict[str, Any]) -> str:
    case = sweep_case(record)
    shapes = f"B={case['B']}, T=S, h=V={case['D']}, {case['dtype']}."
    return f"{shapes} Default tolerance, or as said; dashes: forward and backward."


def _panel(
    axes: Any,
    curves: Curves,
    value_of: Callable[[dict[str, Any]], float | None],
    title: str,
    crowded: bool = False,
) -> None:
    ends = []
    for name, curve in curves.items():
        base, backward = name.removesuffix(BACKWARD), name.endswith(BACKWARD)
        color, marker, label = _STYLES[base]
        points = []
        for length, row in sorted(curve.items()):
            if value := value_of(row):  # a zero has no logarithm
                points.append((length, value))
        if not points:
            continue
        lengths, values = zip(*points, strict=True)
        axes.plot(
            lengths,
            values,
            color=color,
            marker=marker,
            markersize=4.5,
            linewidth=1.8,
            linestyle="--" if backward else "-",
        )
        ends.append((lengths[-1], values[-1], label + (WITH_BACKWARD if backward else ""), color))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({length for curve in curves.values() for length in curve})
    axes.set_xticks(ticks, [f"{t // 1024}k" if t >= 1024 else str(t) for t in ticks])
    axes.minorticks_off()
    axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold", color=INK, pad=10)
    axes.set_xlabel("T = S, tokens", color=INK)
    axes.grid(True, color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(FAINT)
    _label(axes, ends, crowded)


def _label(axes, ends, crowded: bool) -> None:
    """Writes each curve's name at its end, pushed apart where two would touch."""
    scale = 72 / axes.figure.dpi  # pixels to points
    last = max((end[0] for end in ends), default=0)
    labels = {label for *_, label, _ in ends}
    taken: dict[float, float] = {}  # by length: the height of the highest label so far
    for length, value, label, color in sorted(ends, key=lambda end: (end[0], end[1])):
        height = axes.transData.transform((length, value))[1] * scale
        at = max(height, taken.get(length, float("-inf")) + _LABEL_GAP)
        taken[length] = at
        # Times lie close together: right of a curve that ends early is another one, and left of the
        # upper of two there is room. Color and dashes tell whose the other curve is.
        early = crowded and length < last
        if early and label + WITH_BACKWARD in labels:
            continue
        axes.annotate(
            label.removesuffix(WITH_BACKWARD) if early else label,
            (length, value),
            xytext=(-9 if early else 9, at - height + (3 if early else 0)),
            textcoords="offset points",
            ha="right" if early else "left",
            va="center",
            fontsize=9.5,
            color=color,
            annotation_clip=False,
        )


def _time(ms: float, _position: int) -> str:
    if ms >= 1000:
        return f"{ms / 1000:g} s"
    return f"{ms:g} ms" if ms >= 1 else f"{1000 * ms:g} µs"


def _memory(mib: float, _position: int) -> str:
    if mib >= 1024:
        return f"{mib / 1024:g} GiB"
    return f"{mib:g} MiB" if mib >= 1 else f"{mib * 1024:g} KiB"
