"""The Transformer: every attention in it is a `regard.nnx.MultiHeadAttention`.

    x ← x + dropout(attention(norm(x)))          to the text itself; the decoder then to the source
    x ← x + dropout(W₂ relu(W₁ norm(x)))         and a last norm behind the last layer

Vaswani et al. 2017, with the norms in front (Xiong et al. 2020), which trains without a long
warm-up. Keys and values of the source are projected once per sentence, for every layer of the
decoder; those of the target once per token, into a `Memory` of each hypothesis.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

import regard
import regard.nnx
from regard.seq2seq.model.attention_record import Recorder
from regard.seq2seq.model.config import TransformerConfig
from regard.seq2seq.model.dropout import drop, streams
from regard.seq2seq.model.linear import Linear


class Written(NamedTuple):
    """What K hypotheses of each sentence have written, in one layer: the arrays of its `Memory`.

    Attributes:
        key, value: [B, K, room, N, width].
        length: int32 [B, K].
    """

    key: Array
    value: Array
    length: Array


State = tuple[Written, ...]  # of each layer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Source:
    """Sentences as the decoder needs them.

    Attributes:
        memories: of each layer, the keys and values of its attention to the source.
        lens: [B], how many tokens each sentence has.
    """

    memories: tuple[regard.Memory, ...]
    lens: Array
    attends: ClassVar[bool] = True

    def rows(self, which: Array) -> "Source":
        """Some of the sentences, by their numbers [b]."""
        memories = tuple(memory.rows(which) for memory in self.memories)
        return replace(self, memories=memories, lens=self.lens[which])


class TransformerEncoder(nnx.Module):
    """Embedded source tokens to states.

    Parameters: `places`, where positions are learned; `layers`, each `attention`, `feed_forward`
    and their norms; `norm`, behind the last.

    Args:
        config: the model's.
        rngs: random numbers for the parameters.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.places = Places(config, rngs=rngs)
        layers = range(config.encoder_layers)
        self.layers = nnx.List([_EncoderLayer(config, rngs=rngs) for _ in layers])
        self.norm = Norm(config.embedding)

    def __call__(
        self,
        embedded: Array,
        lens: Array,
        rng: Array | None = None,
        record: Recorder | None = None,
        longest: Array | None = None,
    ) -> Array:
        """[B, S, embedding] with lengths [B] -> states [B, S, embedding].

        Args:
            rng: for dropout; None: none.
            record: collects each layer's weights.
            longest: not used: all tokens are read at once.
        """
        at = jnp.arange(embedded.shape[1], dtype=jnp.int32)[None]
        x = self.places(embedded, at, embedded.shape[1])
        rngs = streams(rng, len(self.layers))
        for layer, layer_rng in zip(self.layers, rngs, strict=True):
            x = layer(x, lens, layer_rng, None if record is None else record.encoder)
        return self.norm(x)


class _EncoderLayer(nnx.Module):
    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.attention = _attention(config, rngs, _in_scores(config))
        self.attention_norm = Norm(config.embedding)
        self.feed_forward = FeedForward(config, rngs=rngs)

    def __call__(
        self, x: Array, lens: Array, rng: Array | None, record: list[Array] | None
    ) -> Array:
        first, second = streams(rng, 2)
        normed = self.attention_norm(x)
        read = _attended(record, self.attention, normed, valid_lens=lens)
        x = x + drop(read, self.config.layer_dropout, first, rows=0)
        return self.feed_forward(x, second)


