"""Takes the pictures under docs/images: `PYTHONPATH=tests python tests/playground/screenshots.py`.

They show the bundled model. The example that the page opens with is written first.
"""

import json
import pathlib

from playground.browser import chromium, open_scores, quiet_page
from playground.fakes import served
from regard.playground.requests import TranslateRequest
from regard.playground.server import Playground
from regard.playground.translations import answers
from regard.seq2seq.translator import Translator
from regard.show import AttentionMap

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "images"
EXAMPLE = ROOT / "src" / "regard" / "playground" / "static" / "example.json"
LARGEST = 260_000  # bytes of a picture
SENTENCE = "My sister wants to buy a red car."


def write_example(translator: Translator) -> None:
    asked = TranslateRequest((SENTENCE,), 5, 4, True, 5)
    ((found,),) = answers(translator, [asked], lambda: None, True)
    text = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
    EXAMPLE.write_text(text + "\n", encoding="utf-8")


def keep(page, name: str, **options) -> None:
    page.wait_for_timeout(300)
    path = FOLDER / f"{name}.png"
    page.screenshot(path=path, **options)
    size = path.stat().st_size
    print(f"{path.relative_to(ROOT)}: {size // 1000} kB")
    if size > LARGEST:
        raise SystemExit(f"{path.name} has {size} bytes, at most {LARGEST} are wanted.")


def step_to(page, step: int) -> None:
    page.wait_for_selector("#translate-view ol.queries button", timeout=60_000)
    page.fill("#step", str(step))
    page.evaluate("document.activeElement.blur()")


def playground_pictures(address: str, browser) -> None:
    size = {"width": 1100, "height": 900}
    with quiet_page(browser, viewport=size) as page:
        page.goto(address)
        page.wait_for_selector("#translate-view ol.queries button")
        keep(page, "playground-first")
        step_to(page, 6)
        keep(page, "playground-translate")
        open_scores(page)
        keep(page, "playground-scores")
        page.click("#tab-own")
        keep(page, "playground-own")
    with quiet_page(browser, viewport=size, color_scheme="dark") as page:
        page.goto(address)
        step_to(page, 6)
        keep(page, "playground-dark")
    phone = {"width": 400, "height": 860}
    for theme, name in (("light", "playground-phone"), ("dark", "playground-phone-dark")):
        with quiet_page(browser, viewport=phone, color_scheme=theme) as page:
            page.goto(address)
            if theme == "light":
                step_to(page, 6)
            else:
                open_scores(page)
            keep(page, name, full_page=theme == "light")


def page_picture(translator: Translator, browser) -> None:
    ((found,),) = translator.translate([SENTENCE])
    seen = AttentionMap(found.weights, found.target_words, found.source_words, SENTENCE)
    path = seen.save(FOLDER / "attention-page.html")
    try:
        with quiet_page(browser, viewport={"width": 800, "height": 620}) as page:
            page.goto(path.as_uri())
            page.focus(".scroll")
            for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight"):
                page.keyboard.press(key)
            keep(page, "attention-page")
    finally:
        path.unlink()


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    translator = Translator.load()
    write_example(translator)
    playground = Playground(
        translator, models=[{"name": "English → French", "languages": ["en", "fr"]}]
    )
    with served(playground.app()) as address, chromium() as browser:
        playground_pictures(address, browser)
        page_picture(translator, browser)


if __name__ == "__main__":
    main()
