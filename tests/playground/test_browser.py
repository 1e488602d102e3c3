"""The playground in a real browser: everything a visitor does, and nothing on the console."""

import json
import re
import threading
from importlib.resources import files

import pytest

pytest.importorskip("starlette", reason='needs the server: pip install "regard[serve]"')

from playground.browser import (
    EVIL,
    accessibility,
    open_scores,
    overflow,
    quiet_page,
    weights,
)
from playground.fakes import Reverser, served
from regard.playground.requests import TranslateRequest
from regard.playground.server import Playground
from regard.playground.translations import answers
from regard.seq2seq.translator import Translator


def translate(page, text):
    page.fill("#text", text)
    page.click("#translate-form button")
    page.wait_for_function(
        "words => document.querySelectorAll('#translate-view ol.keys li').length === words",
        arg=len(text.split()) + 1,  # and the end
    )


def shown_lines(page, view):
    """The (query, key) of the lines that can be seen."""
    return page.eval_on_selector_all(
        f"{view} .pairs line",
        """lines => lines.filter(l => l.style.display !== "none")
           .map(l => [Number(l.dataset.queries), Number(l.dataset.keys)])""",
    )


# Translate ---------------------------------------------------------------------------------------


def test_the_page_opens_with_a_translation_and_its_lines(page):
    page.wait_for_selector("#translate-view .pairs line", state="attached")
    assert page.inner_text("#translation") == "Ma sœur veut acheter une voiture rouge."
    assert page.input_value("#text") == "My sister wants to buy a red car."
    words = page.locator("#translate-view ol.keys li").all_inner_texts()
    assert words == [*["My", "sister", "wants", "to", "buy", "a", "red", "car", "."], "(end)"]
    said = page.inner_text("#lines-said")
    assert "French words on the right look at the English words on the left" in said
    for stage in ("Encoder", "Attention", "Decoder"):
        assert stage in page.inner_text(f"#stage-{stage.lower()} h3")


def test_the_example_is_what_the_bundled_model_answers():
    """`make images` writes the file again."""
    kept = json.loads(files("regard").joinpath("playground/static/example.json").read_text("utf-8"))
    asked = TranslateRequest(("My sister wants to buy a red car.",), 5, len(kept), True, 5)
    ((found,),) = answers(Translator.load(), [asked], lambda: None, True)
    assert [one["text"] for one in found] == [one["text"] for one in kept]
    for one, other in zip(found, kept, strict=True):
        assert one["weights"]["shape"] == other["weights"]["shape"]
        assert len(one["next_words"]) == len(one["target_words"]) + 1


def test_enter_translates_and_shift_enter_does_not(page):
    page.fill("#text", "one two")
    page.press("#text", "Shift+Enter")
    assert page.input_value("#text") == "one two\n"
    page.press("#text", "Enter")
    page.wait_for_function("() => byId('translation').textContent === 'two one'")


def test_a_sentence_is_translated_and_stepped_through(page):
    page.wait_for_selector("#model:has-text('Model: backwards')")
    translate(page, "one two three four")
    assert page.inner_text("#translation") == "four three two one"
    assert page.locator("#hypotheses li").count() == 5
    assert page.inner_text("#step-said") == "All 4 words. Step through them:"
    page.click("#step-back")
    assert page.inner_text("#step-said") == "Step 5 of 5: the end of the sentence"
    page.click("#step-back")
    page.click("#step-back")
    assert page.inner_text("#step-said") == "Step 3 of 5: “two”"
    assert page.locator("#translation mark").all_inner_texts() == ["two"]
    assert page.locator("#translate-view ol.queries li").count() == 3
    assert {query for query, _ in shown_lines(page, "#translate-view")} == {2}
    assert "To write “two”" in page.inner_text("#lines-said")
    assert page.locator("#written span").all_inner_texts() == ["four", "three", "two"]
    assert page.locator("#written .now").all_inner_texts() == ["two"]
    first = page.locator("#weights-now li").first
    assert first.inner_text().split() == ["two", "80", "%"]
    next_words = page.locator("#next li").all_inner_texts()
    assert next_words[0].split() == ["two", "90", "%"]
    assert len(next_words) == 4
    looks = page.locator("#looks tr").all_inner_texts()
    assert re.match(r"two\s+two 0\.80", looks[0])
    assert re.match(r"one\s+one 0\.80", looks[1]), "the second hypothesis is turned by one word"
    page.click("#step-on")
    assert page.locator("#translation mark").all_inner_texts() == ["one"]
    page.focus("#step")
    page.keyboard.press("Home")
    assert page.inner_text("#step-said") == "Step 1 of 5: “four”"
    assert page.locator("#step-back").is_disabled()
    page.click("#step-all")
    assert page.locator("#translation mark").count() == 0
    assert {query for query, _ in shown_lines(page, "#translate-view")} == {0, 1, 2, 3}


