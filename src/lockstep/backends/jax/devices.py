"""Finds JAX's devices, and creates as many CPU devices as a run needs.

Results depend on the size of XLA's pool of CPU threads, which by default grows with the number of CPU devices. So the
pool has one size for any number of devices, and the CPU devices are configured before JAX is initialized. If JAX is
already initialized, its CPU backend is created again, unless arrays exist that are bound to its devices.
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
clear_backends: Any = backend.clear_backends
live_arrays: Any = jax.live_arrays

MIN_POOL_SIZE = 64  # threads of XLA's pool; each CPU device needs a thread, so usually also the most CPU devices
MIN_CPU_DEVICES = 8  # created even if fewer are asked for, so that a later trainer or `verify` can use more
_THREAD_NAME = "tf_XLAEigen"  # the name of the threads in XLA's pool
_pools: dict[Any, int] = {}  # the size of each CPU client's pool


def list_accelerators() -> list[str]:
    """Returns the names of this process's GPUs or TPUs; initializes JAX only if a plugin for them is installed."""
    if config.jax_platforms == "cpu" or not (is_initialized() or _has_plugins()):
        return []
    return [name_device(device) for device in jax.local_devices() if device.platform != "cpu"]


def name_device(device: Any) -> str:
    """Returns a device's name as a script writes it: `cpu:0`, `cuda:0`, `rocm:0`, `tpu:0`."""
    kind = device.platform
    if kind == "gpu":
        kind = "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
    return f"{kind}:{device.local_hardware_id if device.local_hardware_id is not None else device.id}"


def find_devices(names: Sequence[str], exact: bool, movable: Iterable[Any]) -> list[Any]:
    """Returns JAX's device for every name; `movable` are the model's and optimizer's arrays, which Lockstep moves."""
    if names[0].startswith("cpu"):
        return _find_cpus(names, exact, movable)
    devices = {name_device(device): device for device in jax.local_devices()}
    missing = [each for each in names if each not in devices]
    if missing:
        raise DeviceError(f"JAX has no device {missing[0]!r}. Use one of {', '.join(devices)}.")
    return [devices[each] for each in names]


def read_versions(names: Sequence[str]) -> dict[str, str]:
    """Returns what results depend on: versions, and the size of XLA's CPU thread pool or the accelerator's model."""
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")}
    if names[0].startswith("cpu"):
        return versions | {"XLA's CPU threads": str(read_pool_size())}
    device = jax.local_devices()[0]  # libraries such as cuDNN choose kernels by the device model
    return versions | {"device model": device.device_kind, "platform": device.client.platform_version}


def choose_pool_size() -> int:
    """Returns the number of threads that XLA's pool must have on this host, whatever the number of devices."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(MIN_POOL_SIZE, cores)


def read_pool_size() -> int:
    """Returns the actual number of threads in XLA's pool; 0 if they cannot be counted."""
    client = jax.local_devices(backend="cpu")[0].client
    if client not in _pools:
        _pools[client] = _count_threads()
    return _pools[client]


def is_initialized() -> bool:
    """Returns whether JAX is initialized, so that its devices exist."""
    return bool(xla_bridge.backends_are_initialized())


def _find_cpus(names: Sequence[str], exact: bool, movable: Iterable[Any]) -> list[Any]:
    """Returns the CPU devices; creates JAX's devices again if there are too few, or if XLA's pool has another size."""
    indices = [int(each.partition(":")[2]) for each in names]
    count = max(indices) + 1
    if exact and count > choose_pool_size():
        raise ExactError(
            f"cpu:{count - 1} cannot be used in an exact run. Results depend on the number of threads in XLA's pool, "
            f"which is fixed at {choose_pool_size()}, and each CPU device needs a thread. Use devices up to "
            f"cpu:{choose_pool_size() - 1}, or exact=False."
        )
    if is_initialized() and (_has_too_few(count) or (exact and read_pool_size() not in (0, choose_pool_size()))):
        _check_not_in_use(count, movable)
        _clear()
    elif is_initialized() and _has_too_few(MIN_CPU_DEVICES) and not _explain_use(movable):
        _clear()  # not needed now, but a later `verify` on more devices may come when arrays are bound to the devices
    if not is_initialized():
        # Threads of this name that exist already belong to other clients, and do not count.
        before = _count_threads()
        config.update("jax_num_cpu_devices", max(count, MIN_CPU_DEVICES, config.jax_num_cpu_devices))
        client = jax.local_devices(backend="cpu")[0].client
        _pools[client] = _count_threads() - before
    if exact and read_pool_size() not in (0, choose_pool_size()):
        raise ExactError(
            f"XLA's pool has {read_pool_size()} CPU threads, because the environment variable NPROC is set. An exact "
            f"run needs {choose_pool_size()} threads, because results depend on their number. Unset NPROC, or use "
            "exact=False."
        )
    devices = jax.local_devices(backend="cpu")
    return [devices[index] for index in indices]


def _clear() -> None:
    """Drops JAX's devices and all programs that were compiled for them."""
    compile_cache.clear()
    _pools.clear()
    clear_backends()


def _has_too_few(count: int) -> bool:
    return len(jax.local_devices(backend="cpu")) < count


def _check_not_in_use(count: int, movable: Iterable[Any]) -> None:
    """Raises an error if JAX's devices are in use, so that they cannot be created again."""
    use = _explain_use(movable)
    if use:
        raise (DeviceError if _has_too_few(count) else ExactError)(
            f"Lockstep cannot configure JAX's CPU devices and their {choose_pool_size()} threads: JAX is already "
            f"initialized, and {use}. Begin the script with this line: {_write_setup_line(count)}"
        )


def _explain_use(movable: Iterable[Any]) -> str:
    """Returns what uses JAX's devices, so that they cannot be created again; an empty string if nothing does.

    An array that is committed to a device, or is on an accelerator, cannot be used with other devices. JAX copies other
    arrays where they are needed, and Lockstep copies those in `movable`.
    """
    if jax.distributed.is_initialized():
        return "jax.distributed uses its devices"
    moved = {id(array) for array in movable}
    bound = [
        array
        for array in live_arrays()
        if id(array) not in moved and (array.committed or next(iter(array.devices())).platform != "cpu")
    ]
    return f"{len(bound)} arrays of the script are bound to its devices" if bound else ""


def _write_setup_line(count: int) -> str:
    """Returns the line with which a script creates the devices and the pool itself."""
    count = max(count, MIN_CPU_DEVICES)
    return f'import os; os.environ.update(NPROC="{choose_pool_size()}", JAX_NUM_CPU_DEVICES="{count}")'


def _has_plugins() -> bool:
    """Returns whether a JAX plugin for accelerators is installed."""
    return bool(metadata.entry_points(group="jax_plugins")) or any(map(util.find_spec, ("jax_plugins", "libtpu")))


def _count_threads() -> int:
    """Returns the number of this process's threads that belong to a pool of XLA; 0 on a system without /proc."""
    tasks = Path("/proc/self/task")
    return sum(_read_thread_name(task).startswith(_THREAD_NAME) for task in (tasks.iterdir() if tasks.is_dir() else ()))


def _read_thread_name(task: Path) -> str:
    try:
        return (task / "comm").read_text()
    except OSError:  # the thread has ended
        return ""
