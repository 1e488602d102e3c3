"""Two maps and their difference, side by side. `first - second` alone is a map of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.show.attention_map import AttentionMap
from regard.show.heatmaps import color_scale, import_drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_ROWS = 5  # of three panels


def show_difference(
    first: AttentionMap,
    second: AttentionMap,
    titles: Sequence[str] | None = None,
    *,
    xlabel: str = "",
    ylabel: str = "",
    figsize: tuple[float, float] | None = None,
    cmap: str = "Blues",
    vmin: float | None = None,
    vmax: float | None = None,
    largest: float | None = None,
    ax: Any = None,
) -> Figure:
    """Draws two maps on one color scale, and beside them what the first has more than the second.

    One row of three panels for each layer and head. The difference has a scale of its own, with 0
    in the middle. For many heads draw `(first - second).plot()`: one panel for each.

    Example:
        >>> import numpy as np
        >>> from regard.show import AttentionMap, show_difference
        >>> before, after = AttentionMap(np.full((3, 3), 1 / 3)), AttentionMap(np.eye(3))
        >>> figure = show_difference(after, before, ["after", "before", "difference"])
        >>> [axes.get_title() for axes in figure.axes[:3]]
        ['after', 'before', 'difference']

    Args:
        first, second: maps of the same rows and columns, and of the same layers and heads or one.
        titles: three, above the columns. None: the maps' own titles.
        xlabel, ylabel: names of the axes.
        figsize: width and height in inches; None: large enough for the labels.
        cmap: the name of a Matplotlib color map, of the two maps.
        vmin, vmax: the ends of the two maps' color scale; None: see `color_scale`.
        largest: the end of the difference's scale, which begins at minus that. None: its largest
            number.
        ax: Matplotlib axes to draw on, three for each layer and head.

    Raises:
        ImportError: Matplotlib is not installed; the message has the pip command.
        ValueError: maps of different rows or columns, more than 5 heads, or titles or axes that do
            not match the panels.
    """
    difference = first - second
    layers, heads, T, S = difference.weights.shape
    rows = layers * heads
    if rows > MOST_ROWS:
        raise ValueError(
            f"show_difference draws up to {MOST_ROWS} layers × heads. Got {layers} × {heads}. "
            "Fix: (first - second).plot(), one panel for each head."
        )
    if titles is None:
        titles = [first.title or "first", second.title or "second", "difference"]
    if len(titles) != 3:
        raise ValueError(f"titles must be three, above the columns. Got {len(titles)} titles.")
    drawing = import_drawing("show_difference")
    maps = (first, second, difference)
    if figsize is None and ax is None:
        figsize = drawing.figsize_of_columns(maps, rows)
    figure, grid = drawing.make_panels((rows, 3), figsize, ax)
    both = np.stack([np.broadcast_to(seen.weights, difference.weights.shape) for seen in maps[:2]])
    scale = color_scale(both, vmin, vmax)
    scales = [scale, scale, color_scale(difference.weights, vmax=largest, signed=True)]
    for row, column in np.ndindex(rows, 3):
        seen, (low, high) = maps[column], scales[column]
        weights = np.broadcast_to(seen.weights, difference.weights.shape).reshape(rows, T, S)
        head = f"layer {row // heads}, head {row % heads}\n" if rows > 1 else ""
        one = AttentionMap(weights[row], seen.query_labels, seen.key_labels, signed=column == 2)
        one.plot(
            ax=grid[row, column],
            titles=["" if row else titles[column]],
            xlabel=xlabel,
            ylabel="" if column else head + ylabel,
            vmin=low,
            vmax=high,
            cmap=cmap if column < 2 else None,
            colorbar=False,
        )
        if column and seen.query_labels == first.query_labels:
            grid[row, column].set_yticks([])
    for panels, name in ((grid[:, :2], "weight"), (grid[:, 2:], "difference")):
        figure.colorbar(panels[0, -1].images[0], ax=list(panels.flat), shrink=0.6, label=name)
    return drawing.finished(figure, ax)
