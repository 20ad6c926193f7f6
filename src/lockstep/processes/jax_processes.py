"""How processes that `jax.distributed` has launched find each other.

They have a store in common and no group of torch's. So the first opens a port,
writes down where, and the others read it. JAX is looked for among the modules that
the script has imported, and never imported here.
"""

import os
import platform
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PLACE = "lockstep/meeting"
_HOST = "lockstep/host"
_PATIENCE = 300_000  # milliseconds


@dataclass(frozen=True)
class JaxProcesses:
    """This process's number, how many there are, and the store they share."""

    index: int
    count: int
    store: Any
    coordinator: str

    def agree_on_address(self) -> tuple[str, bool]:
        """Where the first process listens, and whether all are on one host: the same answer in every process."""
        self.store.key_value_set(f"{_HOST}/{self.index}", describe_host(), allow_overwrite=True)
        if self.index == 0:
            hosts = {self.store.blocking_key_value_get(f"{_HOST}/{index}", _PATIENCE) for index in range(self.count)}
            host = "127.0.0.1" if len(hosts) == 1 else self.coordinator.rpartition(":")[0]
            with socket.socket() as free:
                free.bind(("127.0.0.1" if len(hosts) == 1 else "", 0))
                place = f"{len(hosts)} {host}:{free.getsockname()[1]}"
            self.store.key_value_set(_PLACE, place, allow_overwrite=True)
        num_hosts, address = self.store.blocking_key_value_get(_PLACE, _PATIENCE).split()
        return address, num_hosts == "1"


def describe_host() -> str:
    """A string that is equal in two processes if they can reach each other over the loopback interface.

    Linux tells its running kernel and the process's network, of which a host of containers has several.
    """
    words = [platform.node()]
    with suppress(OSError):
        words += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")]
    return " ".join(words)


def found() -> JaxProcesses | None:
    """The world of `jax.distributed`, where the script has joined one of several processes."""
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    if state is None or state.client is None or state.num_processes < 2:
        return None
    return JaxProcesses(state.process_id, state.num_processes, state.client, state.coordinator_address)
