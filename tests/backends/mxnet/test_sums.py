"""The sums of a shard are those of its own pass, although the host reads them after all passes."""

import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn

import lockstep
from backends.mxnet.models import wrapped

X = np.random.Generator(np.random.PCG64(0)).standard_normal((24, 5)) + 1
Y = np.arange(24.0).reshape(24, 1)


class Measured(nn.Block):
    """Writes the mean of its inputs to a parameter that is averaged; every shard starts from zero."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(1, in_units=5)
        self.mean = self.params.get("mean", shape=(1,), init="zeros", grad_req="null")

    def forward(self, x):
        with autograd.pause():
            self.mean.data(x.ctx)[:] = x.mean()
        return self.layer(x)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_metric_may_be_an_array_that_the_next_shard_writes_to(devices):
    @lockstep.objective
    def loss(block, batch):
        x, y = batch
        return ((block(x) - y) ** 2).mean(), {"mean": block.mean.data(x.ctx)}

    block = Measured()
    block.initialize()
    block.cast("float64")
    with wrapped(block, criterion=loss, devices=devices) as trainer:
        assert len(trainer.devices) == devices
        logs = trainer.step((X, Y))
    np.testing.assert_allclose(logs["mean"], X.mean(), rtol=1e-12)
