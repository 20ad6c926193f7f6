"""The numpy reference backend: the same bits after every step, each number of devices in a world of its own."""

import numpy as np
import pytest

import lockstep
from lockstep.backends.numpy import SGD, Dense, DenseCrossEntropy
from lockstep.core import tree
from parity.runs import Case, compare, run

GENERATOR = np.random.Generator(np.random.PCG64(3))


def batch(size):
    return GENERATOR.standard_normal((size, 97)).astype("float32"), GENERATOR.integers(0, 10, size)


def forward(size):
    data = batch(size)
    return data, data[0]


# 61 and 27 do not divide by 8, 5 and 1 leave shards empty; 1,003 examples in batches of 250 end with one of 3.
STEPS = [batch(size) for size in (512, 61, 27, 8, 5, 1)]  # 512 decides on 8 shards
EPOCH = batch(1003)
FORWARD = [forward(size) for size in range(1, 18)]  # up to 2 · devices + 1


def cases(name, shards):
    return [
        Case(name, shards, STEPS),
        Case("fit 1,003 examples, tail of 3", shards, fit=(EPOCH, 250)),
        Case("evaluate, predict", shards, forward=FORWARD),
    ]


KINDS = {
    "float32, dropout, momentum": lambda: (
        Dense([97, 33, 10], seed=1, dtype="float32", dropout=0.5),
        SGD(0.1, momentum=0.9),
    ),
    "float64": lambda: (Dense([97, 33, 17, 10], seed=2), SGD(0.1)),
}


def programme(kind, devices, counts=(8, 4)):
    """Runs every case in turn on one world, for each of these numbers of shards that gives every device one."""
    model, optimizer = KINDS[kind]()
    loss = DenseCrossEntropy(weights=tuple(np.linspace(0.5, 2, 10)))
    runs = []
    with lockstep.wrap(model, optimizer, loss, metrics=["accuracy"], devices=devices, shards=8) as trainer:
        assert len(trainer.devices) == devices
        trainer.digests()  # waits until the workers are up, so that the seconds are the steps' own
        for case in (case for shards in counts for case in cases(kind, shards)):
            if case.shards >= devices:
                trainer.session.run.shards = case.shards
                runs.append((case, run(trainer, case)))
    return runs


@pytest.fixture(scope="module")
def references():
    return {kind: programme(kind, 1) for kind in KINDS}


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_devices_give_the_bits_of_one(kind, devices, references, matrix):
    compare("numpy", programme(kind, devices), references[kind], matrix)


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_no_argument_given(devices):
    """Nothing but the batch decides on shards, threads and seed."""
    model, optimizer = KINDS["float32, dropout, momentum"]()
    with lockstep.wrap(model, optimizer, "cross_entropy", devices=devices) as trainer:
        assert len(trainer.devices) == devices
        trainer.step(STEPS[0])
        assert trainer.session.run.shards == 8
        digests.add(trainer.digest())
    assert len(digests) == 1


digests = set()


def test_another_order_of_additions_gives_other_bits(monkeypatch):
    """The control: were the sums not sensitive to their order, equal digests would say nothing."""

    def alone():
        return [programme(kind, 1, [shards]) for kind in KINDS for shards in (4, 8)]

    references = alone()
    monkeypatch.setattr(
        tree.Span,
        "halves",
        property(lambda node: (tree.Span(node.start, node.stop - 1), tree.Span(node.stop - 1, node.stop))),
    )
    tree._program.cache_clear()
    try:
        for ((_, changed), *_), ((_, reference), *_) in zip(alone(), references, strict=True):
            assert changed.equal(reference) == 0
    finally:
        tree._program.cache_clear()
