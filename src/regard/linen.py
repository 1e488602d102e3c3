"""Flax Linen modules; the code is in `regard.modules.linen`."""

from regard.modules.linen import *  # noqa: F403
from regard.modules.linen import __all__ as __all__
