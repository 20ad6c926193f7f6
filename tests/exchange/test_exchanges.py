"""Exchanges in one process and over shared memory: the same bits, and a failed step that no member commits."""

from functools import partial

import numpy as np
import pytest

from lockstep.backends import numpy as backends
from lockstep.backends.base import Recipe
from lockstep.backends.numpy import SGD, Dense, DenseCrossEntropy
from lockstep.core import batches, digest
from lockstep.core.options import Options
from lockstep.core.plan import Plan
from lockstep.core.types import Work
from lockstep.errors import AttemptAborted, NonFiniteError
from lockstep.processes.single_process import SingleProcess

LOSSES = {
    "divided": DenseCrossEntropy(ignore_index=1),
    "shared": "mse",
}  # by the weight after the tree; by shares before
SIZES = (61, 27, 5, 61)  # 5: fewer examples than shards


def opened(loss, devices=("cpu:0",)):
    model = Dense([6, 40, 4], seed=1, dtype="float32", dropout=0.25)
    return backends.open(Recipe(model, SGD(0.1, momentum=0.9), LOSSES[loss], (), Options()), devices)


def batch(loss, num_examples, step=0):
    generator = np.random.Generator(np.random.PCG64(step))
    x = generator.standard_normal((num_examples, 6)).astype("float32")
    return x, generator.integers(0, 4, num_examples) if loss == "divided" else x[:, :4].copy()


def works(batch, plan, groups, step=0):
    pieces = batches.deal(batch, plan, groups)
    return [Work(part, batches.count(batch), plan.num_shards, 1, 0, step) for part in pieces]


def digests(backend):
    return digest.hash_arrays(backend.state())


def train_in_one_process(loss, num_shards, num_replicas=1):
    """The sums of every step and the state after the last, with all replicas in one process."""
    backend = opened(loss, [f"cpu:{index}" for index in range(num_replicas)])
    process = SingleProcess(backend)
    assert len(process.devices) == num_replicas
    plan = Plan.even(num_shards, range(num_replicas))
    sums = []
    for step, size in enumerate(SIZES):
        (work,) = works(batch(loss, size, step), plan, process.replicas(), step)
        sums.append(process.member.step(work, plan).sums.tobytes())
    return sums, digests(backend)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("num_shards", "num_replicas"), [(8, 3), (8, 5), (8, 8), (5, 2), (3, 3)])
def test_replicas_of_one_process_give_the_bits_of_one_replica(loss, num_shards, num_replicas):
    assert train_in_one_process(loss, num_shards, num_replicas) == train_in_one_process(loss, num_shards)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("num_shards", "num_members"), [(8, 2), (8, 3), (8, 5), (5, 2), (3, 3)])
def test_members_over_shared_memory_give_the_bits_of_one_replica(
    open_world, members, together, loss, num_shards, num_members
):
    plan = Plan.even(num_shards, range(num_members))
    world = open_world(num_members)
    group = members(world, [opened(loss) for _ in range(num_members)])
    sums = []
    for step, size in enumerate(SIZES):
        found = make_step(world, group, together, plan, batch(loss, size, step), step)
        assert len({each.tobytes() for each in found}) == 1
        sums.append(found[0].tobytes())
    expected = train_in_one_process(loss, num_shards)
    assert [(sums, digests(member.backend)) for member in group] == [expected] * num_members


def make_step(world, group, together, plan, data, step):
    """Makes one attempt of a step in all members, as processes do; returns the sums or the exception of each."""
    world.begin(step)
    parts = works(data, plan, [[seat] for seat in range(len(group))], step)

    def sums(member, work):
        return member.step(work, plan).sums

    return together(
        [
            partial(world.take_part, seat, partial(sums, member, work))
            for seat, (member, work) in enumerate(zip(group, parts, strict=True))
        ]
    )


def trio(open_world, members, together):
    """Returns three members, and a function that makes a step with all of them."""
    world = open_world(3)
    group = members(world, [opened("divided") for _ in range(3)])
    return group, partial(make_step, world, group, together, Plan.even(8, range(3)))


def next_step_works(group, step):
    """Whether all members make the next step, with the bits of one replica."""
    data = batch("divided", 61)
    found = step(data, 1)
    backend, plan = opened("divided"), Plan.even(8, range(1))
    expected = SingleProcess(backend).member.step(works(data, plan, [[0]], 1)[0], plan).sums
    return {each.tobytes() for each in found} == {expected.tobytes()} and [
        digests(member.backend) for member in group
    ] == [digests(backend)] * 3


def test_a_failure_before_the_first_barrier_stops_all_members(open_world, members, together):
    group, step = trio(open_world, members, together)
    before = digests(group[0].backend)
    x, y = batch("divided", 61)
    x[30] = np.nan  # shard 3, which the second member computes
    first, second, third = step((x, y), 0)
    assert [type(first), type(second), type(third)] == [AttemptAborted, NonFiniteError, AttemptAborted]
    assert "The loss is nan in step 0, shard 3." in str(second)
    assert [digests(member.backend) for member in group] == [before] * 3
    assert next_step_works(group, step)


def test_a_failure_before_the_computation_stops_all_members(open_world, members, together, monkeypatch):
    group, step = trio(open_world, members, together)
    before = digests(group[0].backend)
    with monkeypatch.context() as patch:
        patch.setattr(group[2].backend, "computing", lambda work: 1 / 0)
        outcomes = step(batch("divided", 61), 0)
    assert [type(outcome) for outcome in outcomes] == [AttemptAborted, AttemptAborted, ZeroDivisionError]
    assert [digests(member.backend) for member in group] == [before] * 3
    assert next_step_works(group, step)


def test_a_failure_between_the_barriers_stops_all_members(open_world, members, together, monkeypatch):
    group, step = trio(open_world, members, together)
    before = digests(group[0].backend)
    with monkeypatch.context() as patch:
        patch.setattr(group[2].backend, "divide", lambda *arguments: 1 / 0)
        outcomes = step(batch("divided", 61), 0)
    assert [type(outcome) for outcome in outcomes] == [AttemptAborted, AttemptAborted, ZeroDivisionError]
    assert [digests(member.backend) for member in group] == [before] * 3
    assert next_step_works(group, step)


def test_a_batch_whose_weights_sum_to_zero_is_refused_by_all_members(open_world, members, together):
    group, step = trio(open_world, members, together)
    before = digests(group[0].backend)
    x, y = batch("divided", 61)
    outcomes = step((x, np.ones_like(y)), 0)  # every target is the ignored one
    assert {str(outcome) for outcome in outcomes} == {
        "The weights of the batch of step 0 sum to 0, so its loss has no weighted mean: every target is ignored or "
        "has weight 0, or positive and negative weights cancel. Leave such batches out."
    }
    assert {type(outcome) for outcome in outcomes} == {NonFiniteError}
    assert [digests(member.backend) for member in group] == [before] * 3
    assert next_step_works(group, step)
