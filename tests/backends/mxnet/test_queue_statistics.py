"""Float statistics that are queues: no average over the shards stands for them."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd
from mxnet.gluon import nn

from backends.mxnet.models import wrapped
from lockstep.errors import ModelError

X = np.random.Generator(np.random.PCG64(0)).standard_normal((24, 5)).astype("float32") + 1
Y = np.arange(24) % 3
ROWS = np.random.Generator(np.random.PCG64(1)).standard_normal((48, 5)).astype("float32")


class Queued(nn.Block):
    """Keeps the last examples, as MoCo does."""

    def __init__(self, shape=(48, 5)):
        super().__init__()
        self.layer = nn.Dense(3, in_units=5)
        self.queue = self.params.get("queue", shape=shape, init=mx.init.Constant(nd.array(ROWS)), grad_req="null")

    def forward(self, x):
        queue = self.queue.data(x.ctx)
        outputs = self.layer(x + queue.mean())
        if autograd.is_training():
            with autograd.pause():
                queue[: len(x)] = x
        return outputs


class Filled(Queued):
    """Is written by the script."""

    def forward(self, x):
        return self.layer(x + self.queue.data(x.ctx).mean())


class Running(nn.Block):
    """Statistics of every kind that is averaged."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.BatchNorm(in_channels=5), nn.Dense(3, in_units=5)
        self.means = self.params.get("means", shape=(4, 5), init="zeros", grad_req="null")
        self.table = self.params.get("table", shape=(4, 5), init="ones", grad_req="null")

    def forward(self, x):
        if autograd.is_training():
            with autograd.pause():
                means = self.means.data(x.ctx)
                means[:3] = 0.9 * means[:3] + 0.1 * x.mean(axis=0, keepdims=True).broadcast_to((3, 5))
        return self.layer(self.norm(x)) + self.table.data(x.ctx).mean()


def made(kind):
    mx.random.seed(3)
    block = kind()
    block.initialize(mx.init.Xavier())
    return block


@pytest.mark.parametrize("devices", [1, 2])
def test_a_queue_is_refused(devices):
    with wrapped(made(Queued), devices=devices, shards=4) as trainer:
        assert len(trainer.devices) == devices
        before = trainer.digest()
        with pytest.raises(ModelError) as caught:
            trainer.step((X, Y))
        assert "queue' of shape (48, 5) along axis 0 and leaves other slices unchanged" in str(caught.value)
        assert "Update the buffer in the script between two steps" in str(caught.value)
        assert trainer.digest() == before


def test_with_one_shard_a_queue_is_that_of_the_plain_loop():
    with wrapped(made(Queued), shards=1) as trainer:
        trainer.step((X, Y))
        assert np.array_equal(trainer.model.queue.data().asnumpy(), np.concatenate([X, ROWS[24:]]))


def test_a_queue_that_the_script_fills_gives_one_digest_on_1_and_2_devices():
    found = set()
    for devices in (1, 2):
        block = made(Filled)
        with wrapped(block, devices=devices, shards=4) as trainer:
            assert len(trainer.devices) == devices
            for _ in range(3):
                trainer.step((X, Y))
                block.queue.set_data(nd.concat(nd.array(X), nd.array(ROWS[24:]), dim=0))
            found.add(trainer.digest())
    assert len(found) == 1


def test_running_statistics_are_averaged_as_ever():
    block = made(Running)
    with wrapped(block, shards=4) as trainer:
        for _ in range(5):
            trainer.step((X, Y))
        assert block.means.data().asnumpy()[:3].all()
