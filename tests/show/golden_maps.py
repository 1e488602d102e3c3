"""Three maps, and what their pictures and pages look like, as text that can be read and compared.

    PYTHONPATH=tests python tests/show/golden_maps.py     draws them anew into tests/show/golden

Structure, not pixels: a picture is told by its size and by how dark each of its parts is, a page
by its elements.
"""

import io
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np

from regard.show import AttentionMap

GOLDEN = Path(__file__).parent / "golden"
TILES = 24  # along either side of a picture
LEVELS = 9  # from white, 0, to black
EMPTY = ("meta", "link", "input", "br", "img", "hr")  # elements that have no end


def golden_maps() -> dict[str, AttentionMap]:
    """An alignment with words, heads in layers, and a long one."""
    rng = np.random.default_rng(11)
    french = ["Le", "chat", "noir", "dort", "sur", "le", "lit", "."]
    english = ["The", "black", "cat", "sleeps", "on", "the", "bed", "."]
    looks = np.full((8, 8), 0.02)
    looks[np.arange(8), [0, 2, 1, 3, 4, 5, 6, 7]] = 0.86
    heads = rng.dirichlet(np.full(6, 0.3), size=(2, 3, 5))
    near = np.exp(-(((np.arange(200)[:, None] - np.arange(200)) / 20.0) ** 2))
    return {
        "alignment": AttentionMap(looks, french, english, "The black cat"),
        "heads": AttentionMap(heads, title="Two layers of three heads"),
        "long": AttentionMap(near / near.sum(1, keepdims=True), title="Neighbors"),
    }


def picture_outline(png: bytes) -> list[str]:
    """The size, and a digit for how dark each of 24 × 24 tiles is."""
    from matplotlib.image import imread

    pixels = imread(io.BytesIO(png), format="png")[:, :, :3].mean(-1)
    tiles = [
        [part.mean() for part in np.array_split(band, TILES, axis=1)]
        for band in np.array_split(pixels, TILES, axis=0)
    ]
    # The square root tells light shades apart, which most of them are.
    levels = np.rint(LEVELS * np.sqrt(1 - np.array(tiles))).astype(int)
    height, width = pixels.shape
    return [f"{width} × {height} pixels", *("".join(map(str, row)) for row in levels)]


def page_outline(html: str) -> list[str]:
    """The elements of a page, each under the one it is in; equal neighbors are counted."""
    reader = _Outline()
    reader.feed(html)
    return reader.lines(reader.root)


class _Outline(HTMLParser):
    """A tree of (what an element is, what is in it)."""

    def __init__(self) -> None:
        super().__init__()
        self.root: list = []
        self.open = [self.root]

    def handle_starttag(self, tag, attributes):
        inside: list = []
        self.open[-1].append((_named(tag, dict(attributes)), inside))
        if tag not in EMPTY:
            self.open.append(inside)

    def handle_endtag(self, tag):
        if tag not in EMPTY:
            self.open.pop()

    def lines(self, inside: list, indent: str = "") -> list[str]:
        found: list[tuple[list[str], int]] = []
        for name, children in inside:
            one = [indent + name, *self.lines(children, indent + "  ")]
            if found and found[-1][0] == one:
                found[-1] = (one, found[-1][1] + 1)
            else:
                found.append((one, 1))
        return [
            line + (f" ×{times}" if times > 1 and not place else "")
            for one, times in found
            for place, line in enumerate(one)
        ]


def _named(tag: str, attributes: dict[str, str | None]) -> str:
    name = tag
    if attributes.get("id"):
        name += f"#{attributes['id']}"
    for word in (attributes.get("class") or "").split():
        name += f".{word}"
    for kept in ("role", "aria-label", "aria-pressed", "scope", "data-view", "type"):
        if attributes.get(kept) is not None:
            # Names and sizes, but not the numbers: those are other tests' matter.
            name += f"[{kept}={re.sub(r'[0-9]+([.][0-9]+)?', 'N', attributes[kept] or '')}]"
    if "hidden" in attributes:
        name += "[hidden]"
    return name


def outlines(name: str, seen: AttentionMap, browser=None) -> dict[str, list[str]]:
    """What is kept of a map, by the name of its file."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        png = seen.save(Path(folder) / f"{name}.png").read_bytes()
        page = seen.save(Path(folder) / f"{name}.html")
        found = {
            f"{name}.png.txt": picture_outline(png),
            f"{name}.html.txt": page_outline(page.read_text(encoding="utf-8")),
        }
        if browser is not None:
            found[f"{name}.opened.txt"] = _opened(browser, page)
    return found


def _opened(browser, path: Path) -> list[str]:
    """The page after its script has run, in each of its views."""
    from playground.browser import quiet_page

    lines = []
    with quiet_page(browser) as page:
        page.goto(path.as_uri())
        for view in ("heatmap", "lines", "table", "heads"):
            if not page.is_visible(f"[data-view={view}]"):  # of a single head
                continue
            page.click(f"[data-view={view}]")
            page.wait_for_selector(f"[data-view={view}][aria-pressed=true]")
            lines += [f"{view}:", *page_outline(page.inner_html("#view"))]
    return lines


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from playground.browser import chromium

    GOLDEN.mkdir(exist_ok=True)
    with chromium() as browser:
        for name, seen in golden_maps().items():
            for file, lines in outlines(name, seen, browser).items():
                (GOLDEN / file).write_text("\n".join(lines) + "\n", encoding="utf-8")
                print(f"{file}: {len(lines)} lines")
