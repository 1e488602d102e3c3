"""`AttentionMap`: weights with the names of what looks and of what is looked at.

The one object that every view starts from: a picture (drawing.py), a page for the browser
(page/), the terminal (terminal.py), and a JSON file that can be loaded again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import regard

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

FORMAT = "regard attention map"
VERSION = 1
LARGEST = 512  # rows or columns: beyond, a map is made of block averages


class AttentionMap:
    """Attention weights, labeled, to be looked at.

    Example:
        >>> import numpy as np
        >>> from regard.show import AttentionMap
        >>> seen = AttentionMap(np.eye(2), ["le", "chat"], ["the", "cat"])
        >>> seen.print()
             the cat
          le 1.0   ·
        chat   · 1.0

    Args:
        weights: (T, S), (heads, T, S) or (layers, heads, T, S), any array of numbers.
        query_labels: T names, what looks; None: numbers.
        key_labels: S names, what is looked at; None: numbers.
        title: one line above it all.

    Attributes:
        weights: always (layers, heads, T, S), float32.

    Raises:
        ValueError: the labels do not fit the weights, or a weight is not finite.
    """

    weights: np.ndarray
    query_labels: tuple[str, ...]
    key_labels: tuple[str, ...]
    title: str

    def __init__(
        self,
        weights: Any,
        query_labels: Sequence[str] | None = None,
        key_labels: Sequence[str] | None = None,
        title: str = "",
    ) -> None:
        given = np.asarray(weights)
        if not 2 <= given.ndim <= 4 or 0 in given.shape[:-2]:
            raise ValueError(
                "weights must be (T, S), (heads, T, S) or (layers, heads, T, S). "
                f"Got weights {list(given.shape)}."
            )
        self.weights = given.reshape((1,) * (4 - given.ndim) + given.shape).astype(np.float32)
        finite = np.isfinite(self.weights)
        if not finite.all():
            raise ValueError(
                f"weights must be finite. Got weights {list(given.shape)} with "
                f"{int((~finite).sum())} that are not."
            )
        self.query_labels = _labels("query_labels", query_labels, given, -2)
        self.key_labels = _labels("key_labels", key_labels, given, -1)
        self.title = title

    @classmethod
    def of(
        cls,
        query: Any,
        key: Any,
        *,
        query_labels: Sequence[str] | None = None,
        key_labels: Sequence[str] | None = None,
        title: str = "",
        example: int = 0,
        **settings: Any,
    ) -> AttentionMap:
        """The map of a pipeline call: what `regard.attend` would look at.

        Up to 512 queries and keys it has every weight. Beyond, each cell is the average over a
        block, computed without the T×S matrix (`regard.attention_map`), so that a sequence of
        100,000 tokens can be looked at; rows and columns are then named by the first token of
        their block.

        Example:
            >>> import jax
            >>> import regard
            >>> from regard.show import AttentionMap
            >>> x = jax.random.normal(jax.random.key(0), (1500, 8))
            >>> seen = AttentionMap.of(x, x, mask=regard.Mask.causal())
            >>> seen.weights.shape, seen.key_labels[:3]
            ((1, 1, 512, 512), ('0', '3', '6'))

        Args:
            query: (T, D), (B, T, D) or (B, T, N, D).
            key: likewise.
            query_labels, key_labels, title: as for the class; labels are of single tokens.
            example: which of the batch.
            **settings: score, valid_lens, mask, bias, normalize: as for `regard.attend`.
        """
        T, S = query.shape[-3 if query.ndim == 4 else -2], key.shape[-3 if key.ndim == 4 else -2]
        if max(T, S) <= LARGEST:
            weights = regard.weights(query, key, **settings)
        else:
            size = (min(T, LARGEST), min(S, LARGEST))
            weights = regard.attention_map(query, key, resolution=size, **settings)
            query_labels = _first_labels(query_labels, T, size[0])
            key_labels = _first_labels(key_labels, S, size[1])
        if query.ndim > 2:
            weights = weights[example]
        return cls(np.asarray(weights, np.float32), query_labels, key_labels, title)

    # Views -----------------------------------------------------------------------------------

    def plot(self, *, cmap: str = "Blues", figsize: tuple[float, float] | None = None) -> Figure:
        """A Matplotlib figure, one panel for each layer and head, on one color scale."""
        from regard.show.drawing import draw

        return draw(self, cmap, figsize)

    def print(
        self, *, layer: int = 0, head: int = 0, width: int = 80, console: Console | None = None
    ) -> None:
        """Shaded cells on the terminal, at most `width` columns wide."""
        try:
            from regard.show.terminal import print_map
        except ModuleNotFoundError as error:
            raise ImportError(
                "AttentionMap.print needs Rich, which is not installed.\n"
                'Install it with: pip install "regard[show]"'
            ) from error
        print_map(self, layer, head, width, console)

    def to_html(self) -> str:
        """One page that needs nothing else: heatmap, lines and table, with a pointer or keys."""
        from regard.show.page import page_of

        return page_of(self)

    def _repr_html_(self) -> str:
        """In a notebook: the page in a frame of its own, so that it cannot touch the notebook."""
        from regard.show.page import frame_of

        return frame_of(self)

    # Files -----------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Writes .png, .svg, .pdf, .html or .json, all of it or nothing.

        Raises:
            ValueError: another ending.
        """
        path = Path(path)
        kind = path.suffix.lower()
        if kind not in (".png", ".svg", ".pdf", ".html", ".json"):
            raise ValueError(
                f"an attention map is saved as .png, .svg, .pdf, .html or .json. Got {path.name!r}."
            )
        draft = path.with_name(f".{path.stem}.unfinished{kind}")
        try:
            if kind == ".html":
                draft.write_text(self.to_html(), encoding="utf-8")
            elif kind == ".json":
                draft.write_text(self.to_json(), encoding="utf-8")
            else:
                from regard.show.drawing import save_figure

                save_figure(self.plot(), draft)
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)
        return path

    def to_json(self) -> str:
        """What `from_json` reads; weights with six digits."""
        digits = [float(f"{weight:.6g}") for weight in self.weights.ravel()]
        nested = np.array(digits, np.float64).reshape(self.weights.shape).tolist()
        content = {
            "format": FORMAT,
            "version": VERSION,
            "title": self.title,
            "query_labels": self.query_labels,
            "key_labels": self.key_labels,
            "weights": nested,
        }
        return json.dumps(content, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str, origin: str = "the attention map") -> AttentionMap:
        """The inverse of `to_json`.

        Raises:
            ValueError: it is none, or one of a newer regard.
        """
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{origin} is not JSON: {error}.") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"{origin} is no attention map: its format is not {FORMAT!r}.")
        if content.get("version") != VERSION:
            raise ValueError(
                f"{origin} is of version {content.get('version')!r}, and this regard reads "
                f"version {VERSION}."
            )
        try:
            with np.errstate(over="ignore"):  # too large is not finite, and refused as such
                weights = np.asarray(content["weights"], np.float32)
            sides = (content["query_labels"], content["key_labels"])
            rows, columns = ([str(label) for label in side] for side in sides)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{origin} is damaged: {error!r}.") from None
        return cls(weights, rows, columns, title=str(content.get("title", "")))

    @classmethod
    def load(cls, path: str | Path) -> AttentionMap:
        """Reads a .json file that `save` wrote."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"), str(path))


def _labels(
    name: str, labels: Sequence[str] | None, weights: np.ndarray, axis: int
) -> tuple[str, ...]:
    """One text for each place on an axis: the given ones, or numbers."""
    count = weights.shape[axis]
    found = tuple(map(str, range(count) if labels is None else labels))
    if len(found) != count:
        which = "T, the rows" if axis == -2 else "S, the columns"
        raise ValueError(
            f"{name} must have one label for each of {which} of the weights. "
            f"Got {len(found)} labels, weights {list(weights.shape)}."
        )
    return found


def _first_labels(labels: Sequence[str] | None, length: int, blocks: int) -> list[str]:
    """The first token of every block of `regard.attention_map`, by name or number."""
    firsts = [-(-block * length // blocks) for block in range(blocks)]
    return [str(first if labels is None else labels[first]) for first in firsts]
