"""A model's configuration: every size and choice that its weights depend on, saved as JSON."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import jax

from regard.seq2seq.text.vocabulary import SPECIAL

ATTENTIONS = ("additive", "dot", "bilinear", "gaussian", "none")
CELLS = ("gru", "lstm")
TIES = ("none", "target", "all")
QUERIES = ("state", "token", "conditional")
HEAD_SCORES = ("dot", "additive", "gaussian", "bilinear")
POSITIONS = ("sinusoidal", "learned", "rotary", "alibi", "relative")
# Above these, a configuration is a mistake: 16 million entries or units, and layers.
MOST, MOST_LAYERS = 2**24, 1000
DTYPES = ("auto", "float32", "bfloat16")


class JsonFields:
    """What a dataclass needs to be kept as a JSON file."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, text: str, origin: str | None = None) -> Self:
        """The inverse of to_json.

        Args:
            text: the JSON.
            origin: what error messages call it, such as the file's name.
        """
        return cls(**read_fields(cls, text, origin or f"the {cls.__name__.lower()}"))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a file that to_json's text was written to."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"), str(path))


@dataclass(frozen=True)
class ModelConfig(JsonFields):
    """What every architecture's configuration has.

    Attributes:
        source_vocab: the number of source tokens, including pad, unk, bos and eos.
        target_vocab: the number of target tokens.
        embedding: the width of the embeddings, and of the output layer before the vocabulary.
        encoder_layers, decoder_layers: the number of stacked layers.
        tie: "none"; "target": the target embedding is also the output layer's kernel; "all": the
            source embedding too (one joint vocabulary).
        embedding_dropout: on the source embeddings.
        target_dropout: on the target embeddings.
        output_dropout: before the vocabulary's projection.
        dtype: of the matrix products: "float32", "bfloat16", or "auto": bfloat16 on a GPU, float32
            elsewhere. Parameters, states, softmax and loss are float32 always.
    """

    source_vocab: int
    target_vocab: int
    embedding: int = 256
    encoder_layers: int = 1
    decoder_layers: int = 1
    tie: str = "target"
    embedding_dropout: float = 0.3
    target_dropout: float = 0.0
    output_dropout: float = 0.5
    dtype: str = "auto"

    # What `check` compares fields with, extended by each architecture.
    SIZES: ClassVar[tuple[str, ...]] = (
        *("source_vocab", "target_vocab", "embedding", "encoder_layers", "decoder_layers"),
    )
    RATES: ClassVar[tuple[str, ...]] = ("embedding", "target", "output")
    DROPOUT: ClassVar[tuple[str, ...]]  # the rates that one number, `--dropout`, stands for
    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {"tie": TIES, "dtype": DTYPES}

    def __post_init__(self) -> None:
        # A file may contain anything, so types come first: what follows compares.
        for name in self.SIZES:
            self._check_size(name)
        for name in ("source_vocab", "target_vocab"):
            if getattr(self, name) <= len(SPECIAL):
                raise ValueError(
                    f"{name} must count at least pad, unk, bos, eos and one token. "
                    f"Got {getattr(self, name)}."
                )
        for name, known in self.CHOICES.items():
            if getattr(self, name) not in known:
                listed = ", ".join(repr(choice) for choice in known)
                raise ValueError(f"{name} must be one of {listed}. Got {getattr(self, name)!r}.")
        for name in self.RATES:
            rate = getattr(self, f"{name}_dropout")
            if type(rate) not in (int, float) or not 0.0 <= rate < 1.0:
                raise ValueError(f"{name}_dropout must be a number in [0, 1). Got {rate!r}.")
        if self.tie == "all" and self.source_vocab != self.target_vocab:
            raise ValueError(
                "tie='all' needs one vocabulary for both languages. Got source_vocab "
                f"{self.source_vocab}, target_vocab {self.target_vocab}. Fix: a joint tokenizer, "
                "or tie='target'."
            )

    def _check_size(self, name: str) -> None:
        size, limit = getattr(self, name), MOST_LAYERS if name.endswith("layers") else MOST
        if type(size) is not int:
            raise ValueError(f"{name} must be an integer. Got {size!r}.")
        if not 1 <= size <= limit:
            raise ValueError(f"{name} must be between 1 and {limit:,}. Got {size}.")

    @property
    def compute_dtype(self) -> Any:
        """The dtype of matrix products on this machine."""
        if self.dtype != "auto":
            return jax.numpy.dtype(self.dtype)
        return jax.numpy.dtype("bfloat16" if jax.default_backend() == "gpu" else "float32")


