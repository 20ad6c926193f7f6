"""Prefetching: the same bytes, errors at the read that needs them, and no thread left behind."""

import gc
import queue
import threading

import numpy as np
import pytest

from data.pipelines import IMAGES, LABELS, Pairs, epoch, flat
from lockstep.core.batches import Rows
from lockstep.data import arrays, indexed
from lockstep.data.reader import PipelineReader, Readers
from lockstep.errors import ExampleError


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("lockstep-reader")]


CHAINS = {
    "gathered": lambda: arrays(IMAGES, LABELS).shuffle(3).batch(8),
    "cached": lambda: arrays(IMAGES, LABELS).shuffle(3).cache().batch(8),
    "repeated": lambda: arrays(IMAGES, LABELS).shuffle(3).repeat().batch(8).take(9),
    "made": lambda: indexed(Pairs()).shuffle(3).batch(8),
}


@pytest.mark.parametrize("kind", CHAINS)
@pytest.mark.parametrize("num", [1, 4])
def test_prefetching_gives_the_same_bytes(kind, num):
    for index in (0, 2):
        for shards in (1, 3):
            expected = flat(epoch(CHAINS[kind](), index, shards))
            assert flat(epoch(CHAINS[kind]().prefetch(num), index, shards)) == expected
    assert threads() == []


def test_the_next_batches_are_computed_ahead():
    made = []
    pipeline = arrays(IMAGES).batch(10).prefetch(2)
    reader = PipelineReader(pipeline.compiled, stage=lambda piece: made.append(len(piece)) or piece)
    first = Rows(None, 0, 0, 10, 1, 2)
    reader.read([first])
    assert set(reader._started) == {(Rows(None, 0, 1, 10, 1, 2),), (Rows(None, 0, 2, 10, 1, 2),)}
    reader.read([Rows(None, 0, 3, 7, 1, 2)])  # a wrong guess; after the last batch comes the next epoch
    assert set(reader._started) == {(Rows(None, 1, 0, 10, 1, 2),), (Rows(None, 1, 1, 10, 1, 2),)}
    reader.close()
    assert threads() == []
    assert set(made) <= {5, 3}


def failing(x):
    if x == 12:
        raise ValueError("bad")
    return x


def test_an_error_is_raised_by_the_read_that_needs_the_piece():
    read = iter(arrays(np.arange(30)).map(failing).batch(5).prefetch(3))
    assert [next(read).tolist(), next(read).tolist()] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    with pytest.raises(ExampleError, match="failed on example 12: ValueError: bad"):
        next(read)
    assert threads() == []


def test_leaving_an_iteration_ends_its_threads():
    for _ in arrays(IMAGES).batch(2).prefetch(2):
        assert threads()
        break
    gc.collect()
    assert threads() == []


def test_a_reader_ends_with_its_pipeline():
    readers = Readers()
    pipeline = arrays(IMAGES).batch(4).prefetch(2)
    readers.read([Rows(pipeline, 0, 0, 4)])
    assert threads()
    del pipeline
    gc.collect()
    assert threads() == []


def test_garbage_collected_readers_end():
    readers = Readers()
    pipeline = arrays(IMAGES).batch(4).prefetch(2)
    readers.read([Rows(pipeline, 0, 0, 4)])
    del readers
    gc.collect()
    assert threads() == []


def test_prefetching_overlaps_with_computing(tmp_path):
    name = tmp_path / "x.npy"
    np.save(name, np.zeros((64, 4)))
    slow = arrays(name).batch(16).prefetch(1)
    made = queue.SimpleQueue()
    reader = PipelineReader(slow.compiled, stage=lambda piece: made.put("a batch") or piece)
    reader.read([Rows(None, 0, 0, 16)])
    for _ in range(2):  # the second is made though nobody has asked for it yet
        assert made.get(timeout=60) == "a batch"
    reader.close()
