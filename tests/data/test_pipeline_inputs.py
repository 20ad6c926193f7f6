"""Pipeline inputs: mapped files, arrays in memory, and fingerprints."""

import pickle

import cloudpickle
import numpy as np
import pytest

from data.pipelines import Pairs
from lockstep.data import arrays, indexed
from lockstep.data.pipeline_inputs import find_mapped_file

BIG = np.arange(60_000, dtype=np.int64).reshape(3000, 20)


def sent(pipeline):
    """The pipeline as it arrives elsewhere, and the bytes that went there."""
    data = cloudpickle.dumps(pipeline)
    return pickle.loads(data), len(data)


@pytest.fixture
def file(tmp_path):
    np.save(tmp_path / "big.npy", BIG)
    return tmp_path / "big.npy"


VIEWS = {
    "whole": lambda mapped: mapped,
    "rows": lambda mapped: mapped[100:2000],
    "every third": lambda mapped: mapped[5::3],
    "backwards": lambda mapped: mapped[::-1],
    "columns": lambda mapped: mapped[:, 3:7],
    "transposed": lambda mapped: mapped.T,
    "plain view": lambda mapped: np.asarray(mapped)[7:],
    "slice of a slice": lambda mapped: mapped[10:][5:, 1:],
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_a_mapped_file_are_pickled_by_name(file, view):
    expected = VIEWS[view](BIG)
    pipeline = arrays(VIEWS[view](np.load(file, mmap_mode="r"))).shuffle(1).batch(7)
    assert pipeline.compiled.is_read_in_workers
    there, size = sent(pipeline)
    assert size < 20_000
    (found,) = (leaf for leaf in [there.input.arrays])
    assert find_mapped_file(found) is not None
    np.testing.assert_array_equal(found, expected)
    assert [batch.tobytes() for batch in there] == [batch.tobytes() for batch in pipeline]


def test_a_path_is_mapped(file):
    for name in (file, str(file)):
        pipeline = arrays(name, BIG[:, 0]).batch(1000)
        assert isinstance(pipeline.input.arrays[0], np.memmap)
        batch = next(iter(pipeline))
        np.testing.assert_array_equal(batch[0], BIG[:1000])
        assert type(batch[0]) is np.ndarray
        assert sent(arrays(name).batch(2))[1] < 20_000


def test_copy_on_write_maps_are_pickled_by_value(file):
    changed = np.load(file, mmap_mode="c")
    changed[0] = -1
    there, _ = sent(arrays(changed).batch(2))
    assert there.input.arrays[0].tolist() == [-1] * 20


def test_arrays_in_memory_are_gathered_by_the_scripts_process():
    assert not arrays(BIG).shuffle().batch(2).prefetch(2).compiled.is_read_in_workers
    assert arrays(BIG).map(abs).compiled.is_read_in_workers
    assert arrays(BIG).cache().compiled.is_read_in_workers
    assert indexed(Pairs()).compiled.is_read_in_workers


@pytest.mark.parametrize(
    "other",
    [
        arrays(BIG).shuffle(2).batch(4),
        arrays(BIG).shuffle(1).batch(5),
        arrays(BIG).shuffle(1).batch(4, drop_last=True),
        arrays(BIG).batch(4),
        arrays(BIG[:-1]).shuffle(1).batch(4),
        arrays(BIG.astype(np.int32)).shuffle(1).batch(4),
        arrays(BIG + 1).shuffle(1).batch(4),
        arrays(BIG).shuffle(1).batch(4).take(2),
        arrays(BIG).shuffle(1).map(abs).batch(4),
        arrays(BIG).shuffle(1).cache().batch(4),
    ],
)
def test_different_pipelines_have_different_fingerprints(other):
    one = arrays(BIG).shuffle(1).batch(4)
    assert one.fingerprint == arrays(BIG.copy()).shuffle(1).batch(4).prefetch(3).fingerprint
    assert one.fingerprint != other.fingerprint
