"""The exchange between processes of one host: shared memory and two barriers a step.

Each process writes its partial sums straight into the region. After the first barrier each adds its slice of all
processes' partial sums into the root; after the second, the commit, each reads the whole root in place. Partial sums
and root are separate, so nothing is overwritten before the commit.

    region: [ slots of process 0 | slots of process 1 | ... | root ]
"""

from collections.abc import Mapping

from lockstep.backends.base import Backend, Node, Work
from lockstep.core import tree
from lockstep.core.layout import Layout
from lockstep.core.metrics import Sums
from lockstep.core.plan import Plan
from lockstep.exchange import slices
from lockstep.exchange.barrier import Barrier
from lockstep.launch.shm import PAGE, Region


class SharedMemoryExchange:
    """This process's end of the exchange."""

    def __init__(self, backend: Backend, region: Region, barrier: Barrier, plan: Plan, index: int) -> None:
        self._backend = backend
        self._region = region
        self._barrier = barrier
        self._plan = plan
        self._index = index
        self._layout: Layout | None = None
        self._slots: list[list[Node]] = []
        self._root: Node = {}
        self._slices: dict[int, slices.Slice] = {}

    def slots(self, replica: int, count: int, layout: Layout) -> list[Node]:
        """Returns this process's own buffers in the region."""
        if layout is not self._layout:
            self._create_buffers(layout)
        return self._slots[self._index][:count]

    def reduce(self, nodes: Mapping[tree.Span, Node], work: Work) -> tuple[Node, Sums]:
        """Adds this process's slice of the root; the rest is valid after `commit`."""
        own = self._get_slice(min(work.num_examples, work.num_shards))
        self._barrier.wait()
        return self._root, own.add()

    def commit(self) -> None:
        """Waits at the second barrier."""
        self._barrier.wait()

    def fail(self) -> None:
        """Arrives at the next barrier as failed."""
        self._barrier.fail()

    def close(self) -> None:
        """Frees the region."""
        self._slots, self._root, self._slices, self._layout = [], {}, {}, None
        self._region.close()

    def _create_buffers(self, layout: Layout) -> None:
        """Creates the buffers of every process's slots and of the root, at offsets that are equal in all processes."""
        counts = [program.slots for program in tree.programs(self._plan, self._plan.num_shards)]
        step = -(-layout.nbytes // PAGE) * PAGE
        memory = self._region.view(step * (sum(counts) + 1))
        blocks = iter(range(0, step * (sum(counts) + 1), step))

        def create_buffer() -> Node:
            start = next(blocks)
            return self._backend.node(layout, memory[start : start + layout.nbytes])

        self._slots = [[create_buffer() for _ in range(count)] for count in counts]
        self._root = create_buffer()
        self._layout = layout
        self._slices = {}

    def _get_slice(self, filled: int) -> slices.Slice:
        """Returns this process's slice for a batch with that many filled shards; its views are created once."""
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
