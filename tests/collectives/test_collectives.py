"""The collectives: one suite for every framework, numpy as the oracle.

LOCKSTEP_BACKENDS chooses the frameworks; one that was asked for and cannot be imported fails.
"""

import hashlib
import importlib
import os
from fractions import Fraction

import numpy as np
import pytest

import lockstep
from lockstep.core import plan, tree
from lockstep.errors import BatchError, DeviceError, PlanError

KITS = {
    name: kit
    for framework in os.environ.get("LOCKSTEP_BACKENDS", "numpy,torch").split(",")
    if framework != "keras"  # which has no arrays of its own
    for name, kit in importlib.import_module(f"collectives.kits.{framework}").KITS.items()
}
GENERATOR = np.random.Generator(np.random.PCG64(11))


@pytest.fixture(params=KITS)
def kit(request):
    chosen = KITS[request.param]
    with chosen.scope():
        yield chosen


def bits(value):
    value = np.ascontiguousarray(value)
    return hashlib.sha256(f"{value.dtype}{value.shape}".encode() + value.tobytes()).hexdigest()


def noise(*shape, dtype="float32"):
    """Numbers of many magnitudes, so that another order of additions gives other bits."""
    return (GENERATOR.standard_normal(shape) * 10.0 ** GENERATOR.integers(-6, 7, shape)).astype(dtype)


# -- replicate


def test_a_replica_is_a_copy_on_its_device(kit):
    value = noise(3, 2)
    params = kit.params(value)
    replicas = lockstep.replicate(params, 2)
    assert [kit.place(replica) for replica in replicas] == kit.devices()
    assert [bits(kit.value(replica)) for replica in replicas] == [bits(value)] * 2
    assert len({id(params), *map(id, replicas)}) == 3


def test_a_replica_can_be_trained(kit):
    value = noise(3, 2)
    replicas = lockstep.replicate(kit.params(value), ["cpu", "cpu"])
    if kit.slope is None:
        assert all(replica.flags.writeable for replica in replicas)
    else:
        assert [bits(kit.value(kit.slope(replica))) for replica in replicas] == [bits(value + value)] * 2


def test_what_is_written_to_one_replica_stays_there(kit):
    if not kit.in_place:
        pytest.skip("nobody can write to these arrays")
    value = noise(4)
    params = kit.params(value)
    first, second = lockstep.replicate(params, 2)
    lockstep.allreduce([first, kit.params(value)])  # writes to the first
    assert bits(kit.value(first)) == bits(value + value)
    assert bits(kit.value(second)) == bits(kit.value(params)) == bits(value)


def test_a_pytree_keeps_its_structure(kit):
    one, two = kit.params(noise(2)), kit.params(noise(2, 3))
    first, second = lockstep.replicate({"a": one, "b": [two, (one,)]}, 2)
    for replica in (first, second):
        assert list(replica) == ["a", "b"]
        assert isinstance(replica["b"], list)
        assert isinstance(replica["b"][1], tuple)
        assert bits(kit.value(replica["b"][0])) == bits(kit.value(two))


# -- split


@pytest.mark.parametrize(
    "num_examples, devices, sizes",
    [(8, 2, [4, 4]), (7, 3, [3, 2, 2]), (5, ["cpu", "cpu"], [3, 2]), (5, 1, [5])],
)
def test_a_batch_is_cut_by_the_plans_rule(kit, num_examples, devices, sizes):
    x, y = noise(num_examples, 3), np.arange(num_examples)
    pieces = lockstep.split((kit.array(x), {"y": kit.array(y), "name": "batch"}), devices)
    assert pieces.sizes == sizes
    assert [len(kit.value(piece)) for piece, _ in pieces] == sizes
    assert bits(np.concatenate([kit.value(piece) for piece, _ in pieces])) == bits(x)
    assert np.concatenate([kit.value(rest["y"]) for _, rest in pieces]).tolist() == y.tolist()
    assert {rest["name"] for _, rest in pieces} == {"batch"}


