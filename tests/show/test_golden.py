"""Pictures and pages of three maps have the structure that was looked at and found good.

Where a change is meant: PYTHONPATH=tests python tests/show/golden_maps.py, then look at the maps
and commit the files.
"""

import numpy as np
import pytest

from show.golden_maps import GOLDEN, golden_maps, outlines, page_outline

pytest.importorskip("matplotlib", reason='needs matplotlib: pip install "regard[show]"')

MAPS = golden_maps()


def kept(file):
    return (GOLDEN / file).read_text(encoding="utf-8").splitlines()


def levels(lines):
    return np.array([[int(digit) for digit in line] for line in lines[1:]])


def same_picture(found, expected):
    """The same size, and nearly as dark everywhere: letters may be cut a little differently."""
    difference = np.abs(levels(found) - levels(expected))
    return found[0] == expected[0] and difference.max() <= 2 and difference.mean() < 0.1


@pytest.mark.parametrize("name", MAPS)
def test_picture_and_page_are_as_they_were(name):
    found = outlines(name, MAPS[name])
    assert same_picture(found[f"{name}.png.txt"], kept(f"{name}.png.txt"))
    assert found[f"{name}.html.txt"] == kept(f"{name}.html.txt")


def test_the_opened_pages_are_as_they_were(request):
    browser = request.getfixturevalue("browser")
    for name, seen in MAPS.items():
        found = outlines(name, seen, browser)[f"{name}.opened.txt"]
        assert found == kept(f"{name}.opened.txt"), name


def test_another_map_has_another_picture():
    """The comparison above can fail: a map turned around, one word more, another scale."""
    expected = kept("alignment.png.txt")
    seen = MAPS["alignment"]
    turned = type(seen)(seen.weights[:, :, ::-1], seen.query_labels, seen.key_labels, seen.title)
    flat = type(seen)(np.full((8, 8), 0.125), seen.query_labels, seen.key_labels, seen.title)
    bare = type(seen)(seen.weights, seen.query_labels, seen.key_labels)
    for other in (turned, flat, bare):
        found = outlines("other", other)["other.png.txt"]
        assert not same_picture(found, expected)


def test_an_outline_counts_and_nests():
    page = '<div class="a b"><p>x</p><p>y</p><br><td aria-label="7 of 9"></td></div>'
    assert page_outline(page) == ["div.a.b", "  p ×2", "  br", "  td[aria-label=N of N]"]
