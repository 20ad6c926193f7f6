"""The exchange between processes of one host, through shared memory, with two waits in each step.

Each process writes its partial sums straight into the region, and the sums of its shards beside them. When all
processes have done so, each adds its slice of all partial sums into the root; after the commit each process reads the
whole root in place. Partial sums and root are separate, so nothing is overwritten before the commit. The position of a
partial sum follows from the plan, so a process may write only while the plan of its attempt holds.

    region: [ slots of process 0 | slots of process 1 | ... | root | sums of every shard ]
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.backends.base import Backend
from lockstep.core import tree
from lockstep.core.layout import Layout
from lockstep.core.metrics import Sums, divisor
from lockstep.core.plan import Plan
from lockstep.core.shard_sums import ShardSums, add_shard_sums
from lockstep.core.types import PartialSum, Work
from lockstep.exchange import slices
from lockstep.exchange.barrier import Barrier
from lockstep.launch.shm import PAGE, Region


class SharedMemoryExchange:
    """This process's side of the exchange."""

    def __init__(self, backend: Backend, region: Region, barrier: Barrier, plan: Plan, seat: int) -> None:
        self._backend = backend
        self._region = region
        self._barrier = barrier
        self._plan = plan
        self._index = plan.replicas.index(seat)
        self._layout: Layout | None = None
        self._slots: list[list[PartialSum]] = []
        self._root: PartialSum = {}
        self._sums: NDArray[Any] = np.empty(0)  # a row for each shard
        self._slices: dict[int, slices.Slice] = {}

    def open(self, layout: Layout) -> None:
        """Divides the region into buffers of this layout."""
        if layout is not self._layout:
            self._create_buffers(layout)

    def get_buffer(self, replica: int, slot: int, shard: int) -> PartialSum:
        """Returns one of this process's own buffers in the region."""
        self._barrier.note_shard(shard)
        return self._slots[self._index][slot]

    def reduce(
        self, partial_sums: Mapping[tree.Span, PartialSum], shard_sums: ShardSums, work: Work
    ) -> tuple[PartialSum, Sums]:
        """Adds this process's slice of the root, and returns the root; its other slices are valid after `commit`."""
        filled = work.num_filled
        for shard, vector in shard_sums.read().items():
            self._sums[shard] = vector
        own = self._get_slice(filled)
        self._barrier.wait_for_sums()
        sums = add_shard_sums(shard_sums, dict(enumerate(self._sums[:filled].copy())), work.num_shards)
        own.add(divisor(sums))
        return self._root, sums

    def commit(self) -> None:
        """Waits until the controller has decided that the step counts."""
        self._barrier.commit()

    def fail(self) -> None:
        """Reports that this process cannot make the step."""
        self._barrier.fail()

    def close(self) -> None:
        """Drops the views of the region."""
        self._slots, self._root, self._slices, self._layout = [], {}, {}, None
        self._sums = np.empty(0)

    def _create_buffers(self, layout: Layout) -> None:
        """Creates every process's slots, the root and the sums, at offsets that are equal in all processes."""
        shape = (self._plan.num_shards, layout.num_sums)
        counts = [program.slots for program in tree.programs(self._plan, self._plan.num_shards)]
        step = -(-layout.nbytes // PAGE) * PAGE
        end = step * (sum(counts) + 1)
        memory = self._region.view(end + prod(shape) * np.dtype(np.float64).itemsize)
        blocks = iter(range(0, end, step))

        def create_buffer() -> PartialSum:
            start = next(blocks)
            return self._backend.create_buffer(layout, memory[start : start + layout.nbytes])

        self._slots = [[create_buffer() for _ in range(count)] for count in counts]
        self._root = create_buffer()
        self._sums = np.frombuffer(memory, np.float64, prod(shape), end).reshape(shape)
        self._layout = layout
        self._slices = {}

    def _get_slice(self, filled: int) -> slices.Slice:
        """Returns this process's slice for a batch with `filled` non-empty shards; creates the slice's views once."""
        if filled not in self._slices:
            partial_sums = {
                span: self._slots[index][slot]
                for index, program in enumerate(tree.programs(self._plan, filled))
                for span, slot in program.spans.items()
            }
            assert self._layout is not None
            ranges = self._layout.slices(len(self._slots))[self._index]
            root = tree.root(self._plan.num_shards)
            self._slices[filled] = slices.Slice(self._backend, self._layout, root, partial_sums, ranges, self._root)
        return self._slices[filled]
