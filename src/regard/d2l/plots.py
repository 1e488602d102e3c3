"""The book's line plots, as far as its attention chapter draws them; heatmaps: regard.show."""

import importlib
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["plot", "set_axes", "set_figsize", "use_svg_display"]


def pyplot() -> Any:
    """matplotlib.pyplot, which the book's pages call d2l.plt; imported when it is asked for."""
    try:
        from matplotlib import pyplot
    except ModuleNotFoundError as error:
        raise ImportError(
            "The plots of regard.d2l need Matplotlib, which is not installed.\n"
            'Install it with: pip install "regard[show]"'
        ) from error
    return pyplot


def use_svg_display() -> None:
    """Figures as SVG, in a notebook; anywhere else there is nothing to do."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        importlib.import_module("matplotlib_inline.backend_inline").set_matplotlib_formats("svg")


def set_figsize(figsize: tuple[float, float] = (3.5, 2.5)) -> None:
    """The size of the figures to come, in inches."""
    use_svg_display()
    pyplot().rcParams["figure.figsize"] = figsize


def set_axes(
    axes: Any,
    xlabel: str | None,
    ylabel: str | None,
    xlim: Any,
    ylim: Any,
    xscale: str,
    yscale: str,
    legend: Sequence[str] | None,
) -> None:
    """Labels, limits, scales, legend and a grid, on Matplotlib axes."""
    axes.set(xlabel=xlabel, ylabel=ylabel, xscale=xscale, yscale=yscale, xlim=xlim, ylim=ylim)
    if legend:
        axes.legend(legend)
    axes.grid()


def plot(
    X: Any,
    Y: Any = None,
    xlabel: str | None = None,
    ylabel: str | None = None,
    legend: Sequence[str] = (),
    xlim: Any = None,
    ylim: Any = None,
    xscale: str = "linear",
    yscale: str = "linear",
    fmts: Sequence[str] = ("-", "m--", "g-.", "r:"),
    figsize: tuple[float, float] = (3.5, 2.5),
    axes: Any = None,
) -> None:
    """Draws lines: plot(Y), plot(X, Y), or plot(X, [Y1, Y2]) with an X for all or one for each.

    More lines than fmts start over with the first (the book leaves them out).
    """
    lines = _curves(X if Y is None else Y)
    across = [None] * len(lines) if Y is None else _curves(X)
    if len(across) == 1:
        across = across * len(lines)
    if len(across) != len(lines):
        raise ValueError(
            f"plot needs one X, or one for each Y. Got {len(across)} X for {len(lines)} Y."
        )
    set_figsize(figsize)
    if axes is None:
        axes = pyplot().gca()
        # At the book's size Matplotlib's own margins cut the x label off.
        axes.figure.set_layout_engine("constrained")
    axes.cla()
    for x, y, fmt in zip(across, lines, itertools.cycle(fmts)):
        axes.plot(*([y] if x is None else [x, y]), fmt)
    set_axes(axes, xlabel, ylabel, xlim, ylim, xscale, yscale, legend)


def _curves(values: Any) -> list[Any]:
    """A curve, or the curves: one-dimensional arrays."""
    one = np.ndim(values[0]) == 0 if len(values) else True
    return [np.asarray(curve) for curve in ([values] if one else values)]
