"""Matplotlib figures of weights: panels with words on the outer axes, fonts that papers accept.

Needs Matplotlib when it is imported; `heatmaps.import_drawing` does so when something is drawn.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib import pyplot
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from regard.atomic_file import write_atomically
from regard.show.heatmaps import color_scale, panel_titles, printable

if TYPE_CHECKING:
    from regard.show.attention_map import AttentionMap

CELL = 0.32  # inches, with words beside it
SMALLEST, LARGEST = 2.2, 9.0  # inches, of a panel that is alone
MOST_LABELS = 60  # beyond, only some are written
NUMBERS = 12  # up to so many rows and columns, each cell has its number
SIGNED = "RdBu"  # the colors of differences: more is blue, as in a map of weights
MANY_PANELS = 16  # beyond, letters and panels are small

# Journals refuse Type 3 fonts, and text that is text can be searched and edited.
FONTS: Any = {"pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "none"}


class PaperFigure(Figure):
    """A figure whose files hold TrueType fonts (PDF, PS) and text as text (SVG)."""

    def savefig(self, *arguments: Any, **settings: Any) -> None:
        """As Matplotlib's. A letter that no installed font has is drawn as a box, silently."""
        with matplotlib.rc_context(FONTS), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from font")
            super().savefig(*arguments, **settings)


def draw(
    seen: AttentionMap,
    *,
    cmap: str | None,
    figsize: tuple[float, float] | None,
    titles: Sequence[str] | None,
    xlabel: str,
    ylabel: str,
    vmin: float | None,
    vmax: float | None,
    ax: Any,
    colorbar: bool,
) -> Figure:
    """The figure of `AttentionMap.plot`. One color scale for all panels."""
    layers, heads, T, S = seen.weights.shape
    names = panel_titles(titles, seen.weights.shape) if titles is not None else None
    scale = color_scale(seen.weights, vmin, vmax, signed=seen.signed)
    bar = "difference" if seen.signed else "weight"
    several = layers * heads > 1
    font = 6 if layers * heads > MANY_PANELS else 9
    margins = (
        room_of(seen.query_labels, font) + 0.5,
        room_of(seen.key_labels, font) + 0.4,
        0.7 if seen.title else 0.3,
    )
    titled = titles is not None and len(titles) > heads  # a title above every panel
    if figsize is None and ax is None:
        panel = [_panel_inches(n, layers * heads) for n in (S, T)]
        figsize = (heads * panel[0] + margins[0] + 0.9, layers * panel[1] + margins[1] + margins[2])
    figure, grid = make_panels(seen.weights.shape, figsize, ax, margins, titled)
    cmap = cmap or (SIGNED if seen.signed else "Blues")
    fill(figure, grid, seen.weights, cmap, scale, aspect="auto", bar=bar if colorbar else None)
    if not several and max(T, S) <= NUMBERS:
        write_numbers(grid[0, 0])
    if names is None:
        names = [f"head {head}" if heads > 1 else "" for head in range(heads)]
    shown = grid.ravel() if titled else grid[0]
    size = title_size(shown[0], names)
    for axes, name in zip(shown, names, strict=False):
        axes.set_title(plain(name), fontsize=size)
    sides = (("y", seen.query_labels), ("x", seen.key_labels))
    if any(_fits(shown[0], side, words, font) < len(_labeled(words)) for side, words in sides):
        font = 6  # small letters on both axes, before labels are left out
    for layer, axes in enumerate(grid[:, 0]):
        parts = [f"layer {layer}"] * (layers > 1 and not titled) + [ylabel] * bool(ylabel)
        axes.set_ylabel(plain("\n".join(parts)), fontsize=10)
        label(axes, "y", seen.query_labels, font)
    for axes in grid[-1]:
        axes.set_xlabel(plain(xlabel), fontsize=10)
        label(axes, "x", seen.key_labels, font)
    outer_ticks_only(grid)
    if not several:
        grid[0, 0].xaxis.set_label_position("top")
        grid[0, 0].tick_params(top=True, labeltop=True, bottom=False, labelbottom=False)
    for axes in grid.flat:
        axes.tick_params(length=0)
    if seen.title and ax is None:
        figure.suptitle(plain(seen.title))
    return finished(figure, ax)


