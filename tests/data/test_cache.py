"""Caches: computed once, shared, built again if damaged or out of date."""

import functools
import gc
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import cloudpickle
import numpy as np
import pytest

from data.pipelines import IMAGES, LABELS, Slow, augmented, epoch, flat
from lockstep.data import arrays, cache_identity, indexed
from lockstep.data.cache_table import read_header, write_header
from lockstep.data.reader import Readers
from lockstep.data.source import PipelineSource
from lockstep.errors import BatchError
from lockstep.launch.shm import PAGE, Region


class Counted:
    """A data set that counts how often it was read; draws, too."""

    def __init__(self, offset=0.0, num=20, shape=(3,)):
        self.reads = 0
        self._offset, self._num, self._shape = offset, num, shape

    def __len__(self):
        return self._num

    def __getitem__(self, index):
        self.reads += 1
        return np.full(self._shape, index + self._offset) + random.random(), index


def test_memory_is_filled_once_and_shared_by_all_pipelines_on_it():
    dataset = Counted()
    kept = indexed(dataset).cache()
    expected = flat(indexed(Counted()).batch(6))
    assert flat(kept.batch(6)) == expected
    assert dataset.reads == 20
    assert flat(kept.batch(4)) == flat(indexed(Counted()).batch(4))
    assert flat(epoch(kept.shuffle(1).batch(6), 3, 2)) != expected
    assert dataset.reads == 20


def test_the_cache_has_epoch_0_whichever_epoch_filled_it():
    one, other = (arrays(IMAGES, LABELS).map(augmented, random=True).cache().batch(8) for _ in range(2))
    late = flat(epoch(one, 5))
    assert late == flat(epoch(one, 0)) == flat(epoch(other, 0))
    assert late == flat(arrays(IMAGES, LABELS).map(augmented, random=True).batch(8))


def test_the_order_changes_each_epoch_for_a_shuffle_before_or_after():
    above = indexed(Counted()).cache().shuffle(4).batch(5)
    below = indexed(Counted()).shuffle(4).cache().batch(5)
    for index in (0, 1):
        assert [batch[1].tolist() for batch in epoch(above, index)] == [
            batch[1].tolist() for batch in epoch(below, index)
        ]
    assert flat(epoch(below, 0)) != flat(epoch(below, 1))


def test_a_file_is_built_and_read_by_a_later_run(tmp_path):
    path = tmp_path / "deep" / "kept.cache"
    first, second = Counted(), Counted()
    half = indexed(first).cache(path).batch(5)
    read = iter(half)
    next(read)
    assert not path.exists()
    assert path.with_name("kept.cache.part").exists()
    expected = [flat(half), flat(epoch(half, 1))]
    assert os.listdir(path.parent) == ["kept.cache"]
    again = indexed(second).cache(path).batch(5)
    assert [flat(again), flat(epoch(again, 1))] == expected
    assert second.reads == 3  # a few are worked out again and compared


def damaged(path, place, value=None):
    data = bytearray(path.read_bytes())
    data[place] ^= 0xFF if value is None else value
    path.write_bytes(data)


def unsealed(path):
    region = Region(os.open(path, os.O_RDWR))
    write_header(region, read_header(region)._replace(checksum=None))
    region.close()


DAMAGE = {
    "a bit of the head": lambda path: damaged(path, 30, 1),
    "the first byte": lambda path: damaged(path, 0),
    "a mark": lambda path: damaged(path, 4 * PAGE),
    "a row": lambda path: damaged(path, 5 * PAGE + 40),
    "the last byte": lambda path: damaged(path, -1),
    "cut short": lambda path: os.truncate(path, path.stat().st_size - PAGE),
    "a few bytes": lambda path: path.write_bytes(b"lockstep"),
    "empty": lambda path: path.write_bytes(b""),
    "something else": lambda path: path.write_bytes(os.urandom(9 * PAGE)),
    "not whole": unsealed,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_built_again(tmp_path, damage):
    path = tmp_path / "kept"
    expected = flat(indexed(Counted()).cache(path).batch(5))
    damage(path)
    dataset = Counted()
    assert flat(indexed(dataset).cache(path).batch(5)) == expected
    assert dataset.reads >= 20
    dataset = Counted()
    assert flat(indexed(dataset).cache(path).batch(5)) == expected
    assert dataset.reads == 3


@pytest.mark.parametrize(
    "other", [{"offset": 1.0}, {"num": 21}, {"num": 19}, {"shape": (4,)}, {"shape": (3, 1)}], ids=str
)
def test_a_file_of_other_examples_is_built_again(tmp_path, other):
    path = tmp_path / "kept"
    flat(indexed(Counted()).cache(path).batch(5))
    assert flat(indexed(Counted(**other)).cache(path).batch(5)) == flat(indexed(Counted(**other)).batch(5))


FOLDERS = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
VARIABLES = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, FOLDERS))}
BUILD = """
import sys
from data.pipelines import Slow
from lockstep.data import indexed

print(sum(batch.sum() for batch in indexed(Slow(int(sys.argv[2]))).cache(sys.argv[1], key="slow").batch(4)))
"""


