"""Messages between launched processes through torch.distributed: Gloo for CPU memory, NCCL for GPU memory."""

import atexit
import functools
import os
import platform
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

# Imported later, its default arguments would hold the group that exists then, whose threads would never end.
import torch.distributed.nn.functional
from numpy.typing import NDArray
from torch import Tensor

from lockstep.errors import LaunchError
from lockstep.exchange.peer_status import Peers
from lockstep.launch import environment

LOOPBACK = "127.0.0.1"
_TIMEOUT = timedelta(minutes=30)
_NEVER = 1e8  # seconds
CONTROL_SIZE = 512  # numbers in a control vector: 4 KB
_GATHER, _NOTHING = 1 << 30, (1 << 30) + 1  # tags of messages that are not part of a transfer
# All have come, so connecting takes milliseconds. Gloo waits for a connection five times its timeout.
_TIMEOUT_TO_CONNECT = timedelta(seconds=12)


class ProcessGroup:
    """Messages between all processes; all must make the same calls in the same order."""

    def __init__(self, accelerated: bool) -> None:
        """Uses the existing process group until the end of the script."""
        _destroy_groups_at_exit()
        self.index = dist.get_rank()
        self.count = dist.get_world_size()
        seconds = environment.read_worker_timeout()
        timeout = _TIMEOUT if seconds is None else timedelta(seconds=seconds or _NEVER)
        self.control: Any = dist.new_group(backend="gloo", timeout=timeout)
        self.data: Any = dist.new_group(backend="nccl") if accelerated else self.control
        self.peers = Peers(self.index, self._is_lost)
        atexit.register(self._release)
        self.peers.hosts = self.gather_objects(platform.node())

    @classmethod
    def join(cls, store: Any, name: str, index: int, count: int, accelerated: bool) -> "ProcessGroup":
        """Creates the process group once all processes have come to the store; `name` is new in every launch."""
        try:
            store.set_timeout(5 * _TIMEOUT_TO_CONNECT)
            dist.init_process_group(
                _choose_transports(accelerated),
                store=dist.PrefixStore(name, store),  # type: ignore[attr-defined]
                rank=index,
                world_size=count,
                timeout=_TIMEOUT_TO_CONNECT,
            )
            store.set_timeout(_TIMEOUT)
            return cls(accelerated)
        except RuntimeError as error:
            raise LaunchError(
                f"Process {index} of {count} could not connect to the others, although all had come. One of them has "
                "ended, or a firewall keeps other ports than MASTER_PORT closed, or Gloo uses the wrong network "
                "interface: set GLOO_SOCKET_IFNAME=eth0, say, on every host. torch.distributed reports: "
                f"{str(error).splitlines()[0]}"
            ) from error

    def _release(self) -> None:
        """Ends the thread that watches the other processes, and drops the groups, which ends the groups' threads."""
        self.peers.close()
        self.control = self.data = None

    def gather(self, integers: Sequence[int]) -> list[list[int]]:
        """Returns the integers of all processes, by rank."""
        rows: list[list[int]] = self.gather_control(integers)[:, : len(integers)].tolist()
        return rows

    def gather_control(
        self, integers: Sequence[int], more: Sequence[int] | NDArray[np.int64] = ()
    ) -> NDArray[np.int64]:
        """Exchanges `integers`, followed by `more`, with all processes; returns one row for each process, by rank.

        All control vectors have the same length, so that the vector of a process that makes a different call can be
        read, too.
        """
        sent = np.zeros(CONTROL_SIZE, np.int64)
        start = len(integers)
        sent[:start], sent[start : start + len(more)] = integers, more
        return self.gather_vectors(sent)

    def gather_vectors(self, vector: NDArray[Any]) -> NDArray[Any]:
        """Returns the vectors of all processes, which have the same length and type, by rank.

        The vectors are sent directly, so every process knows at once from which process a vector is missing.
        """
        sent = torch.from_numpy(vector)
        rows = np.empty((self.count, *vector.shape), vector.dtype)
        rows[self.index] = vector
        others = [rank for rank in range(self.count) if rank != self.index]
        messages = [self.receive(torch.from_numpy(rows[rank]), rank, _GATHER) for rank in others]
        messages += [self.send(sent, rank, _GATHER) for rank in others]
        for message in messages:
            message.wait()
        return rows

    def exchange(
        self, received: Sequence[tuple[Tensor, int]], sent: Sequence[tuple[Tensor, int]], tag: int
    ) -> list["PendingMessage"]:
        """Begins to receive and to send tensors, each from or to the rank beside it.

        Tensors on a GPU are all given to NCCL in one call: one by one, each would wait for the previous one.
        """
        if not any(tensor.is_cuda for tensor, _ in [*received, *sent]):
            messages = [self.receive(tensor, rank, tag) for tensor, rank in received]
            return messages + [self.send(tensor, rank, tag) for tensor, rank in sent]
        operations = [dist.P2POp(dist.irecv, tensor, rank, self.data, tag) for tensor, rank in received]
        operations += [dist.P2POp(dist.isend, tensor, rank, self.data, tag) for tensor, rank in sent]
        tensor, rank = [*received, *sent][0]
        with self._explain_lost_process(rank):
            return [PendingMessage(work, tensor, rank, self.peers) for work in dist.batch_isend_irecv(operations)]

    def send(self, tensor: Tensor, rank: int, tag: int) -> "PendingMessage":
        """Begins to send a tensor, which must not be written to until the message is waited for."""
        with self._explain_lost_process(rank):
            return PendingMessage(self.control.send([tensor], rank, tag), tensor, rank, self.peers)

    def receive(self, tensor: Tensor, rank: int, tag: int) -> "PendingMessage":
        """Begins to receive a tensor. Messages of one rank and tag arrive in the order in which they were sent."""
        with self._explain_lost_process(rank):
            return PendingMessage(self.control.recv([tensor], rank, tag), tensor, rank, self.peers)

    @contextmanager
    def _explain_lost_process(self, rank: int | None = None) -> Iterator[None]:
        """A context that replaces any RuntimeError of torch by a WorkerError that names the process that has ended."""
        try:
            yield
        except RuntimeError as error:
            raise self.peers.build_error(error, rank) from error

    def _is_lost(self, rank: int) -> bool:
        """Returns whether the connection to a process is broken, by asking for a message that is never sent."""
        try:
            self.control.recv([torch.empty(1)], rank, _NOTHING)
        except RuntimeError:
            return True
        return False

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns the values of all processes, by rank."""
        values: list[Any] = [None] * self.count
        with self._explain_lost_process():
            dist.all_gather_object(values, value, group=self.control)
        return values

    def broadcast(self, value: Any) -> Any:
        """Returns rank 0's value in every process."""
        values = [value]
        with self._explain_lost_process():
            dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]


