"""The protocol of an exchange, which adds the processes' partial sums in tree order.

Transports move bytes; the additions are the backend's own. Whatever the distance
between the processes, the interface is this one and so are the bits.
"""

from collections.abc import Mapping
from typing import Protocol

from lockstep.backends.base import Node, Work
from lockstep.core import tree
from lockstep.core.layout import Layout
from lockstep.core.metrics import Sums


class Exchange(Protocol):
    """How one process meets the others twice a step: leaves ready, and sums ready, which is the commit."""

    def slots(self, replica: int, count: int, layout: Layout) -> list[Node]:
        """`count` nodes in which this replica may write its leaves."""

    def reduce(self, nodes: Mapping[tree.Node, Node], work: Work) -> tuple[Node, Sums]:
        """The root of the tree, divided by its weight where the loss asks for it, and the sums.

        The gradient may lie in memory that other processes read too: it is not to be written.
        """

    def commit(self) -> None:
        """Returns once every process has its sums; raises PeerFailed where one has not."""

    def fail(self) -> None:
        """Tells the others that this process will not finish the step."""

    def close(self) -> None:
        """Lets go of memory and connections."""
