"""Weights as heatmaps: a grid of matrices on one color scale. Matplotlib is imported to draw."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEW_KEYS = 64  # up to so many keys, weights are drawn on the scale from 0 to 1


def show_heatmaps(
    matrices: Any,
    xlabel: str,
    ylabel: str,
    titles: Sequence[str] | None = None,
    figsize: tuple[float, float] = (2.5, 2.5),
    cmap: str = "Reds",
    *,
    vmin: float | None = None,
    vmax: float | None = None,
    ax: Any = None,
) -> Figure:
    """Draws a grid of matrices, such as the weights of every layer and head.

    All panels share one color scale, which the color bar states: equal colors are equal weights.
    Weights are drawn on the scale from 0 to 1 (see `color_scale`), so that uniform weights are a
    light square. (The book scales each panel by itself, so that its color bar holds for the last
    panel only, and uniform weights have the color of the largest weight.)

    Example:
        >>> import jax.numpy as jnp
        >>> from regard.show import show_heatmaps
        >>> figure = show_heatmaps(jnp.eye(4).reshape(1, 1, 4, 4), "Keys", "Queries")
        >>> figure.axes[0].get_ylabel()
        'Queries'

    Args:
        matrices: (rows, columns, T, S), any array. NaN is left blank.
        xlabel: below the last row of panels.
        ylabel: beside the first column of panels.
        titles: one per column, or one per panel in reading order.
        figsize: width and height of the whole picture, in inches.
        cmap: the name of a Matplotlib color map.
        vmin, vmax: the ends of the color scale; None: see `color_scale`.
        ax: Matplotlib axes to draw on, as many as there are matrices.

    Returns:
        The Matplotlib figure: `savefig` it, or let a notebook show it as the cell's value.
        Outside notebooks `matplotlib.pyplot.show()` opens it.

    Raises:
        ImportError: Matplotlib is not installed; the message has the pip command.
        ValueError: the matrices have no four axes, or titles or axes do not match the panels.
    """
    matrices = np.asarray(matrices)
    if matrices.ndim != 4 or 0 in matrices.shape[:2]:
        raise ValueError(
            "show_heatmaps draws matrices of shape (rows, columns, T, S), at least one panel. "
            f"Got matrices {list(matrices.shape)}. Fix: reshape one matrix to (1, 1, T, S)."
        )
    names = panel_titles(titles, matrices.shape)
    drawing = import_drawing("show_heatmaps")
    matrices = matrices.astype(np.float64)  # Matplotlib draws neither bfloat16 nor bool
    scale = color_scale(matrices, vmin, vmax)
    figure, grid = drawing.make_panels(matrices.shape, figsize, ax, titled=titles is not None)
    drawing.fill(figure, grid, matrices, cmap, scale, aspect="equal")
    for panel, name in zip(grid.flat, names, strict=True):
        panel.set_title(name)
    for panel in grid[-1]:
        panel.set_xlabel(xlabel)
    for panel in grid[:, 0]:
        panel.set_ylabel(ylabel)
    drawing.outer_ticks_only(grid)
    return drawing.finished(figure, ax)


def panel_titles(titles: Sequence[str] | None, shape: tuple[int, ...]) -> list[str]:
    """A title for each panel, from one per column or one per panel."""
    rows, columns = shape[:2]
    if titles is None:
        return [""] * (rows * columns)
    if len(titles) == columns:
        return [str(title) for title in titles] * rows
    if len(titles) == rows * columns:
        return [str(title) for title in titles]
    raise ValueError(
        f"titles must name every column, or every panel. Got {len(titles)} titles for matrices "
        f"{list(shape)}: {columns} columns, {rows * columns} panels."
    )


def printable(label: str) -> str:
    """The label with a dot for each control character, such as a newline, in every view.

    Example:
        >>> from regard.show.heatmaps import printable
        >>> printable("\\n\\x1b[31mred")
        '··[31mred'
    """

    def is_shown(letter: str) -> bool:
        # Other spaces are wide, and the two joiners are part of Persian words and of emoji.
        kind = unicodedata.category(letter)
        return letter.isprintable() or kind == "Zs" or letter in "\u200c\u200d"

    return "".join(letter if is_shown(letter) else "·" for letter in label)


def color_scale(
    weights: np.ndarray,
    vmin: float | None = None,
    vmax: float | None = None,
    *,
    signed: bool = False,
    few_keys: int = FEW_KEYS,
) -> tuple[float, float]:
    """The ends of one color scale for all weights; every view of a map uses it.

    Weights of up to 64 keys are drawn from 0 to 1. Many keys share small weights, which that scale
    would not show: past 64 it ends at the largest weight, but never below four times the mean, so
    that a uniform map stays light. Numbers outside 0 to 1 (scores, the weights of `Cone`) are drawn
    from their smallest to their largest, with 0 on the scale. Differences (`signed`) have 0 in the
    middle.

    Example:
        >>> import numpy as np
        >>> from regard.show.heatmaps import color_scale
        >>> color_scale(np.full((3, 3), 1 / 3)), color_scale(np.eye(3) - 0.5)
        ((0.0, 1.0), (-0.5, 0.5))
        >>> color_scale(np.full((1, 1024), 1 / 1024))
        (0.0, 0.00390625)
        >>> color_scale(np.array([[-0.25, 0.1]]), signed=True)
        (-0.25, 0.25)

    Args:
        weights: (..., T, S).
        vmin, vmax: what the caller asked for; None: the rule above. Of a signed scale one end is
            minus the other where only one is given.
        signed: whether the weights are differences.
        few_keys: up to so many keys, weights are drawn from 0 to 1.

    Raises:
        ValueError: vmin is not below vmax.
    """
    finite = weights[np.isfinite(weights)]
    low, high = float(finite.min(initial=0.0)), float(finite.max(initial=0.0))
    if signed:
        reach = max(-low, high) or 1.0
        low = -reach if vmax is None else -float(vmax)
        high = reach if vmin is None else -float(vmin)
    elif low >= 0.0 and high <= 1.0 + 1e-4:  # weights; sums of them may be rounded up
        many = weights.shape[-1] > few_keys and high > 0
        high = min(1.0, max(high, 4.0 * float(finite.mean()))) if many else 1.0
    low, high = low if vmin is None else float(vmin), high if vmax is None else float(vmax)
    if low < high:
        return low, high
    if vmin is None and vmax is None:
        return low, low + 1.0
    raise ValueError(f"vmin must be below vmax. Got a color scale from {low:g} to {high:g}.")


def color_reach(weights: np.ndarray, *, signed: bool) -> float:
    """The end of the color scale furthest from 0, for views with a second color below 0."""
    return max(abs(end) for end in color_scale(weights, signed=signed))


def import_drawing(caller: str) -> ModuleType:
    """`regard.show.drawing`, or the pip command for Matplotlib."""
    try:
        from regard.show import drawing
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{caller} needs Matplotlib, which is not installed.\n"
            'Install it with: pip install "regard[show]"'
        ) from error
    return drawing
