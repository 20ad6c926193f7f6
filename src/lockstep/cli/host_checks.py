"""What `lockstep doctor` finds out about the host: cores, shared memory, launchers and environment variables."""

import difflib
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.devices import resolve
from lockstep.errors import DeviceError, LaunchError, LockstepError
from lockstep.launch import environment
from lockstep.launch.host import read_host
from lockstep.launch.shm import PAGE, Region

OK, NOTE, BROKEN, ABSENT = "ok", "note", "broken", "-"
_LAUNCHERS = ("torchrun", "srun", "mpirun", "ray")
_READ = ("LOCKSTEP_DEVICES", "LOCKSTEP_WORKER_TIMEOUT")
# Variables of others that choose devices, threads or kernels.
_OTHERS = {
    *("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "NPROC", "JAX_PLATFORMS", "XLA_FLAGS"),
    *("KERAS_BACKEND", "TF_ENABLE_ONEDNN_OPTS", "MXNET_ENGINE_TYPE", "XDG_CACHE_HOME"),
}
_SMALL = 1 << 30  # bytes of /dev/shm; Docker gives 64 MB


@dataclass(frozen=True)
class Finding:
    """One row of the report. `advice` says what to do about a note or about something that is broken."""

    subject: str
    text: str
    state: str = OK
    advice: str = ""


def check_cores() -> Finding:
    """Returns the cores and the memory that this process may use."""
    host, allowed = read_host(), len(os.sched_getaffinity(0))
    text = f"{host.num_cores:g} of {os.cpu_count()}, {format_bytes(host.free_memory)} of memory free"
    if host.num_cores < allowed:
        text += f"; a quota of the cgroup allows {host.num_cores:g} of {allowed}"
    if host.num_cores >= 2:
        return Finding("cores", text)
    advice = "Several CPU replicas would share this core and be no faster. Allow more: docker run --cpus=4, srun -c 4."
    return Finding("cores", text, NOTE, advice)


def check_shared_memory(shm: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Yields whether anonymous shared memory works, and how much named shared memory is free."""
    try:
        region = Region.create("doctor")
        region.view(PAGE)[0] = 1
        region.close()
        yield Finding("memfd", "works; replicas of one host exchange gradients through it")
    except (LockstepError, OSError) as error:
        yield Finding(
            "memfd", str(error), NOTE, "Train with one replica, devices=1, or start the script with torchrun."
        )
    try:
        free = shutil.disk_usage(shm).free
    except OSError as error:
        yield Finding(str(shm), str(error), ABSENT)
        return
    advice = f"Workers of a torch DataLoader, and NCCL, need {shm}: docker run --shm-size=2g. Lockstep does not."
    small = free < _SMALL
    yield Finding(str(shm), f"{format_bytes(free)} free", *((NOTE, advice) if small else ()))


def check_launchers() -> Iterator[Finding]:
    """Yields the launchers on the path, and this process's rank if one of them has started it."""
    beside = str(Path(sys.executable).parent)  # an environment that is not activated is not on the path
    paths = {name: shutil.which(name) or shutil.which(name, path=beside) for name in _LAUNCHERS}
    found = [name for name, path in paths.items() if path]
    missing = [name for name, path in paths.items() if not path]
    text = f"{', '.join(found) or 'none'} (not found: {', '.join(missing)})" if missing else ", ".join(found)
    yield Finding("launchers", text, OK if found else ABSENT)
    try:
        place = environment.find_place()
    except LaunchError as error:
        yield Finding("launched", environment.describe_launch(), BROKEN, str(error))
        return
    if place is not None:
        yield Finding("launched", f"rank {place.index} of {place.count}, which meet at {place.address}:{place.port}")


def check_environment(accelerators: list[str]) -> Iterator[Finding]:
    """Yields the environment variables that are set and affect training, and any whose value is invalid."""
    for name, value in environment.list_settings(_OTHERS).items():
        state, advice = OK, ""
        if name.startswith("LOCKSTEP_") and name not in _READ:
            near = difflib.get_close_matches(name, _READ, n=1)
            state = NOTE
            advice = f"Lockstep does not read {name}. It reads {' and '.join(near or _READ)}."
        try:
            if name == "LOCKSTEP_DEVICES":
                resolve(environment.read_devices(), accelerators)
            elif name == "LOCKSTEP_WORKER_TIMEOUT":
                environment.read_worker_timeout()
        except (DeviceError, LaunchError) as error:
            state, advice = BROKEN, str(error)
        yield Finding(name, value, state, advice)


def format_bytes(count: int) -> str:
    """Returns a number of bytes in GiB or MiB.

    >>> format_bytes(3 << 29), format_bytes(64 << 20)
    ('1.5 GiB', '64 MiB')
    """
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count >> 20} MiB"