def building(path, stop, folder):
    script = folder / "build.py"
    script.write_text(BUILD)
    command = [sys.executable, str(script), str(path), str(stop)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=VARIABLES)


@pytest.fixture
def left(tmp_path):
    """Where a build was killed at example 30, when batches up to 28 were there."""
    with building(tmp_path / "kept", 30, tmp_path) as process:
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGKILL)
    assert sorted(os.listdir(tmp_path)) == ["build.py", "kept.part"]
    return tmp_path / "kept"


def finished(path):
    """What was read to finish a build."""
    dataset = Slow()
    assert flat(indexed(dataset).cache(path, key="slow").batch(4)) == flat(indexed(Slow()).batch(4))
    assert sorted(os.listdir(path.parent)) == ["build.py", "kept"]
    return dataset.reads


def test_a_later_run_continues_a_build_that_was_killed(left):
    assert finished(left) == [0, 14, 27, *range(28, 40)]  # a few are worked out again and compared


ROW = 5 * PAGE  # where the first row is; the marks take one page
TORN = {
    "a row": (lambda part: damaged(part, ROW + 5 * 40 + 7), [0, 14, 27, 5, *range(28, 40)]),
    "a mark": (lambda part: damaged(part, 4 * PAGE + 5 * 8), [0, 14, 27, 5, *range(28, 40)]),
    "a mark too many": (lambda part: damaged(part, 4 * PAGE + 33 * 8, 7), [0, 14, 27, *range(28, 40)]),
    "the head": (lambda part: damaged(part, 30, 1), [*range(40)]),
    "cut short": (lambda part: os.truncate(part, part.stat().st_size - PAGE), [*range(40)]),
    "empty": (lambda part: part.write_bytes(b""), [*range(40)]),
}


@pytest.mark.parametrize("kind", TORN)
def test_rows_torn_by_a_crash_are_computed_again(kind, left):
    damage, reads = TORN[kind]
    damage(left.with_name("kept.part"))
    assert finished(left) == reads


def test_two_processes_build_one_file_together(tmp_path):
    path = tmp_path / "kept"
    with building(path, 30, tmp_path) as process:
        assert process.stdout.readline() == "here\n"
        assert finished(path) == [*range(28, 40)]  # batches up to 28 were there
        process.kill()


def test_two_builders_of_different_examples_do_not_mix(tmp_path):
    path = tmp_path / "kept"
    one, other = (iter(arrays(np.arange(8) + start).cache(path).batch(4)) for start in (0, 100))
    found = [next(one), next(other), next(one), next(other)]
    assert [batch.tolist() for batch in found] == [
        [0, 1, 2, 3],
        [100, 101, 102, 103],
        [4, 5, 6, 7],
        [104, 105, 106, 107],
    ]
    assert os.listdir(tmp_path) == ["kept"]
    assert flat(arrays(np.arange(8) + 100).cache(path).batch(4)) == (np.arange(8) + 100).tobytes()


def test_an_incomplete_file_is_read_by_a_later_run(tmp_path):
    for name, part in {
        "take": lambda pipeline, path: pipeline.take(10).cache(path).batch(5),
        "drop_last": lambda pipeline, path: pipeline.cache(path).batch(16, drop_last=True),
    }.items():
        first, second = Slow(), Slow()
        expected = flat(part(indexed(first), tmp_path / name))
        assert flat(part(indexed(second), tmp_path / name)) == expected
        assert (len(first.reads), len(second.reads)) == (10 if name == "take" else 32, 3)


# -- other examples, although the few that are compared are the same


def once_more(x):
    return x + 1


def far(value):
    """A function that differs for few examples, in a constant, a closure, an argument or a function that it calls."""

    def shifted(x, where=7):
        return once_more(x) + (value if x == where else 0)

    return shifted


def shifted(x):
    return once_more(x) + (1 if x == 7 else 0)


class Table:
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return once_more(index)


class OtherTable(Table):
    def __getitem__(self, index):
        return once_more(index) + (1 if index == 7 else 0)


