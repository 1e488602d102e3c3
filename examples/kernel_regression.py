"""Kernel regression is attention pooling: one curve for each weight regime, on one picture.

The keys are where a noisy curve was measured, the values what was measured there, and every
query asks: what is the curve's height here? A Gaussian score says how near each key is; the
regime turns scores into weights. The size of a dot is its weight for the query at the dashed line.

    python examples/kernel_regression.py [FOLDER]      writes kernel_regression.png, 5 seconds
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

import regard


def curve(x):
    return 2 * jnp.sin(x) + x


def epanechnikov(a):
    return jnp.maximum(0, 1 + a / 2)  # a = -(distance / width)² / 2: nothing past two widths


place_rng, noise_rng = jax.random.split(jax.random.key(3))
key = jnp.sort(jax.random.uniform(place_rng, (50, 1), maxval=5.0), axis=0)  # [S, 1]
value = curve(key) + 0.5 * jax.random.normal(noise_rng, key.shape)  # [S, 1]
query = jnp.linspace(0, 5, 201)[:, None]  # [T, 1]
score = regard.Gaussian(width=0.25)

# A cone only adds up. Divided by what evenly spread keys would add up to, it is right where keys
# are as dense as on average.
on_average = epanechnikov(regard.scores(query, query, score=score))[100].mean() * len(key)

regimes = {
    "Softmax": regard.Softmax(),
    "Sparsemax": regard.Sparsemax(),
    "Kernel (Epanechnikov)": regard.Kernel(epanechnikov),
    "Cone (the same, only added up)": regard.Cone(lambda a: epanechnikov(a) / on_average),
    "Hard (the nearest one)": regard.Hard(),
    "Uniform (their average)": regard.Uniform(),
}
figure, grid = plt.subplots(2, 3, figsize=(11, 6), sharex=True, sharey=True, layout="constrained")
for axes, (name, normalize) in zip(grid.flat, regimes.items(), strict=True):
    out, weights = regard.attend(
        query, key, value, score=score, normalize=normalize, return_weights=True
    )
    off = jnp.sqrt(jnp.mean((out - curve(query)) ** 2))
    axes.axvline(2.5, color="0.7", linestyle="--", linewidth=1)
    axes.plot(query, curve(query), color="0.6", label="the curve")
    axes.scatter(key, value, s=8 + 500 * weights[100], color="#d9a441", alpha=0.8, linewidth=0)
    axes.plot(query, out, color="#1f5fa8", linewidth=2, label="attention")
    axes.set_title(f"{name}: off by {off:.2f}", fontsize=10)
grid[0, 0].legend(loc="upper left", frameon=False)
figure.savefig(Path(*sys.argv[1:2]) / "kernel_regression.png", dpi=120)
