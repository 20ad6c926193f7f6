"""The exchange between processes that somebody else launched: torch.distributed moves the bytes.

Every process receives its own slice of everybody's nodes, adds them in tree order
with the backend's own addition, and all gather the sums: all-reduce's traffic, our
order. Gloo carries CPU memory, NCCL GPU memory.
"""

import atexit
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.backends.base import Backend, Node, Work
from lockstep.core import plan, tree
from lockstep.core.layout import Layout
from lockstep.core.metrics import Sums
from lockstep.errors import LaunchError, PeerFailed, WorkerError
from lockstep.exchange import slices
from lockstep.exchange.in_process import MemoryExchange

_LOOPBACK = "127.0.0.1"
_PATIENCE = timedelta(minutes=30)


class Wire:
    """The process group: messages between all processes, in the same order in each of them."""

    def __init__(self, accelerated: bool) -> None:
        """Uses the process group that is there, until the end of the script.

        Groups that still run threads while the interpreter ends can abort the process, so all are left before.
        """
        atexit.register(_leave)
        self.index = dist.get_rank()
        self.count = dist.get_world_size()
        self.control = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self.data = dist.new_group(backend="nccl") if accelerated else self.control

    @classmethod
    def join(cls, address: str, index: int, count: int, accelerated: bool) -> "Wire":
        """Joins the processes that meet at `address`, until the end of the script."""
        dist.init_process_group(_transports(accelerated), init_method=f"tcp://{address}", rank=index, world_size=count)
        return cls(accelerated)

    @classmethod
    def join_on_loopback(cls, port: int, index: int, count: int, accelerated: bool) -> "Wire":
        """Joins processes that are all on this host; the first listens on the loopback interface alone.

        torch's own store listens on every interface, so the socket is made here and handed to it.
        """
        descriptor = _listen(port) if index == 0 else None
        store = dist.TCPStore(  # type: ignore[attr-defined]
            _LOOPBACK, port, count, index == 0, timeout=_PATIENCE, master_listen_fd=descriptor, use_libuv=True
        )
        dist.init_process_group(_transports(accelerated), store=store, rank=index, world_size=count)
        return cls(accelerated)

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Everybody's numbers, in the order of the processes."""
        everyone = torch.empty(self.count, len(numbers), dtype=torch.int64)
        with _answered():
            dist.all_gather(list(everyone), torch.tensor(numbers, dtype=torch.int64), group=self.control)
        rows: list[list[int]] = everyone.tolist()
        return rows

    def gather_objects(self, value: Any) -> list[Any]:
        """Everybody's values, in the order of the processes."""
        values: list[Any] = [None] * self.count
        with _answered():
            dist.all_gather_object(values, value, group=self.control)
        return values

    def from_first(self, value: Any) -> Any:
        """The first process's value, in every process."""
        values = [value]
        with _answered():
            dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]


def _transports(accelerated: bool) -> str:
    return "cpu:gloo,cuda:nccl" if accelerated else "gloo"


def _listen(port: int) -> int:
    """The descriptor of a socket that listens on the loopback interface; torch's store closes it."""
    try:
        return socket.create_server((_LOOPBACK, port)).detach()
    except OSError as error:
        raise LaunchError(
            f"The first of the launched processes listens on port {port} of this host. Got "
            f"{os.strerror(error.errno or 0)!r} there. End the process that has the port, or launch all with another "
            "MASTER_PORT (under TF_CONFIG: other ports in its cluster)."
        ) from error


def initialized() -> bool:
    """Whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's number in the process group."""
    return dist.get_rank()


@contextmanager
def _answered() -> Iterator[None]:
    """Says in plain words that another process has gone, which torch reports as it comes."""
    try:
        yield
    except RuntimeError as error:
        raise WorkerError(
            "Every launched process takes part in every step. One has left or is silent; its own output says why. "
            f"torch.distributed said: {str(error).splitlines()[0]}"
        ) from error


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class DistributedExchange:
    """This process's end of the wire."""

    def __init__(self, backend: Backend, wire: Wire, parts: plan.Plan) -> None:
        self._backend = backend
        self._wire = wire
        self._plan = parts
        self._own = MemoryExchange(backend)
        self._layout: Layout | None = None
        self._total: Node = {}

    def slots(self, replica: int, count: int, layout: Layout) -> list[Node]:
        """Nodes in this process's own memory."""
        if layout is not self._layout:
            self._layout, self._total = layout, self._backend.node(layout, None)
        return self._own.slots(replica, count, layout)

    def reduce(self, nodes: Mapping[tree.Node, Node], work: Work) -> tuple[Node, Sums]:
        """The root of the tree, of which this process adds its slice."""
        layout = self._backend.layout()
        self._meet(True)
        if self._wire.count == 1:  # what a process without a launcher does
            return self._own.reduce(nodes, work)
        held = [program.nodes for program in tree.programs(self._plan, work.num_examples)]
        with _answered():
            for dtype in layout.lengths:
                self._reduce_vector(nodes, held, layout, dtype, work.num_shards)
        return self._total, slices.divide(self._backend, layout, self._total)

    def commit(self) -> None:
        """Everyone has the sums."""
        self._meet(True)

    def fail(self) -> None:
        """Meets the others as one that failed."""
        self._meet(False)

    def close(self) -> None:
        """Lets go of the nodes."""
        self._own.close()
        self._total, self._layout = {}, None

    def _meet(self, well: bool) -> None:
        failed = [index for index, (fine,) in enumerate(self._wire.gather([well])) if not fine]
        if failed and well:
            raise PeerFailed(f"Process {failed[0]} failed in this step; its own output says why. Nobody made the step.")

    def _reduce_vector(
        self,
        nodes: Mapping[tree.Node, Node],
        held: Sequence[Mapping[tree.Node, int]],
        layout: Layout,
        dtype: str,
        num_shards: int,
    ) -> None:
        """Sends each process its slice of my nodes, adds mine of everybody's, and gathers all slices."""
        wire = self._wire
        ranges = [part[dtype] for part in layout.slices(wire.count)]
        sizes = [stop - start for start, stop in ranges]
        mine = sizes[wire.index]
        sent = torch.cat(
            [torch.as_tensor(nodes[node][dtype])[start:stop] for start, stop in ranges for node in held[wire.index]]
            or [torch.as_tensor(self._total[dtype])[:0]]
        )
        received = torch.empty(mine * sum(map(len, held)), dtype=sent.dtype, device=sent.device)
        dist.all_to_all_single(
            received,
            sent,
            [mine * len(theirs) for theirs in held],
            [size * len(held[wire.index]) for size in sizes],
            group=wire.data,
        )
        everyone = [node for theirs in held for node in theirs]  # in the order in which they arrive
        rows = received.view(len(everyone), -1)
        values = {node: {dtype: _like(self._total[dtype], row)} for node, row in zip(everyone, rows, strict=True)}
        padded = torch.zeros(max(sizes), dtype=sent.dtype, device=sent.device)
        out = {dtype: _like(self._total[dtype], padded)}
        slices.add_slice(self._backend, values, {dtype: (0, mine)}, out, num_shards)
        gathered = torch.empty(wire.count, max(sizes), dtype=sent.dtype, device=sent.device)
        dist.all_gather(list(gathered), padded, group=wire.data)
        total = torch.as_tensor(self._total[dtype])
        for row, (start, stop) in zip(gathered, ranges, strict=True):
            total[start:stop] = row[: stop - start]


def _like(vector: Any, tensor: torch.Tensor) -> Any:
    """The tensor as the backend's own kind of array, sharing its memory."""
    return tensor if isinstance(vector, torch.Tensor) else tensor.numpy()
