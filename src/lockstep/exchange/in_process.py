"""The exchange inside one process: the framework's own copies between its devices."""

from collections.abc import Mapping

from lockstep.backends.base import Backend, Node, Work
from lockstep.core import tree
from lockstep.core.layout import Layout
from lockstep.core.metrics import Sums
from lockstep.exchange import slices


class MemoryExchange:
    """Nobody to wait for: all leaves are in this process."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._layout: Layout | None = None
        self._slots: dict[int, list[Node]] = {}

    def slots(self, replica: int, count: int, layout: Layout) -> list[Node]:
        """Nodes in ordinary memory, kept from step to step."""
        if layout is not self._layout:
            self._slots, self._layout = {}, layout
        slots = self._slots.setdefault(replica, [])
        while len(slots) < count:
            slots.append(self._backend.node(layout, None))
        return slots[:count]

    def reduce(self, nodes: Mapping[tree.Node, Node], work: Work) -> tuple[Node, Sums]:
        """The root of the tree out of this process's own nodes."""
        total = self._backend.finish(nodes, work.num_shards)
        return total, slices.divide(self._backend, self._backend.layout(), total)

    def commit(self) -> None:
        """Nothing to wait for."""

    def fail(self) -> None:
        """Nobody to tell."""

    def close(self) -> None:
        """Lets go of the nodes."""
        self._slots = {}
