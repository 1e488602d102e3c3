"""`AttentionMap`: what goes in comes out of every view, and nothing else does."""

import base64
import io
import json
import re
import time

import jax
import matplotlib as mpl
import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

import regard
from regard.show import AttentionMap
from regard.show.attention_map import END, LARGEST

mpl.use("Agg")
from matplotlib import pyplot

FRENCH, ENGLISH = ["le", "chat", "noir"], ["the", "black", "cat", "."]


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    pyplot.close("all")


def drawn(rng, *shape):
    return rng.dirichlet(np.full(shape[-1], 0.3), size=shape[:-1]).astype(np.float32)


@pytest.fixture
def rng():
    return np.random.default_rng(3)


@pytest.fixture
def seen(rng):
    return AttentionMap(drawn(rng, 3, 4), FRENCH, ENGLISH, "A cat")


@pytest.mark.parametrize(("shape", "panels"), [((3, 4), (1, 1)), ((2, 3, 4), (1, 2))])
def test_leading_axes_are_heads_then_layers(rng, shape, panels):
    weights = drawn(rng, *shape)
    seen = AttentionMap(weights)
    assert seen.weights.shape == (*panels, 3, 4)
    np.testing.assert_array_equal(seen.weights.reshape(shape), weights)
    assert seen.key_labels == ("0", "1", "2", "3")


@pytest.mark.parametrize(
    ("weights", "labels", "message"),
    [
        (np.ones(3), {}, r"weights must be \(T, S\).* Got weights \[3\]"),
        (np.ones((2, 2)), {"key_labels": ["a"]}, r"key_labels .* Got 1 labels, weights \[2, 2\]"),
        (np.ones((2, 2)), {"query_labels": "abc"}, r"query_labels .* Got 3 labels"),
        (np.full((2, 2), np.nan), {}, r"must be finite. Got weights \[2, 2\] with 4"),
    ],
)
def test_what_does_not_fit_is_refused(weights, labels, message):
    with pytest.raises(ValueError, match=message):
        AttentionMap(weights, **labels)


def test_of_a_call_has_the_weights_of_that_call(rng):
    query, key = (rng.standard_normal((2, n, 3, 8)).astype(np.float32) for n in (5, 6))
    settings = dict(score=regard.Gaussian(0.5), valid_lens=np.array([4, 2]))
    seen = AttentionMap.of(query, key, example=1, **settings)
    expected = np.asarray(regard.weights(query, key, **settings))[1]
    np.testing.assert_array_equal(seen.weights[0], expected)
    assert (expected[:, :, 2:] == 0).all()


def test_a_long_sequence_is_averaged_in_blocks(rng):
    T, S = 300, 3 * LARGEST
    query, key = (rng.standard_normal((n, 4)).astype(np.float32) for n in (T, S))
    seen = AttentionMap.of(query, key, key_labels=[f"w{i}" for i in range(S)])
    full = np.asarray(regard.weights(query, key))
    expected = full.reshape(T, LARGEST, 3).mean(-1)
    np.testing.assert_allclose(seen.weights[0, 0], expected, rtol=1e-4, atol=1e-7)
    assert seen.key_labels[:3] == ("w0", "w3", "w6")
    assert seen.query_labels == tuple(map(str, range(T)))


def test_blocks_of_no_whole_size_are_named_by_their_first_token():
    x = jax.numpy.zeros((700, 2))
    seen = AttentionMap.of(x, x)
    place = np.arange(700) * LARGEST // 700
    firsts = [int(np.flatnonzero(place == block)[0]) for block in range(LARGEST)]
    assert seen.key_labels == tuple(map(str, firsts))


