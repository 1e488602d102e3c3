"""The encoder: a bidirectional recurrent network that annotates every source token.

An annotation is the forward state, which has read the sentence up to the token, beside the
backward state, which has read it from the end (Bahdanau et al. 2015, section 3.2). Padding is
never read: a state passes over it unchanged.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from regard.seq2seq.model.attention_record import Recorder
from regard.seq2seq.model.config import Config
from regard.seq2seq.model.dropout import drop, streams
from regard.seq2seq.model.linear import Linear, orthogonal_gates
from regard.seq2seq.model.recurrence import Cell, Times, cell_named, unroll


class Encoder(nnx.Module):
    """Embedded source tokens to annotations, through layers of both directions.

    Parameters, in each of `layers`: `forward` and `backward`, the products of the two directions
    with their inputs (kernel (in, gates · encoder), bias); `forward_kernel` and `backward_kernel`
    (encoder, gates · encoder), those with their states.

    Args:
        config: the model's.
        rngs: random numbers for the parameters.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        widths = [config.embedding] + [config.annotation] * (config.encoder_layers - 1)
        self.layers = nnx.List([_Layer(config, width, rngs=rngs) for width in widths])

    def __call__(
        self,
        embedded: Array,
        lens: Array,
        rng: Array | None = None,
        record: Recorder | None = None,
        longest: Array | None = None,
    ) -> tuple[Array, Array]:
        """Annotates.

        Args:
            embedded: [B, S, embedding].
            lens: [B], how many tokens each sentence has; 0 is a row of padding.
            rng: for the dropout between layers and on the annotations; None: none.
            record: nothing is added: there is no attention here.
            longest: the largest of `lens`, where the loop may end; see `Model.encode`.

        Returns:
            The annotations [B, S, 2 · encoder], zero at padding; and the last states of both
            directions [B, 2 · encoder], zero for an empty sentence.
        """
        embedded = embedded.swapaxes(0, 1)  # [S, B, embedding]
        S = embedded.shape[0]
        valid = jnp.arange(S, dtype=lens.dtype)[:, None, None] < lens[None, :, None]  # [S, B, 1]
        *rngs, last_rng = streams(rng, len(self.layers) + 1)
        rates = [self.config.layer_dropout] * (len(self.layers) - 1)
        rates.append(self.config.annotation_dropout)
        states = embedded
        for layer, rate, rng in zip(self.layers, rates, rngs, strict=True):
            states, last = layer(states, valid, longest)
            states = drop(states, rate, rng)
        # Without attention the last states are the context, and are treated as annotations are.
        last = drop(last, self.config.annotation_dropout, last_rng)
        return jnp.where(valid, states, 0.0).swapaxes(0, 1), last


class _Layer(nnx.Module):
    """One layer: both directions in one loop, the backward one on the reversed sentences."""

    def __init__(self, config: Config, width: int, *, rngs: nnx.Rngs) -> None:
        self.config = config
        gates, H = cell_named(config.cell).gates, config.encoder
        self.forward = Linear(width, gates * H, dtype=config.compute_dtype, rngs=rngs)
        self.backward = Linear(width, gates * H, dtype=config.compute_dtype, rngs=rngs)
        self.forward_kernel = nnx.Param(orthogonal_gates(rngs.params(), H, gates))
        self.backward_kernel = nnx.Param(orthogonal_gates(rngs.params(), H, gates))

    def __call__(self, inputs: Array, valid: Array, longest: Array | None) -> tuple[Array, Array]:
        """[S, B, width] -> states [S, B, 2 · encoder], last states [B, 2 · encoder]."""
        config = self.config
        cell, dtype = cell_named(config.cell), config.compute_dtype

        def turned(x: Array) -> Array:
            """Reversed in time, from the end of the longest sentence on; its own inverse."""
            x = jnp.flip(x, 0)
            return x if longest is None else jnp.roll(x, longest, axis=0)

        # Reversed, a shorter sentence starts with padding, over which the zero state passes.
        ahead = self.forward(inputs)  # [S, B, gates · H]
        back = self.backward(turned(inputs))
        start = cell.initial(jnp.zeros((inputs.shape[1], config.encoder), ahead.dtype))
        kernels = {
            "forward": self.forward_kernel[...].astype(dtype),
            "backward": self.backward_kernel[...].astype(dtype),
        }
        xs = (ahead, back, valid, turned(valid))
        step = functools.partial(_step, cell)
        last, (ahead, back) = unroll(step, kernels, None, (start, start), xs, longest)
        states = jnp.concatenate([ahead, turned(back)], axis=-1)
        return states, jnp.concatenate([cell.output(state) for state in last], axis=-1)


def _step(cell: Cell, times: Times, shared: None, carry: Any, x: Any) -> tuple[Any, Any]:
    ahead, back = carry
    x_ahead, x_back, valid_ahead, valid_back = x
    ahead = _pass_over(cell, valid_ahead, x_ahead, times("forward", cell.output(ahead)), ahead)
    back = _pass_over(cell, valid_back, x_back, times("backward", cell.output(back)), back)
    return (ahead, back), (cell.output(ahead), cell.output(back))


def _pass_over(cell: Cell, valid: Array, x: Array, recurrent: Array, state: Any) -> Any:
    """The next state, or the same one where there is nothing to read."""
    new = cell.advance(x, recurrent, state)
    return jax.tree.map(lambda new, old: jnp.where(valid, new, old), new, state)
