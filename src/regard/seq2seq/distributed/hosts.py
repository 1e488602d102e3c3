"""The processes of one run, on one or many machines: connecting, and agreeing on results.

All run the same program on the same data, and JAX adds up what their devices compute. Only
process 0 uses the run's folder: `first` runs a function there and sends its result, or its error,
to every process, so that all continue or all stop.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from regard.seq2seq.distributed.launch import Launch

JOIN_SECONDS = 300  # to wait for the others at the start
HEARTBEAT_SECONDS = 20  # a process that is silent for this long has ended

# Messages are sent in pieces of these two sizes, so that only two programs are compiled.
_SMALL, _LARGE = 1 << 12, 1 << 22
_LENGTH = 8  # bytes of a message's length, before its first piece

# XLA's errors begin with their kind; these mean that a process does not answer.
_GONE = re.compile(r"[A-Z_]+: .*(gloo|nccl|coordination|connection|socket|heartbeat)", re.I | re.S)

_KNOWN = "Every process of the run stops with this error."

_Value = TypeVar("_Value")


class FirstFailed(ValueError):
    """Process 0 failed; the message is that of its error."""


class Hosts:
    """The processes of a run; by default a single one.

    Example:
        >>> from regard.seq2seq.distributed.hosts import Hosts
        >>> Hosts().first(lambda: "done by process 0")
        'done by process 0'

    Args:
        processes: their number.
        process: the index of this one.
    """

    def __init__(self, processes: int = 1, process: int = 0) -> None:
        self.processes, self.process = processes, process

    @classmethod
    def of(cls, devices: Sequence[jax.Device]) -> "Hosts":
        """The processes that these devices belong to.

        Raises:
            ValueError: they are neither those of all processes nor those of this one.
        """
        owners = {device.process_index for device in devices}
        if owners == {jax.process_index()}:
            return cls()
        if owners != set(range(jax.process_count())):
            raise ValueError(
                "devices must be those of this process or of all processes. Got devices of "
                f"{sorted(owners)}, and there are {jax.process_count()} processes."
            )
        return cls(jax.process_count(), jax.process_index())

    @property
    def leads(self) -> bool:
        """Whether this is process 0, which writes files and reports."""
        return self.process == 0

    def first(self, work: Callable[[], _Value]) -> _Value:
        """Process 0 runs a function, and every process gets the result.

        Args:
            work: called in process 0 only; returns JSON values.

        Raises:
            FirstFailed: in the other processes, if it fails; in process 0, the error itself.
        """
        if self.processes == 1:
            return work()
        failed: Exception | None = None
        message: dict[str, Any] = {}
        if self.leads:
            try:
                message = {"value": work()}
            except Exception as error:
                failed, message = error, {"error": f"process 0: {error}"}
        answer = json.loads(self._from_first(json.dumps(message).encode()))
        if "error" not in answer:
            return answer["value"]
        known = failed or FirstFailed(answer["error"])
        known.add_note(_KNOWN)
        raise known

    def first_arrays(self, work: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """The same for arrays by name, bit for bit."""
        if self.processes == 1:
            return work()
        arrays: dict[str, np.ndarray] = {}

        def described() -> list[tuple[str, list[int], str]]:
            arrays.update(work())
            return [(name, list(a.shape), a.dtype.name) for name, a in arrays.items()]

        for name, shape, dtype in self.first(described):
            data = self._from_first(arrays[name].tobytes() if self.leads else b"")
            if not self.leads:
                arrays[name] = np.frombuffer(data, jnp.dtype(dtype)).reshape(shape).copy()
        return arrays

    def _from_first(self, message: bytes) -> bytes:
        """Process 0's bytes, in every process."""
        begin = _SMALL - _LENGTH
        piece = self._piece(len(message).to_bytes(_LENGTH, "little") + message[:begin], _SMALL)
        length, pieces = int.from_bytes(piece[:_LENGTH], "little"), [piece[_LENGTH:]]
        for start in range(begin, length, _LARGE):
            pieces.append(self._piece(message[start : start + _LARGE], _LARGE))
        return b"".join(pieces)[:length]

    def _piece(self, piece: bytes, size: int) -> bytes:
        room = np.zeros(size, np.uint8)
        room[: len(piece)] = np.frombuffer(piece, np.uint8)
        return np.asarray(multihost_utils.broadcast_one_to_all(room)).tobytes()


def join(launch: Launch) -> Hosts:
    """Connects to the other processes; call it before any other use of JAX.

    Raises:
        ValueError: the connection failed; the message says how it was attempted. If a process is
            missing after JOIN_SECONDS, JAX aborts this one.
    """
    # CPUs communicate by Gloo; JAX may have been built with another default.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Otherwise JAX catches SIGTERM as a preemption notice, and the process does not end.
    jax.config.update("jax_enable_preemption_service", False)
    where: dict[str, Any] = {}
    if launch.coordinator is not None:
        where = dict(
            coordinator_address=launch.coordinator,
            num_processes=launch.processes,
            process_id=launch.process,
            local_device_ids=launch.local_device,
            cluster_detection_method="deactivate",
        )
    try:
        jax.distributed.initialize(
            **where,
            initialization_timeout=JOIN_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError, IndexError) as error:
        port = launch.coordinator is not None and "RPC server" in str(error)
        fix = (
            "another port: this one is taken"
            if port
            else "--coordinator, --processes, --process-id"
        )
        raise ValueError(
            f"the processes could not connect, by what {launch.found_in} said: "
            f"{str(error).splitlines()[0].rstrip('.')}. Fix: {fix}."
        ) from error
    return Hosts(jax.process_count(), jax.process_index())


def is_known_to_all(error: BaseException) -> bool:
    """Whether every process has this error, because `Hosts.first` raised it."""
    return _KNOWN in getattr(error, "__notes__", ())


def is_gone(error: BaseException) -> bool:
    """Whether an error of JAX means that another process does not answer.

    Example:
        >>> from regard.seq2seq.distributed.hosts import is_gone
        >>> is_gone(ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer"))
        True
        >>> is_gone(ValueError("a corpus has two sides"))
        False
    """
    return isinstance(error, RuntimeError | ValueError) and bool(_GONE.match(str(error)))
