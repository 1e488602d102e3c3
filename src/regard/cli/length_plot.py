"""A plot of BLEU against source length, which shows the benefit of attention."""

import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLORS = ("#21918c", "#b5532a", "#440154", "#5ec962")


def draw_lengths(curves: dict[str, Sequence[dict[str, Any]]], path: Path) -> Path:
    """Draws the tables that `bleu_by_length` makes; bins without sentences are left out.

    Args:
        curves: for each name of a model its bins, with shortest, longest, sentences and bleu each.
            All of the same sentences. One curve needs no name, and has no legend.
        path: the PNG.

    Returns:
        The path.
    """
    # Not pyplot: it would choose a window system, and keep the figure.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from regard.atomic_file import write_atomically

    kept = {name: [one for one in bins if one["bleu"] is not None] for name, bins in curves.items()}
    used = next(iter(kept.values()))
    names = [
        f"{one['shortest']}+" if one["longest"] is None else f"{one['shortest']}-{one['longest']}"
        for one in used
    ]
    figure = Figure(figsize=(6.0, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = list(range(len(used)))
    for (name, bins), color in zip(kept.items(), itertools.cycle(COLORS), strict=False):
        axes.plot(places, [one["bleu"] for one in bins], marker="o", color=color, label=name)
        for place, one in zip(places, bins, strict=True):
            axes.annotate(
                f"{one['bleu']:.1f}",
                (place, one["bleu"]),
                xytext=(0, 6),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
    if len(kept) > 1:
        axes.legend(frameon=False, fontsize=8, loc="lower left")
    counts = [f"{name}\n{one['sentences']:,}" for name, one in zip(names, used, strict=True)]
    axes.set_xticks(places, counts, fontsize=8)
    axes.set_xlabel("source words, and how many sentences have so many")
    axes.set_ylabel("BLEU")
    highest = max((one["bleu"] for bins in kept.values() for one in bins), default=0.0)
    axes.set_ylim(0, 1.15 * highest or 1.0)
    axes.spines[["top", "right"]].set_visible(False)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150)
    write_atomically(path, drawn.getvalue())
    return path
