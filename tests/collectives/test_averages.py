"""The array operations behind `lockstep.EMA`: one suite for every framework, numpy's arithmetic as the oracle."""

import numpy as np
import pytest

from collectives.test_collectives import KITS, bits, noise
from lockstep.backends import registry
from lockstep.backends.array_ops import name_dtype

DECAY = 0.999


@pytest.fixture(params=KITS)
def kit(request):
    chosen = KITS[request.param]
    with chosen.scope():
        yield chosen


def find_ops(array):
    return registry.load_array_ops(registry.find_array_backend(array))


def average_with_numpy(values):
    average = values[0].copy()
    for value in values[1:]:
        average = average * np.float32(DECAY) + value * np.float32(1 - DECAY)
    return average


def test_an_average_has_the_bits_of_numpys_three_operations(kit):
    """A fused multiply-add would round once instead of three times."""
    rows = [[noise(64, 3), noise(200)] for _ in range(6)]
    averages = None
    for row in rows:
        arrays = [kit.params(value) for value in row]
        ops = find_ops(arrays[0])
        averages = [*map(ops.widen, arrays)] if averages is None else ops.update_averages(averages, arrays, DECAY)
    for index, average in enumerate(averages):
        expected = average_with_numpy([row[index] for row in rows])
        assert bits(ops.to_numpy(average)) == bits(expected)
        fused = rows[0][index].astype("float64")
        for row in rows[1:]:
            fused = (fused * np.float32(DECAY) + row[index] * np.float64(np.float32(1 - DECAY))).astype("float32")
        assert bits(fused) != bits(expected)  # or this test could not tell them apart


def test_a_widened_array_is_a_copy(kit):
    array = kit.params(noise(4))
    ops = find_ops(array)
    before = ops.to_numpy(array)
    average = ops.widen(array)
    ops.update_averages([average], [kit.params(noise(4))], 0.5)
    assert bits(ops.to_numpy(array)) == bits(before)


def test_short_floats_are_widened_to_float32(kit):
    array = kit.params(np.arange(4, dtype="float16"))
    ops = find_ops(array)
    average = ops.widen(array)
    assert name_dtype(average) == "float32"
    (updated,) = ops.update_averages([average], [array], DECAY)
    assert name_dtype(updated) == "float32"


def test_an_average_comes_back_from_numpy(kit):
    array = kit.params(noise(4, 2))
    ops = find_ops(array)
    data = noise(4, 2)
    loaded = ops.from_numpy(data, array)
    assert registry.find_array_backend(loaded) == registry.find_array_backend(array)
    assert bits(ops.to_numpy(loaded)) == bits(data)
    ops.update_averages([loaded], [array], DECAY)
    data[:] = 0
    assert ops.to_numpy(loaded).any()
