"""An `AttentionMap` on the terminal: shaded cells, words beside them, within a given width."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from regard.show import shades
from regard.show.heatmaps import color_reach, printable

if TYPE_CHECKING:
    from regard.show.attention_map import AttentionMap

CELL = 4  # characters of a numbered cell, at least: a space and three digits
LABEL = 16  # characters of a row's label, at most
ROWS = 60  # more are averaged


def print_map(
    seen: AttentionMap, layer: int, head: int, width: int, console: Console | None
) -> None:
    """Prints colored numbers where they fit, and shaded cells where there are many columns.

    Columns that still do not fit are averaged in groups, which a last line says.
    """
    out = console or Console(width=width, highlight=False, file=sys.stdout)
    layers, heads = seen.weights.shape[:2]
    if not (0 <= layer < layers and 0 <= head < heads):
        raise ValueError(
            f"layer must be below {layers} and head below {heads}. Got layer {layer}, head {head}."
        )
    weights = seen.weights[layer, head]
    T, S = weights.shape
    label = min(max((cell_len(text) for text in seen.query_labels), default=0), LABEL)
    room = width - label - 1
    if seen.title:
        out.print(Text(seen.title, style="bold"))
    fits = room >= S * CELL and T <= ROWS
    numbers = [[shades.number(float(weight)) for weight in row] for row in weights if fits]
    cell = 1 + max([CELL - 1, *(len(number) for row in numbers for number in row)])
    if fits and room >= S * cell:
        lines = _numbered(seen, weights, numbers, label, cell)
    else:
        lines = _shaded(seen, weights, label, room)
    for line in lines:
        out.print(line, no_wrap=True, overflow="crop")


def _numbered(
    seen: AttentionMap, weights: np.ndarray, numbers: list[list[str]], label: int, cell: int
) -> list[Text]:
    """Lines with a number in each cell, on its color, below headings."""
    lines = [
        Text(" " * label).append(row) for row in _headings(seen.key_labels, cell, weights.shape[1])
    ]
    top = color_reach(weights, signed=seen.signed)
    for name, row, written in zip(seen.query_labels, weights, numbers, strict=True):
        line = Text(_right(name, label))
        for weight, number in zip(row, written, strict=True):
            style = "dim" if weight == 0 else shades.style(float(weight) / top)
            line.append(" ").append(number.rjust(cell - 1), style=style)
        lines.append(line)
    return lines


def _shaded(seen: AttentionMap, weights: np.ndarray, label: int, room: int) -> list[Text]:
    """Lines of shaded cells, one or two characters wide; averages of groups if there are many."""
    T, S = weights.shape
    down, across = -(-T // ROWS), -(-S // room)
    cell = 2 if room >= 2 * S else 1
    grouped = _averaged(weights, down, across)
    top = color_reach(grouped, signed=seen.signed)
    lines = []
    for index, row in enumerate(grouped):
        line = Text(_right(seen.query_labels[index * down], label) + " ")
        for weight in row:
            if weight == 0:
                line.append("·".ljust(cell), style="dim")
            else:
                part = float(weight) / top
                line.append(shades.shade(part) * cell, style=shades.style(part))
        lines.append(line)
    if down > 1 or across > 1:
        lines.append(Text(f"each cell: the average of {down} × {across} weights", style="dim"))
    return lines


def _headings(labels: tuple[str, ...], cell: int, columns: int) -> list[str]:
    """Column headings, spread over as many lines as they need to stay apart."""
    longest = max((cell_len(label) for label in labels), default=0)
    levels = min(-(-(longest + 1) // cell), 4)
    rows = [[" "] * (columns * cell + longest) for _ in range(levels)]
    for column, label in enumerate(labels):
        room = levels * cell - 1
        written = _fit(label, room)
        wide = cell_len(written)  # a Chinese character takes two columns
        start = max((column + 1) * cell - wide, 0)
        rows[column % levels][start : start + wide] = [written, *[""] * (wide - 1)][:wide]
    return ["".join(row).rstrip() for row in rows]


def _averaged(weights: np.ndarray, down: int, across: int) -> np.ndarray:
    """Means over groups of rows and columns; the last group may be smaller."""
    for axis, size in ((0, down), (1, across)):
        starts = np.arange(0, weights.shape[axis], size)
        counts = np.diff(np.append(starts, weights.shape[axis]))
        sums = np.add.reduceat(weights, starts, axis=axis)
        weights = sums / (counts[:, None] if axis == 0 else counts[None, :])
    return weights


def _fit(label: str, width: int) -> str:
    """The label in at most `width` cells: an ellipsis where it is cut, no control characters."""
    clean = printable(label)
    if cell_len(clean) <= width:
        return clean
    return set_cell_size(clean, max(width - 1, 0)).rstrip() + "…"


def _right(label: str, width: int) -> str:
    """The label at the right end of `width` cells; a Chinese character takes two."""
    fitted = _fit(label, width)
    return " " * (width - cell_len(fitted)) + fitted
