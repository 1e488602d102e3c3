"""An `AttentionMap` as a Matplotlib figure: a panel for each layer and head, words on the axes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.show.heatmaps import pyplot, shared_scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from regard.show.attention_map import AttentionMap

CELL = 0.32  # inches, with words beside it
SMALLEST, LARGEST = 2.2, 9.0  # inches, of a panel
MOST_LABELS = 60  # beyond, only some are written
NUMBERS = 12  # up to so many rows and columns, each cell has its number


def draw(seen: AttentionMap, cmap: str, figsize: tuple[float, float] | None) -> Figure:
    """One figure. All panels share one color scale, zero on it: equal colors are equal weights."""
    plt = pyplot("AttentionMap.plot")
    layers, heads, T, S = seen.weights.shape
    low, high = shared_scale(seen.weights)
    several = layers * heads > 1
    if figsize is None:
        shrink = 2.0 if several else 1.0
        panel = [min(max(CELL * n, SMALLEST), LARGEST) / shrink for n in (S, T)]
        words = _room(seen.query_labels), _room(seen.key_labels)
        figsize = (heads * panel[0] + words[0] + 1.0, layers * panel[1] + words[1] + 0.6)
    figure, grid = plt.subplots(
        layers,
        heads,
        figsize=figsize,
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for layer in range(layers):
        for head in range(heads):
            axes = grid[layer, head]
            weights = seen.weights[layer, head]
            image = axes.imshow(weights, cmap=cmap, vmin=low, vmax=high, aspect="auto")
            if several:
                axes.set_title(_name(layer, head, layers, heads), fontsize=9)
            elif max(T, S) <= NUMBERS:
                _write_numbers(axes, weights, low, high)
            _label(axes, seen.query_labels, seen.key_labels, top=not several)
    figure.colorbar(image, ax=grid, shrink=0.6, label="weight")
    if seen.title:
        figure.suptitle(_plain(seen.title))
    if "inline" in plt.get_backend():
        plt.close(figure)  # the notebook shows the returned figure; left open, it would twice
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure and lets go of it; what no font can draw is no reason to complain."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(path, dpi=150)
    pyplot("AttentionMap.save").close(figure)


def _label(axes: Any, rows: Any, columns: Any, top: bool) -> None:
    for axis, labels in ((axes.yaxis, rows), (axes.xaxis, columns)):
        step = -(-max(len(labels), 1) // MOST_LABELS)
        places = list(range(0, len(labels), step))
        rotation = 90 if axis is axes.xaxis and any(len(labels[i]) > 2 for i in places) else 0
        axis.set_ticks(places, [_plain(labels[i]) for i in places], rotation=rotation, fontsize=9)
    axes.tick_params(length=0, top=top, labeltop=top, bottom=not top, labelbottom=not top)


def _write_numbers(axes: Any, weights: Any, low: float, high: float) -> None:
    for row, line in enumerate(weights):
        for column, weight in enumerate(line):
            if abs(weight) >= 0.005:  # "0.00" says nothing that white does not
                color = "white" if (weight - low) / (high - low) > 0.6 else "black"
                text = f"{weight:.2f}"
                axes.text(column, row, text, ha="center", va="center", fontsize=7, color=color)


def _plain(text: str) -> str:
    """Text as it stands: a dollar sign is no mathematics."""
    return text.replace("$", r"\$")


def _room(labels: Any) -> float:
    """Inches that the longest label takes."""
    return 0.09 * max((len(label) for label in labels), default=0) + 0.2


def _name(layer: int, head: int, layers: int, heads: int) -> str:
    parts = [f"layer {layer}"] * (layers > 1) + [f"head {head}"] * (heads > 1)
    return ", ".join(parts)
