"""The vocabulary's projection as search needs it."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from regard.seq2seq.decode.top_k import BLOCK
from regard.seq2seq.model.translation_model import Model


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OutputLayer:
    """The output embedding, transposed and padded once.

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
