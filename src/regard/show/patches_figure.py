"""The parts of `show_patches`'s figure: pictures, tints over them, frames. Needs Matplotlib."""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Rectangle


def figsize_of_pictures(
    shape: tuple[int, int], height_to_width: float, noted: bool
) -> tuple[float, float]:
    """Inches of a figure of so many rows and columns of one picture."""
    wide = 2.1 if shape[1] <= 6 else max(12.0 / shape[1], 0.9)
    return shape[1] * wide + 0.8, shape[0] * (wide * height_to_width + (0.5 if noted else 0.3))


def draw_picture(axes: Any, picture: np.ndarray, rows: int = 1, columns: int = 1) -> None:
    """A picture without ticks, with lines along which it is cut."""
    H, W = picture.shape[:2]
    axes.imshow(picture, extent=(0, W, H, 0), interpolation="nearest")
    lines: Any = dict(color="white", linewidth=0.6, alpha=0.6)
    for row in range(1, rows):
        axes.axhline(row * H / rows, **lines)
    for column in range(1, columns):
        axes.axvline(column * W / columns, **lines)
    axes.set_xticks([])
    axes.set_yticks([])


def overlay(
    grid: np.ndarray,
    picture: np.ndarray,
    patches: np.ndarray,
    cmap: str,
    scale: tuple[float, float],
) -> None:
    """On each axes the picture in gray, and over it its patches, tinted by weight."""
    gray = picture @ np.array([0.299, 0.587, 0.114])
    gray = np.repeat((0.25 + 0.7 * gray)[:, :, None], 3, axis=2)  # light: the tint has to show
    H, W = picture.shape[:2]
    tints = matplotlib.colormaps[cmap](np.linspace(0.45, 0.95, 256))
    tints[:, 3] = np.linspace(0.0, 0.9, 256)  # no tint at the low end of the scale
    tinted = ListedColormap(tints, name=cmap)
    for place, axes in np.ndenumerate(grid):
        draw_picture(axes, gray)
        axes.imshow(
            patches[place],
            cmap=tinted,
            vmin=scale[0],
            vmax=scale[1],
            extent=(0, W, H, 0),
            interpolation="nearest",
        )


def frame(axes: Any, picture: np.ndarray, rows: int, columns: int, patch: int) -> None:
    """A frame around one patch."""
    (H, W), (row, column) = picture.shape[:2], divmod(patch, columns)
    corner = (column * W / columns, row * H / rows)
    size = (W / columns, H / rows)
    edge: Any = dict(edgecolor="#1f5fa8", linewidth=2, clip_on=False)  # whole at the border too
    axes.add_patch(Rectangle(corner, *size, fill=False, **edge))
