"""`lockstep devices`: what each installed framework can train on here."""

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
"""What must be installed for every framework that Lockstep trains with."""


def installed() -> list[str]:
    """The frameworks that this interpreter can import, found without importing them."""
    return [name for name, needed in PACKAGES.items() if all(map(importlib.util.find_spec, needed))]


def chosen(framework: str | None) -> str:
    """The framework asked for, or the first that is installed; raises where it is not."""
    if framework is not None and framework not in PACKAGES:
        raise ModelError(f"Lockstep trains with {', '.join(PACKAGES)}. Got {framework!r}. Name one of these.")
    found = installed()
    if framework in found or (framework is None and found):
        return framework or found[0]
    wanted = framework or next(iter(PACKAGES))
    raise MissingExtra(f'This needs {wanted}. Install it: pip install "lockstep-train[{wanted}]"')


def available(framework: str) -> Sequence[str]:
    """The accelerators that the framework sees; imports it."""
    return registry.module(f"lockstep.backends.{framework}").available()


def show(console: Console) -> None:
    """Prints one row per installed framework, and what the CPU can do."""
    frameworks = installed()
    if not frameworks:
        raise MissingExtra(
            f"Lockstep trains with {', '.join(PACKAGES)}, and none is installed. "
            'Install one: pip install "lockstep-train[torch]"'
        )
    table = Table("framework", "version", "accelerators", "devices=None means", box=box.SIMPLE_HEAD)
    for framework in frameworks:
        found = available(framework)
        table.add_row(
            framework,
            importlib.import_module(framework).__version__,
            _names(found) or "none",
            _replicas(resolve(None, found)),
        )
    console.print(table)
    console.print(Text(f"  CPU: {_cores()}; {_processes()}."))


def _names(devices: Sequence[str]) -> str:
    return ", ".join(devices) if len(devices) <= 2 else f"{devices[0]} … {devices[-1]}"


def _replicas(devices: Sequence[str]) -> str:
    return f"{len(devices)} replica{'s' * (len(devices) > 1)}: {_names(devices)}"


def _cores() -> str:
    # The cores that this process may use: in a container or under SLURM fewer than the machine has.
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{count} core{'s' * (count > 1)}"


def _processes() -> str:
    try:
        require_linux()
        require_ordered_writes()
    except PlatformError:
        return f"on {platform.system()} {platform.machine()} one replica"
    return 'devices=["cpu"] * n gives n replicas'
