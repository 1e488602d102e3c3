"""The playground's Scores and Your own in a real browser: every number from the library."""

import numpy as np
import pytest

pytest.importorskip("starlette", reason='needs the server: pip install "regard[serve]"')

from playground.browser import EVIL, open_scores, weights
from regard.show import AttentionMap


def becomes(page, condition, what=weights):
    """Waits until what is shown is as it should be, and returns it."""
    for _ in range(200):
        if condition(shown := what(page)):
            return shown
        page.wait_for_timeout(25)
    raise AssertionError(f"it stayed {shown}")


# Scores ------------------------------------------------------------------------------------------


def test_a_dragged_point_changes_the_weights(page):
    open_scores(page)
    point = page.locator('[data-point="key 1"]').bounding_box()

    before = np.array(weights(page))
    page.mouse.move(point["x"] + point["width"] / 2, point["y"] + point["height"] / 2)
    page.mouse.down()
    page.mouse.move(point["x"] - 120, point["y"] + 90, steps=4)
    page.mouse.up()
    after = becomes(page, lambda now: np.abs(now - before)[:, 0].max() > 0.05)
    np.testing.assert_allclose(np.sum(after, axis=1), 1, atol=0.003)


def test_arrow_keys_move_a_point(page):
    open_scores(page)
    before = weights(page)
    page.focus('[data-point="query 1"]')
    for _ in range(5):
        page.keyboard.press("ArrowLeft")
    becomes(page, lambda now: now != before)
    page.wait_for_selector('[data-point="query 1"][aria-label^="query 1 at 1.2, 1.4"]')
    page.keyboard.press("ArrowUp")
    page.wait_for_selector('[data-point="query 1"][aria-label^="query 1 at 1.2, 1.6"]')
    assert page.evaluate("document.activeElement.dataset.point") == "query 1", "it keeps the focus"


def test_the_regime_the_length_and_the_mask_change_the_weights(page):
    open_scores(page)
    page.select_option("#regime", "hard")
    becomes(page, lambda now: all(sorted(row) == [0, 0, 0, 0, 1] for row in now))
    page.select_option("#score", "gaussian")
    page.wait_for_selector("#width")
    page.select_option("#regime", "uniform")
    becomes(page, lambda now: now == [[0.2] * 5] * 3)
    page.fill("#valid", "2")
    becomes(page, lambda now: now == [[0.5, 0.5, 0, 0, 0]] * 3)
    page.check("#causal")
    becomes(page, lambda now: now == [[1, 0, 0, 0, 0], *[[0.5, 0.5, 0, 0, 0]] * 2])
    assert page.locator("#plane .key.off").count() == 3


def test_the_background_shows_which_key_wins(page):
    open_scores(page)
    page.select_option("#score", "gaussian")

    def pixel(page):
        """The key whose color is at the second key's place."""
        return page.evaluate(
            """() => { const [x, y] = points.key[1], size = byId("winners").width;
            const at = (value) => Math.floor((value + 5) / 10 * size);
            const pen = new OffscreenCanvas(size, size).getContext("2d");
            pen.drawImage(byId("winners"), 0, 0);
            const [r, g, b, a] = pen.getImageData(at(x), at(-y), 1, 1).data;
            return a > 40 ? [r, g, b] : null; }"""
        )

    color = "getComputedStyle(document.documentElement).getPropertyValue('--key-1')"
    wanted = page.evaluate(color).strip().lstrip("#")
    wanted = [int(wanted[i : i + 2], 16) for i in (0, 2, 4)]
    becomes(page, lambda now: now and np.abs(np.subtract(now, wanted)).max() < 8, pixel)
    page.select_option("#regime", "uniform")
    becomes(page, lambda now: now is None, pixel)
    assert "Uniform: the same weight" in page.inner_text("#regime-said")
    assert "convex hull" in page.inner_text("#hull-said")


def test_an_output_that_is_too_far_to_draw_is_named(page):
    open_scores(page)
    assert page.inner_text("#plane-outside") == ""
    page.select_option("#regime", "cone")
    page.wait_for_function("() => byId('plane-outside').textContent !== ''")
    assert page.inner_text("#plane-outside").startswith("Outside of the picture: out 1, out 2")


def test_d_saturates_the_softmax_unless_it_is_divided_by(page):
    open_scores(page)

    def largest(page):
        return [
            page.eval_on_selector_all(
                f"#bars-{one} span", "all => Math.max(...all.map(s => Number(s.textContent)))"
            )
            for one in ("scaled", "plain")
        ]

    page.fill("#d", "9")
    becomes(page, lambda now: now[0] < 0.6 and now[1] > 0.99, largest)
    assert page.inner_text("#d-shown") == "512"


# Your own ----------------------------------------------------------------------------------------


def test_a_matrix_can_be_pasted(page):
    page.click("#tab-own")
    page.wait_for_selector("#own-view canvas")  # the form's example is drawn already
    page.click("#own-view [data-view=table]")
    assert page.locator("#own-view tbody tr").all_inner_texts()[1].split() == [
        "chat", "0.100", "0.100", "0.800",
    ]  # fmt: skip
    page.fill("#own-weights", "1 2\n3")
    page.click("#own-form button")
    assert page.inner_text("#own-error") == "There are 2 rows of weights for 3 queries."


def test_a_file_can_be_looked_at(page, tmp_path):
    drawn = np.random.default_rng(0).dirichlet([0.5] * 3, size=(2, 4, 2))  # 2 layers, 4 heads
    AttentionMap(drawn, ["a", "b"], ["x", "y", EVIL], EVIL).save(tmp_path / "map.json")
    page.click("#tab-own")
    page.set_input_files("#own-file", tmp_path / "map.json")
    page.wait_for_selector("#own-view canvas")
    assert page.inner_text("#own-title") == EVIL
    page.click("#own-view [data-view=table]")
    page.click("#own-view [aria-label='Next layer']")
    page.click("#own-view [aria-label='Next head']")
    assert page.locator("#own-heads button").count() == 4
    pressed = page.locator("#own-heads button[aria-pressed=true]")
    assert pressed.all_inner_texts() == ["Head 2"]
    row = page.locator("#own-view tbody tr").first.locator("td").all_inner_texts()
    np.testing.assert_allclose([float(x) for x in row], drawn[1, 1, 0], atol=6e-4)
    assert page.locator("#own-view thead th").last.inner_text() == EVIL
    for name, text in (("bad.json", "{"), ("none.json", "{}"), ("odd.json", "[1]")):
        (tmp_path / name).write_text(text)
        page.set_input_files("#own-file", tmp_path / name)
        page.wait_for_function("() => byId('own-error').textContent !== ''")
        page.evaluate("byId('own-error').textContent = ''")
