"""A trace of a run: what each device did when, in Chrome's JSON array format, for ui.perfetto.dev and chrome://tracing.

Each device has a lane. The file is valid JSON after every write, so it can be opened while the run trains, and after
the process was killed.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.core.attempt import Attempt, Timing
from lockstep.core.types import Phases

_END = b"\n]\n"
_BUFFERED = 256  # events between two writes
_LEAST_MICROSECONDS = 1.0  # shorter parts are left out, such as the input of arrays in memory

Event = Mapping[str, Any]


class TraceFile:
    """Writes events to a trace file; times are seconds on the clock whose value was `start` when the run began.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     trace = TraceFile(Path(folder, "run.json"), start=10.0)
    ...     trace.add_pause("checkpoint", 10.5, 11.0, step=3)
    ...     trace.close(None, "finished")
    ...     json.loads(Path(folder, "run.json").read_text())[-1]
    {'ph': 'X', 'name': 'checkpoint', 'ts': 500000.0, 'dur': 500000.0, 'pid': 1, 'tid': 0, 'args': {'step': 3}}
    """

    def __init__(self, path: Path, start: float) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("wb", buffering=0)
        self._start = start
        self._lanes: dict[int, str] = {}
        self._waiting: list[Event] = []
        self._attempt = (-1, 0)  # the last step, and the number of its attempts
        first = json.dumps({"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "lockstep"}}).encode()
        self._end = 2 + len(first)  # where the next event is written, over the end of the array
        os.pwrite(self._file.fileno(), b"[\n" + first + _END, 0)

    def add_attempt(self, attempt: Attempt, devices: Sequence[str], ended: float) -> None:
        """Adds the shards and parts of an attempt to the lanes of their devices."""
        more, note = {"step": attempt.step}, "" if attempt.is_committed else " (to be made again)"
        if attempt.phases is Phases.GRADIENT:
            note = f" (gradients{note and ', to be made again'})"
        else:
            step, number = self._attempt
            self._attempt = attempt.step, number + 1 if step == attempt.step else 1
            more["attempt"] = self._attempt[1]
        for replica, timings in attempt.timings.items():
            self._name_lane(replica, devices)
            for timing in _choose_slices(attempt, replica, timings):
                name = f"shard {timing.what}" if isinstance(timing.what, int) else timing.what
                self._add_slice(replica, name + note, timing.start, timing.end, **more)
        began = min((timing.start for timings in attempt.timings.values() for timing in timings), default=ended)
        for replica, shard in attempt.lost.items():
            self._name_lane(replica, devices)
            if not attempt.is_committed:
                self._add_slice(replica, "lost" if shard is None else f"lost in shard {shard}", began, ended, **more)
            self._add_instant(f"{_get_name(devices, replica)} was lost", ended, replica)

    def add_pause(self, reason: str, start: float, end: float, step: int) -> None:
        """Adds a slice to the lane of the first device."""
        self._add_slice(0, reason, start, end, step=step)

    def add_notice(self, text: str, when: float, step: int) -> None:
        """Adds a printed line as an instant event."""
        self._add_instant(text, when)

    def end_epoch(self, trainer: Any, digest: str) -> None:
        """Writes the events that are not in the file yet."""
        self._flush()

    def close(self, trainer: Any, outcome: str) -> None:
        """Writes the rest and closes the file. May be called again."""
        if not self._file.closed:
            try:
                self._flush()
            finally:
                self._file.close()

    def _add_slice(self, lane: int, name: str, start: float, end: float, **more: Any) -> None:
        """Adds a slice to a lane, if it is not too short to be seen."""
        duration = 1e6 * (end - start)
        if duration >= _LEAST_MICROSECONDS:
            times = {"ts": self._to_microseconds(start), "dur": round(duration, 3)}
            self._add({"ph": "X", "name": name, **times, "pid": 1, "tid": lane, "args": more})

    def _add_instant(self, text: str, when: float, lane: int = 0) -> None:
        """Adds an instant event, which is drawn across all lanes."""
        self._add({"ph": "i", "s": "g", "name": text, "ts": self._to_microseconds(when), "pid": 1, "tid": lane})

    def _flush(self) -> None:
        """Writes the events that are not in the file yet, in one system call, so that no reader finds half an event.

        If the disk is full, the file stays as it was.
        """
        if self._waiting:
            events = b"".join(b",\n" + json.dumps(event).encode() for event in self._waiting)
            text, written = events + _END, 0
            try:
                while written < len(text):  # once, unless the disk is almost full
                    written += os.pwrite(self._file.fileno(), text[written:], self._end + written)
            except OSError:
                os.ftruncate(self._file.fileno(), self._end)
                os.pwrite(self._file.fileno(), _END, self._end)
                raise
            self._end += len(events)
            self._waiting = []

    def _add(self, event: Event) -> None:
        self._waiting.append(event)
        if len(self._waiting) >= _BUFFERED:
            self._flush()

    def _name_lane(self, replica: int, devices: Sequence[str]) -> None:
        name = _get_name(devices, replica)
        if self._lanes.get(replica) != name:
            self._lanes[replica] = name
            for kind, value in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": replica})):
                self._add({"ph": "M", "name": kind, "pid": 1, "tid": replica, "args": value})

    def _to_microseconds(self, when: float) -> float:
        return round(1e6 * (when - self._start), 3)


def _get_name(devices: Sequence[str], replica: int) -> str:
    return devices[replica] if replica < len(devices) else f"replica {replica}"


def _choose_slices(attempt: Attempt, replica: int, timings: Sequence[Timing]) -> list[Timing]:
    """Returns the timings of the shards and of the parts other than computing them.

    If one program has computed all shards, none of them has a timing, and they become one slice.
    """
    shards = [timing for timing in timings if isinstance(timing.what, int)]
    others = [timing for timing in timings if isinstance(timing.what, str) and timing.what != "compute"]
    whole = next((timing for timing in timings if timing.what == "compute"), None)
    if whole is None or shards:
        return [*shards, *others]
    own = attempt.plan.shards_of([replica])
    name = "compute" if not own else f"shard {own[0]}" if len(own) == 1 else f"shards {own[0]} to {own[-1]}"
    return [whole._replace(what=name), *others]
