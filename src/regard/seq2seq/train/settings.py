"""The settings of a training run in one file: data, tokenizer, batches, model, recipe.

A run folder keeps them as settings.json, so that the run can be continued without repeating an
option. A named recipe, in recipes/, is the same file without the data. prepare.py uses them.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regard.atomic_file import write_atomically
from regard.seq2seq.corpus.grammar.chooser import Scope
from regard.seq2seq.model.architectures import architecture_named
from regard.seq2seq.model.config import JsonFields, ModelConfig, read_fields
from regard.seq2seq.text.marks import Case
from regard.seq2seq.text.tokenizer import Kind
from regard.seq2seq.train.batches import BUCKETS
from regard.seq2seq.train.recipe import Recipe

FILE = "settings.json"
RECIPES = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class DataSettings:
    """Where the pairs come from, and how they are selected and changed.

    Attributes:
        tsv: a file of tab-separated pairs.
        source, target: two parallel files, line by line.
        hf: a dataset's name for Hugging Face `datasets`; `hf_config` its configuration.
        languages: the two sides' names in that dataset.
        grammar: the number of sentences of the embedded English–French grammar.
        scope: of the grammar: "demo", fewer words, or "full".
        valid_tsv, valid_source, valid_target: likewise, for validation.
        valid_fraction: without those, the part of the training pairs that is set aside.
        valid_at_least: at least this many sentences are set aside, up to a tenth of them.
        valid_sentences: validate on at most this many, drawn at random (0 = all).
        reverse: swap source and target.
        expand: bring both sides to the form of word-aligned test sets (corpus/expanded.py).
        max_words: leave out pairs with more words on a side.
        max_ratio: leave out pairs one side of which is longer by this factor; None: keep all.
        subword_dropout: with kind "bpe", the probability that a merge is skipped, drawn again in
            every epoch (subword_dropout.py). Training pairs only.
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
                f"the pairs must come from one source. Got {' and '.join(given)}. Fix: one of them."
            )
        for source, target in (("source", "target"), ("valid_source", "valid_target")):
            if bool(getattr(self, source)) != bool(getattr(self, target)):
                missing = target if getattr(self, source) else source
                raise ValueError(
                    f"parallel files need both {source} and {target}. Got no {missing}."
                )
        if self.valid_tsv and self.valid_source:
            raise ValueError(
                "validation pairs must come from one source. Got valid_tsv and valid_source."
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
class Settings(JsonFields):
    """All settings of a run.

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
        about: what they are for, in a sentence or two.
        data, tokenizer, batches, recipe: see their classes.
        model: the fields of `Config` or, with "architecture": "transformer", `TransformerConfig`;
            except the sizes of the vocabularies, which the tokenizers determine.
        beam: the beam width of the translations in validation; 1 is greedy search.
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

    def config(self, source_vocab: int, target_vocab: int) -> ModelConfig:
        """The model's configuration, once the vocabularies are known."""
        name = self.model.get("architecture", "recurrent")
        kind = architecture_named(name).config
        known = [field.name for field in dataclasses.fields(kind)]
        if unknown := [field for field in self.model if field not in known]:
            raise ValueError(
                f"a model of the architecture {name!r} has {', '.join(known)}. Got "
                f"{', '.join(unknown)}. Fix: leave it out, or the architecture that has it."
            )
        return kind(source_vocab, target_vocab, **self.model)

    def with_model(self, **fields: Any) -> "Settings":
        """The same settings with some fields of the model changed."""
        return dataclasses.replace(self, model={**self.model, **fields})

    @classmethod
    def from_json(cls, text: str, origin: str | None = None) -> "Settings":
        """The inverse of to_json; missing fields have their defaults.

        Args:
            text: the JSON.
            origin: what error messages call it.

        Raises:
            ValueError: it is not JSON, has an unknown field, or a value out of range.
        """
        origin = origin or "the settings"
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
    def named(cls, name: str, architecture: str | None = None) -> "Settings":
        """A recipe of the package by its name, or any other by its file.

        Args:
            name: such as "multi30k", or a path.
            architecture: for this one: of the package's recipes, multi30k-transformer.json is
                "multi30k" for a Transformer; None: what the recipe is for.

        Raises:
            FileNotFoundError: there is neither; the message lists the known names.
            ValueError: a file is for another architecture.
        """
        if architecture is not None:
            architecture_named(architecture)
        suffix = "" if architecture in (None, "recurrent") else f"-{architecture}"
        for path in (RECIPES / f"{name}{suffix}.json", Path(name)):
            if path.is_file():
                found = cls.load(path)
                return found if architecture is None else found.for_architecture(architecture, path)
        stems = sorted(path.stem for path in RECIPES.glob(f"*{suffix}.json"))
        names = (stem.removesuffix(suffix) for stem in stems)
        known = ", ".join(name for name in names if "-" not in name)
        kind = f" for the architecture {architecture!r}" if suffix else ""
        raise FileNotFoundError(f"a recipe is a JSON file, or{kind} one of {known}. Got {name!r}.")

    def for_architecture(self, name: str, origin: str | Path) -> "Settings":
        """The same settings, once it is sure that they are for this architecture.

        Raises:
            ValueError: they are for another.
        """
        theirs = self.model.get("architecture", "recurrent")
        if theirs != name:
            raise ValueError(
                f"{origin} is for the architecture {theirs!r}. Got architecture {name!r}. Fix: "
                'a recipe whose "model" has "architecture": ' + f'"{name}".'
            )
        return self

    def save(self, folder: str | Path) -> None:
        """Writes settings.json into a run's folder, completely or not at all."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_atomically(Path(folder) / FILE, self.to_json())


_PARTS: dict[str, type] = {
    "data": DataSettings,
    "tokenizer": TokenizerSettings,
    "batches": BatchSettings,
    "recipe": Recipe,
}
