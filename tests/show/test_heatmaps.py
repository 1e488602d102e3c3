"""show_heatmaps: one panel a matrix, one color scale, and no Matplotlib until it draws."""

import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pytest

from regard.show import heatmaps, show_heatmaps

mpl.use("Agg")
from matplotlib import pyplot


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    pyplot.close("all")


def panels(figure):
    return [axes for axes in figure.axes if axes.images and axes.get_label() != "<colorbar>"]


def test_every_panel_is_on_the_same_scale():
    matrices = jnp.arange(2 * 3 * 4 * 5, dtype=jnp.float32).reshape(2, 3, 4, 5)
    figure = show_heatmaps(
        matrices, "Keys", "Queries", titles=["a", "b", "c"], figsize=(7, 3.5), cmap="Blues"
    )
    drawn = panels(figure)
    assert len(drawn) == 6
    for axes, matrix in zip(drawn, matrices.reshape(6, 4, 5), strict=True):
        (image,) = axes.images
        np.testing.assert_array_equal(image.get_array(), matrix)
        assert image.get_clim() == (0, 119)
        assert image.get_cmap().name == "Blues"
    assert [axes.get_title() for axes in drawn] == ["a", "b", "c"] * 2
    assert [axes.get_xlabel() for axes in drawn] == [""] * 3 + ["Keys"] * 3
    assert [axes.get_ylabel() for axes in drawn] == ["Queries", "", ""] * 2
    assert tuple(figure.get_size_inches()) == (7, 3.5)
    assert len(figure.axes) == 7  # one color bar for all
    labeled = (
        [bool(axes.get_yticks().size) for axes in drawn],
        [bool(axes.get_xticks().size) for axes in drawn],
    )
    assert labeled == ([True, False, False] * 2, [False] * 3 + [True] * 3)


@pytest.mark.parametrize(
    ("matrix", "scale"),
    [
        (np.full((4, 4), 0.25), (0, 1)),  # uniform weights are not a solid square
        (np.full((4, 65), 1 / 65), (0, 4 / 65)),  # nor are those of many keys
        (np.eye(65) / 2, (0, 0.5)),  # of which the largest is at the end of the scale
        (np.eye(3) - 0.5, (-0.5, 0.5)),
        (np.eye(3) * 7, (0, 7)),
        (np.eye(3) * -7, (-7, 0)),
        (np.zeros((3, 3)), (0, 1)),
        (np.array([[np.nan, 1.0], [np.inf, 0.5]]), (0, 1)),
        (np.zeros((0, 3)), (0, 1)),
    ],
)
def test_the_scale(matrix, scale):
    figure = show_heatmaps(matrix[None, None], "Keys", "Queries")
    np.testing.assert_allclose(panels(figure)[0].images[0].get_clim(), scale)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "bool", "int32"])
def test_any_dtype(dtype):
    figure = show_heatmaps(jnp.eye(10, dtype=dtype).reshape(1, 1, 10, 10), "Keys", "Queries")
    np.testing.assert_array_equal(panels(figure)[0].images[0].get_array(), np.eye(10))
    figure.canvas.draw()


def test_a_notebook_gets_the_figure_once(monkeypatch):
    """As the cell's value; a figure left open would be shown at the end of the cell as well."""
    eye = np.eye(3).reshape(1, 1, 3, 3)
    show_heatmaps(eye, "Keys", "Queries")
    assert len(pyplot.get_fignums()) == 1  # pyplot.show() opens it
    monkeypatch.setattr(pyplot, "get_backend", lambda: "inline")
    assert len(panels(show_heatmaps(eye, "Keys", "Queries"))) == 1
    assert len(pyplot.get_fignums()) == 1


@pytest.mark.parametrize("shape", [(3, 3), (2, 3, 3), (0, 1, 3, 3), (1, 1, 1, 3, 3)])
def test_matrices_without_four_axes(shape):
    with pytest.raises(ValueError, match=r"\(rows, columns, T, S\).*\(1, 1, T, S\)") as error:
        show_heatmaps(np.zeros(shape), "Keys", "Queries")
    assert f"Got matrices {list(shape)}" in str(error.value)


def test_too_few_titles():
    with pytest.raises(ValueError, match=r"1 titles for matrices \[1, 2, 3, 3\]: 2 columns"):
        show_heatmaps(np.zeros((1, 2, 3, 3)), "Keys", "Queries", titles=["a"])


def test_a_title_for_each_panel():
    names = [f"{layer}.{head}" for layer in range(2) for head in range(2)]
    figure = show_heatmaps(np.zeros((2, 2, 3, 3)), "Keys", "Queries", titles=names)
    assert [axes.get_title() for axes in panels(figure)] == names


@pytest.mark.parametrize(
    ("shape", "figsize"),
    [((1, 1, 10, 10), (2.5, 2.5)), ((2, 4, 6, 6), (7, 3.5)), ((5, 5, 4, 30), (8, 8))],
)
def test_every_label_is_inside_the_picture(shape, figsize):
    """The book's default of 2.5 inches cut the axis labels off."""
    figure = show_heatmaps(
        np.zeros(shape),
        "Key positions",
        "Query positions",
        figsize=figsize,
        titles=["a"] * shape[1],
    )
    figure.canvas.draw()
    box = figure.get_tightbbox(figure.canvas.get_renderer())  # inches, everything that is drawn
    assert (box.x0 >= 0, box.y0 >= 0) == (True, True)
    assert (box.x1 <= figsize[0], box.y1 <= figsize[1]) == (True, True)


def test_the_scale_that_was_asked_for():
    matrix = np.full((1, 1, 3, 3), 0.25)
    figure = show_heatmaps(matrix, "Keys", "Queries", vmin=0.1, vmax=0.5)
    assert panels(figure)[0].images[0].get_clim() == (0.1, 0.5)
    with pytest.raises(ValueError, match=r"vmin must be below vmax. Got .* from 2 to 1"):
        show_heatmaps(matrix, "Keys", "Queries", vmin=2)


def test_axes_of_ones_own():
    figure, grid = pyplot.subplots(2, 2)
    drawn = show_heatmaps(np.zeros((1, 2, 3, 3)), "Keys", "Queries", ax=grid[0])
    assert drawn is figure
    assert [len(axes.images) for axes in grid.flat] == [1, 1, 0, 0]
    with pytest.raises(ValueError, match="Got 4 axes for 1 × 2 panels"):
        show_heatmaps(np.zeros((1, 2, 3, 3)), "Keys", "Queries", ax=grid)


def test_matplotlib_is_needed_to_draw_only():
    source = Path(heatmaps.__file__).parents[2]
    code = f"""
import sys
sys.path.insert(0, {str(source)!r})
sys.modules["matplotlib"] = None
from regard.show import show_heatmaps
import numpy
show_heatmaps(numpy.eye(3).reshape(1, 1, 3, 3), "Keys", "Queries")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.endswith(
        "ImportError: show_heatmaps needs Matplotlib, which is not installed.\n"
        'Install it with: pip install "regard[show]"\n'
    )
