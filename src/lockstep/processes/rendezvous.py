"""Whether a launcher started this process, and how it joins the others.

A launched process starts no workers. The processes meet through torch.distributed, whatever the framework; it is only
imported if there are others.
"""

import functools
import sys
from typing import TYPE_CHECKING, Any

from lockstep.devices import is_cpu
from lockstep.errors import LaunchError, MissingExtra
from lockstep.launch import environment
from lockstep.processes.jax_processes import find_jax_processes

if TYPE_CHECKING:
    from lockstep.exchange.torch_distributed import ProcessGroup


def is_launched() -> bool:
    """Return whether this process is one of several that a launcher, or the script itself, has started."""
    if _has_group() or find_jax_processes() is not None or environment.find_place() is not None:
        return True
    _check_ray()
    return False


def choose_device(available: list[str], wanted: Any) -> str:
    """Return the device of this process: CPU replicas are numbered by rank, accelerators on each host."""
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
def join(accelerated: bool) -> "ProcessGroup":
    """Join the process group, once; every trainer of this process uses it."""
    try:
        from lockstep.exchange.torch_distributed import ProcessGroup
    except ImportError:
        raise MissingExtra(
            "Processes that were launched together meet through torch.distributed, which is not installed. "
            'Use pip install "lockstep-train[torch]", or start the script without a launcher.'
        ) from None
    if _has_group():
        return ProcessGroup(accelerated)
    if (joined := find_jax_processes()) is not None:
        address, on_one_host = joined.agree_on_address()
        return _join_at(address, joined.index, joined.count, accelerated, on_one_host, loopback=on_one_host)
    place = environment.find_place()
    assert place is not None
    loopback = place.is_on_one_host and not environment.has_launcher_store()  # torchrun listens itself, where it likes
    address = f"{place.address}:{place.port}"
    return _join_at(address, place.index, place.count, accelerated, place.is_on_one_host, loopback)


def _join_at(
    address: str, index: int, count: int, accelerated: bool, on_one_host: bool, loopback: bool
) -> "ProcessGroup":
    """Join the group; if all processes are on one host, its sockets listen on the loopback interface alone."""
    from lockstep.exchange.torch_distributed import ProcessGroup

    if on_one_host:
        for library in ("GLOO", "NCCL"):
            environment.set_default(f"{library}_SOCKET_IFNAME", "lo")
    if loopback:
        return ProcessGroup.join_on_loopback(int(address.rpartition(":")[2]), index, count, accelerated)
    return ProcessGroup.join(address, index, count, accelerated)


def _check_ray() -> None:
    """Raise in a worker of Ray Train that has no process group.

    Ray sets no environment variables for its workers. TorchTrainer makes a process group; JaxTrainer does nothing on
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
            f"Processes that were launched together need a process group to meet. Got one of {count} workers of Ray "
            "Train without one. Use ray.train.torch.TorchTrainer, which makes a group (for JAX and NumPy models, too), "
            "or ScalingConfig(num_workers=1)."
        )


def _has_group() -> bool:
    """Return whether the script has initialized torch.distributed itself."""
    if "torch" not in sys.modules:
        return False
    from lockstep.exchange.torch_distributed import is_initialized

    return is_initialized()
