"""The folder of a training run: what is in it, what writes it, and how it stays consistent.

config.json, recipe.json   what is trained, and how
log.csv                    losses, learning rate, speed, validations
checkpoints/<step>/        all that is needed to continue; the last `Recipe.keep`
best/<step>/               the parameters of the best validations
model/                     at the end: their average, as `export.save_model` writes it
.lock                      held by the process that trains here
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from regard.atomic_file import write_atomically
from regard.seq2seq.distributed.hosts import Hosts
from regard.seq2seq.model.architectures import load_config
from regard.seq2seq.model.config import ModelConfig
from regard.seq2seq.model.export import save_model
from regard.seq2seq.model.named_arrays import to_named
from regard.seq2seq.model.translation_model import Model
from regard.seq2seq.train.checkpoints import Checkpoint, CheckpointError, Store
from regard.seq2seq.train.log import Log
from regard.seq2seq.train.recipe import FREE, Recipe

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

_locked: set[Path] = set()  # by this process


@contextlib.contextmanager
def run_lock(folder: str | Path) -> Iterator[None]:
    """Keeps every other process from training in a folder.

    The operating system releases the lock when the process ends, however it ends. Inside the
    block, this process may take the same lock again.

    Raises:
        FileExistsError: another process holds the lock.
    """
    path = Path(folder).resolve() / ".lock"
    if path in _locked or fcntl is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 20).decode(errors="replace").strip() or "unknown"
            raise FileExistsError(
                f"another training is running in {folder} (process {holder}). Fix: wait until it "
                "ends, stop it, or use another folder."
            ) from None
        except OSError:  # a network file system without locks
            yield
            return
        os.truncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        _locked.add(path)
        try:
            yield
        finally:
            _locked.discard(path)
    finally:
        os.close(descriptor)


class RunFolder:
    """A run's folder, started or continued.

    Of several processes only the first reads and writes it, and the others learn the result. So
    the folder need not be on a disk that every machine sees. Every process calls the same methods
    in the same order; errors are raised in the first process, and as FirstFailed in the others.

    Args:
        folder: made if it does not exist.
        config: the model's; in a continued run, the same as before.
        recipe: the run's; likewise, except for the fields in `FREE`.
        resume: whether the folder may have a run already.
        hosts: the processes.

    Attributes:
        checkpoints: to continue from; in the first process only.
        best: parameters to average; in the first process only.

    Raises:
        FileExistsError: there is a run, and resume is False; or another process trains here.
        ValueError: it is another run.
    """

    checkpoints: Store
    best: Store

    def __init__(
        self,
        folder: str | Path,
        config: ModelConfig,
        recipe: Recipe,
        resume: bool,
        hosts: Hosts = Hosts(),
    ) -> None:
        self.folder, self.hosts = Path(folder), hosts
        self._held = contextlib.ExitStack()
        hosts.first(lambda: self._open(config, recipe, resume))

    def _open(self, config: ModelConfig, recipe: Recipe, resume: bool) -> None:
        self._held.enter_context(run_lock(self.folder))
        try:
            if (self.folder / "config.json").exists() and not resume:
                raise FileExistsError(
                    f"{self.folder} already has a run. Fix: resume=True continues it; use another "
                    "folder to start a new one."
                )
            self._agree("config.json", config, load_config, ())
            self._agree("recipe.json", recipe, Recipe.load, FREE)
            for name, mine in (("recipe.json", recipe), ("config.json", config)):
                write_atomically(self.folder / name, mine.to_json())
            self.checkpoints = Store(self.folder / "checkpoints")
            self.best = Store(self.folder / "best")
        except BaseException:
            self._held.close()
            raise

    def _agree(
        self,
        name: str,
        mine: ModelConfig | Recipe,
        load: Callable[[Path], Any],
        free: Iterable[str],
    ) -> None:
        """Raises ValueError where the file exists and has other values."""
        path = self.folder / name
        if not path.exists():
            return
        theirs: dict[str, Any] = dataclasses.asdict(load(path))
        wanted = dataclasses.asdict(mine)
        same = wanted.get("architecture") == theirs.get("architecture")
        compared = [key for key in wanted if key not in free] if same else ["architecture"]
        different = [key for key in compared if wanted[key] != theirs[key]]
        if different:
            listed = ", ".join(f"{key} {theirs[key]!r}, not {wanted[key]!r}" for key in different)
            raise ValueError(
                f"the run in {self.folder} was started with {listed}. "
                "Fix: the same values, or another folder."
            )

    def close(self) -> None:
        """Waits for the checkpoints' threads, and releases the lock."""
        if self.hosts.leads:
            self.checkpoints.close()
            self.best.close()
        self._held.close()

    def latest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint that can be read; None if there is none at all."""
        read: list[Checkpoint | None] = []

        def load() -> tuple[int, dict[str, Any]] | None:
            read.append(self.checkpoints.load_latest(warn))
            return None if read[0] is None else (read[0].step, read[0].meta)

        found = self.hosts.first(load)
        if found is None:
            return None
        arrays = self.hosts.first_arrays(lambda: read[0].arrays if read[0] else {})
        return Checkpoint(found[0], arrays, found[1])

    def log(self, continue_at: int | None) -> Log | None:
        """The log, in the first process; None in the others."""
        return Log(self.folder / "log.csv", continue_at) if self.hosts.leads else None

    def save(
        self, step: int, tree: Any, meta: dict[str, Any], keep: int, saved: Callable[[Path], None]
    ) -> None:
        """Writes a checkpoint, reports its path, and removes old ones.

        Args:
            step: its number.
            tree: arrays that every process has completely.
            meta: what JSON can hold.
            keep: how many checkpoints to keep.
            saved: called with the new checkpoint's path.
        """

        def write() -> None:
            self.checkpoints.save(step, to_named(tree), meta)
            saved(self.checkpoints.path(step))
            self.prune(keep)

        self.hosts.first(write)

    def prune(self, keep: int) -> None:
        """Removes old checkpoints, and best parameters that no kept checkpoint refers to.

        In this order, and after the new checkpoint is complete: whenever the process is killed,
        every checkpoint has the parameters that it names.

        Args:
            keep: how many checkpoints to keep.
        """
        steps = self.checkpoints.steps()
        for step in steps[:-keep]:
            self.checkpoints.remove(step)
        wanted: set[int] = set()
        for step in steps[-keep:]:
            # A damaged old one is skipped: no run will continue from it.
            with contextlib.suppress(CheckpointError):
                place = self.checkpoints.meta(step)["place"]
                wanted |= {int(best) for _, best in place["best"]}
        for step in set(self.best.steps()) - wanted:
            self.best.remove(step)

    def save_best(self, step: int, params: Any, score: float) -> None:
        """Keeps parameters for the average."""
        self.hosts.first(lambda: self.best.save(step, to_named(params), {"score": score}))

    def average(self, steps: list[int]) -> dict[str, np.ndarray]:
        """The mean of the best parameters of some steps, by name."""

        def mean() -> dict[str, np.ndarray]:
            found = [self.best.load(step).arrays for step in steps]
            return {
                name: np.stack([arrays[name] for arrays in found]).mean(0, dtype=np.float64)
                for name in found[0]
            }

        return self.hosts.first_arrays(mean)

    def save_model(self, model: Model) -> None:
        """Writes the run's result."""

        def write() -> None:
            save_model(self.folder / "model", model)

        self.hosts.first(write)
