"""The events and actions of the membership protocol (core/membership.py).

An event is what has happened to a process; an action is what the controller must do about it. A *member* is a process
that takes part in every step; a `seat` is the number of a process: 0 is the controller, the others are workers.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Begin:
    """The next attempt starts, at this step."""

    step: int


@dataclass(frozen=True)
class MadeAlone:
    """The controller has made this step alone, so the protocol had nothing to decide."""

    step: int


@dataclass(frozen=True)
class Ready:
    """A member has written all that it contributes to the sum."""

    seat: int
    attempt: int


@dataclass(frozen=True)
class Failed:
    """A member has raised an error before the commit, in a shard or after its shards."""

    seat: int
    attempt: int


@dataclass(frozen=True)
class Refused:
    """A member cannot apply what the script has changed in the model, so no member can make the step."""

    seat: int
    attempt: int


@dataclass(frozen=True)
class Acknowledged:
    """A member has stopped working on an aborted attempt, and will not write any more."""

    seat: int
    attempt: int


@dataclass(frozen=True)
class Updated:
    """A member has applied the update of the committed step."""

    seat: int


@dataclass(frozen=True)
class Died:
    """A process has ended, as its pidfd shows; `shard` is the one that it was computing, if any."""

    seat: int
    shard: int | None = None


@dataclass(frozen=True)
class Unusable:
    """A process cannot go on as a member: it is late, its update raised, or its bits differ."""

    seat: int


@dataclass(frozen=True)
class Left:
    """A process leaves, because the user wants fewer devices."""

    seat: int


@dataclass(frozen=True)
class Admitted:
    """A process has proved that it computes the controller's bits, and becomes a member at the next step."""

    seat: int


Event = Begin | MadeAlone | Ready | Failed | Refused | Acknowledged | Updated | Died | Unusable | Left | Admitted


@dataclass(frozen=True)
class Start:
    """Send the attempt's work to the members."""

    attempt: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Commit:
    """Write that the attempt counts: every member applies the update."""

    attempt: int


@dataclass(frozen=True)
class Abort:
    """Write that the attempt does not count: every member acknowledges it."""

    attempt: int


@dataclass(frozen=True)
class Retry:
    """Make the step once more: no member works on the attempt any more, and no state has changed."""


@dataclass(frozen=True)
class GiveUp:
    """Raise the step's error: that of a member, or a WorkerError if two processes have died while computing `shard`."""

    shard: int | None = None


@dataclass(frozen=True)
class Kill:
    """Kill the process; its death is an event of its own."""

    seat: int


@dataclass(frozen=True)
class Replace:
    """Start another process with the number of one that has died."""

    seat: int


@dataclass(frozen=True)
class LeaveOut:
    """Start no other process with this number, because too many have died."""

    seat: int


Action = Start | Commit | Abort | Retry | GiveUp | Kill | Replace | LeaveOut
