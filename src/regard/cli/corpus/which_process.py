"""Which process of how many this is: told by options, or by whatever launched it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

# (rank, size) as launchers tell it, the innermost first: torchrun, Open MPI, MPICH, Slurm.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)


@dataclass(frozen=True)
class Process:
    """Process `number` of `count`, counted from 0."""

    number: int = 0
    count: int = 1


def which_process(
    count: int | None = None,
    number: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Process:
    """Which process this is.

    Example:
        >>> which_process(4, 1)
        Process(number=1, count=4)
        >>> which_process(environment={"SLURM_PROCID": "3", "SLURM_NTASKS": "8"})
        Process(number=3, count=8)
        >>> which_process(environment={})
        Process(number=0, count=1)

    Args:
        count: how many there are; None: what the launcher says, and without one, 1.
        number: which one this is; with `count`, or not at all.
        environment: where a launcher leaves its word.

    Raises:
        ValueError: one of the two without the other, or a number that is not below the count.
    """
    said = "--processes and --process-id"
    if count is None and number is None:
        for names in LAUNCHERS:
            if all(environment.get(name) for name in names):
                said = " and ".join(reversed(names))
                number, count = (_integer(name, environment[name]) for name in names)
                break
        else:
            return Process()
    if count is None or number is None:
        raise ValueError(
            "--processes says how many there are, --process-id which of them this is, from 0: both "
            f"or neither. Got --processes {count}, --process-id {number}."
        )
    if not 0 <= number < count:
        raise ValueError(
            f"a process has a number from 0 to one below their count. Got {count} and {number} "
            f"({said})."
        )
    return Process(number, count)


def _integer(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(
            f"the launcher's {name} is not a number: {value!r}. "
            "Fix: say --processes and --process-id."
        ) from None
