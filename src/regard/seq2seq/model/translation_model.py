"""The translator: embeddings, an architecture's encoder and decoder, and the vocabulary."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.nn import initializers

from regard.seq2seq.model.architectures import architecture_named
from regard.seq2seq.model.attention_record import Recorder
from regard.seq2seq.model.dropout import drop, streams
from regard.seq2seq.train.cross_entropy import cross_entropy


class Model(nnx.Module):
    """A translator: p(target | source), one token at a time.

    What it has beside embeddings and vocabulary is its architecture's: see
    `regard.seq2seq.model.architectures`, which also says what `encode` and `start` return.

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
        config: sizes and choices, a `Config` or a `TransformerConfig`.
        rngs: random numbers for the parameters.
    """

    def __init__(self, config: Any, *, rngs: nnx.Rngs) -> None:
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
        kind = architecture_named(config.architecture)
        self.encoder = kind.encoder(config, rngs=rngs)
        self.decoder = kind.decoder(config, rngs=rngs)

    def encode(
        self,
        source: Array,
        source_lens: Array,
        rng: Array | None = None,
        record: Recorder | None = None,
        longest: Array | None = None,
    ) -> Any:
        """Reads the source; what comes back is all that decoding needs.

        Args:
            source: [B, S].
            source_lens: [B].
            rng: for dropout.
            record: collects the weights of every layer and head.
            longest: the largest length, for a recurrent encoder to end its loop there, as long as
                nothing is differentiated. Not for devices that share a model: their loops would
                take different numbers of steps and wait for each other forever.
        """
        embedding_rng, encoder_rng = streams(rng, 2)
        table = self.target_embedding if self.config.tie == "all" else self.source_embedding
        embedded = _embed(table, source)  # [B, S, embedding]
        embedded = drop(embedded, self.config.embedding_dropout, embedding_rng, rows=0)
        states = self.encoder(embedded, source_lens, encoder_rng, record, longest)
        return self.decoder.remember(states, source_lens)

    def decode(
        self,
        encoded: Any,
        target_in: Array,
        rng: Array | None = None,
        return_weights: bool = False,
        record: Recorder | None = None,
    ) -> tuple[Array, Array | None]:
        """Reads the target (teacher forcing).

        Args:
            encoded: of `encode`.
            target_in: [B, T], the target one step behind: it starts with bos.
            rng: for dropout.
            return_weights: whether the attention's weights are wanted; training does without.
            record: collects those of every layer and head, as in `encode`.

        Returns:
            The readouts [B, T, embedding], for `logits`; the weights [B, T, S] or None.
        """
        embedding_rng, decoder_rng = streams(rng, 2)
        embedded = _embed(self.target_embedding, target_in)
        embedded = drop(embedded, self.config.target_dropout, embedding_rng, rows=0)
        found: tuple[Array, Array | None] = self.decoder(
            encoded, embedded, decoder_rng, return_weights, record
        )
        return found

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
        self,
        batch: Any,
        *,
        smoothing: float = 0.0,
        consistency: float = 0.0,
        rng: Array | None = None,
    ) -> tuple[Array, Array, Array]:
        """The sums over a batch's target tokens, padding left out.

        Args:
            batch: source, source_lens, target_in, target_out, target_lens, as
                `regard.seq2seq.train.batches.Batch` has them.
            smoothing: label smoothing ε, see `cross_entropy`.
            consistency: above 0 and with an rng, each sentence is read twice, with different
                dropout, and the two predictions are drawn together; see `cross_entropy`.
            rng: for dropout; None: none.

        Returns:
            The smoothed loss, which can be differentiated; −log p of the target; and the number of
            tokens. float32 scalars.
        """
        passes = 2 if consistency and rng is not None else 1
        encode_rng, decode_rng = streams(rng, 2)
        # Next to each other, so that devices which share the rows have both passes of theirs.
        given = batch.source, batch.source_lens, batch.target_in
        source, source_lens, target_in = (jnp.repeat(array, passes, axis=0) for array in given)
        encoded = self.encode(source, source_lens, encode_rng)
        readout, _ = self.decode(encoded, target_in, decode_rng)  # [B P, T, embedding]
        B, T = batch.target_in.shape
        steps = jnp.arange(T, dtype=batch.target_lens.dtype)[None]
        counts = steps < batch.target_lens[:, None]  # [B, T]
        loss, nll = cross_entropy(
            readout.reshape(B, passes, T, -1).swapaxes(1, 2).reshape(B * T, passes, -1),
            self.output_kernel.astype(self.config.compute_dtype),
            self.output_bias[...],
            batch.target_out.reshape(-1),
            counts.reshape(-1),
            smoothing,
            consistency,
        )
        return loss, nll, counts.sum(dtype=jnp.float32)

    def start(self, encoded: Any, room: int) -> Any:
        """The decoder's state before the first token.

        Args:
            encoded: of `encode`.
            room: how many tokens will be written at most.
        """
        return self.decoder.start(encoded, room)

    def for_hypotheses(self, encoded: Any) -> Any:
        """The same sentences for `step` with several hypotheses each, which it makes cheaper."""
        return self.decoder.for_hypotheses(encoded)

    def step(self, encoded: Any, state: Any, tokens: Array) -> tuple[Any, Array, Array]:
        """One token further, for T hypotheses per sentence: what search is made of.

        Args:
            encoded: of `encode` or `for_hypotheses`.
            state: of `start` or of the previous step.
            tokens: [B, T], the previous token of each hypothesis.

        Returns:
            The state, the readouts [B, T, embedding], for `logits`, and the weights [B, T, S].
        """
        embedded = _embed(self.target_embedding, tokens)
        found: tuple[Any, Array, Array] = self.decoder.step(encoded, state, embedded)
        return found

    @property
    def looks(self) -> tuple[str, ...]:
        """The ways to align words by its attention, as of `Translator.align`, the best last."""
        found: tuple[str, ...] = self.decoder.looks
        return found

    def alone(self, encoded: Any, state: Any, tokens: Array, which: Array) -> Array:
        """The next token if a single source token were all there is to attend to.

        Args:
            encoded: of `encode`, of a model that attends and has "explaining" among its looks.
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


def _embed(table: nnx.Param, tokens: Array) -> Array:
    return jnp.take(table[...], tokens, axis=0, mode="clip")
