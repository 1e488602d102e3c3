"""Who takes part in a run of several processes, as their launcher says it.

regard starts no processes. Slurm, MPI, Kubernetes, torchrun or a person in several terminals does,
and each process has to learn three things: where process 0 is, how many there are, and which one
it is. This file finds them out; hosts.py connects.
"""

from collections.abc import Mapping
from dataclasses import dataclass

# In torchrun's words: where process 0 is, how many there are, which one this is.
TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")


@dataclass(frozen=True)
class Launch:
    """What a process has to know to find the others.

    Attributes:
        found_in: who said so, for people to read.
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
    """Where this process stands, or None where it is the only one.

    What is asked for in words counts first, then torchrun's environment variables, then the
    launchers that JAX knows. Of these, Slurm's and Open MPI's variables are proof enough; a
    Kubernetes pod may well be alone, so that there JAX has to be asked for by `distributed`.

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
        ValueError: some of it is missing, or cannot be.
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
    if all(environment.get(name) for name in TORCHRUN):
        return _from_torchrun(environment)
    if distributed:
        return Launch("JAX's own cluster detection")
    for name, size, proof in (
        ("Slurm", "SLURM_NTASKS", "SLURM_STEP_NODELIST"),
        ("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_MCA_orte_hnp_uri"),
    ):
        # A batch script's own step has one task, whatever the job has.
        tasks = environment.get("SLURM_STEP_NUM_TASKS", "") if name == "Slurm" else ""
        if proof in environment and int(tasks or environment.get(size, "1")) > 1:
            return Launch(f"{name}'s environment, by JAX's own cluster detection")
    return None


def _from_torchrun(environment: Mapping[str, str]) -> Launch | None:
    address, *numbers = (environment[name] for name in TORCHRUN)
    listed = ", ".join(f"{name}={environment[name]}" for name in TORCHRUN)
    try:
        port, processes, process = map(int, numbers)
        local, beside = (int(environment.get(n, "0")) for n in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    except ValueError:
        raise ValueError(f"ports and ranks must be whole numbers. Got {listed}.") from None
    if processes == 1:
        return None
    # torchrun itself listens on its port for as long as its processes run.
    port += environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    found = _checked("torchrun's environment variables", f"{address}:{port}", processes, process)
    return Launch(
        found.found_in, found.coordinator, processes, process, local if beside > 1 else None
    )


def _checked(found_in: str, coordinator: str, processes: int, process: int) -> Launch:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(
            f"a coordinator is HOST:PORT, the same in every process. Got {coordinator!r}."
        )
    if not 0 <= process < processes:
        raise ValueError(
            "processes count from 0 to their number less 1. Got process "
            f"{process} of {processes}. Fix: another number in each process, 0 in one of them."
        )
    return Launch(found_in, coordinator, processes, process)
