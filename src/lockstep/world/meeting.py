"""Meeting: how processes find each other that `jax.distributed` has brought together.

They have a store in common and no group of torch's. So the first opens a port,
writes down where, and the others read it. JAX is looked for among the modules that
the script has imported, and never imported here.
"""

import socket
import sys
from dataclasses import dataclass
from typing import Any

_PLACE = "lockstep/meeting"
_PATIENCE = 300_000  # milliseconds


@dataclass(frozen=True)
class Meeting:
    """This process's number, how many there are, and the store they share."""

    index: int
    count: int
    store: Any
    coordinator: str

    def address(self) -> str:
        """Where the first process listens: the same answer in every process."""
        host = self.coordinator.rpartition(":")[0]
        if self.index == 0:
            with socket.socket() as free:
                free.bind(("", 0))
                self.store.key_value_set(_PLACE, f"{host}:{free.getsockname()[1]}", allow_overwrite=True)
        place: str = self.store.blocking_key_value_get(_PLACE, _PATIENCE)
        return place

    @property
    def on_one_host(self) -> bool:
        """Whether nothing needs to listen beyond this host."""
        return self.coordinator.rpartition(":")[0] in ("localhost", "127.0.0.1", "[::1]")


def found() -> Meeting | None:
    """The world of `jax.distributed`, where the script has joined one of several processes."""
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    if state is None or state.client is None or state.num_processes < 2:
        return None
    return Meeting(state.process_id, state.num_processes, state.client, state.coordinator_address)
