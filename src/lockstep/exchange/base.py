"""The protocol of an exchange, which adds the processes' partial sums in tree order.

Transports move bytes; the additions are the backend's own. So the bits do not depend on the transport.
"""

from collections.abc import Mapping
from typing import Protocol

from lockstep.backends.base import Node, Work
from lockstep.core import tree
from lockstep.core.layout import Layout
from lockstep.core.metrics import Sums


class Exchange(Protocol):
    """How one process synchronizes with the others twice a step: partial sums ready, and root ready, the commit."""

    def slots(self, replica: int, count: int, layout: Layout) -> list[Node]:
        """Returns `count` buffers into which this replica writes its partial sums."""

    def reduce(self, nodes: Mapping[tree.Span, Node], work: Work) -> tuple[Node, Sums]:
        """Returns the root, divided by its weight if the loss asks for it, and the sums.

        The gradient may be in memory that other processes read as well, so it must not be written to.
        """

    def commit(self) -> None:
        """Blocks until every process has the sums; raises PeerFailed if one has failed."""

    def fail(self) -> None:
        """Reports to the others that this process will not finish the step."""

    def close(self) -> None:
        """Frees memory and connections."""
