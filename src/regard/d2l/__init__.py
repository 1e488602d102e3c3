"""The names of Dive into Deep Learning's attention chapter (its JAX edition), over regard.

A page that says `from d2l import jax as d2l` runs after changing that line to
`from regard import d2l`: same names, arguments, shapes, return values and parameter names. Where
the book's code is wrong this is right, and the docstring says so. Nothing is downloaded: data are
local files or made here.
"""

from typing import Any

try:
    import flax.linen as _  # noqa: F401
except ModuleNotFoundError as _error:
    raise ImportError(
        "regard.d2l needs Flax, which is not installed.\n"
        'Install it with: pip install "regard[flax,show]"'
    ) from _error

from regard.d2l import attention as _attention
from regard.d2l import data as _data
from regard.d2l import helpers as _helpers
from regard.d2l import images as _images
from regard.d2l import plots as _plots
from regard.d2l import seq2seq as _seq2seq
from regard.d2l import training as _training
from regard.d2l import transformer as _transformer
from regard.d2l.attention import *  # noqa: F403
from regard.d2l.data import *  # noqa: F403
from regard.d2l.helpers import *  # noqa: F403
from regard.d2l.images import *  # noqa: F403
from regard.d2l.plots import *  # noqa: F403
from regard.d2l.seq2seq import *  # noqa: F403
from regard.d2l.training import *  # noqa: F403
from regard.d2l.transformer import *  # noqa: F403
from regard.show import show_heatmaps

__all__ = ["plt", "show_heatmaps"]  # noqa: F405
__all__ += _attention.__all__ + _helpers.__all__ + _plots.__all__ + _seq2seq.__all__
__all__ += _data.__all__ + _images.__all__ + _training.__all__ + _transformer.__all__


def __getattr__(name: str) -> Any:
    if name == "plt":  # not before it is asked for: Matplotlib is an extra
        return _plots.pyplot()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
