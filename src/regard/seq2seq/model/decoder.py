"""The decoder: a recurrent network that attends to the source before every token it writes.

    c_t = attend(s_{t−1}, annotations)               the query is the *previous* state
    s_t = GRU([y_{t−1}; c_t], s_{t−1})
    o_t = tanh(W_s s_t + W_y y_{t−1} + W_c c_t)      deep output; for output_layer.py

Bahdanau et al. 2015, appendix A.2, with tanh for its maxout, as LIUM's nmtpy has it. s_{t−1} has
not read y_{t−1} yet. Where the config's `query` is "token", the query is s_{t−1} + W y_{t−1}
instead; where it is "conditional", two cells alternate, as in Nematus:

    s' = GRU₁(y_{t−1}, s_{t−1}),   c_t = attend(s', annotations),   s_t = GRU₂(c_t, s')

in the first layer; upper ones go on from s_t.

Training knows every y in advance, so their products are made before the loop and the deep output
after it; `_step` is what remains, and search takes the same one.
"""

import functools
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from regard.memory import Memory
from regard.seq2seq.model.attention import Attention, Encoded, attend_step
from regard.seq2seq.model.attention_record import Recorder
from regard.seq2seq.model.config import Config
from regard.seq2seq.model.dropout import drop, streams
from regard.seq2seq.model.linear import Linear, orthogonal_gates
from regard.seq2seq.model.recurrence import Cell, Times, cell_named, multiply, unroll

# The state of each layer, [B, T, decoder]: T is 1 in training, and the beam in search.
State = tuple[Any, ...]


class Shared(NamedTuple):
    """What every step sees.

    Attributes:
        encoded: the sentences.
        between: for each upper layer its bias, and its input's dropout, [B, 1, decoder].
        context_bias: of the cell that reads the context; None: one cell reads it and the token.
    """

    encoded: Encoded
    between: list[tuple[Array, Array]]
    context_bias: Array | None


