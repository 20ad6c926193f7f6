"""The one file that reads or writes `os.environ`.

Whatever Lockstep learns from variables arrives elsewhere as plain values, so a
test builds any cluster in one line.
"""

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lockstep.errors import LaunchError
from lockstep.launch import slurm, tf_config
from lockstep.launch.slurm import FIRST_PORT, NUM_PORTS

Value = TypeVar("Value")

# What tells a process that it was launched. WorkerPool must not inherit it.
_LAUNCHER = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_ID", "SLURM_STEPID", "TF_CONFIG"),
}
_LAUNCHER_PREFIXES = (
    "TORCHELASTIC_",
    "OMPI_",
    "PMIX_",
    "PMI_",
    "MPI_LOCAL",
    "MV2_COMM_",
    "PALS_",
    "JSM_",
    "FLUX_TASK_",
    "HOROVOD_",
)


@dataclass(frozen=True)
class _Launcher:
    """The variables in which a launcher tells a process its place."""

    rank: str
    count: str
    local_rank: str
    local_count: str
    job: str = ""  # the same for all processes of a job, and another for each job

    @property
    def is_here(self) -> bool:
        return self.rank in os.environ and self.count in os.environ


# MPI and its relatives. Not SLURM, whose variables take some reading.
_OPEN_MPI = _Launcher(
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    job="PMIX_NAMESPACE",
)
_MVAPICH = _Launcher(
    *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE")
)
_JSRUN = _Launcher(
    *("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE")
)
_HYDRA = _Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")  # MPICH, Intel MPI
_CRAY = _Launcher("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE")
_FLUX = _Launcher("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_TASK_LOCAL_SIZE")
_HOROVOD = _Launcher("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")  # over Gloo
_MPI = (_OPEN_MPI, _MVAPICH, _JSRUN, _CRAY, _FLUX, _HYDRA, _HOROVOD)


@dataclass(frozen=True)
class Launched:
    """The place of this process in a world that another launcher started."""

    index: int
    count: int
    local_index: int  # among the processes of this host
    local_count: int
    address: str  # where the first process listens
    port: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise LaunchError(
                f"A process's index is at least 0 and below the number of processes. Got index {self.index} of "
                f"{self.count}. Check RANK and WORLD_SIZE (under SLURM: SLURM_PROCID and SLURM_NTASKS)."
            )
        if not 0 <= self.local_index < self.local_count <= self.count:
            raise LaunchError(
                "A process's index on its host is below the processes there, and those are no more than all. Got "
                f"index {self.local_index} of {self.local_count} on this host, {self.count} in all. "
                "Check LOCAL_RANK and LOCAL_WORLD_SIZE (under SLURM: SLURM_LOCALID and SLURM_TASKS_PER_NODE)."
            )
        if not 0 < self.port < 65536:
            raise LaunchError(f"A port lies between 1 and 65535. Got MASTER_PORT={self.port}. Choose a free one.")

    @property
    def is_on_one_host(self) -> bool:
        """Whether the launcher started all processes on this host."""
        return self.local_count == self.count


def cache_home() -> Path:
    """Gives the folder under which programs keep what they can fetch again."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return named if named.is_absolute() else Path.home() / ".cache"


def launched() -> Launched | None:
    """Gives this process's place in the world of torchrun, MPI, SLURM or TF_CONFIG, or None when nobody launched it."""
    if "RANK" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1":
        return _from_torchrun()
    # mpirun may itself be started by srun: then SLURM's variables count mpirun's own helpers, one on each node.
    return _from_tf_config() or _from_mpi() or _from_slurm() or _from_pmi_alone()


def signs() -> str:
    """Names the variables that make this process look launched."""
    mpi = [name for launcher in _MPI if launcher.is_here for name in (launcher.rank, launcher.count)]
    names = dict.fromkeys(("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_ID", *mpi, "PMIX_RANK", "TF_CONFIG"))
    return ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)


def local_index(otherwise: int) -> int:
    """Gives this process's index on its host as a launcher has set it."""
    return _read(_whole_number, "LOCAL_RANK") if "LOCAL_RANK" in os.environ else otherwise


def has_launcher_store() -> bool:
    """Whether the launcher itself runs the store at which the processes meet, as torchrun does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def provide(name: str, value: str) -> str:
    """Sets a variable where it is unset and gives the value in force."""
    return os.environ.setdefault(name, value)


def worker_environment() -> dict[str, str]:
    """Gives the environment for workers: this process's, less what would make them think that they were launched."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER and not name.startswith(_LAUNCHER_PREFIXES)
    }


def _from_torchrun() -> Launched:
    return Launched(
        index=_read(_whole_number, "RANK"),
        count=_read(_whole_number, "WORLD_SIZE"),
        local_index=_read(_whole_number, "LOCAL_RANK"),
        local_count=_read(_whole_number, "LOCAL_WORLD_SIZE"),
        address=_read(str, "MASTER_ADDR"),
        port=_read(_whole_number, "MASTER_PORT"),
    )


