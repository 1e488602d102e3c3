"""Three figures as a paper would print them: `python docs/paper_figures.py` draws them.

Run it in the root of the repository. The figures go into docs/images as paper-*.png, and the page
docs/guides/figures.md shows them. A paper takes the PDF: the same calls with the ending .pdf.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import regard
from regard.show import AttentionMap

IMAGES = Path("docs/images")
SENTENCES = ("I don't like red wine.", "She gave him the old blue book.")
WIDTH = 6.75  # inches of a page with two columns


def alignments(path):
    """Two translations side by side: one scale, one color bar, rows that sum to 1."""
    import matplotlib
    from matplotlib import pyplot

    from regard.seq2seq.translator import Translator

    found = [best for best, *_ in Translator.load().translate(list(SENTENCES))]
    figure, axes = pyplot.subplots(1, 2, figsize=(WIDTH, 3.1), layout="constrained")
    for number, (best, panel) in enumerate(zip(found, axes, strict=True)):
        seen = AttentionMap(best.weights, best.target_words, best.source_words, end="(end)")
        last = number == len(found) - 1
        seen.plot(ax=panel, titles=[f"({'ab'[number]})"], xlabel="read", colorbar=last)
    axes[0].set_ylabel("written")
    with matplotlib.rc_context({"pdf.fonttype": 42, "svg.fonttype": "none"}):
        figure.savefig(path, dpi=200)
    pyplot.close(figure)


def scores_and_regimes(path):
    """Four scores in three regimes, on the same queries and keys."""
    points = jnp.linspace(-1, 1, 24)[:, None] * jnp.array([[3.0, 1.0]])
    wave = jnp.concatenate([points, jnp.sin(2 * points[:, :1])], axis=1)
    kernels = jax.random.normal(jax.random.key(0), (2, 3, 16))
    scores = {
        "dot": regard.Dot(1.0),
        "Gaussian": regard.Gaussian(0.7),
        "bilinear": regard.Bilinear(jnp.diag(jnp.array([-1.0, 1.0, 3.0]))),
        "additive": regard.Additive(*kernels, jax.random.normal(jax.random.key(1), (16,))),
    }
    regimes = {"softmax": regard.Softmax(), "sparsemax": regard.Sparsemax(), "hard": regard.Hard()}
    weights = [
        [regard.weights(wave, wave, score=score, normalize=regime) for score in scores.values()]
        for regime in regimes.values()
    ]
    names = [f"{score}, {regime}" for regime in regimes for score in scores]
    AttentionMap(np.array(weights)).save(
        path, figsize=(WIDTH, 4.9), titles=names, xlabel="keys", ylabel="queries"
    )


def heads(path):
    """144 heads of one text: the window widens from head to head, the score from layer to layer."""
    tokens = ["the", "cat", "that", "the", "dog", "saw", "on", "the", "mat", "slept"]
    places = jnp.arange(len(tokens), dtype=jnp.float32)[:, None]
    weights = [
        [
            regard.weights(
                places,
                places,
                score=regard.Gaussian(0.4 * 1.35**layer),
                mask=regard.Mask.causal() & regard.Mask.window(head + 1, 0),
            )
            for head in range(12)
        ]
        for layer in range(12)
    ]
    AttentionMap(np.array(weights), tokens, tokens).save(path, xlabel="keys", ylabel="queries")


def main(folder=IMAGES, kind="png"):
    drawn = {"alignments": alignments, "scores": scores_and_regimes, "heads": heads}
    for name, draw in drawn.items():
        draw(folder / f"paper-{name}.{kind}")
        print(f"paper-{name}.{kind}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]), *sys.argv[2:3])