def test_json_comes_back(rng, tmp_path):
    labels = ["<b>", 'quote"', "\u2028", "שלום", "🙂"]
    seen = AttentionMap(drawn(rng, 2, 2, 5, 5), labels, labels, "</script>")
    again = AttentionMap.load(seen.save(tmp_path / "map.json"))
    np.testing.assert_allclose(again.weights, seen.weights, rtol=1e-5)
    assert (again.query_labels, again.key_labels, again.title) == (
        tuple(labels),
        tuple(labels),
        "</script>",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged: it is not JSON"),
        ("[]", "is no attention map"),
        (json.dumps({"format": "regard attention map", "version": 9}), "is of version 9"),
        (json.dumps({"format": "regard attention map", "version": 1}), "is damaged"),
    ],
)
def test_json_of_something_else_is_refused(text, message):
    with pytest.raises(ValueError, match=f"x.json {message}"):
        AttentionMap.from_json(text, "x.json")


@pytest.mark.parametrize(
    ("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_pictures_are_of_their_kind(seen, tmp_path, ending, start):
    path = seen.save(tmp_path / f"map.{ending}")
    assert path.read_bytes().startswith(start)
    assert [path.name] == [found.name for found in tmp_path.iterdir()], "nothing unfinished is left"


def test_another_ending_is_refused_and_nothing_written(seen, tmp_path):
    with pytest.raises(ValueError, match=r"\.png, \.svg, \.pdf, \.html or \.json. Got 'map.bmp'"):
        seen.save(tmp_path / "map.bmp")
    assert not list(tmp_path.iterdir())


def test_the_figure_has_the_weights_and_the_words(seen):
    axes = seen.plot().axes[0]
    np.testing.assert_array_equal(axes.images[0].get_array(), seen.weights[0, 0])
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ENGLISH
    assert [tick.get_text() for tick in axes.get_yticklabels()] == FRENCH
    low, high = axes.images[0].get_clim()
    assert (low, high) == (0.0, 1.0)


@pytest.mark.parametrize("shape", [(3, 0), (0, 3)])
def test_a_map_without_queries_or_keys_is_drawn_and_comes_back(shape, tmp_path):
    empty = AttentionMap(np.zeros(shape))
    assert empty.save(tmp_path / "map.png").stat().st_size > 0
    assert AttentionMap.from_json(empty.to_json()).weights.shape == (1, 1, *shape)


def test_control_characters_and_large_numbers_stay_in_their_place():
    figure = AttentionMap([[1e30, 46.28], [9.5, 0.25]], ["\n", "می‌خواهم"], ["a", "\tb"]).plot()
    (axes, _) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["·", "می‌خواهم"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "·b"]
    assert [text.get_text() for text in axes.texts] == ["1e+30", "46.3", "9.50", "0.25"]


def test_panels_share_a_scale(rng):
    figure = AttentionMap(drawn(rng, 2, 3, 4, 5)).plot()
    panels = [axes for axes in figure.axes if axes.images]
    assert len(panels) == 6
    assert len({axes.images[0].get_clim() for axes in panels}) == 1
    assert [axes.get_title() for axes in panels] == ["head 0", "head 1", "head 2", "", "", ""]
    assert [axes.get_ylabel() for axes in panels] == ["layer 0", "", "", "layer 1", "", ""]
    assert [len(axes.get_yticks()) for axes in panels] == [4, 0, 0] * 2
    assert [len(axes.get_xticks()) for axes in panels] == [0] * 3 + [5] * 3


def test_titles_axis_names_and_the_scale_are_the_callers(rng):
    seen = AttentionMap(drawn(rng, 2, 2, 4, 5), title="ignored on other people's axes")
    names = ["near", "far"]
    settings = dict(xlabel="keys", ylabel="queries", vmin=0.1, vmax=0.9)
    figure = seen.plot(titles=names, **settings)
    first, second, third, _ = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in (first, second, third)] == [*names, ""]
    assert (third.get_xlabel(), first.get_ylabel()) == ("keys", "layer 0\nqueries")
    assert first.images[0].get_clim() == (0.1, 0.9)
    each = seen.plot(titles=list("abcd"))
    assert [axes.get_title() for axes in each.axes if axes.images] == list("abcd")
    with pytest.raises(ValueError, match=r"Got 3 titles for matrices .*: 2 columns, 4 panels"):
        seen.plot(titles=list("abc"))


def test_a_map_on_axes_of_ones_own(seen):
    figure, (left, right) = pyplot.subplots(1, 2)
    assert seen.plot(ax=right, colorbar=False) is figure
    assert (len(left.images), len(right.images), len(figure.axes)) == (0, 1, 2)
    with pytest.raises(ValueError, match="Got 2 axes for 1 × 1 panels"):
        seen.plot(ax=[left, right])


def test_files_have_the_fonts_that_papers_want(seen, tmp_path):
    """TrueType in PDF (type 42), text as text in SVG; also by the figure's own savefig."""
    figure = seen.plot()
    figure.savefig(tmp_path / "own.svg")
    for path in (seen.save(tmp_path / "map.svg"), tmp_path / "own.svg"):
        assert ">chat</text>" in path.read_text()
    pdf = seen.save(tmp_path / "map.pdf").read_bytes()
    assert b"/CIDFontType2" in pdf
    assert b"/Type3" not in pdf


def test_a_hundred_and_forty_four_heads_are_drawn_in_seconds(rng, tmp_path):
    words = [f"word {i}" for i in range(20)]
    seen = AttentionMap(drawn(rng, 12, 12, 20, 20), words, words)
    start = time.process_time()
    seen.save(tmp_path / "heads.png")
    assert time.process_time() - start < 5
    figure = seen.plot(xlabel="keys", ylabel="queries")
    figure.canvas.draw()
    written = [text for axes in figure.axes for text in axes.get_yticklabels() if text.get_text()]
    assert len(written) == 12 * 20 + 6  # the first column, and the color bar
    assert min(text.get_window_extent().x0 for text in written) >= 0


# The weight on the end of the sentence ---------------------------------------------------------


@pytest.fixture
def translated():
    weights = np.array([[0.9, 0.05], [0.1, 0.3]])
    return AttentionMap(weights, ["le", "chat"], ["the", "cat"], end=END)


def test_with_an_end_every_row_sums_to_one(translated):
    assert translated.key_labels == ("the", "cat", "(end)")
    np.testing.assert_allclose(translated.weights.sum(-1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(translated.weights[0, 0, :, 2], [0.05, 0.6], rtol=1e-5)
    assert printed(translated).splitlines()[-1].split() == ["chat", ".10", ".30", ".60"]
    assert data_of(translated.to_html())["keys"] == ["the", "cat", "(end)"]
    assert [t.get_text() for t in translated.plot().axes[0].get_xticklabels()][-1] == "(end)"
    again = AttentionMap.from_json(translated.to_json())
    np.testing.assert_allclose(again.weights, translated.weights, rtol=1e-5)


def test_a_model_without_attention_gets_no_end():
    assert AttentionMap(np.zeros((2, 2)), end=END).key_labels == ("0", "1")


def test_an_end_wants_weights():
    with pytest.raises(ValueError, match=r"each row .* at most 1. Got 2.000"):
        AttentionMap(np.ones((2, 2)), end=END)
    AttentionMap(np.full((1, 3), np.float32(1 / 3)), end=END)  # rounded up a little


# The page ----------------------------------------------------------------------------------------


def data_of(page):
    (text,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL
    )
    return json.loads(text)


def test_the_page_has_the_weights_to_four_digits(rng):
    seen = AttentionMap(drawn(rng, 2, 2, 7, 9))
    data = data_of(seen.to_html())
    steps = np.frombuffer(base64.b64decode(data["weights"]), "<u2").reshape(data["shape"])
    weights = data["low"] + steps / 65535 * (data["high"] - data["low"])
    np.testing.assert_allclose(weights, seen.weights, atol=1e-5)


def test_the_page_draws_weights_from_0_to_1(rng):
    assert data_of(AttentionMap(np.full((4, 4), 0.25)).to_html())["top"] == 1.0
    assert data_of(AttentionMap(drawn(rng, 4, 4) * 7).to_html())["top"] > 1.0
    assert data_of(AttentionMap([[0.5, -2.0]]).to_html())["top"] == 2.0


@pytest.mark.parametrize("text", ["</script><script>alert(1)</script>", "<img src=x onerror=a>"])
def test_text_stays_text(text):
    page = AttentionMap(np.eye(2), [text, "{{js}}"], [text, "b"], text).to_html()
    data = data_of(page)
    assert (data["title"], data["queries"], data["keys"][0]) == (text, [text, "{{js}}"], text)
    assert page.count("<script") == 2
    assert "<img" not in page
    assert "alert(1)</script>" not in page


def test_the_page_asks_for_nothing_from_elsewhere(seen):
    page = seen.to_html().replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not re.search(r"https?://|@import|url\(|src=", page)
    assert "default-src 'none'" in page


def test_a_notebook_gets_a_frame_that_cannot_reach_it(seen):
    frame = seen._repr_html_()
    assert frame.startswith("<iframe")
    assert 'sandbox="allow-scripts"' in frame
    assert "allow-same-origin" not in frame


def test_two_hundred_by_two_hundred_is_small(rng):
    assert len(AttentionMap(drawn(rng, 200, 200)).to_html()) < 200_000


# The terminal ------------------------------------------------------------------------------------


def printed(seen, **options):
    out = io.StringIO()
    console = Console(file=out, width=80, highlight=False)
    seen.print(console=console, **options)
    return out.getvalue()


@pytest.mark.parametrize("shape", [(3, 4), (9, 15), (20, 30), (130, 300), (1, 1), (0, 0)])
def test_it_fits_eighty_columns(rng, shape):
    weights = drawn(rng, *shape) if all(shape) else np.zeros(shape)
    labels = [f"a very long word {i}" for i in range(shape[0])]
    text = printed(AttentionMap(weights, labels, title="Title"))
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) <= 70


def test_numbers_stand_where_they_should(rng):
    weights = np.array([[0.0, 1.0], [0.25, 0.75]])
    lines = printed(AttentionMap(weights, ["le", "chat"], ["the", "cat"])).splitlines()
    assert lines[-2].split() == ["le", "·", "1.0"]
    assert lines[-1].split() == ["chat", ".25", ".75"]


def test_wide_numbers_and_wide_letters_stay_in_their_columns():
    weights = np.array([[90.9, 0.25, -1e30], [3.0, -46.3, 0.0]])
    heading, *rows = printed(AttentionMap(weights, ["le", "chat"], ["私", "犬", "c"])).splitlines()
    assert [row.split()[1:] for row in rows] == [["90.9", ".25", "-1e+30"], ["3.0", "-46.3", "·"]]
    assert {cell_len(row) for row in rows} == {4 + 3 * 7}
    assert [cell_len(heading[: heading.index(word) + 1]) for word in "私犬c"] == [11, 18, 25]
    assert printed(AttentionMap([[-1.0, -0.25]])).splitlines()[-1].split() == ["0", "-1.", "-.2"]


def test_uniform_weights_are_light():
    """On a scale that ended at the largest weight they were a solid block."""
    line = printed(AttentionMap(np.full((1, 40), 1 / 40), ["x"])).splitlines()[-1]
    assert line.split() == ["x"], "the lightest shade is a space"


def test_averages_are_averages():
    weights = np.zeros((1, 240))
    weights[0, :4] = 1.0
    *_, line, note = printed(AttentionMap(weights, ["x"])).splitlines()
    assert line.startswith("x █")
    assert set(line[3:]) == {"·"}
    assert "1 × 4" in note


def test_a_head_that_is_not_there_is_refused(seen):
    with pytest.raises(ValueError, match=r"head below 1\. Got layer 0, head 2"):
        seen.print(head=2)
