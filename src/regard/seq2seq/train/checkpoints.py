"""Checkpoints by Orbax: each whole or not there at all, checked when it is read.

`Store` is a folder of numbered checkpoints, each a dictionary of arrays with a small JSON beside
it. What goes into them is training.py's business. Of a run's processes one has a store, and Orbax
is told that it is alone with it: it waits for no other.
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

try:
    import orbax.checkpoint as ocp  # type: ignore[import-untyped]
except ModuleNotFoundError as _error:
    raise ImportError(
        "Training needs orbax-checkpoint, which is not installed.\n"
        'Install it with: pip install "regard[translate]"'
    ) from _error

from regard.seq2seq.model.named_arrays import checksums

_MARGIN = 1 << 20  # bytes: what the files need besides the arrays
# Ends of names. None of these folders counts as a checkpoint, and a killed process may leave them.
_NEW, _OLD, _REMOVED = ".new", ".old", ".removed"
_HALVES = (_NEW, _OLD, _REMOVED, ".orbax-checkpoint-tmp*")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message says which, why, and what is left."""


@dataclass(frozen=True)
class Checkpoint:
    """What was saved at a step.

    Attributes:
        step: its number.
        arrays: by name.
        meta: what JSON can hold.
    """

    step: int
    arrays: dict[str, np.ndarray]
    meta: dict[str, Any]


class Store:
    """Numbered checkpoints in a folder.

    Example:
        >>> import tempfile, numpy as np
        >>> from regard.seq2seq.train.checkpoints import Store
        >>> store = Store(tempfile.mkdtemp())
        >>> store.save(10, {"w": np.ones(3)}, {"epoch": 1})
        >>> store.steps(), store.load(10).meta["epoch"]
        ([10], 1)

    Args:
        folder: made where it is not there; what a killed process left half-written is removed.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._checkpointer = _checkpointer()
        self._remove_halves()

    def steps(self) -> list[int]:
        """The steps that there are checkpoints of, in order."""
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())

    def path(self, step: int) -> Path:
        return self.folder / str(step)

    def save(self, step: int, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
        """Writes a checkpoint; one of the same step is there until the new one is whole.

        Raises:
            CheckpointError: it cannot be written, the disk being full, say; nothing half-written
                is left, and all other checkpoints are as they were.
        """
        size = sum(array.nbytes for array in arrays.values()) + _MARGIN
        free = shutil.disk_usage(self.folder).free
        others = self.steps()
        try:
            if free < size:
                raise OSError("no space left on the device")
            # Not to its place: Orbax would remove what is there before it begins.
            self._checkpointer.save(
                self._beside(step, _NEW),
                args=ocp.args.Composite(
                    arrays=ocp.args.PyTreeSave(arrays),
                    meta=ocp.args.JsonSave({**meta, "checksums": checksums(arrays)}),
                ),
                force=True,
            )
            self._put(step)
        except Exception as error:  # tensorstore and Orbax have many kinds
            self._remove_halves()
            left = f"the one of step {others[-1]} is intact" if others else "there is no other one"
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self.folder}: "
                f"{_reason(error)}. It needs {_megabytes(size)}, and {_megabytes(free)} were free. "
                f"Nothing half-written is left; {left}. Fix: make room, then go on with "
                "resume=True."
            ) from error

    def load(self, step: int) -> Checkpoint:
        """Reads a checkpoint, and checks every array's sum.

        Raises:
            CheckpointError: it is not there or damaged.
        """
        meta = self.meta(step)
        expected = meta.pop("checksums")
        as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in expected}
        arrays = self._read(step, arrays=ocp.args.PyTreeRestore(restore_args=as_numpy))
        actual = checksums(arrays)
        names = sorted(expected.keys() | actual.keys())
        wrong = [name for name in names if expected.get(name) != actual.get(name)]
        if wrong:
            raise CheckpointError(
                f"the checkpoint of step {step} in {self.folder} is damaged: {', '.join(wrong[:3])}"
                f"{' …' if wrong[3:] else ''} changed since it was written"
            )
        return Checkpoint(step, arrays, meta)

    def meta(self, step: int) -> dict[str, Any]:
        """The JSON of a checkpoint alone."""
        return self._read(step, meta=ocp.args.JsonRestore())

    def load_latest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint that can be read; None where there is none at all.

        Args:
            warn: is told of each damaged one, which is set aside as "<step>.damaged".

        Raises:
            CheckpointError: there are some, and all are damaged.
        """
        steps = self.steps()
        for index in reversed(range(len(steps))):
            try:
                return self.load(steps[index])
            except CheckpointError as error:
                if index == 0:
                    raise CheckpointError(
                        f"{error}, and there is no older one to go back to. Fix: start anew in "
                        "another folder."
                    ) from error
                self._set_aside(steps[index])
                warn(f"{error}: going back to the one of step {steps[index - 1]}")
        return None

    def remove(self, step: int) -> None:
        """Renames it first: whenever the process is killed, it is whole or not there."""
        if self.path(step).exists():
            self.path(step).rename(self._beside(step, _REMOVED))
        shutil.rmtree(self._beside(step, _REMOVED), ignore_errors=True)

    def _read(self, step: int, **part: Any) -> dict[str, Any]:
        (name,) = part
        try:
            found = self._checkpointer.restore(self.path(step), ocp.args.Composite(**part))
            return dict(found[name])
        except Exception as error:  # tensorstore and Orbax have many kinds
            raise CheckpointError(
                f"the checkpoint of step {step} in {self.folder} cannot be read: {_reason(error)}"
            ) from error

    def _beside(self, step: int, suffix: str) -> Path:
        return self.folder / f"{step}{suffix}"

    def _put(self, step: int) -> None:
        """The new checkpoint to its place."""
        old = self._beside(step, _OLD)
        if self.path(step).exists():
            self.path(step).rename(old)
        self._beside(step, _NEW).rename(self.path(step))
        shutil.rmtree(old, ignore_errors=True)

    def _set_aside(self, step: int) -> None:
        aside = self._beside(step, ".damaged")
        shutil.rmtree(aside, ignore_errors=True)
        self.path(step).rename(aside)

    def _remove_halves(self) -> None:
        """Until none are left: when a save fails, Orbax's other threads go on for a moment."""
        for old in self.folder.glob(f"*{_OLD}"):  # killed between the two renamings
            if not old.with_suffix("").exists():
                old.rename(old.with_suffix(""))
        for _ in range(50):
            halves = [path for end in _HALVES for path in self.folder.glob(f"*{end}")]
            if not halves:
                return
            for path in halves:
                shutil.rmtree(path, ignore_errors=True)
            time.sleep(0.05)


def _checkpointer() -> Any:
    """Orbax's, for this process alone; it would have every process of the run take part."""
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process {me}"
    )
    return ocp.Checkpointer(
        ocp.CompositeCheckpointHandler(
            arrays=ocp.PyTreeCheckpointHandler(multiprocessing_options=alone),
            meta=ocp.JsonCheckpointHandler(multiprocessing_options=alone),
            composite_options=ocp.CompositeOptions(multiprocessing_options=alone),
        ),
        multiprocessing_options=alone,
    )


def _reason(error: Exception) -> str:
    text = str(error) or type(error).__name__
    for cause in ("no space left", "file too large"):
        if cause in text.lower():
            return cause + " on the device" if cause == "no space left" else cause
    return text.splitlines()[0][:300]


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
