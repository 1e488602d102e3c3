"""A run's folder as all its processes see it: the first one reads and writes, all know.

So the folder need not be on a disk that every machine sees, and no two processes write one file.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from regard.seq2seq.distributed.hosts import Hosts
from regard.seq2seq.model.config import Config
from regard.seq2seq.model.export import save_model
from regard.seq2seq.model.named_arrays import to_named
from regard.seq2seq.model.translation_model import Model
from regard.seq2seq.train.checkpoints import Checkpoint
from regard.seq2seq.train.log import Log
from regard.seq2seq.train.recipe import Recipe
from regard.seq2seq.train.run_folder import RunFolder


class SharedFolder:
    """A `RunFolder`, begun or continued by the first of some processes.

    Every process calls the same methods in the same order. Errors are those of `RunFolder` and
    `Store` in the first process, and FirstFailed in the others.

    Args:
        hosts: the processes.
        folder, config, recipe, resume: as for `RunFolder`.

    Attributes:
        mine: the folder, where this is the first process; nowhere else is there one.
    """

    mine: RunFolder

    def __init__(
        self, hosts: Hosts, folder: Path, config: Config, recipe: Recipe, resume: bool
    ) -> None:
        self.hosts, self.folder = hosts, folder

        def begin() -> None:
            self.mine = RunFolder(folder, config, recipe, resume)

        hosts.first(begin)

    def latest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint that can be read; None where there is none at all."""
        read: list[Checkpoint | None] = []

        def load() -> tuple[int, dict[str, Any]] | None:
            read.append(self.mine.checkpoints.load_latest(warn))
            return None if read[0] is None else (read[0].step, read[0].meta)

        found = self.hosts.first(load)
        if found is None:
            return None
        arrays = self.hosts.first_arrays(lambda: read[0].arrays if read[0] else {})
        return Checkpoint(found[0], arrays, found[1])

    def log(self, continue_at: int | None) -> Log | None:
        """The log, where this is the first process."""
        return Log(self.mine.log, continue_at) if self.hosts.leads else None

    def save(
        self, step: int, tree: Any, meta: dict[str, Any], keep: int, saved: Callable[[Path], None]
    ) -> None:
        """Writes a checkpoint, tells where it is, and removes old ones.

        Args:
            step: its number.
            tree: arrays that every process has the whole of.
            meta: what JSON can hold.
            keep: how many checkpoints to keep.
            saved: is told the new one's place.
        """

        def write() -> None:
            self.mine.checkpoints.save(step, to_named(tree), meta)
            saved(self.mine.checkpoints.path(step))
            self.mine.prune(keep)

        self.hosts.first(write)

    def save_best(self, step: int, params: Any, score: float) -> None:
        """Keeps parameters for the average."""
        self.hosts.first(lambda: self.mine.best.save(step, to_named(params), {"score": score}))

    def average(self, steps: list[int]) -> dict[str, np.ndarray]:
        """The mean of the best parameters of some steps, by name."""
        return self.hosts.first_arrays(lambda: self.mine.average(steps))

    def save_model(self, model: Model) -> None:
        """What the run was for."""

        def write() -> None:
            save_model(self.mine.model, model)

        self.hosts.first(write)
