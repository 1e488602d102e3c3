"""The book's Transformer: its encoder and, beside it, a decoder, over the book's attention layer.

Parameter names are those of the book's modules, so that its checkpoints load unchanged.
"""

import math
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from regard.d2l.attention import MultiHeadAttention, PositionalEncoding, dropped_out
from regard.d2l.seq2seq import AttentionDecoder, Encoder, seen_by

__all__ = ["PositionWiseFFN", "AddNorm", "TransformerEncoderBlock", "TransformerEncoder"]
__all__ += ["TransformerDecoderBlock", "TransformerDecoder"]


class PositionWiseFFN(nn.Module):
    """Two linear layers with a ReLU between them, the same at every position.

    FFN(x) = W_2 max(0, W_1 x + b_1) + b_2

    Example:
        >>> from regard import d2l
        >>> ffn = d2l.PositionWiseFFN(ffn_num_hiddens=4, ffn_num_outputs=8)
        >>> Y, variables = ffn.init_with_output(d2l.get_key(), d2l.ones((2, 3, 4)))
        >>> Y.shape, bool((Y[0, 0] == Y[1, 2]).all())
        ((2, 3, 8), True)

    Args:
        X: (batch, steps, any width).

    Returns:
        (batch, steps, ffn_num_outputs).
    """

    ffn_num_hiddens: int
    ffn_num_outputs: int

    def setup(self) -> None:
        self.dense1 = nn.Dense(self.ffn_num_hiddens)
        self.dense2 = nn.Dense(self.ffn_num_outputs)

    def __call__(self, X: Array) -> Array:
        return self.dense2(nn.relu(self.dense1(X)))


class AddNorm(nn.Module):
    """The residual connection, then layer normalization: LayerNorm(X + dropout(Y)).

    Example:
        >>> from regard import d2l
        >>> layer, X = d2l.AddNorm(dropout=0.5), d2l.tensor([[[1.0, 3.0]]])
        >>> layer.init_with_output(d2l.get_key(), X, X)[0].round(3).tolist()
        [[[-1.0, 1.0]]]

    Args:
        X: a sublayer's input.
        Y: its output, of the same shape.
        training: whether dropout is on.

    Raises:
        ValueError: X and Y differ in shape (the book broadcasts them).
    """

    dropout: float

    @nn.compact
    def __call__(self, X: Array, Y: Array, training: bool = False) -> Array:
        if X.shape != Y.shape:
            raise ValueError(
                "AddNorm adds X and Y, which must have the same shape. "
                f"Got X {list(X.shape)}, Y {list(Y.shape)}. "
                "Fix: let the sublayer's output be as wide as its input (num_hiddens)."
            )
        return nn.LayerNorm()(dropped_out(self, Y, training) + X)


class TransformerEncoderBlock(nn.Module):
    """Self-attention, then the position-wise network, each followed by `AddNorm`.

    Example:
        >>> from regard import d2l
        >>> block = d2l.TransformerEncoderBlock(24, 48, num_heads=8, dropout=0.5)
        >>> X, valid_lens = d2l.ones((2, 100, 24)), d2l.tensor([3, 2])
        >>> (Y, weights), variables = block.init_with_output(d2l.get_key(), X, valid_lens)
        >>> Y.shape, weights.shape
        ((2, 100, 24), (16, 100, 100))

    Args:
        X: (batch, steps, num_hiddens).
        valid_lens: integers, (batch,) or (batch, steps), or None.
        training: whether dropout is on.

    Returns:
        The output in the shape of X, and the weights (batch · num_heads, steps, steps).
    """

    num_hiddens: int
    ffn_num_hiddens: int
    num_heads: int
    dropout: float
    use_bias: bool = False

    def setup(self) -> None:
        self.attention = MultiHeadAttention(
            self.num_hiddens, self.num_heads, self.dropout, self.use_bias
        )
        self.addnorm1 = AddNorm(self.dropout)
        self.ffn = PositionWiseFFN(self.ffn_num_hiddens, self.num_hiddens)
        self.addnorm2 = AddNorm(self.dropout)

    def __call__(
        self, X: Array, valid_lens: Array | None = None, training: bool = False
    ) -> tuple[Array, Array]:
        output, weights = self.attention(X, X, X, valid_lens, training)
        Y = self.addnorm1(X, output, training)
        return self.addnorm2(Y, self.ffn(Y), training), weights


