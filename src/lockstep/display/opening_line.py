"""Describes a run as text, for the line that is printed when training begins and for the repr of a trainer."""

from collections.abc import Sequence

from lockstep.core import plan
from lockstep.core.loss_reduction import Reduction
from lockstep.core.run_state import Run
from lockstep.devices import is_cpu
from lockstep.display.number_format import format_duration


class Opening:
    """The line with which training begins: empty until the first batch decides the numbers of shards and threads."""

    def __init__(self, run: Run) -> None:
        self.is_shown = False
        self.compile_seconds = 0.0  # since `reset`, of this process
        self.note = ""  # a remark on shards that were not given
        self.route = ""  # how the partial sums of launched processes reach each other, for fit(verbose=2)
        self._run = run
        self._batch_size: int | None = None

    @property
    def is_decided(self) -> bool:
        """Whether there has been a first batch since `reset`."""
        return self._batch_size is not None

    def decide(self, batch_size: int) -> None:
        """Takes the size of the first batch."""
        self._batch_size = batch_size

    def reset(self) -> None:
        """Makes the next batch the first."""
        self._batch_size = None
        self.compile_seconds = 0.0

    def format(self, devices: Sequence[str]) -> str:
        """Returns the line."""
        size = self._batch_size
        if size is None:
            return ""
        line = format_opening(self._run, size, devices, self.note, self.route)
        return f"{line}, compiled in {format_duration(self.compile_seconds)} s" if self.compile_seconds else line


def format_opening(run: Run, batch_size: int, devices: Sequence[str], note: str = "", route: str = "") -> str:
    """Returns the line that is printed when training begins; `note` is a remark on the number of shards.

    `route` says how the partial sums of launched processes reach each other.

    >>> format_opening(Run(0, 8, 1), 256, ["cpu:0", "cpu:1"])
    '2 devices (cpu:0, cpu:1), 8 shards of 32, batch 256, 1 thread per shard, seed 0'
    """
    assert run.shards is not None
    assert run.threads is not None
    sizes = sorted(set(plan.sizes(batch_size, run.shards)))
    parts = [
        _format_devices(devices),
        f"{_count(run.shards, 'shard')} of {' or '.join(map(str, sizes))}" + (f" ({note})" if note else ""),
        f"batch {batch_size}",
    ]
    if is_cpu(devices[0]):
        parts.append(f"{_count(run.threads, 'thread')} per shard")
    parts.append(f"seed {run.seed}")
    if run.reduction is Reduction.ASSUMED:
        parts.append("loss: taken as the mean over examples")
    return ", ".join(parts + ([route] if route else []))


def describe_run(run: Run, devices: Sequence[str]) -> str:
    """Returns a text with the devices, shards, seed and step of a run.

    >>> describe_run(Run(0, 8), ["cpu:0", "cpu:1"])
    '2 devices (cpu:0, cpu:1), 8 shards, seed 0, step 0'
    """
    shards = _count(run.shards, "shard") if run.shards else "shards chosen at the first batch"
    return f"{_format_devices(devices)}, {shards}, seed {run.seed}, step {run.step}"


def _format_devices(devices: Sequence[str]) -> str:
    """Returns a text with the number and the names of the devices; of many devices only the first and last name."""
    names = ", ".join(devices) if len(devices) <= 4 else f"{devices[0]} … {devices[-1]}"
    return f"{_count(len(devices), 'device')} ({names})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number > 1)}"
