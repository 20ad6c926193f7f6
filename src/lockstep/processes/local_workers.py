"""This process and the workers it started on this host.

The script's own process is the first member and the only one that decides. Each
command goes to every worker and gets one answer. The answer to a step is only
read before the next command, so that workers and script finish their updates side
by side. What the script changed between two commands travels with the second.

When a worker is lost, or the script is interrupted, all workers end; the script's own model is
whole, and the next use starts new workers from it.
"""

import functools
import os
import pickle
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import cloudpickle

from lockstep.backends.base import Backend, Portable, Work
from lockstep.core.batches import Rows, transform
from lockstep.core.metrics import Sums
from lockstep.core.plan import Plan
from lockstep.core.step import TURN, Member, filled
from lockstep.data.reader import Readers
from lockstep.errors import PeerFailed, WorkerError
from lockstep.exchange.barrier import Barrier, require_ordered_writes
from lockstep.exchange.in_process import InProcessExchange
from lockstep.exchange.shared_memory import SharedMemoryExchange
from lockstep.launch import shm
from lockstep.launch.shm import Region
from lockstep.launch.signals import defer_interrupts
from lockstep.launch.worker_pool import WorkerPool, require_linux
from lockstep.processes.base import Value, numbered
from lockstep.processes.pipeline_transfer import PipelineSender
from lockstep.processes.worker_loop import STEP_MARK, Command, WorkerSetup, serve


