"""Weights as heatmaps: a grid of matrices on one color scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def show_heatmaps(
    matrices: Any,
    xlabel: str,
    ylabel: str,
    titles: Sequence[str] | None = None,
    figsize: tuple[float, float] = (2.5, 2.5),
    cmap: str = "Reds",
) -> Figure:
    """Draws a grid of matrices, such as the weights of every layer and head.

    All panels share one color scale, which the color bar states, and zero is always on it: equal
    colors are equal weights, and white is no weight. (The book scales each panel by itself, so
    that its color bar holds for the last panel only.)

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
        titles: one per column.
        figsize: width and height of the whole picture, in inches.
        cmap: the name of a Matplotlib color map.

    Returns:
        The Matplotlib figure: `savefig` it, or let a notebook show it as the cell's value.
        Outside notebooks `matplotlib.pyplot.show()` opens it.

    Raises:
        ImportError: Matplotlib is not installed; the message has the pip command.
        ValueError: the matrices have no four axes, or there are fewer titles than columns.
    """
    matrices = np.asarray(matrices)
    if matrices.ndim != 4 or 0 in matrices.shape[:2]:
        raise ValueError(
            "show_heatmaps draws matrices of shape (rows, columns, T, S), at least one panel. "
            f"Got matrices {list(matrices.shape)}. Fix: reshape one matrix to (1, 1, T, S)."
        )
    rows, columns = matrices.shape[:2]
    if titles is not None and len(titles) < columns:
        raise ValueError(
            f"titles must name every column. Got {len(titles)} titles for matrices "
            f"{list(matrices.shape)}, {columns} columns."
        )
    plt = pyplot("show_heatmaps")
    matrices = matrices.astype(np.float64)  # bfloat16 and bool are drawn too
    low, high = shared_scale(matrices)
    figure, grid = plt.subplots(
        rows, columns, figsize=figsize, sharex=True, sharey=True, squeeze=False
    )
    for i in range(rows):
        for j in range(columns):
            image = grid[i, j].imshow(matrices[i, j], cmap=cmap, vmin=low, vmax=high)
            if i == rows - 1:
                grid[i, j].set_xlabel(xlabel)
            if j == 0:
                grid[i, j].set_ylabel(ylabel)
            if titles is not None:
                grid[i, j].set_title(titles[j])
    figure.colorbar(image, ax=grid, shrink=0.6)
    if "inline" in plt.get_backend():
        plt.close(figure)  # the notebook shows the returned figure; left open, it would twice
    return figure


def shared_scale(matrices: np.ndarray) -> tuple[float, float]:
    """The ends of one color scale for all matrices, zero between them."""
    finite = matrices[np.isfinite(matrices)]
    low, high = float(finite.min(initial=0.0)), float(finite.max(initial=0.0))
    # Where every weight is zero, it is still a scale with two ends.
    return (low, high) if low < high else (low, 1.0)


def pyplot(caller: str) -> Any:
    """Matplotlib's pyplot, or the pip command for it."""
    try:
        from matplotlib import pyplot
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{caller} needs Matplotlib, which is not installed.\n"
            'Install it with: pip install "regard[show]"'
        ) from error
    return pyplot