class TransformerDecoder(nnx.Module):
    """Sentences and embedded target tokens to readouts, from which the vocabulary is predicted.

    The weights that it returns, for links and pictures, are one layer's attention to the source,
    the mean of its heads: of the last layer but one, which aligns words best (Garg et al. 2019, six
    layers), or of the last of up to two (the bundled model, AER 53.9 % in place of 59.9).

    Parameters: `places`, where positions are learned; `layers`, each `itself`, `source` and
    `feed_forward` with their norms; `norm`, behind the last.

    Args:
        config: the model's.
        rngs: random numbers for the parameters.
    """

    looks: ClassVar[tuple[str, ...]] = ("writing", "reading", "explaining")

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.places = Places(config, rngs=rngs)
        layers = range(config.decoder_layers)
        self.layers = nnx.List([_DecoderLayer(config, rngs=rngs) for _ in layers])
        self.norm = Norm(config.embedding)

    @property
    def alignment_layer(self) -> int:
        """Whose attention to the source is returned as the weights."""
        layers = self.config.decoder_layers
        return layers - 2 if layers > 2 else layers - 1

    def remember(self, states: Array, lens: Array) -> Source:
        """Each layer's keys and values of the source, projected here and nowhere else.

        Args:
            states: [B, S, embedding], of the encoder.
            lens: [B].
        """
        memories = [layer.source.remember(states, valid_lens=lens) for layer in self.layers]
        return Source(tuple(memories), lens)

    def for_hypotheses(self, source: Source) -> Source:
        """As it is: queries of several hypotheses share a sentence's memories already."""
        return source

    def __call__(
        self,
        source: Source,
        embedded: Array,
        rng: Array | None = None,
        return_weights: bool = False,
        record: Recorder | None = None,
    ) -> tuple[Array, Array | None]:
        """Reads a whole target in one pass (teacher forcing).

        Args:
            source: of `remember`.
            embedded: [B, T, embedding], the target one step behind.
            rng: for dropout; None: none.
            return_weights: whether the weights are wanted.
            record: collects each layer's weights.

        Returns:
            The readouts [B, T, embedding], and the weights [B, T, S] or None.
        """
        T = embedded.shape[1]
        record = Recorder() if return_weights and record is None else record
        *rngs, last = streams(rng, len(self.layers) + 1)
        x = self.places(embedded, jnp.arange(T, dtype=jnp.int32)[None], T)
        for layer, memory, layer_rng in zip(self.layers, source.memories, rngs, strict=True):
            x = layer(x, memory, layer_rng, record)
        readout = drop(self.norm(x), self.config.output_dropout, last, rows=0)
        if not return_weights or record is None:
            return readout, None
        return readout, record.cross[self.alignment_layer].mean(1)

    def start(self, source: Source, room: int) -> State:
        """Memories of nothing yet, for one hypothesis per sentence.

        Args:
            source: of `remember`.
            room: how many tokens will be written at most.
        """
        B = source.lens.shape[0]
        empty = [cast(regard.Memory, layer.itself.init_cache(B, room)) for layer in self.layers]
        first = [Written(memory.key, memory.value, memory.length) for memory in empty]
        return jax.tree.map(lambda part: part[:, None], tuple(first))

    def step(self, source: Source, state: State, embedded: Array) -> tuple[State, Array, Array]:
        """One token further, for K hypotheses per sentence.

        Args:
            source: of `remember`.
            state: of `start` or of the previous step.
            embedded: [B, K, embedding], the previous token of each.

        Returns:
            The state, the readouts [B, K, embedding], and the weights [B, K, S].
        """
        return self._step(source, state, embedded, None)

    def alone(self, source: Source, state: State, embedded: Array, which: Array) -> Array:
        """The readouts if every layer saw a single state of the source, for several of them.

        Args:
            source: of `remember`.
            state: of `start` or of `step`, for one hypothesis per sentence.
            embedded: [B, 1, embedding], the previous token.
            which: [B, C], their places.

        Returns:
            [B, C, embedding].
        """
        C, S = which.shape[1], source.memories[0].key.shape[1]
        state, embedded = jax.tree.map(lambda a: jnp.repeat(a, C, axis=1), (state, embedded))
        only = jnp.arange(S, dtype=which.dtype)[None, None] == which[..., None]  # [B, C, S]
        return self._step(source, state, embedded, regard.Mask.boolean(only[:, None]))[1]

    def _step(
        self, source: Source, state: State, embedded: Array, mask: regard.Mask | None
    ) -> tuple[State, Array, Array]:
        """`step`, with a mask of the source for each hypothesis."""
        room = state[0].key.shape[2]
        x = self.places(embedded, state[0].length, room)
        after: list[Written] = []
        seen: list[Array] = []
        aligning = self.alignment_layer
        for number, (layer, written) in enumerate(zip(self.layers, state, strict=True)):
            record = seen if number == aligning else None
            x, written = layer.step(x, written, source.memories[number], record, mask)
            after.append(written)
        return tuple(after), self.norm(x), seen[0].mean(1)


class _DecoderLayer(nnx.Module):
    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.itself = _attention(config, rngs, _in_scores(config))
        self.itself_norm = Norm(config.embedding)
        self.source = _attention(config, rngs)
        self.source_norm = Norm(config.embedding)
        self.feed_forward = FeedForward(config, rngs=rngs)

    def __call__(
        self, x: Array, memory: regard.Memory, rng: Array | None, record: Recorder | None
    ) -> Array:
        """[B, T, embedding], all tokens at once."""
        rate = self.config.layer_dropout
        first, second, third = streams(rng, 3)
        own, cross = (None, None) if record is None else (record.decoder, record.cross)
        read = _attended(own, self.itself, self.itself_norm(x), mask=regard.Mask.causal())
        x = x + drop(read, rate, first, rows=0)
        read = _attended(cross, self.source, self.source_norm(x), memory=memory)
        x = x + drop(read, rate, second, rows=0)
        return self.feed_forward(x, third)

    def step(
        self,
        x: Array,
        written: Written,
        memory: regard.Memory,
        record: list[Array] | None,
        mask: regard.Mask | None = None,
    ) -> tuple[Array, Written]:
        """[B, K, embedding], a token of each hypothesis."""
        B, K, D = x.shape
        normed = self.itself_norm(x).reshape(B * K, 1, D)
        flat = jax.tree.map(lambda part: part.reshape(B * K, *part.shape[2:]), written)
        empty = cast(regard.Memory, self.itself.init_cache(B * K, written.key.shape[2]))
        read, grown = self.itself(normed, cache=replace(empty, **flat._asdict()))
        arrays = grown.key, grown.value, grown.length
        written = Written(*(part.reshape(B, K, *part.shape[1:]) for part in arrays))
        x = x + read.astype(x.dtype).reshape(B, K, D)
        normed = self.source_norm(x)
        x = x + _attended(record, self.source, normed, memory=memory, mask=mask)
        return self.feed_forward(x), written