OtherTable.__qualname__ = "Table"
TWENTY = np.arange(20)
CHANGED = np.where(TWENTY == 7, 70, TWENTY)
ALIKE = {
    "arrays": (lambda: arrays(TWENTY), lambda: arrays(CHANGED)),
    "a constant": (lambda: arrays(TWENTY).map(once_more), lambda: arrays(TWENTY).map(shifted)),
    "a closure": (lambda: arrays(TWENTY).map(far(0)), lambda: arrays(TWENTY).map(far(1))),
    "an array in a closure": (
        lambda: indexed(range(20)).map(lambda index, own=TWENTY: own[index]),
        lambda: indexed(range(20)).map(lambda index, own=CHANGED: own[index]),
    ),
    "a partial": (
        lambda: arrays(TWENTY).map(functools.partial(far(1), where=-1)),
        lambda: arrays(TWENTY).map(functools.partial(far(1), where=7)),
    ),
    "a data set's code": (lambda: indexed(Table()), lambda: indexed(OtherTable())),
}


@pytest.mark.parametrize("kind", ALIKE)
def test_a_file_is_not_used_if_only_a_few_examples_are_equal(kind, tmp_path):
    one, other = ALIKE[kind]
    flat(one().cache(tmp_path / "kept").batch(20))
    expected = flat(other().batch(20))
    assert expected != flat(one().batch(20))
    assert flat(other().cache(tmp_path / "kept").batch(20)) == expected


def test_a_mapped_file_that_was_written_again(tmp_path):
    for examples in (TWENTY, CHANGED):
        np.save(tmp_path / "x.npy", examples)
        os.utime(tmp_path / "x.npy", ns=(0, int(examples[7])))
        assert flat(arrays(tmp_path / "x.npy").cache(tmp_path / "kept").batch(20)) == examples.tobytes()


def test_a_function_that_is_called_is_part_of_its_callers_identity(monkeypatch):
    before = cache_identity.hash_code(shifted)
    monkeypatch.setitem(globals(), "once_more", lambda x: x + 1 if x != 8 else 0)
    assert cache_identity.hash_code(shifted) != before


def test_data_that_changes_between_two_fits_is_cached_again(tmp_path):
    examples = TWENTY.copy()
    pipeline = arrays(examples).cache(tmp_path / "kept").batch(20)
    for _ in range(2):
        source = PipelineSource(pipeline)  # as each fit makes one
        assert flat(Readers().read(list(source.epoch(0)))) == examples.tobytes()
        examples[7] += 1


TOLD = """
import pickle, sys
from lockstep.data import cache_identity
print(cache_identity.hash_code(pickle.loads(sys.stdin.buffer.read())))
"""


def test_every_process_computes_the_same_hash_of_a_function():
    """Also one with another order of sets, and another place for everything in memory."""

    def recursive(x, deep=({"a", "b"}, 2.5), *, kind=print):
        names = x in {"red", "green", "blue", None, 3.0}
        return [far(y)(x) for y in deep] if names else (recursive, GENERATED, lambda z: shifted(z))

    function = functools.partial(recursive, deep=(TWENTY, far(3)))
    for seed in "123":
        command, variables = [sys.executable, "-c", TOLD], {**VARIABLES, "PYTHONHASHSEED": seed}
        sent = cloudpickle.dumps(function)
        told = subprocess.run(command, input=sent, env=variables, capture_output=True, check=True).stdout
        assert told.decode().strip() == str(cache_identity.hash_code(function))


GENERATED = object()


def test_examples_that_cannot_be_cached_are_refused():
    with pytest.raises(BatchError) as caught:
        list(indexed(["a", "b"]).cache().batch(2))
    assert str(caught.value) == (
        "A cache cannot store list of 2, because its rows have a fixed size. Convert this value to arrays of numbers "
        "with .map(...) before .cache."
    )
    sizes = indexed([np.zeros(2), np.zeros(2), np.zeros(3)]).cache().batch(2)
    with pytest.raises(
        BatchError, match=r"must have equal types and shapes, but these differ: ndarray\(3, 2\) and ndarray\(1, 3\)"
    ):
        list(sizes)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_descriptors_are_closed_with_the_pipeline(kind, tmp_path):
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    kept = indexed(Counted()).cache(tmp_path / "kept" if kind == "file" else None).batch(5)
    flat(kept)
    assert len(os.listdir("/proc/self/fd")) > before
    del kept
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_pytrees_and_constants():
    nest = {"x": (IMAGES, LABELS.astype(np.int16)), "rate": 0.5}
    batch = next(iter(arrays(nest).cache().batch(3)))
    np.testing.assert_equal(batch, {"x": (IMAGES[:3], LABELS[:3].astype(np.int16)), "rate": 0.5})
    assert batch["x"][1].dtype == np.int16
