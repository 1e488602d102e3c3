"""Images as keys: attention to the patches of a picture, laid over the picture.

A vision Transformer cuts a picture into patches and makes a key of each, row by row. Here each
weight becomes a tint of its patch; nothing is smoothed, because there are no weights in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.show.heatmaps import color_scale, import_drawing, panel_titles

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def show_patches(
    image: Any,
    weights: Any,
    *,
    grid: tuple[int, int] | None = None,
    before: int = 0,
    asked: Sequence[int] | None = None,
    titles: Sequence[str] | None = None,
    figsize: tuple[float, float] | None = None,
    cmap: str = "Oranges",
    vmin: float | None = None,
    vmax: float | None = None,
    ax: Any = None,
    colorbar: bool = True,
) -> Figure:
    """Draws the weights of a picture's patches over the picture, one panel for each query or head.

    The picture is drawn in gray, and each patch is tinted by its weight: no tint is a weight of 0
    (the smallest, where some are negative), and equal tints are equal weights in all panels.
    Without `ax`, one row of panels begins with the picture as it is and the lines along which it
    was cut. The color scale is that of many keys (see `color_scale`) however few patches there are:
    it ends at the largest weight, but never below four times the mean.

    Example:
        >>> import numpy as np
        >>> from regard.show import show_patches
        >>> image = np.linspace(0, 1, 32 * 32).reshape(32, 32)
        >>> weights = np.random.default_rng(0).dirichlet(np.ones(17), size=3)  # 3 heads
        >>> figure = show_patches(image, weights, before=1)  # one class token, then 4 × 4 patches
        >>> [axes.get_title() for axes in figure.axes[:4]]
        ['4 × 4 patches', 'head 0', 'head 1', 'head 2']

    Args:
        image: (H, W), (H, W, 1), (H, W, 3) or (H, W, 4): numbers from 0 to 1, or bytes.
        weights: (S,), (panels, S) or (rows, panels, S), such as (layers, heads, S): the weights of
            one query each. S is `before` plus the number of patches, in reading order.
        grid: rows and columns of patches. None: square patches, as far as the numbers allow.
        before: how many keys come before the patches, such as one class token. Their weight is
            written below the panel.
        asked: for each panel the query patch, which gets a frame; -1 for none.
        titles: one for each column of panels, or for each panel, instead of the heads' numbers.
        figsize: width and height in inches.
        cmap: the name of a Matplotlib color map from light to dark.
        vmin, vmax: the ends of the color scale.
        ax: Matplotlib axes to draw on, one for each query or head.
        colorbar: whether to draw the color bar.

    Raises:
        ImportError: Matplotlib is not installed; the message has the pip command.
        ValueError: a picture of another shape or range, weights that are not finite or do not match
            the patches, or titles or axes that do not match the panels.
    """
    picture = _picture(image)
    given = np.asarray(weights)
    if not 1 <= given.ndim <= 3 or 0 in given.shape:
        raise ValueError(
            "weights must be (S,), (panels, S) or (rows, panels, S), the weights of one query "
            f"each. Got weights {list(given.shape)}. Fix for (T, S): choose "
            "queries, weights[[5, 9]]."
        )
    panels = given.reshape((1,) * (3 - given.ndim) + given.shape).astype(np.float64)
    if not np.isfinite(panels).all():
        raise ValueError(
            f"weights must be finite. Got weights {list(given.shape)} with NaN or Inf."
        )
    rows, columns = _grid(grid, panels.shape[-1] - before, picture, given, before)
    patches = panels[..., before:].reshape(*panels.shape[:2], rows, columns)
    if asked is not None and not (
        len(asked) == panels[..., 0].size and all(-1 <= one < rows * columns for one in asked)
    ):
        raise ValueError(
            f"asked must name a patch below {rows * columns} for each of {panels[..., 0].size} "
            f"panels, or -1. Got {list(asked)}."
        )
    names = _names(titles, patches.shape)
    scale = color_scale(patches.reshape(-1, rows * columns), vmin, vmax, few_keys=0)
    drawing = import_drawing("show_patches")
    from regard.show import patches_figure as parts

    whole = ax is None and patches.shape[0] == 1  # a first panel for the picture as it is
    shape = (patches.shape[0], patches.shape[1] + whole)
    if figsize is None and ax is None:
        figsize = parts.figsize_of_pictures(shape, picture.shape[0] / picture.shape[1], before > 0)
    figure, axes = drawing.make_panels(shape, figsize, ax)
    if whole:
        parts.draw_picture(axes[0, 0], picture, rows, columns)
        axes[0, 0].set_title(f"{rows} × {columns} patches", fontsize=9)
        axes = axes[:, 1:]
    parts.overlay(axes, picture, patches, cmap, scale)
    if titles is None and patches.shape[0] > 1:
        for layer, panel in enumerate(axes[:, 0]):
            panel.set_ylabel(f"layer {layer}", fontsize=9)
    size = drawing.title_size(axes[0, 0], names)
    for number, (panel, name) in enumerate(zip(axes.flat, names, strict=True)):
        panel.set_title(drawing.plain(name), fontsize=size)
        if before:
            elsewhere = panels.reshape(-1, panels.shape[-1])[number, :before].sum()
            off = "off the picture" if axes.size <= drawing.MANY_PANELS else "off"
            note = f"{off}: {elsewhere:.2f}"
            panel.set_xlabel(note, fontsize=min(8, drawing.title_size(panel, [note])))
        if asked is not None and asked[number] >= 0:
            parts.frame(panel, picture, rows, columns, int(asked[number]))
    if colorbar:
        figure.colorbar(axes[0, 0].images[1], ax=list(axes.flat), shrink=0.7, label="weight")
    return drawing.finished(figure, ax)


def _picture(image: Any) -> np.ndarray:
    """(H, W, 3), from 0 to 1."""
    found = np.asarray(image)
    shape = list(found.shape)
    if found.ndim == 2:
        found = found[:, :, None]
    if found.ndim != 3 or found.shape[2] not in (1, 3, 4) or 0 in found.shape:
        swapped = len(shape) == 3 and shape[0] in (1, 3)
        fix = " Fix: image.transpose(1, 2, 0), the colors last." if swapped else ""
        raise ValueError(f"image must be (H, W) or (H, W, 1, 3 or 4). Got image {shape}.{fix}")
    if found.dtype == np.uint8:
        found = found / 255
    found = found.astype(np.float64)
    if not (found.min() >= 0 and found.max() <= 1 + 1e-6):  # False on NaN too
        raise ValueError(
            "image must have numbers from 0 to 1, or be of dtype uint8. Got image "
            f"{shape} from {found.min():.3g} to {found.max():.3g}. Fix: undo its normalization, or "
            "divide by 255."
        )
    found = found.clip(0, 1)
    if found.shape[2] == 4:  # on white
        found = found[:, :, :3] * found[:, :, 3:] + 1 - found[:, :, 3:]
    return np.broadcast_to(found, (*found.shape[:2], 3))


def _grid(
    grid: tuple[int, int] | None, patches: int, picture: np.ndarray, given: np.ndarray, before: int
) -> tuple[int, int]:
    """Rows and columns of patches: the given ones, or those that make the squarest patches."""
    H, W = picture.shape[:2]
    if grid is None and patches > 0:
        whole = [(n, patches // n) for n in range(1, patches + 1) if patches % n == 0]
        grid = min(whole, key=lambda cut: abs(np.log((H / cut[0]) / (W / cut[1]))))
        if not 2 / 3 < (H / grid[0]) / (W / grid[1]) < 3 / 2:
            grid = None
    if grid is None or grid[0] * grid[1] != patches or patches < 1:
        wanted = "square patches" if grid is None else f"{grid[0]} × {grid[1]} patches"
        raise ValueError(
            f"S must be before plus one key for each patch. Got weights {list(given.shape)}, "
            f"before={before}: {patches} keys do not cut a picture of {H} × {W} into {wanted}. "
            "Fix: grid=(rows, columns), and before= the number of class tokens."
        )
    return int(grid[0]), int(grid[1])


def _names(titles: Sequence[str] | None, shape: tuple[int, ...]) -> list[str]:
    """Titles of the panels; without any, the numbers of the heads above the first row."""
    if titles is not None:
        return panel_titles(titles, shape)
    layers, heads = shape[:2]
    numbers = [f"head {head}" for head in range(heads)] if heads > 1 else [""]
    return numbers + [""] * ((layers - 1) * heads)