class Decoder(nnx.Module):
    """Memory and embedded target tokens to readouts, from which the vocabulary is predicted.

    Parameters: `initial`, the first state from the mean annotation; `attention`; `input` and
    `context`, the first layer's products with y and c; `query_token`, the query's with y;
    `context_recurrent_kernel`, of the cell that reads c; these two where the config's `query` has
    them; `recurrent_kernels`, one per layer; `upper`, the higher layers' inputs; `from_state`,
    `from_embedding`, `from_context`, the deep output.

    Args:
        config: the model's.
        rngs: random numbers for the parameters.
    """

    looks: ClassVar[tuple[str, ...]] = ("writing", "reading", "explaining")

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        dtype, gates = config.compute_dtype, cell_named(config.cell).gates
        E, D, A = config.embedding, config.decoder, config.annotation
        attends = config.attention != "none"
        self.initial = Linear(A, D, dtype=dtype, rngs=rngs)
        self.attention = nnx.data(Attention(config, rngs=rngs) if attends else None)
        asks = attends and config.query == "token"
        query = Linear(E, D, use_bias=False, dtype=dtype, rngs=rngs) if asks else None
        self.query_token = nnx.data(query)
        self.input = Linear(E, gates * D, dtype=dtype, rngs=rngs)
        two = attends and config.query == "conditional"
        self.context = Linear(A, gates * D, use_bias=two, dtype=dtype, rngs=rngs)
        kernel = nnx.Param(orthogonal_gates(rngs.params(), D, gates)) if two else None
        self.context_recurrent_kernel = nnx.data(kernel)
        kernels = [orthogonal_gates(rngs.params(), D, gates) for _ in range(config.decoder_layers)]
        self.recurrent_kernels = nnx.List([nnx.Param(kernel) for kernel in kernels])
        upper = range(config.decoder_layers - 1)
        self.upper = nnx.List([Linear(D, gates * D, dtype=dtype, rngs=rngs) for _ in upper])
        self.from_state = Linear(D, E, dtype=dtype, rngs=rngs)
        self.from_embedding = Linear(E, E, use_bias=False, dtype=dtype, rngs=rngs)
        self.from_context = Linear(A, E, use_bias=False, dtype=dtype, rngs=rngs)

    def remember(self, states: tuple[Array, Array], lens: Array) -> Encoded:
        """What decoding needs of a sentence; keys are projected here and nowhere else.

        Args:
            states: of the encoder: annotations [B, S, 2 · encoder], zero at padding, and its last
                states [B, 2 · encoder].
            lens: [B].
        """
        annotations, summary = states
        if self.attention is None:
            raw = annotations.astype(self.config.compute_dtype)
            return Encoded(Memory.of(raw, raw, score=None, valid_lens=lens), summary)
        return Encoded(self.attention.remember(annotations, lens), summary)

    def for_hypotheses(self, encoded: Encoded) -> Encoded:
        """The sentences with values that are projected already, for `step`.

        A context is a weighted sum of annotations, and what the decoder makes of it is linear:
        W Σ α a = Σ α W a. The right side is one product per annotation instead of one per
        hypothesis and step, which pays as soon as there are several hypotheses.
        """
        if self.attention is None:
            return encoded
        times = functools.partial(multiply, self._kernels())
        parts = times("context", encoded.values), self.from_context(encoded.values)
        values = jnp.concatenate(parts, axis=-1)[:, :, None]  # [B, S, 1, gates · D + E]
        return replace(encoded, memory=replace(encoded.memory, value=values), projected=True)

    def start(self, encoded: Encoded, room: int | None = None) -> State:
        """The state before the first token, from the mean annotation: one query per sentence.

        Args:
            encoded: of `remember`.
            room: not used: the state has one size, whatever is written.
        """
        counts = jnp.maximum(encoded.lens, 1).astype(jnp.float32)
        total = encoded.values.astype(jnp.float32).sum(1, keepdims=True)
        hidden = jnp.tanh(self.initial(total / counts[:, None, None]))  # [B, 1, decoder]
        cell = cell_named(self.config.cell)
        return tuple(cell.initial(hidden) for _ in self.recurrent_kernels)

    def __call__(
        self,
        encoded: Encoded,
        embedded: Array,
        rng: Array | None = None,
        return_weights: bool = False,
        record: Recorder | None = None,
    ) -> tuple[Array, Array | None]:
        """Reads a whole target (teacher forcing).

        Args:
            encoded: of `remember`.
            embedded: [B, T, embedding], the target one step behind.
            rng: for dropout between layers and before the vocabulary; None: none.
            return_weights: whether the weights are wanted.
            record: collects the weights, as those of one layer and head.

        Returns:
            The readouts [B, T, embedding], and the weights [B, T, S] or None.
        """
        layers_rng, output_rng = streams(rng, 2)
        embedded = embedded.swapaxes(0, 1)[:, :, None]  # [T, B, 1, embedding]
        asked = return_weights or record is not None
        step = functools.partial(_step, cell_named(self.config.cell), asked)
        shared = self._shared(encoded, layers_rng)
        x = self._inputs(encoded, embedded)
        _, found = unroll(step, self._kernels(), shared, self.start(encoded), x)
        hidden, context, weights = found
        readout = self._readout(encoded, hidden, embedded, context)[:, :, 0]
        readout = drop(readout, self.config.output_dropout, output_rng).swapaxes(0, 1)
        weights = None if weights is None else weights[:, :, 0].swapaxes(0, 1)
        if record is not None and weights is not None and self.attention is not None:
            record.cross.append(weights[:, None])
        return readout, weights if return_weights else None

    def step(self, encoded: Encoded, state: State, embedded: Array) -> tuple[State, Array, Array]:
        """One token further, for T hypotheses per sentence.

        Args:
            encoded: of `remember` or `for_hypotheses`.
            state: [B, T, decoder] for each layer.
            embedded: [B, T, embedding], the previous token.

        Returns:
            The state, the readouts [B, T, embedding], and the weights [B, T, S].
        """
        times = functools.partial(multiply, self._kernels())
        cell, shared = cell_named(self.config.cell), self._shared(encoded, None)
        x = self._inputs(encoded, embedded)
        state, (hidden, context, weights) = _step(cell, True, times, shared, state, x)
        readout = self._readout(encoded, hidden, embedded, context)
        return state, readout, cast(Array, weights)

    def alone(self, encoded: Encoded, state: State, embedded: Array, which: Array) -> Array:
        """The readouts if a single annotation were all of the context, for several of them.

        Args:
            encoded: of `remember`, of a decoder that attends.
            state: [B, 1, decoder] for each layer.
            embedded: [B, 1, embedding], the previous token.
            which: [B, C], their places.

        Returns:
            [B, C, embedding].
        """
        times = functools.partial(multiply, self._kernels())
        cell, C = cell_named(self.config.cell), which.shape[1]
        contexts = jnp.take_along_axis(encoded.values, which[..., None], axis=1)
        contexts = contexts.astype(jnp.float32)  # [B, C, 2 · encoder]
        x, _ = self._inputs(encoded, embedded)
        shared = self._shared(encoded, None)
        state, x = _read(cell, times, shared, state, x)
        each, embedded = jax.tree.map(lambda part: jnp.repeat(part, C, axis=1), (state, embedded))
        states = _advance(cell, times, shared, each, x + times("context", contexts))
        return self._readout(encoded, cell.output(states[-1]), embedded, contexts)

    def _inputs(self, encoded: Encoded, embedded: Array) -> tuple[Array, Array | None]:
        """All that no state enters: [..., B, T, embedding] -> the first layer's input
        [..., B, T, gates · decoder], and the token's part of the query [..., B, T, decoder].
        """
        x = self.input(embedded)
        if self.attention is None:  # the context is always the same, and so is its product
            x = _add(x, self.context(encoded.summary)[:, None])
        return x, None if self.query_token is None else self.query_token(embedded)

    def _kernels(self) -> dict[str, Array]:
        """The kernels of the products that have to be in the loop."""
        dtype = self.config.compute_dtype
        kernels = {f"recurrent {i}": kernel for i, kernel in enumerate(self.recurrent_kernels)}
        kernels |= {f"input {i}": upper.kernel for i, upper in enumerate(self.upper, start=1)}
        if self.attention is not None:
            kernels |= {"context": self.context.kernel}
        if self.context_recurrent_kernel is not None:
            kernels |= {"context recurrent": self.context_recurrent_kernel}
        cast = {name: kernel[...].astype(dtype) for name, kernel in kernels.items()}
        return cast if self.attention is None else cast | self.attention.kernels()

    def _shared(self, encoded: Encoded, rng: Array | None) -> Shared:
        """What is the same at every step, the dropout of upper layers' inputs among it.

        A mask that changed from step to step would wipe out what the state remembers (Gal &
        Ghahramani 2016).
        """
        B, rate = encoded.lens.shape[0], self.config.layer_dropout
        ones = jnp.ones((B, 1, self.config.decoder), jnp.float32)
        rngs = streams(rng, len(self.upper))
        between = [
            (upper.bias[...], drop(ones, rate, rng, rows=0))
            for upper, rng in zip(self.upper, rngs, strict=True)
        ]
        two = self.context_recurrent_kernel is not None
        return Shared(encoded, between, self.context.bias[...] if two else None)

    def _readout(
        self, encoded: Encoded, hidden: Array, embedded: Array, context: Array | None
    ) -> Array:
        """tanh(W_s s + W_y y + W_c c), [..., B, T, embedding]."""
        total = self.from_state(hidden) + self.from_embedding(embedded)
        if context is None:
            total = _add(total, self.from_context(encoded.summary)[:, None])
        else:
            total = total + (context if encoded.projected else self.from_context(context))
        return jnp.tanh(total)