def test_play_lights_up_each_stage_and_ends_with_all_words(page):
    translate(page, "one two")
    page.evaluate(
        """() => { window.seen = []; new MutationObserver(() => {
             const lit = [...document.querySelectorAll(".lit")].map((one) => one.id.slice(6));
             const step = byId("step-said").textContent.split(":")[0];
             const now = step + " " + lit.join("+");
             if (seen.at(-1) !== now) seen.push(now);
           }).observe(byId("result"), { subtree: true, childList: true, attributes: true }); }"""
    )
    page.clock.install()
    page.click("#play")
    assert page.inner_text("#play") == "❚❚ Pause"
    assert page.locator("#stage-encoder.lit").count() == 1
    for _ in range(8):
        page.clock.run_for(1200)
    page.wait_for_selector("#play:has-text('Play')")
    assert page.evaluate("seen.filter((one) => !one.endsWith(' '))") == [
        "Step 1 of 3 encoder",
        *(f"Step {k} of 3 {lit}" for k in (1, 2, 3) for lit in ("attention", "attention+decoder")),
    ]
    assert page.inner_text("#step-said") == "All 2 words. Step through them:"
    page.click("#play")
    page.clock.run_for(1200)
    page.click("#play")  # pauses
    page.clock.run_for(9000)
    assert page.inner_text("#step-said") == "Step 1 of 3: “two”"


def test_another_hypothesis_can_be_looked_at(page):
    translate(page, "one two three")
    page.locator("#hypotheses button").nth(1).click()
    assert page.inner_text("#translation") == "two one three"
    assert page.locator("#hypotheses button").nth(1).get_attribute("aria-pressed") == "true"


def test_pointing_at_a_word_shows_its_lines_and_a_click_keeps_them(page):
    translate(page, "one two three")
    assert len(shown_lines(page, "#translate-view")) == 9
    word = page.locator("#translate-view ol.queries button").first  # "three"
    word.hover()
    assert {query for query, _ in shown_lines(page, "#translate-view")} == {0}
    assert "“three” looks at “three” 0.80" in page.inner_text("#translate-view .said")
    page.hover("h1")
    assert len(shown_lines(page, "#translate-view")) == 9
    word.click()
    page.hover("h1")
    assert word.get_attribute("aria-pressed") == "true"
    assert {query for query, _ in shown_lines(page, "#translate-view")} == {0}
    word.click()
    page.hover("h1")
    page.evaluate("document.activeElement.blur()")
    assert len(shown_lines(page, "#translate-view")) == 9


def test_the_heatmap_says_what_is_under_the_pointer(page):
    translate(page, "one two three")
    page.click("#translate-view [data-view=heatmap]")
    box = page.evaluate("translateView.box")
    place = {"x": box["left"] + 2.5 * box["cell"], "y": box["top"] + 0.5 * box["cell"]}
    page.hover("#translate-view canvas", position=place)
    assert page.inner_text("#translate-view .said") == "“three” looks at “three”: 0.8000"


def test_a_refusal_is_shown_and_the_next_one_works(page, address):
    with page.expect_response("**/api/translate"):
        page.evaluate("byId('text').maxLength = 9999")
        page.route("**/api/translate", lambda route: route.fulfill(
            status=200, content_type="application/json", body="nonsense"))  # fmt: skip
        page.click("#translate-form button")
    page.wait_for_function("() => byId('translate-error').textContent !== ''")
    assert "without an explanation" in page.inner_text("#translate-error")
    page.unroute("**/api/translate")
    translate(page, "it works again")
    assert page.inner_text("#translate-error") == ""


def test_nothing_to_translate_is_no_error(page):
    page.fill("#text", "   ")
    page.click("#translate-form button")
    page.wait_for_function("() => byId('translation').textContent === '(nothing)'")
    assert page.inner_text("#step-said") == "All 0 words. Step through them:"
    page.click("#step-back")
    page.click("#play")
    page.click("#play")


# All of it ---------------------------------------------------------------------------------------


def test_text_is_never_html(page):
    # Spaces would make words of it.
    evil = EVIL.replace(" ", "/")
    translate(page, f"{evil} two")
    assert page.inner_text("#translation") == f"two {evil}"
    for view in ("lines", "table", "heatmap"):
        page.click(f"#translate-view [data-view={view}]")
    page.click("#tab-own")
    for field in ("#own-queries", "#own-keys"):
        page.fill(field, f"{EVIL}\nb\nc")
    page.click("#own-form button")
    for view in ("lines", "table"):
        page.click(f"#own-view [data-view={view}]")
        assert page.locator(f"#own-view section:visible >> text={EVIL}").count() == 2
    page.fill("#own-weights", f"{EVIL}\n1 2 3\n1 2 3")
    page.click("#own-form button")
    page.wait_for_timeout(100)
    assert page.locator("main img, main script").count() == 0


