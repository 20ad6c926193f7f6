"""Devices: what `devices=` means on this host."""

import re
from collections.abc import Callable, Sequence
from numbers import Integral, Number
from typing import Any

from lockstep.errors import DeviceError

MAX_CPU_REPLICAS = 1024  # each is a process in some frameworks, and a mistyped number must not start them


def is_cpu(name: str) -> bool:
    """Whether this is a replica on the CPU.

    >>> is_cpu("cpu:3"), is_cpu("cuda:0")
    (True, False)
    """
    return name.partition(":")[0] == "cpu"


def alike(devices: Sequence[str], count: int) -> tuple[str, ...]:
    """`count` devices of the kind of these; a GPU may carry several replicas.

    >>> alike(["cpu:0"], 2), alike(["cuda:1"], 2)
    (('cpu:0', 'cpu:1'), ('cuda:1', 'cuda:1'))
    """
    if is_cpu(devices[0]):
        return tuple(f"cpu:{index}" for index in range(count))
    return tuple(devices[index % len(devices)] for index in range(count))


def resolve(devices: Any, available: Sequence[str], name: Callable[[Any], str] = str) -> tuple[str, ...]:
    """The names of the devices: all accelerators, a count of them or of CPU replicas, or those given.

    `name` gives the name of a framework's own device object.

    >>> resolve(None, []), resolve(2, []), resolve(["cpu", "cpu"], []), resolve("cpu:3", [])
    (('cpu:0',), ('cpu:0', 'cpu:1'), ('cpu:0', 'cpu:1'), ('cpu:3',))
    >>> resolve(None, ["cuda:0", "cuda:1"])
    ('cuda:0', 'cuda:1')
    """
    if devices is None:
        return tuple(available) or ("cpu:0",)
    if not isinstance(devices, bool) and isinstance(devices, Integral):
        return _counted(int(devices), available)
    given = [devices] if isinstance(devices, str) or not isinstance(devices, Sequence) else devices
    return _named([_name(device, name, devices).lower() for device in given], available)


def _name(device: Any, name: Callable[[Any], str], devices: Any) -> str:
    if isinstance(device, str):
        return device
    try:
        if not isinstance(device, Number):
            return name(device)
    except AttributeError:  # no device of the framework's
        pass
    raise DeviceError(
        f"Devices are a count, a list of names, or None for every accelerator. Got devices={devices!r}. "
        "Use for example devices=2, or devices=['cpu:0', 'cpu:1']."
    )


def _counted(count: int, available: Sequence[str]) -> tuple[str, ...]:
    if count < 1:
        raise DeviceError(f"Training needs at least one device. Got devices={count}. Use devices=1 or more.")
    if not available:
        if count > MAX_CPU_REPLICAS:
            raise DeviceError(
                f"A host carries at most {MAX_CPU_REPLICAS} CPU replicas. Got devices={count}. Use as many as it has "
                "cores."
            )
        return tuple(f"cpu:{index}" for index in range(count))
    if count > len(available):
        raise DeviceError(
            f"Every device must be there. Got devices={count}; this host has {len(available)}: {', '.join(available)}. "
            f"Use devices={len(available)}, or devices=['cpu'] * {count}."
        )
    return tuple(available[:count])


def _named(names: list[str], available: Sequence[str]) -> tuple[str, ...]:
    if not names:
        raise DeviceError("Training needs at least one device. Got an empty list. Use devices=None for all.")
    kinds = {name.partition(":")[0] for name in names}
    if len(kinds) > 1:
        raise DeviceError(f"Devices are all of one type, for bits are. Got {', '.join(names)}. Use one type.")
    if kinds == {"cpu"}:
        numbered = len({*names}) == len(names) and all(re.fullmatch(r"cpu:\d+", name) for name in names)
        return tuple(names if numbered else (f"cpu:{index}" for index in range(len(names))))
    full = [name if ":" in name else f"{name}:0" for name in names]
    for name in full:
        if name not in available:
            there = ", ".join(available) or "only the CPU"
            raise DeviceError(f"Every device must be there. Got {name!r}; this host has {there}. Name one of these.")
    return tuple(full)
