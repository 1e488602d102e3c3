"""Takes the pictures under docs/images: `PYTHONPATH=tests python tests/playground/screenshots.py`.

They show the bundled model.
"""

import pathlib

from playground.browser import chromium, open_scores, quiet_page
from playground.fakes import served
from regard.playground.server import Playground
from regard.seq2seq.translator import Translator
from regard.show import AttentionMap

FOLDER = pathlib.Path(__file__).parents[2] / "docs" / "images"
LARGEST = 150_000  # bytes of a picture
SENTENCE = "My sister wants to buy a red car."


def playground() -> Playground:
    return Playground(Translator.load(), models=[{"name": "the bundled model"}])


def keep(page, name: str, **options) -> None:
    page.wait_for_timeout(300)
    path = FOLDER / f"{name}.png"
    page.screenshot(path=path, **options)
    size = path.stat().st_size
    print(f"{path.relative_to(FOLDER.parents[1])}: {size // 1000} kB")
    if size > LARGEST:
        raise SystemExit(f"{path.name} has {size} bytes, at most {LARGEST} are wanted.")


def translate(page) -> None:
    page.fill("#text", SENTENCE)
    page.click("#translate-form button")
    page.wait_for_selector("#translate-view ol.queries button", timeout=60_000)


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with served(playground().app()) as address, chromium() as browser:
        size = {"width": 1100, "height": 760}
        with quiet_page(browser, viewport=size) as page:
            page.goto(address)
            translate(page)
            keep(page, "playground-translate")
            open_scores(page)
            page.set_viewport_size({"width": 1100, "height": 820})
            keep(page, "playground-scores")
        phone = {"width": 400, "height": 860}
        with quiet_page(browser, viewport=phone, color_scheme="dark") as page:
            page.goto(address)
            open_scores(page)
            keep(page, "playground-phone")
        ((found,),) = Translator.load().translate([SENTENCE])
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


if __name__ == "__main__":
    main()
