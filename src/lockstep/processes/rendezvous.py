"""Finds out whether a launcher started this process, and joins the other processes that it started.

A launched process starts no workers. The processes meet through torch.distributed, whatever the framework; torch is
only imported if there are other processes.
"""

import functools
import platform
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lockstep.devices import is_cpu
from lockstep.errors import LaunchError, MissingExtra
from lockstep.launch import environment
from lockstep.launch.environment import ProcessPlace
from lockstep.launch.network_interface import find_interface
from lockstep.processes.arrivals import SECONDS_TO_COME, Patience, wait_for_address, wait_for_all
from lockstep.processes.jax_rendezvous import find_jax_processes

if TYPE_CHECKING:
    from lockstep.exchange.torch_distributed import ProcessGroup

# torch 2.13 keeps the address of a node's own store when another node becomes the first one.
_ADVICE_FOR_TORCHRUN = (
    " If nodes have left or joined torchrun, they may have different stores: start torchrun with "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."
)


def is_launched() -> bool:
    """Returns whether this process is one of several that a launcher, or the script itself, has started."""
    if _has_group() or find_jax_processes() is not None or environment.find_place() is not None:
        return True
    _check_ray()
    return False


def choose_device(available: list[str], wanted: Any) -> str:
    """Returns the device of this process: a CPU replica numbered by rank, or an accelerator numbered on its host."""
    first = str(wanted[0] if isinstance(wanted, list | tuple) else wanted).lower()
    if _has_group():
        from lockstep.exchange.torch_distributed import get_rank

        index = get_rank()
        local = environment.read_local_index(index)
    elif (joined := find_jax_processes()) is not None:
        index, local = joined.index, environment.read_local_index(0)  # JAX shows each process its own devices
    else:
        place = environment.find_place()
        assert place is not None
        index, local = place.index, place.local_index
    return f"cpu:{index}" if not available or is_cpu(first) else available[local % len(available)]


@functools.cache
def join(accelerated: bool, say: Callable[[str], None]) -> "ProcessGroup":
    """Joins the process group, once for all trainers of this process; `say` prints which processes are missing."""
    try:
        from lockstep.exchange.torch_distributed import ProcessGroup
    except ImportError:
        raise MissingExtra(
            "Processes that were launched together communicate through torch.distributed, which is not installed. Use "
            'pip install "lockstep-train[torch]", or start the script without a launcher.'
        ) from None
    if _has_group():
        return ProcessGroup(accelerated)
    seconds = environment.read_worker_timeout()
    joined = find_jax_processes()
    is_served = joined is None and environment.has_launcher_store()
    advice = _ADVICE_FOR_TORCHRUN if is_served else ""
    patience = Patience(SECONDS_TO_COME if seconds is None else seconds or float("inf"), say, advice)
    place = environment.find_place() if joined is None else joined.agree_on_place(patience.seconds)
    assert place is not None
    if place.is_on_one_host:
        for library in ("GLOO", "NCCL"):
            environment.set_default(f"{library}_SOCKET_IFNAME", "lo")
    elif interface := find_interface(place.address):  # NCCL finds one itself
        environment.set_default("GLOO_SOCKET_IFNAME", interface)
    store = _find_store(place, is_served, patience)
    name = wait_for_all(store, place.index, place.count, platform.node(), patience)
    return ProcessGroup.join(store, name, place.index, place.count, accelerated)


def _find_store(place: ProcessPlace, is_served: bool, patience: Patience) -> Any:
    """Returns the store in which the processes meet: the launcher's own, or the first process's.

    If all processes are on one host, the first process's store listens on loopback only.
    """
    from lockstep.exchange.torch_distributed import LOOPBACK, open_store

    on_loopback = place.is_on_one_host and not is_served
    listens = place.index == 0 and not is_served
    host = LOOPBACK if on_loopback or listens else place.address
    if not listens:
        wait_for_address(host, place, is_served, patience)
    return open_store(host, place.port, listens, on_loopback)


def _check_ray() -> None:
    """Raises LaunchError in a worker of Ray Train that has no process group.

    Ray sets no environment variables for its workers. TorchTrainer creates a process group; JaxTrainer does nothing on
    CPUs.
    """
    context = getattr(sys.modules.get("ray.train"), "get_context", None)
    if context is None:
        return
    try:
        count = int(context().get_world_size())
    except Exception:  # outside of a worker it raises
        return
    if count > 1:
        raise LaunchError(
            f"Processes that were launched together need a process group to communicate. This is one of {count} "
            "workers of Ray Train without a group. Use ray.train.torch.TorchTrainer, which creates a group (for JAX "
            "and NumPy models, too), or ScalingConfig(num_workers=1)."
        )


def _has_group() -> bool:
    """Returns whether the script has initialized torch.distributed itself."""
    if "torch" not in sys.modules:
        return False
    from lockstep.exchange.torch_distributed import is_initialized

    return is_initialized()
