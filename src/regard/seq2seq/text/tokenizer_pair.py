"""The tokenizers of a translator, one per side or one for both, and the file they are kept in."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.atomic_file import write_atomically
from regard.seq2seq.corpus.pair import Pair
from regard.seq2seq.text.tokenizer import Tokenizer
from regard.versioned_json import parse_versioned

FILE = "tokenizer.json"
FORMAT = "regard tokenizer"
VERSION = 1


@dataclass(frozen=True)
class TokenizerPair:
    """The source's tokenizer and the target's; if they are one object, they are joint.

    A joint vocabulary lets both sides share their embeddings, and spells a name alike on both.

    Example:
        >>> import tempfile
        >>> from regard.seq2seq.corpus import Pair
        >>> from regard.seq2seq.text.tokenizer_pair import TokenizerPair
        >>> pairs = [Pair("The cat sleeps.", "Le chat dort.")]
        >>> tokenizers = TokenizerPair.train(pairs, kind="word", joint=False)
        >>> tokenizers.target.encode("Le chat").words
        ('Le', 'chat')
        >>> with tempfile.TemporaryDirectory() as model_folder:
        ...     tokenizers.save(model_folder)
        ...     TokenizerPair.load(model_folder) == tokenizers
        True
    """

    source: Tokenizer
    target: Tokenizer

    @property
    def joint(self) -> bool:
        """Whether both sides have one vocabulary."""
        return self.source is self.target

    @classmethod
    def train(
        cls,
        pairs: Iterable[Pair],
        *,
        joint: bool = True,
        **options: Any,
    ) -> "TokenizerPair":
        """Learns one vocabulary from both sides, or one from each.

        Args:
            pairs: the training pairs.
            joint: one vocabulary.
            options: as for `Tokenizer.train`; `size` is that of each vocabulary.
        """
        sources, targets = [], []
        for pair in pairs:
            sources.append(pair.source)
            targets.append(pair.target)
        if joint:
            both = Tokenizer.train(sources + targets, **options)
            return cls(both, both)
        return cls(Tokenizer.train(sources, **options), Tokenizer.train(targets, **options))

    def save(self, folder: str | Path) -> None:
        """Writes tokenizer.json into a model's folder, all of it or nothing."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "source": _to_json(self.source),
            "target": "same as source" if self.joint else _to_json(self.target),
        }
        path = Path(folder) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(content, ensure_ascii=False, indent=0))

    @classmethod
    def load(cls, folder: str | Path) -> "TokenizerPair":
        """Reads tokenizer.json from a model's folder.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is damaged, or written by a newer regard.
        """
        path = Path(folder) / FILE
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            raise FileNotFoundError(
                f"a model's folder has a file {FILE}, and {path.parent} has none."
            ) from None
        content = parse_versioned(text, str(path), FORMAT, VERSION)
        try:
            source = _from_json(content["source"])
            if content["target"] == "same as source":
                return cls(source, source)
            return cls(source, _from_json(content["target"]))
        except (KeyError, TypeError, ValueError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path} is damaged: {reason}") from None


def _to_json(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "kind": tokenizer.kind,
        "case": tokenizer.case,
        "strip_accents": tokenizer.strip_accents,
        "pieces": list(tokenizer.pieces),
        # Two pieces on one line: no piece has a space in it.
        "merges": [f"{left} {right}" for left, right in tokenizer.merges],
    }


def _from_json(content: Any) -> Tokenizer:
    if not all(isinstance(piece, str) for piece in (*content["pieces"], *content["merges"])):
        raise TypeError("a piece of the vocabulary is not text.")
    merges = [merge.split(" ") for merge in content["merges"]]
    return Tokenizer(
        kind=content["kind"],
        pieces=tuple(content["pieces"]),
        merges=tuple((left, right) for left, right in merges),
        case=content["case"],
        strip_accents=bool(content["strip_accents"]),
    )
