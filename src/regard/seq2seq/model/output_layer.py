"""The vocabulary's projection as search needs it."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from regard.seq2seq.decode.top_k import BLOCK


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
    def of(cls, kernel: Array, bias: Array) -> "OutputLayer":
        """Of the output embedding (target_vocab, embedding) and the bias (target_vocab,)."""
        missing = -bias.shape[0] % BLOCK
        return cls(
            jnp.pad(kernel, ((0, missing), (0, 0))).T,
            jnp.pad(bias, (0, missing), constant_values=-jnp.inf),
        )

    def logits(self, readout: Array) -> Array:
        """[..., embedding] -> [..., V], float32."""
        rows = readout.reshape(-1, readout.shape[-1]).astype(self.kernel.dtype)
        logits = jnp.matmul(rows, self.kernel, preferred_element_type=jnp.float32)
        return (logits + self.bias[None]).reshape(*readout.shape[:-1], -1)
