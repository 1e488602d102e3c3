"""The book's recurrent encoder and its decoder with Bahdanau attention.

Time comes first inside the recurrent layers, batch first everywhere else. Loops over time are
scans, so that a program's size does not grow with the sentence.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from flax import linen as nn
from jax import Array

from regard.d2l.attention import AdditiveAttention
from regard.d2l.training import Classifier, cross_entropies

__all__ = ["RNN", "GRU", "Encoder", "Decoder", "EncoderDecoder", "AttentionDecoder"]
__all__ += ["Seq2SeqEncoder", "Seq2SeqAttentionDecoder", "Seq2Seq"]

# The state of a decoder with attention: the encoder's outputs (batch, source, hidden), the hidden
# states (layers, batch, hidden), and the source's lengths (batch,) or None.
State = Sequence[Any]


class RNN(nn.Module):
    """One layer of tanh units over a sequence, time first.

    Args:
        inputs: (steps, batch, width).
        H: the state to start from, (batch, num_hiddens); None: zeros.

    Returns:
        The hidden states (steps, batch, num_hiddens), and the last, (batch, num_hiddens).
    """

    num_hiddens: int

    @nn.compact
    def __call__(self, inputs: Array, H: Array | None = None) -> tuple[Array, Array]:
        if H is None:
            H = jnp.zeros((inputs.shape[1], self.num_hiddens), inputs.dtype)
        H, outputs = _over_time(nn.SimpleCell)(features=self.num_hiddens)(H, inputs)
        return outputs, H


class GRU(RNN):
    """num_layers gated recurrent layers, each reading the one below, with dropout in between.

    In the book every layer but the last reads the *input*, so that its third layer never sees
    the second; here each layer reads the one below it. With one or two layers the two agree.

    Example:
        >>> from regard import d2l
        >>> (outputs, state), params = d2l.GRU(num_hiddens=16, num_layers=2).init_with_output(
        ...     d2l.get_key(), d2l.ones((9, 4, 8))
        ... )
        >>> outputs.shape, state.shape
        ((9, 4, 16), (2, 4, 16))

    Args:
        X: (steps, batch, width).
        state: the states to start from, (num_layers, batch, num_hiddens); None: zeros.
        training: whether dropout is on.

    Returns:
        The last layer's states (steps, batch, num_hiddens), and every layer's last state
        (num_layers, batch, num_hiddens).

    Raises:
        ValueError: the state is not of this layer's shape.
    """

    num_layers: int
    dropout: float = 0

    @nn.compact
    def __call__(
        self, X: Array, state: Array | None = None, training: bool = False
    ) -> tuple[Array, Array]:
        if state is None:
            state = jnp.zeros((self.num_layers, X.shape[1], self.num_hiddens), X.dtype)
        if state.shape != (self.num_layers, X.shape[1], self.num_hiddens):
            raise ValueError(
                "a GRU's state is (num_layers, batch, num_hiddens); a decoder starts from its "
                "encoder's, so the two agree in both. "
                f"Got state {list(state.shape)}, X {list(X.shape)}, num_layers {self.num_layers}, "
                f"num_hiddens {self.num_hiddens}."
            )
        last = []
        for layer in range(self.num_layers):
            if layer:
                X = nn.Dropout(self.dropout, deterministic=not training)(X)
            H, X = _over_time(nn.GRUCell)(features=self.num_hiddens)(state[layer], X)
            last.append(H)
        return X, jnp.stack(last)


class Encoder(nn.Module):
    """What an encoder must have: a call that takes the source."""

    def __call__(self, X: Array, *args: Any, training: bool = False) -> Any:
        raise NotImplementedError


class Decoder(nn.Module):
    """What a decoder must have: a state made from the encoder's outputs, and a call."""

    def init_state(self, enc_all_outputs: Any, *args: Any) -> Any:
        raise NotImplementedError

    def __call__(self, X: Array, state: Any, training: bool = False) -> tuple[Array, Any]:
        raise NotImplementedError


class AttentionDecoder(Decoder):
    """A decoder that exposes its attention weights."""

    @property
    def attention_weights(self) -> Any:
        raise NotImplementedError