def _step(
    cell: Cell, return_weights: bool, times: Times, shared: Shared, state: State, inputs: Any
) -> tuple[State, tuple[Array, Array | None, Array | None]]:
    """Attends, then advances every layer. Returns the state and (hidden, context, weights)."""
    encoded, (x, asked) = shared.encoded, inputs
    context, weights = None, None
    if encoded.attends:
        state, x = _read(cell, times, shared, state, x)
        query = cell.output(state[-1] if shared.context_bias is None else state[0])
        query = query if asked is None else query + asked
        context, weights = attend_step(times, encoded.memory, query)
        if encoded.projected:
            into_cell, context = jnp.split(context, [x.shape[-1]], axis=-1)
        else:
            into_cell = times("context", context)
        x = x + into_cell
    elif return_weights:  # it attends to nothing
        B, S = encoded.values.shape[:2]
        weights = jnp.zeros((B, x.shape[1], S), jnp.float32)
    states = _advance(cell, times, shared, state, x)
    return states, (cell.output(states[-1]), context, weights if return_weights else None)


def _read(cell: Cell, times: Times, shared: Shared, state: State, x: Array) -> tuple[State, Array]:
    """The token first, where a cell of its own reads it; x is then what is left to read."""
    if shared.context_bias is None:
        return state, x
    recurrent = times("recurrent 0", cell.output(state[0]))
    read = cell.advance(x, recurrent, state[0])
    return (read, *state[1:]), shared.context_bias[None, None]


def _advance(cell: Cell, times: Times, shared: Shared, state: State, x: Array) -> State:
    """Every layer one token further; x is the first one's input."""
    states: list[Any] = []
    for layer, old in enumerate(state):
        name = f"recurrent {layer}"
        if layer:
            bias, kept = shared.between[layer - 1]
            x = _add(times(f"input {layer}", cell.output(states[-1]) * kept), bias)
        elif shared.context_bias is not None:
            name = "context recurrent"
        states.append(cell.advance(x, times(name, cell.output(old)), old))
    return tuple(states)


def _add(total: Array, part: Array) -> Array:
    """total + part, which has fewer axes: the last ones."""
    return total + part.reshape((1,) * (total.ndim - part.ndim) + part.shape)