class PendingMessage:
    """A message that is being sent or received; its tensor is in use until `wait` returns."""

    def __init__(self, work: Any, tensor: Tensor, rank: int, peers: Peers) -> None:
        self._work = work
        self._tensor = tensor
        self._rank = rank
        self._peers = peers

    def wait(self) -> None:
        """Waits until the tensor has been sent or received."""
        with self._peers.expect(self._rank):
            self._work.wait()


def view_as_tensor(vector: Any) -> Tensor:
    """Returns a tensor that shares the memory of a backend's vector."""
    tensor: Tensor = torch.as_tensor(vector)
    return tensor


def allocate_like(vector: Any, size: int) -> Any:
    """Returns a new vector of the same kind, type and device."""
    if not isinstance(vector, Tensor):
        return np.empty(size, vector.dtype)
    return torch.empty(size, dtype=vector.dtype, device=vector.device)


def _choose_transports(accelerated: bool) -> str:
    return "cpu:gloo,cuda:nccl" if accelerated else "gloo"


def open_store(host: str, port: int, listens: bool, on_loopback: bool) -> Any:
    """Returns the key-value store at this address; this process serves the store if `listens`.

    torch's own store would listen on every interface, so the socket is created here and passed to it.
    """
    descriptor = _listen(port, on_loopback) if listens else None
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        is_master=listens,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=descriptor,
        use_libuv=True,
    )


def _listen(port: int, on_loopback: bool) -> int:
    """Returns the descriptor of a listening socket, which torch's store closes."""
    everywhere = socket.has_dualstack_ipv6() and not on_loopback
    family = socket.AF_INET6 if everywhere else socket.AF_INET
    host = LOOPBACK if on_loopback else ""
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=everywhere).detach()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise LaunchError(
            f"The first of the launched processes cannot listen on port {port} of this host: {reason}. End "
            "the process that uses the port, or launch all with another MASTER_PORT (under TF_CONFIG: other ports in "
            "its cluster). If another process of this launch has rank 0 too, give each a RANK of its own."
        ) from error


def is_initialized() -> bool:
    """Returns whether a process group exists."""
    return dist.is_available() and dist.is_initialized()


def get_rank() -> int:
    """Returns this process's rank in the process group."""
    return dist.get_rank()


@functools.cache
def _destroy_groups_at_exit() -> None:
    """Registers an exit handler, once and before any use of a group, that ends the threads of all groups.

    A thread that frees a tensor while the interpreter exits needs the interpreter's lock. Python then ends the thread
    in the middle of C++ code, which aborts the process.
    """
    atexit.register(_destroy_groups)


def _destroy_groups() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
