"""show_patches: every tint is a weight, on the pixels of its patch."""

import matplotlib as mpl
import numpy as np
import pytest

from regard.show import show_patches

mpl.use("Agg")
from matplotlib import pyplot

RNG = np.random.default_rng(7)


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    pyplot.close("all")


def drawn(*shape):
    return RNG.dirichlet(np.full(shape[-1], 0.3), size=shape[:-1])


def panels(figure):
    """The axes with a picture and tints over it."""
    return [axes for axes in figure.axes if len(axes.images) == 2]


@pytest.mark.parametrize(
    ("H", "W", "patches", "cut"),
    [(32, 32, 16, (4, 4)), (24, 48, 8, (2, 4)), (30, 20, 6, (3, 2)), (7, 7, 1, (1, 1))],
)
def test_a_patch_has_its_weight_on_its_pixels(H, W, patches, cut):
    weights = drawn(2, patches)
    drawn_on = panels(show_patches(RNG.random((H, W, 3)), weights))
    for axes, expected in zip(drawn_on, weights, strict=True):
        picture, tint = axes.images
        assert tuple(picture.get_extent()) == tuple(tint.get_extent()) == (0, W, H, 0)
        np.testing.assert_array_equal(tint.get_array(), expected.reshape(cut))
        assert tint.get_interpolation() == "nearest"


def test_no_weight_is_no_tint_and_the_pixels_are_where_they_should_be():
    """Of the drawn picture: only the patch with weight is colored, all others stay gray."""
    weights = np.zeros(16)
    weights[6] = 1.0  # row 1, column 2
    figure, axes = pyplot.subplots(figsize=(2, 2), dpi=64)
    axes.set_position((0, 0, 1, 1))
    show_patches(np.full((8, 8), 0.5), weights, ax=axes, colorbar=False)
    for line in axes.lines:
        line.set_visible(False)
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())[:, :, :3].astype(int)
    colored = (pixels.max(-1) - pixels.min(-1) > 8).reshape(4, 32, 4, 32)
    share = colored[:, 4:-4, :, 4:-4].mean((1, 3))
    np.testing.assert_array_equal(share, weights.reshape(4, 4))


def test_one_scale_that_ends_at_the_largest_weight():
    weights = drawn(3, 2, 17)
    figure = show_patches(np.zeros((8, 8)), weights, before=1)
    clims = {axes.images[1].get_clim() for axes in panels(figure)}
    assert clims == {(0.0, weights[:, :, 1:].max())}
    assert [axes.get_title() for axes in panels(figure)] == ["head 0", "head 1", *[""] * 4]
    assert [axes.get_ylabel() for axes in panels(figure)[::2]] == ["layer 0", "layer 1", "layer 2"]
    flat = show_patches(np.zeros((8, 8)), np.full(16, 1 / 16))
    np.testing.assert_allclose(panels(flat)[0].images[1].get_clim(), (0, 4 / 16))
    asked = show_patches(np.zeros((8, 8)), np.full(16, 1 / 16), vmin=0.01, vmax=0.1)
    assert panels(asked)[0].images[1].get_clim() == (0.01, 0.1)


def test_the_first_panel_is_the_picture_and_its_cuts():
    image = RNG.random((12, 12, 3))
    first = show_patches(image, drawn(9)).axes[0]
    np.testing.assert_array_equal(first.images[0].get_array(), image)
    assert first.get_title() == "3 × 3 patches"
    horizontal = [line.get_ydata()[0] for line in first.lines[:2]]
    assert (horizontal, len(first.lines)) == ([4, 8], 4)


def test_keys_before_the_patches_are_distinguished():
    weights = np.array([[0.25, 0.15, *[0.15] * 4], [0.0, 0.0, *[0.25] * 4]])
    figure = show_patches(np.zeros((4, 4)), weights, before=2)
    assert [axes.get_xlabel() for axes in panels(figure)] == [
        "off the picture: 0.40",
        "off the picture: 0.00",
    ]
    np.testing.assert_array_equal(
        panels(figure)[0].images[1].get_array(), weights[0, 2:].reshape(2, 2)
    )


def test_the_patch_that_asks_has_a_frame():
    figure = show_patches(np.zeros((20, 30)), drawn(3, 6), grid=(2, 3), asked=[4, -1, 0])
    frames = [[patch.get_bbox().bounds for patch in axes.patches] for axes in panels(figure)]
    assert frames == [[(10, 10, 10, 10)], [], [(0, 0, 10, 10)]]


@pytest.mark.parametrize(
    "image",
    [
        np.full((4, 4), 51, np.uint8),
        np.full((4, 4, 1), 0.2),
        np.dstack([np.full((4, 4, 3), 0.0), np.full((4, 4), 0.8)]),  # black, on white
        np.full((4, 4, 3), 0.2, np.float16),
    ],
)
def test_pictures_of_any_kind(image):
    first = show_patches(image, np.ones(4) / 4).axes[0]
    np.testing.assert_allclose(first.images[0].get_array(), np.full((4, 4, 3), 0.2), atol=1e-3)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((3, 8, 8)), r"Got image \[3, 8, 8\]. Fix: image.transpose\(1, 2, 0\)"),
        (np.zeros((2, 8, 8, 3)), r"Got image \[2, 8, 8, 3\].$"),
        (np.full((8, 8), 255.0), r"from 255 to 255. Fix: undo its normalization, or divide by 255"),
        (np.full((8, 8), -1.0), r"numbers from 0 to 1, or be of dtype uint8"),
        (np.full((8, 8), np.nan), r"numbers from 0 to 1"),
    ],
)
def test_what_is_no_picture(image, message):
    with pytest.raises(ValueError, match=message):
        show_patches(image, np.ones(4) / 4)


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        (np.ones((1, 2, 3, 4)), {}, r"Got weights \[1, 2, 3, 4\]. Fix .* choose queries"),
        (np.full(4, np.nan), {}, "must be finite"),
        (np.ones(17), {}, r"before=0: 17 keys do not cut a picture of 8 × 8 into square patches"),
        (np.ones(16), {"grid": (3, 5)}, "16 keys .* into 3 × 5 patches"),
        (np.ones(1), {"before": 1}, "0 keys"),
        (np.ones(16), {"asked": [16]}, r"below 16 for each of 1 panels, or -1. Got \[16\]"),
        (np.ones((2, 16)), {"asked": [1]}, "each of 2 panels"),
        (np.ones((2, 16)), {"titles": ["a"]}, "Got 1 titles"),
        (np.ones((2, 16)), {"ax": []}, "Got 0 axes for 1 × 2 panels"),
    ],
)
def test_weights_that_do_not_fit(weights, options, message):
    with pytest.raises(ValueError, match=message):
        show_patches(np.zeros((8, 8)), weights, **options)


def test_axes_and_titles_of_ones_own():
    figure, axes = pyplot.subplots(1, 2)
    names = ["near", "$far"]
    assert show_patches(np.zeros((8, 8)), drawn(2, 4), ax=axes, titles=names) is figure
    assert [panel.get_title() for panel in axes] == ["near", r"\$far"]
    assert [len(panel.images) for panel in axes] == [2, 2]