def _from_tf_config() -> Launched | None:
    if "TF_CONFIG" not in os.environ:
        return None
    place = _read(tf_config.place, "TF_CONFIG")
    return Launched(*place) if place[1] > 1 else None


def _from_mpi() -> Launched | None:
    """The place that mpirun and its relatives tell; they do not tell where the processes meet."""
    launcher = next((each for each in _MPI if each.is_here), None)
    if launcher is None or (launcher is _HYDRA and launcher.local_rank not in os.environ):
        return None
    index, count = _read(_whole_number, launcher.rank), _read(_whole_number, launcher.count)
    if count == 1:
        return None
    local_index, local_count = 0, 0
    if launcher.local_count in os.environ:
        local_index = _read(_whole_number, launcher.local_rank)
        local_count = _read(_whole_number, launcher.local_count)
    if "MASTER_ADDR" in os.environ and local_count:
        return Launched(
            index, count, local_index, local_count, _read(str, "MASTER_ADDR"), _read(_whole_number, "MASTER_PORT")
        )
    if local_count == count and os.environ.get(launcher.job):
        port = FIRST_PORT + zlib.crc32(_read(str, launcher.job).encode()) % NUM_PORTS
        return Launched(index, count, local_index, local_count, "127.0.0.1", port)
    raise LaunchError(
        f"Processes that were launched together need an address at which they meet. Got process {index} of {count} "
        f"({signs()}) without one. Set MASTER_ADDR and MASTER_PORT for all of them: `mpirun -x MASTER_ADDR=node1 "
        "-x MASTER_PORT=29500` (Open MPI), `mpiexec -genv MASTER_ADDR node1 -genv MASTER_PORT 29500` (MPICH); "
        f"or start the script with torchrun. To train in each process alone, unset {launcher.rank} and "
        f"{launcher.count}."
    )


def _from_pmi_alone() -> Launched | None:
    """Refuses a process that was launched among an unknown number of others, or on a host of unknown company."""
    lonely = "SLURM_PROCID" in os.environ or any(each.is_here for each in _MPI if each is not _HYDRA)
    several = os.environ.get("PMI_SIZE", "1") != "1"
    if several or ("PMIX_RANK" in os.environ and not lonely):
        names = [name for name in ("PMI_RANK", "PMI_SIZE", "PMIX_RANK") if name in os.environ]
        said = ", ".join(f"{name}={os.environ[name]}" for name in names)
        raise LaunchError(
            f"This process was launched through PMI ({said}), which does not tell how many processes there are on this "
            f"host. Start the script with torchrun, or unset {' and '.join(names)} to train on this host alone."
        )
    return None


def _from_slurm() -> Launched | None:
    # A batch script and the shell of an allocation have SLURM_PROCID too. Only what srun starts has a step of its
    # own, and `srun --pty` is a shell again.
    if "SLURM_PROCID" not in os.environ or "SLURM_STEP_ID" not in os.environ or "SLURM_PTY_PORT" in os.environ:
        return None
    step = _read(_whole_number, "SLURM_STEP_ID")
    count = _read(_whole_number, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if step >= slurm.FIRST_RESERVED_STEP or count == 1:
        return None
    return Launched(
        index=_read(_whole_number, "SLURM_PROCID"),
        count=count,
        local_index=_read(_whole_number, "SLURM_LOCALID"),
        local_count=_slurm_local_count(),
        address=_read(
            slurm.first_host, "MASTER_ADDR", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_LAUNCH_NODE_IPADDR"
        ),
        port=_read(_whole_number, "MASTER_PORT")
        if "MASTER_PORT" in os.environ
        else slurm.port(_read(_whole_number, "SLURM_JOB_ID"), step),
    )


def _slurm_local_count() -> int:
    counts = _read(slurm.tasks_per_node, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
    if len(set(counts)) == 1:
        return counts[0]
    node = _read(_whole_number, "SLURM_NODEID")
    if not 0 <= node < len(counts):
        raise LaunchError(
            f"SLURM_NODEID counts the nodes from 0. Got SLURM_NODEID={node}, but tasks for {len(counts)} nodes "
            f"({', '.join(map(str, counts))}). Start the script with srun itself."
        )
    return counts[node]


def _read(parse: Callable[[str], Value], *names: str) -> Value:
    """Gives the value of the first of these variables that is set."""
    for name in names:
        value = os.environ.get(name)
        if value:
            try:
                return parse(value)
            except ValueError as form:
                raise LaunchError(
                    f"{name} must be {form}. Got {name}={value!r}. "
                    "Let torchrun or srun set it, or unset it to train on this host alone."
                ) from None
    raise LaunchError(
        f"A launched process needs all of its launcher's variables. {' or '.join(names)} is not set, but "
        f"{signs()}. Start the script with torchrun or srun, or unset these to train on this host alone."
    )


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("a whole number") from None
