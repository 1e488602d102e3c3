"""The number of processes and the index of this one, as the launcher says.

regard starts no processes. Slurm, MPI, Kubernetes, torchrun or a person in several terminals does.
Processes that train together need to know how many there are, which one this is, and the address
of process 0. This file finds these out, from one table of launchers; hosts.py connects.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

# torchrun's variables: address of process 0, number of processes, index of this one.
TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")

# The innermost first: (name, variable of the rank, variables of the size in order of preference,
# variables without which the processes cannot connect). A Slurm batch script runs in a step of one
# task, whatever SLURM_NTASKS of the job is.
LAUNCHERS = (
    ("torchrun", "RANK", ("WORLD_SIZE",), TORCHRUN[:2]),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), ("OMPI_MCA_orte_hnp_uri",)),
    ("MPICH", "PMI_RANK", ("PMI_SIZE",), None),  # JAX cannot connect them
    ("Slurm", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_STEP_NODELIST",)),
)


@dataclass(frozen=True)
class Process:
    """Process `number` of `count`, counted from 0."""

    number: int = 0
    count: int = 1


def _launchers(environment: Mapping[str, str]) -> Iterator[tuple[str, bool, Process]]:
    """The launchers of this process: name, whether its processes can connect, which one this is."""
    for name, rank, sizes, needed in LAUNCHERS:
        size = next((size for size in sizes if environment.get(size)), None)
        if size is None or not environment.get(rank):
            continue
        try:
            number, count = int(environment[rank]), int(environment[size])
        except ValueError:
            raise ValueError(
                f"{rank} and {size} must be whole numbers. Got {rank}={environment[rank]}, "
                f"{size}={environment[size]}. Fix: --processes and --process-id."
            ) from None
        connects = needed is not None and all(environment.get(one) for one in needed)
        yield name, connects, _numbered(number, count, f"{size} and {rank}")


def _numbered(number: int, count: int, said: str) -> Process:
    if not 0 <= number < count:
        raise ValueError(
            "processes are numbered from 0 to their count less 1. Got process "
            f"{number} of {count} ({said}). Fix: another number in each process, 0 in one of them."
        )
    return Process(number, count)


@dataclass(frozen=True)
class Launch:
    """What a process needs in order to find the others.

    Attributes:
        found_in: where this was found, for messages.
        coordinator: HOST:PORT of process 0; None: JAX finds it, and the two below, itself.
        processes: how many there are.
        process: which one this is, from 0.
        local_device: the only one of the machine's devices that is this process's; None: all.
    """

    found_in: str
    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    local_device: int | None = None


def find_launch(
    environment: Mapping[str, str],
    *,
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    distributed: bool = False,
) -> Launch | None:
    """What this process needs to join the others, or None where it is the only one.

    The arguments come first, then torchrun's environment variables, then the
    launchers that JAX supports. Slurm's and Open MPI's variables are sufficient evidence; a
    Kubernetes pod may well be alone, so that there `distributed` is needed.

    Example:
        >>> from regard.seq2seq.distributed.launch import find_launch
        >>> words = dict(MASTER_ADDR="10.0.0.1", MASTER_PORT="1234", WORLD_SIZE="4", RANK="2")
        >>> find_launch(words).coordinator, find_launch(words).process
        ('10.0.0.1:1234', 2)
        >>> find_launch({}) is None
        True

    Args:
        environment: os.environ.
        coordinator: HOST:PORT of process 0.
        processes: how many there are.
        process: which one this is, from 0.
        distributed: there are several, and JAX has to find them.

    Raises:
        ValueError: an argument or a variable is missing, or its value is impossible.
    """
    asked = {"--coordinator": coordinator, "--processes": processes, "--process-id": process}
    missing = [name for name, value in asked.items() if value is None]
    if len(missing) < len(asked):
        if missing:
            raise ValueError(
                f"{', '.join(asked)} go together. Got no {' and no '.join(missing)}. Fix: all "
                "three, in every process."
            )
        return _checked("the options", str(coordinator), int(processes or 0), int(process or 0))
    if not distributed or all(environment.get(name) for name in TORCHRUN):
        for launcher, connects, found in _launchers(environment):
            if launcher == "torchrun" and connects:
                return _from_torchrun(environment, found)
            if connects and found.count > 1:
                return Launch(f"{launcher}'s environment, by JAX's own cluster detection")
    return Launch("JAX's own cluster detection") if distributed else None


def _from_torchrun(environment: Mapping[str, str], found: Process) -> Launch | None:
    try:
        port = int(environment["MASTER_PORT"])
        local, beside = (int(environment.get(n, "0")) for n in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    except ValueError:
        listed = ", ".join(f"{name}={environment[name]}" for name in TORCHRUN)
        raise ValueError(f"ports and ranks must be whole numbers. Got {listed}.") from None
    if found.count == 1:
        return None
    # torchrun itself listens on its port for as long as its processes run.
    port += environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    said, coordinator = "torchrun's environment variables", f"{environment['MASTER_ADDR']}:{port}"
    launch = _checked(said, coordinator, found.count, found.number)
    return replace(launch, local_device=local) if beside > 1 else launch


def _checked(found_in: str, coordinator: str, processes: int, process: int) -> Launch:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(
            f"a coordinator is HOST:PORT, the same in every process. Got {coordinator!r}."
        )
    _numbered(process, processes, found_in)
    return Launch(found_in, coordinator, processes, process)
