"""The figure of `Contributions.plot`: weights, contributions to every key, and to the one.

Needs Matplotlib.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import pyplot
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from regard.show import drawing
from regard.show.heatmaps import color_scale

if TYPE_CHECKING:
    from regard.show.contributions import Contributions

MORE, LESS = "#2166ac", "#b2182b"  # near the ends of drawing.SIGNED


def draw_contributions(
    why: Contributions,
    most: int,
    title: str | None,
    figsize: tuple[float, float] | None,
    cmap: str,
    vmin: float | None,
    vmax: float | None,
    ax: Any,
) -> Figure:
    """The figure of `Contributions.plot`."""
    names, rows = why.rows(most)
    low, high = color_scale(rows, vmin, vmax, signed=True)
    R, S = rows.shape
    if ax is None:
        if figsize is None:
            wide = min(max(drawing.CELL * S, 2.6), drawing.LARGEST)
            below = drawing.room_of(why.key_labels, 9) if drawing.upright(why.key_labels) else 0.15
            figsize = (wide + drawing.room_of(names, 9) + 3.6, drawing.CELL * 0.8 * R + below + 1.7)
        figure = pyplot.figure(
            FigureClass=drawing.PaperFigure, figsize=figsize, layout="constrained"
        )
        wide = figsize[0] - drawing.room_of(names, 9) - 3.6
        above, corner, middle, right = figure.subplots(
            2,
            2,
            width_ratios=[max(wide, 1.0), 2.2],
            height_ratios=[0.9, max(drawing.CELL * 0.8 * R, 0.9)],
        ).flat
        corner.axis("off")
    else:
        above, middle, right = _three(ax)
        figure = above.get_figure()
    marked = [MORE if s == why.place else "#8a8f98" for s in range(S)]
    above.bar(np.arange(S), why.weights, color=marked, width=0.8)
    above.set_xlim(-0.5, S - 0.5)
    above.set_ylim(0, max(float(why.weights.max()) * 1.05, 1e-6))
    above.set_ylabel("weight", fontsize=9)
    above.set_xticks([])
    middle.imshow(np.ma.masked_invalid(rows), cmap=cmap, vmin=low, vmax=high, aspect="auto")
    middle.add_patch(
        Rectangle((why.place - 0.5, -0.5), 1, R, fill=False, edgecolor=MORE, linewidth=1.5)
    )
    if max(R, S) <= drawing.NUMBERS + 2:
        drawing.write_numbers(middle)
    drawing.label(middle, "y", names, 8)
    drawing.label(middle, "x", why.key_labels, 9 if S <= drawing.MOST_LABELS // 2 else 6)
    units = rows[:, why.place]
    colors = [MORE if one >= 0 else LESS for one in units]
    bars = right.barh(np.arange(R), units, color=colors, height=0.7)
    labels = [f"{one:+.2f}".replace("-", "−") for one in units]
    right.bar_label(bars, labels, padding=3, fontsize=7)
    reach = float(np.abs(units).max(initial=0.0)) or 1.0
    right.set_xlim(
        min(units.min(initial=0.0), 0.0) - 0.35 * reach,
        max(units.max(initial=0.0), 0.0) + 0.35 * reach,
    )
    right.axvline(0, color="#8a8f98", linewidth=0.8)
    right.set_ylim(R - 0.5, -0.5)
    right.set_yticks([])
    chosen = drawing.plain(why.key_labels[why.place])
    right.set_xlabel(f"to “{chosen}”: sum {why.total:+.2f}".replace("-", "−"), fontsize=9)
    right.tick_params(labelsize=7)
    for axes in (above, right):
        axes.spines[["top", "right"]].set_visible(False)
    middle.tick_params(length=0)
    above.tick_params(labelsize=7)
    if ax is None:
        figure.suptitle(drawing.plain(str(why) if title is None else title), fontsize=10)
    return drawing.finished(figure, ax)


def _three(ax: Any) -> list[Any]:
    axes = list(np.array(ax, dtype=object).ravel())
    if len(axes) != 3:
        raise ValueError(
            "ax must be three axes: for the weights, the contributions and the bars. "
            f"Got {len(axes)} axes."
        )
    return axes