def test_the_theme_changes_everything(page):
    back = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(back) == "rgb(255, 255, 255)"
    page.click("#theme")
    assert page.evaluate(back) == "rgb(18, 21, 28)"
    assert page.get_attribute("#theme", "aria-label") == "Change to the light theme"


def test_tabs_follow_the_arrow_keys(page):
    page.focus("#tab-translate")
    page.keyboard.press("ArrowRight")
    assert page.locator("#scores").is_visible()
    page.wait_for_selector("#plane [data-point]")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.locator("#own").is_visible()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser, address, theme):
    with quiet_page(browser, color_scheme=theme) as page:
        page.goto(address)
        assert page.evaluate("document.documentElement.dataset.theme") == theme
        translate(page, "one two three")
        assert accessibility(page) == []
        page.click("#translate-view [data-view=heatmap]")
        page.click("#step-back")
        assert accessibility(page) == []
        open_scores(page)
        assert accessibility(page) == []
        weights(page)
        page.click("#tab-own")
        page.click("#own-form button")
        assert accessibility(page) == []
        page.evaluate("byId('own').append(make('button'))")  # and it would find something
        assert [one["id"] for one in accessibility(page)] == ["button-name"]


def test_a_phone_needs_no_sideways_scrolling(phone):
    assert overflow(phone) <= 0
    translate(phone, "one two three four five six seven eight nine ten " + "long" * 12)
    for view in ("lines", "heatmap", "table"):
        phone.click(f"#translate-view [data-view={view}]")
        assert overflow(phone) <= 0, view
    open_scores(phone)
    assert overflow(phone) <= 0
    point = phone.locator('[data-point="key 2"]').bounding_box()
    assert point["width"] >= 24, "a finger must be able to take it"
    phone.click("#tab-own")
    phone.click("#own-form button")
    assert overflow(phone) <= 0
    assert accessibility(phone) == []


def test_without_a_model_the_page_says_why(browser):
    app = Playground(None, missing="no model: train one.").app()
    with served(app) as address, quiet_page(browser) as page:
        page.goto(address)
        page.wait_for_selector("#model:has-text('There is no model here')")
        # The example is there all the same.
        page.wait_for_selector("#translate-view .pairs line", state="attached")


def test_a_model_that_is_compiled_is_announced(browser):
    door = threading.Event()
    playground = Playground(Reverser(), models=[{"name": "slow"}], warm=[lambda: door.wait(20)])
    with served(playground.app()) as address, quiet_page(browser) as page:
        page.goto(address)
        page.wait_for_selector("#model:has-text('slow, being compiled …')")
        door.set()
        page.wait_for_function("() => byId('model').textContent === 'Model: slow'")


# Every layer and head ----------------------------------------------------------------------------


def test_layers_and_heads_of_a_transformer_are_stepped_through(browser):
    models = [{"name": "small", "parameters": 1, "architecture": "transformer"}]
    app = Playground(Reverser(), models=models).app()
    with served(app) as address, quiet_page(browser) as page:
        page.goto(address)
        asked = []
        page.on("request", lambda one: asked.append(one.post_data) if "layers" in one.url else None)
        translate(page, "one  two three")
        page.click("#layers summary")
        page.wait_for_selector("#layers-view canvas", state="visible")
        page.click("#layers [data-map=encoder]")
        assert page.get_attribute("#layers [data-map=encoder]", "aria-pressed") == "true"
        page.click("#layers-view [data-view=heads]")
        assert page.locator("#layers-view table.heads button").count() == 6
        page.click("#layers-view table.heads button[aria-label='Layer 2, head 3']")
        page.click("#layers-view [data-view=table]")
        cells = page.locator("#layers-view table tbody tr").first.inner_text().split()
        assert cells[0] == "one"
        assert float(cells[1]) == 1.0
        assert not accessibility(page)
        # The text as it was typed: words with spaces between them are other tokens.
        assert json.loads(asked[-1])["source"] == "one  two three"


def test_another_model_has_neither_the_languages_nor_the_example_of_the_bundled_one(browser):
    app = Playground(Reverser(), models=[{"name": "mine"}]).app()
    with served(app) as address, quiet_page(browser) as page:
        page.goto(address)
        page.wait_for_selector("label[for=text]:has-text('source')")
        assert page.input_value("#text") == ""
        assert not page.is_visible("#result")
        translate(page, "one two")
        assert "The target words on the right look at the source words" in page.inner_text(
            "#lines-said"
        )
        text = page.inner_text("main")
        assert "French" not in text
        assert "English" not in text


def test_a_recurrent_model_has_no_layers_to_step_through(page):
    assert not page.is_visible("#layers")
