"""The processes of one session: started when they are needed, and changed in number between two steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from lockstep.core.growth import GrowthRule, count_replicas
from lockstep.devices import choose_similar
from lockstep.errors import DeviceError
from lockstep.launch.host import Host
from lockstep.processes.base import Processes


class StartProcesses(Protocol):
    """Protocol for a function that starts processes."""

    def __call__(self, devices: Sequence[str], later: Sequence[str] = (), spare: Sequence[str] = ()) -> Processes:
        """Starts processes on all these devices; those on `later` and `spare` devices join when they are ready.

        The script did not ask for the `spare` devices, so if these cannot take part, training goes on without them.
        """


@dataclass(frozen=True)
class ProcessStarter:
    """How a session starts processes. `resolve` returns the names of the devices that a script has given."""

    start: StartProcesses
    resolve: Callable[[Any], tuple[str, ...]]


class GrowthPlan:
    """How a session with one replica gets more CPU replicas, if the script did not say how many."""

    def __init__(self, read_host: Callable[[], Host], report: Callable[[str], None]) -> None:
        self.rule = GrowthRule()
        self.read_host = read_host
        self.report = report


class SessionProcesses:
    """Owns the processes. Every start uses the devices that were chosen last."""

    def __init__(self, start: StartProcesses, devices: Sequence[str], growth: GrowthPlan | None) -> None:
        self._start = start
        self._devices = tuple(devices)
        self._growth = growth
        self.has_grown = False  # whether the number of devices was chosen here
        self._last_step: tuple[float, int, int] | None = None  # its seconds, shards, and threads for each shard
        self._running: Processes | None = start(self._devices)

    @property
    def is_running(self) -> bool:
        """Whether the processes are running."""
        return self._running is not None and not self._running.closed

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of the processes; of the last ones if none are running."""
        if self._running is not None:
            self._devices = self._running.devices
        return self._devices

    def get(self) -> Processes:
        """Returns the processes; starts them again if they have ended."""
        if self._running is None or self._running.closed:
            devices = self.devices
            self.close()
            if self.has_grown:
                self._start_grown(devices)
            else:
                self._running = self._start(devices)
        assert self._running is not None
        return self._running

    def resize(self, devices: Sequence[str]) -> None:
        """Trains on these devices from the next step on, as the script asks."""
        running = self.get()
        if devices[0] != self.devices[0]:
            raise DeviceError(
                f"The first device of a trainer holds the script's own model, so it must stay {self.devices[0]}. Got "
                f"{devices[0]} as the first device. Put {self.devices[0]} first, or call lockstep.wrap again."
            )
        if self.has_grown or not running.resize(devices):
            running.close()
            self._running = self._start(devices[:1], devices[1:])
        self._growth, self.has_grown = None, False

    def shrink(self, count: int) -> None:
        """Trains on at most `count` devices, if the script did not choose their number."""
        if self.has_grown and len(self.devices) > count:
            self.get().resize(self.devices[:count])

    def note_step(self, seconds: float, num_shards: int, num_threads: int) -> None:
        """Records how long a step took, and in how many shards of how many threads it was computed."""
        self._last_step = seconds, num_shards, num_threads

    def grow_if_due(self) -> bool:
        """Starts more replicas once the steps take long enough, and ends them again if the steps do not get faster.

        This is called before the next step. Returns whether the devices have changed.
        """
        growth, step = self._growth, self._last_step
        if growth is None or step is None:
            return False
        self._last_step, (seconds, num_shards, num_threads) = None, step
        if self.has_grown:
            return self._look_at_gain(growth, seconds)
        if not growth.rule.add_step(seconds):
            return False
        host = growth.read_host()
        count = count_replicas(num_shards, num_threads, host.num_cores, host.free_memory, host.process_memory)
        alone, self.has_grown = self.devices, count > 1
        if self.has_grown:
            self.close()
            self._start_grown(choose_similar(alone, count))
        if not self.has_grown:
            self._growth = None
        return self.has_grown

    def _look_at_gain(self, growth: GrowthPlan, seconds: float) -> bool:
        running = self.get()
        if len(self.devices) == 1:  # the workers have ended, which was said
            self._growth, self.has_grown = None, False
            return True
        if len(running.replicas()) < len(self.devices):  # not all have joined
            return False
        gains = growth.rule.add_grown_step(seconds)
        if gains is None:
            return False
        self._growth = None
        if gains:
            return False
        growth.report(f"training goes on with {self.devices[0]} alone: {growth.rule.describe()}")
        running.resize(self.devices[:1])
        self.has_grown = False
        return True

    def close(self) -> None:
        """Ends the processes. Idempotent; `get` starts others."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def _start_grown(self, devices: Sequence[str]) -> None:
        """Starts processes on all devices; on the first device alone if the others cannot be started."""
        try:
            self._running = self._start(devices[:1], spare=devices[1:])
        except Exception as error:  # the model cannot be pickled, for example
            if self._growth is not None:
                self._growth.report(f"training stays on {devices[0]}: {error}")
            self.has_grown = False
            self._running = self._start(devices[:1])


class QuietPeriods:
    """Periods in which no code of the script runs between two steps, as in most epochs of a `fit`.

    In such a period no step looks for changes that the script has made.
    """

    def __init__(self, processes: SessionProcesses) -> None:
        self._processes = processes
        self._numbers = count()
        self.period: int | None = None  # the number of the present one

    def begin(self) -> None:
        """Begins a period, before whose first step changes of the script are looked for once more."""
        self.period = next(self._numbers)

    def end(self) -> None:
        """Ends the period, before code of the script runs again. Idempotent."""
        if self.period is not None:
            self.period = None
            if self._processes.is_running:
                self._processes.get().end_quiet_period()
