"""PyTorch: the same bits after every step on 1, 2, 3, 4 and 8 devices.

One world per number of devices runs every case in turn, for a worker takes seconds
to start; the first batch, of 512, decides on 8 shards, and the later cases take 4.
"""

import pytest
import torch

from lockstep.core import tree
from parity import models
from parity.runs import Case, compare, run


def with_inputs(data):
    return data, {"model": data["model"], "x": data["x"]}


def cases():
    torch.manual_seed(20)
    return [
        Case("nothing given, batch 512", 8, [models.features(512)]),
        Case("MLP 97 features, Adam", 8, [models.features(size) for size in (27, 61, 64, 5, 1)]),
        Case("LeNet dropout, Adam", 8, [models.images(size) for size in (61, 27, 3)]),
        Case("transformer tied, AdamW", 8, [models.tokens(size) for size in (61, 16, 5)]),
        Case("ResNet-18, AdamW", 8, [models.small_images(size) for size in (61, 27)]),
        Case("fit 1,003 examples, tail of 3", 8, fit=(models.features(1003), 250)),
        Case("evaluate, predict", 8, forward=[with_inputs(models.tokens(size)) for size in (1, 2, 5, 9, 17)]),
        Case("evaluate, predict ResNet-18", 8, forward=[with_inputs(models.small_images(17))]),
        Case("MLP 97 features, Adam", 4, [models.features(size) for size in (27, 61, 3)]),
        Case("LeNet dropout, Adam", 4, [models.images(size) for size in (61, 2)]),
        Case("transformer tied, AdamW", 4, [models.tokens(size) for size in (30, 3)]),
        Case("ResNet-18, AdamW", 4, [models.small_images(size) for size in (61, 27)]),
    ]


def programme(devices):
    """Runs every case in turn on one world, and gives the cases with their records."""
    runs = []
    with models.wrapped(devices) as trainer:
        assert len(trainer.devices) == devices
        trainer.digests()  # waits until the workers are up, so that the seconds are the steps' own
        for case in cases():
            if case.shards >= devices:
                if runs:
                    trainer.session.run.shards = case.shards  # the first batch decides for itself
                runs.append((case, run(trainer, case)))
                assert (trainer.session.run.shards, trainer.session.run.threads) == (case.shards, 1)
    return runs


@pytest.fixture(scope="module")
def reference():
    return programme(1)


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
def test_devices_give_the_bits_of_one(devices, reference, matrix):
    compare("torch", programme(devices), reference, matrix)


def test_another_order_of_additions_gives_other_bits(reference, monkeypatch):
    """The control: were the sums not sensitive to their order, equal digests would say nothing."""
    monkeypatch.setattr(tree.Span, "halves", property(from_left_to_right))
    tree._program.cache_clear()
    try:
        for (case, record), (_, other) in zip(programme(1), reference, strict=True):
            assert record.equal(other) == 0, case.name
            for batch in case.batches:  # and not only because the others' weights are in the state too
                assert f" model.{batch['model']}." in " ".join(record.differences(other)), case.name
    finally:
        tree._program.cache_clear()


def from_left_to_right(node):
    return tree.Span(node.start, node.stop - 1), tree.Span(node.stop - 1, node.stop)