Sizes = tuple[int, int, int, float]  # num_hiddens, ffn_num_hiddens, num_heads, dropout


class _Blocks(nn.Module):
    """What encoder and decoder have in common: embedded tokens with positions, and blocks."""

    def setup(self) -> None:
        self.embedding = nn.Embed(self.vocab_size, self.num_hiddens)
        self.pos_encoding = PositionalEncoding(self.num_hiddens, self.dropout, self.max_len)
        sizes = self.num_hiddens, self.ffn_num_hiddens, self.num_heads, self.dropout
        self.blks = [self._block(sizes, number) for number in range(self.num_blks)]

    def _embedded(self, X: Array, training: bool, start: int = 0) -> Array:
        # The encoding is between −1 and 1, and so are the embeddings after the factor.
        X = self.embedding(X.astype(jnp.int32)) * math.sqrt(self.num_hiddens)
        return self.pos_encoding(X, training, start=start)


class TransformerEncoder(_Blocks, Encoder):
    """Embedding times sqrt(num_hiddens), positional encoding, then num_blks blocks.

    The weights, a list of one (batch · num_heads, steps, steps) per block, are sown into the
    collection "intermediates" as "enc_attention_weights"; a bound encoder has them as
    `attention_weights`.

    Example:
        >>> from regard import d2l
        >>> encoder = d2l.TransformerEncoder(200, 24, 48, num_heads=8, num_blks=2, dropout=0.5)
        >>> X, valid_lens = d2l.ones((2, 100), dtype=d2l.int32), d2l.tensor([3, 2])
        >>> Y, variables = encoder.init_with_output(d2l.get_key(), X, valid_lens)
        >>> Y.shape
        (2, 100, 24)
        >>> _, seen = encoder.apply(
        ...     {"params": variables["params"]}, X, valid_lens, mutable="intermediates"
        ... )
        >>> [w.shape for w in seen["intermediates"]["enc_attention_weights"][0]]
        [(16, 100, 100), (16, 100, 100)]

    Args:
        X: token numbers, (batch, steps), of any dtype.
        valid_lens: integers, (batch,) or (batch, steps), or None.
        training: whether dropout is on.

    Returns:
        (batch, steps, num_hiddens).
    """

    vocab_size: int
    num_hiddens: int
    ffn_num_hiddens: int
    num_heads: int
    num_blks: int
    dropout: float
    use_bias: bool = False
    max_len: int = 1000

    def _block(self, sizes: Sizes, number: int) -> TransformerEncoderBlock:
        return TransformerEncoderBlock(*sizes, self.use_bias)

    def __call__(  # type: ignore[override]  # the book's call has training as its third
        self, X: Array, valid_lens: Array | None = None, training: bool = False
    ) -> Array:
        X = self._embedded(X, training)
        seen = []
        for block in self.blks:
            X, weights = block(X, valid_lens, training)
            seen.append(weights)
        self.sow("intermediates", "enc_attention_weights", seen)
        return X

    @property
    def attention_weights(self) -> list[Array]:
        """Of a bound encoder's latest call: one (batch · num_heads, steps, steps) per block.

        Bind with the collection open: encoder.bind(variables, mutable=["intermediates"]).
        """
        return seen_by(self, "enc_attention_weights")


class TransformerDecoderBlock(nn.Module):
    """Causal self-attention, attention to the encoder, the position-wise network.

    A token sees those before it in training and in prediction alike. (The book masks in training
    only: its validation loss is computed with the answers in view.)

    Example:
        >>> from regard import d2l
        >>> block = d2l.TransformerDecoderBlock(24, 48, num_heads=8, dropout=0.5, i=0)
        >>> X, valid_lens = d2l.ones((2, 100, 24)), d2l.tensor([3, 2])
        >>> state = [d2l.ones((2, 100, 24)), valid_lens, [None]]
        >>> (Y, state, *weights), variables = block.init_with_output(d2l.get_key(), X, state)
        >>> Y.shape, state[2][0].shape
        ((2, 100, 24), (2, 100, 24))

    Args:
        X: (batch, steps, num_hiddens), the steps after those in the state.
        state: the encoder's output, its valid lengths or None, and for each block the inputs it
            has read so far, (batch, steps so far, num_hiddens), or None.
        training: whether dropout is on.

    Returns:
        The output in the shape of X, the state with X appended to this block's inputs, and the
        weights of both attentions: (batch · num_heads, steps, steps so far), (batch · num_heads,
        steps, source steps).
    """

    num_hiddens: int
    ffn_num_hiddens: int
    num_heads: int
    dropout: float
    i: int

    def setup(self) -> None:
        self.attention1 = MultiHeadAttention(self.num_hiddens, self.num_heads, self.dropout)
        self.addnorm1 = AddNorm(self.dropout)
        self.attention2 = MultiHeadAttention(self.num_hiddens, self.num_heads, self.dropout)
        self.addnorm2 = AddNorm(self.dropout)
        self.ffn = PositionWiseFFN(self.ffn_num_hiddens, self.num_hiddens)
        self.addnorm3 = AddNorm(self.dropout)

    def __call__(
        self, X: Array, state: Any, training: bool = False
    ) -> tuple[Array, list, Array, Array]:
        enc_outputs, enc_valid_lens, read = state
        before = read[self.i]
        key_values = X if before is None else jnp.concatenate([before, X], axis=1)
        read = [*read[: self.i], key_values, *read[self.i + 1 :]]
        # Query t of this call is token (so far + t) of the sentence, and sees itself too.
        batch, steps, _ = X.shape
        last = jnp.arange(key_values.shape[1] - steps, key_values.shape[1]) + 1
        dec_valid_lens = jnp.broadcast_to(last, (batch, steps))
        X2, weights1 = self.attention1(X, key_values, key_values, dec_valid_lens, training)
        Y = self.addnorm1(X, X2, training)
        Y2, weights2 = self.attention2(Y, enc_outputs, enc_outputs, enc_valid_lens, training)
        Z = self.addnorm2(Y, Y2, training)
        out = self.addnorm3(Z, self.ffn(Z), training)
        return out, [enc_outputs, enc_valid_lens, read], weights1, weights2


class TransformerDecoder(_Blocks, AttentionDecoder):
    """The Transformer's decoder; decoding token by token equals decoding at once.

    (In the book every token decoded alone is encoded as position 0. Here its position counts the
    tokens before it.)

    The weights, [self-attention of each block, attention to the encoder of each block], are sown
    into the collection "intermediates" as "dec_attention_weights"; a bound decoder has them as
    `attention_weights`.

    Example:
        >>> from regard import d2l
        >>> encoder = d2l.TransformerEncoder(10, 8, 16, num_heads=2, num_blks=2, dropout=0)
        >>> decoder = d2l.TransformerDecoder(10, 8, 16, num_heads=2, num_blks=2, dropout=0)
        >>> X, valid_lens = d2l.ones((4, 9)), d2l.tensor([9, 5, 3, 1])
        >>> encoded = encoder.init_with_output(d2l.get_key(), X, valid_lens)[0]
        >>> state = decoder.init_state(encoded, valid_lens)
        >>> (logits, state), variables = decoder.init_with_output(d2l.get_key(), X, state)
        >>> logits.shape
        (4, 9, 10)

    Args:
        X: token numbers, (batch, steps), of any dtype, the steps after those in the state.
        state: from `init_state` or from the call before.
        training: whether dropout is on.

    Returns:
        The logits (batch, steps, vocab_size), and the state after the last step.
    """

    vocab_size: int
    num_hiddens: int
    ffn_num_hiddens: int
    num_heads: int
    num_blks: int
    dropout: float
    max_len: int = 1000

    def setup(self) -> None:
        super().setup()
        self.dense = nn.Dense(self.vocab_size)

    def _block(self, sizes: Sizes, number: int) -> TransformerDecoderBlock:
        return TransformerDecoderBlock(*sizes, number)

    def init_state(
        self, enc_all_outputs: Array, enc_valid_lens: Array | None = None, *args: Any
    ) -> list:
        return [enc_all_outputs, enc_valid_lens, [None] * self.num_blks]

    def __call__(self, X: Array, state: Any, training: bool = False) -> tuple[Array, list]:
        read = state[2][0] if self.num_blks else None
        X = self._embedded(X, training, start=0 if read is None else read.shape[1])
        seen: list[list[Array]] = [[], []]
        for block in self.blks:
            X, state, *weights = block(X, state, training)
            for kind, found in zip(seen, weights, strict=True):
                kind.append(found)
        self.sow("intermediates", "dec_attention_weights", seen)
        return self.dense(X), state

    @property
    def attention_weights(self) -> list[list[Array]]:
        """Of a bound decoder's latest call; bind it with mutable=["intermediates"]."""
        return seen_by(self, "dec_attention_weights")
