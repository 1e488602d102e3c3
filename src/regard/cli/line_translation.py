"""Lines to translate, and the lines that are written for them: text, n-best lists, JSON, links.

A line of any length is translated in bounded memory: a long one is cut into pieces, and the
attention weights between all its words are never made.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.seq2seq.translation import Translation
    from regard.seq2seq.translator import Translator

LONG_LINE = 2000  # characters; a longer line is cut into pieces
TOGETHER = 2048  # lines and pieces that are translated at a time
WEIGHTS = 1 << 29  # bytes of their weights, at most, but for a single line

# For each piece of a line (nearly always one), its translations, the best first.
Pieces = list[list["Translation"]]


@dataclass(frozen=True)
class Form:
    """How the translations of a line are written.

    Example:
        >>> from regard.seq2seq.translation import Translation
        >>> found = [[Translation.empty()]]
        >>> Form().lines(7, Form().render("", found))
        ['']
        >>> Form(n_best=2).lines(7, Form(n_best=2).render("", found))
        ['7 |||  ||| 0.0000']

    Attributes:
        n_best: how many of each line; where it is more than one, each output line has an index.
        as_json: a JSON object per line, with words and weights.
        links: after each translation its word alignment.
    """

    n_best: int = 1
    as_json: bool = False
    links: bool = False

    @property
    def needs_weights(self) -> bool:
        """Whether the output has anything that is made of attention weights."""
        return self.as_json or self.links

    def render(self, source: str, pieces: Pieces) -> tuple[str, ...]:
        """What is written for a line, except its index.

        The k-th translation of a line in pieces is made of the k-th of each piece; its score is
        their mean.
        """
        count = max(map(len, pieces))
        ranked = [[piece[min(k, len(piece) - 1)] for piece in pieces] for k in range(count)]
        if self.as_json:
            fields = {"source": source, "translations": [_json(chosen) for chosen in ranked]}
            return (json.dumps(fields, ensure_ascii=False),)
        return tuple(self._one(chosen) for chosen in ranked)

    def lines(self, index: int, rendered: Sequence[str]) -> list[str]:
        """The output lines of the input line with some index, from what `render` made of it."""
        if self.n_best == 1 or self.as_json:
            return list(rendered)
        return [f"{index} ||| {one}" for one in rendered]

    def _one(self, chosen: Sequence["Translation"]) -> str:
        parts = [_text(chosen)]
        if self.n_best > 1:
            parts.append(f"{_score(chosen):.4f}")
        if self.links:
            from regard.seq2seq.alignment import format_links

            links, read, written = set(), 0, 0
            for one in chosen:
                links |= {(read + i, written + j) for i, j in one.links()}
                read, written = read + len(one.source_words), written + len(one.target_words)
            parts.append(format_links(links))
        return ("\t" if self.n_best == 1 else " ||| ").join(parts)


def translate_lines(
    translator: "Translator",
    lines: Sequence[str],
    *,
    n_best: int = 1,
    weights: bool = False,
    progress: Callable[[float, float], None] = lambda done, total: None,
    **options: Any,
) -> Iterator[Pieces]:
    """Translates lines of any lengths, a bounded number at a time.

    Args:
        translator: the model.
        lines: the lines.
        n_best: how many translations of each.
        weights: whether attention weights are needed; otherwise they are dropped at once.
        progress: called now and then with how much is done, and of how much.
        options: of `Translator.translate`.

    Yields:
        For each line, in their order, its pieces with their translations.
    """
    total, done = sum(map(len, lines)) or 1, 0
    pending: Pieces = []  # of the line that is not complete yet
    for group in _groups(lines, n_best):
        size = sum(len(text) for text, _ in group)

        def report(parts: int, of: int, done: int = done, size: int = size) -> None:
            progress(done + size * parts / of, total)

        texts = [text for text, _ in group]
        for (_, last), translations in zip(
            group,
            translator.translate(texts, n_best=n_best, progress=report, **options),
            strict=True,
        ):
            pending.append(translations if weights else list(map(_without_weights, translations)))
            if last:
                yield pending
                pending = []
        done += size


def _groups(lines: Sequence[str], n_best: int) -> Iterator[list[tuple[str, bool]]]:
    """(text, whether it is the last piece of its line), as many as fit into the memory."""
    group: list[tuple[str, bool]] = []
    size = 0
    for text, last in _pieces(lines):
        cost = n_best * 8 * (len(text) // 2 + 1) ** 2  # float64, and words of one letter
        if group and (len(group) == TOGETHER or size + cost > WEIGHTS):
            yield group
            group, size = [], 0
        group.append((text, last))
        size += cost
    if group:
        yield group


def _pieces(lines: Sequence[str]) -> Iterator[tuple[str, bool]]:
    from regard.seq2seq.text.sentences import text_pieces

    for line in lines:
        if len(line) <= LONG_LINE:
            yield line, True
            continue
        before = None
        for piece in text_pieces(line):
            if before is not None:
                yield before, False
            before = piece
        yield before or "", True


def _without_weights(one: "Translation") -> "Translation":
    return dataclasses.replace(one, weights=one.weights[:0])


def _text(chosen: Sequence["Translation"]) -> str:
    return " ".join(one.text for one in chosen if one.text)


def _score(chosen: Sequence["Translation"]) -> float:
    return sum(one.score for one in chosen) / len(chosen)


def _json(chosen: Sequence["Translation"]) -> dict[str, Any]:
    """A translation as JSON; of a line in pieces, the weights are those of each piece."""
    from regard.seq2seq.translation import to_json

    rows = [to_json(one) for one in chosen]
    if len(rows) == 1:
        return rows[0]
    score = _score(chosen)
    return {
        "text": _text(chosen),
        "score": round(score, 4) if abs(score) < 1e30 else None,  # JSON has no infinity
        "source_words": [word for one in rows for word in one["source_words"]],
        "target_words": [word for one in rows for word in one["target_words"]],
        "weights": None,
        "pieces": rows,
    }
