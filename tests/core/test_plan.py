"""Plans: every example in one shard, every shard on one replica."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.plan import Plan, bounds, default_shards, default_threads, explain_default, sizes
from lockstep.errors import PlanError

examples = st.integers(0, 300)
shards = st.integers(1, 40)


@given(examples, shards)
def test_every_example_in_exactly_one_shard_in_order(num_examples, num_shards):
    covered = [example for start, stop in bounds(num_examples, num_shards) for example in range(start, stop)]
    assert covered == list(range(num_examples))


@given(examples, shards)
def test_sizes_differ_by_at_most_one_larger_first(num_examples, num_shards):
    found = sizes(num_examples, num_shards)
    assert len(found) == num_shards
    assert max(found) - min(found) <= 1
    assert found == sorted(found, reverse=True)
    assert found == [stop - start for start, stop in bounds(num_examples, num_shards)]


@given(st.data(), shards)
def test_an_even_plan_gives_every_replica_adjacent_shards(data, num_shards):
    num_replicas = data.draw(st.integers(1, num_shards))
    plan = Plan.even(num_shards, range(num_replicas))
    loads = [plan.shards_of([replica]) for replica in range(num_replicas)]
    assert plan.num_shards == num_shards
    assert [shard for load in loads for shard in load] == list(range(num_shards))
    assert max(map(len, loads)) - min(map(len, loads)) <= 1


@pytest.mark.parametrize(
    ("batch_size", "num_devices", "expected"),
    [
        (512, 1, 8),
        (511, 1, 4),
        (256, 1, 4),
        (255, 1, 2),
        (128, 1, 2),
        (127, 1, 1),
        (64, 1, 1),
        (1, 1, 1),
        (4096, 1, 8),  # never above 8 for the batch's sake
        (512, 8, 8),
        (512, 3, 8),  # devices do not matter while there are enough shards
        (32, 2, 2),  # raised to the next power of two
        (128, 3, 4),
        (4096, 9, 16),
    ],
)
def test_default_shards(batch_size, num_devices, expected):
    assert default_shards(batch_size, num_devices) == expected


@pytest.mark.parametrize(("batch_size", "num_devices"), [(4096, 1), (4096, 2), (64, 3), (1, 8), (64, 16)])
def test_on_accelerators_every_device_has_one_shard(batch_size, num_devices):
    assert default_shards(batch_size, num_devices, accelerated=True) == num_devices


@pytest.mark.parametrize(
    ("num_devices", "note"),
    [
        (1, "same bits on 1 device; shards=8 for 1 to 8"),
        (2, "same bits on 1 or 2 devices; shards=8 for 1 to 8"),
        (3, "same bits on 1 to 3 devices; shards=8 for 1 to 8"),
        (8, "same bits on 1 to 8 devices"),
        (16, "same bits on 1 to 16 devices"),
    ],
)
def test_the_note_on_accelerators(num_devices, note):
    assert explain_default(256, num_devices, accelerated=True) == note


def test_the_note_on_cpus_comes_only_with_more_devices_than_shards():
    assert explain_default(512, 8) == explain_default(1, 1) == ""
    assert explain_default(512, 9) == (
        "the batch alone would give 8, raised because each of 9 devices needs one; shards=16 for the same bits on fewer"
    )


@pytest.mark.parametrize(("num_threads", "num_shards", "expected"), [(16, 8, 2), (8, 8, 1), (2, 8, 1), (7, 2, 3)])
def test_default_threads(num_threads, num_shards, expected):
    assert default_threads(num_threads, num_shards) == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Plan.even(8, range(9)),
            "devices=9 needs at least 9 shards, got shards=8. Use shards=16, or devices=8.",
        ),
        (
            lambda: Plan((0, 2), (0, 1)),
            "owners=(0, 2) has a number that is not among the replicas (0, 1). "
            "Give each shard the number of one of them.",
        ),
    ],
)
def test_invalid_values_are_refused(make, message):
    with pytest.raises(PlanError) as caught:
        make()
    assert str(caught.value) == message
