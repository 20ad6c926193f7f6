"""The exchange between processes that a launcher started: torch.distributed moves the bytes.

Each process receives its own slice of all processes' partial sums, adds them in tree order with the backend's own
addition, and all processes gather the slices: the traffic of an all-reduce, in our order of additions. Gloo carries CPU
memory, NCCL GPU memory.
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
from lockstep.exchange.in_process import InProcessExchange

_LOOPBACK = "127.0.0.1"
_TIMEOUT = timedelta(minutes=30)


class ProcessGroup:
    """Collective messages between all processes; all must make the same calls in the same order."""

    def __init__(self, accelerated: bool) -> None:
        """Uses the process group that exists, until the end of the script.

        A group whose threads still run when the interpreter exits can abort the process, so it is destroyed before.
        """
        atexit.register(_destroy_group)
        self.index = dist.get_rank()
        self.count = dist.get_world_size()
        self.control = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        self.data = dist.new_group(backend="nccl") if accelerated else self.control

    @classmethod
    def join(cls, address: str, index: int, count: int, accelerated: bool) -> "ProcessGroup":
        """Creates the process group by a rendezvous at `address`."""
        dist.init_process_group(
            _choose_transports(accelerated), init_method=f"tcp://{address}", rank=index, world_size=count
        )
        return cls(accelerated)

    @classmethod
    def join_on_loopback(cls, port: int, index: int, count: int, accelerated: bool) -> "ProcessGroup":
        """Creates the process group of processes on this host; rank 0 listens on the loopback interface only.

        torch's own store would listen on every interface, so the socket is created here and passed to it.
        """
        descriptor = _listen(port) if index == 0 else None
        store = dist.TCPStore(  # type: ignore[attr-defined]
            _LOOPBACK, port, count, index == 0, timeout=_TIMEOUT, master_listen_fd=descriptor, use_libuv=True
        )
        dist.init_process_group(_choose_transports(accelerated), store=store, rank=index, world_size=count)
        return cls(accelerated)

    def gather(self, integers: Sequence[int]) -> list[list[int]]:
        """Returns the integers of all processes, by rank."""
        gathered = torch.empty(self.count, len(integers), dtype=torch.int64)
        with _explain_lost_process():
            dist.all_gather(list(gathered), torch.tensor(integers, dtype=torch.int64), group=self.control)
        rows: list[list[int]] = gathered.tolist()
        return rows

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns the values of all processes, by rank."""
        values: list[Any] = [None] * self.count
        with _explain_lost_process():
            dist.all_gather_object(values, value, group=self.control)
        return values

    def broadcast(self, value: Any) -> Any:
        """Returns rank 0's value in every process."""
        values = [value]
        with _explain_lost_process():
            dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]


def _choose_transports(accelerated: bool) -> str:
    return "cpu:gloo,cuda:nccl" if accelerated else "gloo"


def _listen(port: int) -> int:
    """Returns the descriptor of a socket that listens on the loopback interface; torch's store closes it."""
    try:
        return socket.create_server((_LOOPBACK, port)).detach()
    except OSError as error:
        raise LaunchError(
            f"The first of the launched processes cannot listen on port {port} of this host: "
            f"{os.strerror(error.errno or 0)}. End the process that uses the port, or launch all with another "
            "MASTER_PORT (under TF_CONFIG: other ports in its cluster)."
        ) from error


def is_initialized() -> bool:
    """Returns whether a process group exists."""
    return dist.is_available() and dist.is_initialized()


def get_rank() -> int:
    """Returns this process's rank in the process group."""
    return dist.get_rank()


@contextmanager
def _explain_lost_process() -> Iterator[None]:
    """Raises WorkerError if torch reports, in whatever words, that another process has ended."""
    try:
        yield
    except RuntimeError as error:
        raise WorkerError(
            "Another launched process has ended or does not answer; see its own output. "
            f"torch.distributed reports: {str(error).splitlines()[0]}"
        ) from error


