"""The exchange of partial sums between processes that a launcher (torchrun, MPI, SLURM) started.

In a step the processes exchange one small vector, and make two passes over the bytes of the partial sums. A process
that has computed its shards sends the vector to all others. The vector says which step the process makes, with
checksums of the batch and of what the script may change (`Meeting`), whether the process has failed, and the sums of
its shards. Once all vectors have arrived and agree, the step counts, and all processes move and add the partial sums.
If they do not agree, or one has failed, no partial sum is sent and no state changes.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lockstep.backends.base import Backend
from lockstep.core import tree
from lockstep.core.layout import Layout
from lockstep.core.metrics import Sums, divisor
from lockstep.core.plan import Plan
from lockstep.core.shard_sums import ShardSums, add_shard_sums
from lockstep.core.types import PartialSum, Work
from lockstep.errors import LockstepError
from lockstep.exchange.host_memory import HostMemory
from lockstep.exchange.torch_distributed import CONTROL_SIZE, ProcessGroup
from lockstep.exchange.transfer import Buffers, Transfer


class Meeting(Protocol):
    """Protocol by which the processes agree on a step before any of them sends a partial sum."""

    filled: int  # the number of shards with examples
    size: int  # of what the meeting itself sends

    def meet(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """Sends numbers, with checksums of the step, to all processes; returns the numbers of every process, by rank.

        Raises an error in every process if the processes do not make the same step, or if one has failed.
        """

    def meet_early(self) -> None:
        """Waits, before the step is computed, until all processes are at this step; raises as `meet` does."""

    def abandon(self) -> None:
        """Reports that this process does not make the step, unless the others know that already."""

    def commit(self) -> None:
        """Records that the step was committed."""


class LaunchedExchange:
    """One process's side of the exchange."""

    def __init__(
        self, backend: Backend, group: ProcessGroup, memory: HostMemory, parts: Plan, meeting: Meeting
    ) -> None:
        self._backend = backend
        self._group = group
        self._memory = memory
        self._plan = parts
        self._meeting = meeting
        self._is_awaited = False  # whether the others have this process's sums, and wait for its partial sums
        self._divisor = 1.0
        self._layout: Layout | None = None
        self._slots: dict[int, list[PartialSum]] = {}
        self._root: PartialSum = {}
        self._transfers: dict[int, Transfer] = {}

    def open(self, layout: Layout) -> None:
        """Creates the buffers again if the layout has changed."""
        if layout is not self._layout:
            self._meeting.meet_early()  # until then another process of this host may read the old buffers
            self._create_buffers(layout)

    def get_buffer(self, replica: int, slot: int, shard: int) -> PartialSum:
        """Returns the buffer of this slot, in this process's memory."""
        return self._slots[replica][slot]

    def reduce(
        self, partial_sums: Mapping[tree.Span, PartialSum], shard_sums: ShardSums, work: Work
    ) -> tuple[PartialSum, Sums]:
        """Agrees with the others on the step; returns the sum over all shards, which is valid after `commit`."""
        found = self._gather_sums(shard_sums.read())
        self._is_awaited = True
        sums = add_shard_sums(shard_sums, found, work.num_shards)
        self._divisor = divisor(sums)
        return self._root, sums

    def commit(self) -> None:
        """Adds this process's slice of the sum over all shards, and receives the slices of the others."""
        self._is_awaited = False
        self._get_transfer().run(self._divisor)
        self._meeting.commit()

    def fail(self) -> None:
        """Reports that this process has failed; if the others have its sums already, completes the step."""
        with suppress(LockstepError):  # the others have ended, too
            if self._is_awaited:
                self._is_awaited = False
                self._get_transfer().run(self._divisor)
            else:
                self._meeting.abandon()

    def close(self) -> None:
        """Frees the buffers."""
        self._slots, self._root, self._transfers, self._layout = {}, {}, {}, None

    def _create_buffers(self, layout: Layout) -> None:
        """Creates the slots of the processes that share memory, and the root, at the same offsets in all of these."""
        programs = dict(zip(self._plan.replicas, tree.programs(self._plan, self._plan.num_shards), strict=True))
        mates = self._memory.groups.get_mates(self._group.index)
        counts = {rank: programs[rank].slots for rank in mates}
        create_buffer = self._memory.allocate(self._backend, layout, sum(counts.values()) + 1)
        self._slots = {rank: [create_buffer() for _ in range(count)] for rank, count in counts.items()}
        self._root = create_buffer()
        self._transfers = {}
        self._layout = layout

    def _get_transfer(self) -> Transfer:
        filled = self._meeting.filled
        if filled not in self._transfers:
            assert self._layout is not None
            buffers = Buffers(self._layout, self._slots, self._root)
            groups = self._memory.groups
            self._transfers[filled] = Transfer(self._backend, self._group, groups, self._plan, filled, buffers)
        return self._transfers[filled]

    def _gather_sums(self, vectors: Mapping[int, Sums]) -> dict[int, Sums]:
        """Returns the sums of all shards; if they are few, they were part of the control vector."""
        assert self._layout is not None
        programs = tree.programs(self._plan, self._meeting.filled)
        width = self._layout.num_sums
        sent = np.zeros((max(len(program.shards) for program in programs), width))
        for row, shard in enumerate(sorted(vectors)):
            sent[row] = vectors[shard]
        numbers = sent.reshape(-1).view(np.int64)
        if len(numbers) <= CONTROL_SIZE - self._meeting.size:
            found = self._meeting.meet(numbers)[:, : len(numbers)].copy().view(np.float64)
        else:
            self._meeting.meet(numbers[:0])
            found = self._group.gather_vectors(sent.reshape(-1))
        rows = found.reshape(len(programs), -1, width)
        return {
            shard: rows[index, row]
            for index, program in enumerate(programs)
            for row, shard in enumerate(program.shards)
        }