# ---------------------------------------------------------------------------------------------
# Parts of a layer.


def _in_scores(config: TransformerConfig) -> str | None:
    """The positions that a text's attention to itself has in its scores."""
    return None if config.positions in ("sinusoidal", "learned") else config.positions


def _attention(
    config: TransformerConfig, rngs: nnx.Rngs, positions: str | None = None
) -> regard.nnx.MultiHeadAttention:
    return regard.nnx.MultiHeadAttention(
        config.heads,
        config.embedding,
        score=config.scores,
        positions=positions,
        dtype=config.compute_dtype,
        rngs=rngs,
    )


def _attended(
    record: list[Array] | None, attention: regard.nnx.MultiHeadAttention, x: Array, **options: Any
) -> Array:
    """attention(x, ...) in the dtype of x; its weights [B, N, T, S] are added to `record`."""
    found = attention(x, return_weights=record is not None, **options)
    out, *weights = found if record is not None else (found,)
    if record is not None:
        record.append(weights[0].astype(jnp.float32))
    return out.astype(x.dtype)


class Places(nnx.Module):
    """Adds to each embedding what says where it stands, unless scores do; embeddings are brought to
    unit variance.

    Parameters: `table` (max_positions, embedding), where positions are learned.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.table: Any = nnx.data(None)
        if config.positions == "learned":
            shape = config.max_positions, config.embedding
            draw = jax.nn.initializers.normal(1.0)
            self.table = nnx.Param(draw(rngs.params(), shape, jnp.float32))

    def __call__(self, embedded: Array, at: Array, longest: int) -> Array:
        """[B, T, embedding], int32 [B|1, T] -> [B, T, embedding]; no position is above longest."""
        scaled = embedded.astype(jnp.float32) * math.sqrt(self.config.embedding)
        if self.config.positions == "sinusoidal":
            return scaled + sinusoids(at, self.config.embedding)
        if self.table is None:
            return scaled
        if longest > self.config.max_positions:
            raise ValueError(
                "learned positions end with the table that was trained. Got a text of up to "
                f"{longest} tokens, max_positions {self.config.max_positions}. Fix: shorter "
                "texts, or a model with positions='sinusoidal'."
            )
        return scaled + jnp.take(self.table[...].astype(jnp.float32), at, axis=0)


def sinusoids(at: Array, width: int) -> Array:
    """int32 [B, T] -> [B, T, width]: sines and cosines of geometric wavelengths, 2π to 20,000π.

    Vaswani et al. 2017, section 3.5, all sines before all cosines.
    """
    half = -(-width // 2)
    rates = np.exp(-math.log(10_000.0) / half * np.arange(half)).astype(np.float32)
    angles = at[..., None].astype(jnp.float32) * rates.reshape((1,) * at.ndim + (half,))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)[..., :width]


class Norm(nnx.Module):
    """Layer normalization (Ba et al. 2016), in float32. Parameters: `scale`, `bias` (width,)."""

    def __init__(self, width: int) -> None:
        self.scale = nnx.Param(jnp.ones(width, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(width, jnp.float32))

    def __call__(self, x: Array) -> Array:
        centered = x - x.mean(-1, keepdims=True)
        variance = jnp.square(centered).mean(-1, keepdims=True)
        normed = centered * jax.lax.rsqrt(variance + 1e-6)
        like = (1,) * (x.ndim - 1) + (x.shape[-1],)
        return normed * self.scale[...].reshape(like) + self.bias[...].reshape(like)


class FeedForward(nnx.Module):
    """x + W₂ relu(W₁ norm(x)). Parameters: `norm`, `inner`, `outer`."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        D, F, dtype = config.embedding, config.feed_forward, config.compute_dtype
        self.norm = Norm(D)
        self.inner = Linear(D, F, dtype=dtype, rngs=rngs)
        self.outer = Linear(F, D, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array, rng: Array | None = None) -> Array:
        inner_rng, outer_rng = streams(rng, 2)
        inner = jax.nn.relu(self.inner(self.norm(x)))
        inner = drop(inner, self.config.feed_forward_dropout, inner_rng, rows=0)
        return x + drop(self.outer(inner), self.config.layer_dropout, outer_rng, rows=0)
