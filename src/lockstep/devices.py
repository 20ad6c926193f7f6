"""Resolves the argument `devices=` to the names of devices on this host."""

import re
from collections.abc import Callable, Sequence
from numbers import Integral, Number
from typing import Any

from lockstep.errors import DeviceError

MAX_CPU_REPLICAS = 1024  # so that a typing error does not start a million processes


def is_cpu(name: str) -> bool:
    """Returns whether `name` is the name of a CPU replica.

    >>> is_cpu("cpu:3"), is_cpu("cuda:0")
    (True, False)
    """
    return name.partition(":")[0] == "cpu"


def choose_similar(devices: Sequence[str], count: int) -> tuple[str, ...]:
    """Returns the names of `count` devices of the same type as `devices`; several replicas may share a GPU.

    >>> choose_similar(["cpu:0"], 2), choose_similar(["cuda:1"], 2)
    (('cpu:0', 'cpu:1'), ('cuda:1', 'cuda:1'))
    """
    if is_cpu(devices[0]):
        return tuple(f"cpu:{index}" for index in range(count))
    return tuple(devices[index % len(devices)] for index in range(count))


def resolve(devices: Any, available: Sequence[str], name: Callable[[Any], str] = str) -> tuple[str, ...]:
    """Returns the names of the devices given as the argument `devices`: None, a number, or a list of devices.

    None means all accelerators in `available`, or one CPU replica if there are none. `name` is a function that returns
    the name of a device object of the framework.

    >>> resolve(None, []), resolve(2, []), resolve(["cpu", "cpu"], []), resolve("cpu:3", [])
    (('cpu:0',), ('cpu:0', 'cpu:1'), ('cpu:0', 'cpu:1'), ('cpu:3',))
    >>> resolve(None, ["cuda:0", "cuda:1"])
    ('cuda:0', 'cuda:1')
    """
    if devices is None:
        return tuple(available) or ("cpu:0",)
    if not isinstance(devices, bool) and isinstance(devices, Integral):
        return _choose_first(int(devices), available)
    given = [devices] if isinstance(devices, str) or not isinstance(devices, Sequence) else devices
    return _check_names([_get_name(device, name, devices).lower() for device in given], available)


def _get_name(device: Any, name: Callable[[Any], str], devices: Any) -> str:
    if isinstance(device, str):
        return device
    try:
        if not isinstance(device, Number):
            return name(device)
    except AttributeError:  # not a device of the framework
        pass
    raise DeviceError(
        f"devices={devices!r} must be a number, a list of names, or None for all accelerators. Use for example "
        "devices=2, or devices=['cpu:0', 'cpu:1']."
    )


def _choose_first(count: int, available: Sequence[str]) -> tuple[str, ...]:
    if count < 1:
        raise DeviceError(f"devices={count} leaves no device to train on. Use devices=1 or more.")
    if not available:
        if count > MAX_CPU_REPLICAS:
            raise DeviceError(
                f"devices={count} is more than the limit of {MAX_CPU_REPLICAS} CPU replicas. Use at most the host's "
                "number of cores."
            )
        return tuple(f"cpu:{index}" for index in range(count))
    if count > len(available):
        raise DeviceError(
            f"devices={count} is more than the {len(available)} accelerators of this host: {', '.join(available)}. Use "
            f"devices={len(available)}, or devices=['cpu'] * {count}."
        )
    return tuple(available[:count])


def _check_names(names: list[str], available: Sequence[str]) -> tuple[str, ...]:
    if not names:
        raise DeviceError("devices=[] leaves no device to train on. Use devices=None for all accelerators.")
    kinds = {name.partition(":")[0] for name in names}
    if len(kinds) > 1:
        raise DeviceError(
            f"All devices must be of the same type. Got {', '.join(names)}. Use devices of one type only."
        )
    if kinds == {"cpu"}:
        have_numbers = len({*names}) == len(names) and all(re.fullmatch(r"cpu:\d+", name) for name in names)
        return tuple(names if have_numbers else (f"cpu:{index}" for index in range(len(names))))
    full = [name if ":" in name else f"{name}:0" for name in names]
    for name in full:
        if name not in available:
            present = ", ".join(available) or "cpu:0"
            raise DeviceError(f"This host has no device {name!r}. Use one of its devices: {present}.")
    return tuple(full)
