"""`lockstep devices`: prints the devices on which each installed framework can train."""

import importlib
import importlib.util
import os
import platform
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.backends import registry
from lockstep.devices import resolve
from lockstep.errors import MissingExtra, ModelError, PlatformError
from lockstep.exchange.barrier import require_ordered_writes
from lockstep.launch.worker_pool import require_linux

PACKAGES = {
    "torch": ("torch",),
    "jax": ("jax", "flax", "optax"),
    "tensorflow": ("tensorflow", "keras"),
    "mxnet": ("mxnet",),
}
"""For each framework, the packages that must be installed to use it."""


def list_installed() -> list[str]:
    """Returns the names of the installed frameworks, without importing them."""
    return [name for name, needed in PACKAGES.items() if all(map(importlib.util.find_spec, needed))]


def choose_framework(framework: str | None) -> str:
    """Returns the given framework; if it is None, the first installed framework. Raises if it is not installed."""
    if framework is not None and framework not in PACKAGES:
        raise ModelError(f"--framework {framework!r} is not supported. Use one of {', '.join(PACKAGES)}.")
    found = list_installed()
    if framework in found or (framework is None and found):
        return framework or found[0]
    wanted = framework or next(iter(PACKAGES))
    raise MissingExtra(f'{wanted} is not installed. Install it: pip install "lockstep-train[{wanted}]"')


def list_accelerators(framework: str) -> Sequence[str]:
    """Returns the accelerators that the framework finds, after importing the framework."""
    name = f"lockstep.backends.{framework}" if framework in PACKAGES else registry.list_outside()[framework]
    return registry.load_module(name).available()


def print_devices(console: Console) -> None:
    """Prints one row per installed framework, and a line about the CPU."""
    frameworks = [*list_installed(), *(name for name in registry.list_outside() if name not in PACKAGES)]
    if not frameworks:
        raise MissingExtra(
            f"No framework is installed. Lockstep supports {', '.join(PACKAGES)}. "
            'Install one: pip install "lockstep-train[torch]"'
        )
    table = Table("framework", "version", "accelerators", "devices=None means", box=box.SIMPLE_HEAD)
    for framework in frameworks:
        accelerators = list_accelerators(framework)
        table.add_row(
            framework,
            getattr(importlib.import_module(framework), "__version__", "?"),
            _format_names(accelerators) or "none",
            _format_replicas(resolve(None, accelerators)),
        )
    console.print(table)
    console.print(Text(f"  CPU: {_format_cores()}; {_format_processes()}."))


def _format_names(devices: Sequence[str]) -> str:
    return ", ".join(devices) if len(devices) <= 2 else f"{devices[0]} … {devices[-1]}"


def _format_replicas(devices: Sequence[str]) -> str:
    return f"{len(devices)} replica{'s' * (len(devices) > 1)}: {_format_names(devices)}"


def _format_cores() -> str:
    # The cores that this process may use, which in a container or under SLURM are fewer than the machine has.
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{count} core{'s' * (count > 1)}"


def _format_processes() -> str:
    try:
        require_linux()
        require_ordered_writes()
    except PlatformError:
        return f"on {platform.system()} {platform.machine()} one replica"
    return 'devices=["cpu"] * n gives n replicas'
