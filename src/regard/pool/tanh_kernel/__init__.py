"""The exact additive score on a GPU: tanh(x + y) = 1 - 2 / (1 + e^2x e^2y), never stored.

operands.py makes the exponentials, one per token; tile.py the scores of a tile inside a kernel;
pull.py takes d scores back to x, y and w. Softmax, masks and dropout are wide_kernel's.
"""

from regard.pool.tanh_kernel.operands import TanhOperands, operands
from regard.pool.tanh_kernel.pull import d_projected
from regard.pool.tanh_kernel.tile import TanhScore, tanh_scores

__all__ = ["TanhOperands", "operands", "TanhScore", "tanh_scores", "d_projected"]