def test_a_piece_lies_on_its_device(kit):
    pieces = lockstep.split(kit.array(noise(4, 2)), 2)
    assert [kit.place(piece) for piece in pieces] == kit.devices()


def test_more_devices_than_examples_make_pieces_of_length_0(kit):
    pieces = lockstep.split(kit.array(noise(2, 3)), 3)
    assert pieces.sizes == [1, 1, 0]
    assert [tuple(piece.shape) for piece in pieces] == [(1, 3), (1, 3), (0, 3)]


def test_a_piece_is_contiguous_memory_of_its_own():
    x = np.asfortranarray(noise(4, 2))
    first, second = lockstep.split(x, 2)
    assert first.flags.c_contiguous
    assert second.flags.c_contiguous
    assert not np.shares_memory(first, x)
    (whole,) = lockstep.split(x, 1)
    assert not np.shares_memory(whole, x)


def test_lists_are_cut_as_lists():
    pieces = lockstep.split((np.arange(3), ["a", "b", "c"], 0.5), 2)
    assert [piece[1:] for piece in pieces] == [(["a", "b"], 0.5), (["c"], 0.5)]


def test_an_array_without_axes_is_on_every_device_in_memory_of_its_own(kit):
    number = kit.array(np.float32(1.5))
    pieces = [rest for _, rest in lockstep.split((kit.array(noise(4, 2)), number), 2)]
    assert [kit.place(piece) for piece in pieces] == kit.devices()
    assert [(tuple(piece.shape), float(kit.value(piece))) for piece in pieces] == [((), 1.5)] * 2
    assert len({id(number), *map(id, pieces)}) == 3


# -- allreduce


@pytest.mark.parametrize("num_devices", range(1, 9))
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_every_device_gets_the_trees_sum_to_the_bit(kit, num_devices, dtype):
    values = [noise(33, 7, dtype=dtype) for _ in range(num_devices)]
    given = [kit.array(value) for value in values]
    if kit.value(given[0]).dtype != dtype:
        pytest.skip("JAX has no float64 unless it is told")
    expected = bits(tree.fold(values, np.add))
    sums = lockstep.allreduce(given)
    assert [bits(kit.value(each)) for each in sums] == [expected] * num_devices
    if kit.in_place:
        assert all(each is own for each, own in zip(sums, given, strict=True))
    elif num_devices > 1:
        assert [bits(kit.value(each)) for each in given] == [bits(value) for value in values]


def test_the_noise_tells_one_order_from_another():
    values = [noise(33, 7) for _ in range(4)]
    assert bits(tree.fold(values, np.add)) != bits(((values[0] + values[1]) + values[2]) + values[3])


def test_the_sum_lies_on_every_device(kit):
    arrays = lockstep.split(kit.array(noise(4, 2)), 2)
    assert [kit.place(each) for each in lockstep.allreduce(arrays)] == kit.devices()


def test_pytrees_are_added_value_by_value(kit):
    a, b, c = (noise(2, 2) for _ in range(3))
    first = {"w": kit.array(a), "rest": [None, kit.array(b)]}
    second = {"rest": [None, kit.array(c)], "w": kit.array(b)}  # in another order
    for sums in lockstep.allreduce([first, second]):
        assert bits(kit.value(sums["w"])) == bits(a + b)
        assert bits(kit.value(sums["rest"][1])) == bits(b + c)
        assert sums["rest"][0] is None


def test_gradients_of_replicas_are_added(kit):
    if kit.slope is None:
        pytest.skip("nothing differentiates here")
    value = noise(5)
    gradients = [kit.slope(replica) for replica in lockstep.replicate(kit.params(value), 3)]
    twice = value + value
    for total in lockstep.allreduce(gradients):
        assert bits(kit.value(total)) == bits((twice + twice) + twice)


def test_parameters_can_be_added_too(kit):
    value = noise(5)
    for total in lockstep.allreduce(lockstep.replicate(kit.params(value), 2)):
        assert bits(kit.value(total)) == bits(value + value)


