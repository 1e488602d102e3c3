"""Whole models as one map, and differences of maps: the numbers in every view are the maps'."""

import io
import json

import matplotlib as mpl
import numpy as np
import pytest
from rich.console import Console

from regard.show import AttentionMap, show_difference
from show.test_attention_map import data_of

mpl.use("Agg")
from matplotlib import pyplot

RNG = np.random.default_rng(5)
WORDS, KEYS = ["le", "chat", "noir"], ["the", "black", "cat", "."]


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    pyplot.close("all")


def drawn(*shape):
    return RNG.dirichlet(np.full(shape[-1], 0.3), size=shape[:-1]).astype(np.float32)


# Layers × heads ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "example", "expected"),
    [((3, 4), 0, (2, 1, 3, 4)), ((5, 3, 4), 0, (2, 5, 3, 4)), ((6, 5, 3, 4), 2, (2, 5, 3, 4))],
)
def test_layers_are_stacked(shape, example, expected):
    layers = [drawn(*shape), drawn(*shape)]
    seen = AttentionMap.stack(layers, WORDS, KEYS, "two layers", example=example)
    chosen = [layer[example] if layer.ndim == 4 else layer for layer in layers]
    assert seen.weights.shape == expected
    np.testing.assert_array_equal(seen.weights.reshape(2, -1), np.stack(chosen).reshape(2, -1))
    assert (seen.query_labels, seen.key_labels, seen.title) == (
        tuple(WORDS),
        tuple(KEYS),
        "two layers",
    )


@pytest.mark.parametrize(
    ("shapes", "got"), [([], r"\[\]"), ([(2, 3, 3), (2, 3, 4)], r"\[\[2, 3, 3\], \[2, 3, 4\]\]")]
)
def test_layers_of_several_shapes_are_refused(shapes, got):
    with pytest.raises(ValueError, match=f"arrays of one shape.* Got layers {got}.*one map for"):
        AttentionMap.stack([drawn(*shape) for shape in shapes])


# Differences -------------------------------------------------------------------------------------


def test_a_difference_is_a_map_of_signed_numbers():
    first, second = (AttentionMap(drawn(2, 3, 4), WORDS, KEYS, title) for title in "ab")
    found = first - second
    np.testing.assert_array_equal(found.weights, first.weights - second.weights)
    assert (found.signed, found.title, found.key_labels) == (True, "a − b", tuple(KEYS))
    panels = [axes for axes in found.plot().axes if axes.images]
    reach = np.abs(found.weights).max()
    for axes, expected in zip(panels, found.weights[0], strict=True):
        np.testing.assert_array_equal(axes.images[0].get_array(), expected)
        assert axes.images[0].get_clim() == (-reach, reach)
        assert axes.images[0].get_cmap().name == "RdBu"
    assert (second - first).weights.min() == -found.weights.max()
    asked = found.plot(vmax=0.25).axes[0].images[0]
    assert asked.get_clim() == (-0.25, 0.25)


def test_one_head_is_compared_with_each():
    every, mean = drawn(2, 3, 3, 4), drawn(3, 4)
    found = AttentionMap(every) - AttentionMap(mean)
    np.testing.assert_array_equal(found.weights, every - mean)
    np.testing.assert_array_equal((AttentionMap(mean) - AttentionMap(every)).weights, mean - every)


@pytest.mark.parametrize("other", [(4, 4), (3, 5), (3, 3, 4)])
def test_maps_that_cannot_be_compared(other):
    with pytest.raises(ValueError, match=r"same rows and columns.*Got weights \[1, 2, 3, 4\] and"):
        AttentionMap(drawn(2, 3, 4)) - AttentionMap(drawn(*other))
    with pytest.raises(TypeError):
        AttentionMap(drawn(3, 4)) - drawn(3, 4)


def test_other_words_are_written_beside_each_other():
    first = AttentionMap(drawn(1, 2), ["voiture"], ["red", "car"])
    second = AttentionMap(drawn(1, 2), ["voiture"], ["old", "car"])
    assert (first - second).key_labels == ("red | old", "car")


def test_a_difference_comes_back_from_json_and_goes_into_the_page(tmp_path):
    found = AttentionMap([[0.75, 0.25]]) - AttentionMap([[0.25, 0.75]])
    again = AttentionMap.load(found.save(tmp_path / "difference.json"))
    assert again.signed
    np.testing.assert_array_equal(again.weights, found.weights)
    data = data_of(found.to_html())
    assert (data["top"], data["low"]) == (0.5, -0.5)
    assert "signed" not in json.loads(AttentionMap([[1.0]]).to_json())


