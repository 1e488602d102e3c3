"""Takes the pictures under docs/images: `PYTHONPATH=tests python tests/playground/screenshots.py`.

They show the bundled model. Where it is not installed a stand-in writes French by rote for the one
sentence in the picture, and the page names it a stand-in.
"""

import pathlib
import sys

import numpy as np

from playground.browser import chromium, open_scores, quiet_page
from playground.fakes import Said, served
from regard.playground.server import Playground
from regard.show import AttentionMap

FOLDER = pathlib.Path(__file__).parents[2] / "docs" / "images"
LARGEST = 150_000  # bytes of a picture
SENTENCE = "The black cat that I saw was sleeping."
WORDS = ("The", "black", "cat", "that", "I", "saw", "was", "sleeping", ".")
FRENCH = (
    ("Le chat noir que j' ai vu dormait .", (0, 2, 1, 3, 4, 5, 5, 7, 8)),
    ("Le chat noir que je voyais dormait .", (0, 2, 1, 3, 4, 5, 7, 8)),
    ("Le chat noir que j' ai vu était endormi .", (0, 2, 1, 3, 4, 5, 5, 6, 7, 8)),
    ("Un chat noir que j' ai vu dormait .", (0, 2, 1, 3, 4, 5, 5, 7, 8)),
    ("Le chat noir que j' ai vu dort .", (0, 2, 1, 3, 4, 5, 5, 7, 8)),
)


class Rote:
    """Knows one sentence by heart."""

    def translate(self, texts, *, search, n_best=1):
        return [[self.said(k) for k in range(min(n_best, len(FRENCH)))] for _ in texts]

    @staticmethod
    def said(k):
        text, looks = FRENCH[k]
        words = tuple(text.split())
        place = np.arange(len(WORDS))
        scores = -0.9 * np.abs(place - np.array(looks)[:, None])
        weights = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        shown = text.replace("' ", "'").replace(" .", ".")
        return Said(shown, -0.4 - 0.25 * k, WORDS, words, weights)


def playground() -> Playground:
    try:
        from regard.seq2seq.translator import Translator

        return Playground(Translator.load(), models=[{"name": "the bundled model"}])
    except (ImportError, OSError) as error:
        print(f"a stand-in is pictured, not the bundled model: {error}", file=sys.stderr)
        return Playground(Rote(), models=[{"name": "a stand-in, no model"}])


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
    page.locator("#translate-view ol.queries button").nth(1).hover()


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
        rng = np.random.default_rng(2)
        weights = np.stack([Rote.said(0).weights, rng.dirichlet([0.3] * 9, size=9)])
        drawn = AttentionMap(weights, FRENCH[0][0].split(), WORDS, "A drawn example, two heads")
        path = drawn.save(FOLDER / "attention-page.html")
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
