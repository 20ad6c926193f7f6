"""What is sent to which worker: only what it lacks of what the script may change."""

import pickle
from contextlib import ExitStack

import numpy as np
import pytest

from lockstep.backends import numpy as backends
from lockstep.backends.base import Recipe
from lockstep.backends.numpy import SGD, Dense
from lockstep.core import batches
from lockstep.core.options import Options
from lockstep.core.plan import Plan
from lockstep.core.types import Work
from lockstep.data import arrays
from lockstep.errors import BatchError
from lockstep.launch import shm
from lockstep.launch.shm import Region
from lockstep.processes import commands
from lockstep.processes.command_sender import MEMBERS, NEWCOMERS, CommandSender
from lockstep.processes.seats import Seat, Stage
from lockstep.processes.worker_loop import pack_head
from processes.fake_workers import FakeWorker

X, Y = np.arange(48.0).reshape(8, 6), np.arange(8) % 3
HEAD = len(pack_head(0, 0))


class FakeSeats:
    """The seats of workers that only note what they are sent."""

    recipe_version = 0

    def __init__(self, workers):
        self.taken = {number: Seat(number, worker, Stage.MEMBER) for number, worker in workers.items()}


class Sent:
    """A sender over the numpy backend and two workers."""

    def __init__(self, stack):
        self.model = Dense([6, 8, 3], seed=1)
        self.optimizer = SGD(0.1, momentum=0.9)
        self.backend = backends.open(Recipe(self.model, self.optimizer, "cross_entropy", (), Options()), ["cpu:0"])
        self.backend.touched()  # what was written until now is in the recipe
        workers = {number: FakeWorker(number) for number in (1, 2)}
        self.regions = [Region.create("members"), Region.create("newcomers")]
        for each in (*workers.values(), *self.regions):
            stack.callback(each.close)
        self.seats = FakeSeats(workers)
        self.sender = CommandSender(self.backend, self.seats, self.regions, (0, 3))
        stack.callback(self.sender.close)
        stack.callback(self.sender.close_readers)

    def send(self, numbers=(1, 2), batch=(X, Y), region=MEMBERS, period=None):
        """Sends an evaluation to some of the workers; returns what each of them reads."""
        chosen = [self.seats.taken[number] for number in numbers]
        plan = Plan.even(4, range(3))
        pieces = batches.deal(batch, plan, [[number] for number in numbers])
        works = [Work(part, 8, 4, 1, 0, 0, quiet_period=period) for part in pieces]
        self.sender.send(chosen, self.sender.pack(commands.evaluate, chosen, works, region))
        return [self.read(seat) for seat in chosen]

    def read(self, seat):
        data = seat.worker.sent[-1]
        region = int.from_bytes(data[8:16], "little")
        return shm.unpack(data[HEAD:], self.regions[region])


@pytest.fixture
def resources():
    with ExitStack() as stack:
        yield stack


def has_controls(messages):
    return [message.controls is not None for message in messages]


def has_state(messages):
    return [message.state is not None for message in messages]


def test_controls_are_sent_if_they_have_changed(resources):
    sent = Sent(resources)
    assert has_controls(sent.send()) == [True, True]
    assert has_controls(sent.send()) == [False, False]
    sent.optimizer.lr = 0.05
    (first,) = sent.send([1])
    assert pickle.loads(first.controls) == sent.backend.controls()
    assert has_controls(sent.send()) == [False, True]
    sent.seats.taken[1].sent.send_again()
    assert has_controls(sent.send()) == [True, False]


def test_a_worker_that_joins_in_a_quiet_period_gets_what_updates_have_written(resources):
    """An optimizer may count its updates in a parameter group, which the other workers do as well."""
    sent = Sent(resources)
    assert has_controls(sent.send(period=7)) == [True, True]
    sent.optimizer.lr = 0.05
    assert has_controls(sent.send(period=7)) == [False, False]
    sent.seats.taken[2].sent.is_stale = True  # it has just joined
    (_, joined) = sent.send(period=7)
    assert pickle.loads(joined.controls) == sent.backend.controls()
    sent.optimizer.lr = 0.025
    sent.seats.taken[1].sent.controls = b""  # another, which was started with its model
    (joined, _) = sent.send(period=7)
    assert pickle.loads(joined.controls) == sent.backend.controls()
    assert has_controls(sent.send(period=7)) == [False, False]


