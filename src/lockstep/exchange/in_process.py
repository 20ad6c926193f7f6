"""The exchange if all replicas are in this process: additions use the framework's own copies between its devices."""

from collections.abc import Mapping

from lockstep.backends.base import Backend, Node, Work
from lockstep.core import tree
from lockstep.core.layout import Layout
from lockstep.core.metrics import Sums
from lockstep.exchange import slices


class InProcessExchange:
    """An exchange without communication."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._layout: Layout | None = None
        self._slots: dict[int, list[Node]] = {}

    def slots(self, replica: int, count: int, layout: Layout) -> list[Node]:
        """Returns buffers in ordinary memory, which are reused from step to step."""
        if layout is not self._layout:
            self._slots, self._layout = {}, layout
        slots = self._slots.setdefault(replica, [])
        while len(slots) < count:
            slots.append(self._backend.node(layout, None))
        return slots[:count]

    def reduce(self, nodes: Mapping[tree.Span, Node], work: Work) -> tuple[Node, Sums]:
        """Adds up the root from this process's own partial sums."""
        total = self._backend.finish(nodes, work.num_shards)
        return total, slices.divide(self._backend, self._backend.layout(), total)

    def commit(self) -> None:
        """Does nothing: there is no other process."""

    def fail(self) -> None:
        """Does nothing: there is no other process."""

    def close(self) -> None:
        """Frees the buffers."""
        self._slots = {}
