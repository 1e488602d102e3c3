"""Step 1, score: how well a query fits a key, a(q, k), and its lift to an inner product."""

from regard.score.additive import Additive
from regard.score.algebra import Scaled, Sum
from regard.score.bilinear import Bilinear
from regard.score.contract import Lift, Score
from regard.score.dot import Dot
from regard.score.gaussian import Gaussian
from regard.score.positions import Alibi, Rotary
from regard.score.relative_bias import RelativeBias

__all__ = [
    "Additive",
    "Alibi",
    "Bilinear",
    "Dot",
    "Gaussian",
    "Lift",
    "RelativeBias",
    "Rotary",
    "Scaled",
    "Score",
    "Sum",
]
