"""The translator: embeddings, encoder, decoder with attention, and the vocabulary."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.nn import initializers

from regard.seq2seq.model.attention import Encoded
from regard.seq2seq.model.config import Config
from regard.seq2seq.model.decoder import Decoder, State
from regard.seq2seq.model.dropout import drop, streams
from regard.seq2seq.model.encoder import Encoder
from regard.seq2seq.train.cross_entropy import cross_entropy


class Model(nnx.Module):
    """A Bahdanau translator: p(target | source), one token at a time.

    Arrays are batch first, [B, S] and [B, T], padded with id 0 to any length; lengths say what
    counts. Dropout is on exactly where an `rng` is given.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from regard.seq2seq.model.config import Config
        >>> from regard.seq2seq.model.translation_model import Model
        >>> config = Config(20, 30, embedding=8, encoder=8, decoder=16)
        >>> model = Model(config, rngs=nnx.Rngs(0))
        >>> encoded = model.encode(jnp.array([[5, 6, 3, 0]]), jnp.array([3]))
        >>> readout, weights = model.decode(encoded, jnp.array([[2, 7]]), return_weights=True)
        >>> model.logits(readout).shape, weights.shape
        ((1, 2, 30), (1, 2, 4))

    Args:
        config: sizes and choices.
        rngs: random numbers for the parameters.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        init = initializers.normal(config.embedding**-0.5)

        def table(rows: int) -> nnx.Param:
            return nnx.Param(init(rngs.params(), (rows, config.embedding), jnp.float32))

        self.target_embedding = table(config.target_vocab)
        if config.tie != "all":
            self.source_embedding = table(config.source_vocab)
        if config.tie == "none":
            self.output_embedding = table(config.target_vocab)
        self.output_bias = nnx.Param(jnp.zeros(config.target_vocab, jnp.float32))
        self.encoder = Encoder(config, rngs=rngs)
        self.decoder = Decoder(config, rngs=rngs)

    def encode(self, source: Array, source_lens: Array, rng: Array | None = None) -> Encoded:
        """Reads the source, [B, S] with lengths [B]; what comes back is all that decoding needs."""
        embedding_rng, encoder_rng = streams(rng, 2)
        table = self.target_embedding if self.config.tie == "all" else self.source_embedding
        embedded = _embed(table, source.T)  # [S, B, embedding]
        embedded = drop(embedded, self.config.embedding_dropout, embedding_rng)
        annotations, summary = self.encoder(embedded, source_lens, encoder_rng)
        return self.decoder.remember(annotations, source_lens, summary)

    def decode(
        self,
        encoded: Encoded,
        target_in: Array,
        rng: Array | None = None,
        return_weights: bool = False,
    ) -> tuple[Array, Array | None]:
        """Reads the target (teacher forcing).

        Args:
            encoded: of `encode`.
            target_in: [B, T], the target one step behind: it starts with bos.
            rng: for dropout.
            return_weights: whether the attention's weights are wanted; training does without.

        Returns:
            The readouts [B, T, embedding], for `logits`; the weights [B, T, S] or None.
        """
        readout, weights = self._decode(encoded, target_in, rng, return_weights)
        return readout.swapaxes(0, 1), None if weights is None else weights.swapaxes(0, 1)

    def logits(self, readout: Array) -> Array:
        """[..., embedding] -> [..., target_vocab], float32."""
        dtype = self.config.compute_dtype
        logits = jnp.matmul(
            readout.astype(dtype),
            self.output_kernel.astype(dtype).T,
            preferred_element_type=jnp.float32,
        )
        bias = self.output_bias[...]
        return logits + bias.reshape((1,) * (logits.ndim - 1) + bias.shape)

    def loss(
        self, batch: Any, *, smoothing: float = 0.0, rng: Array | None = None
    ) -> tuple[Array, Array, Array]:
        """The sums over a batch's target tokens, padding left out.

        Args:
            batch: source, source_lens, target_in, target_out, target_lens, as
                `regard.seq2seq.train.batches.Batch` has them.
            smoothing: label smoothing ε, see `cross_entropy`.
            rng: for dropout; None: none.

        Returns:
            The smoothed loss, which can be differentiated; −log p of the target; and the number of
            tokens. float32 scalars.
        """
        encode_rng, decode_rng = streams(rng, 2)
        encoded = self.encode(batch.source, batch.source_lens, encode_rng)
        readout, _ = self._decode(encoded, batch.target_in, decode_rng, False)
        T = readout.shape[0]
        steps = jnp.arange(T, dtype=batch.target_lens.dtype)[:, None]
        counts = steps < batch.target_lens[None, :]  # [T, B]
        loss, nll = cross_entropy(
            readout.reshape(-1, readout.shape[-1]),
            self.output_kernel.astype(self.config.compute_dtype),
            self.output_bias[...],
            batch.target_out.T.reshape(-1),
            counts.reshape(-1),
            smoothing,
        )
        return loss, nll, counts.sum(dtype=jnp.float32)

    def start(self, encoded: Encoded, room: int) -> State:
        """The decoder's state before the first token.

        Args:
            encoded: of `encode`.
            room: how many tokens will be written at most.
        """
        return self.decoder.start(encoded, room)

    def for_hypotheses(self, encoded: Encoded) -> Encoded:
        """The same sentences for `step` with several hypotheses each, which it makes cheaper."""
        return self.decoder.for_hypotheses(encoded)

    def step(self, encoded: Encoded, state: State, tokens: Array) -> tuple[State, Array, Array]:
        """One token further, for T hypotheses per sentence: what search is made of.

        Args:
            encoded: of `encode` or `for_hypotheses`.
            state: of `start` or of the previous step.
            tokens: [B, T], the previous token of each hypothesis.

        Returns:
            The state, the readouts [B, T, embedding], for `logits`, and the weights [B, T, S].
        """
        return self.decoder.step(encoded, state, _embed(self.target_embedding, tokens))

    def alone(self, encoded: Encoded, state: State, tokens: Array, which: Array) -> Array:
        """What would come next if a single source token were all there is to look at.

        Args:
            encoded: of `encode`, of a model that attends.
            state: of `start` or of `step`, for one hypothesis per sentence.
            tokens: [B, 1], the previous token.
            which: [B, C], the places of the source tokens that are tried.

        Returns:
            The logits [B, C, target_vocab].
        """
        embedded = _embed(self.target_embedding, tokens)
        return self.logits(self.decoder.alone(encoded, state, embedded, which))

    @property
    def output_kernel(self) -> Array:
        """The output embedding, [target_vocab, embedding]."""
        table = self.output_embedding if self.config.tie == "none" else self.target_embedding
        return table[...]

    def _decode(
        self, encoded: Encoded, target_in: Array, rng: Array | None, return_weights: bool
    ) -> tuple[Array, Array | None]:
        """Time first: [T, B, embedding] and [T, B, S]."""
        embedding_rng, decoder_rng = streams(rng, 2)
        embedded = _embed(self.target_embedding, target_in.T)
        embedded = drop(embedded, self.config.target_dropout, embedding_rng)
        return self.decoder(encoded, embedded, decoder_rng, return_weights)


def _embed(table: nnx.Param, tokens: Array) -> Array:
    return jnp.take(table[...], tokens, axis=0, mode="clip")
