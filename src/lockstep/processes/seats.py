"""The controller's workers by seat, the number of a process: starts each, and records which values it was sent."""

import functools
import pickle
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import cloudpickle

from lockstep.backends.base import Backend, Portable
from lockstep.core.plan import Plan
from lockstep.errors import PlatformError
from lockstep.exchange.barrier import require_ordered_writes
from lockstep.launch.worker import Worker
from lockstep.launch.worker_pool import WorkerPool, require_linux
from lockstep.processes.worker_loop import WorkerSetup, serve


def can_start_workers(backend: Backend) -> bool:
    """Returns whether this backend uses one process per device, and this platform can run several."""
    try:
        require_linux()
        require_ordered_writes()
    except PlatformError:
        return False
    return isinstance(backend, Portable)


class Stage(Enum):
    """The stages of a worker, from its start until it takes part in every step."""

    STARTING = "imports its modules and creates its model"
    WAITING = "has its model"
    PROVING = "computes a shard whose bits are compared"
    MEMBER = "takes part in every step"


@dataclass
class SentValues:
    """The last values that a worker was sent, of everything that the script may change between two commands."""

    recipe_version: int = 0
    last_version: int = 0  # before the last command
    plan: Plan | None = None
    controls: bytes = b""
    is_stale: bool = False  # whether its state is not the controller's
    pipelines: set[int] = field(default_factory=set)

    def send_again(self) -> None:
        """Makes the next command send everything, because the worker may not have received the last command."""
        self.plan, self.controls, self.is_stale = None, b"", True
        self.recipe_version = self.last_version
        self.pipelines.clear()


@dataclass
class Seat:
    """One worker, as the controller sees it."""

    number: int
    worker: Worker
    stage: Stage = Stage.STARTING
    sent: SentValues = field(default_factory=SentValues)
    is_waited_for: bool = False  # it was started with the trainer, and takes part without a proof
    proof: str = ""  # the digest that this worker must find
    since: float = field(default_factory=time.monotonic)  # when it came to this stage
    is_announced: bool = False  # whether the user knows that it is waited for

    def enter(self, stage: Stage, now: float) -> None:
        """Records that the worker has reached another stage at the time `now`."""
        self.stage, self.since = stage, now

    @property
    def name(self) -> str:
        """The worker's device and process, for messages."""
        return f"{self.worker.name} (pid {self.worker.pid})"


class Loss(NamedTuple):
    """A worker that has ended."""

    seat: int
    shard: int | None  # that it was computing
    when: str  # in words
    is_explained: bool  # whether the user knows why
    is_replaced: bool


class Seats:
    """The seats of one run. Seat 0 is the controller's, which needs no worker."""

    def __init__(
        self, backend: Backend, framework: str, pool: WorkerPool, eventfds: Sequence[int], regions: Sequence[int]
    ) -> None:
        assert isinstance(backend, Portable)
        self.devices: tuple[str, ...] = ()  # by seat
        self.taken: dict[int, Seat] = {}
        self._backend, self._portable = backend, backend
        self._framework = framework
        self._pool = pool
        self._eventfds, self._regions = tuple(eventfds), tuple(regions)

    def start(self, numbers: Iterable[int], is_waited_for: bool = False) -> None:
        """Starts a worker in each of these seats, in the background, and gives it the model as it is now.

        The next step waits for the workers if `is_waited_for`. Others join later, and are then sent the state again.
        """
        numbers = list(numbers)
        if not numbers:
            return
        if self.taken:
            self._backend.controls()  # refuses what the running workers lack, before the pickle takes it as known
        recipe, version = self.dump(), self.recipe_version
        for number in numbers:
            device = self.devices[number]
            setup = WorkerSetup(
                self._framework, recipe, device, number, len(self.devices), self._eventfds, self._regions
            )
            worker = self._pool.start(device, functools.partial(serve, setup))
            sent = SentValues(is_stale=not is_waited_for, recipe_version=version, last_version=version)
            self.taken[number] = Seat(number, worker, sent=sent, is_waited_for=is_waited_for)

    @property
    def recipe_version(self) -> int:
        """The number of the recipe that a worker must have."""
        return self._portable.recipe_version

    def dump(self) -> "PackedRecipe":
        """Returns the recipe as it is now, for workers."""
        return PackedRecipe(self._portable.dump())

    def release(self, number: int) -> None:
        """Closes what belongs to a worker that has ended."""
        self.taken.pop(number).worker.stop()

    def select(self, *stages: Stage) -> list[Seat]:
        """Returns the seats whose workers are in one of these stages, in order."""
        return [seat for _, seat in sorted(self.taken.items()) if seat.stage in stages]


class PackedRecipe:
    """A recipe that is already pickled, and is not copied for each worker; unpickling returns the recipe."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return cloudpickle.loads, (pickle.PickleBuffer(self._data),)
