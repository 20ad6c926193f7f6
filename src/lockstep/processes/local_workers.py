"""This process, the controller, and the workers that it has started on this host.

The controller is the only process that decides. Each command is sent to every member and has one answer. The answer to
a step is read before the next command, so that workers and controller apply their updates at the same time.

A worker that is lost before a step's commit costs an attempt: the others make the step again, with the same bits.
Another process is started in its seat, and becomes a member at a step boundary, once it has computed one shard of a
step with the controller's bits (core/membership.py, processes/coordinator.py). A script that is interrupted ends all
workers; its model is valid, and the next use starts new workers from that model.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lockstep.backends.base import Backend
from lockstep.core.assignment import Balance, Suspects, move_shards
from lockstep.core.attempt import Observer
from lockstep.core.lateness import Deadline
from lockstep.core.membership import CONTROLLER
from lockstep.core.plan import Plan
from lockstep.core.types import Phases, Work
from lockstep.data.reader import Readers
from lockstep.errors import AttemptAborted, BusyError, WorkerError
from lockstep.exchange.barrier import require_ordered_writes
from lockstep.exchange.base import Exchange
from lockstep.exchange.in_process import InProcessExchange
from lockstep.exchange.shared_memory import SharedMemoryExchange
from lockstep.launch.deferred_signals import defer_all_interrupts
from lockstep.launch.shared_files import SharedFiles
from lockstep.launch.shm import Region
from lockstep.launch.worker_pool import WorkerPool, require_linux
from lockstep.processes.attempt_measurements import AttemptMeasurements
from lockstep.processes.base import Value
from lockstep.processes.command_sender import CommandSender
from lockstep.processes.commands import Command
from lockstep.processes.coordinator import Coordinator
from lockstep.processes.newcomers import Newcomers
from lockstep.processes.seats import Seats, Stage
from lockstep.training.step import TURN, Member

_MIN_SEATS = 16  # workers that can join later need no other memory and no new eventfds


class LocalWorkers:
    """The controller, and one worker for every other device.

    The first step waits for the workers of `devices`. The workers of the devices `later` and `spare` join when they are
    ready. The script did not ask for the `spare` devices: if something cannot be sent to their workers, or if the
    workers refuse it, these workers end and the training goes on.
    """

    first, route = True, ""

    def __init__(
        self,
        backend: Backend,
        framework: str,
        devices: Sequence[str],
        later: Sequence[str],
        spare: Sequence[str],
        report: Callable[[str], None],
        deadline: Deadline,
    ) -> None:
        require_linux()
        require_ordered_writes()
        self._attempts = AttemptMeasurements(report)
        self._backend, self._report = backend, (report := self._attempts.announce)
        self._has_spare = bool(spare)
        self._is_closed = self._is_interrupted = False
        self._command = threading.Lock()  # held during a command
        self._plan: Plan | None = None  # of the last attempt
        self._has_computed = True  # whether the last attempt had shards to compute
        self._blamed_shards: dict[int, set[int]] = {}  # what a worker has computed in an attempt in which it raised
        self._suspects = Suspects()
        self._balance = Balance()
        names = (*devices, *later, *spare)
        self._num_seats = max(len(names), _MIN_SEATS)
        files = SharedFiles(self._num_seats, ["control", "partial-sums", "messages", "proofs"])
        self._close_files = weakref.finalize(self, SharedFiles.close, files)
        control, sums, *messages = files.regions
        self._pool = WorkerPool(share=[*files.descriptors, *files.eventfds])
        self._seats = Seats(backend, framework, self._pool, files.eventfds, files.descriptors)
        self._sender = CommandSender(backend, self._seats, messages, (0, len(names)))
        self._readers = Readers(backend.stage, (0, len(names)))
        self._coordinator = Coordinator(control, files.eventfds, self._seats.taken, report, deadline)
        open_exchange = functools.partial(_open_exchange, backend, sums, self._coordinator)
        self.member = Member(backend, open_exchange, [CONTROLLER], self._readers.read)
        self._newcomers = Newcomers(self._seats, self._sender, self._coordinator, self.member, report, deadline)
        self._seats.devices = names
        try:
            self._seats.start(range(1, len(devices)), is_waited_for=True)
            self._seats.start(range(len(devices), len(names)))
        except BaseException:
            self.close()
            raise
        backend.touched()  # what the script has written until now is in the recipe

    @property
    def closed(self) -> bool:
        """Whether these processes can no longer be used, because `close` was called or a command was interrupted."""
        if self._is_closed or not self._is_interrupted:
            return self._is_closed
        return not self._command.locked() and self._is_interrupted  # again: a thread's command may have just ended

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that are to train, by seat; not all may have a member at present."""
        return self._seats.devices

    @property
    def pids(self) -> list[int | None]:
        """The process ids of the workers that are members."""
        return [seat.worker.pid for seat in self._seats.select(Stage.MEMBER)]

    def agree(self, stop: bool, terminated: bool) -> tuple[bool, bool]:
        """Returns both values unchanged, because the callbacks run in this process."""
        return stop, terminated

    def share(self, make: Callable[[], Value]) -> Value:
        """Returns what `make` returns, because this process is the first."""
        return make()

    def observe(self, observer: Observer | None) -> None:
        """Passes every attempt to make a step from now on to the observer, once the workers' answers have been read."""
        self._attempts.observer = observer

    def settle(self) -> None:
        """Does nothing, because what callbacks have changed is sent with the next command."""

    def end_quiet_period(self) -> None:
        """Records the present state as known to the workers: only steps have changed it, which workers made, too."""
        with TURN:
            self._backend.touched()

    def abandon(self, terminated: bool = False) -> None:
        """Does nothing: workers only wait for commands, so they need not know that the controller has failed."""

    def replicas(self) -> list[list[int]]:
        """Returns the one replica of each process, which has the number of the process's seat."""
        state = self._coordinator.state
        return [[seat] for seat in sorted(state.members | state.admitted)]

    def ready(self) -> None:
        """Waits until every worker that was started with this object has created its model."""
        with self._closed_if_broken():
            answers, is_committed = self._coordinator.collect(), self._coordinator.is_committed
            if answers and is_committed and self._has_computed:
                theirs = {seat: seconds for seat, (seconds, _) in answers.items()}
                self._balance.note({CONTROLLER: self.member.compute_seconds, **theirs}, self._coordinator.step_seconds)
            self._attempts.conclude(answers, self._newcomers.update(), is_committed)

    def resize(self, devices: Sequence[str]) -> bool:
        """Trains on these devices from now on; new workers join when they are ready. Returns False if it cannot."""
        if len(devices) > self._num_seats or tuple(devices[:1]) != self.devices[:1]:
            return False
        self.ready()
        with self._closed_if_broken():
            self._change_devices(devices)
        return True

    def _change_devices(self, devices: Sequence[str]) -> None:
        changed = [seat for seat, name in enumerate(self.devices) if seat >= len(devices) or devices[seat] != name]
        for seat in changed:
            if seat in self._seats.taken:
                self._coordinator.dismiss(seat)
                self._seats.release(seat)
        before, self._seats.devices = self.devices, tuple(devices)
        try:
            self._seats.start(seat for seat in range(1, len(devices)) if seat not in self._seats.taken)
        except Exception:
            self._seats.devices = before[: 1 + max(self._seats.taken, default=0)]
            raise

    def assign(self, num_shards: int) -> Plan:
        """Returns which member computes which shard in the next command; members may have changed since the last."""
        self.ready()
        state = self._coordinator.state
        plan = Plan.from_counts(self._balance.choose([seat for (seat,) in self.replicas()], num_shards))
        if not state.blamed or self._plan is None:
            self._blamed_shards = {}
        else:  # in any attempt of this step
            for seat in state.blamed:
                self._blamed_shards.setdefault(seat, set()).update(self._plan.shards_of([seat]))
        return move_shards(plan, {CONTROLLER: state.suspects | self._suspects.shards, **self._blamed_shards})

    @contextmanager
    def step(self, works: list[Work], plan: Plan) -> Iterator[Work]:
        """Sends the step to the workers and yields this process's part. The answers are read with the next command.

        Raises `AttemptAborted` if a worker was lost before the step counted, so that the step must be made again.
        """
        with self._closed_if_broken():
            with self._alone_if_refused():
                own = self._newcomers.send_proof(works[0])
            if len(plan.replicas) == 1:
                self._attempts.begin(self.member.laps, own, plan)
                yield own
                self._coordinator.note_step_alone(own.step)
                self._attempts.commit_alone()
                return
            coordinator, seats = self._coordinator, self._seats.select(Stage.MEMBER)
            attempt, members = coordinator.state.attempt + 1, tuple(sorted(plan.replicas))
            with self._alone_if_refused():
                messages = self._sender.pack_step(seats, works[1:], plan, attempt, members, self._attempts.is_observed)
            coordinator.begin(own.step)
            self._attempts.begin(self.member.laps, own, plan)
            self._plan, self._has_computed = plan, own.phases is not Phases.UPDATE
            coordinator.expect(self._sender.send(seats, messages, plan))
            try:
                yield own
                self._attempts.end_own_part()
            except AttemptAborted:
                self._attempts.abort(coordinator.collect(), coordinator.losses)
                with self._alone_if_refused():
                    coordinator.raise_if_given_up()
                raise
            except Exception:
                if coordinator.is_committed:  # the workers make the step and this process does not
                    for seat in seats:
                        seat.sent.send_again()
                coordinator.fail()
                coordinator.collect()
                raise

    def gather(self, command: Command, works: Sequence[Work]) -> list[Any]:
        """Returns the results of all members; raises `AttemptAborted` if one was lost, whose result is missing."""
        with self._closed_if_broken():
            coordinator, seats = self._coordinator, self._seats.select(Stage.MEMBER)
            with self._alone_if_refused():
                messages = self._sender.pack(command, seats, works[1:])
            coordinator.expect(self._sender.send(seats, messages))
            try:
                own = command(self.member, works[0])
            except Exception:
                coordinator.collect()
                raise
            answers = coordinator.collect()
            with self._alone_if_refused():
                for error in coordinator.errors.values():
                    raise error
            if len(answers) < len(seats):
                lost = [work.shards for seat, work in zip(seats, works[1:], strict=True) if seat.number not in answers]
                self._suspects.add({shard for shards in lost for shard in shards})
                raise AttemptAborted
            self._suspects.clear()
            return [own, *(answers[seat] for seat in sorted(answers))]

    def close(self) -> None:
        """Ends the workers and frees the shared memory. Idempotent."""
        if self._is_closed:
            return
        with defer_all_interrupts():
            self._is_closed = True
            self._pool.close()
            self._sender.close()
            self.member.close()
            self._close_files()
        self._sender.close_readers()  # they may wait for the script's code, and Ctrl-C must be able to end that
        self._readers.close()

    @contextmanager
    def _closed_if_broken(self) -> Iterator[None]:
        """Ends the workers if the block raises WorkerError or is interrupted, because messages may then be unread."""
        if self._command.locked():
            raise BusyError(
                "The workers are in the middle of another call, which another thread has made or a signal has "
                "interrupted. Use a trainer from one thread and between its calls, e.g. in a callback."
            )
        with self._command:  # released by C code, so no second Ctrl-C can come before it is
            self._is_interrupted = True  # also if a second Ctrl-C comes before the workers are ended
            try:
                yield
            except (WorkerError, KeyboardInterrupt, SystemExit, GeneratorExit):
                self.close()
                raise
            except Exception:
                self._is_interrupted = False
                raise
            self._is_interrupted = False

    @contextmanager
    def _alone_if_refused(self) -> Iterator[None]:
        """If the block raises and the script did not ask for workers, ends them, so that this process goes on alone."""
        try:
            yield
        except Exception as error:
            if not self._has_spare or isinstance(error, WorkerError):  # a shard that ends processes is not tried here
                raise
            self._change_devices(self.devices[:1])
            self._report(f"training goes on with {self.devices[0]} alone: a worker could not take part: {error}")
            raise AttemptAborted from error


def _open_exchange(backend: Backend, sums: Region, coordinator: Coordinator, plan: Plan) -> Exchange:
    alone = len(plan.replicas) == 1
    return InProcessExchange(backend) if alone else SharedMemoryExchange(backend, sums, coordinator, plan, CONTROLLER)
