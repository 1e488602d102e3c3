"""Weights from and to other libraries; the code is in `regard.modules.interop`."""

from regard.modules.interop import *  # noqa: F403
from regard.modules.interop import __all__ as __all__
