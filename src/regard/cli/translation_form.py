"""The form that translations are written in: text, n-best lists, JSON, with links or without."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regard.seq2seq.translation import Translation


@dataclass(frozen=True)
class Form:
    """How the translations of a sentence are written.

    Example:
        >>> from regard.seq2seq.translation import Translation
        >>> found = [Translation.empty()]
        >>> Form().lines(7, Form().told("", found))
        ['']
        >>> Form(n_best=2).lines(7, Form(n_best=2).told("", found))
        ['7 |||  ||| 0.0000']

    Attributes:
        n_best: how many of each sentence; where it is more than one, each line has an index.
        as_json: a JSON object per sentence, with words and weights.
        links: behind each translation its word alignment.
    """

    n_best: int = 1
    as_json: bool = False
    links: bool = False

    def told(self, source: str, translations: Sequence["Translation"]) -> tuple[str, ...]:
        """What is written of a sentence, but for its index."""
        if self.as_json:
            from regard.seq2seq.translation import to_json

            told = {"source": source, "translations": [to_json(one) for one in translations]}
            return (json.dumps(told, ensure_ascii=False),)
        return tuple(self._one(one) for one in translations)

    def lines(self, index: int, told: Sequence[str]) -> list[str]:
        """The lines of the sentence with some index, of what `told` made of it."""
        if self.n_best == 1 or self.as_json:
            return list(told)
        return [f"{index} ||| {one}" for one in told]

    def _one(self, one: "Translation") -> str:
        parts = [one.text]
        if self.n_best > 1:
            parts.append(f"{one.score:.4f}")
        if self.links:
            from regard.seq2seq.alignment import format_links

            parts.append(format_links(one.links()))
        return ("\t" if self.n_best == 1 else " ||| ").join(parts)