def _destroy_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class DistributedExchange:
    """This process's end of the exchange."""

    def __init__(self, backend: Backend, group: ProcessGroup, parts: plan.Plan) -> None:
        self._backend = backend
        self._group = group
        self._plan = parts
        self._own = InProcessExchange(backend)
        self._layout: Layout | None = None
        self._total: Node = {}

    def slots(self, replica: int, count: int, layout: Layout) -> list[Node]:
        """Returns buffers in this process's own memory."""
        if layout is not self._layout:
            self._layout, self._total = layout, self._backend.node(layout, None)
        return self._own.slots(replica, count, layout)

    def reduce(self, nodes: Mapping[tree.Span, Node], work: Work) -> tuple[Node, Sums]:
        """Adds this process's slice of the root and gathers the others'."""
        layout = self._backend.layout()
        self._synchronize(True)
        if self._group.count == 1:  # the same additions as without a launcher
            return self._own.reduce(nodes, work)
        spans_by_process = [program.spans for program in tree.programs(self._plan, work.num_examples)]
        with _explain_lost_process():
            for dtype in layout.lengths:
                self._reduce_vector(nodes, spans_by_process, layout, dtype, work.num_shards)
        return self._total, slices.divide(self._backend, layout, self._total)

    def commit(self) -> None:
        """Waits until all processes have the sums."""
        self._synchronize(True)

    def fail(self) -> None:
        """Reports to the others that this process has failed."""
        self._synchronize(False)

    def close(self) -> None:
        """Frees the buffers."""
        self._own.close()
        self._total, self._layout = {}, None

    def _synchronize(self, succeeded: bool) -> None:
        outcomes = self._group.gather([succeeded])
        failed = [index for index, (outcome,) in enumerate(outcomes) if not outcome]
        if failed and succeeded:
            raise PeerFailed(f"Process {failed[0]} failed in this step, so no process commits it. See its own output.")

    def _reduce_vector(
        self,
        nodes: Mapping[tree.Span, Node],
        spans_by_process: Sequence[Mapping[tree.Span, int]],
        layout: Layout,
        dtype: str,
        num_shards: int,
    ) -> None:
        """Sends each process its slice of the partial sums, adds this process's slice, and gathers all slices."""
        group = self._group
        ranges = [part[dtype] for part in layout.slices(group.count)]
        sizes = [stop - start for start, stop in ranges]
        mine = sizes[group.index]
        sent = torch.cat(
            [
                torch.as_tensor(nodes[span][dtype])[start:stop]
                for start, stop in ranges
                for span in spans_by_process[group.index]
            ]
            or [torch.as_tensor(self._total[dtype])[:0]]
        )
        received = torch.empty(mine * sum(map(len, spans_by_process)), dtype=sent.dtype, device=sent.device)
        dist.all_to_all_single(
            received,
            sent,
            [mine * len(spans) for spans in spans_by_process],
            [size * len(spans_by_process[group.index]) for size in sizes],
            group=group.data,
        )
        received_spans = [span for spans in spans_by_process for span in spans]  # in the order in which they arrive
        rows = received.view(len(received_spans), -1)
        values = {
            span: {dtype: _convert_like(self._total[dtype], row)}
            for span, row in zip(received_spans, rows, strict=True)
        }
        padded = torch.zeros(max(sizes), dtype=sent.dtype, device=sent.device)
        out = {dtype: _convert_like(self._total[dtype], padded)}
        slices.add_slice(self._backend, values, {dtype: (0, mine)}, out, num_shards)
        gathered = torch.empty(group.count, max(sizes), dtype=sent.dtype, device=sent.device)
        dist.all_gather(list(gathered), padded, group=group.data)
        total = torch.as_tensor(self._total[dtype])
        for row, (start, stop) in zip(gathered, ranges, strict=True):
            total[start:stop] = row[: stop - start]


def _convert_like(vector: Any, tensor: torch.Tensor) -> Any:
    """Returns the tensor as the same kind of array as `vector`, sharing its memory."""
    return tensor if isinstance(vector, torch.Tensor) else tensor.numpy()
