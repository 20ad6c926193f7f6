"""Serving: what a worker does from its first to its last breath."""

import pickle
from typing import Any, NamedTuple

from lockstep.backends.base import Backend, Recipe, State, Work
from lockstep.backends.choose import module
from lockstep.core.plan import Plan
from lockstep.core.step import Member
from lockstep.exchange import parcel
from lockstep.exchange.barrier import Barrier
from lockstep.exchange.memory import MemoryExchange
from lockstep.exchange.region import Region
from lockstep.exchange.shared import SharedExchange
from lockstep.launch import failure
from lockstep.launch.interrupt import deferred
from lockstep.launch.link import Link


class Berth(NamedTuple):
    """A worker's place in the crew: its model, its devices, and the descriptors it inherited."""

    home: str
    recipe: Recipe
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


def serve(berth: Berth, link: Link) -> None:
    """Answers the parent's commands until the link closes."""
    home = module(berth.home)
    backend = home.open(berth.recipe, berth.devices)
    leaves, parcels, control = (Region(descriptor) for descriptor in berth.regions)
    barrier = Barrier(berth.number, control, berth.bells)
    member = Member(backend, MemoryExchange(backend), deferred)
    link.send(pickle.dumps(None))
    while True:
        message = link.receive()
        try:
            command: Command = parcel.unpack(message, parcels)
            if command.plan is not None:
                exchange = SharedExchange(backend, leaves, barrier, command.plan, berth.number)
                member = Member(backend, exchange, deferred)
            answer = _obey(command, backend, member)
            del command
        except Exception as error:
            failure.report(link, error)
        else:
            link.send(answer)


def _obey(command: Command, backend: Backend, member: Member) -> bytes:
    try:
        if command.controls is not None:
            backend.turn(pickle.loads(command.controls))
        if command.state is not None:
            backend.load(command.state)
    except BaseException:
        if command.method == "step":
            member.exchange.fail()  # the others wait at the barrier
        raise
    result: Any = getattr(member, command.method)(command.work)
    return pickle.dumps(None if command.method == "step" else result)