@pytest.mark.parametrize(("S", "more", "less"), [(3, [".25", "·"], "-.3"), (40, ["█"], "#")])
def test_the_terminal_tells_more_from_less(S, more, less):
    weights = np.zeros((1, S))
    weights[0, :2] = [0.25, -0.26]
    out = io.StringIO()
    console = Console(file=out, width=80, highlight=False)
    AttentionMap(weights, ["x"], signed=True).print(console=console)
    line = out.getvalue().splitlines()[-1]
    assert less in line
    assert all(one in line for one in more)


def test_three_panels_have_the_numbers_and_two_scales():
    first, second = AttentionMap(drawn(3, 4), WORDS, KEYS), AttentionMap(drawn(3, 4), WORDS, KEYS)
    figure = show_difference(first, second, ["after", "before", "change"], xlabel="keys")
    panels = [axes for axes in figure.axes if axes.images]
    difference = first.weights - second.weights
    for axes, expected in zip(panels, (first.weights, second.weights, difference), strict=True):
        np.testing.assert_array_equal(axes.images[0].get_array(), expected[0, 0])
    reach = np.abs(difference).max()
    clims = [axes.images[0].get_clim() for axes in panels]
    np.testing.assert_allclose(clims, [(0, 1), (0, 1), (-reach, reach)], rtol=1e-6)
    assert [axes.get_title() for axes in panels] == ["after", "before", "change"]
    assert [tick.get_text() for tick in panels[0].get_yticklabels()] == WORDS
    assert not len(panels[1].get_yticks()), "the same words once"
    written = [text.get_text() for text in panels[2].texts]
    assert written == [
        f"{one:.2f}".replace("-", "−") for one in difference.ravel() if abs(one) >= 0.005
    ]


def test_each_head_has_a_row_and_scales_are_shared():
    first, second = AttentionMap(drawn(2, 2, 3, 4)), AttentionMap(drawn(3, 4) / 2)
    figure = show_difference(first, second, vmin=0.1, vmax=0.6, largest=0.3)
    panels = np.array([axes for axes in figure.axes if axes.images]).reshape(4, 3)
    for row, head in zip(panels, first.weights.reshape(4, 3, 4), strict=True):
        np.testing.assert_array_equal(row[0].images[0].get_array(), head)
        np.testing.assert_array_equal(row[2].images[0].get_array(), head - second.weights[0, 0])
        np.testing.assert_allclose(row[1].images[0].get_clim(), (0.1, 0.6))
        np.testing.assert_allclose(row[2].images[0].get_clim(), (-0.3, 0.3))
    assert panels[3, 0].get_ylabel() == "layer 1, head 1\n"


def test_what_does_not_fit_three_columns():
    one = AttentionMap(drawn(3, 4))
    with pytest.raises(ValueError, match=r"titles must be three.* Got 2"):
        show_difference(one, one, ["a", "b"])
    with pytest.raises(ValueError, match="Got 2 axes for 1 × 3 panels"):
        show_difference(one, one, ax=pyplot.subplots(1, 2)[1])
    with pytest.raises(ValueError, match=r"up to 5 .* Got 2 × 3.*\(first - second\).plot\(\)"):
        show_difference(AttentionMap(drawn(2, 3, 3, 4)), one)
    figure, axes = pyplot.subplots(1, 3)
    assert show_difference(one, one, ax=axes) is figure
    assert axes[2].images[0].get_clim() == (-1, 1), "nothing differs"


def test_the_page_opens_a_head_from_the_overview(request, tmp_path):
    browser = request.getfixturevalue("browser")
    from playground.browser import quiet_page

    weights = np.zeros((2, 3, 2, 2))
    weights[1, 2] = [[0.1234, -0.5], [0.0, 0.25]]
    path = AttentionMap(weights, signed=True).save(tmp_path / "heads.html")
    with quiet_page(browser) as page:
        page.goto(path.as_uri())
        page.click("[data-view=heads]")
        pictures = page.locator("table.heads canvas")
        assert pictures.count() == 6
        blank, drawn = (
            pictures.nth(n).evaluate(
                "c => [...c.getContext('2d').getImageData(0, 0, 2, 2).data]"
                ".filter((_, i) => i % 4 < 3)"
            )
            for n in (0, 5)
        )
        assert len(set(blank)) <= 3
        cells = np.array(drawn).reshape(4, 3)
        assert cells[0, 2] > cells[0, 0], "more is blue in the light theme"
        assert cells[1, 0] > cells[1, 2], "less is red"
        page.click("[aria-label='Layer 2, head 3']")
        page.wait_for_selector("[data-view=heatmap][aria-pressed=true]")
        page.click("[data-view=table]")
        assert page.locator("table.weights td").all_inner_texts()[-4:] == [
            "0.123",
            "-0.500",
            "0.000",
            "0.250",
        ]
