"""How processes of `jax.distributed` meet.

They share a key-value store but no process group of torch, so the first process chooses a port, writes its address
into the store, and the others read it. JAX is looked for among the modules that the script has imported, and never
imported here.
"""

import os
import platform
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ADDRESS_KEY = "lockstep/meeting"
_HOST_KEY = "lockstep/host"
_TIMEOUT_MS = 300_000


@dataclass(frozen=True)
class JaxProcesses:
    """This process's rank, the number of processes, and the store they share."""

    index: int
    count: int
    store: Any
    coordinator: str

    def agree_on_address(self) -> tuple[str, bool]:
        """Return where the first process listens, and whether all are on one host; equal in every process."""
        self.store.key_value_set(f"{_HOST_KEY}/{self.index}", describe_host(), allow_overwrite=True)
        if self.index == 0:
            hosts = {
                self.store.blocking_key_value_get(f"{_HOST_KEY}/{index}", _TIMEOUT_MS) for index in range(self.count)
            }
            host = "127.0.0.1" if len(hosts) == 1 else self.coordinator.rpartition(":")[0]
            with socket.socket() as probe:  # its port is free again when the group is joined
                probe.bind(("127.0.0.1" if len(hosts) == 1 else "", 0))
                address = f"{len(hosts)} {host}:{probe.getsockname()[1]}"
            self.store.key_value_set(_ADDRESS_KEY, address, allow_overwrite=True)
        num_hosts, address = self.store.blocking_key_value_get(_ADDRESS_KEY, _TIMEOUT_MS).split()
        return address, num_hosts == "1"


def describe_host() -> str:
    """Return a string that is equal in two processes if they can reach each other over the loopback interface.

    It names the running kernel and the process's network namespace: containers of one host may have one each.
    """
    words = [platform.node()]
    with suppress(OSError):
        words += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")]
    return " ".join(words)


def find_jax_processes() -> JaxProcesses | None:
    """Return the processes of `jax.distributed`, if the script has joined several."""
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    if state is None or state.client is None or state.num_processes < 2:
        return None
    return JaxProcesses(state.process_id, state.num_processes, state.client, state.coordinator_address)
