"""BLEU against the length of the source, as a picture: the curve that shows what attention buys."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def draw_lengths(bins: Sequence[dict[str, Any]], path: Path) -> Path:
    """Draws the table that `bleu_by_length` makes; bins without sentences are left out.

    Args:
        bins: with shortest, longest, sentences and bleu each.
        path: the PNG.

    Returns:
        The path.
    """
    # Not pyplot: it would choose a window system, and keep the figure.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from regard.seq2seq.export import replace_file

    used = [one for one in bins if one["bleu"] is not None]
    names = [
        f"{one['shortest']}+" if one["longest"] is None else f"{one['shortest']}-{one['longest']}"
        for one in used
    ]
    figure = Figure(figsize=(6.0, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = list(range(len(used)))
    axes.plot(places, [one["bleu"] for one in used], marker="o", color="#21918c")
    for place, one in zip(places, used, strict=True):
        axes.annotate(
            f"{one['bleu']:.1f}",
            (place, one["bleu"]),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    counts = [f"{name}\n{one['sentences']:,}" for name, one in zip(names, used, strict=True)]
    axes.set_xticks(places, counts, fontsize=8)
    axes.set_xlabel("source words, and how many sentences have so many")
    axes.set_ylabel("BLEU")
    axes.set_ylim(0, 1.15 * max((one["bleu"] for one in used), default=0.0) or 1.0)
    axes.spines[["top", "right"]].set_visible(False)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150)
    replace_file(path, drawn.getvalue())
    return path
