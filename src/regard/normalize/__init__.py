"""Step 3, normalize: scores to weights, one class per weight regime, and the empty-row rule."""

from regard.normalize.contract import Normalizer
from regard.normalize.kernel import Cone, Kernel, Uniform
from regard.normalize.softmax import Hard, Softmax
from regard.normalize.sparsemax import Sparsemax

__all__ = ["Cone", "Hard", "Kernel", "Normalizer", "Softmax", "Sparsemax", "Uniform"]
