"""Devices: the chips that JAX sees, and CPU devices made to measure.

XLA's pool of CPU threads is part of the bits, and by itself it grows with the
number of CPU devices. So the pool has one size, whatever the number of devices,
and the CPU devices are made before JAX wakes. Where JAX is awake already, its
CPU backend is made again, as long as that is safe for the arrays that are there.
"""

import os
from collections.abc import Iterable, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any

import jax
from jax._src import xla_bridge
from jax.extend import backend

from lockstep.backends.jax import compile_cache
from lockstep.errors import DeviceError, ExactError

config: Any = jax.config
clear: Any = backend.clear_backends
live_arrays: Any = jax.live_arrays

POOL = 64  # threads: as many shards as a batch may have on this host's CPU devices
CPUS = 8  # CPU devices, so that up to eight can be asked for at any time
_THREAD = "tf_XLAEigen"  # how XLA names the threads of its pool
_pools: dict[Any, int] = {}  # of every CPU backend made here


def accelerators() -> list[str]:
    """The names of this process's GPUs or TPUs; JAX is only woken where it may have some."""
    if config.jax_platforms == "cpu" or not (awake() or _plugins()):
        return []
    return [name(device) for device in jax.local_devices() if device.platform != "cpu"]


def name(device: Any) -> str:
    """A device's name as a script writes it: `cpu:0`, `cuda:0`, `rocm:0`, `tpu:0`."""
    kind = device.platform
    if kind == "gpu":
        kind = "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
    return f"{kind}:{device.local_hardware_id if device.local_hardware_id is not None else device.id}"


def of(names: Sequence[str], exact: bool, own: Iterable[Any]) -> list[Any]:
    """JAX's device for every name; `own` are the arrays of model and optimizer, which move along."""
    if names[0].startswith("cpu"):
        return _cpus(names, exact, own)
    found = {name(device): device for device in jax.local_devices()}
    missing = [each for each in names if each not in found]
    if missing:
        raise DeviceError(f"Every device must be there. Got {missing[0]!r}; JAX has {', '.join(found)}. Name these.")
    return [found[each] for each in names]


def read_versions(names: Sequence[str]) -> dict[str, str]:
    """Return what decides the bits on these devices: versions, the size of XLA's pool on a CPU, the model of a GPU."""
    found = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")}
    if names[0].startswith("cpu"):
        return found | {"XLA's CPU threads": str(pool())}
    device = jax.local_devices()[0]  # its libraries choose the kernels
    return found | {"device model": device.device_kind, "platform": device.client.platform_version}


def threads() -> int:
    """The size of XLA's pool on this host: the same for every number of devices up to it."""
    return max(POOL, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def pool() -> int:
    """The size of the pool in force; 0 where that cannot be told."""
    client = jax.local_devices(backend="cpu")[0].client
    if client not in _pools:
        _pools[client] = _count_threads()
    return _pools[client]


def awake() -> bool:
    """Whether JAX has made its devices already."""
    return bool(xla_bridge.backends_are_initialized())


def _cpus(names: Sequence[str], exact: bool, own: Iterable[Any]) -> list[Any]:
    numbers = [int(each.partition(":")[2]) for each in names]
    count = max(numbers) + 1
    if exact and count > threads():
        raise ExactError(
            f"XLA's CPU threads are part of the bits: {threads()}, or one for each CPU device. Got cpu:{count - 1}. "
            f"Name none above cpu:{threads() - 1}, or use exact=False."
        )
    if awake() and (_too_few(count) or (exact and pool() not in (0, threads()))):
        _check_safe(count, own)
        _clear()
    elif awake() and _too_few(CPUS) and not _held(own):  # `verify` may ask for more later
        _clear()
    if not awake():
        before = _count_threads()
        config.update("jax_num_cpu_devices", max(count, CPUS, config.jax_num_cpu_devices))
        client = jax.local_devices(backend="cpu")[0].client
        _pools[client] = _count_threads() - before
    if exact and pool() not in (0, threads()):
        raise ExactError(
            f"XLA's pool of CPU threads is part of the bits: {threads()} for any number of devices. Got {pool()}, "
            "because the variable NPROC says so. Unset it, or use exact=False."
        )
    there = jax.local_devices(backend="cpu")
    return [there[number] for number in numbers]


def _clear() -> None:
    """Lets JAX's devices go, and what was compiled for them."""
    compile_cache.forget()
    _pools.clear()
    clear()


def _too_few(count: int) -> bool:
    return len(jax.local_devices(backend="cpu")) < count


def _check_safe(count: int, own: Iterable[Any]) -> None:
    """Raises where arrays of the script's own are bound to devices that would be gone."""
    held = _held(own)
    if held:
        raise (DeviceError if _too_few(count) else ExactError)(
            f"CPU devices and their {threads()} threads are made before JAX wakes. It is awake, and {held}. "
            f"Put this line first: {_line(count)}"
        )


def _held(own: Iterable[Any]) -> str:
    """What keeps JAX's devices from being made again; nothing does where every other array may go anywhere."""
    if jax.distributed.is_initialized():
        return "jax.distributed holds it"
    moved = {id(array) for array in own}
    bound = [
        array
        for array in live_arrays()
        if id(array) not in moved and (array.committed or next(iter(array.devices())).platform != "cpu")
    ]
    return f"{len(bound)} arrays of the script are bound to its devices" if bound else ""


def _line(count: int) -> str:
    return f'import os; os.environ.update(NPROC="{threads()}", JAX_NUM_CPU_DEVICES="{max(count, CPUS)}")'


def _plugins() -> bool:
    """Whether something is installed that could bring JAX an accelerator."""
    return bool(metadata.entry_points(group="jax_plugins")) or any(map(util.find_spec, ("jax_plugins", "libtpu")))


def _count_threads() -> int:
    tasks = Path("/proc/self/task")
    return sum(_name(task).startswith(_THREAD) for task in (tasks.iterdir() if tasks.is_dir() else ()))


def _name(task: Path) -> str:
    try:
        return (task / "comm").read_text()
    except OSError:  # it has ended meanwhile
        return ""
