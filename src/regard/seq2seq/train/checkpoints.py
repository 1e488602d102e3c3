"""Checkpoints by Orbax: each complete or absent, and verified when it is read.

`Store` is a folder of numbered checkpoints, each a dictionary of arrays with a small JSON beside
it. training.py decides what goes into them. Only one process of a run has a store, and Orbax is
configured for a single process, so that it waits for no other.
"""

import json
import shutil
import time
import zlib
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

_MARGIN = 1 << 20  # bytes that the files need besides the arrays
# Suffixes of folders that are not checkpoints, and that a killed process may leave behind.
_NEW, _OLD, _REMOVED = ".new", ".old", ".removed"
_INCOMPLETE = (_NEW, _OLD, _REMOVED, ".orbax-checkpoint-tmp*")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message says which, why, and what remains."""


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
        folder: made if it does not exist; what a killed process left incomplete is removed.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._checkpointer = _checkpointer()
        self._remove_incomplete()

    def steps(self) -> list[int]:
        """The steps of all checkpoints, in order."""
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())

    def path(self, step: int) -> Path:
        return self.folder / str(step)

    def save(self, step: int, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
        """Writes a checkpoint; one of the same step is replaced once the new one is complete.

        Raises:
            CheckpointError: it cannot be written (a full disk, for example). Nothing incomplete
                remains, and all other checkpoints are unchanged.
        """
        size = sum(array.nbytes for array in arrays.values()) + _MARGIN
        free = shutil.disk_usage(self.folder).free
        others = self.steps()
        try:
            if free < size:
                raise OSError("no space left on the device")
            # Under another name: Orbax removes an existing folder before it begins to write.
            self._checkpointer.save(
                self._beside(step, _NEW),
                args=ocp.args.Composite(
                    arrays=ocp.args.PyTreeSave(arrays),
                    meta=ocp.args.JsonSave(_sealed({**meta, "checksums": checksums(arrays)})),
                ),
                force=True,
            )
            self._put(step)
        except Exception as error:  # tensorstore and Orbax have many kinds
            self._remove_incomplete()
            left = f"the one of step {others[-1]} is intact" if others else "there is no other"
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self.folder}: "
                f"{_reason(error)}. It needs {_megabytes(size)}, and {_megabytes(free)} were free. "
                f"Nothing incomplete remains; {left}. Fix: make room, then continue with "
                "--resume (in Python, resume=True)."
            ) from error

    def load(self, step: int) -> Checkpoint:
        """Reads a checkpoint, and verifies all checksums.

        Raises:
            CheckpointError: it does not exist or is damaged.
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
        """The JSON of a checkpoint alone; `checksums` are those of the arrays."""
        meta = self._read(step, meta=ocp.args.JsonRestore())
        seal = meta.pop("checksum", None)
        if seal != _sealed(meta)["checksum"]:
            raise CheckpointError(
                f"the checkpoint of step {step} in {self.folder} is damaged: its metadata changed "
                "since it was written"
            )
        return meta

    def load_latest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint that can be read; None if there is none at all.

        Args:
            warn: called with a message for each damaged one, which is renamed "<step>.damaged".

        Raises:
            CheckpointError: there are checkpoints, and all are damaged.
        """
        steps = self.steps()
        for index in reversed(range(len(steps))):
            try:
                return self.load(steps[index])
            except CheckpointError as error:
                if index == 0:
                    raise CheckpointError(
                        f"{error}, and there is no older one to go back to. Fix: start again in "
                        "another folder."
                    ) from error
                self._set_aside(steps[index])
                warn(f"{error}: going back to the one of step {steps[index - 1]}")
        return None

    def remove(self, step: int) -> None:
        """Removes a checkpoint. It is renamed first, so that a kill cannot leave a part of it."""
        if self.path(step).exists():
            self.path(step).rename(self._beside(step, _REMOVED))
        shutil.rmtree(self._beside(step, _REMOVED), ignore_errors=True)

    def close(self) -> None:
        """Waits for Orbax's threads, and ends them."""
        self._checkpointer.close()

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
        """Moves the new checkpoint to its final name."""
        old = self._beside(step, _OLD)
        if self.path(step).exists():
            self.path(step).rename(old)
        self._beside(step, _NEW).rename(self.path(step))
        shutil.rmtree(old, ignore_errors=True)

    def _set_aside(self, step: int) -> None:
        aside = self._beside(step, ".damaged")
        shutil.rmtree(aside, ignore_errors=True)
        self.path(step).rename(aside)

    def _remove_incomplete(self) -> None:
        """Repeats until none are left: after a failed save, Orbax's threads continue briefly."""
        for old in self.folder.glob(f"*{_OLD}"):  # the process was killed inside _put
            if not old.with_suffix("").exists():
                old.rename(old.with_suffix(""))
        for _ in range(50):
            found = [path for end in _INCOMPLETE for path in self.folder.glob(f"*{end}")]
            if not found:
                return
            for path in found:
                shutil.rmtree(path, ignore_errors=True)
            time.sleep(0.05)


def _checkpointer() -> Any:
    """Orbax's checkpointer for this process alone; by default all processes take part."""
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


def _sealed(meta: dict[str, Any]) -> dict[str, Any]:
    """The same with a checksum over itself."""
    text = json.dumps(meta, sort_keys=True)  # JSON of what was read from JSON is the same text
    return {**meta, "checksum": zlib.crc32(text.encode())}


def _reason(error: Exception) -> str:
    text = str(error) or type(error).__name__
    for cause in ("no space left", "file too large"):
        if cause in text.lower():
            return cause + " on the device" if cause == "no space left" else cause
    return text.splitlines()[0][:300]


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
