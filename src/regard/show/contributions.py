"""Why a query attends to a key: what each hidden unit of an additive score adds to one weight.

Exact, not an estimate: an additive score is a sum over its hidden units, so the logarithm of the
ratio of two softmax weights is one as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import regard
from regard.score.contract import repeat_heads
from regard.show.heatmaps import import_drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Contributions:
    """What each hidden unit of an additive score adds to the weight of one key.

    With a(q, k) = Σᵢ wᵢ tanh(xᵢ + yᵢ), x = W_q q and y = W_k k, and softmax weights α,

        log(α_s / ᾱ) = Σᵢ (wᵢ tanh(xᵢ + y_si) − its mean over the visible keys) + the bias's part,

    where ᾱ is the geometric mean of the visible keys' weights. With `against` another key takes the
    place of the average: log(α_s / α_against). Each term is one unit's contribution.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> from regard.show import Contributions
        >>> score = regard.Additive(None, None, jnp.array([2.0, 1.0]))  # 2 units, projected inputs
        >>> query, key = jnp.zeros((1, 2)), jnp.array([[1.0, 0.0], [0.0, 1.0]])
        >>> why = Contributions.of(query, key, score, (0, 0), against=1)
        >>> why.units.round(3).tolist(), round(why.total, 3)
        ([1.523, -0.762], 0.762)
        >>> weights = regard.weights(query, key, score=score)[0]
        >>> round(float(jnp.log(weights[0] / weights[1])), 3)
        0.762

    Attributes:
        parts: (S, h), every unit's contribution to every key; NaN for masked keys. The column sums
            of the picture: `parts.sum(1) + bias` is log(α_s / ᾱ) of every visible key.
        bias: (S,), the contributions of `bias=`; zeros without one.
        weights: (S,), the weights of the query.
        place: which key is explained.
        against: which key it is compared with; None: the average.
        query_label, key_labels: names.
    """

    parts: np.ndarray
    bias: np.ndarray
    weights: np.ndarray
    place: int
    against: int | None
    query_label: str
    key_labels: tuple[str, ...]

    @classmethod
    def of(
        cls,
        query: Any,
        key: Any,
        score: regard.Score,
        at: tuple[int, int],
        against: int | None = None,
        *,
        query_labels: Sequence[str] | None = None,
        key_labels: Sequence[str] | None = None,
        example: int = 0,
        head: int = 0,
        valid_lens: Any = None,
        mask: Any = None,
        bias: Any = None,
    ) -> Contributions:
        """The contributions in a call of `regard.attend` with softmax weights.

        Args:
            query: (T, Hq), (B, T, Hq) or (B, T, N, Hq).
            key: likewise.
            score: `regard.Additive`, or a score of yours whose `tanh_vector` says that it is one.
            at: the query's place and the key's, (t, s).
            against: the place of another key, to compare with; None: the average visible key.
            query_labels, key_labels: T and S names.
            example, head: which of the batch and of the heads.
            valid_lens, mask, bias: as for `regard.attend`.

        Raises:
            TypeError: the score is not additive.
            ValueError: a place that is not there, or whose key is masked for that query.
        """
        settings: dict[str, Any] = dict(score=score, valid_lens=valid_lens, mask=mask)
        weights = np.asarray(regard.weights(query, key, bias=bias, **settings), np.float64)
        uniform = regard.weights(query, key, **settings, normalize=regard.Uniform())
        added = np.zeros(weights.shape) if bias is None else np.broadcast_to(bias, weights.shape)
        rows = [weights, np.asarray(uniform), np.asarray(added, np.float64)]
        if query.ndim > 2:
            rows = [array[example] for array in rows]
            query, key = query[example], key[example]
        if query.ndim == 3:  # (T, N, D) -> (N, T, D)
            rows = [array[head] for array in rows]
            query, key = query.swapaxes(0, 1), key.swapaxes(0, 1)
        T, S = rows[0].shape
        places = (at[1],) if against is None else (at[1], against)
        if not (0 <= at[0] < T and all(0 <= place < S for place in places)):
            raise ValueError(
                f"at=(t, s) and against must be places of {T} queries and {S} keys. Got at={at}, "
                f"against={against}."
            )
        chosen, uniform, added = (array[at[0]] for array in rows)
        visible = (uniform > 0) & np.isfinite(added)
        for place in places:
            if not visible[place]:
                raise ValueError(
                    f"a masked key has no contributions: its weight is 0 whatever its score. Got "
                    f"key {place} of query {at[0]}, which sees keys {np.flatnonzero(visible)}."
                )
        terms = _terms(score, query[..., at[0] : at[0] + 1, :], key, head)
        base = visible if against is None else np.arange(S) == against

        def contributed(array: np.ndarray) -> np.ndarray:
            hidden = visible.reshape((S,) + (1,) * (array.ndim - 1))
            return np.where(hidden, array - array[base].mean(0), np.nan)

        made = cls()
        made.parts, made.bias = contributed(terms), contributed(added)
        made.weights, (made.place, made.against) = chosen, (at[1], against)
        made.query_label = str(at[0] if query_labels is None else query_labels[at[0]])
        names = tuple(map(str, range(S) if key_labels is None else key_labels))
        if len(names) != S:
            raise ValueError(f"key_labels must name every key. Got {len(names)} for {S} keys.")
        made.key_labels = names
        return made

    @property
    def units(self) -> np.ndarray:
        """(h,), what each hidden unit adds to the weight of the explained key."""
        return self.parts[self.place]

    @property
    def total(self) -> float:
        """log(α_s / ᾱ), or log(α_s / α_against): the sum of all contributions."""
        return float(self.units.sum() + self.bias[self.place])

    def __str__(self) -> str:
        """One line: which weight it is, and how many times what it is compared with."""
        than = (
            "the keys' geometric mean"
            if self.against is None
            else f"that of “{self.key_labels[self.against]}”"
        )
        weight = self.weights[self.place]
        return (
            f"“{self.query_label}” looks at “{self.key_labels[self.place]}”: "
            f"weight {f'{weight:.2f}' if weight >= 0.005 else f'{weight:.1g}'}, "
            f"{_times(self.total)} × {than}"
        )

    def rows(self, most: int = 10) -> tuple[list[str], np.ndarray]:
        """What the picture draws: the largest contributions, and all others as one.

        Args:
            most: how many units have a row of their own; the others are added up.

        Returns:
            Names, and (rows, S) contributions, whose sums are those of all units and the bias.
        """
        order = np.argsort(-np.abs(self.units), kind="stable")
        kept = sorted(order[:most], key=lambda unit: -self.units[unit])
        names, rows = [f"unit {unit}" for unit in kept], [self.parts[:, unit] for unit in kept]
        rest = order[most:]
        if rest.size:
            names.append(f"{rest.size} other units" if rest.size > 1 else f"unit {rest[0]}")
            rows.append(self.parts[:, rest].sum(1))
        if np.nan_to_num(self.bias).any():
            names.append("bias")
            rows.append(self.bias)
        return names, np.array(rows).reshape(len(rows), len(self.weights))

    def plot(
        self,
        *,
        most: int = 10,
        title: str | None = None,
        figsize: tuple[float, float] | None = None,
        cmap: str = "RdBu",
        vmin: float | None = None,
        vmax: float | None = None,
        ax: Any = None,
    ) -> Figure:
        """A Matplotlib figure: the weights above, contributions to every key, and to the one.

        Each column of the middle panel adds up to log(α_s / ᾱ) of its key, and the bars on the
        right are the column of the explained key.

        Args:
            most: how many units have a row of their own; the others are added up in one.
            title: one line above all. None: that of `str`.
            figsize: width and height in inches.
            cmap: the name of a Matplotlib color map with its middle at 0.
            vmin, vmax: the ends of the color scale; None: as far as the contributions go.
            ax: three Matplotlib axes of your own: for the weights, the contributions and the bars.

        Raises:
            ImportError: Matplotlib is not installed; the message has the pip command.
            ValueError: ax are not three.
        """
        import_drawing("Contributions.plot")  # or the pip command for Matplotlib
        from regard.show.contributions_figure import draw_contributions

        return draw_contributions(self, most, title, figsize, cmap, vmin, vmax, ax)

    def save(self, path: str | Path, **options: Any) -> Path:
        """Writes .png, .svg or .pdf as `AttentionMap.save` does, with the options of `plot`.

        Raises:
            ValueError: another ending.
        """
        path = Path(path)
        if path.suffix.lower() not in (".png", ".svg", ".pdf"):
            raise ValueError(f"a picture is saved as .png, .svg or .pdf. Got {path.name!r}.")
        figure = self.plot(**options)
        return import_drawing("Contributions.save").write(figure, path, options.get("ax") is None)


def _terms(score: regard.Score, query: Any, key: Any, head: int) -> np.ndarray:
    """wᵢ tanh(xᵢ + yᵢ) of one query and every key, (S, h), in float64."""
    projected, x, y = score.projected(query, key)
    vector = projected.tanh_vector()
    if vector is None:
        raise TypeError(
            "Contributions explains additive scores, wᵀ tanh(x + y), which have hidden units. Got "
            f"{type(score).__name__}."
        )
    y = repeat_heads(y, x)
    if x.ndim == 3:
        x, y = x[head], y[head]
    vector = vector[head] if vector.ndim == 2 else vector
    wide = [np.asarray(array, np.float64) for array in (x, y, vector)]
    return wide[2] * np.tanh(wide[0] + wide[1])


def _times(log_ratio: float) -> str:
    """A ratio of weights for people: 0.04, 7.4, 120, 3e+05."""
    ratio = np.exp(log_ratio)
    return f"{ratio:.2g}" if ratio < 100 or ratio >= 1e4 else f"{ratio:.0f}"
