"""Training over pipelines: the same bits on any number of devices, and each process reads its own shards."""

import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from data.pipelines import FLAT, IMAGES, LABELS, Pairs, Scaled, augmented, fails, fitted, read, trainer
from lockstep.callbacks import Callback
from lockstep.callbacks.base import NO_LOGS
from lockstep.core.plan import bounds
from lockstep.data import arrays, indexed, stream
from lockstep.data.pipeline_inputs import Arrays
from lockstep.data.reader_processes import pack_pipeline
from lockstep.errors import BatchError, ExampleError
from lockstep.launch.shm import Region


def made(workers=None):
    return arrays(IMAGES, LABELS).shuffle(3).map(augmented, random=True, workers=workers)


def mapped(tmp_path):
    np.save(tmp_path / "x.npy", FLAT)
    return arrays(tmp_path / "x.npy", LABELS).shuffle(3)


CHAINS = {
    "gathered": lambda _: arrays(FLAT, LABELS).shuffle(3).batch(10),
    "gathered ahead": lambda _: arrays(FLAT, LABELS).shuffle(3).batch(10).prefetch(2),
    "mapped": lambda tmp: mapped(tmp).batch(10),
    "mapped ahead": lambda tmp: mapped(tmp).batch(10).prefetch(2),
    "made": lambda _: made().batch(10),
    "made ahead": lambda _: made().batch(10).prefetch(2),
    "made by readers": lambda _: made(workers=2).batch(10),
    "made by readers ahead": lambda _: made(workers=2).batch(10).prefetch(1),
    "kept": lambda _: made().cache().batch(10),
    "kept in a file": lambda tmp: made().cache(tmp / "kept").batch(10).prefetch(1),
    "data set": lambda _: indexed(Pairs()).shuffle(3).batch(10),
    "taken": lambda _: made().take(21).batch(10, drop_last=True),
    "streamed": lambda _: stream(list(zip(FLAT, LABELS, strict=True))).batch(10).prefetch(1),
}
ALIKE = [
    ("gathered", "gathered ahead", "mapped", "mapped ahead"),
    ("made", "made ahead", "made by readers", "made by readers ahead", "data set"),
    ("kept", "kept in a file"),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The result of every chain on one device."""
    return {kind: fitted(CHAINS[kind](tmp_path_factory.mktemp("alone")), 1) for kind in CHAINS}


def test_equivalent_pipelines_give_the_same_bits(alone):
    for kinds in ALIKE:
        assert len({alone[kind] for kind in kinds}) == 1
    assert len(set(alone.values())) == 5


@pytest.mark.parametrize(
    "kind, devices", [*((kind, 2) for kind in CHAINS), *((kind, 3) for kind in ("gathered ahead", "made", "kept"))]
)
def test_several_devices_give_the_bits_of_one(kind, devices, alone, tmp_path):
    assert fitted(CHAINS[kind](tmp_path), devices) == alone[kind]


def test_a_pipeline_is_read_like_its_arrays():
    options = {"epochs": 2, "batch_size": 10, "verbose": 0}
    with trainer(1, seed=3) as one, trainer(1, seed=3) as other:
        one.fit((FLAT, LABELS), **options)
        other.fit(arrays(FLAT, LABELS).shuffle(3), **options)
        assert one.digest() == other.digest()
        assert one.evaluate((FLAT, LABELS)) == other.evaluate(arrays(FLAT, LABELS))
        np.testing.assert_array_equal(one.predict(FLAT), other.predict(arrays(FLAT, LABELS)))
        np.testing.assert_array_equal(one.predict(FLAT), other.predict(arrays(FLAT)))


@pytest.mark.parametrize("devices", [1, 2])
def test_predict_takes_the_inputs_of_a_pipelines_batches(devices):
    with trainer(devices) as each:
        expected = each.predict(FLAT)
        for pipeline in (arrays(FLAT, LABELS), arrays(FLAT, LABELS).map(lambda x, y: (x, y)).batch(7).prefetch(2)):
            np.testing.assert_allclose(each.predict(pipeline), expected, rtol=1e-5)


def test_each_process_reads_the_examples_of_its_own_shards(tmp_path):
    log = tmp_path / "log"
    with trainer(2) as each:
        each.fit(indexed(Pairs(log)).batch(37), verbose=0)
        (worker,) = each.session.processes.pids
    found = read(log)
    places = bounds(37, 4)
    expected = {os.getpid(): range(places[0][0], places[1][1]), worker: range(places[2][0], places[3][1])}
    assert {pid: [index for reader, index in found if reader == pid] for pid in expected} == {
        pid: list(indices) for pid, indices in expected.items()
    }


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_workers_fill_one_cache_together(kind, tmp_path):
    log = tmp_path / "log"
    path = tmp_path / "kept" if kind == "file" else None
    with trainer(3) as each:
        each.fit(indexed(Pairs(log)).cache(path).shuffle(1).batch(10), epochs=3, verbose=0)
    found = read(log)
    assert len({pid for pid, _ in found}) == 3
    assert sorted(index for _, index in found) == list(range(37))  # nobody read what another had kept
    assert sorted(os.listdir(tmp_path)) == (["kept", "log"] if path else ["log"])


@pytest.mark.parametrize("place", [0, 36])  # in the script's own shard; in the last worker's
@pytest.mark.parametrize("devices", [1, 3])
def test_a_failing_example_changes_no_replica(devices, place):
    labels = LABELS.copy()
    labels[place] = -1
    good, bad = (arrays(FLAT, each).map(fails).batch(37) for each in (LABELS, labels))
    with trainer(devices) as each, trainer(1) as one:
        for use in (one, each):
            use.fit(good, verbose=0)
        for use in (each.fit, each.evaluate):
            with pytest.raises(
                ExampleError, match=rf"failed on example {place}: ValueError: a negative label"
            ) as caught:
                use(bad)
            assert type(caught.value.__cause__) is ValueError
        assert each.digest() == one.digest()
        for use in (one, each):
            use.fit(good, verbose=0)
        assert each.digest() == one.digest()


def test_a_data_set_that_cannot_be_pickled_is_refused():
    lock = threading.Lock()
    pipeline = arrays(FLAT, LABELS).map(lambda x, y: (x, y) if lock else None).batch(10)
    with trainer(2) as each:
        with pytest.raises(BatchError, match="cannot be pickled, so it cannot be sent to other processes, which read"):
            each.fit(pipeline, verbose=0)
        each.fit((FLAT, LABELS), verbose=0)  # the workers still run


def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_a_garbage_collected_pipeline_is_dropped_in_workers():
    with trainer(2) as each:
        each.fit((FLAT, LABELS), batch_size=10, verbose=0)
        before = descriptors()
        for seed in range(3):
            each.fit(made().shuffle(seed).cache().batch(10), verbose=0)
        assert descriptors() == before
        assert "lockstep-pipeline" not in Path("/proc/self/maps").read_text()
        worker = f"/proc/{each.session.processes.pids[0]}/fd"
        assert any("lockstep-cache" in os.readlink(f"{worker}/{name}") for name in os.listdir(worker))
        each.fit(made().batch(10), verbose=0)  # the next command tells of the loss
        assert not any("lockstep-cache" in os.readlink(f"{worker}/{name}") for name in os.listdir(worker))


def readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("lockstep-reader")]


class Watched(Callback):
    def on_train_batch_end(self, batch, logs=NO_LOGS):
        assert readers()


def test_close_ends_readers():
    before = descriptors()
    kept = made(workers=1).cache().batch(10).prefetch(2)
    with trainer(2) as each:
        each.fit(kept, callbacks=[Watched()], verbose=0)
        assert not readers()  # what was opened to read ends with the fit
        rows = next(each.session.open_data(kept, None, shuffle=False).epoch(0))
        each.session.step(rows)
        assert readers()
        each.close()
        assert not readers()
        each.session.step(rows)  # a later use opens it again
    del kept, rows
    assert descriptors() == before


def test_garbage_collecting_a_trainer_ends_its_readers():
    before = descriptors()
    pipeline = made(workers=1).batch(10).prefetch(2)
    each = trainer(2)
    each.fit(pipeline, verbose=0)
    del each
    gc.collect()
    assert not readers()
    assert descriptors() == before


BIG = np.zeros((200_000, 16), np.float32)  # 12.8 MB


@pytest.mark.parametrize(
    "big", [BIG, torch.from_numpy(BIG), np.zeros((400_000, 16), np.float32)[::2]], ids=["numpy", "torch", "strided"]
)
def test_arrays_in_memory_reach_the_workers_through_one_segment(big):
    pipeline = arrays(big, np.zeros(200_000, np.int64)).map(lambda x, y: (x, y)).take(40).batch(10)
    region = Region.create("pipeline")
    assert len(pack_pipeline(pipeline, region)) < 10_000
    assert region.nbytes > BIG.nbytes
    region.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_each_fit_reads_the_data_as_it_is_when_it_starts(workers):
    def digests(devices):
        x, scaled = FLAT.copy(), Scaled()
        given = arrays(x, LABELS).map(lambda x, y: (x, y), workers=workers).batch(10)
        asked = indexed(scaled, workers=workers).batch(10)
        with trainer(devices) as each:
            for _ in range(2):
                each.fit(given, verbose=0)
                each.fit(asked, verbose=0)
                yield each.digest()
                yield each.evaluate(given)
                x *= 3
                scaled.scale *= 3

    one = list(digests(1))
    assert one[1] != one[3]
    assert list(digests(2)) == one


@pytest.mark.parametrize("devices", [1, 3])
def test_data_prefetched_for_several_workers_is_gathered_once(devices, monkeypatch):
    gathered = []
    gather = Arrays.gather
    monkeypatch.setattr(Arrays, "gather", lambda base, indices: gathered.append(len(indices)) or gather(base, indices))
    with trainer(devices) as each:
        each.fit(arrays(FLAT, LABELS).batch(8).prefetch(2), epochs=2, verbose=0)
    assert sum(gathered) <= 2 * 37 + 2 * 8  # and the next two batches, which nobody asked for
