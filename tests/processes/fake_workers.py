"""A controller with workers that are threads or nothing at all: eventfds stand for their processes and channels."""

import os
import pickle
import time
from collections import deque
from contextlib import ExitStack

from lockstep.core.lateness import Deadline
from lockstep.core.membership_events import Admitted
from lockstep.errors import AttemptAborted, WorkerError
from lockstep.exchange.barrier import StepWords, WorkerBarrier
from lockstep.launch.shm import Region
from lockstep.processes.coordinator import Coordinator
from lockstep.processes.seats import Seat, Stage


class FakeWorker:
    """What the controller sees of a worker."""

    def __init__(self, seat):
        self.name, self.pid = f"cpu:{seat}", 4000 + seat
        self.pidfd, self._channel = os.eventfd(0), os.eventfd(0, os.EFD_SEMAPHORE)
        self._answers = deque()
        self.sent = []
        self.ended = False

    def fileno(self):
        return self._channel

    def send(self, data):
        if self.ended:
            raise WorkerError(f"Worker {self.name} was killed by SIGKILL.")
        self.sent.append(data)

    def answer(self, value=None):
        """Sends the answer to a command, or the exception that it raised."""
        self._answers.append(value)
        os.eventfd_write(self._channel, 1)

    def has_message(self):
        return bool(self._answers) or self.ended

    def receive(self):
        if not self._answers:
            raise WorkerError(f"Worker {self.name} was killed by SIGKILL.")
        os.eventfd_read(self._channel)
        value = self._answers.popleft()
        if isinstance(value, Exception):
            raise value
        return pickle.dumps(value)

    def die(self):
        """Ends, as its pidfd shows."""
        self.ended = True
        os.eventfd_write(self.pidfd, 1)

    stop = die

    def has_ended(self):
        return self.ended

    def describe_end(self):
        return "was killed by SIGKILL"

    def close(self):
        os.close(self.pidfd)
        os.close(self._channel)


class FakeWorld:
    """A coordinator and its workers, all of them members. `lines` are those that the user would read."""

    def __init__(self, num_seats, deadline=None, clock=time.monotonic):
        self._stack = ExitStack()
        control = Region.create("control")
        self._stack.callback(control.close)
        eventfds = [os.eventfd(0) for _ in range(num_seats)]
        for eventfd in eventfds:
            self._stack.callback(os.close, eventfd)
        self.seats = {number: Seat(number, FakeWorker(number), Stage.MEMBER) for number in range(1, num_seats)}
        for seat in self.seats.values():
            self._stack.callback(seat.worker.close)
        self.lines = []
        self.eventfds = eventfds
        self.words = StepWords(control, num_seats)
        self.barriers = {number: WorkerBarrier(number, control, eventfds) for number in self.seats}
        self.coordinator = Coordinator(control, eventfds, self.seats, self.lines.append, deadline or Deadline(), clock)
        for number in self.seats:
            self.coordinator.watch(number)
            self.coordinator.apply(Admitted(number))
        self.ends = [self.coordinator, *self.barriers.values()]  # of the barrier, by seat

    @property
    def workers(self):
        """The workers by seat."""
        return {number: seat.worker for number, seat in self.seats.items()}

    def replace(self, number):
        """Puts another worker in the seat of one that has ended."""
        self.seats[number] = Seat(number, FakeWorker(number), Stage.MEMBER)
        self._stack.callback(self.seats[number].worker.close)
        self.coordinator.watch(number)

    @property
    def members(self):
        """The seats of the members, in order."""
        return tuple(sorted(self.coordinator.state.members))

    def begin(self, step=0):
        """Begins the next attempt in every member; returns its number."""
        self.coordinator.begin(step)
        attempt = self.coordinator.state.attempt
        workers = [number for number in self.members if number]
        for number in workers:
            self.barriers[number].begin(attempt, self.members)
        self.coordinator.expect(workers)
        return attempt

    def take_part(self, seat, function):
        """Runs the part of a step of one member, and has it answer as a process does; returns its result."""
        if seat == 0:
            return self._lead(function)
        try:
            result = function()
        except Exception as error:
            self.workers[seat].answer(None if isinstance(error, AttemptAborted) else error)
            raise
        self.workers[seat].answer()
        return result

    def _lead(self, function):
        coordinator = self.coordinator
        try:
            result = function()
            coordinator.collect()
        except AttemptAborted:
            coordinator.collect()
            coordinator.raise_if_given_up()
            raise
        except Exception:
            coordinator.fail()
            coordinator.collect()
            raise
        return result

    def close(self):
        self._stack.close()