class LocalWorkers:
    """One worker for every group of devices but the first."""

    first = True

    def __init__(self, backend: Backend, home: str, groups: Sequence[Sequence[str]]) -> None:
        require_linux()
        require_ordered_writes()
        assert isinstance(backend, Portable)
        recipe = _Dump(backend.dump())
        backend.touched()
        self.devices = tuple(device for group in groups for device in group)
        self._groups = groups
        self._backend = backend
        self._leaves, self._parcels, control = (Region.create(name) for name in ("leaves", "parcels", "control"))
        self._regions = (self._leaves, self._parcels, control)
        self._bells = tuple(os.eventfd(0) for _ in groups)
        self._hang_up = weakref.finalize(self, _close, self._bells)
        self.closed = False
        self._shipper = PipelineSender()
        self._readers = Readers(backend.stage, (0, len(groups)))
        self._others = Readers(place=(0, len(groups)))  # what this process reads for the others stays as it is
        self.member = Member(
            backend, InProcessExchange(backend), defer_interrupts, time.perf_counter, self._readers.read
        )
        descriptors = tuple(region.descriptor for region in self._regions)
        try:
            self._workers = WorkerPool([group[0] for group in groups[1:]], share=[*descriptors, *self._bells])
            self._barrier = Barrier(0, control, self._bells, self._workers.pidfds)
            berths = [
                WorkerSetup(home, recipe, tuple(group), index, self._bells, descriptors)
                for index, group in enumerate(groups)
            ]
            self._workers.start(cloudpickle.dumps(functools.partial(serve, berth)) for berth in berths[1:])
        except BaseException:
            self.close()
            raise
        self._plan: Plan | None = None
        self._controls = b""
        self._stale = False  # whether the script's state has not reached the workers
        self._waiting = [True] * (len(groups) - 1)  # each says once that it is ready

    def agree(self, stop: bool, terminated: bool) -> tuple[bool, bool]:
        """The callbacks run here."""
        return stop, terminated

    def share(self, make: Callable[[], Value]) -> Value:
        """The first process is this one."""
        return make()

    def settle(self) -> None:
        """It travels with the next command."""

    def abandon(self, terminated: bool = False) -> None:
        """The workers wait for commands alone."""

    def replicas(self) -> list[list[int]]:
        """Replicas are numbered through the processes."""
        return numbered(self._groups)

    def ready(self) -> None:
        """Waits until every worker has its model."""
        with self._whole_or_closed():
            self._settle()

    def step(self, works: list[Work], plan: Plan) -> Sums:
        """One step by everyone; the workers' answers are read before the next command."""
        with self._whole_or_closed():
            self._tell("step", works, plan if plan != self._plan else None)
            if plan != self._plan:
                self.member.exchange = SharedMemoryExchange(self._backend, self._leaves, self._barrier, plan, 0)
                self._plan = plan
            try:
                return self.member.step(works[0])
            except PeerFailed:
                lost = self._workers.poll_dead()
                if lost is not None:  # the others may wait for it at the barrier and never answer
                    self._workers.raise_end(lost)
                self._answers()
                raise WorkerError(
                    "A worker failed in this step and did not say why. The step was not made. Run it again."
                ) from None
            except Exception:
                self._drain()
                self._controls, self._stale = b"", True  # after the commit they made the step, and this process did not
                raise

    def gather(self, method: str, works: list[Work]) -> list[dict[int, Any]]:
        """Everyone's results."""
        with self._whole_or_closed():
            self._tell(method, works, None)
            try:
                own = getattr(self.member, method)(works[0])
            except Exception:
                self._drain()
                raise
            return [own, *self._answers()]

    def close(self) -> None:
        """Ends the workers and lets go of the shared memory."""
        if self.closed:
            return
        self.closed = True
        if hasattr(self, "_workers"):
            self._workers.close()
        self._readers.close()
        self._others.close()
        self._shipper.close()
        self.member.exchange.close()
        for region in self._regions:
            region.close()
        self._hang_up()

    @contextmanager
    def _whole_or_closed(self) -> Iterator[None]:
        """Ends the workers if one is lost or an interrupt left a message unread."""
        try:
            yield
        except (WorkerError, KeyboardInterrupt, SystemExit, GeneratorExit):
            self.close()
            raise

    def _tell(self, method: str, works: list[Work], plan: Plan | None) -> None:
        """Sends a command to every worker, with what the script changed since the last."""
        self._settle()
        with TURN:
            controls = pickle.dumps(self._backend.controls())
            with self._backend.computing(works[0]):
                self._stale |= self._backend.touched()
        turned = controls if controls != self._controls else None
        state = self._backend.state() if self._stale else None
        sent = self._travelling(works[1:])
        freight = self._shipper.freight()
        commands = [Command(method, work, plan, turned, state, freight) for work in sent]
        mark = STEP_MARK if method == "step" else b" "
        for index, message in enumerate(shm.pack(commands, self._parcels)):
            self._waiting[index] = True
            self._workers.send(index, mark + message)
        self._controls, self._stale = controls, False

    def _settle(self) -> None:
        """Reads what is still to be answered. A failure here came after a commit, so that replica is lost."""
        try:
            self._answers()
        except Exception:
            self.close()
            raise

    def _drain(self) -> None:
        """Reads the answers to a command that this process itself has failed; its own error is the one that counts."""
        with suppress(Exception):
            self._answers()

    def _travelling(self, works: list[Work]) -> list[Work]:
        """The same works with arrays that any process can read, and rows of which the workers know the pipeline."""
        rows = [piece for work in works for piece in work.shards.values() if isinstance(piece, Rows)]
        if (
            rows and not rows[0].pipeline.compiled.is_read_in_workers
        ):  # one read for all workers: what comes next is one guess
            found = dict(zip(rows, self._others.read(rows), strict=True))
            works = [filled(work, lambda own: [found[piece] for piece in own]) for work in works]

        def leaf(value: Any) -> Any:
            return self._shipper.numbered(value) if isinstance(value, Rows) else self._backend.host(value)

        return [replace(work, pieces=transform(work.pieces, leaf)) for work in works]

    def _answers(self) -> list[Any]:
        """The workers' answers to the last command; raises what one of them raised."""
        answers = []
        failures: list[Exception] = []
        for index, waiting in enumerate(self._waiting):
            if waiting:
                self._waiting[index] = False
                try:
                    answers.append(pickle.loads(self._workers.receive(index)))
                except PeerFailed:  # not the cause, only one who heard of it
                    pass
                except Exception as error:
                    failures.append(error)
        if failures:
            # A worker that failed may not have taken over what came with the command: all of it is sent again.
            self._plan, self._controls, self._stale = None, b"", True
            self._shipper.again()
            raise next((error for error in failures if isinstance(error, WorkerError)), failures[0])
        return answers


class _Dump:
    """A recipe that is pickled already; unpickled, it is the recipe."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return cloudpickle.loads, (self._data,)


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
