"""Matplotlib figures as SVG inside a page: in the page's own ink, whether it is light or dark."""

import html
import io
import itertools
import re
from typing import Any

import matplotlib

INK = "#0a0b0c"  # drawn in this color, a line or a letter takes on the color of the page's text
_counter = itertools.count(1)

STYLE = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.size": 10,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "legend.frameon": False,
    "lines.linewidth": 2.0,
    "savefig.facecolor": "none",
    "svg.fonttype": "none",  # letters stay letters: small, and a reader can search for them
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    # Told apart by color-blind eyes too, and bright enough for both backgrounds.
    "axes.prop_cycle": matplotlib.cycler(
        color=["#3b7dd8", "#e07b39", "#2a9d7c", "#c74f8a", "#8b6fc9", "#8a8f98"]
    ),
}
matplotlib.use("svg")
matplotlib.rcParams.update(STYLE)


def svg(figure: Any, words: str) -> str:
    """The figure as an element, with words for those who cannot see it; and closes the figure."""
    from matplotlib import pyplot

    buffer = io.StringIO()
    # No date, and ids that repeat: the same page is the same file.
    number = next(_counter)
    with matplotlib.rc_context({"svg.hashsalt": "regard"}):
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="f{number}-', text)
    text = re.sub(r'(url\(|href=")#', rf"\g<1>#f{number}-", text)
    text = text.replace(INK, "currentColor").replace("'DejaVu Sans'", "inherit")
    label = html.escape(words, quote=True)
    text = text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    wide = " wide" if figure.get_figwidth() > 7 else ""
    return f'<figure class="drawn{wide}" data-search-exclude>{text}</figure>'