@dataclass(frozen=True)
class Config(ModelConfig):
    """The recurrent translator's configuration: Bahdanau's encoder and decoder.

    Example:
        >>> from regard.seq2seq.model.config import Config
        >>> config = Config(source_vocab=8000, target_vocab=8000, attention="bilinear")
        >>> Config.from_json(config.to_json()) == config
        True

    Attributes:
        encoder: the width of each of the encoder's two directions; an annotation is twice as wide.
        decoder: the width of the decoder's state; the topmost layer's is the query.
        cell: "gru" or "lstm".
        attention: the score, "additive", "dot", "bilinear" or "gaussian"; or "none": the context
            is the encoder's last states, the same at every step. Dot and Gaussian compare states
            directly, so they need decoder = 2 · encoder.
        attention_width: the additive score's hidden width h; None: the decoder's width.
        query: of the decoder's attention. "state": s, as in Bahdanau, which has not read the last
            token y yet; "token": s + W y; "conditional": s after a GRU (or LSTM) has read y, before
            a second one reads the context, as in Nematus and LIUM's nmtpy: both in the first
            layer, whose state is then the query. Without attention there is no query.
        annotation_dropout: on the encoder's states, before the decoder sees them. This one,
            `embedding_dropout` and `output_dropout` are where LIUM's nmtpy has dropout
            (`dropout_ctx`, `dropout_emb`, `dropout_out`); it has none on the target embeddings.
        layer_dropout: between stacked layers.
    """

    architecture: str = "recurrent"
    encoder: int = 256
    decoder: int = 512
    cell: str = "gru"
    attention: str = "additive"
    attention_width: int | None = None
    query: str = "state"
    annotation_dropout: float = 0.5
    layer_dropout: float = 0.3

    SIZES = (*ModelConfig.SIZES, "encoder", "decoder")
    DROPOUT = ("embedding", "annotation", "output")
    RATES = (*ModelConfig.RATES, "annotation", "layer")
    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        **ModelConfig.CHOICES,
        "architecture": ("recurrent",),
        "cell": CELLS,
        "attention": ATTENTIONS,
        "query": QUERIES,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attention_width is not None:
            self._check_size("attention_width")
        if self.attention in ("dot", "gaussian") and self.decoder != 2 * self.encoder:
            raise ValueError(
                f"attention {self.attention!r} compares the decoder's state with the encoder's, so "
                f"decoder must be 2 · encoder. Got decoder {self.decoder}, encoder {self.encoder}. "
                f"Fix: decoder={2 * self.encoder}, or attention='bilinear'."
            )

    @property
    def annotation(self) -> int:
        """The width of the encoder's states: both directions concatenated."""
        return 2 * self.encoder


@dataclass(frozen=True)
class TransformerConfig(ModelConfig):
    """The Transformer's configuration.

    Example:
        >>> from regard.seq2seq.model.config import TransformerConfig
        >>> TransformerConfig(8000, 8000, heads=4, attention="dot,dot,additive,gaussian").scores
        ('dot', 'dot', 'additive', 'gaussian')
        >>> TransformerConfig(8000, 8000, attention="bilinear").scores
        'bilinear'

    Attributes:
        embedding: the width of every layer's input and output.
        heads: of each attention; a divisor of the width.
        feed_forward: the inner width of the layers' two-layer networks.
        attention: the score, "dot", "additive", "gaussian" or "bilinear"; or one for each head,
            with commas between them. The same in the encoder's self-attention, the decoder's, and
            the decoder's attention to the source.
        positions: "sinusoidal" or "learned", added to the embeddings; or "rotary", "alibi" or
            "relative", in the scores of the self-attentions, as of `regard.nnx.MultiHeadAttention`.
        max_positions: of a learned table: the longest text, in tokens.
        layer_dropout: on what each attention and each network adds to its input.
        feed_forward_dropout: inside the networks, after the ReLU. There is no dropout on attention
            weights.
    """

    architecture: str = "transformer"
    encoder_layers: int = 3
    decoder_layers: int = 3
    heads: int = 4
    feed_forward: int = 1024
    attention: str = "dot"
    positions: str = "sinusoidal"
    max_positions: int = 512
    embedding_dropout: float = 0.1
    target_dropout: float = 0.1
    layer_dropout: float = 0.1
    feed_forward_dropout: float = 0.1
    output_dropout: float = 0.0

    SIZES = (*ModelConfig.SIZES, "heads", "feed_forward", "max_positions")
    DROPOUT = ("embedding", "target", "layer", "feed_forward")
    RATES = (*ModelConfig.RATES, "layer", "feed_forward")
    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        **ModelConfig.CHOICES,
        "architecture": ("transformer",),
        "positions": POSITIONS,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.embedding % self.heads:
            raise ValueError(
                "heads must divide embedding, the width that they share. Got heads "
                f"{self.heads}, embedding {self.embedding}. Fix: another number of heads."
            )
        if self.positions == "rotary" and self.embedding // self.heads % 2:
            raise ValueError(
                "rotary positions rotate pairs of numbers: the width of a head must be even. Got "
                f"embedding {self.embedding}, heads {self.heads}. Fix: another number of heads."
            )
        names = self.attention.split(",") if isinstance(self.attention, str) else [self.attention]
        unknown = [name for name in names if name not in HEAD_SCORES]
        if unknown or len(names) not in (1, self.heads):
            raise ValueError(
                f"attention must be one of {', '.join(map(repr, HEAD_SCORES))}, or one for each "
                f"of the {self.heads} heads, with commas between them. Got {self.attention!r}."
            )

    @property
    def scores(self) -> str | tuple[str, ...]:
        """The score of all heads, or one for each."""
        names = tuple(self.attention.split(","))
        return names if len(names) > 1 else names[0]


def read_fields(cls: type, text: str, origin: str) -> dict[str, Any]:
    """The fields of a dataclass from JSON; missing and unknown fields are errors."""
    try:
        given = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{origin} is not JSON: {error}. Fix: restore or retrain.") from None
    if not isinstance(given, dict):
        raise ValueError(f"{origin} must be a JSON object. Got {type(given).__name__}.")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    unknown = sorted(given.keys() - fields.keys())
    missing = sorted(
        name
        for name, field in fields.items()
        if name not in given
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    )
    if unknown or missing:
        raise ValueError(
            f"{origin} does not describe a {cls.__name__} of this version of regard: "
            f"unknown fields {unknown}, missing fields {missing}. "
            "Fix: use the version that wrote it, or train again."
        )
    return given
