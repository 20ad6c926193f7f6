"""The worker's main loop."""

import pickle
import time
from dataclasses import replace
from typing import Any, NamedTuple

from lockstep.backends.base import Backend, State, Work
from lockstep.backends.registry import module
from lockstep.core.batches import Rows, transform
from lockstep.core.plan import Plan
from lockstep.core.step import Member
from lockstep.data.reader import Readers
from lockstep.devices import is_cpu
from lockstep.exchange.barrier import Barrier
from lockstep.exchange.in_process import InProcessExchange
from lockstep.exchange.shared_memory import SharedMemoryExchange
from lockstep.launch import malloc, remote_errors, shm
from lockstep.launch.channel import Channel
from lockstep.launch.shm import Region
from lockstep.launch.signals import defer_interrupts
from lockstep.processes.pipeline_transfer import Freight, PipelineReceiver

STEP_MARK = b"s"  # before a command that ends at the barrier; one that cannot be read must still arrive there


class WorkerSetup(NamedTuple):
    """What a worker starts with: its model, its devices, and the descriptors it inherited."""

    home: str
    recipe: Any  # a Recipe; it may travel as a pickle within the pickle
    devices: tuple[str, ...]
    number: int
    bells: tuple[int, ...]
    regions: tuple[int, ...]


class Command(NamedTuple):
    """One thing to do for every worker, and what the script has changed since the last."""

    method: str
    work: Work
    plan: Plan | None
    controls: bytes | None
    state: State | None
    freight: Freight


def serve(berth: WorkerSetup, link: Channel) -> None:
    """Answers the parent's commands until the link closes."""
    if is_cpu(berth.devices[0]):
        malloc.keep_freed_memory()
    home = module(berth.home)
    backend = home.open(berth.recipe, berth.devices)
    leaves, parcels, control = (Region(descriptor) for descriptor in berth.regions)
    barrier = Barrier(berth.number, control, berth.bells)
    readers = Readers(backend.stage, (berth.number, len(berth.bells)))
    shipped = PipelineReceiver()
    member = Member(backend, InProcessExchange(backend), defer_interrupts, time.perf_counter, readers.read)
    link.send(pickle.dumps(None))
    while True:
        message = link.receive()
        try:
            try:
                command = _prepared(message, parcels, backend, shipped)
            except Exception:
                if message[:1] == STEP_MARK:
                    barrier.fail()  # the others would wait for this process
                raise
            if command.plan is not None:
                member.exchange = SharedMemoryExchange(backend, leaves, barrier, command.plan, berth.number)
            result: Any = getattr(member, command.method)(command.work)
        except Exception as error:
            remote_errors.send_exception(link, error)
        else:
            link.send(pickle.dumps(None if command.method == "step" else result))


def _prepared(message: bytes, parcels: Region, backend: Backend, shipped: PipelineReceiver) -> Command:
    """The command, with everything the script changed taken over."""
    command: Command = shm.unpack(message[1:], parcels)
    shipped.take(command.freight)
    pieces = transform(command.work.pieces, lambda value: shipped.known(value) if isinstance(value, Rows) else value)
    command = command._replace(work=replace(command.work, pieces=pieces))
    if command.state is not None:
        backend.load(command.state)
    if command.controls is not None:  # after the state: a schedule's number follows from the step that stands there
        backend.turn(pickle.loads(command.controls))
    return command
