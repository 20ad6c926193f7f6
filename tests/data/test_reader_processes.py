"""PipelineReader processes: any number of them gives the same bytes."""

import os
import signal
import threading

import numpy as np
import pytest

from data.pipelines import IMAGES, LABELS, Pairs, augmented, flat, read
from lockstep.core.batches import Rows
from lockstep.data import arrays, indexed, stream
from lockstep.data.reader import PipelineReader
from lockstep.errors import BatchError, WorkerError


def chain(kind, workers):
    if kind == "data set":
        return indexed(Pairs(), workers=workers).shuffle(2).batch(8)
    if kind == "arrays":
        return arrays(IMAGES, LABELS).shuffle(2).map(augmented, random=True, workers=workers).batch(8)
    if kind == "stream":
        examples = list(zip(IMAGES, LABELS, strict=True))
        return stream(examples).map(augmented, random=True, workers=workers).batch(8)
    both = arrays(IMAGES, LABELS).shuffle(2).map(augmented, random=True, workers=workers)
    return both.cache().map(lambda x, y: (x + np.float32(np.random.rand()), y), random=True).batch(8)


@pytest.mark.parametrize("kind", ["arrays", "data set", "stream", "cache"])
def test_any_number_of_readers_gives_the_same_bytes(kind):
    expected = flat(chain(kind, 0))
    for workers in (1, 3):
        assert flat(chain(kind, workers)) == expected
        assert flat(chain(kind, workers).prefetch(3)) == expected


class Lazy(Pairs):
    """Imports torch when it is needed."""

    def __getitem__(self, index):
        import torch

        return torch.rand(1).item()


def test_a_reader_process_that_imports_torch_later_draws_the_same():
    assert flat(indexed(Lazy(), workers=1).batch(37)) == flat(indexed(Lazy()).batch(37))


def test_functions_run_in_the_reader_processes(tmp_path):
    log = tmp_path / "log"
    flat(indexed(Pairs(log), workers=2).batch(4).prefetch(2))
    readers = {pid for pid, _ in read(log)}
    assert len(readers) == 2
    assert os.getpid() not in readers


def test_a_function_may_write_to_its_arguments():
    def write(x):
        x += 1
        return x

    rows = np.zeros((8, 3))
    for workers in (0, 1):
        assert flat(arrays(rows).map(write, workers=workers).batch(4)) == np.ones((8, 3)).tobytes()
    assert not rows.any()


@pytest.mark.parametrize(("workers", "place", "own"), [(0, (0, 1), 0), (3, (0, 2), 2), (3, (1, 2), 1), (1, (1, 2), 1)])
def test_processes_of_a_host_share_its_readers(workers, place, own):
    reader = PipelineReader(indexed(Pairs(), workers=workers).batch(4).compiled, place=place)
    assert reader._num_workers == own
    reader.close()


def test_the_default_number_of_readers():
    assert indexed(Pairs()).batch(4).compiled.workers == 0
    assert indexed(Pairs()).batch(4).prefetch(1).compiled.workers == 1
    assert arrays(IMAGES).batch(4).prefetch(1).compiled.workers == 0  # gathering needs a thread and no process


def test_a_reader_that_is_killed():
    """The read says so, and the next one starts anew."""
    pipeline = indexed(Pairs(), workers=1).batch(8)
    reader = PipelineReader(pipeline.compiled)
    rows = [Rows(None, 0, number, 8) for number in range(3)]
    try:
        expected = [reader.read([each])[0] for each in rows]
        (pid,) = reader._pool.pids
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="was killed by SIGKILL"):
            reader.read([rows[1]])
        assert flat(reader.read(rows)) == flat(expected)
    finally:
        reader.close()


class Locked(Pairs):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


def test_a_data_set_that_cannot_be_pickled_is_refused():
    assert flat(indexed(Locked()).batch(9)) == flat(indexed(Pairs()).batch(9))
    with pytest.raises(BatchError) as caught:
        list(indexed(Locked(), workers=1).batch(9))
    assert str(caught.value).startswith(
        "The data set or a function given to .map cannot be pickled, so it cannot be sent to other processes, which "
        "read the examples: cannot pickle '_thread.lock' object."
    )
