"""What a survey found: each cell's ratio to its best correct peer, in words and as a picture."""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.bench.cases.survey import family_of
from regard.bench.results.record import case_words
from regard.bench.run.measure import AGAIN, NOT_REACHED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REACH = 0.95


class Cell(NamedTuple):
    """One cell of a survey.

    Attributes:
        ratio: the least time of the best peer over regard's least; above 1, regard is faster.
        noise: how far apart the least times of the same program came out.
        ran: regard's implementation; None in records older than this.
    """

    family: str
    case: dict[str, Any]
    best: str
    ratio: float
    noise: float
    ran: str | None = None

    @property
    def words(self) -> str:
        ran = f", by {self.ran}" if self.ran else ""
        return f"{case_words(self.case)}{ran}: {self.ratio:.2f} of {self.best}"


def cells(record: dict[str, Any]) -> list[Cell]:
    """The cells that regard and at least one peer computed, in the order of the survey.

    Those that one of the peers did not reach are left out: it may be the best.
    """
    found = []
    least: dict[str, dict[str, float]] = {}
    late = not_reached(record)
    ran = {row["case"]: row.get("ran") for row in record["rows"] if row["who"] == "regard"}
    for row in record["rows"]:
        if row["ms"] and not row["absent"]:
            least.setdefault(row["case"], {})[row["who"]] = min(row["ms"]["runs"])
    for case in record["cases"]:
        times = dict(least.get(case["name"], {}))
        ours, again = times.pop("regard", None), times.pop(AGAIN, None)
        if ours is None or not times or case["name"] in late:
            continue
        again = again or ours
        noise = abs(math.log(again / ours))
        best = min(times, key=lambda who: times[who])
        ratio = times[best] / min(ours, again)
        family, name = family_of(case["group"]), case["name"]
        found.append(Cell(family, case, best, ratio, noise, ran.get(name)))
    return found


def not_reached(record: dict[str, Any]) -> set[str]:
    """The names of the cells that regard or a peer did not reach in the time given."""
    return {row["case"] for row in record["rows"] if row["absent"] == NOT_REACHED}


def worst(found: list[Cell], most: int = 12) -> list[Cell]:
    """Those past their noise under `REACH`, the worst first."""
    below = [cell for cell in found if cell.ratio * math.exp(cell.noise) < REACH]
    return sorted(below, key=lambda cell: cell.ratio)[:most]


def means(found: list[Cell]) -> dict[str, float]:
    """The geometric mean of the ratios of each family."""
    families: dict[str, list[float]] = {}
    for cell in found:
        families.setdefault(cell.family, []).append(math.log(cell.ratio))
    return {name: math.exp(sum(logs) / len(logs)) for name, logs in families.items()}


def summary(record: dict[str, Any]) -> str:
    """The survey in plain lines: each family's mean, then the worst cells by name."""
    found = cells(record)
    late = len(not_reached(record))
    alone = len(record["cases"]) - len(found) - late
    below = sum(cell.ratio * math.exp(cell.noise) < REACH for cell in found)
    lines = [
        f"{len(found)} cells beside their best correct peer, {alone} that no peer computed, "
        f"{late} not reached by all; "
        f"{below} under {REACH:g} by more than their noise"
    ]
    lines += [f"  {name}: geometric mean {mean:.2f}" for name, mean in means(found).items()]
    return "\n".join([*lines, "worst cells:", *(f"  {cell.words}" for cell in worst(found))])


def grid(record: dict[str, Any]) -> "Figure | None":
    """A row for each family, a square for each cell, with its ratio; None without cells."""
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    found = cells(record)
    if not found:
        return None
    families = list(means(found))
    figure = Figure(figsize=(11, 1.5 + 0.62 * len(families)), layout="constrained")
    panel = figure.subplots()
    norm, columns = TwoSlopeNorm(0.0, -2.0, 2.0), 0
    for row, family in enumerate(families):
        of_family = [cell for cell in found if cell.family == family]
        columns = max(columns, len(of_family))
        for column, cell in enumerate(of_family):
            shade = max(-2.0, min(2.0, math.log2(cell.ratio)))
            panel.scatter(column, row, s=1150, marker="s", c=[shade], cmap="RdBu", norm=norm)
            score = {"additive": "add", "gaussian": "gauss", "bilinear": "bilin"}
            name = score.get(cell.case["score"], cell.case["score"])
            regime = cell.case.get("normalize", "softmax")
            name = name if regime == "softmax" else regime
            gradient = "∇" if cell.case["direction"] != "forward" else ""
            dark = abs(shade) > 1.2
            panel.annotate(
                f"{cell.ratio:.2f}\n{name}{gradient}\n{cell.case['dtype'].replace('float', 'f')}",
                (column, row),
                ha="center",
                va="center",
                fontsize=6.5,
                color="white" if dark else "black",
            )
    panel.set_yticks(range(len(families)), families, fontsize=9)
    panel.set_ylim(len(families) - 0.5, -0.5)
    panel.set_xlim(-0.6, columns - 0.4)
    panel.set_xticks([])
    for side in panel.spines.values():
        side.set_visible(False)
    panel.tick_params(axis="y", length=0)
    return figure
