"""Waits until all launched processes have arrived, and says which one has not.

The processes meet in a key-value store. A launcher that restarts its processes (torchrun) keeps the store with
everything that earlier processes wrote, so a key alone does not show that its process is running. Each process writes a
random mark, the first process writes a list of the marks that it sees, and the list counts once every process has found
its own mark in the list and has confirmed the list. An earlier process confirms no list, and a process that has ended
in the meantime does not confirm the last one.
"""

import hashlib
import json
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lockstep.errors import LaunchError
from lockstep.launch.environment import ProcessPlace

SECONDS_TO_COME = 600.0
SECONDS_TO_CONFIRM = 60.0  # once all have come: a process that lives needs less than a second
_SECONDS_TO_NOTICE = 10.0
_SECONDS_TO_CONNECT = 5.0
_MAX_PAUSE = 0.5

# Keys: what each process writes, and what the first one does.
_MARK, _CONFIRMED = "lockstep/mark/", "lockstep/confirmed/"
_LIST, _COME, _COMPLETE = "lockstep/list", "lockstep/come", "lockstep/complete"


class KeyValueStore(Protocol):
    """The key-value store that all processes share.

    Its methods raise RuntimeError if the process that hosts it has ended.
    """

    def set(self, key: str, value: str, /) -> None:
        """Writes a value."""

    def get(self, key: str, /) -> bytes:
        """Returns a value that was written."""

    def check(self, keys: list[str], /) -> bool:
        """Returns whether all of these keys were written."""


@dataclass
class Patience:
    """How long the processes wait for each other; prints a line if it takes long, and raises an error at the limit."""

    seconds: float
    say: Callable[[str], None]
    advice: str = ""  # a further sentence of the error
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def wait(self, ready: Callable[[], bool], describe: Callable[[], str], seconds: float) -> None:
        """Waits until `ready()`; `describe` says which processes are missing, for the printed line and the error."""
        began, notice, pause = self.clock(), _SECONDS_TO_NOTICE, 0.005
        while not ready():
            waited = self.clock() - began
            if waited >= seconds:
                raise LaunchError(
                    f"{describe()} Waited {waited:.0f} seconds. See the output of the missing processes. "
                    "To wait longer, set LOCKSTEP_WORKER_TIMEOUT=seconds in every process, or 0 for no limit."
                    f"{self.advice}"
                )
            if waited >= notice:
                self.say(f"{describe()} Waited {waited:.0f} seconds so far.")
                notice *= 4
            self.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)


def wait_for_address(host: str, place: ProcessPlace, is_served: bool, patience: Patience) -> None:
    """Waits until the process that serves the store, the first or the launcher's own, listens at its address."""
    reason = ""

    def listens() -> bool:
        nonlocal reason
        try:
            socket.create_connection((host, place.port), _SECONDS_TO_CONNECT).close()
        except OSError as error:  # a name that is not resolved yet, too
            reason = error.strerror or str(error)
            return False
        return True

    def describe() -> str:
        first = "the launcher's store" if is_served else "process 0, which listens when it calls lockstep.wrap,"
        return (
            f"Process {place.index} of {place.count} cannot reach {first} at {host}:{place.port} ({reason}). "
            "MASTER_ADDR and MASTER_PORT must lead to the host of process 0, and its firewall must let them in."
        )

    patience.wait(listens, describe, patience.seconds)


def wait_for_all(store: KeyValueStore, index: int, count: int, host: str, patience: Patience) -> str:
    """Waits until all processes are here at once; returns a text that is equal in all and new in every launch."""
    try:
        return _Meeting(store, index, count, host, patience).hold()
    except RuntimeError as error:
        if isinstance(error, LaunchError):
            raise
        raise LaunchError(
            f"Process 0 of {count}, at which all processes meet, has ended before all had come. See the output of "
            f"process 0. This is process {index}; torch.distributed reports: {str(error).splitlines()[0]}"
        ) from error


