"""Finds the processes of `jax.distributed`, and agrees with them on an address for the process group.

These processes share a key-value store but no process group of torch. So the first process chooses a port, writes its
address into the store, and the others read it. JAX is only used if the script has imported it.
"""

import socket
import sys
from dataclasses import dataclass
from typing import Any

from lockstep.errors import LaunchError
from lockstep.launch.environment import ProcessPlace
from lockstep.launch.host import describe_host

_ADDRESS_KEY = "lockstep/meeting"
_HOST_KEY = "lockstep/host"
_LONGEST_WAIT = 1e6  # seconds


@dataclass(frozen=True)
class JaxProcesses:
    """This process's rank, the number of processes, their key-value store, and the coordinator's address."""

    index: int
    count: int
    store: Any
    coordinator: str

    def agree_on_place(self, seconds: float) -> ProcessPlace:
        """Returns this process's place, with the first process's address; waits until all have written their hosts."""
        self.store.key_value_set(f"{_HOST_KEY}/{self.index}", describe_host(), allow_overwrite=True)
        if self.index == 0:
            hosts = {self._read(f"{_HOST_KEY}/{index}", index, seconds) for index in range(self.count)}
            host = "127.0.0.1" if len(hosts) == 1 else self.coordinator.rpartition(":")[0]
            with socket.socket() as probe:  # its port is free again when the group is joined
                probe.bind(("127.0.0.1" if len(hosts) == 1 else "", 0))
                address = f"{len(hosts)} {host}:{probe.getsockname()[1]}"
            self.store.key_value_set(_ADDRESS_KEY, address, allow_overwrite=True)
        num_hosts, address = self._read(_ADDRESS_KEY, 0, seconds).split()
        host, _, port = address.rpartition(":")
        local = (self.index, self.count) if num_hosts == "1" else (0, 1)
        return ProcessPlace(self.index, self.count, *local, host, int(port))

    def _read(self, key: str, writer: int, seconds: float) -> str:
        """Returns what the process `writer` writes; raises LaunchError if it has not written in time."""
        try:
            text: str = self.store.blocking_key_value_get(key, int(1000 * min(seconds, _LONGEST_WAIT)))
        except Exception as error:  # of jaxlib, whose errors are not public
            raise LaunchError(
                f"Process {writer} of {self.count} has joined jax.distributed but has not called lockstep.wrap. "
                f"Process {self.index} waited for that up to {seconds:.0f} seconds. See the output of process "
                f"{writer}; JAX reports: {str(error).splitlines()[0]}"
            ) from error
        return text


def find_jax_processes() -> JaxProcesses | None:
    """Returns this process's place in `jax.distributed`, if the script has joined several processes; else None."""
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    if state is None or state.client is None or state.num_processes < 2:
        return None
    return JaxProcesses(state.process_id, state.num_processes, state.client, state.coordinator_address)
