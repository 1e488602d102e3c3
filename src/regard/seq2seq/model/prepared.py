"""A model as search needs it: made once for a model and a dtype, not again for every batch.

Kernels are in the dtype of the products, and the output embedding lies as its product reads it.
"""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
from flax import nnx
from jax import Array

from regard.seq2seq.model.output_layer import OutputLayer
from regard.seq2seq.model.translation_model import Model
from regard.seq2seq.train.runtime_options import unoptimized


class Prepared(NamedTuple):
    """A model for search.

    Attributes:
        graph: its structure, of nnx.split.
        params: its parameters, matrices in the dtype that they are multiplied in.
        output: the vocabulary's projection.
    """

    graph: Any
    params: Any
    output: OutputLayer


# By model and dtype: the parameters that a `Prepared` was made of, and the `Prepared`.
_made: WeakKeyDictionary[Model, dict[str, tuple[list[Array], Prepared]]] = WeakKeyDictionary()


def prepared(model: Model, dtype: str) -> Prepared:
    """The model prepared for search; the same object until a parameter is replaced.

    Args:
        model: the translator.
        dtype: "float32", "bfloat16", or "auto": bfloat16 where the machine multiplies it faster,
            on a GPU and on a CPU with instructions for it.
    """
    if dtype == "auto":
        dtype = "bfloat16" if _multiplies_bfloat16() else "float32"
    graph, params = nnx.split(model)
    leaves = jax.tree.leaves(params)
    of_model = _made.setdefault(model, {})
    before, found = of_model.get(dtype, ([], None))
    if found is None or any(old is not new for old, new in zip(before, leaves, strict=True)):
        if dtype != model.config.compute_dtype.name:
            graph = _graph(replace(model.config, dtype=dtype))
        found = Prepared(graph, *_prepare(model, params, dtype))
        of_model[dtype] = leaves, found
    return found


def _prepare(model: Model, params: Any, dtype: str) -> tuple[Any, OutputLayer]:
    """The parameters and the vocabulary's projection; what stays as it is is not copied.

    Embeddings do: of a table whose rows are gathered, XLA on a CPU would make a float32 copy again.
    """
    found, tree = jax.tree_util.tree_flatten_with_path(params)
    leaves = [leaf for _, leaf in found]
    kernels = [
        place
        for place, (path, leaf) in enumerate(found)
        if path[0].key in ("encoder", "decoder") and leaf.ndim > 1 and leaf.dtype != dtype
    ]
    of_output = model.output_kernel, model.output_bias[...]
    cast, output = _program()(dtype, [leaves[place] for place in kernels], *of_output)
    for place, kernel in zip(kernels, cast, strict=True):
        leaves[place] = kernel
    return jax.tree.unflatten(tree, leaves), output


@functools.cache
def _program() -> Any:
    """Compiled at optimization level 0: it runs once for a model."""
    return jax.jit(_arrays, static_argnums=0, compiler_options=unoptimized())


def _arrays(
    dtype: str, kernels: list[Array], output_kernel: Array, output_bias: Array
) -> tuple[list[Array], OutputLayer]:
    cast = [kernel.astype(dtype) for kernel in kernels]
    return cast, OutputLayer.of(output_kernel.astype(dtype), output_bias)


@functools.cache
def _graph(config: Any) -> Any:
    return nnx.split(nnx.eval_shape(lambda: Model(config, rngs=nnx.Rngs(0))))[0]


@functools.cache
def _multiplies_bfloat16() -> bool:
    if jax.default_backend() != "cpu":
        return jax.default_backend() == "gpu"
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags
