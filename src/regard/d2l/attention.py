"""The book's attention layers over `regard.attend`, with the book's parameter names.

The book's checkpoints load unchanged: W_q, W_k, w_v, and W_q, W_k, W_v, W_o. Dropout needs
`training=True` and, in `apply`, `rngs={"dropout": key}`.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array

import regard
from regard.score import Score

__all__ = [
    "masked_softmax",
    "DotProductAttention",
    "AdditiveAttention",
    "MultiHeadAttention",
    "PositionalEncoding",
]


def masked_softmax(X: Array, valid_lens: Array | None) -> Array:
    """Softmax over the first valid_lens entries of the last axis; the rest gets weight 0.

    Where the book fills with −1e6 and so goes wrong, this is right: length 0 gives weights 0 (the
    book: uniform weights over padding), float16 gives numbers (the book: −1e6 is −inf there, and
    length 0 is NaN), and scores below −1e6 keep their weight (the book: padding takes it).

    Example:
        >>> from regard import d2l
        >>> d2l.masked_softmax(d2l.zeros((2, 2, 4)), d2l.tensor([[1, 2], [4, 0]])).tolist()[1]
        [[0.25, 0.25, 0.25, 0.25], [0.0, 0.0, 0.0, 0.0]]

    Args:
        X: the scores, (batch, queries, keys).
        valid_lens: integers, (batch,) or (batch, queries); None: all of them.

    Returns:
        The weights, in the shape and dtype of X.
    """
    return regard.masked_softmax(X, valid_lens)


class _Attention(nn.Module):
    """The call of all three layers; `_attend` is what they differ in."""

    def __call__(
        self,
        queries: Array,
        keys: Array,
        values: Array,
        valid_lens: Array | None = None,
        training: bool = False,
    ) -> tuple[Array, Array]:
        return self._attend(queries, keys, values, valid_lens, training)

    def project(self, keys: Array) -> Array:
        """What `pool` takes for these keys: computed once, for many calls with the same keys."""
        return keys

    def pool(
        self, queries: Array, projected_keys: Array, values: Array, *rest: Any
    ) -> tuple[Array, Array]:
        """The layer from its projected keys on; rest: valid_lens and training, as in a call."""
        return self._attend(queries, projected_keys, values, *rest)

    def _attend(
        self, queries: Array, keys: Array, values: Array, *rest: Any
    ) -> tuple[Array, Array]:
        """rest: valid_lens and training, as `_pool` takes them."""
        raise NotImplementedError


class DotProductAttention(_Attention):
    """Scaled dot-product attention: softmax(Q Kᵀ / sqrt d) V. No parameters.

    Length 0 gives weights and output 0, and float16 is summed in float32; see `masked_softmax`
    for what the book does there.

    Example:
        >>> from regard import d2l
        >>> Q, K, V = d2l.randn(2, 1, 2), d2l.randn(2, 10, 2), d2l.randn(2, 10, 4)
        >>> attention = d2l.DotProductAttention(dropout=0.5)
        >>> output, weights = attention.apply({}, Q, K, V, d2l.tensor([2, 6]))
        >>> output.shape, weights.shape
        ((2, 1, 4), (2, 1, 10))

    Args:
        queries: (batch, queries, d).
        keys: (batch, keys, d).
        values: (batch, keys, width).
        valid_lens: integers, (batch,) or (batch, queries), or None.
        training: whether dropout is on.

    Returns:
        The output (batch, queries, width), and the weights (batch, queries, keys) before dropout.
    """

    dropout: float

    def _attend(
        self, queries: Array, keys: Array, values: Array, *rest: Any
    ) -> tuple[Array, Array]:
        return _pool(self, regard.Dot(), queries, keys, values, *rest)


class AdditiveAttention(_Attention):
    """Additive (Bahdanau) attention: a(q, k) = w_vᵀ tanh(W_q q + W_k k), then masked softmax.

    Where it would be large, the book's (batch, queries, keys, num_hiddens) array is not made, so
    longer sequences fit. Length 0 gives weights and output 0.

    Example:
        >>> from regard import d2l
        >>> Q, K, V = d2l.randn(2, 1, 20), d2l.randn(2, 10, 2), d2l.randn(2, 10, 4)
        >>> attention = d2l.AdditiveAttention(num_hiddens=8, dropout=0.1)
        >>> (output, weights), params = attention.init_with_output(
        ...     d2l.get_key(), Q, K, V, d2l.tensor([2, 6])
        ... )
        >>> output.shape, weights.shape
        ((2, 1, 4), (2, 1, 10))

    Args and returns are those of `DotProductAttention`; queries and keys may differ in width.
    """

    num_hiddens: int
    dropout: float

    def setup(self) -> None:
        self.W_k = _Kernel(self.num_hiddens)
        self.W_q = _Kernel(self.num_hiddens)
        self.w_v = _Kernel(1)

    def _attend(
        self, queries: Array, keys: Array, values: Array, *rest: Any
    ) -> tuple[Array, Array]:
        key_kernel = self.W_k(keys.shape[-1])
        return _pool(self, self._score(queries, key_kernel), queries, keys, values, *rest)

    def project(self, keys: Array) -> Array:
        """W_k k, (batch, keys, num_hiddens)."""
        return keys @ self.W_k(keys.shape[-1])

    def pool(
        self, queries: Array, projected_keys: Array, values: Array, *rest: Any
    ) -> tuple[Array, Array]:
        return _pool(self, self._score(queries, None), queries, projected_keys, values, *rest)

    def _score(self, queries: Array, key_kernel: Array | None) -> Score:
        vector = self.w_v(self.num_hiddens)[:, 0]
        return regard.Additive(self.W_q(queries.shape[-1]), key_kernel, vector)


class MultiHeadAttention(_Attention):
    """Multi-head attention: num_heads scaled dot products side by side, of width
    num_hiddens / num_heads each.

    As in the book's JAX edition the weights are returned too, the heads of an example one after
    another on the first axis. For free widths, other scores, grouped heads and decoding with a
    cache, see `regard.linen.MultiHeadAttention`.

    Example:
        >>> from regard import d2l
        >>> attention = d2l.MultiHeadAttention(num_hiddens=100, num_heads=5, dropout=0.5)
        >>> X, Y = d2l.ones((2, 4, 100)), d2l.ones((2, 6, 100))
        >>> (output, weights), params = attention.init_with_output(
        ...     d2l.get_key(), X, Y, Y, d2l.tensor([3, 2])
        ... )
        >>> output.shape, weights.shape
        ((2, 4, 100), (10, 4, 6))

    Args:
        queries: (batch, queries, any width).
        keys, values: (batch, keys, any width).
        valid_lens: integers, (batch,) or (batch, queries), or None.
        training: whether dropout is on.

    Returns:
        The output (batch, queries, num_hiddens), and the weights
        (batch · num_heads, queries, keys) before dropout.
    """

    num_hiddens: int
    num_heads: int
    dropout: float
    bias: bool = False

    def setup(self) -> None:
        if self.num_heads < 1 or self.num_hiddens % self.num_heads:
            raise ValueError(
                f"num_hiddens must be a multiple of num_heads. Got num_hiddens {self.num_hiddens}, "
                f"num_heads {self.num_heads}."
            )
        self.W_q = nn.Dense(self.num_hiddens, use_bias=self.bias)
        self.W_k = nn.Dense(self.num_hiddens, use_bias=self.bias)
        self.W_v = nn.Dense(self.num_hiddens, use_bias=self.bias)
        self.W_o = nn.Dense(self.num_hiddens, use_bias=self.bias)

    def _attend(
        self, queries: Array, keys: Array, values: Array, *rest: Any
    ) -> tuple[Array, Array]:
        keys, values = _zero_padding(keys, rest[0]), _zero_padding(values, rest[0])
        width = self.num_hiddens // self.num_heads
        q, k, v = (
            x.reshape(*x.shape[:2], self.num_heads, width)  # [B, T, N, H]
            for x in (self.W_q(queries), self.W_k(keys), self.W_v(values))
        )
        output, weights = _pool(self, regard.Dot(), q, k, v, *rest)
        output = self.W_o(output.reshape(*output.shape[:2], self.num_hiddens))
        B, N, T, S = weights.shape
        return output, weights.reshape(B * N, T, S)

    def transpose_qkv(self, X: Array) -> Array:
        """(batch, n, num_hiddens) -> (batch · num_heads, n, num_hiddens / num_heads)."""
        X = X.reshape(*X.shape[:2], self.num_heads, -1).swapaxes(1, 2)  # [B, N, T, H]
        return X.reshape(-1, *X.shape[2:])

    def transpose_output(self, X: Array) -> Array:
        """(batch · num_heads, n, width) -> (batch, n, num_heads · width)."""
        X = X.reshape(-1, self.num_heads, *X.shape[1:]).swapaxes(1, 2)  # [B, T, N, H]
        return X.reshape(*X.shape[:2], -1)


class PositionalEncoding(nn.Module):
    """Adds sines and cosines of the position: P[i, 2j] = sin(i / 10000^(2j/d)), cos at 2j + 1.

    P, (1, max_len, num_hiddens), is sown into the collection "intermediates". Odd widths work;
    a sequence longer than max_len is a ValueError (in the book, both fail inside). `start` is the
    position of X's first step, for decoding token by token.

    Example:
        >>> from regard import d2l
        >>> layer = d2l.PositionalEncoding(num_hiddens=4, dropout=0)
        >>> layer.apply({}, d2l.zeros((1, 2, 4)))[0, 0].tolist()
        [0.0, 1.0, 0.0, 1.0]
    """

    num_hiddens: int
    dropout: float
    max_len: int = 1000

    @nn.compact
    def __call__(self, X: Array, training: bool = False, start: int = 0) -> Array:
        if X.ndim != 3 or X.shape[2] != self.num_hiddens:
            raise ValueError(
                "X is (batch, steps, num_hiddens). "
                f"Got X {list(X.shape)}, num_hiddens {self.num_hiddens}."
            )
        end = start + X.shape[1]
        if end > self.max_len:
            raise ValueError(
                f"X is longer than max_len. Got X {list(X.shape)}"
                + (f" after {start} steps" if start else "")
                + f", max_len {self.max_len}. Fix: max_len={end}."
            )
        if not jnp.issubdtype(X.dtype, jnp.floating):
            X = X.astype(jnp.float32)  # as integers, the sines would be rounded to 0
        column = np.arange(self.num_hiddens)
        angle = np.arange(self.max_len)[:, None] / 10000 ** (column // 2 * 2 / self.num_hiddens)
        table = np.where(column % 2 == 0, np.sin(angle), np.cos(angle))
        P = jnp.asarray(table[None], X.dtype)  # [1, max_len, num_hiddens]
        self.sow("intermediates", "P", P)
        return dropped_out(self, X + P[:, start:end], training)


class _Kernel(nn.Module):
    """The kernel of a Dense layer, as an array, under the name it has there."""

    features: int

    @nn.compact
    def __call__(self, fan_in: int) -> Array:
        shape = (fan_in, self.features)
        return self.param("kernel", nn.initializers.lecun_normal(), shape, jnp.float32)


def _zero_padding(x: Array, valid_lens: Array | None) -> Array:
    """Zeroes masked keys or values: 0 times a NaN there would be NaN in a kernel's gradient."""
    if valid_lens is None or jnp.shape(valid_lens)[:1] != x.shape[:1]:
        return x  # `attend` refuses lengths of another shape, and says which
    lens = jnp.asarray(valid_lens)
    lens = lens.max(tuple(range(1, lens.ndim)), initial=0)  # [B]
    seen = jnp.arange(x.shape[1], dtype=lens.dtype)[None] < lens[:, None]
    return jnp.where(seen[..., None], x, 0)


def dropped_out(layer: nn.Module, X: Array, training: bool) -> Array:
    """X after the layer's dropout, with the layer's own random key."""
    rate = _dropout_rate(layer, training)
    return nn.Dropout(rate)(X, deterministic=rate == 0)


def _dropout_rate(layer: nn.Module, training: bool) -> float:
    """The layer's rate in training, else 0; a rate above 0 needs a random key."""
    rate = float(layer.dropout) if training else 0.0
    if rate > 0 and not (layer.has_rng("dropout") or layer.has_rng("params")):
        raise ValueError(
            f"training=True with dropout={rate:g} draws random numbers, and there is no key for "
            'them. Fix: apply(..., rngs={"dropout": key}), or training=False.'
        )
    return rate


def _pool(
    layer: nn.Module,
    score: Score,
    queries: Array,
    keys: Array,
    values: Array,
    valid_lens: Array | None = None,
    training: bool = False,
) -> tuple[Array, Array]:
    """`attend` with the layer's dropout; under jit, weights that are not used are not computed."""
    rate = _dropout_rate(layer, training)
    return regard.attend(
        queries,
        keys,
        values,
        score=score,
        valid_lens=valid_lens,
        dropout_rate=rate,
        dropout_rng=layer.make_rng("dropout") if rate > 0 else None,
        return_weights=True,
    )