def make_panels(
    shape: tuple[int, ...],
    figsize: tuple[float, float] | None,
    ax: Any,
    margins: tuple[float, float, float] = (0.8, 0.6, 0.4),
    titled: bool = False,
) -> tuple[Figure, np.ndarray]:
    """A figure and its (rows, columns) axes: new ones, or the caller's.

    Args:
        margins: inches on the left, at the bottom and at the top, used for many panels. Few panels
            are laid out by Matplotlib, which measures every text: for 12 × 12, 3 s.
        titled: whether there are titles between the rows.
    """
    rows, columns = shape[:2]
    if ax is not None:
        grid = np.array(ax, dtype=object)
        if grid.size != rows * columns:
            raise ValueError(
                f"ax must have one axes for each panel. Got {grid.size} axes for {rows} × "
                f"{columns} panels (layers × heads)."
            )
        grid = grid.reshape(rows, columns)
        return grid[0, 0].get_figure(), grid
    many = rows * columns > MANY_PANELS
    figure = pyplot.figure(
        FigureClass=PaperFigure, figsize=figsize, layout=None if many else "constrained"
    )
    grid = figure.subplots(rows, columns, squeeze=False)
    if many:
        width, height = figure.get_size_inches()
        figure.subplots_adjust(
            left=min(margins[0] / width, 0.4),
            bottom=min(margins[1] / height, 0.4),
            right=max(1 - 0.9 / width, 0.6),
            top=max(1 - margins[2] / height, 0.6),
            wspace=0.08,
            hspace=0.3 if titled else 0.08,
        )
    return figure, grid


def fill(
    figure: Any,
    grid: np.ndarray,
    matrices: np.ndarray,
    cmap: str,
    scale: tuple[float, float],
    aspect: Any,
    bar: str | None = "",
) -> None:
    """Draws each matrix on its axes, and beside them the color bar with the label `bar`."""
    T, S = (max(n, 1) for n in matrices.shape[-2:])  # a side of length 0 gets room as well
    shown: Any = dict(cmap=cmap, vmin=scale[0], vmax=scale[1], aspect=aspect)
    for place, axes in np.ndenumerate(grid):
        image = axes.imshow(matrices[place], extent=(-0.5, S - 0.5, T - 0.5, -0.5), **shown)
    if bar is None:
        return
    if grid.size > MANY_PANELS and isinstance(figure, PaperFigure):
        right = figure.subplotpars.right
        beside = figure.add_axes((right + 0.15 * (1 - right), 0.3, 0.2 * (1 - right), 0.4))
        figure.colorbar(image, cax=beside, label=bar)
    else:
        figure.colorbar(image, ax=list(grid.flat), shrink=0.6, label=bar)


def outer_ticks_only(grid: np.ndarray) -> None:
    """Removes ticks and their labels from all axes but the first of a row and the last of a column.

    Shared axes would lay out and draw every one of them: 12 × 12 heads took 24 s.
    """
    for axes in grid[:-1].flat:
        axes.xaxis.set_ticks([])
    for axes in grid[:, 1:].flat:
        axes.yaxis.set_ticks([])


def figsize_of_columns(maps: Sequence[AttentionMap], rows: int) -> tuple[float, float]:
    """Inches of a figure whose columns are these maps, each cell large enough for its number."""
    T, S = maps[0].weights.shape[-2:]
    wide, high = (min(max(CELL * n, SMALLEST), LARGEST / 2) for n in (S, T))
    labels = {seen.query_labels: room_of(seen.query_labels, 9) + 0.3 for seen in maps}
    above = max(room_of(seen.key_labels, 9) for seen in maps) + 0.5
    return len(maps) * wide + sum(labels.values()) + 1.8, rows * (high + above) + 0.2


