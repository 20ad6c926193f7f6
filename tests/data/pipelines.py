"""Data sets and helpers of the pipeline tests, importable from a reader process."""

import os
import random
import time

import numpy as np

import lockstep
from lockstep.backends.numpy import SGD, Dense
from lockstep.core.batches import Rows
from lockstep.data.reader import Readers

GENERATOR = np.random.Generator(np.random.PCG64(5))
IMAGES = GENERATOR.integers(0, 256, (37, 6, 6), dtype=np.uint8)
LABELS = GENERATOR.integers(0, 3, 37)
FLAT = IMAGES[:, :4, :4].reshape(37, 16).astype(np.float32) / 255


def augmented(image, label):
    """A random crop of 4 × 4 and a flip, from two generators."""
    top, left = np.random.randint(0, 3, 2)
    image = image[top : top + 4, left : left + 4]
    if random.random() < 0.5:
        image = image[:, ::-1]
    return image.astype(np.float32).ravel() / 255, label


class Pairs:
    """A data set of images and labels that draws, and writes down who read what."""

    def __init__(self, log=None):
        self._log = log

    def __len__(self):
        return 37

    def __getitem__(self, index):
        if self._log is not None:
            with open(self._log, "a") as file:
                file.write(f"{os.getpid()} {index}\n")
        return augmented(IMAGES[index], LABELS[index])


class Slow:
    """A data set that remembers what was read; at one example it says so and waits to be killed."""

    def __init__(self, stop=None):
        self.reads = []
        self._stop = stop

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.reads.append(index)
        if index == self._stop:
            print("here", flush=True)
            time.sleep(60)
        return np.full(5, index)


class Scaled:
    """A data set that can be changed."""

    scale = 1

    def __len__(self):
        return 37

    def __getitem__(self, index):
        return FLAT[index] * self.scale, LABELS[index]


def fails(x, y):
    """Refuses a negative label."""
    if y < 0:
        raise ValueError("a negative label")
    return x, y


def refuses_seven(x):
    """Whatever is not 7."""
    if x == 7:
        raise KeyError("no such thing")
    return x


class WithoutSeven:
    """Ten numbers, of which one cannot be read."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return refuses_seven(index)


def read(log):
    """[(pid, index), ...] of a data set's log."""
    return [tuple(map(int, line.split())) for line in log.read_text().split("\n") if line]


def trainer(devices, **options):
    model, optimizer = Dense([16, 8, 3], seed=1, dtype="float32", dropout=0.2), SGD(0.1, momentum=0.9)
    return lockstep.wrap(model, optimizer, "cross_entropy", devices=devices, **{"shards": 4, **options})


def fitted(pipeline, devices, epochs=2, **options):
    """The digest after some epochs, and what an evaluation says."""
    with trainer(devices, **options) as each:
        assert len(each.devices) == devices
        each.fit(pipeline, epochs=epochs, verbose=0)
        return each.digest(), each.evaluate(pipeline)["loss"].hex()


def epoch(pipeline, index, num_shards=1):
    """The pieces of an epoch, as one process reads them."""
    readers = Readers()
    try:
        chain = pipeline.compiled
        found = []
        for number in range(chain.batches.num):
            size = chain.count_examples(index, number)
            rows = [Rows(pipeline, index, number, size, shard, num_shards) for shard in range(num_shards)]
            found += readers.read([each for each in rows if len(each)])
        return found
    finally:
        readers.close()


def flat(batches):
    """The bytes of all arrays in the batches."""
    from lockstep.core.batches import leaves

    return b"".join(np.ascontiguousarray(value).tobytes() for batch in batches for value in leaves(batch))
