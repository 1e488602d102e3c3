"""`AttentionMap`: weights with the names of their queries and keys.

Every view starts from this object: a figure (drawing.py), a page for the browser (page/), the
terminal (terminal.py), and a JSON file that can be loaded again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import regard
from regard.atomic_file import write_atomically
from regard.show.heatmaps import import_drawing
from regard.versioned_json import parse_versioned

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

FORMAT = "regard attention map"
VERSION = 1
LARGEST = 512  # rows or columns: beyond, a map is made of block averages
END = "(end)"  # names the column of the weight on the end of the sentence


class AttentionMap:
    """Attention weights with labels: print them, plot them, or write them as a page.

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
        query_labels: T names, one for each row; None: numbers.
        key_labels: S names, one for each column; None: numbers.
        title: one line above all panels.
        signed: the weights are differences: drawn around 0, one color for more and another for
            less. `first - second` of two maps sets it.
        end: the name of one more column, for the weight that each row lacks to 1. A translation's
            weights (`Translation.weights`) leave out what fell on the end of the sentence; with
            `end="(end)"` every row sums to 1. Weights that are all zero (a model without
            attention) get no such column. None: no column.

    Attributes:
        weights: always (layers, heads, T, S), float32; S counts the `end` column.

    Raises:
        ValueError: the labels do not match the weights, a weight is not finite, or `end` is given
            and a row sums to more than 1.
    """

    weights: np.ndarray
    query_labels: tuple[str, ...]
    key_labels: tuple[str, ...]
    title: str
    signed: bool

    def __init__(
        self,
        weights: Any,
        query_labels: Sequence[str] | None = None,
        key_labels: Sequence[str] | None = None,
        title: str = "",
        end: str | None = None,
        *,
        signed: bool = False,
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
        self.title, self.signed = title, signed
        if end is not None and self.weights.any():
            self.weights = np.concatenate([self.weights, _missing(self.weights)], axis=-1)
            self.key_labels += (end,)

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
        """The weights that `regard.attend` would use for this query and key.

        Up to 512 queries and keys the map has every weight. Beyond, each cell is the average over
        a block, computed without the T×S matrix (`regard.attention_map`), so that a map of 100,000
        tokens is possible; rows and columns are then named by the first token of their block.

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

    @classmethod
    def stack(
        cls,
        layers: Sequence[Any],
        query_labels: Sequence[str] | None = None,
        key_labels: Sequence[str] | None = None,
        title: str = "",
        *,
        example: int = 0,
    ) -> AttentionMap:
        """The weights of a whole model, a list with one array for each layer.

        Example:
            >>> import numpy as np
            >>> from regard.show import AttentionMap
            >>> layers = [np.full((2, 4, 5, 5), 0.2) for _ in range(3)]  # batch 2, 4 heads
            >>> AttentionMap.stack(layers, example=1).weights.shape
            (3, 4, 5, 5)

        Args:
            layers: for each layer (T, S), (heads, T, S) or (batch, heads, T, S).
            query_labels, key_labels, title: as for the class.
            example: which of the batch, where there is one.

        Raises:
            ValueError: no layer, or layers of several shapes.
        """
        arrays = [np.asarray(layer) for layer in layers]
        if not arrays or len({layer.shape for layer in arrays}) > 1 or arrays[0].ndim > 4:
            raise ValueError(
                "layers must be arrays of one shape: (T, S), (heads, T, S) or (batch, heads, T, "
                f"S). Got layers {[list(layer.shape) for layer in arrays]}. Fix for other "
                "shapes, such as self- and cross-attention: one map for each."
            )
        if arrays[0].ndim == 4:
            arrays = [layer[example] for layer in arrays]
        if arrays[0].ndim == 2:
            arrays = [layer[None] for layer in arrays]
        return cls(np.stack(arrays), query_labels, key_labels, title)

    def __sub__(self, other: AttentionMap) -> AttentionMap:
        """What the first map has more than the second: a map of numbers around 0, in two colors.

        A map of one layer or head is compared with all of the other's. Where the labels differ,
        as between two sentences of one length, both are written.

        Example:
            >>> import numpy as np
            >>> from regard.show import AttentionMap
            >>> red = AttentionMap([[0.75, 0.25]], ["voiture"], ["car", "red"])
            >>> old = AttentionMap([[0.5, 0.5]], ["voiture"], ["car", "old"])
            >>> (red - old).weights.tolist(), (red - old).key_labels
            ([[[[0.25, -0.25]]]], ('car', 'red | old'))

        Raises:
            ValueError: the maps have different rows, columns, layers or heads.
        """
        if not isinstance(other, AttentionMap):
            return NotImplemented
        mine, others = self.weights.shape, other.weights.shape
        if mine[2:] != others[2:] or any(
            a != b and 1 not in (a, b) for a, b in zip(mine[:2], others[:2], strict=True)
        ):
            raise ValueError(
                "a difference needs two maps of the same rows and columns, and of the same layers "
                f"and heads or one. Got weights {list(mine)} and {list(others)} (layers, heads, T, "
                "S). Fix: AttentionMap(seen.weights[layer, head], ...) for one of many."
            )
        sides = ((self.query_labels, other.query_labels), (self.key_labels, other.key_labels))
        rows, columns = (
            [a if a == b else f"{a} | {b}" for a, b in zip(*side, strict=True)] for side in sides
        )
        title = f"{self.title} − {other.title}" if self.title and other.title else ""
        return AttentionMap(self.weights - other.weights, rows, columns, title, signed=True)

    # Views -----------------------------------------------------------------------------------

    def plot(
        self,
        *,
        cmap: str | None = None,
        figsize: tuple[float, float] | None = None,
        titles: Sequence[str] | None = None,
        xlabel: str = "",
        ylabel: str = "",
        vmin: float | None = None,
        vmax: float | None = None,
        ax: Any = None,
        colorbar: bool = True,
    ) -> Figure:
        """A Matplotlib figure, one panel for each layer and head, on one color scale.

        Labels are on the outer panels only. Files that the figure writes (`figure.savefig`) have
        TrueType fonts in PDF and text as text in SVG. With `ax` the figure is yours, and so are
        its fonts: set `pdf.fonttype` to 42 and `svg.fonttype` to "none" in `matplotlib.rcParams`.

        Args:
            cmap: the name of a Matplotlib color map. None: "Blues", and "RdBu" for a difference.
            figsize: width and height in inches; None: large enough for the labels.
            titles: one for each head, or one for each panel, instead of their numbers.
            xlabel, ylabel: names of the axes, such as "keys" and "queries".
            vmin, vmax: the ends of the color scale. None: 0 and 1 for the weights of up to 64
                keys; for more keys, see `regard.show.heatmaps.color_scale`. A difference has 0 in
                the middle of its scale.
            ax: Matplotlib axes to draw on; for several panels an array of layers × heads axes.
            colorbar: whether to draw the color bar.
        """
        return import_drawing("AttentionMap.plot").draw(
            self,
            cmap=cmap,
            figsize=figsize,
            titles=titles,
            xlabel=xlabel,
            ylabel=ylabel,
            vmin=vmin,
            vmax=vmax,
            ax=ax,
            colorbar=colorbar,
        )

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
        """A self-contained page: heatmap, lines and table, for pointer and keyboard."""
        from regard.show.page import page_of

        return page_of(self)

    def _repr_html_(self) -> str:
        """The page for a notebook, in an iframe, so that it cannot reach the notebook."""
        from regard.show.page import frame_of

        return frame_of(self)

    # Files -----------------------------------------------------------------------------------

    def save(self, path: str | Path, **options: Any) -> Path:
        """Writes .png, .svg, .pdf, .html or .json, completely or not at all.

        Args:
            path: the file; its ending decides what is written.
            **options: for a picture, as for `plot`.

        Raises:
            ValueError: another ending.
        """
        path = Path(path)
        kind = path.suffix.lower()
        if kind not in (".png", ".svg", ".pdf", ".html", ".json"):
            raise ValueError(
                f"an attention map is saved as .png, .svg, .pdf, .html or .json. Got {path.name!r}."
            )
        if kind in (".html", ".json"):
            if options:
                raise TypeError(f"{kind} takes no plot options. Got {', '.join(options)}.")
            write_atomically(path, self.to_html() if kind == ".html" else self.to_json())
            return path
        figure = self.plot(**options)
        return import_drawing("AttentionMap.save").write(figure, path, options.get("ax") is None)

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
        } | ({"signed": True} if self.signed else {})
        return json.dumps(content, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str, origin: str = "the attention map") -> AttentionMap:
        """The inverse of `to_json`.

        Raises:
            ValueError: the text is not an attention map, or one of another version.
        """
        content = parse_versioned(text, origin, FORMAT, VERSION)
        try:
            with np.errstate(over="ignore"):  # overflows become Inf, which is refused below
                weights = np.asarray(content["weights"], np.float32)
            sides = (content["query_labels"], content["key_labels"])
            rows, columns = ([str(label) for label in side] for side in sides)
            if not weights.size:  # nested lists lose the lengths after one of 0
                weights = weights.reshape(*weights.shape[:2], len(rows), len(columns))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{origin} is damaged: {error!r}.") from None
        title, signed = str(content.get("title", "")), bool(content.get("signed", False))
        return cls(weights, rows, columns, title, signed=signed)

    @classmethod
    def load(cls, path: str | Path) -> AttentionMap:
        """Reads a .json file that `save` wrote."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"), str(path))


def _labels(
    name: str, labels: Sequence[str] | None, weights: np.ndarray, axis: int
) -> tuple[str, ...]:
    """One label for each position on an axis: the given ones, or numbers."""
    count = weights.shape[axis]
    found = tuple(map(str, range(count) if labels is None else labels))
    if len(found) != count:
        which = "T, the rows" if axis == -2 else "S, the columns"
        raise ValueError(
            f"{name} must have one label for each of {which} of the weights. "
            f"Got {len(found)} labels, weights {list(weights.shape)}."
        )
    return found


def _missing(weights: np.ndarray) -> np.ndarray:
    """What each row lacks to 1, (layers, heads, T, 1)."""
    sums = weights.sum(-1, keepdims=True, dtype=np.float64)
    if sums.size and sums.max() > 1.001:
        raise ValueError(
            f"with end=, each row of the weights must sum to at most 1. Got {sums.max():.3f}."
        )
    return np.maximum(1.0 - sums, 0.0).astype(np.float32)


def _first_labels(labels: Sequence[str] | None, length: int, blocks: int) -> list[str]:
    """The first token of every block of `regard.attention_map`, by name or number."""
    firsts = [-(-block * length // blocks) for block in range(blocks)]
    return [str(first if labels is None else labels[first]) for first in firsts]
