"""Pairs from a dataset of the Hugging Face `datasets` package, where that is installed."""

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

from regard.seq2seq.corpus.cleaning import Found, Reader
from regard.seq2seq.corpus.pair import CorpusError, Pair


@dataclass
class HuggingFace(Reader):
    """Sentence pairs from a dataset with a `translation` column, or with a column for each side.

    Example:
        >>> from regard.seq2seq.corpus import HuggingFace
        >>> rows = [{"translation": {"en": "Good night.", "fr": "Bonne nuit."}}]
        >>> [pair.target for pair in HuggingFace(rows, source="en", target="fr")]
        ['Bonne nuit.']

    Args:
        dataset: a name for `datasets.load_dataset`, or a dataset that is loaded already: anything
            that gives rows as dicts.
        source: the source's language in `translation`, or its column.
        target: the target's.
        config: the dataset's configuration, "en-fr" say; with a name only.
        split: which part to load; with a name only.
        streaming: do not download it all; with a name only.
        cleaning, progress: see `Reader`; its `report` is an account of the last reading.

    Raises:
        ImportError: when it is read: datasets is not installed; the message has the pip command.
        CorpusError: a row without the two sides, with its columns; or nothing kept.
    """

    dataset: str | Iterable[Mapping[str, Any]]
    source: str
    target: str
    config: str | None = None
    split: str = "train"
    streaming: bool = False

    def _found(self) -> Iterator[Found]:
        rows: Any = self._load() if isinstance(self.dataset, str) else self.dataset
        name = self.dataset if isinstance(self.dataset, str) else "dataset"
        total = len(rows) if isinstance(rows, Sized) else None
        for number, row in enumerate(rows):
            where = f"{name}[{number}]"
            sides = row.get("translation", row)
            if self.source not in sides or self.target not in sides:
                raise CorpusError(
                    f"{where}: a row must have {self.source!r} and {self.target!r}, in "
                    f"`translation` or as columns. Got {', '.join(map(repr, sides))}."
                )
            source, target = (sides[self.source] or "", sides[self.target] or "")
            problem = "NUL byte" if "\0" in source or "\0" in target else ""
            fraction = None if not total else (number + 1) / total
            yield Found(where, Pair(source, target), problem, (), fraction)

    def _load(self) -> Any:
        try:
            datasets = importlib.import_module("datasets")
        except ModuleNotFoundError as error:
            raise ImportError(
                "A dataset by name needs the package datasets, which is not installed.\n"
                "Install it with: pip install datasets"
            ) from error
        return datasets.load_dataset(
            self.dataset, self.config, split=self.split, streaming=self.streaming
        )