def test_the_state_is_sent_to_those_that_lack_it(resources):
    sent = Sent(resources)
    assert has_state(sent.send()) == [False, False]
    sent.model.parameters["0.weight"][0] *= 2
    (first,) = sent.send([1])
    assert np.array_equal(first.state["model.0.weight"].data, sent.model.parameters["0.weight"])
    assert has_state(sent.send()) == [False, True]
    assert has_state(sent.send()) == [False, False]
    sent.seats.taken[2].sent.is_stale = True  # it has just joined
    assert has_state(sent.send()) == [False, True]


def test_a_pipeline_is_sent_to_those_that_lack_it(resources):
    sent = Sent(resources)
    pipeline = arrays((X, Y)).map(keep).batch(8)
    rows = batches.Rows(pipeline, 0, 0, 8)

    def list_numbers(messages):
        return [(list(message.pipelines.new), message.pipelines.gone) for message in messages]

    assert list_numbers(sent.send([1], rows)) == [([0], ())]
    assert list_numbers(sent.send([1, 2], rows)) == [([], ()), ([0], ())]
    del pipeline, rows
    assert list_numbers(sent.send()) == [([], (0,)), ([], (0,))]
    assert list_numbers(sent.send()) == [([], ()), ([], ())]


def keep(x, y):
    return x, y


def test_the_plan_is_sent_if_it_is_another_than_that_of_the_last_step(resources):
    sent = Sent(resources)
    seats = list(sent.seats.taken.values())

    def step(plan):
        works = [Work(part, 8, 4, 1, 0, 0) for part in batches.deal((X, Y), plan, [[1], [2]])]
        messages = sent.sender.pack_step(seats, works, plan, 5, (0, 1, 2))
        assert sent.sender.send(seats, messages, plan) == [1, 2]
        assert all(message.startswith(pack_head(5, MEMBERS)) for message in messages)
        return [sent.read(seat).command.args[0] for seat in seats]

    even, other = Plan.even(4, range(3)), Plan.from_counts({0: 1, 1: 2, 2: 1})
    assert step(even) == [even, even]
    sent.send()  # an evaluation between them changes nothing
    assert step(even) == [None, None]
    sent.seats.taken[2].sent.send_again()
    assert step(even) == [None, even]
    assert step(other) == [other, other]


def test_a_worker_that_has_ended_is_not_reached_and_has_nothing(resources):
    sent = Sent(resources)
    sent.seats.taken[1].worker.die()
    seats = list(sent.seats.taken.values())
    work = Work({}, 0, 4, 1, 0, 0)
    messages = sent.sender.pack(commands.evaluate, seats, [work, work])
    assert sent.sender.send(seats, messages) == [2]
    assert sent.seats.taken[1].sent.controls == b""
    assert sent.seats.taken[2].sent.controls != b""


def test_what_cannot_be_pickled_reaches_nobody(resources):
    sent = Sent(resources)
    sent.send()
    sent.model.parameters["0.weight"][0] *= 2
    weights = np.array([1.0] * 7 + [keep], dtype=object).tolist()
    weights[-1] = open(__file__, "rb")  # noqa: SIM115
    resources.callback(weights[-1].close)
    with pytest.raises(BatchError, match="cannot be pickled"):
        sent.send(batch=(X, Y, weights))
    assert [len(seat.worker.sent) for seat in sent.seats.taken.values()] == [1, 1]
    assert has_state(sent.send()) == [True, True]  # what the script has written is not forgotten


def test_newcomers_have_a_region_of_their_own(resources):
    """Members may still read theirs while a newcomer is sent its proof."""
    sent = Sent(resources)
    (message,) = sent.send([1])
    before = {shard: piece[0].copy() for shard, piece in message.work.shards.items()}
    sent.send([2], (X * 0 - 1, Y), NEWCOMERS)
    assert sent.seats.taken[2].worker.sent[-1].startswith(pack_head(0, NEWCOMERS))
    assert before
    assert all(np.array_equal(piece[0], before[shard]) for shard, piece in message.work.shards.items())
