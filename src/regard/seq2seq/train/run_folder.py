"""The folder of a training run: what is in it, and that it stays whole.

config.json, recipe.json   what is trained, and how
log.csv                    losses, learning rate, speed, validations
checkpoints/<step>/        all that is needed to go on; the last `Recipe.keep`
best/<step>/               the parameters of the best validations
model/                     in the end: their average, as `export.save_model` writes it
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from regard.seq2seq.model.config import Config
from regard.seq2seq.model.export import replace_file
from regard.seq2seq.train.checkpoints import CheckpointError, Store
from regard.seq2seq.train.recipe import FREE, Recipe


class RunFolder:
    """A folder with a run, begun or continued.

    Args:
        folder: made where it is not there.
        config: the model's; in a run that is continued, the same as it was.
        recipe: the run's; likewise, but for what is `FREE`.
        resume: whether there may be a run already.

    Attributes:
        checkpoints: to go on from.
        best: parameters to average.

    Raises:
        FileExistsError: there is a run, and resume is False.
        ValueError: it is another one.
    """

    def __init__(self, folder: str | Path, config: Config, recipe: Recipe, resume: bool) -> None:
        self.folder = Path(folder)
        if (self.folder / "config.json").exists() and not resume:
            raise FileExistsError(
                f"there is a run in {self.folder} already. Fix: resume=True goes on with it; "
                "another folder starts another."
            )
        self._agree("config.json", config, ())
        self._agree("recipe.json", recipe, FREE)
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, mine in (("recipe.json", recipe), ("config.json", config)):
            replace_file(self.folder / name, mine.to_json().encode())
        self.checkpoints = Store(self.folder / "checkpoints")
        self.best = Store(self.folder / "best")

    @property
    def log(self) -> Path:
        return self.folder / "log.csv"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def prune(self, keep: int) -> None:
        """Removes old checkpoints, and best parameters that none of the kept ones counts on.

        In this order, and after the new checkpoint is there: whenever the process is killed,
        every checkpoint has the parameters that it names.

        Args:
            keep: how many checkpoints to keep.
        """
        steps = self.checkpoints.steps()
        for step in steps[:-keep]:
            self.checkpoints.remove(step)
        wanted: set[int] = set()
        for step in steps[-keep:]:
            try:
                place = self.checkpoints.meta(step)["place"]
            except CheckpointError:  # an old one, damaged: no run will go on from it
                continue
            wanted |= {int(best) for _, best in place["best"]}
        for step in set(self.best.steps()) - wanted:
            self.best.remove(step)

    def average(self, steps: list[int]) -> dict[str, np.ndarray]:
        """The mean of the best parameters of some steps, by name."""
        found = [self.best.load(step).arrays for step in steps]
        return {
            name: np.stack([arrays[name] for arrays in found]).mean(0, dtype=np.float64)
            for name in found[0]
        }

    def _agree(self, name: str, mine: Config | Recipe, free: Iterable[str]) -> None:
        """Where the file is there already, it has to say the same."""
        path = self.folder / name
        if not path.exists():
            return
        theirs: dict[str, Any] = dataclasses.asdict(type(mine).load(path))
        wanted = dataclasses.asdict(mine)
        different = [key for key in wanted if wanted[key] != theirs[key] and key not in free]
        if different:
            listed = ", ".join(f"{key} {theirs[key]!r}, not {wanted[key]!r}" for key in different)
            raise ValueError(
                f"the run in {self.folder} was started with {listed}. "
                "Fix: the same values, or another folder."
            )
