"""All that a training run starts from, in one file: data, tokenizer, batches, model, recipe.

A run folder keeps it as settings.json, so that the run can be continued without repeating an
option. A named recipe, in recipes/, is the same file without the data. How the pieces are put to
use is prepare.py.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regard.atomic_file import write_atomically
from regard.seq2seq.corpus.grammar.chooser import Scope
from regard.seq2seq.model.config import Config, read_fields
from regard.seq2seq.text.marks import Case
from regard.seq2seq.text.tokenizer import Kind
from regard.seq2seq.train.batches import BUCKETS
from regard.seq2seq.train.recipe import Recipe

FILE = "settings.json"
RECIPES = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class DataSettings:
    """Where the pairs come from, and what is done to them first.

    Attributes:
        tsv: a file of tab-separated pairs.
        source, target: two parallel files, line by line.
        hf: a dataset's name for Hugging Face `datasets`; `hf_config` its configuration.
        languages: the two sides' names in that dataset.
        grammar: so many sentences of the embedded English–French grammar.
        scope: of the grammar: "demo", fewer words, or "full".
        valid_tsv, valid_source, valid_target: likewise, what is validated on.
        valid_fraction: without those, how much of the training pairs is set aside for it.
        valid_at_least: but at least so many sentences, where that is at most a tenth of them.
        valid_sentences: validate on so many of them at most, drawn at random; 0: on all.
        reverse: translate the other way: the sides are swapped.
        expand: bring both sides to the form of word-aligned test sets (corpus/expanded.py).
        max_words: leave out pairs with more words on a side.
        max_ratio: leave out pairs one side of which is so many times as long; None: any.
        subword_dropout: with kind "bpe", how probably each merge is skipped, anew in every epoch:
            for small corpora (subword_dropout.py). Training pairs only; 0: never.
    """

    tsv: str | None = None
    source: str | None = None
    target: str | None = None
    hf: str | None = None
    hf_config: str | None = None
    languages: tuple[str, str] = ("en", "fr")
    grammar: int | None = None
    scope: Scope = "full"
    valid_tsv: str | None = None
    valid_source: str | None = None
    valid_target: str | None = None
    valid_fraction: float = 0.02
    valid_at_least: int = 0
    valid_sentences: int = 1000
    reverse: bool = False
    expand: bool = False
    max_words: int = 200
    max_ratio: float | None = None
    subword_dropout: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "languages", tuple(self.languages))  # JSON has lists only
        if len(self.languages) != 2:
            raise ValueError(f"languages must name two. Got {self.languages!r}.")
        if not 0.0 < self.valid_fraction < 1.0:
            raise ValueError(f"valid_fraction must be in (0, 1). Got {self.valid_fraction}.")
        if not 0.0 <= self.subword_dropout <= 1.0:
            raise ValueError(f"subword_dropout must be in [0, 1]. Got {self.subword_dropout}.")
        given = [name for name in ("tsv", "source", "hf", "grammar") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(
                f"the pairs come from one place. Got {' and '.join(given)}. Fix: one of them."
            )
        for source, target in (("source", "target"), ("valid_source", "valid_target")):
            if bool(getattr(self, source)) != bool(getattr(self, target)):
                missing = target if getattr(self, source) else source
                raise ValueError(
                    f"parallel files come in twos, {source} and {target}. Got no {missing}."
                )
        if self.valid_tsv and self.valid_source:
            raise ValueError(
                "validation pairs come from one place. Got valid_tsv and valid_source."
            )


@dataclass(frozen=True)
class TokenizerSettings:
    """How the vocabulary is learned: the arguments of `TokenizerPair.train`."""

    kind: Kind = "bpe"
    size: int = 8000
    joint: bool = True
    min_count: int = 1
    case: Case = "keep"
    strip_accents: bool = False


@dataclass(frozen=True)
class BatchSettings:
    """How pairs become batches: the arguments of `Batches`."""

    tokens: int = 2560
    buckets: tuple[int, ...] = BUCKETS
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "buckets", tuple(self.buckets))


@dataclass(frozen=True)
class Settings:
    """A whole run, as one value.

    Example:
        >>> from regard.seq2seq.train.settings import Settings
        >>> settings = Settings.named("demo")
        >>> settings.recipe.schedule
        'cosine'
        >>> settings.with_model(decoder=256).config(500, 800).decoder
        256
        >>> Settings.from_json(settings.to_json()) == settings
        True

    Attributes:
        about: what it is for, a sentence or two.
        data, tokenizer, batches, recipe: see their classes.
        model: the fields of `Config`, but for the sizes of the vocabularies, which the tokenizer
            decides.
        beam: of the translations that are made for validation; 1 is greedy.
        scaled: fields that `prepare` chooses by the size of the corpus, as "tokenizer.size".
    """

    about: str = ""
    data: DataSettings = field(default_factory=DataSettings)
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    batches: BatchSettings = field(default_factory=BatchSettings)
    model: dict[str, Any] = field(default_factory=dict)
    recipe: Recipe = field(default_factory=Recipe)
    beam: int = 1
    scaled: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "scaled", tuple(self.scaled))
        if self.data.subword_dropout and self.tokenizer.kind != "bpe":
            raise ValueError(
                'subword_dropout skips merges, and needs a tokenizer of kind "bpe". Got '
                f"subword_dropout {self.data.subword_dropout} with kind {self.tokenizer.kind!r}. "
                'Fix: kind "bpe", or subword_dropout 0.'
            )

    def config(self, source_vocab: int, target_vocab: int) -> Config:
        """The model's configuration, now that the vocabularies are known."""
        return Config(source_vocab, target_vocab, **self.model)

    def with_model(self, **fields: Any) -> "Settings":
        """The same with other sizes or choices of the model."""
        return dataclasses.replace(self, model={**self.model, **fields})

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str, origin: str = "the settings") -> "Settings":
        """The inverse of to_json; what is not there has its default.

        Args:
            text: the JSON.
            origin: what error messages call it.

        Raises:
            ValueError: it is not JSON, has a field that nobody knows, or a value out of range.
        """
        given = read_fields(cls, text, origin)
        try:
            parts: dict[str, Any] = {}
            for name, part in _PARTS.items():
                inner = json.dumps(given.pop(name, {}))
                parts[name] = part(**read_fields(part, inner, f"{name!r} of {origin}"))
            settings = cls(**given, **parts)
            settings.config(100, 100)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{origin}: {error}") from None
        return settings

    @classmethod
    def load(cls, path: str | Path) -> "Settings":
        """Reads a file that to_json's text was written to."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"), str(path))

    @classmethod
    def named(cls, name: str) -> "Settings":
        """A recipe of the package by its name, or any by its file.

        Raises:
            FileNotFoundError: there is neither; the message has the names that there are.
        """
        for path in (RECIPES / f"{name}.json", Path(name)):
            if path.is_file():
                return cls.load(path)
        known = ", ".join(sorted(path.stem for path in RECIPES.glob("*.json")))
        raise FileNotFoundError(f"a recipe is a JSON file, or one of {known}. Got {name!r}.")

    def save(self, folder: str | Path) -> None:
        """Writes settings.json into a run's folder, all of it or nothing."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_atomically(Path(folder) / FILE, self.to_json())


_PARTS: dict[str, type] = {
    "data": DataSettings,
    "tokenizer": TokenizerSettings,
    "batches": BatchSettings,
    "recipe": Recipe,
}
