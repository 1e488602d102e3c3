"""The architectures of a translator, and the interface that training and search use.

An architecture is a configuration, an encoder and a decoder. `Model` has the embeddings and the
vocabulary, and calls these two with B sentences of S tokens, and E the embedding's width:

    encoder(embedded [B, S, E], lens [B], rng, record)
                                                 -> states, which only the decoder knows
    decoder.remember(states, lens)               -> encoded, all that is needed of the sentences
    decoder(encoded, embedded [B, T, E], rng, return_weights, record)
                                                 -> readouts [B, T, E], weights [B, T, S] or None
    decoder.start(encoded, room)                 -> the state before the first of `room` tokens
    decoder.step(encoded, state, embedded [B, K, E])
                                                 -> state, readouts [B, K, E], weights [B, K, S]
    decoder.for_hypotheses(encoded)              -> the same, cheaper for a `step` with K > 1
    decoder.looks                                -> which weights align words by it, the best last
    decoder.alone(encoded, state, embedded [B, 1, E], which [B, C])
                                                 -> readouts [B, C, E]: see `Model.alone`; of a
                                                    decoder whose `looks` have "explaining"

`encoded` is a pytree with `lens` [B], `rows(which)` and `attends` (False: it has no weights). A
state is a pytree of arrays [B, K, ...], K hypotheses of each sentence: search reorders them without
knowing what they are. An `rng` turns dropout on; a `Recorder` collects the weights of every
layer and head. All readouts are in float32.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from regard.seq2seq.model.config import Config, ModelConfig, TransformerConfig
from regard.seq2seq.model.decoder import Decoder
from regard.seq2seq.model.encoder import Encoder
from regard.seq2seq.model.transformer import TransformerDecoder, TransformerEncoder


class Architecture(NamedTuple):
    config: type[ModelConfig]
    encoder: Any
    decoder: Any


ARCHITECTURES = {
    "recurrent": Architecture(Config, Encoder, Decoder),
    "transformer": Architecture(TransformerConfig, TransformerEncoder, TransformerDecoder),
}


def architecture_named(name: Any) -> Architecture:
    """An architecture by its name.

    Raises:
        ValueError: there is none; the message lists those that there are.
    """
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(repr(known) for known in ARCHITECTURES)
        raise ValueError(f"architecture must be one of {known}. Got {name!r}.")
    return ARCHITECTURES[name]


def load_config(path: str | Path) -> Any:
    """Reads a configuration; a file that names no architecture is of the recurrent one.

    Raises:
        ValueError: the file does not describe a model.
    """
    text = Path(path).read_text(encoding="utf-8")
    try:
        fields = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        fields = None
    name = fields.get("architecture", "recurrent") if isinstance(fields, dict) else "recurrent"
    try:
        kind = architecture_named(name).config
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return kind.from_json(text, str(path))
