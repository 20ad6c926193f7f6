"""A worker's main loop: receive a command, run it, answer."""

import functools
import pickle
from dataclasses import replace
from typing import Any, NamedTuple

from lockstep.backends.base import Backend, State, Work
from lockstep.backends.registry import module
from lockstep.core.batches import Rows, transform
from lockstep.data.reader import Readers
from lockstep.devices import is_cpu
from lockstep.exchange.barrier import Barrier
from lockstep.exchange.shared_memory import SharedMemoryExchange
from lockstep.launch import malloc, remote_errors, shm
from lockstep.launch.channel import Channel
from lockstep.launch.shm import Region
from lockstep.processes.commands import Command
from lockstep.processes.pipeline_transfer import PipelineChanges, PipelineReceiver
from lockstep.training.step import Member

STEP_MARK = b"s"  # before a step's message: a worker that cannot read it must still arrive at the barrier
NO_MARK = b" "


class WorkerSetup(NamedTuple):
    """What a worker starts with: its model, its devices, and the descriptors it inherited."""

    framework: str
    recipe: Any  # a Recipe; it may travel as a pickle within the pickle
    devices: tuple[str, ...]
    replicas: tuple[int, ...]
    rank: int  # of this process; the controller is 0
    bells: tuple[int, ...]  # the eventfds of all processes
    regions: tuple[int, ...]  # shared memory: partial sums, messages, barrier


class Message(NamedTuple):
    """A command, and what the script has changed since the last one."""

    command: Command
    work: Work
    controls: bytes | None
    state: State | None
    pipelines: PipelineChanges


def serve(setup: WorkerSetup, channel: Channel) -> None:
    """Run the controller's commands until the channel closes."""
    if is_cpu(setup.devices[0]):
        malloc.keep_freed_memory()
    backend = module(setup.framework).open(setup.recipe, setup.devices)
    sums, messages, control = (Region(descriptor) for descriptor in setup.regions)
    barrier = Barrier(setup.rank, control, setup.bells)
    readers = Readers(backend.stage, (setup.rank, len(setup.bells)))
    pipelines = PipelineReceiver()
    open_exchange = functools.partial(SharedMemoryExchange, backend, sums, barrier, index=setup.rank)
    member = Member(backend, open_exchange, setup.replicas, readers.read)
    channel.send(pickle.dumps(None))
    while True:
        data = channel.receive()
        try:
            try:
                command, work = _prepare(shm.unpack(data[1:], messages), backend, pipelines)
            except Exception:
                if data[:1] == STEP_MARK:
                    barrier.fail()  # the others would wait for this process
                raise
            answer = command(member, work)
        except Exception as error:
            remote_errors.send_exception(channel, error)
        else:
            channel.send(pickle.dumps(answer))


def _prepare(message: Message, backend: Backend, pipelines: PipelineReceiver) -> tuple[Command, Work]:
    """Take over what the script has changed, and return the command, and its work with the pipelines."""
    command, work, controls, state, changes = message
    pipelines.apply(changes)
    pieces = transform(work.pieces, lambda value: pipelines.restore(value) if isinstance(value, Rows) else value)
    if state is not None:
        backend.load(state)
    if controls is not None:  # after the state: a schedule's number follows from the step that is in the state
        backend.turn(pickle.loads(controls))
    return command, replace(work, pieces=pieces)