class Seq2SeqEncoder(Encoder):
    """Embedding, then a GRU.

    Like the book's it reads to the end of the row, padding included; the decoder's lengths keep
    padding out of the attention.

    Example:
        >>> from regard import d2l
        >>> encoder = d2l.Seq2SeqEncoder(vocab_size=10, embed_size=8, num_hiddens=16, num_layers=2)
        >>> (outputs, state), params = encoder.init_with_output(d2l.get_key(), d2l.zeros((4, 9)))
        >>> outputs.shape, state.shape
        ((9, 4, 16), (2, 4, 16))

    Args:
        X: the source's token numbers, (batch, steps), of any dtype.
        training: whether dropout is on.

    Returns:
        The last layer's states (steps, batch, num_hiddens), and every layer's last state
        (num_layers, batch, num_hiddens).
    """

    vocab_size: int
    embed_size: int
    num_hiddens: int
    num_layers: int
    dropout: float = 0

    def setup(self) -> None:
        self.embedding = nn.Embed(self.vocab_size, self.embed_size)
        self.rnn = GRU(self.num_hiddens, self.num_layers, self.dropout)

    def __call__(self, X: Array, *args: Any, training: bool = False) -> tuple[Array, Array]:
        embedded = self.embedding(X.T.astype(jnp.int32))  # [steps, B, embed]
        return self.rnn(embedded, training=training)


class Seq2SeqAttentionDecoder(AttentionDecoder):
    """GRU decoder with Bahdanau attention: a new context vector at every step.

    At each step the query is the last layer's state of the step before, the keys and values are
    the encoder's states; context and embedded token are the GRU's input. The keys are projected
    once per call and the steps are one scan. (The book's class takes num_hiddens and num_layers
    from global variables of the page; here they are its own.)

    Example:
        >>> from regard import d2l
        >>> encoder = d2l.Seq2SeqEncoder(10, 8, 16, 2)
        >>> decoder = d2l.Seq2SeqAttentionDecoder(10, 8, 16, 2)
        >>> X = d2l.zeros((4, 7), dtype=d2l.int32)
        >>> encoded = encoder.init_with_output(d2l.get_key(), X)[0]
        >>> state = decoder.init_state(encoded, None)
        >>> (output, state), params = decoder.init_with_output(d2l.get_key(), X, state)
        >>> output.shape, state[0].shape, state[1].shape
        ((4, 7, 10), (4, 7, 16), (2, 4, 16))

    Args:
        X: the target's token numbers, (batch, steps), of any dtype.
        state: from `init_state` or from the call before.
        training: whether dropout is on.

    Returns:
        The logits (batch, steps, vocab_size), and the state after the last step: decoding in
        pieces equals decoding at once. The weights, a list of one (batch, 1, source) per step,
        are sown into the collection "intermediates" as "dec_attention_weights"; a bound decoder
        has them as `attention_weights`.
    """

    vocab_size: int
    embed_size: int
    num_hiddens: int
    num_layers: int
    dropout: float = 0

    def setup(self) -> None:
        self.attention = AdditiveAttention(self.num_hiddens, self.dropout)
        self.embedding = nn.Embed(self.vocab_size, self.embed_size)
        self.rnn = GRU(self.num_hiddens, self.num_layers, self.dropout)
        self.dense = nn.Dense(self.vocab_size)

    def init_state(
        self, enc_all_outputs: tuple[Array, Array], enc_valid_lens: Array | None = None, *args: Any
    ) -> State:
        outputs, hidden_state = enc_all_outputs
        return outputs.swapaxes(0, 1), hidden_state, enc_valid_lens

    def __call__(self, X: Array, state: State, training: bool = False) -> tuple[Array, State]:
        enc_outputs, hidden_state, enc_valid_lens = state
        keys = self.attention.project(enc_outputs)  # [B, S, h], once for all steps

        def step(
            decoder: Seq2SeqAttentionDecoder, hidden_state: Array, x: Array
        ) -> tuple[Array, tuple[Array, Array]]:
            query = hidden_state[-1][:, None]  # [B, 1, h]
            context, weights = decoder.attention.pool(
                query, keys, enc_outputs, enc_valid_lens, training
            )
            x = jnp.concatenate([context[:, 0], x], axis=-1)  # [B, h + embed]
            out, hidden_state = decoder.rnn(x[None], hidden_state, training=training)
            return hidden_state, (out[0], weights)

        scan = nn.scan(
            step, variable_broadcast="params", split_rngs={"params": False, "dropout": True}
        )
        embedded = self.embedding(X.T.astype(jnp.int32))  # [steps, B, embed]
        hidden_state, (outputs, weights) = scan(self, hidden_state, embedded)
        if self.is_mutable_collection("intermediates"):  # taking them apart is work
            self.sow("intermediates", "dec_attention_weights", list(weights))  # each [B, 1, S]
        return self.dense(outputs).swapaxes(0, 1), [enc_outputs, hidden_state, enc_valid_lens]

    @property
    def attention_weights(self) -> list[Array]:
        """Of a bound decoder's latest call: one (batch, 1, source) per step.

        Bind with the collection open: decoder.bind(variables, mutable=["intermediates"]).
        """
        return seen_by(self, "dec_attention_weights")


