"""A worker's main loop: receives a command, runs it, answers."""

import functools
import pickle
import struct
from dataclasses import replace
from typing import Any, NamedTuple

from lockstep.backends.base import Backend
from lockstep.backends.registry import load_module
from lockstep.core.batches import Rows, transform
from lockstep.core.types import State, Work
from lockstep.data.reader import Readers
from lockstep.devices import is_cpu
from lockstep.errors import AttemptAborted
from lockstep.exchange.barrier import WorkerBarrier
from lockstep.exchange.shared_memory import SharedMemoryExchange
from lockstep.launch import malloc, remote_errors, shm
from lockstep.launch.channel import Channel
from lockstep.launch.shm import Region
from lockstep.processes.commands import Command
from lockstep.processes.input_pipelines import PipelineChanges, PipelineReceiver
from lockstep.training.step import Member

# Before the pickle: the attempt, so that a worker that cannot read the rest can fail it, and the number of the region
# that has the arrays.
_HEAD = struct.Struct("<qq")


class WorkerSetup(NamedTuple):
    """What a worker starts with: its model, its device, and the descriptors that it has inherited."""

    framework: str
    recipe: Any  # a Recipe; it may be pickled by itself, inside this pickle
    device: str
    seat: int
    num_processes: int  # among which the reader processes of a pipeline are divided
    eventfds: tuple[int, ...]  # the eventfds of all seats
    regions: tuple[int, ...]  # shared memory: control, partial sums, then those of messages


class Message(NamedTuple):
    """A command, and what has changed since the worker's last command; None stands for no change."""

    recipe: Any  # a Recipe, in whose place the worker has another one
    command: Command
    work: Work
    members: tuple[int, ...]  # of the attempt, if the command is a step
    controls: bytes | None
    state: State | None
    pipelines: PipelineChanges


def pack_head(attempt: int, region: int) -> bytes:
    """Returns the first bytes of a message; `attempt` is 0 if the command is not a step."""
    return _HEAD.pack(attempt, region)


def serve(setup: WorkerSetup, channel: Channel) -> None:
    """Runs the controller's commands in a worker until the channel closes."""
    if is_cpu(setup.device):
        malloc.keep_freed_memory()
    control, sums, *regions = (Region(descriptor) for descriptor in setup.regions)
    barrier = WorkerBarrier(setup.seat, control, setup.eventfds)
    pipelines = PipelineReceiver()

    def create_member(recipe: Any) -> Member:
        backend = load_module(setup.framework).open(recipe, [setup.device])
        open_exchange = functools.partial(SharedMemoryExchange, backend, sums, barrier, seat=setup.seat)
        return Member(backend, open_exchange, [setup.seat], readers.read)

    readers = Readers(lambda piece: member.backend.stage(piece), (setup.seat, setup.num_processes))
    member = create_member(setup.recipe)
    channel.send(pickle.dumps(None))
    while True:
        data = channel.receive()
        attempt, region = _HEAD.unpack_from(data)
        try:
            barrier.begin(attempt, ())
            try:
                message = shm.unpack(data[_HEAD.size :], regions[region])
                if message.recipe is not None:
                    member.close()
                    member = create_member(message.recipe)
                work = _prepare(message, member.backend, pipelines)
            except Exception:
                if attempt:
                    barrier.refuse()
                raise
            barrier.begin(attempt, message.members)
            answer = message.command(member, work)
        except AttemptAborted:
            channel.send(pickle.dumps(member.laps.take_timings()))
        except Exception as error:
            barrier.fail()  # the controller may wait for this worker's slice; once the step counts this does nothing
            remote_errors.send_exception(channel, error)
        else:
            channel.send(pickle.dumps(answer))


def _prepare(message: Message, backend: Backend, pipelines: PipelineReceiver) -> Work:
    """Applies what the script has changed; returns the work of the command with its pipelines restored."""
    pipelines.apply(message.pipelines)
    pieces = transform(
        message.work.pieces, lambda value: pipelines.restore(value) if isinstance(value, Rows) else value
    )
    if message.state is not None:
        backend.load(message.state)
    if message.controls is not None:  # after the state: a schedule's number follows from the step that is in the state
        backend.turn(pickle.loads(message.controls))
    return replace(message.work, pieces=pieces)
