"""The exchange between processes of one host: shared memory, two barriers a step.

Leaves are written straight into the region. After the first barrier each process
adds its slice of the vectors out of everybody's nodes into the sums; after the
second, the commit, everyone reads all of the sums where they lie. Leaves and sums
are separate, so nothing is overwritten before the commit.

    region: [ slots of process 0 | slots of process 1 | ... | sums ]
"""

from collections.abc import Mapping

from lockstep.backends.base import Backend, Node, Work
from lockstep.core import tree
from lockstep.core.layout import Layout
from lockstep.core.metrics import Sums
from lockstep.core.plan import Plan
from lockstep.exchange import slices
from lockstep.exchange.barrier import Barrier
from lockstep.exchange.region import PAGE, Region


class SharedExchange:
    """This process's end of the shared region."""

    def __init__(self, backend: Backend, region: Region, barrier: Barrier, plan: Plan, index: int) -> None:
        self._backend = backend
        self._region = region
        self._barrier = barrier
        self._plan = plan
        self._index = index
        self._layout: Layout | None = None
        self._slots: list[list[Node]] = []
        self._sums: Node = {}
        self._slices: dict[int, slices.Slice] = {}

    def slots(self, replica: int, count: int, layout: Layout) -> list[Node]:
        """This process's own nodes in the region."""
        if layout is not self._layout:
            self._map(layout)
        return self._slots[self._index][:count]

    def reduce(self, nodes: Mapping[tree.Node, Node], work: Work) -> tuple[Node, Sums]:
        """The root of the tree, of which this process adds its slice."""
        own = self._slice(min(work.num_examples, work.num_shards))
        self._barrier.wait()
        return self._sums, own.add()

    def commit(self) -> None:
        """The second barrier."""
        self._barrier.wait()

    def fail(self) -> None:
        """Arrives at the next barrier as one that failed."""
        self._barrier.fail()

    def close(self) -> None:
        """Lets go of the region."""
        self._slots, self._sums, self._slices, self._layout = [], {}, {}, None
        self._region.close()

    def _map(self, layout: Layout) -> None:
        """Makes room for every process's slots and the sums, in places that all processes agree on."""
        counts = [program.slots for program in tree.programs(self._plan, self._plan.num_shards)]
        step = -(-layout.nbytes // PAGE) * PAGE
        memory = self._region.view(step * (sum(counts) + 1))
        blocks = iter(range(0, step * (sum(counts) + 1), step))

        def block() -> Node:
            start = next(blocks)
            return self._backend.node(layout, memory[start : start + layout.nbytes])

        self._slots = [[block() for _ in range(count)] for count in counts]
        self._sums = block()
        self._layout = layout
        self._slices = {}

    def _slice(self, filled: int) -> slices.Slice:
        """This process's slice of a batch with that many shards; its views are made once."""
        if filled not in self._slices:
            held = {
                node: self._slots[index][slot]
                for index, program in enumerate(tree.programs(self._plan, filled))
                for node, slot in program.nodes.items()
            }
            assert self._layout is not None
            ranges = self._layout.slices(len(self._slots))[self._index]
            root = tree.root(self._plan.num_shards)
            self._slices[filled] = slices.Slice(self._backend, self._layout, root, held, ranges, self._sums)
        return self._slices[filled]