def finished(figure: Any, ax: Any) -> Figure:
    """The figure to return. In a notebook it is closed, which would otherwise show it twice."""
    if ax is None and "inline" in pyplot.get_backend():
        pyplot.close(figure)
    return figure


def write(figure: Any, path: Path, close: bool = True) -> Path:
    """Writes the figure by the ending of `path`, completely or not at all; and closes it."""
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix.lower()[1:], dpi=150)
    if close:
        pyplot.close(figure)
    write_atomically(path, picture.getvalue())
    return path


def plain(text: str) -> str:
    """Text that Matplotlib draws as it is: a dollar sign does not start a formula."""
    return text.replace("$", r"\$")


def title_size(axes: Any, titles: Sequence[str]) -> float:
    """The size of letters at which the longest title is no wider than its panel."""
    # The final layout makes a panel at least a tenth wider than Matplotlib's default margins do.
    inches = 1.1 * axes.get_window_extent().width / axes.get_figure(root=True).dpi
    return min(9.0, max(9.0 * inches / max(room_of(titles, 9), 1e-6), 5.0))


def _fits(axes: Any, side: str, labels: Sequence[str], font: float) -> int:
    """How many labels of that size fit on an axis."""
    box = axes.get_window_extent()
    inches = (box.width if side == "x" else box.height) / axes.get_figure(root=True).dpi
    # Short column labels are written side by side; all others need the height of a line.
    across = side == "x" and not upright(labels)
    return max(int(inches / (room_of(labels, font) + 0.06 if across else font * 1.1 / 72)), 1)


def upright(labels: Sequence[str]) -> bool:
    """Whether the labels of the columns are rotated by 90 degrees."""
    return any(len(labels[place]) > 2 for place in _labeled(labels))


def label(axes: Any, side: str, labels: Sequence[str], font: float) -> None:
    """Writes the labels of one axis: only some of them, where all would overlap."""
    places = _labeled(labels)
    step = places.step * -(-len(places) // _fits(axes, side, labels, font))
    places = range(0, len(labels), max(step, 1))
    words = [plain(printable(labels[place])) for place in places]
    axis, rotation = (axes.yaxis, 0) if side == "y" else (axes.xaxis, 90 * upright(labels))
    axis.set_ticks(places, words, rotation=rotation, fontsize=font)


def _labeled(labels: Sequence[str]) -> range:
    """The positions whose labels are written: all of them up to 60."""
    return range(0, len(labels), -(-max(len(labels), 1) // MOST_LABELS))


def write_numbers(axes: Any) -> None:
    """Writes each weight of the panel's image on its cell, in white where the cell is dark."""
    (image,) = axes.images
    weights = image.get_array().filled(0.0)
    size = 6.5 if weights.min(initial=0.0) < 0 else 7  # space for a minus
    for (row, column), weight in np.ndenumerate(weights):
        if abs(weight) >= 0.005:  # below, it would be "0.00"
            red, green, blue, _ = image.cmap(image.norm(weight))
            dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
            written = _short(weight).replace("-", "−")
            axes.text(
                column,
                row,
                written,
                ha="center",
                va="center",
                fontsize=size,
                color="white" if dark else "black",
            )


def _short(weight: float) -> str:
    """A weight in the width of a cell: 0.31, 46.3, 120, 1e+30."""
    size = abs(weight)
    return f"{weight:.{2 if size < 10 else 1 if size < 100 else 0}{'f' if size < 1e4 else 'e'}}"


def _panel_inches(places: int, panels: int) -> float:
    """The side of a panel on which so many rows or columns are to be labeled."""
    if panels > MANY_PANELS:
        return min(max(0.1 * places, 1.0), 4.5)
    return min(max(CELL * places, SMALLEST), LARGEST) / (2.0 if panels > 1 else 1.0)


def room_of(labels: Sequence[str], font: float) -> float:
    """Inches that the longest label takes."""
    font_of = FontProperties(size=font)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        widths = [
            text_to_path.get_text_width_height_descent(written, font_of, ismath=False)[0]
            for written in (printable(labels[place]) for place in _labeled(labels))
        ]
    return float(max(widths, default=0.0)) / 72
