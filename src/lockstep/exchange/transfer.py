"""The messages by which launched processes add their partial sums, and the additions between them.

Two passes over the bytes, in buckets: every process receives its slice of a bucket from one process of each other
group, adds in tree order, and sends the sum back to the same processes. The processes of a group read each other's
partial sums in shared memory, and write what they receive of the root there. What cannot be added within a group is
sent as it is, one message for each span.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.backends.base import Backend
from lockstep.core import tree
from lockstep.core.host_groups import HostGroups
from lockstep.core.layout import ALIGNMENT, Layout
from lockstep.core.plan import Plan
from lockstep.core.types import PartialSum
from lockstep.exchange.slices import RangeSum, select_ranges
from lockstep.exchange.torch_distributed import PendingMessage, ProcessGroup, allocate_like, view_as_tensor

BUCKET = 1 << 22  # bytes

Range = tuple[str, int, int]  # type of a vector, and elements from start to stop


class Buffers(NamedTuple):
    """The slots of the processes that share memory, by rank, and the one root of all of these."""

    layout: Layout
    slots: Mapping[int, Sequence[PartialSum]]
    root: PartialSum


class Transfer:
    """One process's transfer, for batches with a given number of non-empty shards; its views are created once."""

    def __init__(
        self,
        backend: Backend,
        group: ProcessGroup,
        hosts: HostGroups,
        plan: Plan,
        filled: int,
        buffers: Buffers,
    ) -> None:
        mates = hosts.get_mates(group.index)
        programs = dict(zip(plan.replicas, tree.programs(plan, filled), strict=True))
        present = {span: buffers.slots[rank][slot] for rank in mates for span, slot in programs[rank].spans.items()}
        spans = [
            sorted(tree.program([shard for rank in ranks for shard in programs[rank].shards], plan.num_shards).spans)
            for ranks in hosts.groups
        ]
        self._group = group
        self._mates = [rank for rank in mates if rank != group.index]
        self._buckets = [
            _Bucket(backend, group, hosts, buffers, tree.root(plan.num_shards), spans, present, each, tag)
            for tag, each in enumerate(iterate_buckets(buffers.layout))
        ]
        self._signal = view_as_tensor(np.zeros(1, np.uint8))
        self._signals = [view_as_tensor(np.zeros(1, np.uint8)) for _ in self._mates]

    def run(self, by: float) -> None:
        """Makes both passes once all processes have computed their partial sums; afterwards the root is complete.

        This process's slice is divided by `by`, a number other than 1, before it is sent.
        """
        for bucket in self._buckets:
            bucket.send_partial_sums()
        for bucket in self._buckets:
            bucket.send_sums(by)
        for bucket in self._buckets:
            bucket.wait()
        self._meet_mates()

    def _meet_mates(self) -> None:
        """Waits until all processes of the group have written their parts of the root, and read the partial sums."""
        tag = len(self._buckets)
        messages = [self._group.receive(each, rank, tag) for each, rank in zip(self._signals, self._mates, strict=True)]
        messages += [self._group.send(self._signal, rank, tag) for rank in self._mates]
        for message in messages:
            message.wait()


class _Bucket:
    """One range of a vector: this process's messages of both passes, and its additions."""

    def __init__(
        self,
        backend: Backend,
        group: ProcessGroup,
        hosts: HostGroups,
        buffers: Buffers,
        root_span: tree.Span,
        spans: Sequence[Sequence[tree.Span]],
        present: Mapping[tree.Span, PartialSum],
        bounds: Range,
        tag: int,
    ) -> None:
        root = buffers.root
        self._group, self._tag = group, tag
        self._messages: list[PendingMessage] = []
        self._folds: list[RangeSum] = []  # partial sums of the group, which its processes do not have
        self._sent: list[tuple[Any, int]] = []
        self._received: list[tuple[Any, int]] = []
        self._sums_received: list[tuple[Any, int]] = []
        dtype = bounds[0]
        slices = cut_range(bounds, group.count)
        own_group = hosts.group_of[group.index]

        def allocate(size: int) -> PartialSum:
            return {dtype: allocate_like(root[dtype], size)}

        for receiver in hosts.find_receivers(group.index):
            part = {dtype: slices[receiver]}
            size = slices[receiver][1] - slices[receiver][0]
            if not size:
                continue
            for span in spans[own_group]:
                if span in present:
                    value = select_ranges(present[span], part)
                else:
                    value = allocate(size)
                    near = {each: select_ranges(held, part) for each, held in present.items()}
                    self._folds.append(RangeSum(backend, span, near, value, 0))
                self._sent.append((view_as_tensor(value[dtype]), receiver))
            self._sums_received.append((view_as_tensor(select_ranges(root, part)[dtype]), receiver))
        start, stop = slices[group.index]
        own = {dtype: (start, stop)}
        values = {span: select_ranges(value, own) for span, value in present.items()}
        senders = hosts.find_senders(group.index) if stop > start else []
        for sender in senders:
            for span in spans[hosts.group_of[sender]]:
                values[span] = allocate(stop - start)
                self._received.append((view_as_tensor(values[span][dtype]), sender))
        out = select_ranges(root, own)
        num_divided = min(max(buffers.layout.divided.get(dtype, 0) - start, 0), stop - start)
        self._sum = RangeSum(backend, root_span, values, out, num_divided)
        self._sums_sent = [(view_as_tensor(out[dtype]), sender) for sender in senders]

    def send_partial_sums(self) -> None:
        """Adds the sums over the group's processes that no process has yet; begins to send and receive partial sums."""
        for fold in self._folds:
            fold.add(1.0)
        self._messages = self._group.exchange(self._received, self._sent, self._tag)

    def send_sums(self, by: float) -> None:
        """Adds this process's slice once the partial sums have arrived, and begins to send and receive sums."""
        self.wait()
        self._sum.add(by)
        self._messages = self._group.exchange(self._sums_received, self._sums_sent, self._tag)

    def wait(self) -> None:
        """Waits for all messages."""
        for message in self._messages:
            message.wait()


def iterate_buckets(layout: Layout) -> Iterator[Range]:
    """Yields the ranges of the vectors in the order in which they are sent: gradients from the last to the first.

    A backward pass computes the gradients in about this order. The fields after the gradients are complete at its end.
    """
    for dtype, length in layout.lengths.items():
        divided = layout.divided.get(dtype, 0)
        size = BUCKET // np.dtype(dtype).itemsize
        for stop in range(divided, 0, -size):
            yield dtype, max(stop - size, 0), stop
        if length > divided:
            yield dtype, divided, length


def cut_range(bounds: Range, count: int) -> list[tuple[int, int]]:
    """Splits a range into `count` slices, whose lengths are multiples of 512 bytes, except the last.

    >>> cut_range(("float32", 128, 600), 3)
    [(128, 384), (384, 600), (600, 600)]
    """
    dtype, start, stop = bounds
    line = ALIGNMENT // np.dtype(dtype).itemsize
    size = -(-(stop - start) // (line * count)) * line
    return [(min(start + i * size, stop), min(start + (i + 1) * size, stop)) for i in range(count)]
