"""This process, the controller, and the workers it started on this host.

The controller is the first process and the only one that decides. Each command goes to every worker and gets one
answer. The answer to a step is only read before the next command, so that workers and controller apply their updates
side by side. What the script changed between two commands travels with the second.

When a worker is lost, or the script is interrupted, all workers end; the script's own model is whole, and the next use
starts new workers from it.
"""

import functools
import os
import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from typing import Any

import cloudpickle

from lockstep.backends.base import Backend, Portable, Work
from lockstep.core.batches import Rows, transform
from lockstep.core.plan import Plan
from lockstep.data.reader import Readers
from lockstep.errors import PeerFailed, WorkerError
from lockstep.exchange.barrier import Barrier, require_ordered_writes
from lockstep.exchange.shared_memory import SharedMemoryExchange
from lockstep.launch import shm
from lockstep.launch.shm import Region
from lockstep.launch.worker_pool import WorkerPool, require_linux
from lockstep.processes import commands
from lockstep.processes.base import Value
from lockstep.processes.commands import Command
from lockstep.processes.pipeline_transfer import PipelineSender
from lockstep.processes.worker_loop import NO_MARK, STEP_MARK, Message, WorkerSetup, serve
from lockstep.training.step import TURN, Member, read_examples


class LocalWorkers:
    """The controller with one worker for every group of devices but the first."""

    first = True

    def __init__(self, backend: Backend, framework: str, groups: Sequence[Sequence[str]]) -> None:
        require_linux()
        require_ordered_writes()
        assert isinstance(backend, Portable)
        recipe = _PickledRecipe(backend.dump())
        backend.touched()  # what the script wrote until now is in the recipe
        self.devices = tuple(device for group in groups for device in group)
        self.closed = False
        self._replicas = number_replicas(groups)
        self._backend = backend
        sums, self._messages, control = (Region.create(name) for name in ("leaves", "parcels", "control"))
        self._regions = (sums, self._messages, control)
        bells = tuple(os.eventfd(0) for _ in groups)
        self._close_bells = weakref.finalize(self, _close, bells)
        self._pipelines = PipelineSender()
        self._readers = Readers(backend.stage, (0, len(groups)))
        self._readers_for_others = Readers(place=(0, len(groups)))  # not staged: what they read is sent on
        descriptors = tuple(region.descriptor for region in self._regions)
        try:
            self._workers = WorkerPool([group[0] for group in groups[1:]], share=[*descriptors, *bells])
            barrier = Barrier(0, control, bells, self._workers.pidfds)
            open_exchange = functools.partial(SharedMemoryExchange, backend, sums, barrier, index=0)
            self.member = Member(backend, open_exchange, self._replicas[0], self._readers.read)
            setups = [
                WorkerSetup(framework, recipe, tuple(group), tuple(replicas), index, bells, descriptors)
                for index, (group, replicas) in enumerate(zip(groups, self._replicas, strict=True))
            ]
            self._workers.start(cloudpickle.dumps(functools.partial(serve, setup)) for setup in setups[1:])
        except BaseException:
            self.close()
            raise
        self._plan: Plan | None = None  # the one that every worker has
        self._controls = b""  # likewise
        self._stale = False  # whether the script's state has not reached the workers
        self._waiting = [True] * (len(groups) - 1)  # each worker says once that it is ready

    @property
    def pids(self) -> list[int]:
        """The workers' process ids."""
        return self._workers.pids

    def agree(self, stop: bool, terminated: bool) -> tuple[bool, bool]:
        """Return both as they are: the callbacks run here."""
        return stop, terminated

    def share(self, make: Callable[[], Value]) -> Value:
        """Return what `make` gives: this process is the first."""
        return make()

    def settle(self) -> None:
        """Do nothing: what callbacks have changed travels with the next command."""

    def abandon(self, terminated: bool = False) -> None:
        """Do nothing: the workers wait for commands alone."""

    def replicas(self) -> list[list[int]]:
        """Return the numbers of each process's replicas."""
        return self._replicas

    def ready(self) -> None:
        """Wait until every worker has its model."""
        with self._closed_if_broken():
            self._settle()

    @contextmanager
    def step(self, works: list[Work], plan: Plan) -> Iterator[Work]:
        """Send the step to the workers and hand out this process's part; their answers are read before the next."""
        with self._closed_if_broken():
            new_plan = plan if plan != self._plan else None
            self._send(functools.partial(commands.step, new_plan), works, STEP_MARK)
            self._plan = plan
            try:
                yield works[0]
            except PeerFailed:
                lost = self._workers.poll_dead()
                if lost is not None:  # the others may wait for it at the barrier and never answer
                    self._workers.raise_end(lost)
                self._answers()
                raise WorkerError(
                    "A worker failed in this step and did not say why. The step was not made. Run it again."
                ) from None
            except Exception:
                self._read_and_ignore_answers()
                # If it was raised after the commit, the workers made the step and this process did not.
                self._controls, self._stale = b"", True
                raise

    def gather(self, command: Command, works: Sequence[Work]) -> list[Any]:
        """Return all answers, this process's first."""
        with self._closed_if_broken():
            self._send(command, works, NO_MARK)
            try:
                own = command(self.member, works[0])
            except Exception:
                self._read_and_ignore_answers()
                raise
            return [own, *self._answers()]

    def close(self) -> None:
        """End the workers and let go of the shared memory."""
        if self.closed:
            return
        self.closed = True
        if hasattr(self, "_workers"):  # else not one worker could be started
            self._workers.close()
        self._readers.close()
        self._readers_for_others.close()
        self._pipelines.close()
        if hasattr(self, "member"):
            self.member.close()
        for region in self._regions:
            region.close()
        self._close_bells()

    @contextmanager
    def _closed_if_broken(self) -> Iterator[None]:
        """End the workers if one is lost, or if an interrupt has left a message unread."""
        try:
            yield
        except (WorkerError, KeyboardInterrupt, SystemExit, GeneratorExit):
            self.close()
            raise

    def _send(self, command: Command, works: Sequence[Work], mark: bytes) -> None:
        """Send a command to every worker, with what the script has changed since the last."""
        self._settle()
        with TURN:
            controls = pickle.dumps(self._backend.controls())
            # Inside, because a comparison of the whole state runs with the threads and switches of a step.
            with self._backend.computing(works[0]):
                self._stale |= self._backend.touched()
        changed_controls = controls if controls != self._controls else None
        state = self._backend.state() if self._stale else None
        sent = self._for_workers(works[1:])
        changes = self._pipelines.take_changes()
        messages = [Message(command, work, changed_controls, state, changes) for work in sent]
        try:
            packed = shm.pack(messages, self._messages)
        except BaseException:
            self._pipelines.repeat()  # the workers have not got these changes
            raise
        for index, data in enumerate(packed):
            self._waiting[index] = True
            self._workers.send(index, mark + data)
        self._controls, self._stale = controls, False

    def _settle(self) -> None:
        """Read the answers that are due. A failure here came after a commit, so that replica is lost."""
        try:
            self._answers()
        except Exception:
            self.close()
            raise

    def _read_and_ignore_answers(self) -> None:
        """Read the answers to a command in which this process has failed itself: its own error is raised."""
        with suppress(Exception):
            self._answers()

    def _for_workers(self, works: Sequence[Work]) -> list[Work]:
        """Return the works with arrays that any process can read, and rows whose pipeline the workers have."""
        rows = [piece for work in works for piece in work.shards.values() if isinstance(piece, Rows)]
        if rows and not rows[0].pipeline.compiled.is_read_in_workers:
            # Read once for all workers: a reader prefetches what would come next, for one caller.
            examples = dict(zip(rows, self._readers_for_others.read(rows), strict=True))
            works = [read_examples(work, lambda own: [examples[piece] for piece in own]) for work in works]

        def leaf(value: Any) -> Any:
            return self._pipelines.number(value) if isinstance(value, Rows) else self._backend.host(value)

        return [replace(work, pieces=transform(work.pieces, leaf)) for work in works]

    def _answers(self) -> list[Any]:
        """Return the workers' answers to the last command; raise what one of them raised."""
        answers = []
        failures: list[Exception] = []
        for index, waiting in enumerate(self._waiting):
            if waiting:
                self._waiting[index] = False
                try:
                    answers.append(pickle.loads(self._workers.receive(index)))
                except PeerFailed:  # it reports that another has failed
                    pass
                except Exception as error:
                    failures.append(error)
        if failures:
            # A worker that failed may not have taken over what came with the command: all of it is sent again.
            self._plan, self._controls, self._stale = None, b"", True
            self._pipelines.repeat()
            raise next((error for error in failures if isinstance(error, WorkerError)), failures[0])
        return answers


def number_replicas(groups: Sequence[Sequence[str]]) -> list[list[int]]:
    """Number the replicas of each process, on through the processes.

    >>> number_replicas([["cuda:0", "cuda:1"], ["cuda:2"]])
    [[0, 1], [2]]
    """
    numbers = count()
    return [[next(numbers) for _ in group] for group in groups]


class _PickledRecipe:
    """A recipe that is pickled already; unpickled, it is the recipe."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return cloudpickle.loads, (self._data,)


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
