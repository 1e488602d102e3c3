"""The vocabulary's projection as search needs it, and the dtype that search computes in."""

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from regard.seq2seq.decode.top_k import BLOCK
from regard.seq2seq.model.translation_model import Model


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OutputLayer:
    """The output embedding, transposed and padded once, before the loop.

    Attributes:
        kernel: [embedding, V], V the vocabulary rounded up to whole blocks of `best_of`.
        bias: [V], −inf for what is not in the vocabulary.
    """

    kernel: Array
    bias: Array

    @classmethod
    def of(cls, model: Model) -> "OutputLayer":
        missing = -model.config.target_vocab % BLOCK
        kernel = model.output_kernel.astype(model.config.compute_dtype)
        return cls(
            jnp.pad(kernel, ((0, missing), (0, 0))).T,
            jnp.pad(model.output_bias[...], (0, missing), constant_values=-jnp.inf),
        )

    def logits(self, readout: Array) -> Array:
        """[..., embedding] -> [..., V], float32."""
        rows = readout.reshape(-1, readout.shape[-1]).astype(self.kernel.dtype)
        logits = jnp.matmul(rows, self.kernel, preferred_element_type=jnp.float32)
        return (logits + self.bias[None]).reshape(*readout.shape[:-1], -1)


def for_search(model: Model, dtype: str) -> tuple[Any, Any]:
    """The model's graph and parameters, to compute in a dtype.

    Args:
        model: the translator.
        dtype: "float32", "bfloat16", or "auto": bfloat16 where the machine multiplies it faster,
            on a GPU and on a CPU with instructions for it.
    """
    if dtype == "auto":
        dtype = "bfloat16" if _multiplies_bfloat16() else "float32"
    graph, params = nnx.split(model)
    if dtype != model.config.compute_dtype.name:
        graph = _graph(replace(model.config, dtype=dtype))
    return graph, params


def cast_kernels(params: Any, dtype: Any) -> Any:
    """Matrices in the dtype that they are multiplied in: once, instead of at every step."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.ndim > 1 else leaf, params)


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
