"""The names of Dive into Deep Learning's attention chapter (its JAX edition), over regard.

A page that says `from d2l import jax as d2l` runs after changing that line to
`from regard import d2l`: same names, arguments, shapes, return values and parameter names. Where
the book's code is wrong this is right, and the docstring says so. Left out: the book's data sets
and its Trainer.
"""

from typing import Any

try:
    import flax.linen as _  # noqa: F401
except ModuleNotFoundError as _error:
    raise ImportError(
        "regard.d2l needs Flax, which is not installed.\n"
        'Install it with: pip install "regard[flax,show]"'
    ) from _error

from regard.d2l.attention import (
    AdditiveAttention,
    DotProductAttention,
    MultiHeadAttention,
    PositionalEncoding,
    masked_softmax,
)
from regard.d2l.helpers import (
    abs,
    add_to_class,
    arange,
    argmax,
    astype,
    batch_matmul,
    bleu,
    check_len,
    check_shape,
    concat,
    cos,
    cosh,
    exp,
    expand_dims,
    eye,
    float32,
    get_key,
    int32,
    int64,
    linspace,
    log,
    matmul,
    meshgrid,
    nn_Module,
    normal,
    numpy,
    ones,
    ones_like,
    rand,
    randn,
    reduce_mean,
    reduce_sum,
    repeat,
    reshape,
    sigmoid,
    sin,
    sinh,
    size,
    stack,
    swapaxes,
    tanh,
    tensor,
    to,
    transpose,
    zeros,
    zeros_like,
)
from regard.d2l.plots import plot, pyplot, set_axes, set_figsize, use_svg_display
from regard.d2l.seq2seq import (
    GRU,
    RNN,
    AttentionDecoder,
    Decoder,
    Encoder,
    EncoderDecoder,
    Seq2SeqAttentionDecoder,
    Seq2SeqEncoder,
)
from regard.show import show_heatmaps

__all__ = [
    # attention
    "masked_softmax",
    "DotProductAttention",
    "AdditiveAttention",
    "MultiHeadAttention",
    "PositionalEncoding",
    # sequence to sequence
    "RNN",
    "GRU",
    "Encoder",
    "Decoder",
    "EncoderDecoder",
    "AttentionDecoder",
    "Seq2SeqEncoder",
    "Seq2SeqAttentionDecoder",
    "bleu",
    # pictures
    "show_heatmaps",
    "plt",
    "plot",
    "set_axes",
    "set_figsize",
    "use_svg_display",
    # arrays
    "tensor",
    "ones",
    "ones_like",
    "zeros",
    "zeros_like",
    "arange",
    "linspace",
    "eye",
    "meshgrid",
    "rand",
    "randn",
    "normal",
    "abs",
    "exp",
    "log",
    "sin",
    "cos",
    "sinh",
    "cosh",
    "tanh",
    "sigmoid",
    "matmul",
    "batch_matmul",
    "reshape",
    "transpose",
    "swapaxes",
    "expand_dims",
    "concat",
    "stack",
    "repeat",
    "reduce_sum",
    "reduce_mean",
    "argmax",
    "astype",
    "size",
    "numpy",
    "to",
    "int32",
    "int64",
    "float32",
    # the rest
    "get_key",
    "check_shape",
    "check_len",
    "add_to_class",
    "nn_Module",
]


def __getattr__(name: str) -> Any:
    if name == "plt":  # not before it is asked for: Matplotlib is an extra
        return pyplot()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