class EncoderDecoder(Classifier):
    """An encoder and a decoder: a model of the target given the source.

    Example:
        >>> from regard import d2l
        >>> model = d2l.EncoderDecoder(
        ...     d2l.Seq2SeqEncoder(10, 8, 16, 2), d2l.Seq2SeqAttentionDecoder(10, 8, 16, 2)
        ... )
        >>> source, target, lens = d2l.ones((4, 9)), d2l.ones((4, 7)), d2l.tensor([9, 5, 3, 1])
        >>> logits, variables = model.init_with_output(d2l.get_key(), source, target, lens)
        >>> logits.shape
        (4, 7, 10)

    Args:
        enc_X: the source, (batch, source steps).
        dec_X: what the decoder reads, the target one step behind, (batch, target steps).
        args: for the encoder and for `init_state`: the source's lengths (batch,).
        training: whether dropout is on; None: as the module's own `training` says.

    Returns:
        The decoder's output alone, (batch, target steps, vocabulary).
    """

    encoder: nn.Module
    decoder: nn.Module
    training: bool = False

    def __call__(
        self, enc_X: Array, dec_X: Array, *args: Any, training: bool | None = None
    ) -> Array:
        training = self.training if training is None else training
        enc_all_outputs = self.encoder(enc_X, *args, training=training)
        state = self.decoder.init_state(enc_all_outputs, *args)
        return self.decoder(dec_X, state, training=training)[0]

    def predict_step(
        self, params: Any, batch: Any, num_steps: int, save_attention_weights: bool = False
    ) -> tuple[Array, tuple[list, Any]]:
        """Translates greedily, from the first target token on, in one jitted program.

        Args:
            params: the model's, with "encoder" and "decoder".
            batch: source (batch, source steps), target (batch, at least 1), source lengths
                (batch,) or None; what follows is not read.
            num_steps: how many tokens to write.
            save_attention_weights: also return the attention weights.

        Returns:
            The tokens (batch, num_steps), and a pair: for each step what the decoder sowed as
            "dec_attention_weights", and what the encoder sowed as "enc_attention_weights"; both
            empty unless asked for.

        Raises:
            ValueError: num_steps is below 1.
        """
        if num_steps < 1:
            raise ValueError(f"num_steps must be at least 1. Got {num_steps}.")
        source, target, source_lens, *_ = batch
        tokens, decoder_seen, encoder_seen = _translate(
            self.encoder,
            self.decoder,
            params,
            jnp.asarray(source),
            jnp.asarray(target)[:, :1],
            None if source_lens is None else jnp.asarray(source_lens),
            num_steps,
        )
        if not save_attention_weights:
            return tokens, ([], [])
        return tokens, (
            [_sown(seen, "dec_attention_weights") for seen in decoder_seen],
            _sown(encoder_seen, "enc_attention_weights"),
        )