def test_a_number_is_an_array_without_axes(kit):
    if kit is KITS.get("mxnet"):
        pytest.skip("the classic arrays have at least one axis")
    sums = lockstep.allreduce([kit.array(np.float32(1.5)), kit.array(np.float32(2.0))])
    assert [kit.value(each).tolist() for each in sums] == [3.5, 3.5]


def test_one_array_given_twice_counts_twice(kit):
    value = noise(3)
    array = kit.array(value)
    sums = lockstep.allreduce([array, array, array])
    assert bits(kit.value(sums[0])) == bits((value + value) + value)


@pytest.mark.parametrize("trees", [[None, None], [[None], [None]], [{"a": (None,)}] * 3])
def test_none_stays_none(trees):
    assert lockstep.allreduce(trees) == trees


# -- what is refused


def test_truth_values_are_refused(kit):
    given = [kit.array(np.array([True, False])) for _ in range(2)]
    with pytest.raises(BatchError, match=r"allreduce adds only numbers\. Got arrays of bool\. Convert the arrays to a"):
        lockstep.allreduce(given)
    pieces = lockstep.split(given[0], 2)
    assert [kit.value(piece).tolist() for piece in pieces] == [[True], [False]]


def test_types_are_told_in_one_word(kit):
    with pytest.raises(BatchError, match=r"Got \(2,\) of float32 from device 0 and \(2,\) of int32 from device 1"):
        lockstep.allreduce([kit.array(np.ones(2, "float32")), kit.array(np.ones(2, "int32"))])


@pytest.mark.parametrize(
    "arrays, words",
    [
        ([], "a list with an array, or a pytree of arrays, from each device. Got []."),
        (np.ones(2), "from each device. Got ndarray(2,)."),
        ([np.ones(2), np.ones(3)], "Got (2,) of float64 from device 0 and (3,) of float64 from device 1."),
        ([np.ones(2), np.ones(2), np.ones(2, "float32")], "and (2,) of float32 from device 2."),
        ([np.ones(2), None], "Got (2,) of float64 from device 0 and None from device 1."),
        ([[np.ones(2)], [np.ones(2), np.ones(2)]], "Got [ndarray(2,)] from device 0 and [ndarray(2,), ndarray(2,)]"),
        ([{"a": np.ones(2)}, {"b": np.ones(2)}], "Got {'a': ndarray(2,)} from device 0 and {'b': ndarray(2,)} from"),
        (
            [np.ones(2), [np.ones(2)]],
            (
                "Got ndarray(2,) from device 0 and [ndarray(2,)] from device 1. Give every device a pytree with "
                "the same structure."
            ),
        ),
        ([1.0, 2.0], "Got a float. Give an array"),
        ([np.array(["a"]), np.array(["b"])], "allreduce adds only numbers. Got arrays of str32."),
        ([[], []], "Got none. Give an array"),
    ],
)
def test_allreduce_refuses(arrays, words):
    with pytest.raises(BatchError) as raised:
        lockstep.allreduce(arrays)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    "params, devices, error, words",
    [
        ([], 2, BatchError, "replicate needs arrays of numpy, PyTorch, JAX, TensorFlow or MXNet. Got none."),
        ({"w": "text"}, 2, BatchError, "Got a str."),
        ([Fraction(1, 2)], 2, BatchError, "Got a fractions.Fraction. Give an array"),
        (np.ones(2), 0, DeviceError, "devices=0 leaves no device"),
        (np.ones(2), [], DeviceError, "devices=[] leaves no device"),
        (
            np.ones(2),
            ["abacus"],
            DeviceError,
            "This host has no device 'abacus:0'. Use one of its devices: cpu:0.",
        ),
    ],
)
def test_replicate_refuses(params, devices, error, words):
    with pytest.raises(error) as raised:
        lockstep.replicate(params, devices)
    assert words in str(raised.value)


def test_unknown_devices_are_refused(kit):
    for call in (lockstep.replicate, lockstep.split):
        with pytest.raises(DeviceError, match="no device 'abacus:0'"):
            call(kit.array(noise(3)), ["abacus"])


