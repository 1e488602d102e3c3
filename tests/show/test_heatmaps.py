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


@pytest.mark.parametrize(
    ("matrix", "scale"),
    [
        (np.full((3, 3), 0.25), (0, 0.25)),  # zero is on the scale: uniform weights are not white
        (np.eye(3) - 0.5, (-0.5, 0.5)),
        (np.zeros((3, 3)), (0, 1)),
        (np.array([[np.nan, 1.0], [np.inf, 0.5]]), (0, 1)),
        (np.zeros((0, 3)), (0, 1)),
    ],
)
def test_the_scale(matrix, scale):
    if matrix.size == 0:
        with pytest.warns(UserWarning, match="identical"):  # Matplotlib's, about the axes
            figure = show_heatmaps(matrix[None, None], "Keys", "Queries")
    else:
        figure = show_heatmaps(matrix[None, None], "Keys", "Queries")
    assert panels(figure)[0].images[0].get_clim() == scale


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
    with pytest.raises(ValueError, match=r"1 titles for matrices \[1, 2, 3, 3\], 2 columns"):
        show_heatmaps(np.zeros((1, 2, 3, 3)), "Keys", "Queries", titles=["a"])


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
