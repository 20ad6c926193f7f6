"""Two barriers in each step for the processes of one host, by words in shared memory.

Each process writes its progress into a cache line of its own, and signals the others through eventfds. The controller
alone writes the decision, commit or abort, and the others wait for it (core/membership.py). There is no memory fence
before a process reads the others' partial sums: on x86 other processors see a process's writes in program order, so
whoever sees a word also sees the partial sums written before it. Processors without that guarantee are refused.

    one line for the decision, then one per seat: [attempt summed, ready, failed, refused, shard + 1]
"""

import os
import platform
from collections.abc import Sequence
from typing import Protocol

from lockstep.errors import AttemptAborted, PlatformError
from lockstep.launch.shm import Region

_LINE = 64  # one cache line per process, so that they do not contend
_WORDS = _LINE // 8


def has_ordered_writes() -> bool:
    """Returns whether other processors see this processor's writes in program order."""
    return platform.machine().lower() in ("x86_64", "amd64")


def require_ordered_writes() -> None:
    """Raises `PlatformError` on processors where other processes may see writes in another order."""
    if not has_ordered_writes():
        raise PlatformError(
            "Several replicas in processes of one host need the memory order of x86-64. This processor is "
            f"{platform.machine() or 'unknown'}. Use devices=1, or start the script with torchrun."
        )


class Barrier(Protocol):
    """Protocol of one process's side of a step's two barriers, which raise `AttemptAborted` if the step is aborted."""

    def wait_for_sums(self) -> None:
        """Reports that this process's partial sums are complete, and blocks until those of all processes are."""

    def commit(self) -> None:
        """Reports that this process's slice of the root is complete, and blocks until the step counts."""

    def fail(self) -> None:
        """Reports that this process cannot make the step, without blocking."""

    def note_shard(self, shard: int) -> None:
        """Notes the shard that this process computes next; raises `AttemptAborted` if the step was aborted."""


class StepWords:
    """The words of all processes. Every word is written by one process only."""

    def __init__(self, region: Region, num_seats: int) -> None:
        words = region.view((num_seats + 1) * _LINE)[: (num_seats + 1) * _LINE].cast("q")
        self._decision = words[:1]
        lines = (words[_WORDS + place :: _WORDS] for place in range(5))
        self.summed, self.ready, self.failed, self.refused, self._shards = lines

    def decide(self, attempt: int, commit: bool) -> None:
        """Writes the decision about an attempt: commit or abort."""
        self._decision[0] = 2 * attempt + commit

    def is_committed(self, attempt: int) -> bool:
        """Returns whether the attempt was committed."""
        return self._decision[0] == 2 * attempt + 1

    def is_aborted(self, attempt: int) -> bool:
        """Returns whether the attempt was aborted."""
        return self._decision[0] == 2 * attempt

    def set_shard(self, seat: int, shard: int | None) -> None:
        """Writes which shard a process is computing."""
        self._shards[seat] = 0 if shard is None else shard + 1

    def get_shard(self, seat: int) -> int | None:
        """Returns the shard that a process is computing, or was computing when it died."""
        shard: int = self._shards[seat]
        return shard - 1 if shard else None

    def clear(self, seat: int) -> None:
        """Erases what a process that has ended has written, before another process gets its seat."""
        for words in (self.summed, self.ready, self.failed, self.refused, self._shards):
            words[seat] = 0


class WorkerBarrier:
    """A worker's side of the barriers. Only the controller watches the processes; a worker ends with the controller."""

    def __init__(self, seat: int, region: Region, eventfds: Sequence[int]) -> None:
        self._words = StepWords(region, len(eventfds))
        self._eventfds = eventfds
        self._seat = seat
        self._attempt = 0
        self._members: tuple[int, ...] = ()

    def begin(self, attempt: int, members: tuple[int, ...]) -> None:
        """Begins an attempt in which these members take part."""
        self._attempt, self._members = attempt, members

    def wait_for_sums(self) -> None:
        """Reports that this worker's partial sums are complete, and blocks until those of all processes are."""
        words, attempt = self._words, self._attempt
        words.set_shard(self._seat, None)
        words.summed[self._seat] = attempt
        for seat in self._members:
            if seat != self._seat:
                os.eventfd_write(self._eventfds[seat], 1)
        while any(words.summed[seat] != attempt for seat in self._members):
            self._sleep()

    def commit(self) -> None:
        """Reports that this worker's slice is complete, and blocks until the controller has decided."""
        self._words.ready[self._seat] = self._attempt
        os.eventfd_write(self._eventfds[0], 1)
        while not self._words.is_committed(self._attempt):
            self._sleep()

    def fail(self) -> None:
        """Reports to the controller that this worker cannot make the step."""
        self._words.set_shard(self._seat, None)
        self._words.failed[self._seat] = self._attempt
        os.eventfd_write(self._eventfds[0], 1)

    def refuse(self) -> None:
        """Reports to the controller that this worker cannot apply the script's changes."""
        self._words.refused[self._seat] = self._attempt
        os.eventfd_write(self._eventfds[0], 1)

    def note_shard(self, shard: int) -> None:
        """Notes the shard that this worker computes next."""
        self._check()
        self._words.set_shard(self._seat, shard)

    def _sleep(self) -> None:
        """Blocks until this worker is signalled. Signals are counted, so one that came before is not lost."""
        self._check()
        os.eventfd_read(self._eventfds[self._seat])

    def _check(self) -> None:
        if self._words.is_aborted(self._attempt):
            self._words.set_shard(self._seat, None)
            raise AttemptAborted
