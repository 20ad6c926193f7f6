"""Exchanges in one process and over shared memory: the same bits, and a failed step that no member commits."""

from functools import partial

import numpy as np
import pytest

from lockstep.backends import numpy as backends
from lockstep.backends.base import Recipe, Work
from lockstep.backends.numpy import SGD, CrossEntropy, Dense
from lockstep.core import batches, digest
from lockstep.core.options import Options
from lockstep.core.plan import Plan
from lockstep.errors import NonFiniteError, PeerFailed
from lockstep.processes.single_process import SingleProcess

LOSSES = {"divided": CrossEntropy(ignore_index=1), "shared": "mse"}  # by the weight after the tree; by shares before
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
    plan = Plan.even(num_shards, num_replicas)
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
def test_members_over_shared_memory_give_the_bits_of_one_replica(members, together, loss, num_shards, num_members):
    plan = Plan.even(num_shards, num_members)
    group = members([opened(loss) for _ in range(num_members)])
    groups = [[index] for index in range(num_members)]
    sums = []
    for step, size in enumerate(SIZES):
        parts = works(batch(loss, size, step), plan, groups, step)
        found = together([partial(sums_of_step, member, work, plan) for member, work in zip(group, parts, strict=True)])
        assert len({each.tobytes() for each in found}) == 1
        sums.append(found[0].tobytes())
    expected = train_in_one_process(loss, num_shards)
    assert [(sums, digests(member.backend)) for member in group] == [expected] * num_members


def sums_of_step(member, work, plan):
    return member.step(work, plan).sums


def trio(members):
    return members([opened("divided") for _ in range(3)])


def step(group, together, data):
    plan = Plan.even(8, 3)
    parts = works(data, plan, [[0], [1], [2]])
    return together([partial(sums_of_step, member, work, plan) for member, work in zip(group, parts, strict=True)])


def next_step_works(group, together):
    """Whether all members make the next step, with the bits of one replica."""
    data = batch("divided", 61)
    found = step(group, together, data)
    backend, plan = opened("divided"), Plan.even(8, 1)
    expected = SingleProcess(backend).member.step(works(data, plan, [[0]])[0], plan).sums
    return {each.tobytes() for each in found} == {expected.tobytes()} and [
        digests(member.backend) for member in group
    ] == [digests(backend)] * 3


def test_a_failure_before_the_first_barrier_stops_all_members(members, together):
    group = trio(members)
    before = digests(group[0].backend)
    x, y = batch("divided", 61)
    x[30] = np.nan  # shard 3, which the second member computes
    first, second, third = step(group, together, (x, y))
    assert [type(first), type(second), type(third)] == [PeerFailed, NonFiniteError, PeerFailed]
    assert "The loss is nan in step 0, shard 3." in str(second)
    assert [digests(member.backend) for member in group] == [before] * 3
    assert next_step_works(group, together)


def test_a_failure_between_the_barriers_stops_all_members(members, together, monkeypatch):
    group = trio(members)
    before = digests(group[0].backend)
    with monkeypatch.context() as patch:
        patch.setattr(group[2].backend, "divide", lambda *arguments: 1 / 0)
        outcomes = step(group, together, batch("divided", 61))
    assert [type(outcome) for outcome in outcomes] == [PeerFailed, PeerFailed, ZeroDivisionError]
    assert [digests(member.backend) for member in group] == [before] * 3
    assert next_step_works(group, together)


def test_a_batch_whose_weights_sum_to_zero_is_refused_by_all_members(members, together):
    group = trio(members)
    before = digests(group[0].backend)
    x, y = batch("divided", 61)
    outcomes = step(group, together, (x, np.ones_like(y)))  # every target is the ignored one
    assert {str(outcome) for outcome in outcomes} == {
        "The weights of a batch do not sum to 0. Got 0 in step 0: every target is ignored or has weight 0, or weights "
        "of both signs cancel. Leave such batches out."
    }
    assert {type(outcome) for outcome in outcomes} == {NonFiniteError}
    assert [digests(member.backend) for member in group] == [before] * 3
    assert next_step_works(group, together)
