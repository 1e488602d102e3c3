"""regard: attention for JAX. Every score, every mask, every weight regime, and you can look at it.

The names, in the order of the pipeline: attend checks its arrays, then score -> mask ->
normalize -> pool.
"""

import importlib.metadata

from regard.attend import attend
from regard.mask import Mask
from regard.memory import Memory
from regard.normalize import Cone, Hard, Kernel, Normalizer, Softmax, Sparsemax, Uniform
from regard.pool.merge import merge
from regard.score import (
    Additive,
    Alibi,
    Bilinear,
    Dot,
    Gaussian,
    Lift,
    RelativeBias,
    Rotary,
    Score,
)
from regard.summary import Summary, attention_map, summarize
from regard.weights import explain, masked_softmax, scores, weights

try:
    __version__ = importlib.metadata.version("regard")
except importlib.metadata.PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

__all__ = [
    "attend",
    "weights",
    "scores",
    "merge",
    "masked_softmax",
    "explain",
    "summarize",
    "attention_map",
    "Summary",
    "Score",
    "Lift",
    "Dot",
    "Gaussian",
    "Bilinear",
    "Additive",
    "Rotary",
    "Alibi",
    "RelativeBias",
    "Mask",
    "Softmax",
    "Sparsemax",
    "Kernel",
    "Cone",
    "Hard",
    "Uniform",
    "Normalizer",
    "Memory",
]
