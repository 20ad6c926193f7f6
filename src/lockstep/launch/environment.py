"""The environment: the one file that reads or writes `os.environ`.

Whatever Lockstep learns from variables arrives elsewhere as plain values, so a
test builds any cluster in one line and no setting hides in a corner.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lockstep.errors import LaunchError
from lockstep.launch import slurm, tf_config

Value = TypeVar("Value")

# What tells a process that it was launched. Workers must not inherit it.
_LAUNCHER = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_ID", "SLURM_STEPID", "TF_CONFIG"),
}
_LAUNCHER_PREFIX = "TORCHELASTIC_"


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
    """Gives this process's place in the world of torchrun, SLURM or TF_CONFIG, or None when nobody launched it."""
    if "RANK" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1":
        return _from_torchrun()
    return _from_tf_config() or _from_slurm()


def signs() -> str:
    """Names the variables that make this process look launched."""
    names = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_ID", "TF_CONFIG")
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
        if name not in _LAUNCHER and not name.startswith(_LAUNCHER_PREFIX)
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
