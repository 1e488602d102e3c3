"""An `AttentionMap` as one HTML file that works offline: heatmap, lines and table.

page.html, view.css and view.js lie beside this file and are put together here; the playground
serves the latter two as they are. Labels travel as
JSON and are written as text, never as HTML; weights travel as 16-bit numbers, in base64.
"""

from __future__ import annotations

import base64
import html
import json
from importlib.resources import files
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from regard.show.attention_map import AttentionMap

STEPS = 65535  # between the smallest weight and the largest


def page_of(seen: AttentionMap) -> str:
    """The page."""
    low = min(float(seen.weights.min(initial=0.0)), 0.0)
    high = float(seen.weights.max(initial=0.0))
    high = high if high > low else low + 1.0
    steps = np.round((seen.weights - low) / (high - low) * STEPS).astype("<u2")
    data = {
        "title": seen.title,
        "queries": seen.query_labels,
        "keys": seen.key_labels,
        "shape": seen.weights.shape,
        "low": low,
        "high": high,
        "weights": base64.b64encode(steps.tobytes()).decode("ascii"),
    }
    # In a script element nothing is escaped, so that no "</script>" may stand in the text.
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    parts = {
        "{{title}}": html.escape(seen.title or "Attention"),
        "{{css}}": _part("view.css"),
        "{{js}}": _part("view.js"),
        "{{data}}": text,
    }
    page = _part("page.html")
    for place, part in parts.items():  # the data last: what it says is not looked into
        page = page.replace(place, part)
    return page


def frame_of(seen: AttentionMap, height: int = 560) -> str:
    """The page inside an iframe."""
    page = html.escape(page_of(seen), quote=True)
    title = html.escape(seen.title or "Attention", quote=True)
    return (
        f'<iframe srcdoc="{page}" title="{title}" sandbox="allow-scripts" '
        f'style="width:100%;height:{height}px;border:0"></iframe>'
    )


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
