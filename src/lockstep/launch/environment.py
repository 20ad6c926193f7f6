"""The only file that reads or writes `os.environ`.

Whatever Lockstep takes from environment variables is passed on as plain values, so a test can build any cluster.
"""

import os
import sys
import zlib
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lockstep.errors import DeviceError, LaunchError
from lockstep.launch import slurm, tf_config

Value = TypeVar("Value")

# Variables that mark a process as launched. Workers must not inherit them.
_LAUNCHER = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_ID", "SLURM_STEPID", "TF_CONFIG"),
}
_LAUNCHER_PREFIXES = (
    *("TORCHELASTIC_", "OMPI_", "PMIX_", "PMI_", "MPI_LOCAL"),
    *("MV2_COMM_", "PALS_", "JSM_", "FLUX_TASK_", "HOROVOD_"),
)


@dataclass(frozen=True)
class _Launcher:
    """The names of the variables in which a launcher passes rank, world size and local rank to a process."""

    rank: str
    count: str
    local_rank: str
    local_count: str
    job: str = ""  # the same for all processes of a job, and another for each job

    @property
    def is_present(self) -> bool:
        return self.rank in os.environ and self.count in os.environ


# MPI and related launchers. SLURM is not among them, because its variables need parsing.
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
class ProcessPlace:
    """The place of this process among the processes that a launcher started."""

    index: int
    count: int
    local_index: int  # among the processes of this host
    local_count: int
    address: str  # on which the first process listens
    port: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise LaunchError(
                f"The launcher's variables do not fit together: rank {self.index} in a world of {self.count} "
                f"processes, whose ranks are 0 to {self.count - 1}. Correct RANK and WORLD_SIZE (SLURM: SLURM_PROCID "
                "and SLURM_NTASKS)."
            )
        if not 0 <= self.local_index < self.local_count <= self.count:
            raise LaunchError(
                f"The launcher's variables do not fit together: local rank {self.local_index} of {self.local_count} "
                f"processes on this host, in a world of {self.count} processes. Correct LOCAL_RANK and "
                "LOCAL_WORLD_SIZE (SLURM: SLURM_LOCALID and SLURM_TASKS_PER_NODE)."
            )
        if not 0 < self.port < 65536:
            raise LaunchError(f"MASTER_PORT={self.port} is not a port number. Use a free port from 1 to 65535.")

    @property
    def is_on_one_host(self) -> bool:
        """Whether all processes of the world run on this host."""
        return self.local_count == self.count


def find_cache_home() -> Path:
    """Returns the user's cache folder: $XDG_CACHE_HOME, or ~/.cache."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return named if named.is_absolute() else Path.home() / ".cache"


def find_place() -> ProcessPlace | None:
    """Returns this process's place from the variables of torchrun, MPI, SLURM or TF_CONFIG; None without a launcher."""
    if "RANK" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1":
        return _from_torchrun()
    # MPI before SLURM: if srun started mpirun, SLURM's variables count mpirun's helpers, one on each node.
    place = _from_tf_config() or _from_mpi() or _from_slurm()
    if place is None:
        _refuse_pmi_only()
    return place


def describe_launch() -> str:
    """Returns the variables that mark this process as launched, with their values, as text for error messages."""
    mpi = [name for launcher in _MPI if launcher.is_present for name in (launcher.rank, launcher.count)]
    names = dict.fromkeys(("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_ID", *mpi, "PMIX_RANK", "TF_CONFIG"))
    return ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)


def read_local_index(default: int) -> int:
    """Returns this process's index on its host from LOCAL_RANK; `default` if LOCAL_RANK is not set."""
    return _read(_parse_integer, "LOCAL_RANK") if "LOCAL_RANK" in os.environ else default


def has_launcher_store() -> bool:
    """Returns whether the launcher runs the store for the rendezvous itself, as torchrun does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def set_default(name: str, value: str) -> str:
    """Sets a variable unless it is set already; returns its value."""
    return os.environ.setdefault(name, value)


def build_worker_environment() -> dict[str, str]:
    """Returns the environment for workers: this process's without the variables that mark a process as launched."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER and not name.startswith(_LAUNCHER_PREFIXES)
    }


def _from_torchrun() -> ProcessPlace:
    return ProcessPlace(
        index=_read(_parse_integer, "RANK"),
        count=_read(_parse_integer, "WORLD_SIZE"),
        local_index=_read(_parse_integer, "LOCAL_RANK"),
        local_count=_read(_parse_integer, "LOCAL_WORLD_SIZE"),
        address=_read(str, "MASTER_ADDR"),
        port=_read(_parse_integer, "MASTER_PORT"),
    )


def _from_tf_config() -> ProcessPlace | None:
    if "TF_CONFIG" not in os.environ:
        return None
    place = _read(tf_config.parse_place, "TF_CONFIG")
    return ProcessPlace(*place) if place[1] > 1 else None


