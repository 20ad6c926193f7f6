"""The memory in which the launched processes of a host see each other's partial sums.

The first process of a host creates a region, and the others open it through /proc. If one of them cannot, for example
because its container has process ids of its own, the processes of this host exchange messages, like processes of
different hosts.
"""

import os
from collections.abc import Callable

from lockstep.backends.base import Backend
from lockstep.core.host_groups import HostGroups
from lockstep.core.layout import Layout
from lockstep.core.types import PartialSum
from lockstep.errors import WorkerError
from lockstep.exchange.barrier import has_ordered_writes
from lockstep.exchange.torch_distributed import ProcessGroup
from lockstep.launch.shm import PAGE, Region


class HostMemory:
    """Which processes share memory, and the shared region; None if this process shares memory with no other."""

    def __init__(self, groups: HostGroups, region: Region | None) -> None:
        self.groups = groups
        self._region = region

    @classmethod
    def open(cls, group: ProcessGroup, host: str, may_share: bool) -> "HostMemory":
        """Opens the shared memory of this host in all processes of the group; those with equal `host` may share it."""
        may_share = may_share and has_ordered_writes()
        own = host if may_share else f"rank {group.index}"
        groups = HostGroups.from_hosts(group.gather_objects(own))
        mates = groups.get_mates(group.index)
        region = Region.create("launched") if len(mates) > 1 and mates[0] == group.index else None
        place = None if region is None else (os.getpid(), region.descriptor, _identify(region))
        places = group.gather_objects(place)
        if region is None and len(mates) > 1:
            region = _open_from(*places[mates[0]])
        opened = group.gather_objects(region is not None or len(mates) == 1)
        agreed = HostGroups(
            tuple(
                part
                for ranks in groups.groups
                for part in ([ranks] if all(opened[rank] for rank in ranks) else [(rank,) for rank in ranks])
            )
        )
        shares = len(agreed.get_mates(group.index)) > 1
        return cls(agreed, region if shares else None)

    def allocate(self, backend: Backend, layout: Layout, count: int) -> Callable[[], PartialSum]:
        """Returns a function whose `count` calls each create a buffer, in shared memory if there is any."""
        if self._region is None:
            return lambda: backend.create_buffer(layout, None)
        step = -(-layout.nbytes // PAGE) * PAGE
        memory = self._region.view(step * count)
        starts = iter(range(0, step * count, step))

        def create_buffer() -> PartialSum:
            start = next(starts)
            return backend.create_buffer(layout, memory[start : start + layout.nbytes])

        return create_buffer

    def close(self) -> None:
        """Closes the region; the kernel frees the memory once its last view is gone."""
        if self._region is not None:
            self._region.close()


def _identify(region: Region) -> tuple[int, int]:
    found = os.fstat(region.descriptor)
    return found.st_dev, found.st_ino


def _open_from(pid: int, descriptor: int, identity: tuple[int, int]) -> Region | None:
    """Returns another process's region; None if it cannot be opened, or if `pid` is another process here."""
    try:
        region = Region.open_from_process(pid, descriptor)
    except WorkerError:
        return None
    if _identify(region) == identity:
        return region
    region.close()
    return None
