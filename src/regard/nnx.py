"""Flax NNX modules; the code is in `regard.modules.nnx`."""

from regard.modules.nnx import *  # noqa: F403
from regard.modules.nnx import __all__ as __all__