def _from_mpi() -> ProcessPlace | None:
    """Returns the place from mpirun's variables, which have no rendezvous address: several hosts need MASTER_ADDR."""
    launcher = next((each for each in _MPI if each.is_present), None)
    if launcher is None or (launcher is _HYDRA and launcher.local_rank not in os.environ):
        return None
    index, count = _read(_parse_integer, launcher.rank), _read(_parse_integer, launcher.count)
    if count == 1:
        return None
    local_index, local_count = 0, 0
    if launcher.local_count in os.environ:
        local_index = _read(_parse_integer, launcher.local_rank)
        local_count = _read(_parse_integer, launcher.local_count)
    if "MASTER_ADDR" in os.environ and local_count:
        return ProcessPlace(
            index, count, local_index, local_count, _read(str, "MASTER_ADDR"), _read(_parse_integer, "MASTER_PORT")
        )
    if local_count == count and os.environ.get(launcher.job):
        port = slurm.FIRST_PORT + zlib.crc32(_read(str, launcher.job).encode()) % slurm.NUM_PORTS
        return ProcessPlace(index, count, local_index, local_count, "127.0.0.1", port)
    raise LaunchError(
        f"The processes that were launched have no common address. This is process {index} of {count} "
        f"({describe_launch()}). Set MASTER_ADDR and MASTER_PORT for all of them: `mpirun -x MASTER_ADDR=node1 "
        "-x MASTER_PORT=29500` (Open MPI), `mpiexec -genv MASTER_ADDR node1 -genv MASTER_PORT 29500` (MPICH); "
        f"or start the script with torchrun. To train in each process alone, unset {launcher.rank} and "
        f"{launcher.count}."
    )


def _refuse_pmi_only() -> None:
    """Raises if only PMI's variables are set, because the number of processes on this host is not among them."""
    is_complete = "SLURM_PROCID" in os.environ or any(each.is_present for each in _MPI if each is not _HYDRA)
    several = os.environ.get("PMI_SIZE", "1") != "1"
    if several or ("PMIX_RANK" in os.environ and not is_complete):
        names = [name for name in ("PMI_RANK", "PMI_SIZE", "PMIX_RANK") if name in os.environ]
        found = ", ".join(f"{name}={os.environ[name]}" for name in names)
        raise LaunchError(
            f"This process was launched through PMI ({found}), which does not say how many processes run on this "
            f"host. Start the script with torchrun, or unset {' and '.join(names)} to train on this host alone."
        )


def _from_slurm() -> ProcessPlace | None:
    # A batch script and the shell of an allocation have SLURM_PROCID, too. Only processes that srun starts have a step
    # of their own, and `srun --pty` starts a shell.
    if "SLURM_PROCID" not in os.environ or "SLURM_STEP_ID" not in os.environ or "SLURM_PTY_PORT" in os.environ:
        return None
    step = _read(_parse_integer, "SLURM_STEP_ID")
    count = _read(_parse_integer, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if step >= slurm.FIRST_RESERVED_STEP or count == 1:
        return None
    return ProcessPlace(
        index=_read(_parse_integer, "SLURM_PROCID"),
        count=count,
        local_index=_read(_parse_integer, "SLURM_LOCALID"),
        local_count=_slurm_local_count(),
        address=_read(
            slurm.parse_first_host,
            *("MASTER_ADDR", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_LAUNCH_NODE_IPADDR"),
        ),
        port=_read(_parse_integer, "MASTER_PORT")
        if "MASTER_PORT" in os.environ
        else slurm.choose_port(_read(_parse_integer, "SLURM_JOB_ID"), step),
    )


def _slurm_local_count() -> int:
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
    counts = _read(slurm.parse_tasks_per_node, *names)
    if len(set(counts)) == 1:
        return counts[0]
    node = _read(_parse_integer, "SLURM_NODEID")
    if not 0 <= node < len(counts):
        raise LaunchError(
            f"SLURM_NODEID={node} does not fit the {len(counts)} nodes that SLURM lists tasks for "
            f"({', '.join(map(str, counts))}). Start the script with srun itself."
        )
    return counts[node]


def _read(parse: Callable[[str], Value], *names: str) -> Value:
    """Returns the parsed value of the first variable that is set; raises if none is set, or if the value is invalid."""
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
        f"{' or '.join(names)} is not set, but other variables say that a launcher started this process: "
        f"{describe_launch()}. Set it in every process, or use torchrun or srun; unset the others to train here alone."
    )


def list_settings(names: Container[str]) -> dict[str, str]:
    """Returns the variables in `names` that are set, and all variables whose names begin with LOCKSTEP_."""
    return {name: value for name, value in os.environ.items() if name in names or name.startswith("LOCKSTEP_")}


def read_devices() -> int | list[str] | None:
    """Returns the devices that `devices=None` takes from LOCKSTEP_DEVICES: a number, or comma-separated names."""
    text = os.environ.get("LOCKSTEP_DEVICES", "").strip()
    number = int(text) if text.isdecimal() and len(text) < 10 else 0
    names = [name.strip() for name in text.split(",") if text]
    if not number and not all(name[:1].isalpha() for name in names):
        raise DeviceError(
            "LOCKSTEP_DEVICES must be a number of devices, 1 or more, or comma-separated device names. Got "
            f"LOCKSTEP_DEVICES={text!r:.100}. Use for example LOCKSTEP_DEVICES=2 or LOCKSTEP_DEVICES=cpu:0,cpu:1, or "
            "unset it to use the default."
        )
    return number or names or None


def read_worker_timeout() -> float | None:
    """Returns the time limit in seconds for a worker that does not answer; 0 for no limit, None for the default limit.

    Under a debugger, which may stop processes for any time, there is no limit unless the variable is set.
    """
    text = os.environ.get("LOCKSTEP_WORKER_TIMEOUT", "").strip()
    if not text:
        return 0.0 if sys.gettrace() is not None else None
    try:
        return max(0.0, float(text))
    except ValueError:
        raise LaunchError(
            f"LOCKSTEP_WORKER_TIMEOUT must be a number of seconds. Got {text!r}. Use for example 120, or 0 for no "
            "time limit."
        ) from None


def _parse_integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("an integer") from None
