"""An `AttentionMap` as one HTML file that works offline: heatmap, lines and table.

page.html, view.css and view.js are joined here; the playground serves view.css and view.js as they
are. Labels are passed as JSON and written as text, never as HTML; weights are passed as 16-bit
numbers in base64.
"""

from __future__ import annotations

import base64
import html
import json
from importlib.resources import files
from typing import TYPE_CHECKING

import numpy as np

from regard.show.heatmaps import color_reach

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
        "top": color_reach(seen.weights, signed=seen.signed),
        "weights": base64.b64encode(steps.tobytes()).decode("ascii"),
    }
    # Inside a script element nothing is unescaped, so the text must not contain "</script>".
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    parts = {
        "{{title}}": html.escape(seen.title or "Attention"),
        "{{css}}": _part("view.css"),
        "{{js}}": _part("view.js"),
        "{{data}}": text,
    }
    page = _part("page.html")
    for place, part in parts.items():  # the data last: placeholders in labels are not replaced
        page = page.replace(place, part)
    return page


def frame_of(seen: AttentionMap) -> str:
    """The page inside an iframe."""
    page = html.escape(page_of(seen), quote=True)
    title = html.escape(seen.title or "Attention", quote=True)
    return (
        f'<iframe srcdoc="{page}" title="{title}" sandbox="allow-scripts" '
        f'style="width:100%;height:560px;border:0"></iframe>'
    )


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
