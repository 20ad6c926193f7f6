"""The protocol of an exchange, which adds the processes' partial sums in tree order.

Transports move bytes; the additions are the backend's own. So the bits do not depend on the transport.
"""

from collections.abc import Mapping
from typing import Protocol

from lockstep.core import tree
from lockstep.core.layout import Layout
from lockstep.core.metrics import Sums
from lockstep.core.shard_sums import ShardSums
from lockstep.core.types import PartialSum, Work


class Exchange(Protocol):
    """Protocol that adds the partial sums of all processes, which wait for each other in `reduce` and in `commit`."""

    def open(self, layout: Layout) -> None:
        """Prepares memory for partial sums of this layout; does nothing if the previous step had the same layout."""

    def get_buffer(self, replica: int, slot: int, shard: int) -> PartialSum:
        """Returns a buffer for a partial sum that begins with this shard; a slot has the same buffer in every step."""

    def reduce(
        self, partial_sums: Mapping[tree.Span, PartialSum], shard_sums: ShardSums, work: Work
    ) -> tuple[PartialSum, Sums]:
        """Returns the root of the tree (the sum over all shards), and the batch's sums of loss, weight and metrics.

        The root is divided by the weight if the loss has a divisor of its own.

        The root may be in memory that other processes read as well, so it must not be written to.
        """

    def commit(self) -> None:
        """Blocks until the step is committed; raises PeerFailed or AttemptAborted if it is not."""

    def fail(self) -> None:
        """Reports to the others that this process will not finish the step."""

    def close(self) -> None:
        """Frees memory and connections."""
