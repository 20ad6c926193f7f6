"""Faults in worker processes. A fault that is due is a file, and the process that renames it commits it, so only once.

A model that has a `Saboteur` among its attributes takes it to every worker. Unpickling it there wraps the functions at
which a worker passes the named points of the protocol, so that nothing in `src` knows of any of this.
"""

import functools
import os
import signal
import time
from pathlib import Path

from lockstep.backends.numpy import SGD
from lockstep.exchange.barrier import WorkerBarrier
from lockstep.exchange.shared_memory import SharedMemoryExchange
from lockstep.launch import shm
from lockstep.launch.channel import Channel
from lockstep.processes import commands

EXIT_CODE = 7

START = ("start, unpickling the model", "start, before the answer")
STEP = (
    "step, received",
    "step, before its shards",
    "step, in a shard",
    "step, after its shards",
    "step, sums reported",  # and nobody was signalled
    "step, all sums there",
    "step, before its slice is ready",
    "step, slice ready",  # and nobody was signalled
    "step, committed",
    "step, in the update",  # of numpy's optimizer
    "step, before the answer",
    "step, answered",
)
PROVE = ("prove, received", "prove, in a shard", "prove, before the answer")
EVALUATE = ("evaluate, received", "evaluate, in a shard", "evaluate, before the answer")

KINDS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda: os._exit(EXIT_CODE),
}  # any other word is an exception's text


class Saboteur:
    """Commits the faults that are files in a folder, in every process but the one that made this object."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.controller = os.getpid()
        self.seat = None  # unknown until the worker opens its barrier
        self.command = "start"
        self.meeting = ""  # the meeting of a step in which this worker is

    def __reduce__(self):
        return arm, (str(self.folder), self.controller)

    def order(self, point, kind, seat):
        """Makes the worker in this seat commit a fault of this kind when it reaches the point next."""
        hidden = self.folder / ".order"
        hidden.write_text(kind)
        hidden.rename(self.folder / f"{point}@{seat}")  # at once, because a worker may look at any time

    def list_due(self):
        """Returns the faults that no worker has committed yet."""
        return sorted(path.name for path in self.folder.iterdir() if not path.name.startswith("."))

    def reach(self, point):
        """Commits the fault that is due at this point, if any; that of any seat as long as this one is unknown."""
        for path in sorted(self.folder.glob(f"{point}@{'*' if self.seat is None else self.seat}")):
            done = self.folder / f".{path.name} {os.getpid()}"
            try:
                path.rename(done)
            except FileNotFoundError:
                continue
            kind = done.read_text()
            done.write_text(f"{kind}\n{time.monotonic()}")
            KINDS.get(kind, functools.partial(_raise, kind))()
            return

    def take_committed(self):
        """Returns the point, the kind and the time of each fault since the last call; processes share this clock."""
        committed = []
        for path in self.folder.glob(".*@*"):
            kind, seconds = path.read_text().split("\n")
            committed.append((path.name[1:].partition("@")[0], kind, float(seconds)))
            path.unlink()
        return committed

    def watch(self):
        """Wraps every function that leads past a named point."""

        def pass_point(point):
            return lambda *arguments: self.reach(point)

        def pass_command(text):
            return lambda *arguments: self.reach(f"{self.command}, {text}")

        def enter(meeting, point):
            def before(*arguments):
                self.reach(point)
                self.meeting = meeting

            return before

        def leave(point=None):
            def after(*arguments):
                self.meeting = ""
                self.reach(point)

            return after

        def set_seat(barrier, seat, *arguments):
            self.seat = seat

        def note_command(message, *arguments):
            self.command = getattr(message.command, "func", message.command).__name__
            self.reach(f"{self.command}, received")

        def note_shard(buffer, exchange, replica, slot, shard):
            self.reach("step, in a shard")
            self.reach(f"step, in shard {shard}")

        def note_evaluation(member, work):
            self.reach("evaluate, in a shard")
            for shard in work.shards:
                self.reach(f"evaluate, in shard {shard}")

        wrap(WorkerBarrier, "__init__", before=set_seat)
        wrap(shm, "unpack", after=note_command)
        wrap(SharedMemoryExchange, "open", before=pass_point("step, before its shards"))
        wrap(SharedMemoryExchange, "get_buffer", after=note_shard)
        wrap(SharedMemoryExchange, "reduce", before=pass_point("step, after its shards"))
        wrap(WorkerBarrier, "wait_for_sums", enter("sums reported", None), leave("step, all sums there"))
        wrap(WorkerBarrier, "commit", enter("slice ready", "step, before its slice is ready"), leave("step, committed"))
        wrap(WorkerBarrier, "fail", before=leave())
        wrap(os, "eventfd_write", before=lambda *_: self.reach(f"step, {self.meeting}"))
        wrap(commands, "prove", before=pass_point("prove, in a shard"))
        wrap(commands, "evaluate", before=note_evaluation)
        wrap(Channel, "send", pass_command("before the answer"), pass_command("answered"))
        self.break_update(SGD.step)

    def break_update(self, update):
        """Makes the optimizer pass a point when it has updated the first half of the parameters."""

        def step(optimizer, parameters, gradients):
            names = list(gradients)
            for half in (names[: len(names) // 2], names[len(names) // 2 :]):
                update(optimizer, parameters, {name: gradients[name] for name in half})
                self.reach("step, in the update")

        SGD.step = step


def wrap(owner, name, before=None, after=None):
    """Makes a function call `before` with its arguments, and `after` with its result and its arguments."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapped(*arguments, **options):
        if before is not None:
            before(*arguments)
        result = function(*arguments, **options)
        if after is not None:
            after(result, *arguments)
        return result

    setattr(owner, name, wrapped)


def _raise(text):
    raise RuntimeError(text)


def arm(folder, controller):
    """Unpickles a saboteur, which in a worker begins its work."""
    saboteur = Saboteur(folder)
    if os.getpid() != controller:
        saboteur.reach(START[0])
        saboteur.watch()
    return saboteur
