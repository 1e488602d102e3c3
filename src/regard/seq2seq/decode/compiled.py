"""A function of a model as a compiled program, at one of two optimization levels.

For one sentence, compiling takes fifty times as long as translating. At optimization level 0 it
takes a quarter of the time; the program is then half as fast, which matters from a hundred
sentences on.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import Array

from regard.seq2seq.train.runtime_options import optimized, unoptimized


@functools.cache
def compiled(function: Callable, hurry: bool, **static: Any) -> Any:
    """The program by which function(model, *arrays, **static) is run.

    Args:
        function: of a model and arrays.
        hurry: whether to compile at optimization level 0.
        static: what else it is given.

    Returns:
        A function of the model's graph and parameters, of nnx.split, and of the arrays.
    """

    def program(graph: Any, params: Any, *arrays: Array) -> Any:
        return function(nnx.merge(graph, params), *arrays, **static)

    options = unoptimized() if hurry else optimized()
    return jax.jit(program, static_argnums=0, compiler_options=options)