class Seq2Seq(EncoderDecoder):
    """An encoder and a decoder that learn to translate: Adam, and a loss that padding is not in.

    Example:
        >>> from regard import d2l
        >>> data = d2l.MTFraEng(batch_size=128)  # doctest: +ELLIPSIS
        >>> model = d2l.Seq2Seq(
        ...     d2l.Seq2SeqEncoder(len(data.src_vocab), 32, 64, 1),
        ...     d2l.Seq2SeqAttentionDecoder(len(data.tgt_vocab), 32, 64, 1),
        ...     tgt_pad=data.tgt_vocab["<pad>"],
        ...     lr=0.01,
        ... )
        >>> model.board.display = False
        >>> trainer = d2l.Trainer(max_epochs=30, gradient_clip_val=1)
        >>> trainer.fit(model, data)
        >>> batch = data.build(["he's calm ."], ["il est calme ."])
        >>> tokens, _ = model.predict_step(trainer.state.params, batch, data.num_steps)
        >>> data.tgt_vocab.to_tokens(tokens[0])[:4]
        ['il', 'est', 'calme', '.']

    Args:
        encoder, decoder: as for `EncoderDecoder`.
        tgt_pad: the number of the target's padding.
        lr: Adam's learning rate; for another optimizer, override `configure_optimizers`.
        training: as for `EncoderDecoder`; a `Trainer` sets it.
    """

    tgt_pad: int = dataclasses.field(kw_only=True)
    lr: float = dataclasses.field(kw_only=True)

    def validation_step(self, params: Any, batch: Any, state: Any) -> None:
        loss, _ = self.loss(params, tuple(batch[:-1]), batch[-1], state)
        self.plot("loss", loss, train=False)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(self.lr)

    @functools.partial(jax.jit, static_argnames=("self", "averaged"))
    def loss(self, params: Any, X: Any, Y: Any, state: Any, averaged: bool = False) -> Any:
        """The mean cross-entropy of the tokens that are not padding; `averaged` has no effect."""
        Y_hat = state.apply_fn({"params": params}, *X, rngs={"dropout": state.dropout_rng})
        counts = jnp.not_equal(Y, self.tgt_pad).astype(jnp.float32).reshape(-1)
        return (cross_entropies(Y_hat, Y) * counts).sum() / jnp.maximum(counts.sum(), 1), {}


def seen_by(module: nn.Module, name: str) -> Any:
    """What a bound module sowed under this name in its latest call."""
    found: Any = module.get_variable("intermediates", name)
    if found is None:
        raise ValueError(
            f"{type(module).__name__} has recorded no attention weights: there was no call, or the "
            'collection was closed. Fix: bind(variables, mutable=["intermediates"]), then call it.'
        )
    return found[-1]


def _over_time(cell: type[nn.Module]) -> Any:
    return nn.scan(
        cell, variable_broadcast="params", in_axes=0, out_axes=0, split_rngs={"params": False}
    )


def _sown(variables: Any, name: str) -> Any:
    found = variables.get("intermediates", {}).get(name, ([],))
    return found[0]


@functools.partial(jax.jit, static_argnums=(0, 1, 6))
def _translate(
    encoder: Any,
    decoder: Any,
    params: Any,
    source: Array,
    first: Array,
    source_lens: Array | None,
    num_steps: int,
) -> tuple[Array, list, Any]:
    """The tokens, what the decoder sowed at each step, and what the encoder sowed."""
    encoded, encoder_seen = encoder.apply(
        {"params": params["encoder"]}, source, source_lens, training=False, mutable="intermediates"
    )

    def step(carry: Any, _: None) -> tuple[Any, Any]:
        tokens, state = carry
        (logits, state), seen = decoder.apply(
            {"params": params["decoder"]}, tokens, state, training=False, mutable="intermediates"
        )
        tokens = logits.argmax(-1).astype(tokens.dtype)  # [B, 1]
        return (tokens, state), (tokens, seen)

    carry = (first, decoder.init_state(encoded, source_lens))
    tokens, seen = [], []
    for done in range(num_steps):
        left = num_steps - done
        # A recurrent state keeps its shapes from its first step on, and the rest is one scan,
        # out of which the compiler takes the projection of the keys. One that grows cannot.
        if done and _layout(carry) == _layout(jax.eval_shape(step, carry, None)[0]):
            _, (rest, rest_seen) = jax.lax.scan(step, carry, None, length=left)
            tokens += list(rest)
            seen += [jax.tree.map(lambda x, i=i: x[i], rest_seen) for i in range(left)]
            break
        carry, (token, saw) = step(carry, None)
        tokens.append(token)
        seen.append(saw)
    return jnp.concatenate(tokens, axis=1), seen, encoder_seen


def _layout(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]
