"""The exchange for replicas that are all in this process; the framework itself copies between its devices."""

from collections.abc import Mapping

from lockstep.backends.base import Backend
from lockstep.core import tree
from lockstep.core.layout import Layout
from lockstep.core.metrics import Sums, divisor
from lockstep.core.shard_sums import ShardSums, add_shard_sums
from lockstep.core.types import PartialSum, Work
from lockstep.exchange import slices


class InProcessExchange:
    """An exchange without communication."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._layout: Layout | None = None
        self._buffers: dict[tuple[int, int], PartialSum] = {}

    def open(self, layout: Layout) -> None:
        """Drops the buffers if the layout has changed."""
        if layout is not self._layout:
            self._buffers, self._layout = {}, layout

    def get_buffer(self, replica: int, slot: int, shard: int) -> PartialSum:
        """Returns a buffer in ordinary memory, which is allocated when it is first asked for."""
        buffer = self._buffers.get((replica, slot))
        if buffer is None:
            assert self._layout is not None
            buffer = self._buffers[replica, slot] = self._backend.create_buffer(self._layout, None)
        return buffer

    def reduce(
        self, partial_sums: Mapping[tree.Span, PartialSum], shard_sums: ShardSums, work: Work
    ) -> tuple[PartialSum, Sums]:
        """Returns the total of this process's partial sums, divided if the loss has a divisor, and the batch's sums."""
        add = self._backend.add
        total = tree.total(tree.root(work.num_shards), partial_sums, lambda left, right: add(left, right, left))
        assert total is not None
        assert self._layout is not None
        sums = add_shard_sums(shard_sums, shard_sums.read(), work.num_shards)
        slices.divide(self._backend, self._layout, total, divisor(sums))
        return total, sums

    def commit(self) -> None:
        """Does nothing: there is no other process."""

    def fail(self) -> None:
        """Does nothing: there is no other process."""

    def close(self) -> None:
        """Frees the buffers."""
        self._buffers = {}
