"""The picture on the first page: one small call of attend, step by step."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pictures import INK

import regard


def pipeline() -> Any:
    """Scores, mask, weights and output of five queries and seven keys, side by side."""
    from matplotlib import pyplot

    query = jax.random.normal(jax.random.key(3), (5, 8))
    key = jax.random.normal(jax.random.key(4), (7, 8))
    value = jax.random.normal(jax.random.key(5), (7, 3))
    mask = regard.Mask.window(2, 1) & regard.Mask.lengths(jnp.array(6))
    everything = regard.weights(query, key, mask=mask, normalize=regard.Uniform())
    steps = [
        ("score", "a(q, k)", regard.scores(query, key), "RdBu_r"),
        ("mask", "who may look", everything > 0, "Greens"),
        ("normalize", "weights, rows sum to 1", regard.weights(query, key, mask=mask), "Blues"),
        ("pool", "Σ weight · value", regard.attend(query, key, value, mask=mask), "PuOr_r"),
    ]
    shapes = [np.shape(array) for *_, array, _ in steps]
    figure, panels = pyplot.subplots(
        1,
        4,
        figsize=(9.5, 2.6),
        width_ratios=[columns for _, columns in shapes],
        gridspec_kw=dict(wspace=0.35),
    )
    for panel, (name, words, array, cmap) in zip(panels, steps, strict=True):
        drawn = np.asarray(array, np.float32)
        low = -np.abs(drawn).max() if drawn.min() < 0 else 0.0
        panel.imshow(drawn, cmap=cmap, vmin=low, vmax=np.abs(drawn).max(), aspect="equal")
        panel.set_title(name, fontsize=12, fontweight="bold")
        panel.set_xlabel(words, fontsize=9)
        panel.set_xticks([])
        panel.set_yticks([])
        for spine in panel.spines.values():
            spine.set_visible(True)
            spine.set_alpha(0.4)
    panels[0].set_ylabel("queries", fontsize=9)
    for left, right in itertools.pairwise(panels):
        a, b = left.get_position(), right.get_position()
        figure.text((a.x1 + b.x0) / 2, 0.5, "→", ha="center", va="center", fontsize=16, color=INK)
    return figure
