"""The book's line plots, and the board on which training is drawn; heatmaps: regard.show."""

import atexit
import importlib
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from regard.atomic_file import write_atomically

__all__ = ["plot", "set_axes", "set_figsize", "use_svg_display", "ProgressBoard"]


def pyplot() -> Any:
    """matplotlib.pyplot, which the book's pages call d2l.plt; imported when it is asked for."""
    return _matplotlib("pyplot")


def _matplotlib(module: str) -> Any:
    try:
        importlib.import_module("matplotlib")
    except ModuleNotFoundError as error:
        raise ImportError(
            "The plots of regard.d2l need Matplotlib, which is not installed.\n"
            'Install it with: pip install "regard[show]"'
        ) from error
    return importlib.import_module(f"matplotlib.{module}")


def in_notebook() -> bool:
    """Whether figures can be shown by a Jupyter kernel (IPython's terminal cannot show them)."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None


def use_svg_display() -> None:
    """Figures as SVG, in a notebook; anywhere else there is nothing to do."""
    if in_notebook():
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


class ProgressBoard:
    """Curves that grow while something is computed: live in a notebook, else a PNG file.

    The file is written now and then (it takes at most a twentieth of the time) and whole when a
    `Trainer` ends, when `save` is called, or when Python exits.

    Example:
        >>> import math, tempfile
        >>> from pathlib import Path
        >>> from regard import d2l
        >>> board = d2l.ProgressBoard("x", path=Path(tempfile.mkdtemp()) / "waves.png")
        >>> for x in range(20):
        ...     board.draw(x / 2, math.sin(x / 2), "sin", every_n=2)
        ...     board.draw(x / 2, math.cos(x / 2), "cos", every_n=5)
        >>> board.save()
        >>> len(board.data["sin"]), len(board.data["cos"]), board.path.exists()
        (10, 4, True)

    Args:
        xlabel, ylabel, xlim, ylim, xscale, yscale: of the axes.
        ls, colors: line styles and colors, one after another.
        fig, axes: Matplotlib's, to draw on; None: its own.
        figsize: in inches.
        display: False draws nothing; the points are kept all the same.
        path: the PNG file, outside a notebook.

    Attributes:
        data: label -> the points drawn, (x, y), each the mean of every_n.
    """

    def __init__(
        self,
        xlabel: str | None = None,
        ylabel: str | None = None,
        xlim: Any = None,
        ylim: Any = None,
        xscale: str = "linear",
        yscale: str = "linear",
        ls: Sequence[str] = ("-", "--", "-.", ":"),
        colors: Sequence[str] = ("C0", "C1", "C2", "C3"),
        fig: Any = None,
        axes: Any = None,
        figsize: tuple[float, float] = (3.5, 2.5),
        display: bool = True,
        path: str | Path = "progress.png",
    ) -> None:
        self.xlabel, self.ylabel, self.xlim, self.ylim = xlabel, ylabel, xlim, ylim
        self.xscale, self.yscale, self.ls, self.colors = xscale, yscale, ls, colors
        self.fig, self.axes, self.figsize, self.display = fig, axes, figsize, display
        self.path = Path(path)
        self.data: dict[str, list[tuple[float, float]]] = {}
        self._waiting: dict[str, list[tuple[Any, Any]]] = {}
        self._unsaved, self._next_save = False, 0.0
        self._shown: Any = None  # in a notebook, the handle of the output that is updated

    def draw(self, x: Any, y: Any, label: str, every_n: int = 1) -> None:
        """Adds a point to the curve `label`; the mean of each every_n points is drawn."""
        waiting = self._waiting.setdefault(label, [])
        waiting.append((x, y))
        if len(waiting) < every_n:
            return
        mean = np.asarray([(float(x), float(y)) for x, y in waiting]).mean(0)
        self.data.setdefault(label, []).append((float(mean[0]), float(mean[1])))
        waiting.clear()
        if not self.display:
            return
        if in_notebook():
            use_svg_display()
            # Updated in place: clear_output would remove what else the cell has printed.
            if self._shown is None:
                display = importlib.import_module("IPython.display").display
                self._shown = display(self._drawn(), display_id=True)
            else:
                self._shown.update(self._drawn())
            return
        if self._next_save == 0.0:
            _matplotlib("figure")  # better missing now than after the training
            atexit.register(self.save)
        self._unsaved = True
        if time.monotonic() >= self._next_save:
            self.save()

    def clear(self) -> None:
        """Forgets all points; what is drawn next in a notebook is a new picture."""
        self.data.clear()
        self._waiting.clear()
        self._shown = None

    def save(self) -> None:
        """Writes the PNG file, outside a notebook and where there is something new."""
        if not self._unsaved:
            return
        began = time.monotonic()
        figure = self._drawn()
        write_atomically(self.path, lambda file: figure.savefig(file, format="png", dpi=150))
        self._unsaved = False
        self._next_save = time.monotonic() + 20 * (time.monotonic() - began)

    def _drawn(self) -> Any:
        # Not pyplot's figure: a board opens no window, and leaves the page's own figures alone.
        if self.axes is None:
            self.fig = _matplotlib("figure").Figure(figsize=self.figsize, layout="constrained")
            self.axes = self.fig.add_subplot()
        self.axes.cla()
        styles = zip(itertools.cycle(self.ls), itertools.cycle(self.colors), strict=False)
        for (label, points), (style, color) in zip(self.data.items(), styles, strict=False):
            self.axes.plot(*np.transpose(points), linestyle=style, color=color, label=label)
        set_axes(
            self.axes,
            self.xlabel,
            self.ylabel,
            self.xlim,
            self.ylim,
            self.xscale,
            self.yscale,
            list(self.data),
        )
        return self.axes.figure