class _Meeting:
    """One process's part of the meeting."""

    def __init__(self, store: KeyValueStore, index: int, count: int, host: str, patience: Patience) -> None:
        self._store, self._index, self._count, self._patience = store, index, count, patience
        self._mark = f"{secrets.token_hex(8)} {count} {host}"
        self._marks: list[str] = []  # of all processes, as the first one has listed them
        self._confirmed = ""  # what this process has confirmed

    def hold(self) -> str:
        """Waits until all processes are here; returns the first process's mark."""
        self._store.set(f"{_MARK}{self._index}", self._mark)
        self._patience.wait(self._have_all_come, self._describe, self._patience.seconds)
        seconds = self._patience.seconds
        if seconds < float("inf"):  # there is no limit under a debugger
            seconds = min(SECONDS_TO_CONFIRM, seconds)
        self._patience.wait(self._have_all_confirmed, self._describe, seconds)
        return self._marks[0]

    def _have_all_come(self) -> bool:
        is_listed = self._confirm_list()
        if self._index == 0 and not self._find_missing():
            self._store.set(_COME, self._mark)
        return is_listed and self._read(_COME) == self._marks[0]

    def _have_all_confirmed(self) -> bool:
        is_listed = self._confirm_list()
        if self._index == 0 and not self._find_silent():
            self._store.set(_COMPLETE, self._mark)
        return is_listed and self._read(_COMPLETE) == self._marks[0]

    def _confirm_list(self) -> bool:
        """Returns whether the first process has listed this one; confirms each new list."""
        if self._index == 0:
            self._write_list()
        was_listed = self._is_listed()
        self._marks = self._read_list()
        if was_listed and not self._is_listed():
            raise LaunchError(
                f"Another process came with the same rank as this one, {self._index} of {self._count}. Give every "
                "process a RANK of its own."
            )
        if self._is_listed() and self._confirmed != (text := _confirm(self._marks)):
            self._store.set(f"{_CONFIRMED}{self._index}", text)
            self._confirmed = text
        return self._is_listed()

    def _is_listed(self) -> bool:
        return bool(self._marks) and self._marks[self._index] == self._mark

    def _write_list(self) -> None:
        marks = [self._read(f"{_MARK}{index}") for index in range(self._count)]
        if marks != self._marks:
            self._store.set(_LIST, json.dumps(marks))

    def _read_list(self) -> list[str]:
        marks: list[str] = json.loads(self._read(_LIST) or "[]")
        return marks if len(marks) == self._count else []  # an earlier launch may have had another number

    def _find_missing(self) -> list[int]:
        """Returns the processes that have not come: those that have confirmed no list of the present first process."""
        first = self._marks[0] if self._is_listed() else " "
        return [index for index in range(self._count) if not self._read(f"{_CONFIRMED}{index}").startswith(first)]

    def _find_silent(self) -> list[int]:
        """Returns the processes that have not confirmed the last list."""
        last = _confirm(self._marks)
        return [index for index in range(self._count) if self._read(f"{_CONFIRMED}{index}") != last]

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _describe(self) -> str:
        """Returns who is waited for, as far as this process can tell."""
        if not self._is_listed() and self._index:
            others = len(json.loads(self._read(_LIST) or "[]"))
            hint = f" Process 0 was launched as one of {others}." if others not in (0, self._count) else ""
            return f"Process 0 of {self._count} has not listed this one, process {self._index}.{hint}"
        if missing := self._find_missing():
            return (
                f"{_name(missing, self._count)} not come to where the processes meet.{self._describe_counts(missing)}"
            )
        silent = self._find_silent()
        # Their marks are read again: they may have come since this process has read the list.
        hosts = ", ".join(dict.fromkeys(_split(self._read(f"{_MARK}{index}"))[1] for index in silent))
        return f"{_name(silent, self._count)} come to where the processes meet (from {hosts}), and ended or hung there."

    def _describe_counts(self, missing: Sequence[int]) -> str:
        """Returns a sentence for each process that was launched into a world of another size."""
        marks = {index: self._read(f"{_MARK}{index}") for index in missing}
        others = {index: _split(mark)[0] for index, mark in marks.items() if mark and _split(mark)[0] != self._count}
        return "".join(f" Process {index} was launched as one of {count}." for index, count in others.items())


def _confirm(marks: Sequence[str]) -> str:
    """Returns the confirmation of a list of marks, which begins with the first process's mark."""
    return " ".join([marks[0], hashlib.sha256(json.dumps(marks).encode()).hexdigest()]) if marks else ""


def _split(mark: str) -> tuple[int, str]:
    """Returns the number of processes and the host in a mark."""
    _, count, host = mark.split(maxsplit=2)
    return int(count), host


def _name(indexes: Sequence[int], count: int) -> str:
    several = len(indexes) > 1
    return f"Process{'es' if several else ''} {', '.join(map(str, indexes))} of {count} {'have' if several else 'has'}"