@pytest.mark.parametrize(
    "batch, words",
    [
        (0.5, "has no array with examples on its first axis"),
        ((np.ones(2), np.ones(3)), "different lengths, 2, 3, in"),
        (np.ones((0, 2)), "has no examples. Leave empty batches out."),
        (["a", "b"], "split needs arrays of numpy, PyTorch, JAX, TensorFlow or MXNet. Got none."),
    ],
)
def test_split_refuses(batch, words):
    with pytest.raises(BatchError) as raised:
        lockstep.split(batch, 2)
    assert words in str(raised.value)


def test_two_frameworks_do_not_mix(kit):
    if kit is KITS.get("numpy"):
        pytest.skip("the other framework is numpy")
    mine, other = kit.array(noise(3)), noise(3)
    for call in (
        lambda: lockstep.replicate([mine, other], 2),
        lambda: lockstep.split((mine, other), 2),
        lambda: lockstep.allreduce([mine, other]),
    ):
        with pytest.raises(BatchError, match=r"arrays of one framework\. Got .*numpy"):
            call()


def test_an_array_at_two_places_is_added_once():
    one, other = np.array([1.0]), np.array([2.0])
    lockstep.allreduce([{"enc": one, "dec": one}, {"enc": other, "dec": other}])
    assert one.tolist() == other.tolist() == [3.0]


def test_an_array_at_two_places_is_one_array_on_every_device():
    tied = np.ones(2)
    first, second = lockstep.replicate({"enc": tied, "dec": tied}, 2)
    assert first["enc"] is first["dec"]
    assert second["enc"] is second["dec"]
    assert first["enc"] is not second["enc"]


# -- shards


def test_shards_are_added_in_one_order_on_any_number_of_devices(kit):
    x = noise(61, 33)
    expected = bits(tree.fold(np.split(x[:56], 8), np.add))
    assert lockstep.split(kit.array(x), 3, shards=8).sizes == [24, 23, 14]  # 8 + 8 + 8, 8 + 8 + 7, 7 + 7
    for num_devices in range(1, 9):
        pieces = lockstep.split(kit.array(x[:56]), num_devices, shards=8)
        assert [len(piece) for piece in pieces] == plan.sizes(8, num_devices)
        sums = lockstep.allreduce(pieces, shards=8)
        assert [bits(kit.value(each)) for each in sums] == [expected] * num_devices


def test_pytrees_of_shards_are_added_value_by_value(kit):
    a, b, c = (noise(2) for _ in range(3))
    shards = [{"w": [kit.array(value)], "unused": None} for value in (a, b, c)]
    first, second = lockstep.allreduce([shards[:2], shards[2:]], shards=3)
    assert (first["w"][0] is shards[0]["w"][0]) == (second["w"][0] is shards[2]["w"][0]) == kit.in_place
    for sums in (first, second):
        assert bits(kit.value(sums["w"][0])) == bits((a + b) + c)
        assert sums["unused"] is None
    assert lockstep.allreduce([[None, None], [None]], shards=3) == [None, None]


@pytest.mark.parametrize(
    "arrays, shards, words",
    [
        ([np.ones(2), np.ones(2)], 2, "a list with one entry per shard from each device, 2 in total. Got [0, 0] from"),
        ([[np.ones(2)], [np.ones(2)]], 4, "Got [1, 1] from 2 devices. Give one gradient for each shard of split(batch"),
        ([[np.ones(2)], []], 1, "Got [1, 0] from 2 devices."),
        ([[np.ones(2)] * 2, [np.ones(2)] * 2], 4, "Got one array for two shards, which contains the gradient of the"),
    ],
)
def test_allreduce_refuses_shards(arrays, shards, words):
    with pytest.raises(BatchError) as raised:
        lockstep.allreduce(arrays, shards=shards)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    "shards, words",
    [(1, "devices=2 needs at least 2 shards, got shards=1."), (0, "Got shards=0."), (2.5, "Got shards=2.5.")],
)
def test_split_refuses_shards(shards, words):
    with pytest.raises(PlanError) as raised:
        lockstep.split(np.ones(4), 2, shards=shards)
    assert words in str(raised.value)
